"""Look-ups: what is found, beside a slow search; what is learnt, shared and forgotten."""

from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lookup
from drafters import Drafter
from gamma import speed_ups
from generate import Engine, generate
from kvcache import KVCache
from loading import Model, load_draft
from lookup import LONGEST, FirstLookUp, History, LookupDrafter
from request import Request, Settings
from runner import ModelRunner
from settings import Options
from speculative import Drawing, Round
from testing.toys import Place, new_tokens
from testing.worlds import LLAMA, V, random_tokens

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def slow_look_up(seen: list[tuple[int, int]], texts: list[list[int]], i: int, count: int):
    """The drafts for text i, and the length of its match. seen: (text, end) of all tokens, in the
    order in which they came."""
    text = texts[i]
    best = 0
    places = []
    for other, end in seen:
        before = texts[other][:end]
        lengths = [n for n in range(1, min(LONGEST, end) + 1) if before[-n:] == text[-n:]]
        if end < len(texts[other]) and max(lengths, default=0) >= max(best, 2):
            if max(lengths) > best:
                places = []
            best = max(lengths)
            places.append((other, end))
    places = [place for place in places if place[0] == i] or places
    drafts = []
    while len(drafts) < count:
        following = [(t, e, texts[t][e]) for t, e in places if e < len(texts[t])]
        if not following:
            break
        votes = Counter(token for *_, token in following)
        newest_first = [token for *_, token in reversed(following)]
        drafts.append(max(newest_first, key=lambda token: votes[token]))
        places = [(t, e + 1) for t, e, token in following if token == drafts[-1]]
    return drafts, best


@given(st.lists(st.tuples(st.integers(0, 2), TOKENS), max_size=12), st.integers(1, 6))
def test_drafts_are_those_of_a_slow_search_while_requests_grow(growth, count):
    history = History()
    texts = [[], [], []]
    seen = []
    for i, new in growth:
        for token in new:
            texts[i].append(token)
            seen.append((i, len(texts[i])))
        history.update(texts[i])
        for j, text in enumerate(texts):
            if text:
                drafts, length = slow_look_up(seen, texts, j, count)
                found = history.look_up(text, count)
                least = found.chances[-1] if found.chances else 1
                assert found.tokens == drafts[: len(found.tokens)]
                assert len(found.tokens) == len(drafts) or least < lookup.LEAST_CHANCE
                if drafts:
                    assert found.classes[0][0] == min(length, LONGEST // 2)


def test_a_match_never_crosses_from_one_request_into_another():
    history = History()
    history.update([1, 2])
    history.update([0, 3, 4])
    assert history.look_up([1, 2], 5).tokens == []
    assert history.look_up([0, 3], 5).tokens == [4]


def test_chances_are_learnt_from_every_token_drafted_or_not():
    drafter = LookupDrafter()
    request = Request([5, 6, 7, 8, 9, 5, 6], Settings(seed=0, gamma=0))
    found = drafter.look_up(request)
    assert found.tokens == [7, 8, 9]  # the next would be below LEAST_CHANCE
    assert found.classes == [(n, 4) for n in (2, 3, 4)]
    assert found.chances == pytest.approx([3**-j for j in range(1, 4)])  # nothing is known yet
    drafter.history.learn(found, [7, 8, 1])
    known = drafter.history.right
    assert [known[2, 4], known[3, 4], known[4, 4], known[5, 4]] == [
        [2.0, 4.0],
        [2.0, 4.0],
        [1.0, 4.0],
        [1.0, 3.0],
    ]
    again = drafter.history.look_up(request.tokens, 9)
    assert again.chances[:3] == [1 / 2, 1 / 4, 1 / 16]
    costs = [1 + 0.12 * k for k in range(1, 17)]
    gains = speed_ups(again.chances, costs)
    assert gains.index(max(gains)) == 2


def test_share_of_the_vote_is_a_class_of_its_own():
    history = History()
    for text in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 4]):
        history.update(text)
    found = history.look_up([9, 1, 2], 1)
    assert found.tokens == [3] and found.classes == [(2, 3)]
    history.update([1, 2, 4])
    history.update([1, 2, 4])
    assert history.look_up([9, 1, 2], 1).tokens == [4]  # as many votes, and newer


