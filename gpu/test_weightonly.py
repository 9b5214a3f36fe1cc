"""The products against W as numbers, and what the compiler makes of them."""

import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import GPU, weightonly
from gpu.crosscompile import SHARED
from gpu.test_crosscompile import apart
from gpu.weightonly import (
    FEW,
    PIECES,
    ROWS,
    SHAPES,
    can_multiply,
    plan_product,
    weight_only_product,
)
from kernels import Linear, Ops
from quant import Quantized, dequantize, quantize, rounded_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs the kernels in the interpreter
# of what the terms add up to without their signs
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CASE = dict(
    T=st.one_of(st.integers(1, 9), st.integers(1, 20)),
    N=st.integers(1, 140),
    K=st.integers(1, 9).map(lambda n: 32 * n),
    bits=st.sampled_from([4, 8, "fp8"]),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(list(PIECES)),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)


def exact(q: Quantized) -> torch.Tensor:
    return dequantize(q.values, q.scale.float() if q.zero is None else q.scale, *q[2:]).double()


def near(y: torch.Tensor, x: torch.Tensor, q: Quantized, bias: torch.Tensor | None = None) -> bool:
    x, bias = x.cpu().double(), 0 if bias is None else bias.cpu().double()
    off, terms = (
        (y.cpu().double() - x @ exact(q).T - bias).abs(),
        x.abs() @ exact(q).abs().T + abs(bias),
    )
    return bool((off <= TOLERANCE[y.dtype] * terms).all())


