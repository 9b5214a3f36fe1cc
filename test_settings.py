"""Settings: what a rule refuses is told with its value; what a rule allows is taken as it is."""

import math
from itertools import combinations

import pytest

from errors import UserError
from settings import MAX_LOGPROBS, NOTATIONS, Grammar, Options, Settings

WRONG = dict(
    temperature=[-1.0, -1e-300, 1.1e30, math.nan, math.inf, "hot", True, 1j, [1.0]],
    top_k=[-1, 1.5, math.nan, math.inf, "3", 2**31 + 1, True],
    top_p=[-1e-9, 1.1, math.nan, "x", True],
    min_p=[-1e-9, 2.0, math.nan, "", False],
    max_tokens=[-1, 2.5, True],
    seed=[2**63, -(2**63) - 1, "x", True],
    gamma=[-1, False, 1.5, "all"],
    logprobs=[-1, MAX_LOGPROBS + 1, 1.5, True],
    thinking=[0, "on", 1.0],
    prompt_logprobs=[-1, MAX_LOGPROBS + 1, "1", False],
    stop=[("",), ("a", ""), (3,), 3, {"a": 1}, ""],
    choice=[(), ("a", ""), (3,), 3, ""],
    schema=["{", "[1]", [1], 3, {"a": {1}}, "[" * 100_000],
    regex=["", 3, "\ud800"],
    grammar=["", 3, "\udfff"],
)


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_setting_the_value_and_the_rule(name):
    for value in WRONG[name]:
        with pytest.raises(UserError) as error:
            Settings(**{name: value})
        assert str(error.value).startswith(f"{name} is ") and "must be" in str(error.value)
        assert "\n" not in str(error.value) and error.value.param == name


def test_the_ends_of_each_range_are_taken():
    least = dict(temperature=0, top_k=0, top_p=1e-300, min_p=0, seed=-(2**63), max_tokens=0)
    most = dict(temperature=1e30, top_k=2**31, top_p=1, min_p=1.0, seed=2**63 - 1)
    for chosen in (
        least | dict(gamma=0, logprobs=0, prompt_logprobs=0),
        most | dict(max_tokens=10**9, gamma=10**9, logprobs=MAX_LOGPROBS),
    ):
        settings = Settings(**chosen)
        assert {name: getattr(settings, name) for name in chosen} == chosen
    # The most probable token alone.
    assert Settings(top_p=0) == Settings(top_p=5e-324) == Settings(top_p=1e-300)


def test_one_setting_may_be_given_in_several_forms():
    assert Settings(stop="x") == Settings(stop=["x"]) == Settings(stop=("x",))
    assert Settings(choice="x") == Settings(choice=["x"]) == Settings(choice=("x",))
    assert Settings(schema='{"type":\n"null"}') == Settings(schema={"type": "null"})
    assert Settings(gamma="auto") == Settings()
    assert Settings(top_k=3.0, max_tokens=5.0) == Settings(top_k=3, max_tokens=5)
    assert Options(kv_bits=8) == Options(kv_bits="8")


def test_a_text_follows_one_grammar_at_most():
    rules = dict(schema='{"type": "null"}', regex="a", choice=("a",), grammar='start: "a"')
    assert tuple(rules) == NOTATIONS
    assert Settings().follows is None
    for notation, rule in rules.items():
        assert Settings(**{notation: rule}).follows == Grammar(notation, rule)
    for first, second in combinations(rules, 2):
        with pytest.raises(UserError, match=f"^{first} and {second} are given"):
            Settings(**{first: rules[first], second: rules[second]})
