"""Continuous batching: whatever shares the batch, every request gets the tokens it gets alone."""

import gc
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import lookup
from batcher import RETRY_AFTER, Batcher
from errors import UserError
from generate import Engine
from loading import Model, load_draft
from lookup import LookupDrafter
from paged import PagedCache
from request import OutputStream, Request, Settings
from runner import ModelRunner
from sampling import token_logprobs
from settings import Options
from speculative import Drawing
from testing.folders import write_model
from testing.toys import LastToken, new_tokens
from testing.worlds import LLAMA, V, alone, numbers, random_tokens

# ---- The log-probabilities of prompts


def plain_logprobs(request: Request) -> Tensor:
    """`numbers` of its prompt, by one pass without a cache."""
    prompt = request.tokens[: request.num_prompt_tokens]
    logits = LLAMA(torch.tensor(prompt))[:-1, :V]
    return numbers(token_logprobs(logits, prompt[1:], request.settings.prompt_logprobs))


def check_told(request: Request) -> None:
    assert_close(numbers(request.prompt_logprobs), plain_logprobs(request), rtol=0, atol=1e-9)


def test_prompts_are_told_once_whatever_is_cached_or_read_again():
    """A prompt is found in the cache; the first of three texts is cancelled amid the prompt, which
    the others read; a prompt is preempted after some chunks."""

    def asking(prompt: list[int], count: int) -> Request:
        return Request(prompt, Settings(0.0, seed=0, max_tokens=count, prompt_logprobs=2))

    batcher = make_batcher(budget=16)
    list(batcher.run([make_request(60, 2), make_request(60, 2)]))
    cached = asking(random_tokens(60), 0)
    list(batcher.run([cached]))
    assert cached.finish_reason == "length" and cached.num_cached_tokens == 0
    assert new_tokens(cached) == ()
    check_told(cached)
    for num_told in range(20):  # only tokens whose records are there may be found
        again = asking(random_tokens(60), 1)
        again.prompt_logprobs = cached.prompt_logprobs[:num_told]
        batcher.runner.open(again)
        assert batcher.runner.cache.length(again.seq) == num_told // 4 * 4
        batcher.runner.close(again)

    first = asking(random_tokens(50, 1), 2)
    others = [first.sibling_text(i) for i in (1, 2)]
    add_all(batcher, [first, *others])
    batcher.step()
    assert len(first.prompt_logprobs) == 16
    batcher.cancel(first)
    list(batcher.run())
    for request in others:
        check_told(request)
    first = asking(random_tokens(9, 3), 3)
    add_all(batcher, [first, *map(first.sibling_text, (1, 2))])
    for _ in range(2):  # the others share what the first has read
        batcher.step()
    assert len(batcher.running) == 3

    batcher = make_batcher(blocks=38, size=1, budget=5)
    old = make_request(4, 30)
    read_again = asking(random_tokens(30, 2), 3)
    num_told = []
    for _ in batcher.run([old, read_again]):
        if read_again.num_preemptions:
            num_told.append(len(read_again.prompt_logprobs))
    assert 0 < num_told[0] < 29  # it was preempted amid its prompt
    check_told(read_again)


# ---- Which requests run


def make_batcher(blocks=40, size=4, max_batch=4, budget=32, sharing=True, drafter=None) -> Batcher:
    cache = PagedCache(LLAMA.kv_spec(), blocks, size, prefix_caching=sharing)
    return Batcher(ModelRunner(LLAMA, cache, Drawing(V), drafter=drafter, budget=budget), max_batch)


def make_request(prompt: int, count: int, seed: int = 0, gamma: int | None = 0) -> Request:
    chosen = Settings(1.0, seed=seed, max_tokens=count, gamma=gamma)
    return Request(random_tokens(prompt, seed), chosen)


def add_all(batcher: Batcher, requests: Sequence[Request]) -> None:
    for request in requests:
        batcher.add(request)


