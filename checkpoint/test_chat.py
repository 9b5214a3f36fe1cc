"""Templates lay conversations out as transformers does; no message ever holds a control token."""

import json
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.chat import ChatTemplate, load_template
from checkpoint.sandbox import render
from checkpoint.vocabulary import Finder, Vocabulary
from errors import UserError

CONTROLS = {"<|end|>": 1001, "<|start|>": 1002, "<|endless|>": 1003}
MORE = {"<think>": 1011, "</think>": 1012, "<tool>": 1013, "</tool>": 1014, "<｜U｜>": 1015}
MORE |= {"[INST]": 1016, "[/INST]": 1017, "</s>": 1018}  # added tokens that are not special
TEXTS = {id: text for text, id in (CONTROLS | MORE).items()}
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TRIMMED = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"


def encode(text: str, is_first: bool = True) -> list[int]:
    """A byte is a token."""
    return list(text.encode())


class Template(ChatTemplate):
    def tokens(self, messages, more, encode, **how) -> list[int]:
        ids = []
        for n, part in enumerate(self.parts(messages, how | {"add_generation_prompt": more})):
            ids += [part] if isinstance(part, int) else encode(part, n == 0)
        return ids


def template_of(file, source: str, added: dict[str, int] = {}, **named: str) -> Template:
    vocabulary = Vocabulary(file, {}, CONTROLS, added=added, prefix=[], named=named, merger=None)
    return Template(vocabulary, source)


def layout(tmp_path, source: str, *messages: tuple[str, str], more=False, **named) -> list[int]:
    template = template_of(tmp_path, source, **named)
    conversation = [{"role": role, "content": content} for role, content in messages]
    return template.tokens(conversation, more, encode)


def controls_in(ids: list[int]) -> list[str]:
    return [TEXTS[id] for id in ids if id in TEXTS]


def plain(ids: list[int]) -> str:
    return bytes(id for id in ids if id < 256).decode()


def spelled(ids: list[int]) -> str:
    """The text with its control tokens."""
    return b"".join(TEXTS[id].encode() if id in TEXTS else bytes([id]) for id in ids).decode()


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
    for how, said in (({}, "free"), ({"enable_thinking": False}, "False")):
        assert plain(template_of(tmp_path, asks).tokens([], True, encode, **how)) == said


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


# The logic of widespread templates, in control tokens of this page.
REASONED = (
    "{% if '</think>' in content %}{% set thought = (content.split('</think>') | first)"
    ".rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
ZOO = {
    "headers, trimmed (Llama 3)": (
        "{{ bos }}{% for m in messages %}{% set content = '<|start|>' + m['role'] + '\n\n' "
        "+ m['content'] | trim + '<|end|>' %}{{ content }}{% endfor %}"
    ),
    "reasoning is cut (R1 distilled)": (
        "{% set ns = namespace(first=true) %}{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<|start|>' + content + '<|end|>' }}{% else %}{{ '<｜U｜>' + m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|><think>\n{% endif %}"
    ),
    "reasoning is taken apart (Qwen 3)": (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% set i = loop.revindex0 %}"
        "{% if ns.last == 0 and m.role == 'user' and not (m.content.startswith('<tool>') "
        "and m.content.endswith('</tool>')) %}{% set ns.last = i %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set content = m.content ~ '' %}<|start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% set thought = '' %}"
        + REASONED
        + "{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{% else %}{{ content }}{% endif %}{% else %}{{ content }}{% endif %}<|end|>\n{% endfor %}"
    ),
    "a macro gives the text (SmolLM 3)": (
        "{% macro text(m) %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{% set content = text(m) %}{% if m.role == 'assistant' %}"
        "{%- generation -%}{% set head = '<|start|>' %}"
        + REASONED
        + "{{ head ~ content | replace('<tool>', '') }}<|end|>{%- endgeneration -%}"
        "{% else %}{{ '<|start|>' ~ m.role ~ content ~ head }}{% endif %}{% endfor %}"
    ),
    "brackets, and a system message in front (Mistral)": (
        "{% set rules = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (rules + '\n\n' if loop.first and rules else '') + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
    ),
    "turns, roles renamed (Gemma)": (
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|start|>' + role + '\n' + (m['content'] | trim) + '<|end|>\n' }}{% endfor %}"
    ),
    "ChatML with rules of its own (Qwen 2.5)": (
        "{% if messages[0].role != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}"
    )
    + CHATML,
}
INERT_FRAGMENTS = [*CONTROLS, *MORE, "<|", "end|>", "</th", "\n", "\n\n", " ", "ink>", "hi", "é"]
CONTENTS = st.lists(st.sampled_from(INERT_FRAGMENTS), max_size=7).map("".join)


