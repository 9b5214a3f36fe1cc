"""The runner: plans change nothing; offsets, ends and limits; chunks; interruptions; reports."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import runner as runner_page
from devices import live_graphs
from drafters import ModelDrafter, SelfDrafter
from errors import UserError
from gamma import MEASURED, PLAIN, TRIAL
from generate import Engine
from kernels import Ops
from kvcache import KVCache, KVSpec
from loading import Model, load_draft
from lookup import LookupDrafter
from paged import PagedCache
from parallel import Group
from proof import Toy
from request import Request, RoundStats, Settings
from runner import ModelRunner, ScheduledRequest
from settings import Options
from speculative import Drawing
from testing.models import add_noise
from testing.toys import COPY, TARGET, Kind, new_tokens, play, several_tokens, toy_runner


class Scripted(Toy):
    """A model that goes on with its script's token at each position.

    calls: the (position, token) pairs of each pass.
    """

    def __init__(self, script: Sequence[int]):
        self.script = script
        self.calls: list[list[tuple[int, int]]] = []

    def __call__(self, tokens: Tensor, metadata, logits_indices=None, features=None) -> Tensor:
        zeros = torch.zeros(len(tokens), 3, 1, dtype=torch.float64)
        self.ops.attend(zeros, 1, None, metadata, 0)
        positions = metadata.positions.tolist()
        self.calls.append(list(zip(positions, tokens.tolist())))
        following = torch.tensor([self.script[position + 1] for position in positions])
        logits = torch.full((len(tokens), 10), -1000.0, dtype=torch.float64)
        logits.scatter_(1, following[:, None], 0)
        return logits if logits_indices is None else logits[logits_indices]


def scripted_runner(
    script: Sequence[int], draft_script: Sequence[int], draft_len: int = 200, **options
) -> ModelRunner:
    cache = KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 200)
    draft_cache = KVCache(KVSpec(1, 1, 1, dtype=torch.float64), draft_len)
    drafter = ModelDrafter(Scripted(draft_script), draft_cache)
    return ModelRunner(Scripted(script), cache, Drawing(10), drafter=drafter, **options)


def sizes(model: Scripted) -> list[int]:
    """The tokens of each pass."""
    return [len(call) for call in model.calls]


TRUTH = [5, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9]


def scripted_text(draft_script: Sequence[int], count=8, gamma=3, ends=(), draft_len=40):
    """-> the request, which goes on as TRUTH does, and the runner."""
    request = Request(TRUTH[:2], Settings(1.0, seed=3, max_tokens=count, gamma=gamma), ends)
    runner = scripted_runner(TRUTH, draft_script, draft_len)
    play(runner, [request])
    return request, runner


# ---- Plans change nothing


def snapshot(runner: ModelRunner, requests: Sequence[Request]) -> dict:
    """All that a plan could change, but for tensors: those it can write only in a pass."""
    caches = {id(cache): cache for cache in (runner.cache, getattr(runner.drafter, "cache", None))}
    state = {"requests": [vars(request) for request in requests]}
    for key, cache in caches.items():
        if cache is not None:
            state[key] = [vars(cache).get("_sequences"), vars(vars(cache).get("pool", cache))]
    for name in ("drafter", "auto_gamma"):
        state[name] = vars(getattr(runner, name))
    state["runner"] = vars(runner)
    return flat(state)


def flat(value):
    """Plain data, copied, down to what is no data."""
    if isinstance(value, Mapping):
        return {flat(key): flat(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)) or hasattr(value, "maxlen"):
        return tuple(flat(inner) for inner in value)
    if isinstance(value, (int, float, str, type(None))):
        return value
    if type(value).__name__ == "CachedSequence":
        return flat(vars(value))
    return id(value)


@pytest.mark.parametrize("drafts", ["model", "self", "ngram"])
def test_plans_change_nothing(drafts):
    """In a prompt, in a text, where a draft lags, and at the end of its context."""
    script = [1] * 200
    runner = scripted_runner(script, script, draft_len=40, budget=10)
    if drafts == "ngram":
        runner.drafter = LookupDrafter()
        runner.drawing = runner.drawing._replace(coupled=True)  # as with any look-up
    if drafts == "self":
        runner.drafter = SelfDrafter(runner.drafter.model, runner.cache)
    request = Request([1] * 23, Settings(1.0, seed=3, max_tokens=60))
    runner.open(request)
    kinds = set()
    step = 0
    while not request.finish_reason:
        pay = 0 if step < 16 else 3
        runner.auto_gamma.choose = lambda batch_size, chances, pay=pay: min(pay, len(chances))
        runner.drafter.most(request, 9)  # the drafter meets the request, or its newest tokens
        runner.drafter.fits([ScheduledRequest(request, 0, 1, 1)])
        before = snapshot(runner, [request])
        for budget in (1, 4, 10):
            assert 0 < runner.work(runner.schedule(request, budget)) <= budget
        item = runner.schedule(request)
        assert item == runner.schedule(request)
        runner.fits([item])
        num_drafts = runner.drafter.most(request, 9)
        start = len(request.tokens) - 1
        runner.fits([ScheduledRequest(request, start, 1, num_drafts)])
        runner.auto_gamma.choose(1, runner.drafter.chances(request))
        runner.num_pending(request)
        runner.report(request)
        assert snapshot(runner, [request]) == before
        kinds.add((item.samples, item.num_drafts > 0))
        runner.step([item])
        step += 1
    assert kinds >= {(True, False), (True, True)}
    if drafts == "model":
        assert request not in runner.drafter.seqs  # and outgrew its context


# ---- What stands in the caches


def test_draft_cache_lacks_the_last_draft_after_full_acceptance():
    request, runner = scripted_text(TRUTH)
    draft = runner.drafter.model
    assert request.tokens == TRUTH[:10]
    assert [stats[:2] for stats in request.rounds] == [(3, 3), (3, 3)]
    assert request.origins == ["accepted"] * 3 + ["bonus"] + ["accepted"] * 3 + ["bonus"]

    def at(*positions: int) -> list[tuple[int, int]]:
        return [(i, TRUTH[i]) for i in positions]

    # the token at 4 was drafted, not read: it comes with the bonus
    assert draft.calls == [at(0, 1), at(2), at(3), at(4, 5), at(6), at(7)]
    assert runner.target.calls == [at(0, 1, 2, 3, 4), at(5, 6, 7, 8)]


def test_draft_cache_forgets_rejected_drafts():
    request, runner = scripted_text([5, 1, 2, 9, 4, 5, 9, *TRUTH[7:]])
    assert request.tokens == TRUTH[:10]
    assert [stats[:2] for stats in request.rounds] == [(3, 1), (3, 2), (2, 2)]
    assert request.origins[:2] == ["accepted", "corrected"]
    # the draft's 9 at position 3 is gone, the correction is read
    assert runner.drafter.model.calls[:4] == [[(0, 5), (1, 1)], [(2, 2)], [(3, 9)], [(3, 3)]]
    assert [call[0] for call in runner.target.calls] == [(0, 5), (3, 3), (6, 6)]

    request, runner = scripted_text([9] * 24)  # nothing is accepted
    assert request.tokens == TRUTH[:10]
    assert [stats.num_accepted for stats in request.rounds] == [0] * 8
    assert runner.drafter.model.calls[:3] == [[(0, 5), (1, 1)], [(2, 9)], [(3, 9)]]


@given(
    st.integers(0, 6),
    st.integers(1, 14),
    st.lists(st.integers(1, 9), max_size=3),
    st.sets(st.integers(2, 16)),
)
@example(6, 14, [4], set())  # an end inside accepted drafts,
@example(3, 8, [5], {5})  # as a correction,
@example(3, 8, [4], set())  # and as the bonus
def test_limits_and_ends_anywhere(gamma, count, ends, wrong):
    """wrong: positions where the draft is wrong."""
    script = [9 - token if i in wrong else token for i, token in enumerate(TRUTH)]
    request, _ = scripted_text(script, count, gamma, ends)
    expected = TRUTH[2 : 2 + count]
    cut = next((i + 1 for i, token in enumerate(expected) if token in ends), count)
    assert list(new_tokens(request)) == expected[:cut]
    assert request.finish_reason == ("stop" if expected[cut - 1] in ends else "length")
    assert len(request.origins) == cut


def test_max_drafts_use_the_whole_context_of_the_draft_and_no_more():
    """The text and all drafts but the last fit: then the text outgrows it, and goes on."""
    is_full = []
    for draft_len in range(2, 14):
        request, runner = scripted_text(TRUTH, count=14, draft_len=draft_len)
        assert request.tokens == TRUTH[:16]
        last = max((call[-1][0] for call in runner.drafter.model.calls), default=-1)
        assert last < draft_len
        is_full.append(last == draft_len - 1)
        length = 2  # of the text at the beginning of a round
        for stats in request.rounds:
            room = max(0, draft_len - length + 1)
            assert stats.num_drafts == min(3, room, 16 - length - 1), (draft_len, length)
            length += stats.num_accepted + 1
    assert sum(is_full) > 5
    request, runner = scripted_text([5] * 20, count=5, draft_len=1)
    assert request.tokens == TRUTH[:7] and runner.drafter.model.calls == []


# ---- Chunks


def test_chunks_of_a_prompt_are_read_by_both():
    runner = scripted_runner([1] * 60, [1] * 60, budget=10)
    request = Request([1] * 23, Settings(1.0, seed=3, max_tokens=6, gamma=2))
    play(runner, [request])
    assert sizes(runner.target)[:3] == [10, 10, 3 + 2]
    assert sizes(runner.drafter.model)[:4] == [10, 10, 3, 1]


def test_chunks_shrink_as_the_context_grows_down_to_one_token(monkeypatch):
    """Both models read the prompt to its end; the last chunk leaves a token for the round."""
    monkeypatch.setattr(Scripted, "price", lambda self, context: 1 + context // 8)
    runner = scripted_runner([1] * 99, [1] * 99, budget=10)
    play(runner, [Request([1] * 90, Settings(1.0, seed=3, max_tokens=1))])
    expected = []
    while (left := 90 - sum(expected)) > 0:
        expected.append(min(1 + 9 // (1 + sum(expected) // 8), max(1, left - 1)))
    assert sizes(runner.target) == expected and expected[0] == 10 and expected[-1] == 1
    assert sizes(runner.drafter.model) == expected[:-1]


def test_draft_that_lags_catches_up_when_it_drafts():
    """That round is not timed. A γ that is fixed does not depend on what the draft has read."""
    runner = scripted_runner([1] * 90, [1] * 90, budget=10)
    request = Request([1] * 5, Settings(1.0, seed=3, max_tokens=60))
    wanted = iter([0] * 30 + [2] * 40)
    runner.auto_gamma.choose = lambda *_: next(wanted)
    timed = []
    runner.auto_gamma.observe = lambda num_drafts, *_: timed.append(num_drafts[0])
    play(runner, [request])
    assert new_tokens(request) == (1,) * 60
    assert sizes(runner.drafter.model)[:3] == [35, 1, 2]
    num_drafts = [stats.num_drafts for stats in request.rounds]
    assert num_drafts == [0] * 30 + [2] * 10
    assert timed == [0] * (30 - 1) + [2] * (10 - 1)  # not the prompt's

    request = Request([1] * 5, Settings(1.0, seed=3, max_tokens=60, gamma=2))
    runner = scripted_runner([1] * 90, [1] * 90, budget=10)
    runner.open(request)
    request.tokens += [1] * 30  # as if the target had made them without the draft
    runner.cache.extend([(request.seq, request.tokens[:-1])])
    assert runner.schedule(request) == ScheduledRequest(request, 34, 1, num_drafts=2)


PROMPTS = ["Once upon a time", "The little dog", "One day, Tom said that"]


@pytest.fixture(scope="module")
def pair(base) -> tuple[Model, Model]:
    """Random weights, and nearly the same. A byte is a token."""
    model, draft = (Model.load(base, "cpu", torch.float64) for _ in range(2))
    add_noise(draft.llama)
    return model, draft


def pair_runner(
    pair: tuple[Model, Model], sequences: int = 1, coupled=False, kv="contiguous"
) -> ModelRunner:
    model, draft = pair
    draft = load_draft(draft, model)
    return Engine(
        model,
        draft,
        Options(max_len=96, max_batch=sequences, verify="coupled" if coupled else "block", kv=kv),
        tokens=96 * sequences,
    ).runner


def pair_request(pair: tuple[Model, Model], prompt: str, **chosen) -> Request:
    model = pair[0]
    chosen = Settings(**{**dict(temperature=1.0, seed=9, max_tokens=12, gamma=3), **chosen})
    return Request(model.encode(prompt), chosen, model.eos_token_ids)


def test_chunks_rounds_and_plain_rows_share_a_step(pair):
    asked = [(PROMPTS[0], 3), (" ".join(PROMPTS), 2), (PROMPTS[1], 0)]
    alone = [pair_request(pair, prompt, gamma=gamma) for prompt, gamma in asked]
    for request in alone:
        play(pair_runner(pair), [request])
    together = [pair_request(pair, prompt, gamma=gamma) for prompt, gamma in asked]
    runner = pair_runner(pair, 3)
    runner.budget = 18  # the long prompt takes several steps
    mixes = []
    step = runner.step

    def noted(scheduled):
        mixes.append({(item.samples, item.num_drafts) for item in scheduled})
        return step(scheduled)

    runner.step = noted
    play(runner, together)
    assert {(False, 0), (True, 3), (True, 0)} in mixes
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.rounds[0].num_drafts for r in together] == [3, 2, 0]


def check_logprobs(model: Model, request: Request) -> None:
    """Those that one plain pass over the whole text computes, at temperature 1, without filters."""
    tokens = torch.tensor(request.tokens)
    with torch.inference_mode():
        logits = model.llama(tokens)[:, : model.tokenizer.vocab_size]
    logprobs = logits.log_softmax(-1)
    assert len(request.logprobs) == len(request.origins) > 0
    for i, entry in enumerate(request.logprobs, request.num_prompt_tokens):
        assert entry.token == request.tokens[i]
        assert entry.logprob == pytest.approx(float(logprobs[i - 1, entry.token]), abs=1e-9)
        best = logprobs[i - 1].topk(request.settings.logprobs)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


@pytest.mark.parametrize("coupled", [False, True])
def test_logprobs_are_those_of_a_plain_pass(pair, coupled):
    """Of accepted, corrected and bonus tokens, and of texts that end amid a round; for nobody who
    did not ask."""
    texts = " ".join(PROMPTS), *PROMPTS
    asked = [dict(logprobs=3, temperature=0.5), dict(gamma=2), dict(logprobs=0), dict(logprobs=2)]
    requests = []
    for seed, (prompt, more) in enumerate(zip(texts, asked), 3):
        requests.append(pair_request(pair, prompt, seed=seed, **more))
    requests[0].eos_token_ids = {*range(0, 256, 5)}
    requests[-1].settings = replace(requests[-1].settings, gamma=0)
    runner = pair_runner(pair, 4, coupled)
    runner.budget = 20
    play(runner, requests)
    assert requests[1].logprobs == []
    for request in (requests[0], *requests[2:]):
        check_logprobs(pair[0], request)
    assert requests[0].finish_reason == "stop"
    origins = {origin for request in requests for origin in request.origins}
    assert origins == {"plain", "accepted", "corrected", "bonus"}


def test_logprobs_beside_a_grammar_are_those_of_the_model(pair):
    """Not those of the logits that are masked."""
    pytest.importorskip("llguidance", reason="the extra 'server' is not installed")
    requests = []
    for gamma in (0, 3):
        requests.append(pair_request(pair, PROMPTS[0], logprobs=2, gamma=gamma, regex="[ab]*"))
    play(pair_runner(pair, 2), requests)
    for request in requests:
        assert {*new_tokens(request)} <= {*b"ab", *request.eos_token_ids}
        check_logprobs(pair[0], request)


@pytest.mark.parametrize("where", ["target", "draft"])
@pytest.mark.parametrize("fails", [1, 2, 4])
@pytest.mark.parametrize("kv, budget", [("contiguous", 10), ("paged", 40)])
def test_a_step_that_is_interrupted_leaves_nothing(pair, where, fails, kv, budget):
    """Ctrl-C in the pass number `fails`: the prompt's first chunk, the second, and a round. With
    the larger budget a round reads the prompt. Nothing wrong that was stored is found again."""
    runner = pair_runner(pair, kv=kv)
    runner.budget = budget
    right = pair_request(pair, PROMPTS[2], max_tokens=20)
    play(pair_runner(pair, kv=kv), [right])
    request = pair_request(pair, PROMPTS[2], max_tokens=20)
    llama = runner.target if where == "target" else runner.drafter.model
    num_calls = 0

    class Breaks(Scripted):
        def __call__(self, tokens, metadata, logits_indices=None, features=None):
            nonlocal num_calls
            num_calls += 1
            if num_calls != fails:
                return llama(tokens, metadata, logits_indices)
            llama(tokens * 0 + 5, metadata, logits_indices)  # what it stored is wrong
            raise KeyboardInterrupt

    if where == "target":
        runner.target = Breaks(())
    else:
        runner.drafter.model = Breaks(())
    runner.open(request)
    with pytest.raises(KeyboardInterrupt):
        while True:
            runner.step([runner.schedule(request)])
    assert request.seq is None and not runner.cache._sequences
    assert not runner.drafter.cache._sequences
    again = pair_request(pair, PROMPTS[2], max_tokens=20)
    play(runner, [again])
    assert again.tokens == right.tokens and num_calls > fails


def test_a_stop_at_the_end_of_a_step_leaves_no_block_that_holds_placeholders():
    """Several processes stop where they agree, the last time after the target's pass."""
    cache, draft_cache = (PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 20, 2) for _ in range(2))
    runner = ModelRunner(TARGET, cache, Drawing(3), drafter=ModelDrafter(COPY, draft_cache))
    request = Request([1, 2], Settings(seed=1, max_tokens=9, gamma=3), ())
    runner.open(request)
    runner.step([runner.schedule(request)])
    length = cache.length(request.seq)
    num_agreed = 0

    class Stops(Group):
        def agree(self, numbers):
            nonlocal num_agreed
            num_agreed += 1
            if num_agreed == 2:
                raise KeyboardInterrupt
            return numbers

    with mock.patch.object(TARGET, "group", Stops(), create=True):
        with pytest.raises(KeyboardInterrupt):
            runner.step([runner.schedule(request)])
    text = [*request.tokens[:-1], 0, 0, 0, 0, 0]
    _, num_cached = cache.open(text)
    assert num_cached == 2 * (length // 2)


def test_a_token_of_minus_one_says_whose_logits_are_not_finite():
    """As a GPU tells it. Where the target's are not, the draft may have read them."""
    for token, whose in ((1, "draft"), (-1, "model")):
        runner = scripted_runner(TRUTH, TRUTH)
        request = Request(TRUTH[:2], Settings(seed=3, max_tokens=8, gamma=2), ())
        runner.open(request)
        runner.step([runner.schedule(request)])
        ended = torch.tensor([0]), torch.tensor([token])
        with (
            mock.patch.object(ModelDrafter, "propose", lambda self, round: round.no_drafts()),
            mock.patch.object(Ops, "verify_block", lambda *inputs: ended),
            pytest.raises(UserError, match=f"^the {whose}'s logits are not finite"),
        ):
            runner.step([runner.schedule(request)])


@pytest.mark.parametrize("coupled", [False, True])
def test_nan_of_a_draft_is_told_and_nothing_is_accepted(coupled):
    """Of its second draft: the first could have stood."""
    draft = Toy(seed=2)
    draft.table[[draft.code([1, token]) for token in range(3)]] = torch.nan
    runner = toy_runner(1, draft=draft, coupled=coupled)
    request = Kind((1,), 2, 4).request(seed=0)
    runner.open(request)
    with pytest.raises(UserError, match="^the draft's logits are not finite"):
        runner.step([runner.schedule(request)])
    assert request.tokens == [1] and not request.rounds
    assert request.seq is None and not runner.drafter.seqs  # it was closed


def test_a_drafter_catches_up_by_no_more_than_a_budget():
    """The target found the prompt in its cache; the drafter has read none of it."""
    cache = PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 40, 2)
    prompt = [*range(10)] * 5
    seq, _ = cache.open(prompt)
    cache.extend([(seq, prompt)])
    cache.commit(seq, [*prompt, 0])
    cache.free(seq)
    runner = scripted_runner([0] * 100, [0] * 100, budget=8)
    runner.cache = cache
    request = Request([*prompt, *range(20)], Settings(seed=1, max_tokens=5))
    runner.open(request)
    item = runner.schedule(request)
    assert runner.num_pending(request) == 20 and not item.samples
    assert item.num_tokens == runner.drafter.num_to_read(item) == 8


