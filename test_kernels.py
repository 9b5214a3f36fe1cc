"""Attention against two loops and a softmax."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}       # about four roundings
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    (n, H, D), (G, m, _) = q.shape, k.shape
    out = torch.zeros(n, H, D, dtype=torch.float64)
    for i in range(n):
        for h in range(H):
            seen, g = i + m - n + 1, h // (H // G)
            scores = [float(q[i, h].double() @ k[g, j].double()) / math.sqrt(D) for j in range(seen)]
            weights = [math.exp(s - max(scores)) for s in scores]
            out[i, h] = sum(w / sum(weights) * v[g, j].double() for j, w in enumerate(weights))
    return out


def as_the_model_does(n: int, m: int, G: int, R: int, D: int, dtype: torch.dtype, of_a_cache: bool, loud: float = 1.0) -> Tensors:
    """q out of a row of q, k and v together; k and v as views of a larger store, or transposed out of that same row. None contiguous."""
    qkv = torch.randn(m, G * R + 2 * G, D).to(dtype)
    q, k, v = qkv.split((G * R, G, G), dim=1)
    q, k, v = q[m - n:] * loud if loud != 1 else q[m - n:], k.transpose(0, 1), v.transpose(0, 1)
    if of_a_cache:
        store = torch.full((2, 3, G, m + 4, D), math.nan, dtype=dtype)                                   # what lies beyond is not ours
        store[0, 1, :, :m], store[1, 1, :, :m] = k, v
        k, v = store[0, 1, :, :m], store[1, 1, :, :m]
    return q, k, v


@settings(deadline=None, max_examples=120)
@given(n=st.integers(1, 5), past=st.integers(0, 6), G=st.integers(1, 3), R=st.integers(1, 4), D=st.sampled_from([2, 6, 16]),
       dtype=st.sampled_from(list(TOLERANCE)), of_a_cache=st.booleans(), seed=st.integers(0, 99))
def test_equals_the_loops(n, past, G, R, D, dtype, of_a_cache, seed):
    torch.manual_seed(seed)
    q, k, v = as_the_model_does(n, n + past, G, R, D, dtype, of_a_cache)
    out = attention(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(out.double(), slow(q, k, v), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("n, m", [(1, 1), (1, 300), (2, 300), (70, 300), (257, 257)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_longer_than_a_tile(n, m, dtype):
    torch.manual_seed(n)
    q, k, v = as_the_model_does(n, m, 2, 3, 8, dtype, True)
    wide = attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(attention(q, k, v).double(), wide, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for i in {0, n // 2, n - 1}:                                     # the loops, for a few queries: query i is the last of its own past
        torch.testing.assert_close(wide[i:i + 1], slow(q[i:i + 1], k[:, :m - n + i + 1], v[:, :m - n + i + 1]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_last_query_sees_everything_and_none_sees_its_future(n, dtype):
    """Aligned top-left, the first query would see key 0 alone and the result would not change with key 4."""
    q, k, v = torch.zeros(n, 2, 4, dtype=dtype), torch.zeros(1, 6, 4, dtype=dtype), torch.arange(6, dtype=dtype)[None, :, None].expand(1, 6, 4)
    expected = torch.tensor([sum(range(j)) / j for j in range(6 - n + 1, 7)], dtype=dtype)       # equal scores: the mean of what is seen
    torch.testing.assert_close(attention(q, k, v), expected[:, None, None].expand(n, 2, 4), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_each_group_of_queries_has_its_own_head():
    """H = 6 query heads on G = 2: the first three look at head 0, the others at head 1."""
    k, v = torch.zeros(2, 5, 4), torch.tensor([1.0, 2.0])[:, None, None].expand(2, 5, 4)
    for n in (1, 2, 5):
        assert attention(torch.randn(n, 6, 4), k, v)[:, :, 0].tolist() == [[1, 1, 1, 2, 2, 2]] * n


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_whose_exponentials_overflow(n, dtype):
    torch.manual_seed(n)
    q, k, v = as_the_model_does(n, 7, 2, 2, 16, dtype, True, loud=1000.0)
    out = attention(q, k, v)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), slow(q, k, v), atol=TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype])
