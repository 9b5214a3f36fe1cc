"""Continuous batching: whoever shares the batch, and whatever the pool, every request gets the tokens it gets alone."""

import gc
import sys
from collections import deque

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batcher import Batcher
from checkpoint.config import Config
from conftest import SMALL, Cipher, write_model
from drafters import ModelDrafter, NgramDrafter, SelfDrafter
from generate import Engine, Model
from kvcache import KVCache
from model import Llama
from paged import PagedCache
from proof import Toy, Walk, distance, enumerate_law, own_law
from quant import Bits
from request import Request, Settings, Writer
from sampling import Keyed, _exponential, _steps, probabilities
from speculative import Decoder

V = 259


def random_llama(seed: int, **config) -> Llama:
    llama = Llama(
        Config(**{**SMALL, "max_position_embeddings": 300, **config}),
        dtype=torch.float64,
        seed=seed,
    )
    for place in llama.places().values():
        place.mul_(10)
    return llama


TARGET, DRAFT, COPY = random_llama(1), random_llama(1, num_hidden_layers=1), random_llama(1)
for place in COPY.places().values():  # as if its weights were rounded: nearly the target
    place.mul_(1 + 0.05 * torch.randn(place.shape, generator=torch.Generator().manual_seed(0)))


def paged(
    llama: Llama, blocks: int, size: int, sharing: bool = True, bits: Bits = (16, 16)
) -> PagedCache:
    c = llama.config
    return PagedCache(
        c.num_hidden_layers,
        c.num_key_value_heads,
        c.head_dim,
        blocks,
        block_size=size,
        dtype=torch.float64,
        prefix_sharing=sharing,
        bits=bits,
    )


def alone(request: Request, drafter: str, coupled: bool, bits: Bits = (16, 16)) -> list[int]:
    """What this request gets by itself, with the contiguous cache."""
    copy = Request(request.tokens[: request.prompt], request.settings, request.ends)
    cache = KVCache.of(TARGET, 300, bits=bits)
    draft = {
        "model": lambda: ModelDrafter(DRAFT, KVCache.of(DRAFT, 300, bits=bits)),
        "self": lambda: SelfDrafter(COPY, cache),
        "ngram": NgramDrafter,
        "none": lambda: None,
    }[drafter]()
    maker = Decoder(TARGET, cache, V, draft, coupled)
    maker.open(copy)
    while not copy.finish_reason:
        maker.step([maker.plan(copy)])
    return copy.tokens[copy.prompt :]


PREFIX = torch.randint(256, (200,), generator=torch.Generator().manual_seed(5)).tolist()


@st.composite
def workloads(draw) -> dict:
    one = st.fixed_dictionaries(
        dict(
            own=st.integers(0, 40),
            shared=st.sampled_from([0, 0, 10, 33, 80]),
            count=st.integers(1, 10),
            temperature=st.sampled_from([0.0, 1.0, 0.7]),
            gamma=st.integers(0, 4),
            arrives=st.integers(0, 8),
            top_k=st.sampled_from([None, 5]),
            cancelled=st.sampled_from([None, None, None, 3]),
        )
    )
    texts = draw(st.lists(one, min_size=1, max_size=4))
    bits = draw(st.sampled_from([(16, 16), (16, 16), (8, 8), (8, 4), (4, 4)]))
    return dict(
        texts=texts,
        size=draw(st.integers(1, 32)),
        spare=draw(st.integers(0, 6)),
        budget=draw(st.integers(5, 64)),
        batch=draw(st.integers(1, 4)),
        drafter=draw(st.sampled_from(["none", "model", "self", "self", "ngram"])),
        coupled=draw(st.booleans()),
        contiguous=draw(st.sampled_from([False, False, True])),
        sharing=draw(st.booleans()),
        bits=bits,
        ahead=draw(st.integers(1, 5)),
    )


def workload(drafter: str, size: int, bits: Bits, coupled: bool = False, **more) -> dict:
    """Four texts, two of them with the same beginning, in a pool that holds little more than one: some must make room."""
    texts = [
        dict(
            own=own,
            shared=shared,
            count=count,
            temperature=1.0,
            gamma=3,
            arrives=i // 3,
            top_k=None,
            cancelled=None,
        )
        for i, (own, shared, count) in enumerate([(3, 0, 14), (0, 4, 14), (1, 4, 12), (2, 0, 10)])
    ]
    return (
        dict(
            texts=texts,
            size=size,
            spare=6,
            budget=20,
            batch=4,
            drafter=drafter,
            coupled=coupled,
            contiguous=False,
            sharing=True,
            bits=bits,
            ahead=4,
        )
        | more
    )


