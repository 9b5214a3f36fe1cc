"""Drafters: n-gram look-up beside a slow search, rows whose settings differ, and the target's INT4 copy in the target's cache."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint.config import Config
from conftest import SMALL, Cipher
from drafters import ModelDrafter, NgramDrafter, SelfDrafter
from generate import Engine, Model, load_draft
from kernels import Ops
from kvcache import CacheFull, KVCache
from model import Llama
from paged import PagedCache
from proof import Toy, Walk, distance, enumerate_law, own_law
from quant import WIDTHS, dequantize, quantize
from request import Request, Round, Settings, pack
from sampling import TEXT, Keyed, draft_role, probabilities
from speculative import Decoder, Scheduled


def slow_look_up(text: list[int], count: int, longest: int) -> list[int]:
    """The longest suffix that occurred before, where it occurred last, and what followed; what is proposed counts as text."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for j in range(count):
                    grown.append(grown[end + j])
                return grown[len(text) :]
    return []


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6),
)
def test_ngrams_are_what_a_slow_search_finds_while_the_text_grows(text, longest, growth):
    drafter, request = NgramDrafter(longest), Request(text, Settings())
    drafter.open(request)
    for count, token in [(3, 0), *growth]:
        assert drafter.look_up(request, count) == slow_look_up(request.tokens, count, longest)
        request.tokens.append(token)
        drafter.keep(request, len(request.tokens) - 1)


@pytest.mark.parametrize("blocks", [2, 3])
def test_a_model_says_just_what_fits(blocks):
    """If it says that a round's drafts fit they are written, and if it says that they do not, they cannot be."""
    said = set()
    for lag, gamma in itertools.product(range(1, 5), range(1, 6)):
        request = Request([1] * 4, Settings(1.0, seed=0, max_tokens=9))
        drafter = ModelDrafter(
            Toy(longest=12, V=1), PagedCache(1, 1, 1, blocks, 2, dtype=torch.float64)
        )
        drafter.open(request)
        drafter.follow(request, 4 - lag)
        fits = drafter.fits([Scheduled(request, 1, gamma)])
        said.add(fits)
        with nullcontext() if fits else pytest.raises(CacheFull):
            drafter.propose(Round([request], [gamma], 1, torch.device("cpu"), torch.float64))
        assert fits == (3 + gamma <= 2 * blocks)
    assert said == {True, False}


def test_an_ngram_proposal_is_a_one_hot_distribution():
    drafter, a, b = (
        NgramDrafter(),
        Request([1, 2, 3, 1, 2], Settings(seed=1)),
        Request([4, 5], Settings(seed=2)),
    )
    for request in (a, b):
        drafter.open(request)
    assert drafter.room(a, 5) == 5 and drafter.room(b, 5) == 0
    drafted, q = drafter.propose(Round([a, b], [2, 0], 6, torch.device("cpu")))
    assert (
        drafted.tolist() == [[3, 1], [-1, -1]]
        and q.sum(-1).tolist() == [[1, 1], [0, 0]]
        and q[0, 0, 3] == q[0, 1, 1] == 1
    )


