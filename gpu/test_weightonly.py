"""The products against W as numbers, and what the compiler makes of them."""

import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import GPU, weightonly
from gpu.tuning import FEW, ROWS, plan_product
from gpu.weightonly import PIECES, can_multiply, weight_only_product
from kernels import Linear, Ops
from quant import Quantized, dequantize, quantize, rounded_product

pytestmark = pytest.mark.gpu_interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs kernels in the interpreter
# of what the terms add up to without their signs
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CASE = dict(
    T=st.one_of(st.integers(1, 9), st.integers(1, 20)),
    N=st.integers(1, 70),
    K=st.integers(1, 5).map(lambda n: 32 * n),
    bits=st.sampled_from([4, 8, "fp8"]),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(list(PIECES)),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)


def exact(q: Quantized) -> torch.Tensor:
    return dequantize(q.values, q.scale.float() if q.zero is None else q.scale, *q[2:]).double()


def is_near(
    y: torch.Tensor, x: torch.Tensor, q: Quantized, bias: torch.Tensor | None = None
) -> bool:
    x = x.cpu().double()
    bias = torch.zeros(()) if bias is None else bias.cpu().double()
    error = (y.cpu().double() - x @ exact(q).T - bias).abs()
    terms = x.abs() @ exact(q).abs().T + bias.abs()
    return bool((error <= TOLERANCE[y.dtype] * terms).all())


def on_device(q: Quantized) -> list[torch.Tensor | None]:
    return [None if part is None else part.to(DEVICE) for part in q[:3]]