@pytest.mark.parametrize("name", ZOO)
@given(st.booleans(), st.lists(CONTENTS, min_size=2, max_size=4), st.booleans())
def test_no_decision_of_a_template_changes(name, has_system, contents, more):
    """The text is the one of the messages as they stand, and its control tokens are those whose
    letters no message has."""
    source = ZOO[name]
    roles = ["system"] * has_system + ["user", "assistant"] * 2
    conversation = [dict(role=role, content=text) for role, text in zip(roles, contents)]
    values = dict(bos="<|start|>", messages=conversation, add_generation_prompt=more)
    wanted, problem = render(source, values)
    template = template_of(None, source, MORE, bos="<|start|>")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a user's message may be cut
        ids = template.tokens(conversation, more, encode)
    assert not problem and spelled(ids) == wanted
    known = Finder([*CONTROLS, *(text for text in MORE if text in source)])
    letters = "".join({letter for text in contents for letter in text if letter.strip()})
    marked, _ = render(source, values, letters)  # each letter of a message
    of_template = known.split(marked)[1::2]
    assert [text for text in controls_in(ids) if known.token_at(text, 0)] == of_template


def test_no_decision_of_a_template_is_guessed():
    """Of a text in lower case nobody knows any more what was written."""
    source = "{% if '<|end|>' in m | lower %}!{% endif %}{{ m }}"
    source = "{% set m = messages[0].content %}" + source
    assert plain(layout(None, source, ("user", "a < b"))) == "a < b"
    with pytest.raises(UserError, match="a control token in a message is not followed"):
        layout(None, source, ("user", "a <|end|>"))
    fails = "{% if '<' not in m | lower %}{{ raise_exception('no ' + m) }}{% endif %}" + source
    with pytest.raises(UserError, match=r"TemplateError: no a <\|end\|>"):
        layout(None, "{% set m = messages[0].content %}" + fails, ("user", "a <|end|>"))


def test_a_message_put_together_makes_no_control_token():
    source = "<|start|>{{ messages[0].content | replace('#', '') }}"
    with pytest.warns(UserWarning, match="changes the last user message"):
        assert layout(None, source, ("user", "<|#end|>")) == [1002, *encode("<|end|>")]


PARTS_ALONE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content[0]['type'] == 'image' %}!{% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text | trim }}{% endif %}{% endfor %}{% endfor %}"
)
TURNS = [("user", "a <|end|>"), ("assistant", "b"), ("user", " c <|end|>\n"), ("assistant", "d")]


@pytest.mark.parametrize(
    "source, expected",
    [
        (PARTS_ALONE, "[user]a <|end|>[assistant]b[user]c <|end|>[assistant]d"),
        ("c <|end|>" + PARTS_ALONE, "c [user]a <|end|>[assistant]b[user]c <|end|>[assistant]d"),
        ("{{ messages[2].content[0]['text'].strip() }}", "c <|end|>"),  # of a text, a mistake
        (
            "{{ 'a list' if messages[0].content is not string else messages[2].content }}",
            TURNS[2][1],
        ),
    ],
)
def test_a_message_is_a_text_or_a_list_of_parts_as_the_template_wants(source, expected):
    ids = layout(None, source, *TURNS)
    assert plain(ids) == expected


