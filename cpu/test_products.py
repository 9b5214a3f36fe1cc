"""A product is x Wᵀ + b of the numbers that W stands for, whatever the order and width of W."""

import hashlib
import os
import platform
import runpy
import subprocess
import sys
import weakref

import pytest
import torch

from cpu import CPU, compiled, native
from cpu.testing import is_whole, rounding_of_x, stored
from kernels import Linear
from quant import Quantized, quantize
from testing.pages import ROOT
from testing.tensors import LAYOUTS, stands_for

needs_c = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
AMX = ROOT / ".ci" / "amx.py"


def digest() -> str:
    """Of products by whole numbers, to the bit, of few rows and many."""
    torch.manual_seed(0)
    x = torch.randn(40, 300)
    bits = hashlib.sha256()
    for layout in LAYOUTS:
        w, _ = stored(torch.randn(70, 300), layout)
        if is_whole(w):
            weight = CPU().pack_weight(Linear(w, torch.randn(70)), torch.float32)
            for T in (1, 3, 5, 17, 40):
                bits.update(CPU().linear(x[:T], weight).numpy().tobytes())
    return bits.hexdigest()


def unlike(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of very different sizes."""
    return torch.randn(shape) * 10.0 ** torch.randint(-6, 3, shape[-1:])


def sparse(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape).sign() * (torch.rand(shape) < 0.02)


@needs_c
@pytest.mark.parametrize("layout", [*LAYOUTS, "bfloat16"])
@torch.inference_mode()
def test_the_error_of_a_product_has_one_bound(layout):
    """Of any width, for few rows and many, which may be views: also where numbers are very small,
    or of very different sizes."""
    torch.manual_seed(0)
    numbers = (
        lambda shape: torch.full(shape, 1.1),
        lambda shape: 1e-5 * torch.randn(shape),
        unlike,
        sparse,
    )
    for K, N in ((33, 17), (576, 40)):
        for number in numbers:
            w, W = stored(number((N, K)), layout)
            weight = CPU().pack_weight(Linear(w), torch.float32)
            assert type(weight) is native.Weight
            x = number((70, 2 * K))[:, ::2]
            _, seen_x, _ = stands_for(w, x)
            size = seen_x.abs() @ W.abs().T
            bound = 2e-5 * size + rounding_of_x(w, seen_x, W) + 1e-30
            if number not in (unlike, sparse):
                assert (bound <= 2e-4 * size + 1e-30).all()
            for T in (0, 1, 2, 3, 5, 16, 70):
                y = CPU().linear(x[:T], weight)
                assert y.dtype == torch.float32 and y.shape == (T, N)
                wrong = (y.double() - seen_x[:T] @ W.T).abs() > bound[:T]
                assert not wrong.any(), (K, N, T, number, wrong.nonzero())


@needs_c
@pytest.mark.slow  # C is compiled for other CPUs
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are x86's")
def test_products_by_whole_numbers_have_the_same_bits_on_every_cpu():
    """With AVX2, AVX-VNNI and AVX-512, and with AMX, which is emulated where the CPU has none."""
    commands = {"": [str(AMX)], "x86-64-v3": []}  # LLAMA_MARCH -> what runs the code
    if "avx_vnni" in compiled.cpu_features():
        commands["alderlake"] = []
    if "avx512bw" in compiled.cpu_features():
        commands["skylake-avx512"] = []
    code = "from cpu.test_products import digest, has_tiles; print(has_tiles(), digest())"
    for march, command in commands.items():
        done = subprocess.run(
            [sys.executable, *command, "-c", code],
            env=os.environ | {"LLAMA_MARCH": march},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [str(march == ""), digest()], (march, done.stderr)


@needs_c
def test_tiles_are_not_emulated_where_the_cpu_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "cpu_features", lambda: "flags : avx512f amx_bf16 amx_tile")
    assert runpy.run_path(str(AMX))["environment"](tmp_path) == {}
    assert not any(tmp_path.iterdir())


@needs_c
@torch.inference_mode()
def test_nan_of_x_is_in_its_row_alone():
    for layout in LAYOUTS[:-2]:
        w, _ = stored(torch.randn(20, 100), layout)
        weight = CPU().pack_weight(Linear(w), torch.float32)
        for T in (1, 2, 7, 40):
            x = torch.ones(T, 100)
            for wrong in (torch.nan, torch.inf):
                x[T - 1, 70] = wrong
                y = CPU().linear(x, weight)
                assert not y[T - 1].isfinite().any() and y[: T - 1].isfinite().all(), layout


@torch.inference_mode()
def test_nan_of_fp8_is_in_its_row_alone(compiler):
    """NaN in E4M3, of either sign, in one row of W."""
    q = quantize(torch.randn(20, 100), "fp8")
    q.values.view(torch.uint8)[[3, 4], [7, 99]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    weight = CPU().pack_weight(Linear(q), torch.float32)
    for T in (1, 7, 40):
        y = CPU().linear(torch.randn(T, 100), weight)
        assert y.isnan().any(0).nonzero().flatten().tolist() == [3, 4]
    numbers = CPU().embed(torch.arange(20), weight, torch.float32)
    assert numbers.isnan().any(1).nonzero().flatten().tolist() == [3, 4]


@needs_c
@torch.inference_mode()
def test_weights_are_in_memory_once_and_rows_can_be_looked_up():
    K, N = 160, 40
    indices = torch.tensor([N - 1, 0, N - 1])
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16):
            w, W = stored(torch.randn(N, K, dtype=dtype if layout == 16 else None), layout)
            weight = CPU().pack_weight(Linear(w), dtype)
            rows = CPU().embed(indices, weight, dtype)
            assert rows.dtype == dtype and torch.equal(rows, W[indices].to(dtype))
            packed = sum(x.nbytes for x in weight.tensors.values() if x is not None)
            assert w.nbytes <= packed <= w.nbytes * 48 / N + 96  # complete panels
            values = weakref.ref(w if layout == 16 else w.values)
            del w
            assert values() is None


def test_what_c_cannot_multiply_stays_as_it_is(compiler):
    w = torch.randn(16, 64)
    for weight, dtype in (
        (quantize(w, 8), torch.float64),
        (quantize(w, 8), torch.float16),
        (quantize(w, 4, 64), torch.float64),
        (quantize(w, 4, 20), torch.float32),
        (w.double(), torch.float64),
        (w.half(), torch.float16),
    ):
        linear = Linear(weight)
        assert CPU().pack_weight(linear, dtype) is linear


def test_plain_weights_have_gradients_when_they_are_asked_for():
    for dtype in DTYPES:
        w = torch.randn(24, 16, dtype=dtype)
        b = torch.randn(24, dtype=dtype)
        x = torch.randn(3, 16, dtype=dtype)
        up = torch.ones(3, 24, dtype=dtype)
        assert not CPU().linear(x, Linear(w, b)).requires_grad  # only run: no graph
        for tensor in (w, b, x):
            tensor.requires_grad_()
        CPU().linear(x, Linear(w, b)).backward(up)
        torch.testing.assert_close(w.grad, up.T @ x.detach())
        torch.testing.assert_close(x.grad, up @ w.detach())
        assert torch.equal(b.grad, up.sum(0))


def test_bfloat16_weights_stay_so_beside_float32(monkeypatch):
    full = torch.float32
    brain = torch.bfloat16
    assert CPU().dtypes([brain], full)[1] == (brain if native.library() else full)
    for stored_dtypes, dtype in (
        ([brain], brain),
        ([brain], torch.float64),
        ([brain, full], full),
        ([torch.float16], full),
    ):
        assert CPU().dtypes(stored_dtypes, dtype) == (dtype, dtype)
    monkeypatch.setattr(native, "library", lambda: None)
    assert CPU().dtypes([brain], full) == (full, full)


@needs_c
@torch.inference_mode()
def test_a_zero_that_all_groups_share_is_not_read():
    """Symmetric formats write one zero everywhere. Groups of 32 fall into one call by fours, and
    what is left at the end of a row is multiplied, too."""
    torch.manual_seed(0)
    N, K, group = 40, 32 * 7 + 8, 32
    values = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    scale = torch.rand(N, 8).half()
    x = torch.randn(70, K)
    for zero in (8, 255, 256, -300):
        q = Quantized(
            4,
            values,
            scale,
            zero=torch.full((N, 8), zero, dtype=torch.int16),
            columns=K,
            group=group,
        )
        weight = CPU().pack_weight(Linear(q), torch.float32)
        assert (weight.zero is None) == (abs(zero) <= 255)
        W = q.dequantize(torch.float64)
        size = x.double().abs() @ W.abs().T
        bound = 2e-5 * size + rounding_of_x(q, x, W)
        for T in (1, 3, 6, 70):
            wrong = (CPU().linear(x[:T], weight).double() - x[:T].double() @ W.T).abs()
            assert (wrong <= bound[:T]).all(), (zero, T)
        assert torch.allclose(weight.rows(torch.arange(N)).double(), W, rtol=1e-6)