def test_whole_requests_are_forgotten_the_oldest_first_and_none_that_runs(monkeypatch):
    monkeypatch.setattr(lookup, "MOST_TOKENS", 8)
    history = History()
    texts = [[1, 2, 3, 4], [1, 2, 5, 6], [2, 5, 1, 2, 3], [7, 8, 1, 2]]
    for text in texts:
        history.update(text)
    running = texts.pop(2)
    for text in texts:
        history.end(text)
    assert [text for text, _ in history.texts.values()] == [texts[1], running, texts[2]]
    fresh = History()
    for text in (texts[1], running, texts[2]):
        fresh.update(text)
    assert history.places == fresh.places
    history.end(running)
    assert [text for text, _ in history.texts.values()] == [running]
    history.update(running)  # preempted, and read again: its tokens are not indexed twice
    history.end(texts[1] * 9)
    assert [text for text, _ in history.texts.values()] == [running]
    assert sum(map(len, history.places.values())) == len(running) - 1


def test_a_prompt_is_indexed_as_far_as_it_was_read():
    """Not at once, which would stop all other requests; and after a preemption not twice."""
    cache = KVCache(LLAMA.kv_spec(), 50)
    drafter = LookupDrafter()
    runner = ModelRunner(LLAMA, cache, Drawing(V), drafter, budget=8)
    request = Request(random_tokens(40), Settings(seed=0, max_tokens=3))
    counts = []
    runner.open(request)
    while not request.finish_reason:
        runner.step([runner.schedule(request)])
        _, count = drafter.history.texts[id(request.tokens)]
        counts.append(count)
        if len(counts) == 3:
            runner.close(request)
            assert drafter.history.texts[id(request.tokens)] == (request.tokens, 24)
            runner.open(request)
    assert counts == [8, 16, 24, 24, 24, 24, 32, 41, 42, 43]
    assert sum(map(len, drafter.history.places.values())) == 42


def test_the_store_is_of_the_process_or_of_each_request():
    model = Model.load("tiny", "cpu")
    asked = dict(draft="ngram", temperature=0, max_tokens=40, gamma=6)
    first = generate("Once upon a time", model, **asked).speculation
    second = generate("Once upon a time", model, **asked).speculation
    assert second.tokens_per_round > 2 * first.tokens_per_round
    model.history.is_shared = False
    learnt = deepcopy(model.history.right)
    third = generate("Once upon a time", model, **asked).speculation
    assert third.tokens_per_round < 0.6 * second.tokens_per_round
    assert learnt and model.history.right != learnt  # chances say nothing of a text: all learn


def test_one_hot_drafts_are_coupled_whatever_was_asked_for():
    model = Model.load("tiny", "cpu")
    requests = []
    for name in (None, "ngram", "ngram,tiny-draft", "ngram,tiny-eagle", "ngram,self"):
        for verify in ("block", "token", "coupled"):
            engine = Engine(model, load_draft(name, model), Options(max_len=80, verify=verify))
            settings = Settings(0.8, seed=5, max_tokens=60, gamma=3 if name else None)
            request = Request(model.encode("Tom had a red ball. Tom"), settings)
            list(engine.batcher.run([request]))
            requests.append(request)
    assert len({new_tokens(request) for request in requests}) == 1
    for request in requests[3:]:
        assert request.acceptance > 0.1


class Sure(Drafter):
    """Drafts 8s, and is as sure of them as its acceptance."""

    def most(self, request, wanted):
        return wanted

    def propose(self, round):
        proposal = round.no_drafts()
        for b in round.drafting():
            proposal.tokens[b, : round.num_drafts[b]] = 8
        return proposal


@pytest.mark.parametrize("alpha, looked_up", [(0.3, True), (1 / 3, True), (0.4, False)])
def test_the_likelier_first_draft_decides_who_drafts(alpha, looked_up):
    drafter = FirstLookUp(LookupDrafter(), Sure())
    drafter.other.acceptance.alpha = alpha
    seen = Request([1, 2, 3, 1, 2], Settings(seed=1))
    new = Request([5, 6, 7], Settings(seed=2))
    assert drafter.drafter_of(seen) is (drafter.lookup if looked_up else drafter.other)
    assert drafter.drafter_of(new) is drafter.other
    assert drafter.most(seen, 9) == (3 if looked_up else 9)
    round = Round([seen, new], [3, 2], Drawing(9, True), target=Place())
    assert len(round.keys) == 2 * 4 and len(round.with_drafts([0, 1]).keys) == 2 * 2
    drafted, q = drafter.propose(round)
    assert drafted.tolist() == [[3, 1, 2] if looked_up else [8, 8, 8], [8, 8, -1]] and q is None