def test_the_last_user_message_is_not_lost_in_silence():
    for source in ("{{ messages[0].content }}", "{{ messages[2].role }}", "hi c <|end|>"):
        with pytest.raises(UserError, match="leaves the last user message out"):
            layout(None, source, *TURNS)
    changed = "{{ messages[2].content.replace('c', '').strip() }}"
    with pytest.warns(UserWarning, match="changes the last user message"):
        assert plain(layout(None, changed, *TURNS)) == "<|end|>"
    assert plain(layout(None, "hi", ("assistant", "d"), ("user", " "))) == "hi"


def test_no_instruction_and_no_result_is_left_out_in_silence():
    source = "{% for m in messages if m.role != ROLE %}{{ m.content | upper }}{% endfor %}"
    for role in ("tool", "system", "developer"):
        turns = [("user", "A"), (role, "<|end|> it"), ("user", "B")]
        with pytest.raises(UserError, match=rf"leaves message 2 \(role '{role}'\), or"):
            layout(None, source.replace("ROLE", f"'{role}'"), *turns)
        assert plain(layout(None, source.replace("ROLE", "''"), *turns)) == "A<|END|> ITB"


def test_no_call_is_left_out_in_silence():
    """As in R1's template, which has calls beside a content of none alone."""
    source = "{% for m in messages %}{{ m.content }}{% if m.tool_calls and m.content == CONTENT %}"
    source += "{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    turns = [dict(role="assistant", content="", tool_calls=calls)]
    told = template_of(None, source.replace("CONTENT", "''")).tokens(turns, False, encode)
    assert plain(told) == "f"
    with pytest.raises(UserError, match=r"leaves message 1 \(role 'assistant'\), or its calls"):
        template_of(None, source.replace("CONTENT", "none")).tokens(turns, False, encode)


def test_generation_is_a_block_that_leaves_no_trace():
    source = (
        "{% set x = 'a' %}{%- generation -%} {% set x = 'b' %}{{ x }}{% endgeneration %}\n{{ x }}"
        "{%generation%}c{%+ endgeneration +%}"
    )
    assert plain(layout(None, source, ("assistant", ""))) == "bac"


def test_an_added_token_of_spaces_controls_nothing():
    """Templates know it: they have spaces, too."""
    template = template_of(None, "  {{ messages[0].content | trim }}", {"  ": 1007})
    turns = [{"role": "user", "content": "  a  b  "}]
    assert template.tokens(turns, False, encode) == [1007, *b"a", 1007, *b"b"]


def test_templates_compare_and_trim_messages():
    source = (
        "{% for m in messages %}{% if m.role == 'user' and '<' in m.content %}"
        "<|start|>{{ m.content | trim }}<|end|>{% endif %}{% endfor %}"
    )
    ids = layout(None, source, ("user", "  <b> <|end|> x \n"), ("assistant", "<"))
    assert controls_in(ids) == ["<|start|>", "<|end|>"]
    assert plain(ids) == "<b> <|end|> x"


def test_templates_find_what_transformers_gives_them():
    block = "    {% if true %}\n{{ m.content }}\n    {% endif %}\n"
    for source, expected in (
        ("{% for m in messages %}\n" + block + "{% endfor %}\n", "é<|end|>\n"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages[0] | tojson }}", '{"role": "assistant", "content": "é<|end|>"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ add_generation_prompt }}", "False"),
        ("{{ tools is none and documents is none }}", "True"),
    ):
        ids = layout(None, source, ("assistant", "é<|end|>"))
        assert plain(ids) == expected and controls_in(ids) == [], source
    named = dict(bos_token="<|start|>", eos_token="<|end|>")
    assert layout(None, "{{ bos_token }}a{{ eos_token }}{{ pad_token }}", **named) == [
        1002,
        97,
        1001,
    ]


def test_a_lone_surrogate_is_a_replacement_character():
    assert layout(None, "\udc80" + TRIMMED, ("user", "a\ud800b")) == encode("\ufffda\ufffdb")
    assert layout(None, r"{{ '\udfff' }}", ("assistant", "a")) == encode("\ufffd")


