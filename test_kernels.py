"""Attention against two loops and a softmax."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import attention


def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    (n, H, D), (G, m, _) = q.shape, k.shape
    out = torch.zeros(n, H, D, dtype=torch.float64)
    for i in range(n):
        for h in range(H):
            seen, g = i + m - n + 1, h // (H // G)
            scores = [float(q[i, h].double() @ k[g, j].double()) / math.sqrt(D) for j in range(seen)]
            weights = [math.exp(s - max(scores)) for s in scores]
            out[i, h] = sum(w / sum(weights) * v[g, j].double() for j, w in enumerate(weights))
    return out


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 5), past=st.integers(0, 6), G=st.integers(1, 3), R=st.integers(1, 4), D=st.sampled_from([2, 6, 16]),
       dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), seed=st.integers(0, 99))
def test_equals_the_loops(n, past, G, R, D, dtype, seed):
    torch.manual_seed(seed)
    m = n + past
    store = torch.randn(2, G, m + 3, D).to(dtype)                    # rows of a cache: views, with something else behind them
    store[:, :, m:] = math.nan
    q, k, v = torch.randn(n, G * R, D).to(dtype), store[0, :, :m], store[1, :, :m]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    out = attention(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(out.double(), slow(q, k, v), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("n", [1, 3])
def test_the_last_query_sees_everything_and_none_sees_its_future(n):
    """Aligned top-left, the first query would see key 0 alone and the result would not change with key 4."""
    q, k, v = torch.zeros(n, 2, 4), torch.zeros(1, 6, 4), torch.arange(6.0)[None, :, None].expand(1, 6, 4)
    expected = [sum(range(j)) / j for j in range(6 - n + 1, 7)]      # equal scores: the mean of what is seen
    torch.testing.assert_close(attention(q, k, v)[:, 0, 0], torch.tensor(expected))