def test_no_running_request_starves_behind_drafts():
    """64 texts with γ = 8 and a budget of 512 tokens: 56 rounds fit, so 56 texts are admitted."""
    batcher = make_batcher(1000, 4, 64, 512, drafter=LookupDrafter())
    requests = [make_request(9, 16, i, gamma=8) for i in range(64)]
    requests[7].tokens[3:6] = requests[7].tokens[:3] = [5, 6, 7]  # so that n-grams are found
    requests[-1].tokens[3:6] = requests[-1].tokens[:3] = [5, 6, 7]
    add_all(batcher, requests)
    num_drafts = 0
    while batcher.waiting or batcher.running:
        pending = {request: batcher.runner.num_pending(request) for request in batcher.running}
        new = batcher.step()
        assert len(batcher.running) <= 56
        for request, num_pending in pending.items():
            assert request in new or 1 < batcher.runner.num_pending(request) < num_pending
        num_drafts += sum(request.rounds[-1].num_drafts for request in new)
    assert num_drafts > 20
    assert sum(request.num_preemptions for request in requests) == 0
    for i in (0, 7, 55, 63):
        assert list(new_tokens(requests[i])) == alone(requests[i], "ngram")


def test_auto_gamma_leaves_a_round_for_each_younger_request():
    batcher = make_batcher(budget=12, drafter=LastToken())
    batcher.runner.auto_gamma.choose = lambda *_: 8 if batcher.num_steps > 1 else 0
    requests = [make_request(3, 30, i, gamma=None) for i in range(4)]
    add_all(batcher, requests)
    most = 0
    for _ in range(6):
        running = list(batcher.running)
        new = batcher.step()
        assert new.keys() >= set(running)
        most = max(most, *(request.rounds[-1].num_drafts for request in new))
    assert most == 4 and len(batcher.running) == 4


def test_auto_gamma_leaves_budget_for_prompts():
    """Two requests draft all that they may; a third reads its prompt, and a fourth is admitted."""
    batcher = make_batcher(budget=12, drafter=LastToken())
    batcher.runner.auto_gamma.choose = lambda *_: 8
    running = [make_request(3, 40, i, gamma=None) for i in range(2)]
    later = [make_request(20, 1, i, gamma=None) for i in (2, 3)]
    add_all(batcher, [*running, *later])
    for _ in range(12):
        batcher.step()
    assert all(request.finish_reason for request in later)
    assert not any(request.finish_reason for request in running)
    for request in running:
        assert max(stats.num_drafts for stats in request.rounds) > 3


def test_decoding_goes_on_while_a_long_prompt_is_read():
    batcher = make_batcher(budget=16)
    decoding = make_request(4, 30, 1)
    batcher.add(decoding)
    batcher.step()
    long = make_request(100, 5, 2)
    batcher.add(long)
    for _ in range(6):  # 15 tokens a step, for one is the running text's
        assert list(batcher.step()) == [decoding]
        assert batcher.runner.cache.length(long.seq) % 15 == 0
    assert set(batcher.step()) == {decoding, long}


def test_texts_admitted_in_one_step_share_its_budget():
    batcher = make_batcher(budget=32)
    add_all(batcher, [make_request(prompt, 5, prompt) for prompt in (20, 25, 7)])
    planned = [item.num_new_tokens for item in batcher.schedule()]
    assert planned == [20, 12]


def test_slots_are_taken_at_once_first_come_first_served():
    lengths = [2, 12, 3, 3, 12, 2]
    batcher = make_batcher(max_batch=2)
    requests = [make_request(4, n, i) for i, n in enumerate(lengths)]
    add_all(batcher, requests)
    num_texts = []
    started = []
    while batcher.waiting or batcher.running:
        num_texts.append(len(batcher.step()))
        started += [r for r in requests if r.started and r not in started]
    assert [len(r.tokens) - 4 for r in requests] == lengths
    assert num_texts == [2] * 14 + [1] * 6  # two by two it would be 12 + 3 + 12 steps
    assert started == requests
    assert all(r.arrived <= r.started for r in requests)


def test_youngest_is_preempted_and_goes_on_before_those_who_wait():
    batcher = make_batcher(blocks=8, max_batch=2, sharing=False)
    requests = [make_request(10, 14, i) for i in range(3)]
    add_all(batcher, requests)
    admitted = {}
    finished = []
    while batcher.waiting or batcher.running:
        finished += [request for request in batcher.step() if request.finish_reason]
        for request in batcher.running:
            admitted.setdefault(request, request.started)
        unfinished = [request for request in requests if not request.finish_reason]
        assert [*batcher.running, *batcher.waiting] == unfinished  # in the order of arrival
    assert finished == requests
    assert requests[0].num_preemptions == 0 and requests[1].num_preemptions > 0
    assert {request: request.started for request in requests} == admitted  # the first time
    assert [list(new_tokens(request)) for request in requests] == [alone(r) for r in requests]


