"""Stop strings are cut exactly, however the text arrives; settings refuse what they cannot mean."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from request import Result, Settings, StopStrings

TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:])]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=12))
def test_a_stream_is_cut_before_the_stop_string_that_is_complete_first(text, stops, cuts):
    cutter = StopStrings(stops)
    out = "".join(cutter.feed(piece) for piece in pieces_of(text, cuts)) + cutter.finish()
    prefixes = [text[:n] for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    assert cutter.found == bool(prefixes)
    whole = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    if not prefixes:
        assert out == text
    else:                                               # several in one piece: the one that begins first
        assert not any(stop in out for stop in stops) and text.startswith(out) and len(out) >= whole


@given(TEXT, STOPS)
def test_letter_by_letter_and_at_once_cut_at_a_stop_string_and_show_all_before_it(text, stops):
    cutter = StopStrings(stops)
    out = "".join(map(cutter.feed, text)) + cutter.finish()
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    if ends:
        first = text[:ends[0]]
        assert out == first[:min(first.find(stop) for stop in stops if stop in first)]
    else:
        assert out == text


def test_nothing_that_may_begin_a_stop_string_is_shown_early():
    cutter = StopStrings(["<end>"])
    assert cutter.feed("so <en") == "so " and cutter.feed("ough") == "<enough"
    assert cutter.feed("<end") == "" and cutter.feed(">more") == "" and cutter.found
    assert cutter.feed("still more") == "" and cutter.finish() == ""


@pytest.mark.parametrize("settings, message", [
    (dict(temperature=-1.0), "temperature is -1.0"), (dict(temperature=float("nan")), "temperature is nan"),
    (dict(temperature=float("inf")), "temperature is inf"), (dict(top_k=-1), "top_k is -1"), (dict(top_k=1.5), "top_k is 1.5"),
    (dict(top_p=0.0), "top_p is 0.0"), (dict(top_p=1.1), "top_p is 1.1"), (dict(min_p=-0.1), "min_p is -0.1"),
    (dict(min_p=2.0), "min_p is 2.0"), (dict(max_tokens=0), "max_tokens is 0"), (dict(seed=2**63), "seed is"),
    (dict(stop=("",)), "stop string is empty"), (dict(stop=(3,)), "stop string is 3"), (dict(max_tokens=2.5), "max_tokens is 2.5"),
    (dict(seed="x"), "seed is 'x'"), (dict(seed=True), "seed is True"), (dict(max_tokens=True), "max_tokens is True"), (dict(gamma=False), "gamma is False")])
def test_settings_name_what_they_refuse(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_a_rate_needs_two_tokens():
    result = Result("p", [1], 0, tokens=[5], first=0.5, total=0.5)
    assert result.to_dict()["stats"]["tokens_per_second"] is None
    result.tokens, result.total = [5, 6, 7], 1.5
    assert result.to_dict()["stats"]["tokens_per_second"] == 2.0
    result.total = result.first                                          # all in the first round: drafts that stood
    assert result.to_dict()["stats"]["tokens_per_second"] is None and "tokens/s" not in result.summary()
