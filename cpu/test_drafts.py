"""Drafts in one call are those that are written one by one; and where they cannot be, they are written one by one."""

from typing import Any
from unittest import mock

import pytest
import torch

from checkpoint.config import Config
from checkpoint.formats import Quantization
from conftest import SMALL
from cpu import CPU, native
from drafters import write_drafts
from kvcache import KVCache
from model import Llama
from paged import PagedCache
from proof import Walk
from quant import WIDTHS
from request import Request, Round, Settings
from sampling import Keyed

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
TEXT = [7, 30, 4, 99, 5, 6, 12, 180, 3, 3, 41]


def loud(
    bits: int = 16, dtype: torch.dtype = torch.float32, prepared: bool = True, **config: Any
) -> Llama:
    llama = plain = Llama(Config(**SMALL | config), dtype=dtype, seed=3, ops=CPU())
    for name, place in plain.places().items():
        place.mul_(1 if "norm" in name else 9)
    if bits < 16:
        llama = Llama(plain.config.quantized(Quantization(bits)), seed=None, ops=CPU())
        llama.fill(plain.places().items())
    return llama.prepare() if prepared else llama


def drafted(
    llama: Llama,
    one_by_one: bool,
    layout: str = "blocks",
    unread: int = 1,
    gamma: int = 2,
    coupled: bool = False,
    texts: int = 1,
    coin: Any = Keyed,
    bits: str = "16",
    **settings: Any,
) -> tuple[Any, ...]:
    """-> drafts, their distributions, the logits after them (so what is in the cache), and whether it was one call."""
    cache = (
        KVCache.of(llama, 40, 2, bits=WIDTHS[bits])
        if layout == "rows"
        else PagedCache.of(llama, 20, 4, prefix_sharing=False, bits=WIDTHS[bits])
    )
    seqs = [cache.open(())[0] for _ in range(texts)]
    for seq in seqs:
        llama(torch.tensor(TEXT[:-unread]), cache.extend([(seq, TEXT[:-unread])]))
    requests = [
        Request(list(TEXT), Settings(seed=5 + i, max_tokens=20, **settings)) for i in range(texts)
    ]
    round = Round(requests, [gamma] * texts, 250, llama.device, llama.dtype, coin, coupled)
    plain = mock.Mock(side_effect=write_drafts)
    arguments = llama, cache, seqs, [TEXT[-unread:]] * texts, round
    tokens, q = write_drafts(*arguments) if one_by_one else llama.ops.draft(plain, *arguments)
    assert all(cache.length(seq) == len(TEXT) + gamma - 1 for seq in seqs)
    after = torch.cat([llama(torch.tensor([8]), cache.extend([(seq, [8])])) for seq in seqs])
    return tokens, q, after, not plain.called


@pytest.mark.parametrize("layout", ["rows", "blocks"])
@pytest.mark.parametrize(
    "kind",
    [
        dict(),
        dict(bits=8),
        dict(attention_bias=True, tie_word_embeddings=False),
        dict(bits=8, tie_word_embeddings=False),
    ],
)
@torch.inference_mode()
def test_they_are_those_written_one_by_one(layout, kind):
    llama, different = loud(**kind), 0
    for unread, gamma, coupled, temperature in (
        (1, 4, False, 1.0),
        (2, 1, False, 0.7),
        (2, 6, True, None),
        (8, 3, False, 0),
        (1, 5, True, 1e-200),
        (1, 4, True, 1e-3),
        (3, 2, False, 3.0),
    ):
        how = dict(
            layout=layout, unread=unread, gamma=gamma, coupled=coupled, temperature=temperature
        )
        tokens, q, after, at_once = drafted(llama, False, **how)
        wanted = drafted(llama, True, **how)
        assert (
            at_once
            and tokens.shape == (1, gamma)
            and tokens.dtype == torch.int64
            and q.dtype == torch.float32
        )
        assert torch.equal(tokens, wanted[0]) and not q[wanted[1] == 0].any()
        torch.testing.assert_close(q, wanted[1], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(after, wanted[2], atol=1e-4, rtol=1e-4)
        different += len(set(tokens[0].tolist()))
    assert different > 12  # not one token all the time


@pytest.mark.parametrize(
    "model, how, at_once",
    [
        ({}, dict(top_p=1.0, top_k=0, min_p=0.0), True),  # filters that filter nothing
        ({}, dict(gamma=16), True),
        ({}, dict(bits="8"), True),
        ({}, dict(top_p=0.9), False),
        ({}, dict(top_k=3), False),
        ({}, dict(min_p=0.1), False),
        ({}, dict(texts=2), False),
        ({}, dict(gamma=17), True),
        ({}, dict(bits="8/4"), False),
        ({}, dict(bits="4"), False),
        ({}, dict(coin=Walk([()] * 6)), False),  # proofs walk through every pick
        (dict(dtype=torch.bfloat16), {}, False),
        (dict(prepared=False), {}, False),
    ],
)
@torch.inference_mode()
def test_where_they_can_be_in_one_call(model, how, at_once):
    llama = loud(**model)
    tokens, _, _, found = drafted(llama, False, **how)
    assert found == at_once and torch.equal(tokens, drafted(llama, True, **how)[0])


@torch.inference_mode()
def test_without_c_and_without_unread_tokens_they_are_written_one_by_one(monkeypatch):
    llama = loud()
    nothing = Round([], [], 250, llama.device)
    assert llama.ops.draft(write_drafts, llama, KVCache.of(llama, 9), [], [], nothing)[0].shape == (
        0,
        0,
    )
    monkeypatch.setattr(native, "library", lambda: None)
    tokens, _, _, found = drafted(llama, False)
    assert not found and torch.equal(tokens, drafted(llama, True)[0])
