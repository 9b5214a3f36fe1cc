"""Equal bits, end to end: a row of logits is a function of the text before it, to the bit, whatever
shares its passes; and so is what is drawn from it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from batcher import Batcher
from checkpoint.formats import Quantization
from conftest import examples
from cpu import CPU, native
from drafters import Drafter, ModelDrafter, SelfDrafter
from eagle import EagleDrafter
from kernels import Ops
from kvcache import Cache, KVCache
from lookup import LookupDrafter
from model import Llama
from paged import PagedCache
from quant import WIDTHS
from request import Request, Settings
from runner import ModelRunner, ScheduledRequest
from speculative import Drawing, Proposal, Round
from testing.heads import random_head
from testing.models import SMALL, random_llama
from testing.toys import Place

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
LONGEST = 130
WEIGHTS = (torch.float32, torch.bfloat16, 8, 4, "nf4", "fp8")
Rows = dict[tuple[int, ...], Tensor]  # a text -> the row after it


def random_model(weights: Any, dtype: torch.dtype = torch.float32, **config: Any) -> Llama:
    """weights: a dtype, or bits."""
    config = dict(max_position_embeddings=LONGEST) | config
    if not isinstance(weights, torch.dtype):
        config["quantization"] = Quantization(weights)
        weights = None
    return random_llama(7, CPU(), dtype, weight_dtype=weights, **config)


class Recorder(ModelRunner):
    """A runner that keeps the target's rows, the distributions of drafts, and EAGLE's newest rows.

    A distribution's text ends with the drafts before it; `split` is the length without them.
    """

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.logits: list[tuple[tuple[int, ...], Tensor]] = []
        self.q: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # (split, text) -> a distribution
        self.z: Rows = {}

    def _run_target(
        self, scheduled: Sequence[ScheduledRequest], round: Round, proposal: Proposal, *more: Any
    ) -> Tensor:
        logits = super()._run_target(scheduled, round, proposal, *more)
        rows = iter(logits)
        rounds = [item for item in scheduled if item.samples]
        for b, (item, drafts) in enumerate(zip(rounds, proposal.tokens.tolist())):
            text = tuple(item.request.tokens)
            for j in range(item.num_drafts + 1):
                after = (*text, *drafts[:j])
                self.logits.append((after, next(rows)))
                if proposal.q is not None and j < item.num_drafts:
                    self.q[len(text), after] = proposal.q[b, j]
        return logits

    def step(self, scheduled: Sequence[ScheduledRequest]) -> dict[Request, list[int]]:
        new_tokens = super().step(scheduled)
        last_z = self.drafter.last_z if isinstance(self.drafter, EagleDrafter) else {}
        for request, z in last_z.items():
            length = self.cache.length(request.seq)  # its last row has read one token more
            self.z[tuple(request.tokens[: length + 1])] = z
        return new_tokens


class Reader:
    """Reads texts, each at once and alone: row after row of its logits."""

    def __init__(self, llama: Llama, kv_bits: str):
        self.llama = llama
        self.kv_bits = kv_bits
        self.rows: Rows = {}

    def row(self, text: tuple[int, ...]) -> Tensor:
        if text not in self.rows:
            cache = KVCache(self.llama.kv_spec(WIDTHS[self.kv_bits]), len(text))
            seq, _ = cache.open(())
            logits = self.llama(torch.tensor(text), cache.extend([(seq, text)]))
            for n, row in enumerate(logits, 1):
                self.rows[text[:n]] = row
        return self.rows[text]


def drafter_of(name: str, target: Llama, cache: Cache, make: Callable) -> Drafter | None:
    """cache: the target's. make: makes a cache for another model."""
    config = target.config
    if name == "model":
        draft = random_model(torch.float32, hidden_size=32, num_hidden_layers=1)
        return ModelDrafter(draft, make(draft))
    if name == "self":
        sizes = {field: getattr(config, field) for field in (*SMALL, "model_type")}
        return SelfDrafter(random_model(4, target.dtype, **sizes), cache)
    if name == "eagle":
        head = random_head(target, dtype=target.dtype)
        return EagleDrafter(head.pack_weights(), cache)
    return LookupDrafter() if name == "ngram" else None


@st.composite
def models(draw) -> dict[str, Any]:
    """Sizes that fill registers, panels and stretches, or do not."""
    G, R = (draw(st.integers(1, most)) for most in (2, 4))
    return dict(
        hidden_size=draw(st.sampled_from([24, 70, 136])),
        intermediate_size=draw(st.sampled_from([33, 40, 150])),
        num_attention_heads=G * R,
        num_key_value_heads=G,
        head_dim=draw(st.sampled_from([6, 10, 16, 64])),
        tie_word_embeddings=draw(st.booleans()),
        model_type=draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
    )