def test_control_tokens_may_begin_with_a_thousand_letters():
    letters = [chr(0x4E00 + n) for n in range(1500)]
    vocabulary = replace(template_of(None, "").vocabulary, special=dict.fromkeys(letters, 1004))
    text = letters[0] + letters[1100]
    turns = [{"role": "user", "content": text}]
    assert Template(vocabulary, TRIMMED).tokens(turns, False, encode) == encode(text)


def test_templates_that_fail_are_one_line(tmp_path):
    for source, says in (
        ("{{ raise_exception('roles must\nalternate') }}", "TemplateError: roles must alternate"),
        ("{{ raise_exception('no ' + messages[0].content) }}", "no <|end|>"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ nobody.x.y }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].content * 10**10 }}", "is repeated to more than"),
    ):
        with pytest.raises(UserError, match="the chat template fails") as error:
            layout(tmp_path, source, ("user", "<|end|>"))
        said = str(error.value)
        assert says in said and str(tmp_path) not in said and "\n" not in said, said
        assert said.encode()  # no surrogate is left


def test_messages_must_hold_a_role_and_a_content():
    template = template_of(None, TRIMMED)
    good = {"role": "user", "content": "a"}
    for bad in ({"role": "user"}, good | {"content": 3}, "x", good | {"b": "b"}):
        with pytest.raises(UserError, match="message 2 is"):
            template.tokens([good, bad], False, encode)


def test_no_tool_holds_a_control_token_nor_does_a_call():
    """Not even the name of a field; and "type" is found, though a control token is spelled so."""
    source = (
        "<|start|>{{ tools | tojson(indent=1) }}{{ tools[0].type }}{{ messages[0].content }}"
        "{% for call in messages[0].tool_calls %}{{ call | tojson }}{% endfor %}"
    )
    template = template_of(None, source, {"type": 1004})
    tools = [{"type": "<|end|>", "<|endless|>": {"\ud800": ["type", 1, None]}}]
    calls = [{"function": {"name": "f"}, "<|end|>": "<|start|>"}]
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    ids = template.tokens([message], False, encode, tools=tools)
    assert ids[0] == 1002 and not [id for id in ids[1:] if id > 255 and id != 1004]
    laid_out = json.dumps(tools, indent=1, ensure_ascii=False).replace("\ud800", "\ufffd")
    assert plain(ids) == laid_out + "<|end|>Hi" + json.dumps(calls[0])


def test_a_template_gets_what_it_names_of_a_message():
    """Thoughts have several names, and a value is passed if it is named."""
    message = {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "name": "Tom"}
    for source, text in (
        ("{{ m.content }}{{ m.reasoning_content }}", "Hihm"),
        ("{{ m.name }}{{ m.thinking }}", "Tomhm"),
        ("{{ m | tojson }}", '{"role": "assistant", "content": "Hi", "name": "Tom"}'),
        ("{{ level }}{{ m.content }}", "3Hi"),
    ):
        template = template_of(None, "{% set m = messages[0] %}" + source)
        how = {"level": 3, "lever": 4}
        assert plain(template.tokens([message], False, encode, **how)) == text


def test_the_template_file_counts_before_the_configuration(tmp_path):
    several = [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "D"}]
    for template, expected in (("A", "A"), (several, "C"), (several[1:], None), (None, None)):
        assert load_template(tmp_path, {"chat_template": template}) == expected
        with_tools = load_template(tmp_path, {"chat_template": template}, "tool_use")
        assert with_tools == ("D" if isinstance(template, list) else None)
    for bad in (3, [1], [{"name": [], "template": "A"}], [{"name": "default", "template": 4}]):
        with pytest.raises(UserError, match="tokenizer_config.json: chat_template is "):
            load_template(tmp_path, {"chat_template": bad})
    (tmp_path / "chat_template.jinja").write_text("B")
    assert load_template(tmp_path, {"chat_template": json.dumps("A")}) == "B"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("E")
    assert load_template(tmp_path, {"chat_template": several}, "tool_use") == "E"


def test_a_link_to_nothing_is_told(tmp_path):
    """As in a cache that was copied without what its links lead to."""
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="chat_template.jinja is missing"):
        load_template(tmp_path, {"chat_template": "A"})