def multiply(
    x: torch.Tensor,
    q: Quantized,
    group: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the kernels."""
    return weight_only_product(x, *on_device(q), group, bias, out)


@settings(deadline=None, max_examples=3)
@given(**CASE)
def test_product_equals_that_with_the_numbers(T, N, K, bits, group, dtype, wide, seed):
    """It fills the result, and nothing around it."""
    torch.manual_seed(seed)
    q = quantize(torch.randn(N, K) + 0.3 * torch.randn(N, 1), bits, group)
    q = q._replace(scale=q.scale.float() if wide else q.scale)
    x = torch.randn(T, 2 * K, device=DEVICE).to(dtype)[:, :: 2 if wide else 1][:, :K]
    bias = torch.randn(N, device=DEVICE).to(dtype) if wide else None
    buffer = torch.full((T * N + 64,), torch.nan, dtype=dtype, device=DEVICE)
    y = buffer[32:-32].view(T, N)
    multiply(x, q, group, bias, out=y)
    assert buffer.isnan().sum() == 64
    assert buffer[:32].isnan().all() and buffer[-32:].isnan().all()
    assert is_near(y, x, q, bias)


@pytest.mark.parametrize("T, dtype", [(1, torch.bfloat16), *((FEW + 1, dtype) for dtype in PIECES)])
@pytest.mark.parametrize(
    "bits, group, zeros", [(8, 128, (0, 1)), (4, 32, (-3, 19)), (4, 128, (1990, 2001))]
)
def test_whole_numbers_add_up_exactly(bits, group, zeros, T, dtype):
    """One wrong bit shows. A zero far away is a group whose numbers all have one sign."""
    torch.manual_seed(T)
    N = 20
    K = 352
    M = -(-K // group)
    if bits == 8:
        values = torch.randint(-127, 128, (N, K)).to(torch.int8)
        scale = torch.ones(N, 1).bfloat16()
        zero = None
    else:
        values = torch.randint(0, 256, (N, K // 2)).to(torch.uint8)
        scale = torch.ones(N, M).bfloat16()
        zero = torch.randint(*zeros, (N, M)).to(torch.int16)
    q = Quantized(values, scale, zero, K, group)
    x = torch.zeros(T, K).scatter_(1, torch.randint(K, (T, 3)), 1).to(dtype)
    x[:, ::7] = 0.5
    if zeros[0] > 99:
        x[0, -1] = -x[0, :-1].sum()
    bias = torch.randint(-99, 100, (N,)).to(dtype)
    y = multiply(x.to(DEVICE), q, group, bias.to(DEVICE))
    wanted = (x.double() @ exact(q).T + bias.double()).to(dtype)
    cut_off = 2.0**-7 if dtype == torch.bfloat16 else 0  # by the interpreter
    torch.testing.assert_close(y.cpu(), wanted, rtol=cut_off, atol=0)


def test_float32_is_three_pieces():
    """1, 2⁻¹⁰ and 2⁻²⁰: each of a number's pieces counts."""
    for T, N in ((1, 20), (FEW + 1, 520)):  # 520 rows' sums: two programs a row
        x = torch.zeros(T, 32)
        x[:, 5] = 1 + 2**-10 + 2**-20
        values = torch.randint(1, 128, (N, 32)).to(torch.int8)
        y = multiply(x.to(DEVICE), Quantized(values, torch.ones(N, 1), None, 32, 32), 128)
        torch.testing.assert_close(y.cpu(), x @ values.float().T, rtol=3e-7, atol=0)


def test_the_largest_fp8_scale():
    """The largest float32 becomes 448 times a scale that is rounded up, but not beyond float32."""
    most = torch.finfo(torch.float32).max
    q = quantize(torch.tensor([[448.0, *[0.5] * 30, -448.0], [-most, *[1e37] * 30, most]]), "fp8")
    wanted = dequantize(*q)
    assert wanted[0, 0] == 448 and most * 0.9 < wanted[1, 31] <= most
    for T in (1, FEW + 1, ROWS + 1):
        x = torch.eye(32, device=DEVICE)[:1].repeat(T, 1)
        y = multiply(x, q, 128).cpu()
        torch.testing.assert_close(y, wanted[:, 0].repeat(T, 1), rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=2)
@given(**CASE)
def test_many_rows_multiply_dequantized_weights(T, N, K, bits, group, dtype, wide, seed):
    """To the bit those of quant.dequantize, in several slabs; and for no row nothing is done."""
    torch.manual_seed(seed)
    q = quantize(torch.randn(N, K) + 0.3 * torch.randn(N, 1), bits, group)
    q = q._replace(scale=q.scale.half() if wide else q.scale)
    parts = on_device(q)
    bias = torch.randn(N).to(dtype)
    w = weightonly.dequantize_rows(*parts, K, group, dtype).cpu()
    cut_off = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
    torch.testing.assert_close(w, q.rows(slice(None), dtype), rtol=cut_off, atol=0)
    weight = Linear(Quantized(*parts, *q[3:]), bias.to(DEVICE))
    with mock.patch("gpu.tuning.SLAB", 16 * K), mock.patch.object(Quantized, "rows", None):
        for x in (torch.randn(ROWS + T, K).to(dtype), torch.zeros(0, K).to(dtype)):
            y = GPU().linear(x.to(DEVICE), weight)
            assert y.shape == (len(x), N) and y.dtype == dtype and is_near(y, x, q, bias)


def test_8_bit_inputs_multiply_by_tensor_cores():
    """The product of quant.rounded_product, by as many rows as the library asks for."""
    for bits, dtype in ((8, torch.float32), ("fp8", torch.bfloat16)):
        for T in (1, 16, 17):
            q = quantize(torch.randn(48, 96), bits)._replace(input_bits=8)
            x = torch.randn(T, 96).to(dtype)
            bias = torch.randn(48).to(dtype)
            weight = Linear(Quantized(*on_device(q), *q[3:]), bias.to(DEVICE))
            try:
                y = GPU().linear(x.to(DEVICE), weight).cpu()
            except RuntimeError as error:
                if DEVICE == "cpu" and "per-tensor scaling" in str(error):
                    pytest.skip("on a CPU this PyTorch has FP8 products with one scale only")
                raise
            rtol = 2**-6 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(y, rounded_product(x, q) + bias, rtol=rtol, atol=1e-2)


def test_columns_in_another_order():
    q = quantize(torch.randn(48, 96), 8)
    x = torch.randn(3, 96)
    order = torch.randperm(96)
    mixed = Quantized(*on_device(q), *q[3:])._replace(order=order.to(DEVICE))
    y = GPU().linear(x.to(DEVICE), Linear(mixed, None)).cpu()
    torch.testing.assert_close(y, x[:, order] @ dequantize(*q).T, rtol=1e-4, atol=1e-3)


def test_shapes_that_no_kernel_takes_are_multiplied_by_torch():
    assert can_multiply(576, 4, 128, torch.bfloat16) and can_multiply(32, 8, 1, torch.float32)
    for K, group, dtype in (
        (40, 32, torch.float32),
        (64, 48, torch.float32),
        (64, 64, torch.float64),
    ):
        assert not can_multiply(K, 4, group, dtype)
        x = torch.randn(3, K, dtype=dtype)
        weight = Linear(quantize(torch.randn(5, K), 4, group))
        assert torch.equal(GPU().linear(x, weight), Ops().linear(x, weight))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("bits", [4, 8, "fp8"])
def test_products_on_a_gpu(bits):
    for N, K in ((3072, 2048), (2048, 8192)):
        q = quantize(torch.randn(N, K), bits)
        for T in (1, 8, 9, 64, 65):
            for dtype in PIECES:
                x = torch.randn(T, K, device=DEVICE).to(dtype)
                assert is_near(multiply(x, q, q.group if bits == 4 else 128), x, q)


# ---- Plans and the compiler


def execute(code: str, inputs: dict[str, int]) -> dict[str, int]:
    """A few instructions of PTX, on 32-bit registers."""
    registers = dict(inputs)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.split(r"[;{}]", code):
        if not line.strip() or ".reg" in line:
            continue
        name, out, *arguments = re.split(r",?\s+", line.strip())
        a, b, *rest = map(value, arguments)
        if name == "prmt.b32":
            eight = a.to_bytes(4, "little") + b.to_bytes(4, "little")
            registers[out] = sum(eight[rest[0] >> 4 * i & 15] << 8 * i for i in range(4))
        elif name == "lop3.b32":  # bit by bit, the table's entry number 4 a + 2 b + c
            entries = [4 * (a >> i & 1) + 2 * (b >> i & 1) + (rest[0] >> i & 1) for i in range(32)]
            registers[out] = sum((rest[1] >> entry & 1) << i for i, entry in enumerate(entries))
        elif name == "shr.b32":
            registers[out] = a >> b
        else:
            raise NotImplementedError(name)
    return registers


def test_the_assembly_makes_numbers_of_all_bytes():
    for byte in range(256):
        four = [byte, (byte * 7 + 3) % 256, 255 - byte, byte ^ 0x5A]
        out = execute(weightonly.NIBBLES.value, {"$4": int.from_bytes(bytes(four), "little")})
        words = torch.tensor([out[f"${i}"] for i in range(4)], dtype=torch.int64)
        numbers = words.to(torch.int32).view(torch.bfloat16)
        assert numbers.tolist() == [128 + (b & 15) for b in four] + [128 + (b >> 4) for b in four]


def test_plans_have_work_for_all_processors():
    rows = [plan_product(1, N, 4096, 4, 128).rows for N in (2048, 4096, 6144, 28672)]
    assert rows == [16, 16, 16, 32]
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 2048), (2048, 8192)]
    for N, K in shapes:
        for bits in (4, 8):
            for T in (1, FEW, FEW + 1, ROWS):
                cut = plan_product(T, N, K, bits, 128)
                assert -(-N // cut.rows) * cut.shares >= 120
                assert cut.shares <= max(1, K // cut.group)
