"""Triton's attention and store beside plain torch: in the interpreter, as compiled for a GPU that is not there, and on one that is."""
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"                # Triton reads it when it is imported, which is here or in another test like this
pytest.importorskip("triton", reason="Triton exists for Linux only")

import flash
import kvcache
import paged
from conftest import SMALL
from config import Config
from crosscompile import SHARED, apart
from flash import Launch, Pool, attend, plan
from kernels import attention
from kernelstep import Bucket, KernelStep
from kvquant import KVStore
from kvquant import store as room
from model import Llama, rotate
from quant import int4, int8
from store import store

WIDTHS = [(16, 16), (8, 8), (8, 4), (4, 4)]
Kept = Tensor | KVStore


@contextmanager
def poisoned() -> Iterator[None]:
    """What the kernels' own tensors hold before they are written is not a number."""
    def empty(*size: Any, **how: Any) -> Tensor:
        made = torch.zeros(*size, **how)
        return made.fill_(nan) if made.is_floating_point() else made.fill_(-128 if made.dtype != torch.uint8 else 255)
    with mock.patch("torch.empty", empty):
        yield


def parts(kept: Kept) -> tuple[Tensor, ...]:
    return getattr(kept, "parts", (kept,))


class Texts:
    """Random keys and values of some texts in a pool whose other places are poisoned, and queries of their newest tokens."""

    def __init__(self, counts: list[int], past: list[int], G: int, R: int, D: int, S: int, bits: tuple[int, int], rows: bool, seed: int,
                 dtype: torch.dtype = torch.float32):
        torch.manual_seed(seed)
        self.counts, self.lengths, self.S, B = counts, [n + m for n, m in zip(counts, past)], S, len(counts)
        longest = max(self.lengths)
        if rows:
            shape, self.tables = (B + 1, G, longest + 2, D), torch.randperm(B + 1)[:B, None]
        else:
            most = -(-longest // S)
            shape, self.tables = (B * most + 1, S, G, D), torch.randperm(B * most + 1)[:B * most].view(B, most)
        pools = [room(shape, width, "cpu", dtype) for width in bits]
        for part in (part for pool in pools for part in parts(pool)):
            part.fill_(nan if part.is_floating_point() else 77)
        self.k, self.v = (pool.transpose(1, 2) if rows else pool for pool in pools)                          # [N, S, G, D]
        self.q = torch.randn(sum(counts) + 2, G * (R + 2), D).to(dtype)[:, :G * R]                           # two rows of padding; a view, as the model has
        self.plain = [[self._put(pool, b, torch.randn(length, G, D).to(dtype)) for pool in (self.k, self.v)] for b, length in enumerate(self.lengths)]
        self.block, self.query_start = 0 if rows else S, torch.tensor([0, *counts]).cumsum(0)

    def _put(self, pool: Kept, b: int, x: Tensor) -> Tensor:
        """Where the tables say -> what was stored, [G, length, D]."""
        at = torch.arange(len(x))
        blocks, within = (self.tables[b, at // self.S], at % self.S) if self.tables.shape[1] > 1 or len(x) <= self.S else (self.tables[b, 0 * at], at)
        kept = room(x.shape, {1: 16, 2: 8, 3: 4}[len(parts(pool))], "cpu", x.dtype)
        kept.copy_(x)
        for place, numbers in zip(parts(pool), parts(kept)):
            place[blocks, within] = numbers
        return kept.to(torch.float32).transpose(0, 1)

    def expected(self) -> Tensor:
        """In float32, by the reference, from what was stored: [T, H, D]."""
        queries = self.q[:-2].float().split(self.counts)
        return torch.cat([attention(q, k, v) if len(q) else q for q, (k, v) in zip(queries, self.plain)])

    def attend(self, launches: list[Launch]) -> tuple[Tensor, Tensor]:
        """By the kernel -> what it wrote for the texts' tokens, and what is around it."""
        T, *rest = self.q.shape
        around = torch.full((T + 2, *rest), nan, dtype=self.q.dtype, device=DEVICE)
        k, v = (Pool.of(move(pool)) for pool in (self.k, self.v))
        where = (x.int().to(DEVICE) for x in (self.tables, self.query_start, torch.tensor(self.lengths)))
        before = [x.clone() for x in (*k[:3], *v[:3]) if x is not None]
        with poisoned():
            attend(self.q.to(DEVICE), k, v, *where, launches, self.block, around[1:-1])
        for x, y in zip(before, (x for x in (*k[:3], *v[:3]) if x is not None)):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))                                    # nothing is written into the cache
        return around[1:-3].cpu(), torch.cat((around[:1], around[-3:])).cpu()


def move(kept: Kept) -> Kept:
    return kept.to(DEVICE) if isinstance(kept, Tensor) else KVStore([part.to(DEVICE) for part in kept.parts])


text = st.tuples(st.sampled_from([0, 1, 1, 2, 5, 17]), st.sampled_from([0, 0, 1, 30, 64, 150]))


@settings(deadline=None, max_examples=12)
@given(st.lists(text, min_size=1, max_size=3).filter(lambda some: any(n for n, _ in some)), st.integers(1, 2), st.integers(1, 8),
       st.sampled_from([64, 80, 128]), st.one_of(st.integers(1, 64), st.sampled_from([1, 16, 64])), st.sampled_from(WIDTHS), st.booleans(),
       st.sampled_from([1, 3]), st.integers(0, 99))
def test_attention_equals_the_reference(some, G, R, D, S, bits, rows, forced, seed):
    counts, past = [n for n, _ in some], [m for _, m in some]
    texts = Texts(counts, past, G, R, D, S if not rows else max(n + m for n, m in some), bits, rows, seed)
    launches = [launch._replace(splits=forced) for launch in plan(counts, max(texts.lengths), G * R, G, 132)]
    with mock.patch("flash.LEAST_KEYS", 1):
        out, around = texts.attend(launches)
    torch.testing.assert_close(out, texts.expected(), atol=2e-5, rtol=2e-5)
    assert around.isnan().all()