@settings(max_examples=10, deadline=None)
@given(workloads())
@example(workload("model", 4, (16, 16)))
@example(workload("self", 8, (8, 4)))
@example(workload("model", 3, (8, 8), coupled=True, sharing=False))
@example(workload("ngram", 4, (4, 4), batch=2, contiguous=True))
@example(workload("none", 4, (16, 16)))
def test_every_request_gets_the_tokens_it_gets_alone(w):
    requests = []
    for i, text in enumerate(w["texts"]):
        prompt = (
            PREFIX[: text["shared"]]
            + torch.randint(
                256, (text["own"] + 1,), generator=torch.Generator().manual_seed(i)
            ).tolist()
        )
        chosen = Settings(
            text["temperature"],
            text["top_k"],
            seed=i,
            max_tokens=text["count"],
            gamma=text["gamma"],
        )
        requests.append(Request(prompt, chosen, ends=range(0, 12)))
    longest = max(len(r.tokens) + r.left for r in requests)
    blocks = (
        -(-longest // w["size"]) + w["spare"] // w["size"]
    )  # down to the smallest that fits the largest
    cache = (
        (lambda llama: KVCache.of(llama, longest, w["batch"], bits=w["bits"]))
        if w["contiguous"]
        else (lambda llama: paged(llama, blocks, w["size"], w["sharing"], w["bits"]))
    )
    own = cache(TARGET)
    draft = {
        "model": lambda: ModelDrafter(DRAFT, cache(DRAFT)),
        "self": lambda: SelfDrafter(COPY, own),
        "ngram": NgramDrafter,
        "none": lambda: None,
    }[w["drafter"]]()
    batch = Batcher(
        Decoder(TARGET, own, V, draft, w["coupled"], budget=w["budget"], ahead=w["ahead"]),
        w["batch"],
    )
    cancelled, step = set(), 0
    while step <= 8 or batch.waiting or batch.running:
        for request, text in zip(requests, w["texts"]):
            if text["arrives"] == step:
                batch.add(request)
            if (
                text["cancelled"] is not None
                and step == text["arrives"] + text["cancelled"]
                and not request.finish_reason
            ):
                batch.cancel(request)
                cancelled.add(request)
        if batch.waiting or batch.running:
            batch.step()
            assert (
                all(not r.finish_reason for r in batch.running) and len(batch.running) <= w["batch"]
            )
        if not w["contiguous"]:
            for one in [batch.decoder.cache] + ([draft.cache] if w["drafter"] == "model" else []):
                one.check()
        step += 1
        assert step < 2000, "nobody gets on"
    for request in requests:
        made = request.tokens[request.prompt :]
        expected = alone(request, w["drafter"], w["coupled"], w["bits"])
        assert made == (expected[: len(made)] if request in cancelled else expected)
        assert request in cancelled or request.finish_reason
        assert len(request.origins) == len(made) and (
            w["drafter"] != "none" or {"plain"}.issuperset(request.origins)
        )
    if not w["contiguous"]:
        assert batch.decoder.cache.check()[2] == 0  # nobody has a block


def test_in_float32_texts_part_only_at_near_ties():
    """The embedded model, fixed prompts, a pool that makes texts give way: greedy, sampled, and coupled with drafts."""
    model, draft = (Model.load(name, "cpu", torch.float32) for name in ("tiny", "tiny-draft"))
    prompts = [
        model.encode(text)
        for text in (
            "Once upon a time",
            "Once upon a time, there was a little dog",
            "Lily saw",
            "One day, Tom",
        )
    ]
    for temperature, drafter in ((0.0, None), (1.0, draft)):
        texts = {}
        for together in (4, 1):
            engine = Engine(
                model,
                drafter,
                0,
                60,
                together,
                coupled=True,
                kv_memory=5
                * 16
                * (KVCache.of(model.llama, 1).bytes + KVCache.of(draft.llama, 1).bytes),
            )
            requests = [
                Request(tokens, Settings(temperature, seed=i, max_tokens=16), model.ends)
                for i, tokens in enumerate(prompts)
            ]
            list(engine.batch.run(requests))
            texts[together] = requests
        assert sum(r.preempted for r in texts[4]) > 0
        for a, b in zip(texts[4], texts[1]):
            if a.tokens != b.tokens:
                at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y)
                probs = probabilities(
                    model.llama(torch.tensor(a.tokens[:at]), rows=slice(-1, None)), temperature
                )
                coin = Keyed(torch.tensor([a.settings.seed]), torch.tensor([at]))
                best = (
                    (probs / _exponential(coin.streams, _steps(probs.shape[1], probs.device)))[0]
                    .topk(2)
                    .values
                )
                assert temperature and best[1] / best[0] > 1 - 1e-4, (
                    "the two best scores are no near-tie"
                )