TEXT = st.fixed_dictionaries(
    dict(
        shared=st.sampled_from([0, 0, 5, 40]),
        own=st.integers(1, 12) | st.integers(13, 70),
        count=st.integers(1, 10),
        gamma=st.sampled_from([None, 0, 1, 3, 4]),
        temperature=st.sampled_from([0.0, 1.0, 0.7]),
        top_k=st.sampled_from([None, None, 5]),
        min_p=st.sampled_from([None, None, 0.05]),
    )
)
WORKLOAD = st.fixed_dictionaries(
    dict(
        texts=st.lists(TEXT, min_size=1, max_size=4),
        kv_bits=st.sampled_from([*WIDTHS]),
        block_size=st.none() | st.integers(1, 20),  # None: contiguous
        spare=st.integers(0, 4),  # blocks beyond those of the longest text
        budget=st.integers(5, 90),
        drafter=st.sampled_from(["none", "ngram", "model", "self", "eagle"]),
        vocab_size=st.sampled_from([20, 261]),  # tokens that can be drawn, of 261
        coupled=st.booleans(),
        threads=st.integers(1, 3),
        seed=st.integers(0, 2**30),
    )
)


def requests_of(w: dict[str, Any]) -> list[Request]:
    generator = torch.Generator().manual_seed(w["seed"])
    prefix = torch.randint(20, (40,), generator=generator).tolist()
    requests = []
    for seed, text in enumerate(w["texts"]):
        own = torch.randint(20, (text["own"],), generator=generator).tolist()
        names = ("gamma", "temperature", "top_k", "min_p")
        chosen = {name: text[name] for name in names}
        request = Request(
            prefix[: text["shared"]] + own,
            Settings(**chosen, seed=seed, max_tokens=text["count"]),
        )
        requests.append(request)
    return requests


def recorded(
    llama: Llama, w: dict[str, Any], requests: list[Request], drafter: str, alone: bool
) -> Recorder:
    """Make the texts: all together; or one after the other, on one thread and with much room."""
    bits = WIDTHS[w["kv_bits"]]
    size = w["block_size"]
    longest = max(len(request.tokens) + request.num_remaining for request in requests)

    def make(model: Llama) -> Cache:
        spec = model.kv_spec(bits, draft_layers=int(drafter == "eagle"))
        if alone or size is None:
            return KVCache(spec, LONGEST, len(requests))
        return PagedCache(spec, -(-longest // size) + w["spare"], size)

    cache = make(llama)
    runner = Recorder(
        llama,
        cache,
        Drawing(w["vocab_size"], w["coupled"]),
        drafter=drafter_of(drafter, llama, cache, make),
        budget=512 if alone else w["budget"],
    )
    torch.set_num_threads(1 if alone else w["threads"])
    for _ in Batcher(runner, 1 if alone else 4).run(requests):
        pass
    torch.set_num_threads(1)
    return runner


def check_bits(llama: Llama, w: dict[str, Any]) -> Counter[str]:
    """-> how many q and z were compared, how many drafts verified, how many texts preempted."""
    reader = Reader(llama, w["kv_bits"])
    plain_requests, lone_requests, requests = (requests_of(w) for _ in range(3))
    plain = recorded(llama, w, plain_requests, "none", alone=True)
    lone = recorded(llama, w, lone_requests, w["drafter"], alone=True)
    runner = recorded(llama, w, requests, w["drafter"], alone=False)
    for one in (plain, lone, runner):
        for text, row in one.logits:
            assert torch.equal(row, reader.row(text)), len(text)
    if w["kv_bits"] == "16":  # what no cache stores is not rounded, either
        torch.set_num_threads(w["threads"])
        for text in (tuple(request.tokens) for request in requests):
            rows = llama(torch.tensor(text))
            assert all(torch.equal(row, reader.row(text[:n])) for n, row in enumerate(rows, 1))
        torch.set_num_threads(1)
    compared: Counter[str] = Counter()
    for kind in ("q", "z"):
        rows, wanted = getattr(runner, kind), getattr(lone, kind)
        for place in rows.keys() & wanted.keys():
            assert torch.equal(rows[place], wanted[place]), (kind, place)
            compared[kind] += 1
    for request, wanted in zip(requests, plain_requests):
        if w["coupled"] or request.settings.temperature == 0:
            assert request.tokens == wanted.tokens
        compared["preemptions"] += request.num_preemptions
        compared["drafts"] += sum(stats.num_drafts for stats in request.rounds)
    return compared


def crowded(drafter: str, **changed: Any) -> dict[str, Any]:
    """Four texts that preempt each other, two of them with the same beginning."""
    count = changed.pop("count", 18)
    common = dict(count=count, temperature=1.0, gamma=3, top_k=None, min_p=None)
    texts = [dict(shared=5 * (i % 2), own=(3, 30, 1, 17)[i], **common) for i in range(4)]
    sizes = dict(vocab_size=20 if drafter == "ngram" else 261)
    sizes |= dict(kv_bits="8/4", block_size=4, spare=4, budget=24, threads=2, seed=0)
    return dict(texts=texts, drafter=drafter, coupled=True, **sizes) | changed


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@examples(3)
@given(models(), st.sampled_from([torch.float32, torch.float32, torch.bfloat16]), WORKLOAD)
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_whatever_shares_its_passes(weights, config, dtype, w):
    check_bits(random_model(weights, dtype, **config), w)


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "self", "eagle"])
@torch.inference_mode()
def test_texts_that_preempt_each_other_have_the_rows_that_they_have_alone(drafter):
    """In coupled mode, and in exact mode, where drafts have distributions."""
    llama = random_model(8)
    for coupled in (True, False):
        compared = check_bits(llama, crowded(drafter, coupled=coupled))
        assert compared["preemptions"] > 0
        has_drafts = drafter != "none"
        assert (compared["drafts"] > 0) == has_drafts
        has_q = has_drafts and not coupled and drafter != "ngram"  # look-ups are one-hot
        assert (compared["q"] > 0) == has_q
        assert (compared["z"] > 0) == (drafter == "eagle")


