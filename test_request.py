"""Stop strings are cut exactly and cost little; how requests end, and what results tell."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loading import Model
from request import (
    OutputStream,
    Request,
    Result,
    RoundStats,
    Settings,
    StopStrings,
)
from sampling import TokenLogprob
from testing import pieces
from testing.pages import ROOT
from tokenizer import Tokenizer

# ---- Stop strings


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=12),
)
@example("aab", ["ab", "b"], [])
@example("aaab", ["aab"], [3])
def test_text_is_cut_before_the_stop_string_that_is_complete_first(text, stops, cuts):
    """However it is cut into pieces; of those that end at once, before the longest."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cutter = StopStrings(stops)
    shown = ""
    for start, end in zip(bounds, bounds[1:]):
        shown += cutter.feed(text[start:end])
        if not cutter.is_complete:  # all is shown but what could begin a stop string
            ends = [text[:end].endswith(stop[:n]) and n for stop in stops for n in range(len(stop))]
            assert len(cutter.held) == max(ends, default=0)
            assert shown + cutter.held == text[:end]
    complete = [n for n in range(len(text) + 1) if text[:n].endswith(tuple(stops))]
    assert cutter.is_complete == bool(complete)
    if complete:
        n = complete[0]
        longest = max(len(stop) for stop in stops if text[:n].endswith(stop))
        assert shown == text[: n - longest] and cutter.held == ""
        assert cutter.feed("more") == ""


def test_long_stop_strings_cost_nothing_noticeable():
    """200,000 characters that the text nearly ends with, again and again: a constant for each."""
    stop = "a" * 199_999 + "b"
    start = time.process_time()
    cutter = StopStrings([stop, stop[1:], "never"])
    shown = ""
    for piece in ["a" * 1_000] * 250 + ["c"]:
        shown += cutter.feed(piece)
    assert shown == "a" * 250_000 + "c"
    assert not cutter.is_complete
    for piece in ["a" * 1_000] * 200:
        cutter.feed(piece)
    assert cutter.feed("b") == "" and cutter.is_complete
    assert time.process_time() - start < 10  # a comparison at each character takes minutes


# ---- Requests and results


def feed(stream: OutputStream, tokens: list[int]) -> None:
    """What a step does: all of these tokens come at once."""
    request = stream.request
    request.tokens += tokens
    request.origins += ["plain"] * len(tokens)
    if request.settings.logprobs is not None:
        request.logprobs += [TokenLogprob(token, -0.5, []) for token in tokens]
    stream.feed(tokens)


def test_request_finishes_by_its_ends_and_its_limit():
    request = Request([7, 7], Settings(max_tokens=2), (7,), rounds=[RoundStats(0, 0)])
    assert request.num_remaining == 2
    assert request.finish_reason == ""  # an end in the prompt does not count
    request.tokens.append(5)
    assert request.finish_reason == "" and request.num_remaining == 1
    request.tokens.append(6)
    assert request.finish_reason == "length"
    request.tokens[-1] = 7
    assert request.finish_reason == "stop"
    request = Request([7], Settings(max_tokens=0), (7,))
    assert request.finish_reason == ""  # the prompt is to be read
    request.rounds.append(RoundStats(0, 0))
    assert request.finish_reason == "length"


def test_acceptance_is_over_examined_drafts():
    request = Request([1], Settings())
    assert request.acceptance is None
    request.rounds = [RoundStats(0, 0), RoundStats(4, 1), RoundStats(3, 3), RoundStats(2, 0)]
    assert request.acceptance == 4 / (2 + 3 + 1)


def test_a_stream_counts_its_first_round_and_says_how_tokens_came_about():
    """What is held back for a stop string is shown at the end as what it is."""
    tokenizer = Tokenizer.load(ROOT / "models" / "tiny")
    ids = tokenizer.encode("Once upon a time")
    assert len(ids) > 2
    request = Request([1], Settings(stop="time and", seed=1, max_tokens=9))
    shown = []
    stream = OutputStream(tokenizer, request, "", show=lambda *piece: shown.append(piece))
    for new, origins in ((ids[:2], ["accepted", "bonus"]), (ids[2:], ["corrected"] * len(ids[2:]))):
        request.tokens += new
        request.origins += origins
        stream.feed(new)
    assert stream.result.num_first_tokens == 2
    assert [origin for _, origin in shown[:2]] == ["accepted", "bonus"]
    assert stream.stops.held == "time"
    result = stream.finish()
    assert shown[-1] == ("time", "corrected") and result.text == "Once upon a time"


def test_a_reply_has_no_space_that_a_continued_text_keeps(instruct, tmp_path):
    model = Model.load(instruct)
    assert model.request("hi", Settings()).is_reply
    assert not model.request("hi", Settings(), chat=False).is_reply
    tokenizer = pieces.load(tmp_path, pieces.tokenizer_json())
    ids = tokenizer.encode("the cat")
    for is_reply, text in ((True, "the cat"), (False, " the cat")):
        first = Request([1], Settings(seed=2**63 - 1), is_reply=is_reply)
        for request in (first, first.sibling_text(1)):  # whose seed is −2**63
            stream = OutputStream(tokenizer, request, "")
            feed(stream, ids)
            assert stream.finish().text == text


def test_a_whole_text_is_not_called_interrupted():
    tokenizer = Tokenizer.load(ROOT / "models" / "tiny")
    for num_fed, reason in ((1, "interrupted"), (2, "length")):
        request = Request([1], Settings(seed=1, max_tokens=2), rounds=[RoundStats(0, 0)])
        stream = OutputStream(tokenizer, request, "")
        request.tokens += [400, 401]
        request.origins += ["plain"] * 2
        stream.feed([400, 401][:num_fed])
        assert stream.finish("interrupted").finish_reason == reason


def test_a_result_has_a_logprob_for_each_of_its_tokens():
    """Tokens that came with a stop string, and after it, are none of them."""
    tokenizer = Tokenizer.load(ROOT / "models" / "tiny")
    ids = tokenizer.encode("Once upon a time")
    request = Request([1], Settings(stop="upon", seed=1, logprobs=0))
    stream = OutputStream(tokenizer, request, "")
    feed(stream, ids)
    result = stream.finish()
    assert (result.text, result.finish_reason) == ("Once ", "stop")
    assert [entry.token for entry in result.logprobs] == result.tokens == ids[:2]


@pytest.mark.parametrize("started, seconds", [(0.0, 0.0), (7.25, 2.25)])
def test_the_queue_is_left_when_a_text_is_admitted(started, seconds):
    """A text that was cancelled before has no time of its own there."""
    tokenizer = Tokenizer.load(ROOT / "models" / "tiny")
    request = Request([1], Settings(seed=1), arrived=5.0, started=started)
    result = OutputStream(tokenizer, request, "").finish("interrupted")
    assert (result.seconds_queued, result.finish_reason) == (seconds, "interrupted")


def test_result_has_a_rate_only_after_the_first_round():
    result = Result("p", [1], 0, tokens=[5], seconds_to_first_token=0.5, seconds=0.5)
    assert result.tokens_per_second is None
    result.tokens = [5, 6, 7]
    result.num_first_tokens = 1
    result.seconds = 1.5
    assert result.tokens_per_second == 2.0
    result.seconds = result.seconds_to_first_token  # all in the first round
    assert result.tokens_per_second is None
