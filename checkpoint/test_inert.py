"""A text with stand-ins is asked like the one that was written, and keeps its stand-ins."""

from hypothesis import given
from hypothesis import strategies as st

from checkpoint.inert import Inert, inert, stand_ins

MARKS = stand_ins("<[")
TEXTS = st.text("<[a \n", max_size=12)
PARTS = st.text("<[a \n", min_size=1, max_size=3)
QUESTIONS = (
    lambda text, part, n: [part in text, text == part, part == text, text != part],
    lambda text, part, n: [text.startswith(part), text.endswith(part), {text: 1}.get(text)],
    lambda text, part, n: [text.find(part), text.rfind(part, n)],
    lambda text, part, n: text.split(part, n) + text.rsplit(part, maxsplit=n),
    lambda text, part, n: text.split(maxsplit=n) + text.rsplit(None, n),
    lambda text, part, n: [text.strip(part), text.lstrip(part), text.rstrip(part), text.strip()],
    lambda text, part, n: [text[n:], text[::-1], text.replace(part, ""), text + text, str(text)],
)


@given(TEXTS, PARTS, st.integers(-1, 3))
def test_answers_are_those_of_the_text_that_was_written(text, part, n):
    for question in QUESTIONS:
        for asked in (part, inert(part, MARKS)):
            got = question(inert(text, MARKS), asked, n)
            assert not [each for each in got if type(each) is str and {*each} & {*"<["}]
            assert ["".join([each]) if isinstance(each, str) else each for each in got] == [
                each.translate(MARKS) if isinstance(each, str) else each
                for each in question(text, part, n)
            ]


def test_what_a_template_adds_stays_as_it_is():
    text = inert({"turns": [{"text": "<b", "n": 1}], "on": True}, MARKS)["turns"][0]["text"]
    for whole, expected in (
        (text + "<", "\udc00b<"),
        ("<" + text, "<\udc00b"),
        (text.replace("<", "<!"), "<!b"),
        (("<" + text)[:-1].strip("<"), "<"),  # not covered
    ):
        assert isinstance(whole, Inert) and "".join([whole]) == expected