def test_each_row_has_its_own_settings_seed_and_place():
    chosen = [
        Settings(0.5, seed=4),
        Settings(1.0, top_k=2, seed=5),
        Settings(0, min_p=0.1, seed=6),
        Settings(2.0, top_p=0.5, seed=7),
    ]
    requests = [Request([1] * (i + 1), setting) for i, setting in enumerate(chosen)]
    round, logits = (
        Round(requests, [1, 2, 3, 0], 5, torch.device("cpu")),
        torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
    )
    rows = [2, 0, 1, 3, 0]
    together = round.probabilities(logits, rows)
    for got, row, one in zip(together, rows, logits):
        s = chosen[row]
        assert torch.allclose(
            got, probabilities(one[:5], s.temperature, s.top_k, s.top_p, s.min_p), atol=1e-7
        )
    probs = together[:2]
    alone = [
        int(Keyed(torch.tensor([seed]), torch.tensor([at]), draft_role(1)).pick(p[None]))
        for seed, at, p in zip((6, 4), (3, 1), probs)
    ]
    assert round.draft_coin(1, [2, 0]).pick(probs).tolist() == alone
    assert round.text_coin().pick(probs[[0, 0, 0, 0]]).tolist() == [
        int(Keyed(torch.tensor([seed]), torch.tensor([at]), TEXT).pick(probs[:1]))
        for seed, at in zip((4, 5, 6, 7), (1, 2, 3, 4))
    ]
    round = Round(requests, [1, 1, 1, 0], 5, torch.device("cpu"), coupled=True)
    alone = [
        int(Keyed(torch.tensor([seed]), torch.tensor([at + 1]), TEXT).pick(p[None]))
        for seed, at, p in zip((6, 4), (3, 1), probs)
    ]
    assert round.draft_coin(1, [2, 0]).pick(probs).tolist() == alone
    wide = together[:1].expand(8, -1)
    alone = [
        int(Keyed(torch.tensor([seed]), torch.tensor([at]), TEXT).pick(wide[:1]))
        for seed, first in zip((4, 5, 6, 7), (1, 2, 3, 4))
        for at in (first, first + 1)
    ]
    assert round.text_coin().pick(wide).tolist() == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_q_is_what_was_drawn_from_to_the_bit_whatever_the_model_computes_in(dtype, monkeypatch):
    llama, seen = Llama(Config(**SMALL), dtype=dtype), []
    monkeypatch.setattr(
        Ops, "probabilities", lambda self, *args: seen.append(probabilities(*args)) or seen[-1]
    )
    for gammas in ([2, 2], [1, 2]):
        drafter, requests = (
            ModelDrafter(llama, KVCache.of(llama, 20, 2)),
            [Request([1, 2], Settings(1.0, seed=i)) for i in range(2)],
        )
        for request in requests:
            drafter.open(request)
        seen.clear()
        drafted, q = drafter.propose(Round(requests, gammas, 261, llama.device, dtype))
        assert (
            q.dtype == seen[0].dtype
            and torch.equal(q[:, 0], seen[0])
            and torch.equal(q[1, 1], seen[1][-1])
            and (drafted[1] >= 0).all()
        )


def test_pack():
    tokens, last = pack([[1, 2, 3], [4], [5, 6]], torch.device("cpu"))
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6] and last.tolist() == [2, 3, 5]


# ---- The target's INT4 copy


@pytest.fixture(scope="module")
def tiny() -> Model:
    return Model.load("tiny", "cpu", torch.float64)


@pytest.fixture(scope="module")
def copy(tiny) -> Llama:
    return load_draft("self", tiny)


def test_the_copy_is_the_targets_layers_in_4_bits_and_the_rest_is_the_targets(tiny, copy):
    own, plain = (
        tiny.llama,
        Llama.load("tiny", "cpu", torch.float64, trainable=True).requires_grad_(False),
    )
    assert copy.embed is own.embed and copy.head is own.head
    places = copy.places()
    for name, place in plain.places().items():
        if "norm" in name or not name.startswith("model.layers"):
            assert torch.equal(places[name], own.places()[name])
        else:
            assert places[name].dtype == torch.uint8 and places[name].nbytes == place.numel() / 2
            place.copy_(dequantize(*quantize(place.float(), 4, 128)))
    text = torch.arange(1, 40)
    assert torch.allclose(copy(text), plain(text), atol=1e-9) and not torch.allclose(
        copy(text), own(text), atol=1e-2
    )


