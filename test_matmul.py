"""The product is x Wᵀ + b, whatever order the weight is in."""
from unittest import mock

import pytest
import torch

import matmul
import native
from matmul import Linear, packs, read_bandwidth, seconds

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
    for ready in (None, linear.pack, linear.pack):                   # twice is once
        if ready is not None:
            ready()
            assert (linear.own is not None) == (compiler and dtype != torch.float64)
        for T in range(21):                                          # of no row, too: a step may ask for no logits
            x = whole(T, K, dtype=dtype)
            y = linear(x)
            assert y.dtype == dtype and y.shape == (T, N) and y.is_contiguous() and torch.equal(y.double(), x.double() @ W.T + b)


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
@torch.inference_mode()
def test_packing_lets_the_plain_weight_go_and_its_rows_can_be_read(dtype, compiler):
    for keep in (False, True):
        linear, x = make(16, 20, False, dtype), whole(3, 16, dtype=dtype)
        before, which = linear.weight.clone(), torch.tensor([3, 19, 3])
        linear.pack(keep)
        assert (linear.weight is None) == (linear.path(1) != "plain" and not keep) and torch.equal(linear(x), x @ before.T)
        if compiler or keep:
            assert torch.equal(linear.rows(which), before[which])


@pytest.mark.parametrize("says", [RuntimeError("could not create a primitive descriptor"), AttributeError("no such operation")])
@torch.inference_mode()
def test_what_the_library_cannot_multiply_stays_as_it_is(says, monkeypatch):
    """Another build, or another CPU: what it can is found by doing it."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(matmul, "packed_product", mock.Mock(side_effect=says))
    linear, x = make(16, 24, True, torch.float32), whole(3, 16, dtype=torch.float32)
    linear.pack()
    assert linear.path(1) == "plain" and torch.equal(linear(x), x @ linear.weight.T + linear.bias)
    for weight in (torch.empty(2, 2, dtype=torch.float16), torch.empty(2, 2, dtype=torch.float64)):
        assert packs(weight) is None


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
