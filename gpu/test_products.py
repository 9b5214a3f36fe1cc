"""The products against W as numbers, and what the compiler makes of them."""

from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from conftest import examples
from gpu import GPU, fused, in_order, products
from gpu.products import DTYPES, Stored, multiplier, stored_product
from gpu.tuning import FEW, ROWS, plan_product
from kernels import Linear, Ops
from quant import FORMATS, Quantized, quantize, rounded_product
from testing.tensors import LAYOUTS, laid_out, stands_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # a sigmoid that is 0
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs kernels in the interpreter
# of what the terms add up to without their signs
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CASE = dict(
    T=st.one_of(st.integers(1, 9), st.integers(1, 20)),
    N=st.integers(1, 35).map(lambda n: 2 * n),
    K=st.integers(1, 5).map(lambda n: 32 * n),
    layout=st.sampled_from(LAYOUTS),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)


def assert_near(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor | Quantized, bias: torch.Tensor | None
) -> None:
    """y is x Wᵀ + bias, or SwiGLU of it where it is half as wide."""
    wide, x, size = stands_for(w, x)
    wanted = x @ wide.T
    if bias is not None:
        wanted = wanted + bias.double()
        size = size + bias.double().abs()
    if y.shape[1] < len(wide):
        gate, up = wanted.chunk(2, -1)
        gate_size, up_size = size.chunk(2, -1)
        wanted = gate * gate.sigmoid() * up
        size = 2 * wanted.abs() + 1.1 * gate_size * (up.abs() + 0.1 * up_size)
        size += gate.abs() * up_size
    error = (y.cpu().double() - wanted).abs()
    assert (error <= TOLERANCE[y.dtype] * size + 1e-6).all()


def on_device(w: Any) -> Any:
    if isinstance(w, Quantized):
        return Quantized(*map(on_device, w))
    return w.to(DEVICE) if isinstance(w, torch.Tensor) else w


def stored(w: torch.Tensor | Quantized, bias: torch.Tensor | None = None) -> Stored:
    return Stored.of(Linear(on_device(w), on_device(bias)))


