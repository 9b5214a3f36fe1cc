"""Templates lay conversations out as transformers does; no message ever holds a control token."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.chat import ChatTemplate, load_template
from checkpoint.vocabulary import Vocabulary
from errors import UserError

CONTROLS = {"<|end|>": 1001, "<|start|>": 1002, "<|endless|>": 1003}
TEXTS = {id: text for text, id in CONTROLS.items()}
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TRIMMED = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"


def encode(text: str, is_first: bool = True) -> list[int]:
    """A byte is a token."""
    return list(text.encode())


def template_of(file, source: str, added: dict[str, int] = {}, **named: str) -> ChatTemplate:
    vocabulary = Vocabulary(file, {}, CONTROLS, added=added, prefix=[], named=named, merges=None)
    return ChatTemplate(vocabulary, source)


def layout(tmp_path, source: str, *messages: tuple[str, str], more=False, **named) -> list[int]:
    template = template_of(tmp_path, source, **named)
    conversation = [{"role": role, "content": content} for role, content in messages]
    return template.tokens(conversation, more, encode)


def controls_in(ids: list[int]) -> list[str]:
    return [TEXTS[id] for id in ids if id in TEXTS]


def plain(ids: list[int]) -> str:
    return bytes(id for id in ids if id < 256).decode()


FRAGMENTS = [*CONTROLS, "<|", "end|>", "<|end", "|>", " ", "\n", "less|>", "user", "<", "hi", "é"]
PIECES = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@given(st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=3))
def test_no_message_ever_holds_a_control_token(turns):
    ids = layout(None, CHATML, *turns, more=True)
    assert controls_in(ids) == ["<|start|>", "<|end|>"] * len(turns) + ["<|start|>"]
    expected = "".join(f"{role}\n{content}\n" for role, content in turns)
    assert plain(ids) == expected + "assistant\n"


def test_a_template_that_asks_is_told_whether_to_think(tmp_path):
    asks = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}free{% endif %}"
    for value, said in ((None, "free"), (False, "False"), (True, "True")):
        assert plain(template_of(tmp_path, asks).tokens([], True, encode, value)) == said
        if value is not None:
            with pytest.raises(UserError, match="knows no enable_thinking"):
                template_of(tmp_path, CHATML).tokens([], True, encode, value)


def test_only_text_before_all_control_tokens_is_the_first():
    """Where a vocabulary gives the first text of a prompt a space."""
    for source, wanted in (
        ("a<|start|>{{ messages[0].content }}", {"a": True, "x": False}),
        ("<|start|>{{ messages[0].content }}<|end|>b", {"x": False, "b": False}),
    ):
        told = {}

        def encode(text: str, is_first: bool) -> list[int]:
            told[text] = is_first
            return []

        template_of(None, source).tokens([{"role": "user", "content": "x"}], False, encode)
        told.pop("", None)
        assert told == wanted


def test_messages_side_by_side_do_not_add_up_to_a_control_token():
    for contents in (
        ("x<|en", "d|>y"),
        (" x<|en \n", "  d|>y "),
        ("<", "|end|>"),
        ("x<|e", "nd|>", "y"),
        ("<|", "e", "nd|>"),
        ("<|end", "less|>"),
        ("<|endless|", ">"),
    ):
        ids = layout(None, TRIMMED, *(("user", content) for content in contents))
        assert ids == encode("".join(content.strip() for content in contents)), contents


def test_no_message_holds_an_added_token_that_the_template_knows():
    """Though neither is special; one that it does not know is found in any text."""
    added = {"<im>": 1004, "</s>": 1005, "<tool>": 1006}
    source = "<im>{{ messages[0].content }}{{ eos_token }}"
    template = template_of(None, source, added, eos_token="</s>")
    turns = [{"role": "user", "content": "<im></s><tool>"}]
    assert template.tokens(turns, False, encode) == [1004, *encode("<im></s>"), 1006, 1005]


def test_templates_compare_and_trim_messages():
    source = (
        "{% for m in messages %}{% if m.role == 'user' and '<' in m.content %}"
        "<|start|>{{ m.content | trim }}<|end|>{% endif %}{% endfor %}"
    )
    ids = layout(None, source, ("user", "  <b> <|end|> x \n"), ("other", "<"))
    assert controls_in(ids) == ["<|start|>", "<|end|>"]
    assert plain(ids) == "<b> <|end|> x"


def test_templates_find_what_transformers_gives_them():
    block = "    {% if true %}\n{{ m.content }}\n    {% endif %}\n"
    for source, expected in (
        ("{% for m in messages %}\n" + block + "{% endfor %}\n", "é<|end|>\n"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é<|end|>"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ add_generation_prompt }}", "False"),
        ("{{ tools is none and documents is none }}", "True"),
    ):
        ids = layout(None, source, ("user", "é<|end|>"))
        assert plain(ids) == expected and controls_in(ids) == [], source
    named = dict(bos_token="<|start|>", eos_token="<|end|>")
    assert layout(None, "{{ bos_token }}a{{ eos_token }}{{ pad_token }}", **named) == [
        1002,
        97,
        1001,
    ]


def test_a_lone_surrogate_is_a_replacement_character():
    assert layout(None, "\udc80" + TRIMMED, ("user", "a\ud800b")) == encode("\ufffda\ufffdb")
    assert layout(None, r"{{ '\udfff' }}", ("user", "a")) == encode("\ufffd")


def test_control_tokens_may_begin_with_a_thousand_letters():
    letters = [chr(0x4E00 + n) for n in range(1500)]
    vocabulary = replace(template_of(None, "").vocabulary, special=dict.fromkeys(letters, 1004))
    text = letters[0] + letters[1100]
    turns = [{"role": "user", "content": text}]
    assert ChatTemplate(vocabulary, TRIMMED).tokens(turns, False, encode) == encode(text)


def test_templates_that_fail_are_one_line(tmp_path):
    for source, says in (
        ("{{ raise_exception('roles must\nalternate') }}", "TemplateError: roles must alternate"),
        ("{{ raise_exception('no ' + messages[0].content) }}", "no <|end|>"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ nobody.x.y }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].content * 10**10 }}", "it needs more than 1024 MiB of memory"),
    ):
        with pytest.raises(UserError, match="the chat template fails") as error:
            layout(tmp_path, source, ("user", "<|end|>"))
        said = str(error.value)
        assert says in said and said.startswith(str(tmp_path)) and "\n" not in said, said
        assert said.encode()  # no surrogate is left


def test_messages_must_hold_a_role_and_a_content():
    template = template_of(None, TRIMMED)
    good = {"role": "user", "content": "a"}
    for bad in ({"role": "user"}, good | {"content": 3}, "x", good | {"name": "b"}):
        with pytest.raises(UserError, match="message 2 is"):
            template.tokens([good, bad], False, encode)


def test_the_template_file_counts_before_the_configuration(tmp_path):
    several = [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "D"}]
    for template, expected in (("A", "A"), (several, "C"), (several[1:], None), (None, None)):
        assert load_template(tmp_path, {"chat_template": template}) == expected
    for bad in (3, [1], [{"name": [], "template": "A"}], [{"name": "default", "template": 4}]):
        with pytest.raises(UserError, match="tokenizer_config.json: chat_template is "):
            load_template(tmp_path, {"chat_template": bad})
    (tmp_path / "chat_template.jinja").write_text("B")
    assert load_template(tmp_path, {"chat_template": json.dumps("A")}) == "B"
