"""A product is x Wᵀ + b of the numbers that W stands for, whatever the order and the width that W is stored in."""

import weakref
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

import cpu
import kernels
from cpu import CPU, Packed, native
from kernels import Linear
from quant import Quantized, quantize
from test_kernels import LAYOUTS, laid_out, stands_for

ROUNDING = {torch.float64: 2e-13, torch.float32: 2e-5, torch.bfloat16: 2.0**-7}  # of Σ|x||w|
SHAPES = [(1, 5), (8, 1), (33, 17), (64, 48), (1024, 33), (1025, 31)]  # K, N


def whole(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers so small that every partial sum is exact, also in 16 bits: a single wrong term shows."""
    return torch.randint(-1, 2, shape).to(dtype)


def stored(
    w: torch.Tensor, layout: int | str, group: int = 64
) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    """W [N, K] in this layout, and the numbers that it stands for."""
    q = laid_out(w, layout, group)
    return q, stands_for(q, w[:1])[0]


def expected(bits: int | str, dtype: torch.dtype, compiler: bool) -> type:
    """The path that a weight takes is the type that `prepare` gives it."""
    if dtype not in (torch.float32, torch.bfloat16) or bits != 16 and not compiler:
        return Linear
    mkldnn = torch.backends.mkldnn.is_available()
    if dtype == torch.bfloat16:
        mkldnn = mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native.Weight if compiler else Packed if mkldnn else Linear


@cache
def numbers(kind: int, K: int, N: int) -> tuple[torch.Tensor, ...]:
    """A weight [N, K], wide rows [70, 2 K] and a bias [N]."""
    torch.manual_seed(kind)
    randn, rand = torch.randn, torch.rand
    number = (
        randn,
        lambda *shape: torch.full(shape, 1.1),
        lambda *shape: rand(*shape).exp2() * 1.7,
        lambda *shape: randn(*shape) * 10.0 ** torch.randint(-6, 3, shape[-1:]),
        lambda *shape: randn(*shape).sign() * (rand(*shape) < 0.02),
    )[kind]
    return number(N, K), number(70, 2 * K), randn(N)


@pytest.mark.parametrize(
    "bits, dtype",
    [
        (bits, dtype)
        for bits in LAYOUTS
        for dtype in ROUNDING
        if dtype == torch.float32 or bits in (16, 8, 4)
    ],
)
@torch.inference_mode()
def test_the_error_of_a_product_has_one_bound(bits, dtype, compiler):
    """Plain or prepared, of any width, with C and without, for few rows and many, which may be views. Equal numbers,
    numbers of one sign, or of very different sizes add up worst.
    """
    ops = CPU()
    for K, N in ((1, 5), (33, 17), (160, 16), (576, 40), (4096, 33)):
        for kind in range(5):
            w, x, bias = numbers(kind, K, N)
            w, W = stored(w.to(dtype) if bits == 16 else w, bits)
            ready = ops.prepare(plain := Linear(w, bias := bias.to(dtype)), dtype, "o")
            assert type(ready) is expected(bits, dtype, compiler)
            rows, sizes = x.to(dtype)[:, ::2], (0, 1, 2, 3, 5, 7, 16, 33, 70)
            _, seen, _ = stands_for(w, rows)
            right, size = torch.cat([(seen @ W.T + bias.double())[:T] for T in sizes]), seen.abs()
            rounding = max(ROUNDING[dtype], ROUNDING[torch.float32] * (" by " in str(bits)))
            for weight in [plain] * (ready is not plain) + [ready]:
                if bits in (4, "INT4 in order") and isinstance(weight, native.Weight):
                    order = (
                        torch.arange(K) if w.order is None else w.order
                    )  # x counts 2^-8 of its group's largest
                    size = [
                        x.maximum(x.amax(1, keepdim=True) / 2**8)
                        for x in size[:, order].split(64, 1)
                    ]
                    size = torch.cat(size, 1)[:, order.argsort()]
                most = torch.cat([(size @ W.abs().T + bias.double().abs())[:T] for T in sizes])
                y = [ops.linear(rows[:T], weight) for T in sizes]
                assert all(part.dtype == dtype for part in y) and [part.shape for part in y] == [
                    (T, N) for T in sizes
                ]
                wrong = (torch.cat(y).double() - right).abs() > rounding * most + 1e-30
                assert not wrong.any(), (K, N, type(weight), wrong.nonzero())


@pytest.mark.parametrize("bits", LAYOUTS[:-2])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_does_not_become_a_number(bits, wrong, compiler):
    """In its own row; the other rows do not see it."""
    ops, x = CPU(), torch.ones(40, 100)
    ready = ops.prepare(Linear(stored(torch.randn(20, 100), bits)[0]), torch.float32, "o")
    for T in (1, 2, 3, 7, 40):
        damaged = x[:T].clone()
        damaged[T - 1, 70] = wrong
        y = ops.linear(damaged, ready)
        assert not y[T - 1].isfinite().any() and y[: T - 1].isfinite().all()


@torch.inference_mode()
def test_a_weight_that_is_no_number_makes_none(compiler):
    """NaN in E4M3, of either sign, in one row of W."""
    q, x = quantize(torch.randn(20, 100), "fp8"), torch.randn(40, 100)
    q.values.view(torch.uint8)[[3, 4], [7, 99]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    ops, ready = CPU(), CPU().prepare(Linear(q), torch.float32, "embed")
    for T in (1, 7, 40):
        assert ops.linear(x[:T], ready).isnan().any(0).nonzero().flatten().tolist() == [3, 4]
    assert ops.embed(torch.arange(20), ready, torch.float32).isnan().any(
        1
    ).nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("K, N", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_not_a_term_is_wrong(K, N, bias, dtype, compiler):
    torch.manual_seed(K + N)
    w, b = whole(N, K, dtype=dtype), whole(N, dtype=dtype) if bias else None
    ops, W, more = CPU(), w.double(), 0 if b is None else b.double()
    ready = ops.prepare(plain := Linear(w, b), dtype, "o")
    for weight in [plain] * (ready is not plain) + [ready]:
        wide = whole(5, K + 20, dtype=dtype)
        views = [
            wide[:, 3 : K + 3],
            wide[::2, :K],
            whole(K, 5, dtype=dtype).T,
            wide[:1, :1].expand(3, K),
        ]
        rows = whole(20, K, dtype=dtype)
        xs = [*(rows[:T] for T in range(21)), *views]
        ys = [ops.linear(x, weight) for x in xs]
        assert all(
            y.dtype == dtype and y.shape == (len(x), N) and y.is_contiguous()
            for x, y in zip(xs, ys)
        )
        assert torch.equal(torch.cat(ys).double(), torch.cat(xs).double() @ W.T + more)


def held(weight: Any) -> int:
    """Bytes of a prepared weight, as far as they are known."""
    if isinstance(weight, native.Weight):
        return sum(part.nbytes for part in weight.held)
    return (weight.plain if isinstance(weight, Packed) else weight.weight).nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "bits, K, N",
    [
        (16, 16, 20),
        (8, 64, 40),
        (8, 33, 17),
        (8, 1, 5),
        (4, 64, 48),
        (4, 33, 17),
        (4, 160, 16),
        *((layout, 160, 48) for layout in LAYOUTS[3:]),
    ],
)
@torch.inference_mode()
def test_weights_are_in_memory_once_and_their_rows_can_be_looked_up(bits, K, N, dtype, compiler):
    w, W = stored(torch.randn(N, K).to(dtype) if bits == 16 else torch.randn(N, K), bits)
    ops, plain, which = CPU(), w.nbytes, torch.tensor([N - 1, 0, N - 1])
    ready = ops.prepare(Linear(w), dtype, "embed")
    assert torch.equal(ops.embed(which, ready, dtype), W[which].to(dtype))
    assert ops.embed(which, ready, dtype).dtype == dtype
    wider = (
        w.scale.nbytes if bits != 16 and w.scale.dtype == torch.float16 else 0
    )  # C has them as float32
    assert (
        plain <= held(ready) <= (plain + wider) * (-(-N // 16) * 16 / N if compiler else 1) + 96
    )  # whole panels
    lone = ops.prepare(Linear(w), dtype, "head")  # of a head that is not the embedding, too
    values = weakref.ref(w if bits == 16 else w.values)
    del w, ready
    assert (values() is None) == (type(lone) is not Linear)


def test_what_has_no_product_stays_as_it_is(compiler):
    w, float64, float16 = torch.randn(16, 64), torch.float64, torch.float16
    weights = [
        (quantize(w, 8), float64),
        (quantize(w, 8), float16),
        (quantize(w, 4, 64), float64),
        (quantize(w, 4, 20), torch.float32),
        (w.double(), float64),
        (w.half(), float16),
    ]
    for weight, dtype in ((Linear(w), dtype) for w, dtype in weights):
        assert CPU().prepare(weight, dtype, "o") is weight


@pytest.mark.parametrize(
    "says", [RuntimeError("could not create a primitive"), AttributeError("no such operation")]
)
@torch.inference_mode()
def test_what_the_library_cannot_multiply_stays_as_it_is(says, monkeypatch):
    """Another build, or another CPU: what it can is found by doing it."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(cpu, "packed_product", mock.Mock(side_effect=says))
    weight = Linear(whole(24, 16, dtype=torch.float32), whole(24, dtype=torch.float32))
    assert CPU().prepare(weight, torch.float32, "o") is weight and cpu.packed_product.called


@pytest.mark.parametrize("dtype", ROUNDING)
def test_plain_weights_have_gradients_when_they_are_asked_for(dtype):
    ops, w, b, up = CPU(), *(whole(*shape, dtype=dtype) for shape in ((24, 16), (24,), (3, 24)))
    x = whole(3, 16, dtype=dtype).requires_grad_()
    assert not ops.linear(
        x.detach(), Linear(w, b)
    ).requires_grad  # a model that is only run keeps no graph
    ops.linear(x, Linear(w.requires_grad_(), b.requires_grad_())).backward(up)
    assert (
        torch.equal(w.grad, up.T @ x)
        and torch.equal(x.grad, up @ w)
        and torch.equal(b.grad, up.sum(0))
    )


@torch.inference_mode()
def test_a_wide_quantized_product_is_made_in_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "TILE", 1 << 9)  # 70 rows, 16 at a time
    for bits in (8, 4):
        (q, W), x = stored(torch.randn(70, 32), bits), torch.randn(3, 32)
        with mock.patch.object(
            Quantized, "rows", autospec=True, side_effect=Quantized.rows
        ) as rows:
            torch.testing.assert_close(CPU().linear(x, Linear(q)), x @ W.float().T)
        assert rows.call_count == 5


def test_bfloat16_stays_as_it_is_beside_float32(monkeypatch):
    full, brain = torch.float32, torch.bfloat16
    cases = (
        ([brain], full),
        ([brain], brain),
        ([brain], torch.float64),
        ([brain, full], full),
        ([torch.float16], full),
    )
    found = [CPU().weight_dtype(*case) for case in cases]
    assert found == [brain if native.library() else full, *(dtype for _, dtype in cases[1:])]
    monkeypatch.setattr(native, "library", lambda: None)
    assert CPU().weight_dtype([brain], full) == full


def test_the_stopwatch_and_the_roof_are_plausible():
    clock = pytest.importorskip("measure.clock")
    assert 0.009 < clock.seconds(lambda: __import__("time").sleep(0.01), repeats=3) < 0.5
    assert 1e8 < clock.read_bandwidth(16) < 1e13
