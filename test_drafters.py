"""Drafters: a model's cache; the target's INT4 copy."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from checkpoint.config import Config
from drafters import ModelDrafter, SelfDrafter
from generate import Engine
from kernels import Ops
from kvcache import CacheFull, KVCache, KVSpec
from loading import Draft, Model, load_draft
from model import Llama
from paged import PagedCache
from proof import Toy
from quant import WIDTHS, quantize
from request import Request, Settings
from runner import ModelRunner, ScheduledRequest
from sampling import probabilities
from settings import Options
from speculative import Drawing, Round
from testing.models import SMALL, proposed, read
from testing.toys import COPY, TARGET, Place, toy_cache


def toy_round(request: Request, num_drafts: int, V: int = 3) -> Round:
    return Round([request], [num_drafts], Drawing(V), target=Place(dtype=torch.float64))


# ---- In coupled mode nobody reads the distributions


@pytest.mark.parametrize("B", [1, 3])  # a lone text is drafted in C, where there is a compiler
@torch.inference_mode()
def test_a_coupled_round_makes_no_distributions(B):
    """At a large vocabulary; the tokens are those that the round's rngs pick."""
    V = 5000
    llama = Llama(Config(**SMALL | dict(vocab_size=V)), seed=3).pack_weights()
    llamas = [llama, Llama(Config(**SMALL | dict(vocab_size=V)), seed=3, ops=Ops()).pack_weights()]
    drafters = [ModelDrafter(llama, KVCache(llama.kv_spec(), 20, 2 * B)) for llama in llamas]
    texts = []
    for drafter in drafters:
        _, q, largest = proposed(drafter, False, B, V)
        assert q.shape == (B, 4, V) and largest >= q.numel()
        tokens, q, largest = proposed(drafter, True, B, V)
        assert q is None and largest < 2 * B * V
        texts.append(tokens)
    assert texts[0] == texts[1]


# ---- A model with a cache of its own


@pytest.mark.parametrize("blocks", [2, 3])
def test_model_drafts_fit_or_cannot_be_stored(blocks):
    """What `fits` says, `propose` does."""
    answers = set()
    for lag, num_drafts in itertools.product(range(1, 5), range(1, 6)):
        request = Request([1] * 4, Settings(1.0, seed=0, max_tokens=9))
        cache = PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), blocks, 2)
        drafter = ModelDrafter(Toy(longest=12, V=1), cache)
        if lag < 4:
            read(drafter, request, 4 - lag)
        assert cache.length(drafter.seq_of(request)) == 4 - lag
        fits = drafter.fits([ScheduledRequest(request, 3, 1, num_drafts)])
        assert fits == (3 + num_drafts <= 2 * blocks)
        assert fits == (drafter.most(request, num_drafts) == num_drafts)
        answers.add(fits)
        assert drafter.num_to_read(ScheduledRequest(request, 3, 1)) == 0
        with nullcontext() if fits else pytest.raises(CacheFull):
            drafter.propose(toy_round(request, num_drafts, V=1))
    assert answers == {True, False}
    drafter = ModelDrafter(
        Toy(longest=12, V=1), PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 1, 2)
    )
    request = Request([1, 1], Settings(1.0, seed=0))
    for num_tokens in (2, 3):
        chunk = ScheduledRequest(request, 0, num_tokens, samples=False)
        assert drafter.fits([chunk]) == (num_tokens == 2)
    assert drafter.most(request, 3) == 1


def test_q_is_what_was_drawn_from_to_the_bit(monkeypatch):
    """In any dtype of the model, also where rows draft different numbers of tokens."""
    drawn = []

    def noted(self, logits, masked, **settings):
        drawn.append(probabilities(logits, **settings))
        return drawn[-1]

    monkeypatch.setattr(Ops, "probabilities", noted)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        llama = Llama(Config(**SMALL), dtype=dtype)
        for num_drafts in ([2, 2], [1, 2]):
            drafter = ModelDrafter(llama, KVCache(llama.kv_spec(), 20, 2))
            requests = [Request([1, 2], Settings(1.0, seed=i)) for i in range(2)]
            drawn.clear()
            round = Round(requests, num_drafts, Drawing(261), target=Place(llama.device, dtype))
            drafted, q = drafter.propose(round)
            assert q.dtype == drawn[0].dtype
            assert torch.equal(q[:, 0], drawn[0]) and torch.equal(q[1, 1], drawn[1][-1])
            assert (drafted[1] >= 0).all()


# ---- The target's INT4 copy, in the target's cache


@pytest.fixture(scope="module")
def small(base) -> tuple[Model, Draft]:
    """Random weights, and a byte is a token."""
    model = Model.load(base, "cpu", torch.float64)
    return model, load_draft("self", model)