# ---- Several tokens in one look


@pytest.mark.parametrize("draft", ["nothing", "model", "self", "ngram"])
def test_multi_step_text_is_the_plain_text(draft, pair):
    """Also while γ auto is 0. But look-ups are tried after each token."""
    model, small = pair
    cache = KVCache(model.llama.kv_spec(), 64, 3)
    texts = []
    for multi_step in (1, 4):
        requests = [pair_request(pair, p, gamma=None, seed=i) for i, p in enumerate(PROMPTS)]
        drafter = {
            "nothing": lambda: None,
            "model": lambda: ModelDrafter(small.llama, KVCache(small.llama.kv_spec(), 64, 3)),
            "self": lambda: SelfDrafter(model.llama, cache),
            "ngram": LookupDrafter,
        }[draft]()
        runner = ModelRunner(model.llama, cache, Drawing(259), drafter=drafter)
        runner.auto_gamma.choose = lambda *_: 0
        with (
            several_tokens(model.llama, multi_step),
            mock.patch.object(runner, "step", wraps=runner.step) as step,
        ):
            play(runner, requests)
        texts.append([request.tokens for request in requests])
        for request in requests:
            runner.close(request)
        is_one_by_one = multi_step == 1 or draft == "ngram"
        num_steps = 12 if is_one_by_one else 1 + 2 + 3  # the prompt; 4 at once; the rest
        assert step.call_count == num_steps
        assert [len(request.rounds) for request in requests] == [12] * 3
    assert texts[0] == texts[1]