@pytest.mark.parametrize("planted", ["attention", "product"])
@torch.inference_mode()
def test_a_second_order_of_sums_is_seen(planted, monkeypatch):
    """PyTorch's, where a text has more than 16 new tokens, or a step more than 4 rows."""
    llama = random_model(torch.float32, hidden_size=136)  # more than a stretch
    w = crowded("none", kv_bits="16", count=4)
    monkeypatch.setattr(CPU, "native_model", lambda *_: None)  # layer by layer
    check_bits(llama, w)
    attend = native.attend
    product = native.product

    def other_attend(qkv: Tensor, G: int, rope: Any, metadata: Any, *more: Any) -> Tensor:
        of = Ops().attend if max(metadata.num_new_tokens) > 16 else attend
        return of(qkv, G, rope, metadata, *more)

    def other_product(x: Tensor, weight: native.Weight) -> Tensor:
        if len(x) <= 4:
            return product(x, weight)
        return F.linear(x, weight.rows(torch.arange(weight.N)))

    other = dict(attention=("attend", other_attend), product=("product", other_product))[planted]
    monkeypatch.setattr(native, *other)
    with pytest.raises(AssertionError):
        check_bits(llama, w)


# ---- Sampling ------------------------------------------------------------------------------------

FREE = dict(temperature=0.7, top_k=None, top_p=None, min_p=None)
CHOSEN = st.fixed_dictionaries(
    dict(
        temperature=st.sampled_from([None, 0.0, 0.7, 1.0]),
        top_k=st.sampled_from([None, 0, 1, 5]),
        top_p=st.sampled_from([None, 1.0, 0.9]),
        min_p=st.sampled_from([None, 0.0, 0.1]),
    )
)


@examples(10)
@given(
    st.lists(CHOSEN, min_size=2, max_size=5),
    st.sampled_from([5, 300, 40_000]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 3),
    st.integers(0, 2**30),
)
@example([FREE] * 4 + [FREE | dict(top_p=0.9)], 40_000, torch.float64, 2, 0)
@example([FREE] * 4 + [FREE | dict(min_p=0.1)], 40_000, torch.float64, 2, 0)
@torch.inference_mode()
def test_a_row_is_filtered_and_picked_as_it_is_alone(choices, size, dtype, threads, seed):
    """Beside rows with other settings."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(len(choices), size, dtype=dtype)
    requests = [Request([1], Settings(**chosen, seed=i)) for i, chosen in enumerate(choices)]

    def drawn(some: list[Request], rows: Tensor) -> tuple[Tensor, Tensor]:
        round = Round(some, [0] * len(some), Drawing(size), target=Place(ops=CPU()))
        drafted = round.no_drafts().tokens
        p = round.probabilities(rows.clone(), range(len(some)), [0] * len(some), drafted)
        return p, round.text_rng().pick(p)

    torch.set_num_threads(threads)
    p, picked = drawn(requests, logits)
    torch.set_num_threads(1)
    for b, request in enumerate(requests):
        p_alone, picked_alone = drawn([request], logits[b : b + 1])
        assert torch.equal(p[b : b + 1], p_alone), choices[b]
        assert picked[b] == picked_alone
