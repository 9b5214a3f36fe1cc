"""Drafts in one call are those that are written one by one; and where they cannot be, they are written one by one."""
from typing import Any
from unittest import mock

import pytest
import torch

import native
import nativedrafts
from config import Config, Quantization
from conftest import SMALL
from drafters import ModelDrafter, Round, write_drafts
from kvquant import WIDTHS
from model import Llama
from nativedrafts import serves, write_at_once
from nativestep import NativeStep
from paged import PagedCache
from proof import Walk, WalkingCoin
from request import Request, Settings
from sampling import Keyed

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
TEXT = [7, 30, 4, 99, 5, 6, 12, 180, 3, 3, 41]


def loud(bits: int = 16, **config: Any) -> Llama:
    plain = Llama(Config(**SMALL | config), seed=3)
    for name, place in plain.places().items():
        place.mul_(1 if "norm" in name else 9)
    llama = Llama(plain.config.quantized(Quantization(bits)), seed=None) if bits < 16 else plain
    if bits < 16:
        llama.fill(plain.places().items())
    return llama.pack()


def drafted(write: Any, llama: Llama, layout: str, unread: int, gamma: int, coupled: bool = False, vocab: int = 250, texts: int = 1, coin: Any = Keyed,
            **settings: Any) -> tuple[torch.Tensor, ...]:
    """-> drafts, their distributions, and the logits of what comes after them: what is in the cache."""
    c = llama.config
    cache = llama.cache(40, 2) if layout == "rows" else PagedCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 20, 4, prefix_sharing=False)
    seqs = [cache.open(())[0] for _ in range(texts)]
    for seq in seqs:
        llama(torch.tensor(TEXT[:-unread]), cache.extend([(seq, TEXT[:-unread])]))
    requests = [Request(list(TEXT), Settings(seed=5 + i, max_tokens=20, **settings)) for i in range(texts)]
    round = Round(requests, [gamma] * texts, vocab, llama.device, llama.dtype, coin, coupled)
    tokens, q = write(llama, cache.extend, seqs, [TEXT[-unread:]] * texts, round)
    assert all(cache.length(seq) == len(TEXT) + gamma - 1 for seq in seqs)
    return tokens, q, torch.cat([llama(torch.tensor([8]), cache.extend([(seq, [8])])) for seq in seqs])


@pytest.mark.parametrize("layout", ["rows", "blocks"])
@pytest.mark.parametrize("kind", [dict(), dict(bits=8), dict(attention_bias=True, tie_word_embeddings=False), dict(bits=8, tie_word_embeddings=False)])
@torch.inference_mode()
def test_they_are_those_written_one_by_one(layout, kind):
    llama, alike = loud(**kind), 0
    for unread, gamma, coupled, temperature in ((1, 4, False, 1.0), (2, 1, False, 0.7), (2, 6, True, None), (8, 3, False, 0), (1, 5, True, 1e-200), (1, 4, True, 1e-3), (3, 2, False, 3.0)):
        how = dict(layout=layout, unread=unread, gamma=gamma, coupled=coupled, temperature=temperature)
        with mock.patch.object(nativedrafts, "write_drafts", side_effect=AssertionError("one by one")):
            tokens, q, after = drafted(write_at_once, llama, **how)
        wanted = drafted(write_drafts, llama, **how)
        assert tokens.shape == (1, gamma) and tokens.dtype == torch.int64 and q.dtype == torch.float32 and torch.equal(tokens, wanted[0])
        torch.testing.assert_close(q, wanted[1], atol=1e-6, rtol=1e-4)
        assert not q[wanted[1] == 0].any()
        torch.testing.assert_close(after, wanted[2], atol=1e-4, rtol=1e-4)
        alike += len(set(tokens[0].tolist()))
    assert alike > 12                                                                          # not one token all the time


def test_a_cache_that_c_does_not_read_has_them_written_one_by_one():
    llama = loud()
    assert [ModelDrafter(llama, llama.cache(40, bits=bits)).write for bits in WIDTHS.values()] == [write_at_once] * 2 + [write_drafts] * 2


@torch.inference_mode()
def test_where_they_cannot_be_in_one_call(monkeypatch):
    llama, one = loud(), dict(layout="blocks", unread=1, gamma=2)
    for llama, how in ((llama, dict(top_p=0.9)), (llama, dict(top_k=3)), (llama, dict(min_p=0.1)), (llama, dict(texts=2)), (llama, dict(gamma=17)),
                       (Llama(Config(**SMALL), dtype=torch.bfloat16).pack(), {}), (Llama(Config(**SMALL)), {})):
        with mock.patch.object(nativedrafts, "write_drafts", side_effect=write_drafts) as written:
            tokens = drafted(write_at_once, llama, **one | how)[0]
        assert written.call_count == 1 and torch.equal(tokens, drafted(write_drafts, llama, **one | how)[0])
    round = Round([Request(list(TEXT), Settings(seed=1, top_p=1.0, top_k=0, min_p=0.0))], [2], 250, llama.device)
    llama = loud()
    assert serves(llama, [[1]], round)                                                         # filters that filter nothing
    monkeypatch.setattr(NativeStep, "whole", False)
    assert not serves(llama, [[1]], round)                                                     # phases.py looks at each layer
    monkeypatch.undo()
    round.coin = lambda *key: WalkingCoin(Walk(), *key)
    assert not serves(llama, [[1]], round)                                                     # proofs walk through every pick