def test_several_tokens_of_a_step_are_timed_as_plain_rounds(pair):
    """Each takes its share of the step's time."""
    model, _ = pair
    runner = pair_runner(pair)
    runner.auto_gamma.choose = lambda *_: 0
    request = pair_request(pair, PROMPTS[0], gamma=None)
    clock = accumulate([0, 9, 1, 4, 1, 8, 1, 5, 1, 6, 1, 7])  # between two steps a second
    with (
        several_tokens(model.llama, 4),
        mock.patch.object(runner_page.time, "perf_counter", lambda: next(clock)),
    ):
        play(runner, [request])
    assert [*runner.auto_gamma.seconds[1, 0]] == [4 / 4, 8 / 4, 5, 6, 7]  # the first is not timed
    assert runner.auto_gamma.num_plain == 4 + 4 + 3
    assert runner.report(request).tokens_per_round == 1


def test_a_fixed_gamma_never_waits_for_several_tokens(pair):
    """The target's copy does not draft in the first round. So without this rule, the rounds, and
    with them the output, would depend on whether the prompt was found in the cache."""
    model, _ = pair
    cache = PagedCache(model.llama.kv_spec(), 40, 4)
    runner = ModelRunner(model.llama, cache, Drawing(259), SelfDrafter(model.llama, cache))
    texts = []
    for _ in range(2):
        request = Request(range(9), Settings(1.0, seed=1, max_tokens=12, gamma=2))
        with several_tokens(model.llama, 4):
            play(runner, [request])
        runner.close(request)
        texts.append(request.tokens)
    assert texts[0] == texts[1]