def test_int4_copy_has_the_targets_layers_in_4_bits_and_shares_the_rest(base, small):
    model, draft = small
    target = model.llama
    (copy,) = draft.models
    assert copy.embed is target.embed and copy.head is target.head
    plain = Llama.load(base, "cpu", torch.float64, trainable=True)
    tensors = copy.named_tensors()
    for name, tensor in plain.named_tensors().items():
        if "norm" in name or not name.startswith("model.layers"):
            assert torch.equal(tensors[name], target.named_tensors()[name])
        else:
            tensor.copy_(quantize(tensor.float(), 4, 128).dequantize())
    text = torch.arange(1, 40)
    assert torch.allclose(copy(text), plain(text), atol=1e-9)
    assert not torch.allclose(copy(text), target(text), atol=1e-2)


def stored(cache, seq: int, length: int) -> list[Tensor]:
    """All that is stored of a text's first tokens, to the bit."""
    S = cache.block_size
    blocks = cache.sequence(seq).block_table
    slots = torch.tensor([blocks[i // S] * S + i % S for i in range(length)])
    parts = [*cache.keys.parts, *cache.values.parts]
    return [part.flatten(1, 2)[:, slots] for part in parts]


def equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "kv, bits", [("paged", "16"), ("paged", "8"), ("paged", "8/4"), ("contiguous", "4")]
)
def test_what_the_target_stored_stays_to_the_bit(small, kv, bits):
    assert bits in WIDTHS
    model, draft = small
    engine = Engine(model, draft, Options(max_len=90, max_batch=3, kv=kv, kv_bits=bits), tokens=300)
    runner = engine.runner
    cache = engine.caches[0]
    requests = []
    for i in range(3):
        chosen = Settings(1.0, seed=i, max_tokens=60, gamma=2 + i)
        requests.append(Request(model.encode("Once upon a time" + " so" * i), chosen))
        runner.open(requests[-1])
    runner.step([runner.schedule(request) for request in requests])
    for _ in range(3):
        scheduled = [runner.schedule(request) for request in requests]
        lengths = [len(request.tokens) - 1 for request in requests]
        before = [stored(cache, r.seq, length) for r, length in zip(requests, lengths)]
        num_drafts = [item.num_drafts for item in scheduled]
        round = Round(requests, num_drafts, runner.drawing, target=runner.target)
        drafted, _ = runner.drafter.propose(round)
        assert (drafted >= 0).sum() == 2 + 3 + 4
        assert [cache.length(request.seq) for request in requests] == lengths
        runner.step(scheduled)
        for request, length, was in zip(requests, lengths, before):
            assert equal(was, stored(cache, request.seq, length))
        if kv == "paged":
            cache.check()


def drafting(cache, num_drafts: int, prompt=(1, 0)) -> tuple[ModelRunner, Request]:
    """A text that has its first new token, and may draft now."""
    runner = ModelRunner(TARGET, cache, Drawing(3), drafter=SelfDrafter(COPY, cache))
    chosen = Settings(1.0, seed=3, max_tokens=7 - len(prompt), gamma=num_drafts)
    request = Request(list(prompt), chosen)
    runner.open(request)
    runner.step([runner.schedule(request)])
    assert [stats.num_drafts for stats in request.rounds] == [0]  # in any cache, shared or not
    return runner, request


def test_no_block_with_a_drafts_keys_and_values_is_cached():
    cache = PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 40, 1)
    runner, request = drafting(cache, 2)
    while not request.finish_reason:
        drafted, _ = runner.drafter.propose(toy_round(request, request.num_remaining))
        cache.check()
        longer = [*request.tokens, *drafted[0].tolist(), 0]  # a text that begins with the drafts
        seq, num_cached = cache.open(longer)
        assert num_cached < len(request.tokens)
        cache.free(seq)
        runner.step([runner.schedule(request)])
    assert cache.pool.key_of
    for block, (_, (token,)) in cache.pool.key_of.items():  # the target's digit of its token
        digit = cache.values.parts[0][0, block].round().long().item()
        assert digit in [(token + 1) * 4**i for i in range(7)]


def test_the_copy_drafts_only_behind_what_the_target_has_read():
    """After a preemption the target reads all but the last token first, as a chunk."""
    cache = toy_cache(1)
    runner, request = drafting(cache, 3)
    assert runner.schedule(request).num_drafts > 0
    request.tokens += [1, 0]
    item = runner.schedule(request)
    assert (item.num_tokens, item.num_drafts, item.samples) == (2, 0, False)


def test_siblings_get_the_texts_that_they_get_alone(small):
    """One has its prompt in the cache at once, another reads it: γ must not depend on that."""
    model, draft = small

    def requests() -> list[Request]:
        chosen = [Settings(1.0, seed=i, max_tokens=20, gamma=3) for i in range(3)]
        tokens = model.encode("Once upon a time")
        return [Request(tokens, each, model.eos_token_ids) for each in chosen]

    alone = requests()
    for request in alone:
        list(
            Engine(model, draft, Options(max_len=60, max_batch=1), tokens=60).batcher.run([request])
        )
    siblings = requests()
    for request in siblings[1:]:
        request.sibling = siblings[0]
    list(Engine(model, draft, Options(max_len=60, max_batch=3), tokens=200).batcher.run(siblings))
    assert [r.tokens for r in siblings] == [r.tokens for r in alone]
    assert len({tuple(r.tokens) for r in siblings}) == 3
