"""The product is x Wᵀ + b, whatever order the weight is in."""
import pytest
import torch

from matmul import Linear, can_pack, read_bandwidth, seconds


def make(K: int, N: int, bias: bool, dtype: torch.dtype) -> Linear:
    torch.manual_seed(K + N)
    linear = Linear(K, N, bias, dtype=dtype)
    for p in linear.parameters():
        torch.nn.init.normal_(p)
    return linear


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float64, 1e-10)])
@pytest.mark.parametrize("K, N", [(8, 1), (37, 53), (64, 128), (1025, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_plain_are_the_same_product(K, N, bias, dtype, tolerance):
    linear = make(K, N, bias, dtype)
    W, b = linear.weight.double(), linear.bias.double() if bias else 0
    inputs = [torch.randn(T, K).to(dtype) for T in (1, 2, 3, 5, 8, 17)]
    with torch.no_grad():
        for packed in (False, True):
            if packed:
                linear.pack()
            for x in inputs:
                torch.testing.assert_close(linear(x).double(), x.double() @ W.T + b, atol=tolerance * K**0.5 / 8, rtol=tolerance / 10)
    assert (linear.packed is not None) == (dtype != torch.float64)


def test_packing_lets_the_plain_weight_go_unless_it_is_shared():
    linear = make(16, 24, False, torch.float32)
    assert can_pack(linear.weight)
    linear.pack()
    assert linear.weight is None
    shared = make(16, 24, False, torch.float32)
    shared.pack(keep=True)
    assert shared.weight is not None and shared.packed is not None


def test_what_cannot_be_packed_stays_as_it_is_and_has_gradients():
    linear = make(16, 24, True, torch.float64)
    linear.pack()
    assert linear.packed is None
    linear.requires_grad_()
    linear(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(linear.weight.grad, torch.full((24, 16), 2.0, dtype=torch.float64))
    assert not can_pack(torch.empty(2, 2, dtype=torch.float16))


def test_the_stopwatch_and_the_roof_are_plausible():
    assert 0.009 < seconds(lambda: __import__("time").sleep(0.01), repeats=3) < 0.5
    assert 1e8 < read_bandwidth(16) < 1e13