def test_logprobs_of_each_token_are_told(pair):
    model, _ = pair
    asks = pair_request(pair, PROMPTS[0], gamma=0, logprobs=2)
    runner = ModelRunner(model.llama, KVCache(model.llama.kv_spec(), 64, 1), Drawing(259))
    with several_tokens(model.llama, 4):
        play(runner, [asks])
    check_logprobs(model, asks)


def test_a_request_for_no_token_has_a_plain_round_beside_several_tokens(pair):
    model, _ = pair
    runner = ModelRunner(model.llama, KVCache(model.llama.kv_spec(), 64, 2), Drawing(259))
    requests = [Request([5], Settings(1.0, seed=9, max_tokens=count)) for count in (9, 0)]
    with several_tokens(model.llama, 4):
        play(runner, requests)
    assert [request.rounds[0] for request in requests] == [RoundStats(0, 0, 2)] * 2
    assert [len(new_tokens(request)) for request in requests] == [9, 0]


class Greedy:
    """An rng that picks what is most probable."""

    def __init__(self, *keys: Tensor):
        """The numbers do not depend on keys."""

    def __getitem__(self, rows: slice) -> "Greedy":
        return self

    def pick(self, probs: Tensor) -> Tensor:
        return probs.argmax(-1)


class Large(Scripted):
    """With a large vocabulary."""

    def __call__(self, tokens: Tensor, metadata, logits_indices=None, features=None) -> Tensor:
        logits = super().__call__(tokens, metadata, logits_indices)
        return torch.nn.functional.pad(logits, (0, 128_000 - 10), value=-1000.0).float()