def multiply(
    x: torch.Tensor, w: torch.Tensor | Quantized, bias: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """By the kernels."""
    return stored_product(x.to(DEVICE), stored(w, bias), **options)


@examples(8)
@given(swiglu=st.booleans(), **CASE)
def test_product_equals_that_with_the_numbers(T, N, K, layout, group, dtype, wide, seed, swiglu):
    """It fills the result, and nothing around it; and no share is left to be counted."""
    torch.manual_seed(seed)
    w = laid_out(torch.randn(N, K).to(dtype) + 0.3, layout, group)
    if isinstance(w, Quantized):
        w = w._replace(scale=w.scale.float() if wide else w.scale)
    x = torch.randn(T, 2 * K).to(dtype)[:, :: 2 if wide else 1][:, :K]
    bias = torch.randn(N).to(dtype) if wide else None
    width = N // 2 if swiglu else N
    buffer = torch.full((T * width + 64,), torch.nan, dtype=dtype, device=DEVICE)
    original = torch.Tensor.new_empty

    def new_empty(x, *shape, **options):
        """The interpreter, too, calls it: with options."""
        return original(x, *shape, **options) if options else buffer[32:-32].view(shape)

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        y = multiply(in_order(x, Linear(w)), w, bias, swiglu=swiglu)
    assert buffer.isnan().sum() == 64  # and none in y
    assert_near(y, x, w, bias)
    assert not products.arrivals_on(y.device).any()


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(
    "layout, off", [*product((8, 4, "nf4", "INT8 with zeros"), [""]), (4, "apart")]
)
def test_shares_of_the_columns_add_up(layout, off, swiglu, monkeypatch):
    """Few tiles of many columns: several programs a tile, twice, as the counters allow."""
    monkeypatch.setenv("LLAMA_GPU_OFF", off)
    torch.manual_seed(0)
    w = laid_out(torch.randn(136, 1024), layout, 64)
    assert plan_product(FEW + 1, 136, 1024, w.bits, 64 * (w.scale.shape[1] > 1), 4).shares > 2
    x = torch.randn(FEW + 1, 1024)
    apart = []
    launch = InterpretedFunction.run

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        apart.append(kernel.fn.__name__ == "_product" and arguments[1] is not None)
        launch(kernel, *arguments, **options)

    with mock.patch.object(InterpretedFunction, "run", run):
        ys = [multiply(x, w, swiglu=swiglu) for _ in range(2)]
    assert any(apart) == (layout in (4, "nf4") and not off)
    assert torch.equal(*ys)
    assert_near(ys[0], x, w, None)


@pytest.mark.parametrize("T, dtype", [(1, torch.bfloat16), *((FEW + 1, dtype) for dtype in DTYPES)])
@pytest.mark.parametrize(
    "bits, group, zeros", [(8, 352, (0, 1)), (4, 32, (-3, 19)), (4, 128, (1990, 2001))]
)
def test_whole_numbers_add_up_exactly(bits, group, zeros, T, dtype):
    """One wrong bit shows. A zero far away is a group whose numbers all have one sign."""
    torch.manual_seed(T)
    N = 20
    K = 352
    M = -(-K // group)
    zero = None
    if bits == 8:
        values = torch.randint(-127, 128, (N, K)).to(torch.int8)
    else:
        values = torch.randint(0, 256, (N, K // 2)).to(torch.uint8)
        zero = torch.randint(*zeros, (N, M)).to(torch.int16)
    q = Quantized(bits, values, torch.ones(N, M).bfloat16(), zero=zero, columns=K, group=group)
    x = torch.zeros(T, K).scatter_(1, torch.randint(K, (T, 3)), 1).to(dtype)
    x[:, ::7] = 0.5
    if zeros[0] > 99:
        x[0, -1] = -x[0, :-1].sum()
    bias = torch.randint(-99, 100, (N,)).to(dtype)
    y = multiply(x, q, bias)
    wanted = (x.double() @ q.dequantize().double().T + bias.double()).to(dtype)
    cut_off = 2.0**-7 if dtype == torch.bfloat16 else 0  # by the interpreter
    torch.testing.assert_close(y.cpu(), wanted, rtol=cut_off, atol=0)


def test_the_largest_fp8_scale():
    """The largest float32 becomes 448 times a scale that is rounded up, but not beyond float32."""
    most = torch.finfo(torch.float32).max
    q = quantize(torch.tensor([[448.0, *[0.5] * 30, -448.0], [-most, *[1e37] * 30, most]]), "fp8")
    wanted = q.dequantize()
    assert wanted[0, 0] == 448 and most * 0.9 < wanted[1, 31] <= most
    for T in (1, FEW + 1, ROWS + 1):
        x = torch.eye(32)[:1].repeat(T, 1)
        y = GPU().linear(x.to(DEVICE), Linear(on_device(q))).cpu()
        torch.testing.assert_close(y, wanted[:, 0].repeat(T, 1), rtol=1e-6, atol=0)


@examples(4)
@given(**CASE)
def test_many_rows_multiply_dequantized_weights(T, N, K, layout, group, dtype, wide, seed):
    """To the bit those of quant.dequantize; and for no row nothing is done.

    In any groups and of any width, 17 columns more.
    """
    torch.manual_seed(seed)
    K += 17
    w = laid_out(torch.randn(N, K), layout, group - 5 * wide)
    if not isinstance(w, Quantized) or w.input_bits == 8:
        return
    numbers = products.dequantized(stored(w), dtype).cpu()
    cut_off = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
    wanted = w._replace(order=None).dequantize(dtype)
    torch.testing.assert_close(numbers, wanted, rtol=cut_off, atol=0)
    bias = torch.randn(N).to(dtype)
    weight = Linear(on_device(w), bias.to(DEVICE))
    with mock.patch.object(Quantized, "rows", None):
        for x in (torch.randn(ROWS + T, K).to(dtype), torch.zeros(0, K).to(dtype)):
            y = GPU().linear(x.to(DEVICE), weight)
            assert y.shape == (len(x), N) and y.dtype == dtype
            assert_near(y, x, w, bias)


@pytest.mark.parametrize("bits", [8, "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_rounded_as_weights_are(bits, dtype):
    """To the bit: ties, the smallest numbers, rows of zeros, and the largest."""
    torch.manual_seed(0)
    x = torch.randn(9, 200).to(dtype)
    x[1] = 0
    x[2] *= 1e-4
    x[3, 0] = 448
    x[3, 1:] = (torch.arange(199) / 8).to(dtype)
    x[4, 0] = 127
    x[4, 1:] = (torch.arange(199) / 2 - 50).to(dtype)
    x[5, 0] = 448
    x[5, 1:] = (torch.arange(199) / 1024).to(dtype)
    x[6, 0] = torch.finfo(dtype).max
    wanted, scale = FORMATS[bits].round(x)
    for kind in (wanted.dtype, torch.float32):
        values, found = fused.round_inputs(x.to(DEVICE), bits, kind)
        assert torch.equal(found.cpu(), scale.float())
        assert torch.equal(values.cpu().float(), wanted.float())


@pytest.mark.parametrize("bits", [8, "fp8"])
def test_8_bit_inputs(bits):
    """The product of quant.rounded_product, by a launch for few rows, and by torch for many."""
    q = quantize(torch.randn(48, 640), bits)._replace(input_bits=8)
    bias = torch.randn(48)
    for dtype in (torch.float32, torch.bfloat16):
        for T in (1, FEW + 1, ROWS + 1):
            x = torch.randn(T, 640).to(dtype)
            x[:, -1] = 9  # the largest
            weight = Linear(on_device(q), bias.to(dtype).to(DEVICE))
            try:
                y = GPU().linear(x.to(DEVICE), weight).cpu()
            except RuntimeError as error:
                if DEVICE == "cpu" and "per-tensor scaling" in str(error):
                    continue  # on a CPU this PyTorch has FP8 products with one scale only
                raise
            rtol = 2**-6 if dtype == torch.bfloat16 else 1e-6
            wanted = rounded_product(x, q) + bias.to(dtype)
            torch.testing.assert_close(y, wanted, rtol=rtol, atol=2e-2 if rtol > 1e-3 else 1e-4)


@pytest.mark.parametrize(
    "layout, T, expected",
    [
        (8, 1, 1),
        (4, FEW + 1, 1),
        ("nf4", 1, 1),
        ("nf4", ROWS, 1),
        ("INT8 in groups", 1, 1),
        ("INT8 with zeros", ROWS, 1),
        ("nf4", ROWS + 1, 1),  # and torch's product
        ("INT8 by INT8", 1, 2),  # inputs are rounded before
        ("FP8 by FP8", FEW + 1, 2),
        ("INT8 by INT8", ROWS + 1, 2),  # and torch's product
    ],
)
def test_a_product_is_a_launch_or_two(layout, T, expected):
    w = on_device(laid_out(torch.randn(48, 96), layout, 32))
    x = torch.randn(T, 96, device=DEVICE)
    launch = InterpretedFunction.run
    with mock.patch.object(InterpretedFunction, "run", autospec=True, side_effect=launch) as runs:
        GPU().linear(x, Linear(w))
    assert runs.call_count == expected


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize("layout", [16, 8, 4, "nf4"])
def test_a_program_reads_each_row_of_x_once(layout):
    """Its tiles have eight columns and more, whose other columns are zeros. A copy of x, its odd
    columns apart, is read once, too."""
    original = InterpreterBuilder.create_masked_load
    launch = InterpretedFunction.run
    for T in (1, 3, FEW + 1):
        x = torch.randn(T, 512).half()
        read = 0
        start = 0  # of x, or of the copy

        def run(kernel: Any, *arguments: Any, **options: Any) -> None:
            nonlocal start
            start = arguments[0].untyped_storage().data_ptr()
            launch(kernel, *arguments, **options)

        def load(builder: Any, pointers: Any, mask: Any, *more: Any) -> Any:
            nonlocal read
            offset = pointers.data[mask.data].astype(np.int64) - start
            of_x = (offset >= 0) & (offset < x.nbytes)
            read += of_x.sum() * pointers.get_element_ty().primitive_bitwidth // 8
            return original(builder, pointers, mask, *more)

        with (
            mock.patch.object(InterpreterBuilder, "create_masked_load", load),
            mock.patch.object(InterpretedFunction, "run", run),
        ):
            multiply(x, laid_out(torch.randn(16, 512).half(), layout, 64))
        assert read == x.nbytes


def test_a_part_of_a_wider_weight_is_left_to_torch():
    w = torch.randn(48, 128, device=DEVICE).half()[:, :96]
    x = torch.randn(3, 96, device=DEVICE).half()
    assert torch.equal(GPU().linear(x, Linear(w)), Ops().linear(x, Linear(w)))


def test_what_no_kernel_takes_is_multiplied_by_torch():
    """Odd widths and groups, in numbers that a kernel makes; float64, plainly."""
    for K, group, dtype in (
        (40, 32, torch.float32),
        (64, 48, torch.float32),
        (64, 64, torch.float64),
    ):
        w = quantize(torch.randn(6, K), 4, group)
        assert multiplier(torch.zeros(3, K, dtype=dtype), stored(w)) != "kernel"
        x = torch.randn(3, K, dtype=dtype)
        for found, wanted in zip(outputs(GPU(), x, w), outputs(Ops(), x, w)):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def outputs(ops: Ops, x: torch.Tensor, w: Quantized) -> list[torch.Tensor]:
    return [ops.linear(x, Linear(w)), ops.swiglu(x, Linear(w))]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_on_a_gpu(layout):
    for N, K in ((3072, 2048), (2048, 8192)):
        w = laid_out(torch.randn(N, K), layout, 64)
        for T in (1, 8, 9, 64, 65):
            for dtype in DTYPES:
                x = torch.randn(T, K).to(dtype)
                y = GPU().linear(x.to(DEVICE), Linear(on_device(w)))
                assert_near(y, x, w, None)


# ---- Plans and the compiler


def test_plans_have_work_for_all_processors():
    rows = [plan_product(1, N, 4096, 4, 128).rows for N in (2048, 4096, 6144, 28672)]
    assert rows == [16, 16, 16, 32]
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 2048), (2048, 8192)]
    for N, K in shapes:
        for kind in (16, 8, 4, "nf4"):
            for T in (1, FEW, FEW + 1, ROWS):
                cut = plan_product(T, N, K, kind, 128)
                assert -(-N // cut.rows) * cut.shares >= 120
                assert cut.shares <= max(1, K // cut.piece)
