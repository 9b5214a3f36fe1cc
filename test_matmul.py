"""The product is x Wᵀ + b, whatever order the weight is in."""
import pytest
import torch

import matmul
import native
from matmul import Linear, can_pack, read_bandwidth, seconds

PACKABLE = [torch.float32, torch.bfloat16]
SHAPES = [(8, 1), (37, 53), (64, 128), (1023, 7), (1024, 33), (1025, 31)]


def whole(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers so small that every partial sum is exact, also in 16 bits: a single wrong term shows."""
    return torch.randint(-1, 2, shape).to(dtype)


def make(K: int, N: int, bias: bool, dtype: torch.dtype) -> Linear:
    torch.manual_seed(K + N)
    linear = Linear(K, N, bias, dtype=dtype)
    for p in linear.parameters():
        p.data = whole(*p.shape, dtype=dtype)
    return linear


@pytest.mark.parametrize("dtype", [*PACKABLE, torch.float64])
@pytest.mark.parametrize("K, N", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_and_plain_are_the_same_product(K, N, bias, dtype, compiler):
    linear = make(K, N, bias, dtype)
    W, b = linear.weight.double(), linear.bias.double() if bias else 0
    for ready in (None, linear.pack, linear.pack, linear.reorder, linear.reorder):       # twice is once
        if ready is not None:
            ready()
            few = compiler and dtype != torch.float64 and ready == linear.pack
            assert (linear.few is not None) == few and (linear.packed is None) == (few or dtype == torch.float64)
        for T in range(21):                                          # of no row, too: a step may ask for no logits
            x = whole(T, K, dtype=dtype)
            y = linear(x)
            assert y.dtype == dtype and y.shape == (T, N) and y.is_contiguous() and torch.equal(y.double(), x.double() @ W.T + b)


@pytest.mark.skipif(native.library() is None, reason="no C here")
@torch.inference_mode()
def test_the_weights_are_in_memory_once():
    """A lone text's few rows are multiplied by the weight itself, which a reordered one lets go; and each product serves the steps that it is for."""
    linear = make(64, 128, False, torch.float32)
    linear.pack()
    assert linear.few.data_ptr() == linear.weight.data_ptr()
    assert [linear.path(T) for T in (0, 1, 8, 9, 64)] == ["native", "native", "native", "plain", "plain"]
    linear.few = torch.zeros_like(linear.few)
    assert [bool(linear(torch.rand(T, 64)).any()) for T in (1, 8, 9, 64)] == [False, False, True, True]
    linear.reorder()
    assert linear.few is linear.weight is None and linear.packed is not None and linear.path(1) == linear.path(64) == "packed"


@pytest.mark.parametrize("dtype", PACKABLE)
@torch.inference_mode()
def test_fewer_than_five_rows_are_multiplied_as_five(dtype, monkeypatch):
    """Where that is sooner: of a large weight in oneDNN's order. What is added is not in the result."""
    monkeypatch.setattr(matmul, "FIVE", True)
    linear, seen = make(31, 40, True, dtype), []
    W, b = linear.weight.double(), linear.bias.double()
    linear.pack()
    linear.reorder()
    filled = matmul.five
    monkeypatch.setattr(matmul, "five", lambda *of: (made := filled(*of), seen.append(len(made)))[0])
    for most, rows in ((31 * 40, [0, 1, 4, 5, 6]), (31 * 40 - 1, [5, 5, 5, 5, 6])):
        monkeypatch.setattr(matmul, "LARGE", most)
        for T in (0, 1, 4, 5, 6):
            x = whole(T, 31, dtype=dtype)
            assert torch.equal(linear(x).double(), x.double() @ W.T + b)
        assert seen == rows
        seen.clear()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7), (torch.float64, 1e-13)])
@pytest.mark.parametrize("pack", [False, True])
@torch.inference_mode()
def test_real_numbers_within_their_rounding(dtype, tolerance, pack, compiler):
    linear = make(1025, 33, True, dtype)
    for p in linear.parameters():
        p.normal_()
    W, b = linear.weight.double(), linear.bias.double()
    if pack:
        linear.pack()
    for T in (1, 5, 17):
        x = torch.randn(T, 1025).to(dtype)
        torch.testing.assert_close(linear(x).double(), x.double() @ W.T + b, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", PACKABLE)
@torch.inference_mode()
def test_rows_may_be_views(dtype, compiler):
    """Rows taken out of a wider step, every other number of one, and a transposed one."""
    linear = make(16, 24, True, dtype)
    W, b = linear.weight.double(), linear.bias.double()
    linear.pack()
    wide = whole(5, 40, dtype=dtype)
    for x in (wide[:, 3:19], wide[::2, :16], wide[:, 8::2], whole(16, 5, dtype=dtype).T, wide[:1, :1].expand(3, 16)):
        assert torch.equal(linear(x).double(), x.double() @ W.T + b)


@pytest.mark.parametrize("dtype", PACKABLE)
def test_packing_lets_the_plain_weight_go_unless_it_is_shared(dtype, compiler):
    linear = make(16, 20, False, dtype)
    assert can_pack(linear.weight)
    linear.pack()
    assert (linear.weight is None) != compiler
    linear.reorder()
    assert linear.weight is None and not list(linear.parameters())
    shared = make(16, 20, False, dtype)
    weight, before = shared.weight, shared.weight.clone()
    shared.pack(keep=True), shared.reorder(keep=True)
    assert shared.weight is weight and torch.equal(weight, before) and shared.packed is not None
    x = whole(3, 16, dtype=dtype)
    assert torch.equal(shared(x), x @ before.T)


def test_what_cannot_be_packed_stays_as_it_is():
    for weight in (torch.empty(2, 2, dtype=torch.float16), torch.empty(2, 2, dtype=torch.float64), torch.empty(2, 2, device="meta")):
        assert not can_pack(weight)
    for keep in (False, True):
        linear = make(16, 24, True, torch.float64)
        weight = linear.weight
        linear.pack(keep)
        assert linear.packed is None and linear.weight is weight


@pytest.mark.parametrize("dtype", [*PACKABLE, torch.float64])
def test_plain_weights_have_gradients_when_they_are_asked_for(dtype):
    linear = make(16, 24, True, dtype)
    x = whole(3, 16, dtype=dtype).requires_grad_()
    assert not linear.weight.requires_grad and not linear(x.detach()).requires_grad      # a model that is only run keeps no graph
    linear.requires_grad_()
    up = whole(3, 24, dtype=dtype)
    linear(x).backward(up)
    assert torch.equal(linear.weight.grad, up.T @ x) and torch.equal(x.grad, up @ linear.weight) and torch.equal(linear.bias.grad, up.sum(0))
    with torch.no_grad():
        assert not linear(x).requires_grad


def test_the_stopwatch_and_the_roof_are_plausible():
    assert 0.009 < seconds(lambda: __import__("time").sleep(0.01), repeats=3) < 0.5
    assert 1e8 < read_bandwidth(16) < 1e13