def test_many_texts_of_a_large_vocabulary_make_several_tokens_in_one_look(monkeypatch):
    """Steps that read a prompt make one."""
    monkeypatch.setattr(Ops, "probabilities", lambda self, logits, *_, **settings: logits.exp())
    n = 72
    cache = KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 8, n)
    runner = ModelRunner(Large(TRUTH), cache, Drawing(128_000, make_rng=Greedy))
    requests = [Request(TRUTH[:2], Settings(max_tokens=5, seed=i)) for i in range(n)]
    with (
        several_tokens(runner.target, 4),
        mock.patch.object(runner, "step", wraps=runner.step) as step,
    ):
        play(runner, requests)
    assert all(request.tokens == TRUTH[:7] for request in requests)
    assert step.call_count == 2


# ---- The report, and γ by the clock


def test_report_says_what_the_rounds_say(pair):
    runner = pair_runner(pair)
    request = pair_request(pair, PROMPTS[0], max_tokens=24, gamma=2, seed=3)
    assert runner.report(request) is None
    play(runner, [request])
    assert runner.report(request).speed_up is None  # no plain round was measured
    seconds = runner.auto_gamma.seconds
    seconds.clear()
    seconds[1, 0] += [0.5] * PLAIN
    seconds[1, 2] += [0.25] * PLAIN
    report = runner.report(request)
    examined = [min(stats.num_accepted + 1, stats.num_drafts) for stats in request.rounds]
    accepted = [stats.num_accepted for stats in request.rounds]
    assert report.acceptance == sum(accepted) / sum(examined)
    assert len(accepted) > 5
    num_tokens = sum(accepted[1:]) + len(accepted[1:])
    assert report.tokens_per_round == pytest.approx(num_tokens / len(accepted[1:]))
    full = [stats for stats in request.rounds[1:] if stats.num_drafts == 2]  # not the last one
    num_tokens = sum(stats.num_accepted + 1 for stats in full)
    assert report.speed_up == pytest.approx(0.5 * num_tokens / (0.25 * len(full)))
    request.rounds += [RoundStats(0, 0)] * 100  # which say nothing of drafts
    del seconds[1, 2]
    assert runner.report(request).speed_up is None
    runner = toy_runner(1, TARGET, COPY)
    runner.has_drafter = False
    assert runner.report(request) is None