def test_as_many_are_preempted_as_must_be():
    """Siblings share the blocks of their prompt, so each one gives few back."""
    batcher = make_batcher(blocks=7, max_batch=4)
    first = make_request(9, 12, 1)
    requests = [first, *map(first.sibling_text, range(1, 4))]
    add_all(batcher, requests)
    most = 0
    while batcher.waiting or batcher.running:
        before = sum(request.num_preemptions for request in requests)
        batcher.step()
        most = max(most, sum(request.num_preemptions for request in requests) - before)
    assert most > 1
    assert [list(new_tokens(request)) for request in requests] == [alone(r) for r in requests]


def test_request_is_admitted_only_if_the_caches_have_room_for_all_of_it():
    """Else it would read a chunk, and be preempted before its first token."""
    batcher = make_batcher(blocks=10, budget=8)
    first = make_request(4, 12, 1)
    batcher.add(first)
    for _ in range(5):  # it has 8 tokens by then, in 2 blocks of 10
        batcher.step()
    second = make_request(26, 4, 2)  # 7 blocks: there is room
    batcher.add(second)
    batcher.step()
    assert second.started
    batcher.cancel(second)
    third = make_request(36, 2, 3)  # 9 blocks
    batcher.add(third)
    batcher.step()
    assert not third.started and batcher.running == [first]
    list(batcher.run())
    assert third.num_preemptions == 0 and len(third.tokens) == 38


def steps_of_opens(batcher: Batcher) -> list[int]:
    """Filled with the step of each try to open a request."""
    steps = []
    open_request = batcher.runner.open

    def noted(request):
        steps.append(batcher.num_steps)
        open_request(request)

    batcher.runner.open = noted
    return steps


def test_request_without_room_is_tried_again_after_some_steps_or_when_a_text_ends():
    batcher = make_batcher(blocks=20)
    opened = steps_of_opens(batcher)
    first = make_request(20, 60, 1)
    second = make_request(70, 2, 2)
    add_all(batcher, [first, second])
    list(batcher.run())
    tries = opened[1:]
    assert tries[0] == 1 and len(tries) > 3
    assert [b - a for a, b in zip(tries[:-1], tries[1:-1])] == [RETRY_AFTER] * (len(tries) - 2)
    assert tries[-1] == 61  # the step after the last of the first text


def test_a_text_of_an_earlier_turn_is_tried_at_once():
    """However long one of a later turn, which found no room, still has to wait."""
    batcher = make_batcher(blocks=20)
    large = make_request(70, 2, 2)
    batcher.add(make_request(20, 60, 1))
    large.turn = 1.0
    batcher.add(large)
    batcher.step()
    small = make_request(4, 2, 3)
    batcher.add(small)
    batcher.step()
    assert small.started and [*batcher.waiting] == [large]


def test_request_that_could_never_be_served_is_refused_alone():
    batcher = make_batcher(blocks=5)
    rule = "a prompt of 10 tokens and 12 new ones need a cache of 21 tokens, and it has 20"
    with pytest.raises(UserError, match=rule):
        batcher.add(make_request(10, 12))
    fitting = make_request(10, 11)
    assert [request for request, _ in batcher.run([fitting])] == [fitting] * 11
    assert fitting.finish_reason == "length"
    batcher = make_batcher(drafter=LookupDrafter())
    with pytest.raises(UserError, match="gamma is 32, and a step has a budget of 32 tokens"):
        batcher.add(make_request(1, 3, gamma=32))
    batcher.check(make_request(1, 3, gamma=31))
    make_batcher().check(make_request(1, 3, gamma=32))  # without drafts it does not matter


def test_a_request_that_is_refused_leaves_the_batch_as_it_was():
    batcher = make_batcher()
    twice = make_request(3, 4)
    for says, *requests in (
        ("already in a batch", twice, twice),
        ("settings with a seed", make_request(3, 4), Request([1], Settings(max_tokens=2))),
        ("needs tokens", Request([], Settings(seed=1))),
        ("token -1", Request([1, -1], Settings(seed=1))),
        ("token 1000000", Request([1, 10**6], Settings(seed=1))),
    ):
        with pytest.raises(UserError, match=says):
            list(batcher.run(requests))
        assert not batcher.waiting and not batcher.running, says
    assert len([*batcher.run([make_request(3, 4)])]) == 4