def held(cache, seq: int, length: int) -> list[Tensor]:
    """All that is stored of a text's first tokens, to the bit."""
    S, blocks = cache.block_size, [seq] if isinstance(cache, KVCache) else cache._texts[seq].blocks
    where = torch.tensor([blocks[i // S] * S + i % S for i in range(length)])
    return [
        part.flatten(1, 2)[:, where] for kept in (cache.keys, cache.values) for part in kept.parts
    ]


@pytest.fixture(scope="module")
def small(base) -> tuple[Model, Llama]:
    """Quicker: random weights, and a byte is a token."""
    model = Model.load(base, "cpu", torch.float64)
    return model, load_draft("self", model)


@pytest.mark.parametrize("kv", ["paged", "contiguous"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_what_the_target_stored_stays_as_it_was_to_the_bit(small, kv, bits):
    model, copy = small
    engine = Engine(model, copy, 300, 90, 3, kv=kv, kv_bits=bits)
    maker, cache = engine.decoder, engine.caches[0]
    requests = [
        Request(
            model.encode("Once upon a time" + " so" * i),
            Settings(1.0, seed=i, max_tokens=60, gamma=2 + i),
        )
        for i in range(3)
    ]
    for request in requests:
        maker.open(request)
    maker.step([maker.plan(request) for request in requests])
    for _ in range(4):
        work = [maker.plan(request) for request in requests]
        lengths = [len(request.tokens) - 1 for request in requests]
        before = [held(cache, request.seq, length) for request, length in zip(requests, lengths)]
        drafted, _ = maker.drafter.propose(
            Round(
                requests,
                [w.num_drafts for w in work],
                maker.vocab,
                maker.target.device,
                torch.float64,
            )
        )
        assert [cache.length(request.seq) for request in requests] == lengths and (
            drafted >= 0
        ).sum() == 2 + 3 + 4
        maker.step(work)
        for request, length, was in zip(requests, lengths, before):
            assert all(
                torch.equal(a, b)
                for a, b in zip(was, held(cache, request.seq, length), strict=True)
            )
        if kv == "paged":
            cache.check()


@pytest.mark.parametrize(
    "kv, bits, ways",
    [
        ("paged", "16", ((3, 5), (None, 5))),
        ("contiguous", "16", ((4, 1),)),
        ("contiguous", "8", ((1, 1),)),
        ("paged", "8/4", ((3, 5),)),
    ],
)
def test_greedy_texts_are_the_targets_own(small, kv, bits, ways):
    greedy_texts(*small, kv, bits, 20, 8, ways)


def test_greedy_texts_of_the_embedded_model_are_its_own(tiny, copy):
    greedy_texts(tiny, copy, "paged", "16", 8, 4, ((3, 5),))


def greedy_texts(
    model: Model,
    copy: Llama,
    kv: str,
    bits: str,
    count: int,
    blocks: int,
    ways: Sequence[tuple[int | None, int]],
) -> None:
    """ways: γ, and how many at a time; five at a time have a pool that is so small that some must give way."""
    prompts = [
        "Once upon a time",
        "Once upon a time, there was a big dog",
        "Lily saw",
        "One day, Tom",
        "Mom said",
    ]

    def texts(
        draft,
        gamma: int | None,
        together: int,
        coupled: bool = False,
        temperature: float = 0.0,
        kv: str = kv,
    ) -> list:
        room = (
            dict(kv_memory=blocks * 16 * KVCache.of(model.llama, 1, bits=WIDTHS[bits]).bytes)
            if kv == "paged"
            else {}
        )
        engine = Engine(model, draft, 400, 80, together, coupled, kv=kv, kv_bits=bits, **room)
        requests = [
            Request(
                model.encode(prompt),
                Settings(temperature, seed=i, max_tokens=count, gamma=gamma),
                model.ends,
            )
            for i, prompt in enumerate(prompts)
        ]
        list(engine.batch.run(requests))
        assert (
            together == 1
            or kv == "contiguous"
            or sum(request.preempted for request in requests) > 0
        )
        assert (
            gamma in (0, None)
            or coupled
            or sum(taken.accepted for request in requests for taken in request.rounds) > 10
        )
        return [request.tokens for request in requests]

    plain = texts(None, 0, 5, kv="contiguous")
    for gamma, together in ways:
        assert texts(copy, gamma, together) == plain
    if bits == "16" and len(ways) > 1:
        sampled = texts(None, 0, 5, temperature=1.0, kv="contiguous")
        assert (
            texts(copy, 3, 5, coupled=True, temperature=1.0)
            == sampled
            != texts(copy, 3, 5, temperature=1.0)
        )


Kind = tuple[
    tuple[int, ...], int, int, tuple[int, ...], dict
]  # prompt, γ, tokens, ends of text, settings


def law_in_one_cache(kinds: Sequence[Kind], paged: bool, copy: Toy = Cipher(seed=2)) -> list[dict]:
    """The output law of each kind of row where target and draft share a cache, and the draft stores other digits than the target."""

    def run(walk: Walk, n: int) -> list:
        chosen = [branch.decide([1.0] * len(kinds)) for branch in walk.branches]
        requests = [
            Request(
                list(kinds[i][0]),
                Settings(seed=row, max_tokens=kinds[i][2], gamma=kinds[i][1], **kinds[i][4]),
                kinds[i][3],
            )
            for row, i in enumerate(chosen)
        ]
        cache = (
            PagedCache(1, 1, 1, 7 * n, 1, dtype=torch.float64)
            if paged
            else KVCache(1, 1, 1, 7, n, dtype=torch.float64)
        )
        maker = Decoder(Toy(seed=1), cache, 3, SelfDrafter(copy, cache), coin=walk)
        for request in requests:
            maker.open(request)
        while work := [maker.plan(request) for request in requests if not request.finish_reason]:
            maker.step(work)
            assert all(cache.length(request.seq) == len(request.tokens) - 1 for request in requests)
        return [
            (i, tuple(request.tokens[request.prompt :])) for i, request in zip(chosen, requests)
        ]

    law = enumerate_law(run)
    return [{text: p for (kind, text), p in law.items() if kind == i} for i in range(len(kinds))]


KINDS: list[Kind] = [
    ((1,), 3, 4, (), {}),
    ((0, 2), 2, 4, (0,), {}),
    ((2, 1, 0), 1, 3, (), dict(top_k=2)),
    ((0,), 0, 3, (), {}),
    ((1, 1), 3, 3, (2,), dict(temperature=0.5)),
    ((2, 1), 2, 3, (), dict(temperature=0)),
    ((1, 2), 2, 3, (), dict(top_p=0.6)),
    ((1, 0), 2, 3, (), dict(min_p=0.5)),
]


@pytest.mark.parametrize("paged", [False, True])
def test_every_row_follows_the_targets_law_with_one_cache_for_both(paged):
    for (prompt, _, count, ends, chosen), law in zip(
        KINDS, law_in_one_cache(KINDS, paged), strict=True
    ):
        assert (
            distance(
                law,
                own_law(
                    Toy(seed=1), prompt, count, ends, lambda logits: probabilities(logits, **chosen)
                ),
            )
            < 1e-12
        )


def test_the_law_of_a_text_that_begins_as_an_earlier_one_went_on():
    """It finds that one's blocks, of a token each: what the target stored, or else it reads another text."""
    went_on = own_law(Toy(seed=1), (1,), 2, (), lambda logits: logits.softmax(-1))
    first, second = (
        ((1,), 2, 3),
        ((1, *max(went_on, key=went_on.__getitem__)), 1, 3),
    )  # prompt, γ, tokens

    def run(walk: Walk, n: int) -> list:
        cache, outcomes, found = PagedCache(1, 1, 1, 14 * n, 1, dtype=torch.float64), [], 0
        maker = Decoder(Toy(seed=1), cache, 3, SelfDrafter(Cipher(seed=2), cache), coin=walk)
        for prompt, gamma, count in (first, second):
            requests = [
                Request(list(prompt), Settings(seed=row, max_tokens=count, gamma=gamma))
                for row in range(n)
            ]
            for request in requests:
                maker.open(request)
            found = sum(cache.length(request.seq) for request in requests)
            while work := [
                maker.plan(request) for request in requests if not request.finish_reason
            ]:
                maker.step(work)
            for request in requests:
                maker.close(request)
            cache.check()
            outcomes.append([tuple(request.tokens[request.prompt :]) for request in requests])
        assert found >= n
        return outcomes[1]

    law = enumerate_law(run, width=256)
    assert (
        distance(
            law, own_law(Toy(seed=1), second[0], second[2], (), lambda logits: logits.softmax(-1))
        )
        < 1e-12
    )


def test_the_enumeration_catches_what_a_draft_leaves_in_the_cache(monkeypatch):
    """The copy's own key and value of the last token stay, as if they were the target's."""
    right = SelfDrafter.propose

    def leaves(self, round):
        found = right(self, round)
        for request, gamma in zip(round.requests, round.gammas):
            if gamma:
                self.cache.extend([(request.seq, request.tokens[-1:])])
        return found

    monkeypatch.setattr(SelfDrafter, "propose", leaves)
    monkeypatch.setattr(
        Decoder,
        "_pending",
        lambda self, w: (
            w.request.tokens[self.cache.length(w.request.seq) :] or w.request.tokens[-1:]
        ),
    )
    kind = ((1,), 1, 3, (), {})
    try:
        law = law_in_one_cache([kind], False)[0]
    except AssertionError:
        return
    assert (
        distance(law, own_law(Toy(seed=1), (1,), 3, (), lambda logits: logits.softmax(-1))) > 1e-3
    )


def drafting(
    cache, gamma: int, prompt: Sequence[int] = (1, 0), target: Toy = Toy(seed=1)
) -> tuple[Decoder, Request]:
    """A text that has made its first token, and may draft now."""
    maker, request = (
        Decoder(target, cache, 3, SelfDrafter(Cipher(seed=2), cache)),
        Request(list(prompt), Settings(1.0, seed=3, max_tokens=7 - len(prompt), gamma=gamma)),
    )
    maker.open(request)
    maker.step([maker.plan(request)])
    assert [taken.drafted for taken in request.rounds] == [
        0
    ]  # the first token is drawn without drafts
    return maker, request


def test_no_block_with_the_drafts_keys_and_values_is_ever_published():
    cache = PagedCache(1, 1, 1, 40, 1, dtype=torch.float64)
    maker, request = drafting(cache, 2)
    while not request.finish_reason:
        round = Round([request], [request.left], 3, torch.device("cpu"), torch.float64)
        guesses = maker.drafter.propose(round)[0][0].tolist()
        cache.check()
        other, have = cache.open(
            [*request.tokens, *guesses, 0]
        )  # a text that begins with what was drafted
        assert have < len(request.tokens)  # finds what the target has read at most
        cache.free(other)
        maker.step([maker.plan(request)])
    for block, (key, _) in cache.pool.known.items():
        assert cache.values.parts[0][0, block].round().long().item() in [
            (key[1][0] + 1) * 4**i for i in range(7)
        ]  # the target's digit of its token


def test_a_draft_in_a_block_that_is_shared_or_published_writes_into_a_copy():
    cache = PagedCache(1, 1, 1, 40, 2, dtype=torch.float64)
    maker, request = drafting(cache, 3, (1, 0, 2))
    twin = cache.fork(request.seq)
    was = held(cache, twin, cache.length(twin))
    maker.step([maker.plan(request)])
    assert all(
        torch.equal(a, b) for a, b in zip(was, held(cache, twin, cache.length(twin)), strict=True)
    )
    cache.free(twin)
    published = {block: cache.values.parts[0][0, block].clone() for block in cache.pool.known}
    cache.truncate(request.seq, 1)  # into a block that everybody can find
    request.tokens, request.prompt = request.tokens[:2], 1
    maker.drafter.propose(Round([request], [3], 3, torch.device("cpu"), torch.float64))
    cache.check()
    assert published and all(
        torch.equal(cache.values.parts[0][0, block], was)
        for block, was in published.items()
        if block in cache.pool.known
    )


@pytest.mark.parametrize("paged", [False, True])
def test_a_draft_that_is_interrupted_leaves_the_cache_as_it_was(paged):
    cache = (
        PagedCache(1, 1, 1, 40, 2, dtype=torch.float64)
        if paged
        else KVCache(1, 1, 1, 7, 1, dtype=torch.float64)
    )
    maker, request = drafting(cache, 3)
    whole, calls = maker.drafter.llama, []

    def breaks(tokens, step, rows=None):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(tokens, step, rows)

    breaks.ops = whole.ops
    maker.drafter.llama = breaks
    with pytest.raises(KeyboardInterrupt):
        maker.drafter.propose(Round([request], [3], 3, torch.device("cpu"), torch.float64))
    assert cache.length(request.seq) == len(request.tokens) - 1 and (not paged or cache.check())
    maker.drafter.llama = whole
    while not request.finish_reason:
        maker.step([maker.plan(request)])
    _, other = drafting(KVCache(1, 1, 1, 7, 1, dtype=torch.float64), 3)
    assert other.tokens == request.tokens[: len(other.tokens)] and len(request.tokens) == 7


def test_twins_get_the_texts_that_they_get_alone(small):
    """A twin finds its prompt read, another reads it: γ must not depend on that."""
    model, copy = small
    requests = lambda: [
        Request(
            model.encode("Once upon a time"),
            Settings(1.0, seed=i, max_tokens=20, gamma=3),
            model.ends,
        )
        for i in range(3)
    ]
    alone, twins = requests(), requests()
    for request in alone:
        list(Engine(model, copy, 60, 60).batch.run([request]))
    for request in twins[1:]:
        request.twin = twins[0]
    list(Engine(model, copy, 200, 60, 3).batch.run(twins))
    assert [r.tokens for r in twins] == [r.tokens for r in alone] and len(
        {tuple(r.tokens) for r in twins}
    ) == 3


def test_a_copy_that_costs_more_than_a_pass_is_hardly_tried(small):
    """γ by the clock, on a clock where each of the copy's drafts takes two passes."""
    model, copy = small
    engine = Engine(model, copy, 100, 90)
    engine.decoder._seconds = lambda start, drawn, end: (2.0 * engine.decoder.drafter.count, 1.0)
    propose, engine.decoder.drafter.count = engine.decoder.drafter.propose, 0

    def counted(round):
        engine.decoder.drafter.count = max(round.gammas)
        return propose(round)

    engine.decoder.drafter.propose = counted
    request = Request(model.encode("Once upon a time"), Settings(1.0, seed=1, max_tokens=60), set())
    list(engine.batch.run([request]))
    assert 0 < sum(taken.drafted for taken in request.rounds) < 8