@pytest.mark.parametrize("is_good", [True, False])
def test_gamma_follows_how_the_drafts_fare(is_good):
    """On a clock where a draft costs a twentieth of a pass, and every pass the same."""
    runner = scripted_runner([1] * 200, [1 if is_good else 2] * 200)
    observe = runner.auto_gamma.observe

    def on_this_clock(num_drafts, *_):
        observe(num_drafts, 1 + 0.05 * max(num_drafts))

    runner.auto_gamma.observe = on_this_clock
    request = Request([1, 1], Settings(1.0, seed=3, max_tokens=180))
    play(runner, [request])
    num_drafts = [stats.num_drafts for stats in request.rounds]
    first = [0] * (1 + PLAIN) + [TRIAL] * MEASURED  # the first round reads the prompt
    assert num_drafts[: len(first)] == first
    if is_good:
        assert max(num_drafts) == 16
    else:
        assert sum(num_drafts[80:]) <= 4


class Recorded(Scripted):
    """A model as on a GPU: the first pass of each size is recorded, and takes much longer."""

    def __init__(self, script: Sequence[int], clock: list[float], seconds: float):
        super().__init__(script)
        self.clock = clock
        self.seconds = seconds
        self.graphs: set[Group] = set()  # anything that lives stands for a graph

    def __call__(self, tokens: Tensor, *others, **options) -> Tensor:
        self.clock[0] += self.seconds
        if len(tokens) not in sizes(self):
            self.clock[0] += 20.0
            self.graphs.add(Group())
            live_graphs.update(self.graphs)
        return super().__call__(tokens, *others, **options)