def test_cancelled_requests_free_their_blocks_at_once():
    batcher = make_batcher(max_batch=2, drafter=LookupDrafter())
    requests = [make_request(20, 30, i) for i in range(3)]
    add_all(batcher, requests)
    batcher.step()
    batcher.step()
    for request in (requests[2], requests[0], requests[0]):
        batcher.cancel(request)
    assert batcher.running == [requests[1]] and not batcher.waiting
    batcher.cancel(requests[1])
    assert batcher.runner.cache.check()[2] == 0
    batcher.add(requests[0])
    with patch.object(batcher.runner, "schedule", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):  # it is open, and not among the running
            batcher.step()
    batcher.cancel(requests[0])
    assert not batcher.runner.cache._sequences


def test_shared_prefix_is_computed_once():
    batcher = make_batcher(blocks=60)
    computed = []
    step = batcher.runner.step

    def counted(scheduled):
        computed.append(sum(item.num_tokens for item in scheduled))
        return step(scheduled)

    batcher.runner.step = counted
    first = make_request(32, 3, 1)
    longer = make_request(32, 3, 1)
    longer.tokens += [9, 9]
    longer.num_prompt_tokens += 2
    list(batcher.run([first]))
    list(batcher.run([longer]))
    assert computed == [32, 1, 1, 34 - 32, 1, 1]


# ---- Long running: the work of a step grows neither with the texts served nor with their length


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Model]:
    """A target, and a draft that it seldom agrees with."""
    folders = [tmp_path_factory.mktemp("long") for _ in range(2)]
    for seed, folder in enumerate(folders):
        write_model(folder, seed=seed, max_position_embeddings=4096)
    return [Model.load(folder, "cpu", torch.float32) for folder in folders]


@contextmanager
def counted_calls(counts: list[int]):
    """How many functions are called, Python's and C's."""
    counts.append(0)

    def note(frame, event, arg):
        counts[-1] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls_of_a_step(models, draft, texts: int, length: int, gamma: int | None) -> float:
    """Of a step that decodes so many texts of such a length, for each."""
    draft = load_draft(models[1] if draft == "model" else draft, models[0])
    engine = Engine(
        models[0], draft, Options(max_len=4000, max_batch=texts + 1), tokens=texts * (length + 200)
    )
    batcher = engine.batcher
    requests = [make_request(length, 100, i, gamma) for i in range(texts)]
    add_all(batcher, requests)
    while not all(len(r.tokens) > r.num_prompt_tokens + 3 for r in requests):
        batcher.step()
    counts = []
    with counted_calls(counts):
        for _ in range(8):
            batcher.step()
    assert len(batcher.running) == texts
    return counts[0] / 8 / texts


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_calls_of_a_step_do_not_grow_with_texts_and_their_length(models, draft):
    short = calls_of_a_step(models, draft, 1, 200, 2)
    # A round with drafts has more calls than one without: n-grams find more in a longer text.
    assert calls_of_a_step(models, draft, 1, 1000, 2) < 1.25 * short
    few = calls_of_a_step(models, draft, 4, 5, None)
    assert calls_of_a_step(models, draft, 32, 5, None) < few


def test_finished_request_is_not_searched_among_those_that_wait(models):
    class Queue(deque):
        def __contains__(self, item):
            raise AssertionError("searched")

    engine = Engine(models[0], None, Options(max_len=50, max_batch=2), tokens=100)
    engine.batcher.waiting = Queue()
    streams = [OutputStream(models[0].tokenizer, make_request(4, 3, i), "") for i in range(6)]
    assert len(list(engine.serve(streams))) == 6


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_nothing_is_kept_of_finished_requests(models, draft, monkeypatch):
    """But for what look-ups may keep, by their limit: here none."""
    monkeypatch.setattr(lookup, "MOST_TOKENS", 0)
    model = models[0]
    engine = Engine(
        model,
        load_draft(models[1] if draft == "model" else draft, model),
        Options(max_len=60, max_batch=4),
        tokens=300,
    )
    counts = []
    gc.freeze()  # what there is already is not looked through
    for i in range(3):
        requests = [make_request(20, 3, 8 * i + j) for j in range(8)]
        list(engine.serve([OutputStream(model.tokenizer, r, "") for r in requests]))
        del requests
        gc.collect()
        counts.append(len(gc.get_objects()))
    gc.unfreeze()
    assert max(counts[1:]) <= counts[0] + 30  # 8 texts more would be some 80 objects
