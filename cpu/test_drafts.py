"""Drafts in one call are those that are made one by one; and where one call cannot make them, they
are made one by one."""

import gc
import weakref
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from cpu import CPU, native
from drafters import Chain
from eagle import EagleHead, HeadChain
from kernels import Linear
from kvcache import KVCache
from model import Llama
from paged import PagedCache
from proof import Walk
from quant import WIDTHS
from request import Request, Settings
from sampling import Keyed
from speculative import Drawing, Round
from testing.heads import FLAGS, random_head
from testing.models import SMALL, model_chain
from testing.toys import Place

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
TEXT = [7, 30, 4, 99, 5, 6, 12, 180, 3, 3, 41]


def scaled_llama(
    bits: int = 16, dtype: torch.dtype = torch.float32, packed: bool = True, **config: Any
) -> Llama:
    """A random model whose logits differ."""
    llama = plain = Llama(Config(**SMALL | config), dtype=dtype, seed=3, ops=CPU())
    for name, tensor in plain.named_tensors().items():
        tensor.mul_(1 if "norm" in name else 9)
    if bits < 16:
        llama = Llama(plain.config.quantized(Quantization(bits)), seed=None, ops=CPU())
        fill_model(llama, plain.named_tensors().items())
    if packed:
        llama.pack_weights()
    return llama


def drafts(
    llama: Llama,
    one_by_one: bool,
    layout: str = "paged",
    unread: int = 1,
    gamma: int = 2,
    coupled: bool = False,
    texts: int = 1,
    rng: Any = Keyed,
    bits: str = "16",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, bool]:
    """-> drafts, their distributions, the logits after them (so what is in the cache), and whether
    it was one call. dtype: of the distributions, as the target's."""
    if layout == "contiguous":
        cache = KVCache(llama.kv_spec(bits=WIDTHS[bits]), 40, 2)
    else:
        cache = PagedCache(llama.kv_spec(bits=WIDTHS[bits]), 20, 4, prefix_caching=False)
    seqs = [cache.open(())[0] for _ in range(texts)]
    for seq in seqs:
        llama(torch.tensor(TEXT[:-unread]), cache.extend([(seq, TEXT[:-unread])]))
    requests = [
        Request(list(TEXT), Settings(seed=5 + i, max_tokens=20, **settings)) for i in range(texts)
    ]
    round = Round(requests, [gamma] * texts, Drawing(250, coupled, rng), target=Place(dtype=dtype))
    chain = model_chain(llama, cache, seqs, [TEXT[-unread:]] * texts, round)
    with mock.patch.object(Chain, "one_by_one", autospec=True) as plain:
        plain.side_effect = ONE_BY_ONE
        tokens, q = chain.one_by_one(round) if one_by_one else chain.draft(round)
    assert all(cache.length(seq) == len(TEXT) + gamma - 1 for seq in seqs)
    after = torch.cat([llama(torch.tensor([8]), cache.extend([(seq, [8])])) for seq in seqs])
    return tokens, q, after, not plain.called