def test_rounds_that_record_do_not_make_drafts_look_slow(monkeypatch):
    """Here both rounds of the trial record: the target's pass, then the draft's two tokens."""
    clock = [0.0]
    monkeypatch.setattr(runner_page.time, "perf_counter", lambda: clock[0])
    script = [1] * 200
    runner = scripted_runner(script, script)
    runner.target = Recorded(script, clock, 1.0)
    runner.drafter.model = Recorded(script, clock, 0.05)
    request = Request([1, 1], Settings(1.0, seed=3, max_tokens=180))
    play(runner, [request])
    assert max(stats.num_drafts for stats in request.rounds) > 2 * TRIAL
    for (_, num_drafts), times in runner.auto_gamma.seconds.items():
        assert list(times) == pytest.approx([1 + 0.05 * num_drafts] * len(times))


def test_a_round_is_timed_until_the_device_was_waited_for(monkeypatch):
    """Steps that read a prompt teach nothing."""
    runner = toy_runner(2, budget=3)
    events = []

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr(runner_page.time, "perf_counter", clock)
    agree = runner.target.group.agree

    def waits(numbers: list) -> list:
        events.append("wait")
        return agree(numbers)

    monkeypatch.setattr(runner.target.group, "agree", waits)
    observed = []
    runner.auto_gamma.observe = lambda *numbers: observed.append(numbers)
    kinds = [Kind((1, 2, 1, 2), 1, 3), Kind((2,), 1, 3)]
    first = kinds[0].request(0)
    runner.open(first)
    assert runner.step([runner.schedule(first)]) == {}  # a chunk, and nothing else
    assert "wait" not in events and not observed
    runner.close(first)
    events.clear()
    play(runner, [kind.request(seed) for seed, kind in enumerate(kinds)])
    assert events[:4] == [
        "clock",
        "wait",
        "clock",
        "wait",
    ]  # a round; all get its time
    assert observed and all(seconds == 2.0 for _, seconds, _ in observed)
    assert len(observed) < len(events) // 4
