"""Thoughts are told apart from answers; templates say what their tags are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("app.server", reason="the extra 'server' is not installed")
from app.answers import AnswerReader, Thoughts
from app.tools import after_thoughts
from loading import Model
from settings import Grammar
from testing.http import needs_llguidance

TAGS = Thoughts("<think>", "</think>")
READ = [  # is the beginning inside; a text, its thoughts, its answer
    (False, "<think>\nhm\n</think>\n\nHi", "hm", "Hi"),
    (False, "\n<think>hm", "hm", ""),
    (False, "<think>\n\n</think>\n\nHi ", "", "Hi "),
    (False, " Hi <think>hm</think>", "", " Hi <think>hm</think>"),
    (False, "<thin", "", "<thin"),
    (True, "hm\n</think>\n\nHi", "hm", "Hi"),
    (True, "\n<think> a </thin b\n</think>", "a </thin b", ""),
    (True, "hm</think>a</think>", "hm", "a</think>"),
]


def divided(is_inside: bool, pieces: list[str]) -> tuple[str, str]:
    reader = AnswerReader(TAGS, is_inside)
    told = [reader.feed(piece, n == len(pieces)) for n, piece in enumerate(pieces, 1)]
    thoughts = "".join(message.get("reasoning_content", "") for message in told)
    return thoughts, "".join(message["content"] for message in told)


@pytest.mark.parametrize("is_inside, text, thoughts, answer", READ)
def test_a_text_is_divided_into_thoughts_and_answer(is_inside, text, thoughts, answer):
    for pieces in ([text], [*text, ""]):
        assert divided(is_inside, pieces) == (thoughts, answer)


PARTS = ["<think>", "</think>", "<", "think>", "/", "\n", 12 * " ", "hm", "Hi."]


@given(st.booleans(), st.lists(st.sampled_from(PARTS), max_size=9), st.integers(1, 9))
def test_it_does_not_matter_how_a_text_is_cut(is_inside, parts, size):
    text = "".join(parts)
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    assert divided(is_inside, [*pieces, ""]) == divided(is_inside, [text])


@pytest.mark.parametrize(
    "template, tags",
    [
        ("{{ m.content.split('</think>')[-1] }}", TAGS),
        ("<tools></tools>[T]{{ m.thinking }}[/THOUGHTS]", Thoughts("[THOUGHTS]", "[/THOUGHTS]")),
        ("<tools></tools>{{ m.reasoning_content }}<think>", None),
        ("<a:think></a:think>", Thoughts("<a:think>", "</a:think>")),
        ("<reasoning_effort>9</reasoning_effort>{{ m.content.split('</think>') }}", TAGS),
    ],
)
def test_a_template_names_the_tags_of_thoughts(template, tags):
    assert Thoughts.of(template) == tags


@needs_llguidance
@pytest.mark.parametrize("notation", ["regex", "choice", "schema", "grammar"])
def test_a_grammar_begins_behind_the_thoughts(notation):
    from automaton import lark_of

    model = Model.load("tiny", "cpu")
    texts = {"regex": "a|b", "choice": ("a", "b"), "grammar": 'start: X\nX: "a" | "b"'}
    inner = lark_of(Grammar(notation, texts.get(notation, '{"enum": [1]}')))
    told = "1" if notation == "schema" else "a"
    for is_inside in (True, False):
        lark = after_thoughts(TAGS, is_inside, inner)
        compiled = model.grammars.compile(Grammar("grammar", lark))
        for text, is_taken in (
            (f"hm {told}</think>\n\n{told}", is_inside),
            (f"<think>hm</think>{told}", True),
            (told, not is_inside),
            ("hm</think>c", False),
            ("<think>hm", False),
        ):
            tokens = model.tokenizer.encode(text, is_first=False)
            matcher = compiled.deep_copy()
            taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert taken == is_taken, text