# ---- The law, through the batcher


@pytest.mark.parametrize("drafter", ["model", "self"])
@pytest.mark.parametrize("sharing", [False, True])
def test_the_law_of_a_batch_whose_texts_make_room_for_each_other(sharing, drafter):
    """The enumeration runs through the batcher, over a pool so small that texts are put back and read again."""
    kinds = [((1,), 2, 4, (1,)), ((0, 2), 1, 4, (0,)), ((2, 1), 3, 3, (1,))]
    target, draft, copy, preempted = Toy(seed=1), Toy(seed=2), Cipher(seed=2), []

    def run(walk: Walk, n: int) -> list:
        chosen = [branch.decide([1.0] * len(kinds)) for branch in walk.branches]
        requests = [
            Request(
                list(kinds[i][0]),
                Settings(1.0, seed=row, max_tokens=kinds[i][2], gamma=kinds[i][1]),
                kinds[i][3],
            )
            for row, i in enumerate(chosen)
        ]
        blocks = max(3, n // 2)
        caches = [
            PagedCache(
                1, 1, 1, blocks * (1 + j), 2 - j, dtype=torch.float64, prefix_sharing=sharing
            )
            for j in range(2)
        ]
        guesses = (
            ModelDrafter(draft, caches[1]) if drafter == "model" else SelfDrafter(copy, caches[0])
        )
        batch = Batcher(Decoder(target, caches[0], 3, guesses, coin=walk), max_batch=max(2, n))
        for _ in batch.run(requests):
            pass
        preempted.append(sum(r.preempted for r in requests))
        return [(i, tuple(r.tokens[r.prompt :])) for i, r in zip(chosen, requests)]

    law = enumerate_law(run, width=64)
    for i, (prompt, _, count, ends) in enumerate(kinds):
        own = own_law(target, prompt, count, ends, lambda logits: logits.softmax(-1))
        assert distance({text: p for (kind, text), p in law.items() if kind == i}, own) < 1e-12
    assert sharing or sum(preempted) > 10


@pytest.mark.parametrize("ahead", [2, 3])
def test_the_law_of_tokens_that_are_made_ahead(ahead):
    """Texts that end on the way leave tokens that nobody gets."""
    target, looks = Toy(seed=1), []

    def run(walk: Walk, n: int) -> list:
        requests = [Request([1], Settings(1.0, seed=row, max_tokens=6), (0,)) for row in range(n)]
        batch = Batcher(
            Decoder(
                target,
                PagedCache(1, 1, 1, 4 * n, 2, dtype=torch.float64),
                3,
                coin=walk,
                ahead=ahead,
            ),
            n,
        )
        list(batch.run(requests))
        looks.append(batch.steps)
        return [tuple(r.tokens[1:]) for r in requests]

    own = own_law(target, (1,), 6, (0,), lambda logits: logits.softmax(-1))
    assert distance(enumerate_law(run), own) < 1e-12 and max(looks) == 6 // ahead


# ---- Who runs when


def batcher(
    blocks: int = 40, size: int = 4, max_batch: int = 4, budget: int = 32, sharing: bool = True
) -> Batcher:
    return Batcher(
        Decoder(TARGET, paged(TARGET, blocks, size, sharing), V, budget=budget), max_batch
    )


def request(prompt: int, count: int, seed: int = 0) -> Request:
    tokens = torch.randint(256, (prompt,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(tokens, Settings(1.0, seed=seed, max_tokens=count, gamma=0))


def test_decoding_never_stops_for_a_long_prompt():
    batch, writer, reader = batcher(budget=16), request(4, 30, 1), request(100, 5, 2)
    batch.add(writer)
    batch.step()
    batch.add(reader)
    for _ in range(6):  # 100 tokens, 15 a step, for one is the writer's
        assert list(batch.step()) == [writer]
        assert batch.decoder.cache.length(reader.seq) % 15 == 0
    assert set(batch.step()) == {writer, reader}


def test_a_place_is_taken_at_once():
    lengths = [2, 12, 3, 3, 12, 2]
    batch, requests, together = (
        batcher(max_batch=2),
        [request(4, n, i) for i, n in enumerate(lengths)],
        [],
    )
    for r in requests:
        batch.add(r)
    while batch.waiting or batch.running:
        together.append(len(batch.step()))
    assert [len(r.tokens) - 4 for r in requests] == lengths
    assert together == [2] * 14 + [1] * 6  # two by two it would be 12 + 3 + 12 steps


def test_first_come_first_served():
    batch, requests = batcher(max_batch=2), [request(3, 4, i) for i in range(5)]
    for r in requests:
        batch.add(r)
    started = []
    while batch.waiting or batch.running:
        batch.step()
        started += [r for r in requests if r.started and r not in started]
    assert started == requests and all(r.arrived <= r.started for r in requests)


def test_the_youngest_makes_room_and_goes_on_later():
    batch, requests = (
        batcher(blocks=8, size=4, sharing=False),
        [request(10, 14, i) for i in range(3)],
    )
    for r in requests:
        batch.add(r)
    ended = []
    while batch.waiting or batch.running:
        ended += [r for r in batch.step() if r.finish_reason]
    assert (
        ended[0] is requests[0]
        and requests[0].preempted == 0
        and sum(r.preempted for r in requests) > 0
    )
    assert [r.tokens[10:] for r in requests] == [alone(r, "none", False) for r in requests]


def test_who_had_to_make_room_comes_before_those_who_wait_and_was_let_in_once():
    batch, requests, times, order = (
        batcher(blocks=8, size=4, max_batch=2, sharing=False),
        [request(10, 14, i) for i in range(3)],
        {},
        [],
    )
    for r in requests:
        batch.add(r)
    while batch.waiting or batch.running:
        order += [r for r in batch.step() if r.finish_reason]
        times |= {r: r.started for r in batch.running if r not in times}
        assert [*batch.running, *batch.waiting] == [
            r for r in requests if not r.finish_reason
        ]  # in the order in which they came
    assert requests[1].preempted and order == requests
    assert {
        r: r.started for r in requests
    } == times  # the first time counts: that is how long it queued


def test_a_text_is_let_in_only_if_there_is_room_for_all_of_it():
    """Else it would read a chunk, and have to make room before it ever wrote."""
    batch, first, second = (
        batcher(blocks=10, size=4, budget=8),
        request(4, 12, 1),
        request(26, 4, 2),
    )
    batch.add(first)
    for _ in range(5):  # it has 8 tokens by then, in 2 blocks of 10
        batch.step()
    batch.add(second)  # 26 tokens need 7: there is room, and it reads
    batch.step()
    assert second.started
    batch.cancel(second)
    third = request(36, 2, 3)  # 9 blocks: it must wait
    batch.add(third)
    batch.step()
    assert not third.started and batch.running == [first]
    list(batch.run())
    assert third.preempted == 0 and len(third.tokens) == 38


def test_what_can_never_fit_is_refused_and_the_others_go_on():
    batch, fits = batcher(blocks=5, size=4), request(10, 11)
    with pytest.raises(
        ValueError,
        match="a prompt of 10 tokens and 12 to be made need a cache of 21 tokens, and it has 20",
    ):
        batch.add(request(10, 12))
    with pytest.raises(ValueError, match="gamma is 32, and a step has a budget of 32 tokens"):
        batch.add(Request([1], Settings(1.0, seed=0, max_tokens=3, gamma=32)))
    batch.check(Request([1], Settings(1.0, seed=0, max_tokens=3, gamma=31)))
    assert [r for r, _ in batch.run([fits])] == [fits] * 11 and fits.finish_reason == "length"


def test_cancelling_frees_everything_at_once():
    batch, requests = batcher(max_batch=2), [request(20, 30, i) for i in range(3)]
    for r in requests:
        batch.add(r)
    batch.step()
    batch.step()
    for r in (requests[2], requests[0], requests[0]):
        batch.cancel(r)
    assert batch.running == [requests[1]] and not batch.waiting
    batch.cancel(requests[1])
    assert batch.decoder.cache.check()[2] == 0


def test_a_shared_beginning_is_read_once():
    batch, read = batcher(blocks=60), []
    a, b = (
        request(32, 3, 1),
        Request(request(32, 3, 1).tokens + [9, 9], Settings(1.0, seed=2, max_tokens=3, gamma=0)),
    )
    step = batch.decoder.step
    batch.decoder.step = lambda work: read.append(sum(w.num_tokens for w in work)) or step(work)
    list(batch.run([a]))
    list(batch.run([b]))
    assert read[0] == 32 and read[3] == 34 - 32


@pytest.mark.parametrize("wrong", [dict(max_batch=0)])
def test_sizes_that_are_none(wrong):
    with pytest.raises(ValueError, match="max_batch is 0: it must be at least 1"):
        batcher(**wrong)


def test_contiguous_rows_run_out_and_requests_wait():
    batch = Batcher(Decoder(TARGET, KVCache.of(TARGET, 40, 2), V), max_batch=5)
    requests = [request(5, 6, i) for i in range(5)]
    for r in requests:
        batch.add(r)
    batch.step()
    assert len(batch.running) == 2 and len(batch.waiting) == 3
    list(batch.run())
    assert all(len(r.tokens) == 11 for r in requests)


# ---- Long running: what a step does, and what is kept, grows neither with the texts served nor, but for attention, with their length


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Model]:
    """A target, and a draft that it seldom agrees with."""
    return [
        Model.load(
            write_model(tmp_path_factory.mktemp("long"), seed=seed, max_position_embeddings=4096),
            "cpu",
            torch.float32,
        )
        for seed in (0, 1)
    ]


def calls(run) -> int:
    """How many functions this calls, Python's and C's; each turn of a generator is a call."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(
    models: list[Model],
    draft: str | None,
    texts: int,
    length: int,
    gamma: int | None,
    more: int = 0,
) -> float:
    """Of one that decodes so many texts of such a length, for each of them; `more` texts find no room and wait."""
    engine = Engine(
        models[0], models[1] if draft == "model" else draft, texts * (length + 200), 4000, texts + 1
    )
    asked = [
        Request(request(length, 1, i).tokens, Settings(1.0, seed=i, max_tokens=100, gamma=gamma))
        for i in range(texts)
    ]
    for r in asked:
        engine.batch.add(r)
    while not all(len(r.tokens) > r.prompt + 3 for r in asked):
        engine.batch.step()
        engine.decoder.measure_plain(asked[0])
    if more:
        for cache in engine.caches:
            cache.pool.take(len(cache.pool.free) - 2)
        engine.batch.add(
            Request(asked[0].tokens + [1] * 99, Settings(1.0, seed=1, max_tokens=100, gamma=gamma))
        )
    made = calls(lambda: [engine.batch.step() for _ in range(8)])
    assert len(engine.batch.running) == texts and len(engine.batch.waiting) == more
    return made / 8 / texts


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_what_a_step_calls_does_not_grow(models, draft, compiler):
    assert calls_of_a_step(models, draft, 1, 2000, 2) < 1.1 * calls_of_a_step(
        models, draft, 1, 400, 2
    )  # with the length of a text
    assert calls_of_a_step(models, draft, 64, 5, None) < calls_of_a_step(
        models, draft, 8, 5, None
    )  # with the texts beside it


def test_a_long_text_that_finds_no_room_is_not_looked_up_in_each_step(models):
    assert calls_of_a_step(models, None, 1, 1500, 0, more=1) < 2 * calls_of_a_step(
        models, None, 1, 1500, 0
    )


def test_who_ends_is_not_looked_for_among_those_who_wait(models):
    class Queue(deque):
        def __contains__(self, item):
            raise AssertionError("looked through")

    engine = Engine(models[0], None, 100, 50, 2)
    engine.batch.waiting = Queue()
    requests = [request(4, 3, i) for i in range(6)]
    assert len(list(engine.serve([Writer(models[0].tokenizer, r, "") for r in requests]))) == 6


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_nothing_is_kept_of_texts_that_have_gone(models, draft):
    engine, counts = Engine(models[0], models[1] if draft == "model" else draft, 300, 60, 4), []
    gc.freeze()  # what is there already need not be looked through
    for i in range(3):
        for j in range(0, 16, 8):
            list(
                engine.serve(
                    [
                        Writer(models[0].tokenizer, request(20, 3, 8 * (j + k) + i), "")
                        for k in range(8)
                    ]
                )
            )
        gc.collect()
        counts.append(len(gc.get_objects()))
    gc.unfreeze()
    assert max(counts[1:]) <= counts[0] + 50  # 16 texts more would be some 160 objects