def multiply(
    x: torch.Tensor,
    q: Quantized,
    group: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the kernels."""
    return weight_only_product(
        x, *(part if part is None else part.to(DEVICE) for part in q[:3]), group, bias, out
    )


def guarded(T: int, N: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a result that holds no numbers yet, within room that nobody may touch."""
    whole = torch.full((T * N + 64,), torch.nan, dtype=dtype, device=DEVICE)
    return whole, whole[32:-32].view(T, N)


@settings(deadline=None, max_examples=6)
@given(**CASE)
def test_equals_the_product_with_the_numbers(T, N, K, bits, group, dtype, wide, seed):
    torch.manual_seed(seed)
    q = quantize(torch.randn(N, K) + 0.3 * torch.randn(N, 1), bits, group)
    q = q._replace(scale=q.scale.float() if wide else q.scale)
    x = torch.randn(T, 2 * K, device=DEVICE).to(dtype)[:, :: 2 if wide else 1][:, :K]
    bias, (whole, y) = torch.randn(N, device=DEVICE).to(dtype), guarded(T, N, dtype)
    multiply(x, q, group, bias if wide else None, out=y)
    assert whole.isnan().sum() == 64 and whole[:32].isnan().all() and whole[-32:].isnan().all()
    assert near(y, x, q, bias if wide else None)


@pytest.mark.parametrize(
    "T, dtype",
    [
        (1, torch.bfloat16),
        (17, torch.bfloat16),
        *((T, dtype) for T in (FEW, FEW + 1) for dtype in PIECES),
    ],
)
@pytest.mark.parametrize(
    "bits, group, zeros", [(8, 128, (0, 1)), (4, 32, (-3, 19)), (4, 128, (1990, 2001))]
)
def test_of_whole_numbers_every_term_is_there(bits, group, zeros, T, dtype):
    """All sums are exact: one wrong bit shows. A zero far away is a group whose numbers all have one sign."""
    torch.manual_seed(T)
    N, K = 20, 352
    M = -(-K // group)
    if bits == 8:
        values, scale, zero = (
            torch.randint(-127, 128, (N, K)).to(torch.int8),
            torch.ones(N, 1).bfloat16(),
            None,
        )
    else:
        values, scale = (
            torch.randint(0, 256, (N, K // 2)).to(torch.uint8),
            torch.ones(N, M).bfloat16(),
        )
        zero = torch.randint(*zeros, (N, M)).to(torch.int16)
    q = Quantized(values, scale, zero, K, group)
    x = torch.zeros(T, K).scatter_(1, torch.randint(K, (T, 3)), 1).to(dtype)
    x[:, ::7] = 0.5
    if zeros[0] > 99:
        x[0, -1] = -x[0, :-1].sum()
    bias = torch.randint(-99, 100, (N,)).to(dtype)
    y = multiply(x.to(DEVICE), q, group, bias.to(DEVICE))
    expected = (x.double() @ exact(q).T + bias.double()).to(dtype)
    cut_off = 2.0**-7 if dtype == torch.bfloat16 else 0  # by the interpreter
    torch.testing.assert_close(y.cpu(), expected, rtol=cut_off, atol=0)


@pytest.mark.parametrize("T", [1, FEW + 1])
def test_float32_is_three_pieces(T):
    """1, 2⁻¹⁰ and 2⁻²⁰: each of a number's pieces counts."""
    N = 20 if T == 1 else 520  # many rows' sums: two programs a row
    x, values = torch.zeros(T, 32), torch.randint(1, 128, (N, 32)).to(torch.int8)
    x[:, 5] = 1 + 2**-10 + 2**-20
    y = multiply(x.to(DEVICE), Quantized(values, torch.ones(N, 1), None, 32, 32), 128)
    torch.testing.assert_close(y.cpu(), x @ values.float().T, rtol=3e-7, atol=0)


@settings(deadline=None, max_examples=5)
@given(**CASE)
def test_for_many_rows_w_becomes_numbers_once(T, N, K, bits, group, dtype, wide, seed):
    """To the bit those of quant.dequantize, in several slabs; and for no row nothing is done."""
    torch.manual_seed(seed)
    q, bias = (
        quantize(torch.randn(N, K) + 0.3 * torch.randn(N, 1), bits, group),
        torch.randn(N).to(dtype),
    )
    q = q._replace(scale=q.scale.half() if wide else q.scale)
    parts = [part if part is None else part.to(DEVICE) for part in q[:3]]
    cut_off = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
    torch.testing.assert_close(
        weightonly.as_numbers(*parts, K, group, dtype).cpu(),
        q.rows(slice(None), dtype),
        rtol=cut_off,
        atol=0,
    )
    with mock.patch.object(weightonly, "SLAB", 16 * K), mock.patch.object(Quantized, "rows", None):
        for x in (torch.randn(ROWS + T, K).to(dtype), torch.zeros(0, K).to(dtype)):
            y = GPU().linear(x.to(DEVICE), Linear(Quantized(*parts, *q[3:]), bias.to(DEVICE)))
            assert y.shape == (len(x), N) and y.dtype == dtype and near(y, x, q, bias)


@pytest.mark.parametrize(
    "bits, dtype", [(8, torch.float32), (8, torch.bfloat16), ("fp8", torch.bfloat16)]
)
@pytest.mark.parametrize("T", [1, 16, 17, 40])
def test_inputs_of_8_bits_are_multiplied_as_they_are(bits, dtype, T):
    """The product of quant.rounded_product, by as many rows as the library asks for; another order of columns, too."""
    q, x, bias = (
        quantize(torch.randn(48, 96), bits)._replace(inputs=8),
        torch.randn(T, 96).to(dtype),
        torch.randn(48).to(dtype),
    )
    on = Quantized(*(part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in q))
    y = GPU().linear(x.to(DEVICE), Linear(on, bias.to(DEVICE))).cpu()
    torch.testing.assert_close(
        y, rounded_product(x, q) + bias, rtol=2**-6 if dtype == torch.bfloat16 else 1e-6, atol=1e-2
    )
    order = torch.randperm(96)
    plain, mixed = (
        q._replace(inputs=16),
        q._replace(
            inputs=16, order=order.to(DEVICE), values=q.values.to(DEVICE), scale=q.scale.to(DEVICE)
        ),
    )
    y = GPU().linear(x.to(DEVICE), Linear(mixed, None)).cpu().float()
    torch.testing.assert_close(y, x[:, order].float() @ dequantize(*plain).T, rtol=2**-6, atol=0.1)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("T", [1, 8, 9, 64, 65])
@pytest.mark.parametrize("bits", [4, 8, "fp8"])
@pytest.mark.parametrize("shape", ["1B qkv", "1B down"])
def test_on_a_gpu_at_true_shapes(shape, bits, T):
    N, K = SHAPES[shape]
    q, x = quantize(torch.randn(N, K), bits), torch.randn(T, K, device=DEVICE)
    for dtype in PIECES:
        y = multiply(x.to(dtype), q, q.group if bits == 4 else 128)
        assert near(y, x.to(dtype), q)


@pytest.mark.parametrize(
    "K, group, dtype", [(40, 32, torch.float32), (64, 48, torch.float32), (64, 64, torch.float64)]
)
def test_what_is_not_served_is_multiplied_by_torch(K, group, dtype):
    assert can_multiply(576, 4, 128, torch.bfloat16) and can_multiply(32, 8, 1, torch.float32)
    assert not can_multiply(K, 4, group, dtype)
    x, weight = torch.randn(3, K, dtype=dtype), Linear(quantize(torch.randn(5, K), 4, group))
    assert torch.equal(GPU().linear(x, weight), Ops().linear(x, weight))


# ---- What runs on a GPU only


def execute(code: str, inputs: dict[str, int]) -> dict[str, int]:
    """A few instructions of PTX, on 32-bit registers."""
    registers = dict(inputs)
    value = lambda name: registers[name] if name in registers else int(name, 0)
    lines = [
        line.strip()
        for line in code.strip("{} \n").split(";")
        if ".reg" not in line and line.strip()
    ]
    for name, out, *arguments in (re.split(r",?\s+", line) for line in lines):
        a, b, *rest = (value(argument) for argument in arguments)
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
        numbers = (
            torch.tensor([out[f"${i}"] for i in range(4)], dtype=torch.int64)
            .to(torch.int32)
            .view(torch.bfloat16)
        )
        assert numbers.tolist() == [128 + (b & 15) for b in four] + [128 + (b >> 4) for b in four]


def table() -> list[list[int]]:
    cases = [
        (1, "8B o", 4, "bf16", 90),
        (1, "1B o", 4, "bf16", 80),
        (64, "8B qkv", 4, "bf16", 90),
        (1, "8B gate, up", 4, "bf16", 90),
        (512, "8B o", 4, "bf16", 90),
        (512, "8B o", 8, "bf16", 90),
        (16, "8B qkv", 8, "bf16", 80),
        (1, "8B o", "fp8", "bf16", 90),
        (64, "8B o", "fp8", "bf16", 90),
        (5, "8B down", 8, "fp32", 90),
    ]
    return [
        [T, arch, *weightonly.compile_product(T, *SHAPES[shape], bits, 128, dtype, arch)]
        for T, shape, bits, dtype, arch in cases
    ]


@pytest.mark.meanwhile(apart, "gpu.test_weightonly", "table")
def test_nothing_spills_and_all_fits(meanwhile):
    rows = meanwhile()
    for T, arch, registers, spills, shared, ahead, programs, mma, wgmma in rows:
        assert spills == 0 and shared <= SHARED[arch]
        assert programs >= (2 if T == 1 else 1) and (ahead > 0 or T > ROWS)
        assert (wgmma > 0) == (arch == 90 and FEW < T <= ROWS) and (mma > 0) == (
            not wgmma and T <= ROWS
        )
    assert [row[6] for row in rows if row[0] == 1] == [3, 2, 2, 4]  # 8B o: 16 rows
    assert rows[-1][-2] == 3 * 4  # three for each of x, of 64 columns and 16 rows


def test_every_plan_has_work_for_all_processors():
    assert [plan_product(1, N, 4096, 4, 128).rows for N in (2048, 4096, 6144, 28672)] == [
        16,
        16,
        16,
        32,
    ]
    for N, K in SHAPES.values():
        for bits in (4, 8):
            for T in (1, FEW, FEW + 1, ROWS):
                cut = plan_product(T, N, K, bits, 128)
                assert -(-N // cut.rows) * cut.shares >= 120 and cut.shares <= max(
                    1, K // cut.group
                )