ONE_BY_ONE = Chain.one_by_one


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize(
    "kind",
    [
        dict(),
        dict(bits=8),
        dict(bits=8, attention_bias=True, tie_word_embeddings=False),
        dict(model_type="qwen2"),
        dict(model_type="qwen3"),
    ],
)
@torch.inference_mode()
def test_drafts_in_one_call_are_those_one_by_one(layout, kind):
    llama = scaled_llama(**kind)
    num_different = 0
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
        tokens, q, after, one_call = drafts(llama, False, **how)
        wanted_tokens, wanted_q, wanted_after, _ = drafts(llama, True, **how)
        assert one_call and tokens.shape == (1, gamma)
        assert tokens.dtype == torch.int64 and torch.equal(tokens, wanted_tokens)
        assert (q is None) == (wanted_q is None) == (coupled or temperature == 0)
        if q is not None:
            assert q.dtype == torch.float32 and not q[wanted_q == 0].any()
            torch.testing.assert_close(q, wanted_q, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(after, wanted_after, atol=1e-4, rtol=1e-4)
        num_different += len(set(tokens[0].tolist()))
    assert num_different > 12  # not one token all the time


@torch.inference_mode()
def test_logits_that_are_not_finite_are_refused():
    """A single −∞, too: one by one and in one call."""
    for wrong in (torch.nan, torch.inf, -torch.inf):
        llama = scaled_llama(packed=False)
        bias = torch.zeros(SMALL["vocab_size"])
        bias[5] = wrong
        llama.head = Linear(llama.head.weight, bias)
        llama.pack_weights()
        for temperature, coupled, one_by_one in product((0, 1.0), (False, True), (False, True)):
            with pytest.raises(ValueError, match="not finite"):
                drafts(llama, one_by_one, coupled=coupled, temperature=temperature)


def test_a_model_that_nobody_has_any_more_is_not_kept():
    llama = scaled_llama()
    ops = llama.ops
    assert ops.native_model(llama) is not None
    gone = weakref.ref(llama)
    del llama
    gc.collect()
    assert gone() is None and not ops._models


CASES = [
    ({}, dict(gamma=17), True),
    ({}, dict(bits="8/4"), True),
    ({}, dict(bits="4"), True),
    ({}, dict(top_p=0.9), True),
    ({}, dict(top_k=3, temperature=1e-3), True),
    ({}, dict(min_p=0.1, coupled=True), True),
    ({}, dict(texts=2), False),
    ({}, dict(dtype=torch.float64), False),
    ({}, dict(rng=Walk([()] * 6)), False),  # proofs walk through every pick
    (dict(dtype=torch.bfloat16), {}, False),
    (dict(packed=False), {}, False),
]


@torch.inference_mode()
def test_which_drafts_are_one_call():
    for model, how, wanted in CASES:
        llama = scaled_llama(**model)
        tokens, _, _, one_call = drafts(llama, False, **how)
        assert one_call == wanted, (model, how)
        assert torch.equal(tokens, drafts(llama, True, **how)[0])


@torch.inference_mode()
def test_drafts_without_c_and_of_no_request_are_made_one_by_one(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    llama = scaled_llama()
    tokens, _, _, one_call = drafts(llama, False)
    assert not one_call and torch.equal(tokens, drafts(llama, True)[0])


def head_round(
    head: EagleHead,
    one_call: bool,
    k: int,
    coupled: bool,
    temperature: float | None,
    V: int = SMALL["vocab_size"],
    **filters: float,
) -> list[torch.Tensor]:
    """Rows of two texts, then k drafts of the first -> all that this computes and stores. What
    drafts store is for no other text to find."""
    cache = PagedCache(head.target.kv_spec(draft_layers=1), 20, 4)
    tokens = TEXT + TEXT[:4]
    spans = []
    for text in (TEXT, TEXT[:4]):
        seq, _ = cache.open(())
        cache.extend([(seq, text)])
        spans.append((seq, 0, len(text)))
    seq = spans[0][0]
    for store in (cache.keys, cache.values):
        store.parts[0].zero_()
    generator = torch.Generator().manual_seed(1)
    f = torch.randn(len(tokens), head.config.hidden_size, generator=generator)
    request = Request(list(TEXT), Settings(temperature, seed=5, max_tokens=20, **filters), seq=seq)
    round = Round([request], [k], Drawing(V, coupled), target=Place())
    native_model = CPU.native_model if one_call else lambda *_: None
    with (
        mock.patch.object(CPU, "native_model", native_model),
        mock.patch.object(EagleHead, "forward", autospec=True) as plain,
    ):
        plain.side_effect = EAGLE_FORWARD
        z = head(f, torch.tensor(tokens), cache.metadata(spans))
        newest = z[len(TEXT) - 1 :][:1]
        drafted, q = HeadChain(head, cache, round, z=newest.clone()).draft(round)
        _, num_found = cache.open(TEXT + [0] * 9)
        assert num_found <= len(TEXT)
    assert plain.called != one_call
    assert cache.length(seq) == len(TEXT) + k - 1
    made = [drafted, z, cache.keys.parts[0][-1], cache.values.parts[0][-1]]
    return made if q is None else [*made, q]


EAGLE_FORWARD = EagleHead.forward


@pytest.mark.parametrize("flags", [*FLAGS, dict(bits=8), dict(bits=4, norm_output=True)], ids=str)
@torch.inference_mode()
def test_a_head_in_one_call_is_that_operation_by_operation(flags):
    target = scaled_llama()
    drafted = range(261) if flags.get("has_offsets") is False else range(0, 261, 2)
    head = random_head(target, drafted, dtype=torch.float32, **flags).pack_weights()
    num_different = 0
    for *how, filters in (
        (4, False, 1.0, {}),
        (1, False, 0.7, dict(top_k=30)),
        (5, True, None, {}),
        (3, False, 0, dict(top_p=0.9)),
        (2, True, 1e-3, {}),
        (3, False, 2.0, dict(top_p=0.9, min_p=0.01)),
    ):
        made = head_round(head, True, *how, **filters)
        for x, wanted in zip(made, head_round(head, False, *how, **filters), strict=True):
            torch.testing.assert_close(x, wanted, atol=1e-4, rtol=1e-4)
        num_different += len(set(made[0][0].tolist()))
    assert num_different > 9  # not one token all the time


@torch.inference_mode()
def test_a_head_that_drafts_the_first_token_of_the_padding_writes_no_other_row():
    """Its tokens are 1 to 250, and the vocabulary has 250."""
    head = random_head(scaled_llama(), range(1, 251), dtype=torch.float32).pack_weights()
    drafted, *_, q = head_round(head, True, 3, False, 1.0, 250)
    wanted_drafted, *_, wanted_q = head_round(head, False, 3, False, 1.0, 250)
    assert torch.equal(drafted, wanted_drafted) and not q[0, :, 0].any()
    torch.testing.assert_close(q, wanted_q, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_logits_of_a_head_that_are_not_finite_are_refused():
    head = random_head(scaled_llama(), dtype=torch.float32).pack_weights()
    head.norm.fill_(torch.nan)
    # What lies in memory before the head's tokens is a token, too: C must not read it.
    head.tokens = torch.cat((torch.tensor([5]), head.tokens))[1:]
    for temperature in (0, 1.0):
        for coupled in (False, True):
            with pytest.raises(ValueError, match="not finite"):
                head_round(head, True, 3, coupled, temperature)
