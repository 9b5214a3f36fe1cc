"""Byte-level BPE against a reference that merges the first pair of a list; no text becomes a control token."""

import base64
import json
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import vocabulary
from checkpoint.vocabulary import GPT2_SPLIT, LLAMA3_CONTROLS, LLAMA3_SPLIT
from conftest import CHATML, byte_alphabet
from tokenizer import Tokenizer

CORPUS = (
    "the cat sat on the mat; it's 2024, the 12345 cats' naïve café — 世界 the the\n\n  cats sat 😀 I'LL don't\t"
    * 3
)
# letters that merge in every which way: here the order of merges matters
CORPUS += "".join(random.Random(0).choices("aab ", k=600))
ALPHABET = byte_alphabet()
SPECIALS = ["<|end|>", "<|start|>", "<|endless|>"]
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)


def spell(data: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in data)


@cache
def learn(pattern: str, merges: int = 60) -> list[tuple[str, str]]:
    """Merges of a small corpus: each time the most frequent pair."""
    words = [list(spell(piece.encode())) for piece in regex.findall(pattern, CORPUS)]
    learned = []
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learned.append(best)
        words = [apply(word, best) for word in words]
    return learned


def apply(word: list[str], pair: tuple[str, str]) -> list[str]:
    out = []
    for token in word:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


def reference(
    text: str,
    splits: list[str],
    merges: list[tuple[str, str]],
    vocab: dict[str, int],
    ignore_merges: bool,
) -> list[int]:
    """The definition: split, spell out, and merge the pair that stands first in the list, at its leftmost place, until
    there is none. Of a pair listed twice the later place counts, and a byte that the vocabulary lacks is dropped (both
    as in `tokenizers`)."""
    pieces, ids, place = [text], [], {pair: n for n, pair in enumerate(merges)}
    for pattern in splits:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    for piece in pieces:
        word = [c for c in spell(piece.encode()) if c in vocab]
        if ignore_merges and spell(piece.encode()) in vocab:
            word = [spell(piece.encode())]
        while known := [
            (place[pair], i) for i, pair in enumerate(zip(word, word[1:])) if pair in place
        ]:
            i = min(known)[1]
            word[i : i + 2] = ["".join(word[i : i + 2])]
        ids += [vocab[token] for token in word]
    return ids


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": dict(pre=BYTE_LEVEL, splits=[GPT2_SPLIT]),
    "digits": dict(
        pre=dict(
            type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), BYTE_LEVEL]
        ),
        splits=[r"\p{N}", GPT2_SPLIT],
    ),
    "llama3": dict(
        pre=dict(
            type="Sequence",
            pretokenizers=[
                dict(
                    type="Split", pattern={"Regex": LLAMA3_SPLIT}, behavior="Isolated", invert=False
                ),
                BYTE_LEVEL | dict(use_regex=False),
            ],
        ),
        splits=[LLAMA3_SPLIT],
        ignore_merges=True,
    ),
    "lacking": dict(pre=BYTE_LEVEL, splits=[GPT2_SPLIT], lacks=b"\x00\x07\xc3\xf0z"),
}


def describe(kind: str) -> tuple[dict[str, Any], list[tuple[str, str]], dict[str, int]]:
    """tokenizer.json of a kind, its merges and its vocabulary. Ids are not in the order of the merges."""
    how = KINDS[kind]
    merges = [
        (a, b)
        for a, b in learn(how["splits"][-1])
        if not set(a + b) & set(spell(how.get("lacks", b"")))
    ]
    texts = [c for c in ALPHABET if c not in spell(how.get("lacks", b""))] + [
        "".join(pair) for pair in merges
    ]
    if kind == "llama3":
        # reachable by no merge: a whole piece never contains two words
        texts.append(spell(b" cat sat on"))
        texts.append(spell("wörtlich".encode()))  # reachable by no merge, but as a whole piece
    vocab = {text: id for id, text in enumerate(reversed(texts))}
    special = {text: len(vocab) + i for i, text in enumerate(SPECIALS)}
    return (
        tokenizer_json(
            vocab,
            [" ".join(pair) for pair in merges],
            how["pre"],
            how.get("ignore_merges", False),
            special,
        ),
        merges,
        vocab,
    )


def tokenizer_json(
    vocab: dict[str, int],
    merges: list[Any],
    pre: dict[str, Any] = BYTE_LEVEL,
    ignore_merges: bool = False,
    special: dict[str, int] = {},
    plain: dict[str, int] = {},
    post: dict[str, Any] | None = None,
) -> dict[str, Any]:
    added = [
        dict(
            id=id,
            content=text,
            special=text in special,
            lstrip=False,
            rstrip=False,
            single_word=False,
            normalized=False,
        )
        for text, id in (special | plain).items()
    ]
    model = dict(
        type="BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=ignore_merges,
        vocab=vocab,
        merges=merges,
    )
    return dict(
        version="1.0",
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=pre,
        post_processor=post,
        decoder=BYTE_LEVEL,
        model=model,
    )


def write(folder: Path, data: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, *args: Any, config: dict[str, Any] = {}, **how: Any) -> Tokenizer:
    return Tokenizer.load(write(folder, tokenizer_json(*args, **how), **config))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    template = CHATML.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>")
    return {
        kind: Tokenizer.load(write(root / kind, describe(kind)[0], chat_template=template))
        for kind in KINDS
    }


REFERENCES = {
    kind: (KINDS[kind]["splits"], *describe(kind)[1:], KINDS[kind].get("ignore_merges", False))
    for kind in KINDS
}
WORDS = st.sampled_from(
    [
        "the",
        " cat",
        "cats",
        "'s",
        "'LL",
        " 12345",
        "\n",
        "  ",
        "\t",
        "é",
        "世",
        "😀",
        "\x00",
        "z",
        "wörtlich",
        " sat on",
        "0",
        "—",
        ".",
        *SPECIALS,
    ]
)
TEXTS = st.one_of(
    st.text("ab ", max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(WORDS, max_size=12).map("".join),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS)
def test_tokens_are_those_of_the_definition(loaded, kind, text):
    tok, (splits, merges, vocab, ignore) = loaded[kind], REFERENCES[kind]
    ids = tok.encode(text)
    assert ids == reference(text, splits, merges, vocab, ignore)
    # whatever the text: TEXTS holds control tokens
    assert not set(ids) & set(tok.specials.values())
    if kind != "lacking":
        assert tok.decode(ids) == text
    stream = tok.stream()
    pieces = [stream.feed(id) for id in ids]
    assert all("\ufffd" not in piece or "\ufffd" in text or kind == "lacking" for piece in pieces)
    assert "".join(pieces) + stream.finish() == tok.decode(ids)


@st.composite
def merge_lists(draw) -> tuple[list[tuple[str, str]], list[str], bool]:
    """Merges that nothing has trained: in any order, some of them twice; tokens that none makes; ignore_merges."""
    known, merges = ["a", "b", "c"], []
    for _ in range(draw(st.integers(1, 14))):
        pair = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        merges.append(pair)
        known.append("".join(pair))
    merges = [pair for pair in merges if len("".join(pair)) < 9]
    listed = draw(st.permutations(merges)) + merges[: draw(st.integers(0, 2))]
    return (
        listed,
        draw(st.lists(st.text("abcx", min_size=2, max_size=5), max_size=4)),
        draw(st.booleans()),
    )


@settings(
    deadline=None, max_examples=70, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    merge_lists(),
    st.lists(
        st.one_of(st.text("abc", max_size=12), st.text("abcx", max_size=40)), min_size=8, max_size=8
    ),
    st.randoms(),
)
def test_any_list_of_merges_is_obeyed(tmp_path, how, texts, order):
    merges, more, ignore = how
    tokens = [
        *dict.fromkeys(
            [*(c for c in ALPHABET if c != "x"), *("".join(pair) for pair in merges), *more]
        )
    ]
    order.shuffle(tokens)
    vocab = {text: id for id, text in enumerate(tokens)}
    tok = load(
        tmp_path, vocab, [list(pair) for pair in merges], BYTE_LEVEL | dict(use_regex=False), ignore
    )
    for text in texts + more:
        assert tok.encode(text) == reference(text, [], merges, vocab, ignore), text


SENTENCE = "ab12 it's  3"


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([BYTE_LEVEL], ["ab", "12", " it", "'s", " ", " 3"]),
        ([BYTE_LEVEL | dict(use_regex=False)], [SENTENCE]),
        (
            [dict(type="Digits", individual_digits=True), BYTE_LEVEL],
            ["ab", "1", "2", " it", "'s", "  ", "3"],
        ),
        (
            [dict(type="Digits", individual_digits=False), BYTE_LEVEL],
            ["ab", "12", " it", "'s", "  ", "3"],
        ),
        (
            [
                dict(
                    type="Split", pattern={"Regex": LLAMA3_SPLIT}, behavior="Isolated", invert=False
                ),
                BYTE_LEVEL | dict(use_regex=False),
            ],
            ["ab", "12", " it", "'s", " ", " ", "3"],
        ),
        (
            [
                dict(
                    type="Split",
                    pattern={"Regex": r"[^\S\r\n]?\p{L}+"},
                    behavior="Isolated",
                    invert=False,
                ),
                dict(
                    type="Split", pattern={"Regex": r"[\P{N}]+"}, behavior="Isolated", invert=False
                ),
                BYTE_LEVEL | dict(use_regex=False),
            ],
            ["ab", "12", " it", "'", "s", "  ", "3"],
        ),
    ],
)
def test_a_text_is_cut_into_pieces_one_step_after_the_other(tmp_path, monkeypatch, steps, expected):
    # to look through all of Unicode for one more class takes most of a second
    monkeypatch.setattr(vocabulary, "members", vocabulary.members.__wrapped__)
    monkeypatch.setattr(vocabulary, "everything", lambda: "".join(map(chr, range(0x250))))
    parts = {
        spell(SENTENCE[i:j].encode())
        for i in range(len(SENTENCE))
        for j in range(i + 1, len(SENTENCE) + 1)
    }
    # any piece is a token: one sees the pieces
    vocab = {text: id for id, text in enumerate(sorted(parts.union(ALPHABET)))}
    tok = load(tmp_path, vocab, [], dict(type="Sequence", pretokenizers=steps), ignore_merges=True)
    assert [tok.token_bytes(id).decode() for id in tok.encode(SENTENCE)] == expected


def test_added_tokens_that_are_no_control_tokens_are_matched_in_any_text(tmp_path):
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    tok = load(tmp_path, vocab, [], plain={"<tool": 300, "<tool>": 301}, special={"<|end|>": 400})
    assert tok.encode("a<tool><|end|><tool") == [
        *tok.encode("a"),
        301,
        *(vocab[c] for c in "<|end|>"),
        300,
    ]
    assert (
        tok.decode(tok.encode("a<tool>")) == "a<tool>"
        and tok.specials == {"<|end|>": 400}
        and tok.vocab_size == 401
    )


def test_a_control_token_is_no_piece_of_text_even_where_merges_are_ignored(tmp_path):
    vocab = {c: id for id, c in enumerate([*ALPHABET, "stop"])}
    tok = load(tmp_path, vocab, [], ignore_merges=True, special={"stop": 256})
    assert tok.encode("stop") == [vocab[c] for c in "stop"] and tok.decode([256]) == ""
    assert tok.decode([256], special=True) == "stop"


def begins_with(ids: Any) -> dict[str, Any]:
    return dict(
        type="Sequence",
        processors=[
            dict(BYTE_LEVEL),
            dict(
                type="TemplateProcessing",
                single=[
                    {"SpecialToken": {"id": "B", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                pair=[],
                special_tokens={"B": {"id": "B", "ids": ids, "tokens": ["B"]}},
            ),
        ],
    )


@pytest.mark.parametrize(
    "post, config, bos, prefix",
    [
        (None, {}, None, []),
        (None, {"bos_token": "<s>", "add_bos_token": True}, 300, []),
        (begins_with([300]), {"add_bos_token": False}, 300, [300]),
        (begins_with([300]), {"bos_token": {"content": "<t>"}}, 301, [300]),
    ],
)
def test_only_the_post_processor_says_what_a_prompt_begins_with(
    tmp_path, post, config, bos, prefix
):
    tok = load(
        tmp_path,
        {c: id for id, c in enumerate(ALPHABET)},
        [],
        special={"<s>": 300, "<t>": 301},
        post=post,
        config=config,
    )
    assert tok.bos == bos and tok.prompt("x") == prefix + tok.encode("x")


def test_missing_bytes_are_known(loaded):
    assert (
        loaded["lacking"].missing_bytes == set(b"\x00\x07\xc3\xf0z")
        and not loaded["gpt2"].missing_bytes
    )
    assert loaded["lacking"].encode("z\x00\x07") == []
    assert loaded["lacking"].decode(loaded["lacking"].encode("cazt")) == "cat"


def test_whole_pieces_only_where_merges_are_ignored(loaded):
    tok = loaded["llama3"]
    assert len(tok.encode("wörtlich")) == 1 and len(tok.encode(" cat sat on")) > 1


def test_a_lone_surrogate_is_a_replacement_character(loaded):
    assert loaded["gpt2"].encode("a\udc80b") == loaded["gpt2"].encode("a\ufffdb")


def test_a_stream_yields_whole_characters_and_loses_nothing(loaded):
    tok = loaded["gpt2"]
    ids = [tok._ids[0]] and [
        next(id for id, word in tok._vocabulary.tokens.items() if word == bytes([b]))
        for b in "é世😀".encode() + b"\xf0\x9f"
    ]
    stream = tok.stream()
    pieces = [stream.feed(id) for id in ids]
    assert (
        pieces == ["", "é", "", "", "世", "", "", "", "😀", "", ""] and stream.finish() == "\ufffd"
    )
    assert "".join(pieces) + "\ufffd" == tok.decode(ids)


def test_control_tokens_are_left_out_of_a_text_unless_asked_for(loaded):
    tok = loaded["gpt2"]
    ids = tok.encode("a") + [tok.specials["<|end|>"]] + tok.encode("b")
    assert tok.decode(ids) == "ab" and tok.decode(ids, special=True) == "a<|end|>b"
    stream = tok.stream()
    assert "".join(map(stream.feed, ids)) + stream.finish() == "ab"
    with pytest.raises(ValueError, match="there is no token 9999"):
        tok.decode([9999])


def test_a_vocabulary_differs_where_a_token_is_another_or_is_missing(tmp_path):
    bytes_ = {c: id for id, c in enumerate(ALPHABET)}
    one, more, other = (
        load(tmp_path / "".join(special).strip("<>"), bytes_, [], special=special)
        for special in ({"<s>": 300}, {"<s>": 300, "<t>": 301}, {"<t>": 300})
    )
    assert one.difference(one) is None
    assert one.difference(more) == "token 301 is None in one and b'<t>' in the other"
    assert more.difference(one) == "token 301 is b'<t>' in one and None in the other"
    assert one.difference(other) == "token 300 is b'<s>' in one and b'<t>' in the other"


# ---- Chats

PIECES = st.lists(
    st.sampled_from(
        [
            "<|end|>",
            "<|start|>",
            "<|endless|>",
            "<|",
            "end|>",
            "<|end",
            "|>",
            " ",
            "\n",
            "less|>",
            "user",
            "<",
            "hi",
        ]
    ),
    max_size=8,
)


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(PIECES.map("".join), PIECES.map("".join)), min_size=1, max_size=3))
def test_no_message_ever_holds_a_control_token(loaded, turns):
    tok = loaded["gpt2"]
    ids = tok.chat([{"role": role, "content": content} for role, content in turns])
    controls = [id for id in ids if id in tok.specials.values()]
    start, end = tok.specials["<|start|>"], tok.specials["<|end|>"]
    assert controls == [start, end] * len(turns) + [start]
    assert (
        tok.decode(ids)
        == "".join(f"{role}\n{content}\n" for role, content in turns) + "assistant\n"
    )


def test_a_template_may_trim_and_compare(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content | trim }}<|end|>{% endif %}"
        "{% endfor %}"
    )
    tok = Tokenizer.load(write(tmp_path, describe("gpt2")[0], chat_template=template))
    ids = tok.chat(
        [{"role": "user", "content": "  <|end|> x \n"}, {"role": "other", "content": "y"}]
    )
    assert tok.decode(ids, special=True) == "<|start|><|end|> x<|end|>"
    assert sum(id in tok.specials.values() for id in ids) == 2


@pytest.mark.parametrize(
    "contents",
    [
        ("x<|en", "d|>y"),
        (" x<|en \n", "  d|>y "),
        ("<", "|end|>"),
        ("x<|e", "nd|>", "y"),
        ("<|", "e", "nd|>"),
        ("<|end", "less|>"),
        ("<|endless|", ">"),
    ],
)
def test_messages_side_by_side_do_not_add_up_to_a_control_token(tmp_path, contents):
    tok = Tokenizer.load(
        write(
            tmp_path,
            describe("gpt2")[0],
            chat_template="{% for m in messages %}{{ m.content | trim }}{% endfor %}",
        )
    )
    ids = tok.chat([{"role": "user", "content": content} for content in contents])
    assert ids == tok.encode("".join(content.strip() for content in contents))
    assert not set(ids) & set(tok.specials.values())


@pytest.mark.parametrize(
    "template, expected",
    [
        (
            "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n",
            "é<|end|>\n",
        ),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é<|end|>"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}", "<|start|><|end|>"),
        ("{{ add_generation_prompt }}", "False"),
        ("{{ tools is none and documents is none }}", "True"),
    ],
)
def test_templates_find_what_transformers_gives_them(tmp_path, template, expected):
    tok = Tokenizer.load(
        write(
            tmp_path,
            describe("gpt2")[0],
            chat_template=template,
            bos_token="<|start|>",
            eos_token={"content": "<|end|>"},
        )
    )
    ids = tok.chat([{"role": "user", "content": "é<|end|>"}], add_generation_prompt=False)
    assert tok.decode(ids, special=True) == expected
    controls = [tok.specials["<|start|>"], tok.specials["<|end|>"]] if "bos" in template else []
    assert [id for id in ids if id in tok.specials.values()] == controls


def test_what_a_template_says_of_a_message_can_be_printed(tmp_path):
    tok = Tokenizer.load(
        write(
            tmp_path,
            describe("gpt2")[0],
            chat_template="{{ raise_exception('no role\n' + messages[0].role) }}",
        )
    )
    with pytest.raises(ValueError, match="no role <|end|>") as error:
        tok.chat([{"role": "<|end|>", "content": ""}])
    assert str(error.value).encode() and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config, file, expected",
    [
        ({"chat_template": "A"}, None, "A"),
        ({"chat_template": "A"}, "B", "B"),
        ({}, None, None),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "C"},
                    {"name": "tool_use", "template": "D"},
                ]
            },
            None,
            "C",
        ),
    ],
)
def test_where_templates_come_from(tmp_path, config, file, expected):
    write(tmp_path, describe("gpt2")[0], **config)
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert Tokenizer.load(tmp_path).chat_template == expected


@pytest.mark.parametrize(
    "template, says",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template fails"),
        ("{{ nobody.x.y }}", "chat template fails"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template fails"),
        (None, "there is no chat template"),
    ],
)
def test_templates_that_fail(tmp_path, template, says):
    tok = Tokenizer.load(
        write(tmp_path, describe("gpt2")[0], **({"chat_template": template} if template else {}))
    )
    with pytest.raises(ValueError, match=says):
        tok.chat([{"role": "user", "content": "x"}])


GROWS = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = ns.x %s ns.x %%}{%% endfor %%}"
CALLS = "{%% macro f(n) %%}%s{%% endmacro %%}{{ f(60) }}"


@pytest.mark.parametrize(
    "template, says",
    [
        (
            "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
            "TimeoutError.* 0.2 s",
        ),
        (CALLS % "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}", "TimeoutError.* 0.2 s"),
        (CALLS % "{{ f(n) }}", "recursion"),
        ("{{ 10 ** 10 ** 10 }}", "numbers too large"),
        ("{{ 1.5 | round(10 ** 9) }}", "round"),
        (GROWS % (3, "*"), "numbers too large"),
        (GROWS % ("'x'", "~"), "MemoryError.* 256 MiB"),
        ("{{ 'x' * 10**7 }}", "it makes 10000000 characters"),
        ("{{ '" + "x" * 2**17 + "' }}", "at most 131072 characters"),
        *[
            (bomb, "MemoryError.* 256 MiB")
            for bomb in (
                "{{ 'x' * 10**9 }}",
                "{{ 'x' | center(1000000000) }}",
                "{{ '%999999999d' % 1 }}",
                "{{ '{:999999999}'.format(1) }}",
                "{{ messages | tojson(indent=999999999) }}",
            )
        ],
    ],
)
def test_templates_without_end(tmp_path, monkeypatch, template, says):
    if "MiB" in says and not Path("/proc/self/statm").exists():
        pytest.skip("memory is limited on Linux alone")
    monkeypatch.setattr(
        "tokenizer.TIME", 0.2 if "0.2 s" in says else 60.0
    )  # not the clock before memory
    trace = sys.gettrace()
    folder = write(tmp_path, describe("gpt2")[0], chat_template=template)
    with pytest.raises(ValueError, match=says) as error:
        Tokenizer.load(folder).chat([{"role": "user", "content": "x"}])
    assert len(str(error.value)) < 1000 and "\n" not in str(error.value) and sys.gettrace() is trace
    assert torch.empty(2**28).nbytes == 2**30  # memory is again as it was


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": 3},
        "x",
        {"role": "user", "content": "a", "name": "b"},
    ],
)
def test_messages_that_are_none(loaded, message):
    with pytest.raises(ValueError, match="message 0 is"):
        loaded["gpt2"].chat([message])


# ---- Llama 3's ranks


def write_ranks(folder: Path, words: list[bytes], **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(
        b"".join(base64.b64encode(word) + b" %d\n" % i for i, word in enumerate(words))
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ranks_are_merged_in_their_order(tmp_path):
    words = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the", b" c", b"at"]
    added = {
        str(261 + i): {"content": text, "special": True}
        for i, text in enumerate(LLAMA3_CONTROLS.values())
    }
    tok = Tokenizer.load(write_ranks(tmp_path, words, added_tokens_decoder=added))
    assert tok.encode("the cat") == [257, 259, 260] and tok.prompt("the")[0] == 261
    assert tok.specials["<|eot_id|>"] == 265
    assert (
        tok.decode(tok.encode("größe 😀")) == "größe 😀"
        and tok.vocab_size == 266
        and tok.bos == 261
    )
    assert Tokenizer.load(
        write_ranks(tmp_path, words, added_tokens_decoder=added, add_bos_token=False)
    ).prompt("the") == [257]


# ---- What is refused


def by_pattern(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}


def changed(**changes: Any):
    """A change of the tokenizer.json: top__key or model__key."""

    def change(data: dict[str, Any]) -> None:
        for name, value in changes.items():
            where, key = name.split("__")
            (data if where == "top" else data["model"])[key] = value

    return change


@pytest.mark.parametrize(
    "change, says",
    [
        (changed(model__type="Unigram"), "Unigram"),
        (changed(model__type="WordPiece"), "WordPiece"),
        (changed(model__byte_fallback=True), "byte_fallback"),
        (changed(model__unk_token="<unk>"), "unk_token"),
        (changed(model__dropout=0.1), "dropout"),
        (changed(top__normalizer={"type": "NFC"}), "normalizer"),
        (changed(model__continuing_subword_prefix="##"), "continuing_subword_prefix"),
        (changed(top__decoder={"type": "Metaspace"}), "Metaspace"),
        (changed(top__pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (changed(top__pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True}), "prefix"),
        (
            changed(
                top__pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": True}],
                }
            ),
            "at the end ByteLevel",
        ),
        (
            changed(
                top__pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {
                            "type": "Split",
                            "pattern": {"Regex": "(a"},
                            "behavior": "Isolated",
                            "invert": False,
                        },
                        BYTE_LEVEL,
                    ],
                }
            ),
            "split pattern",
        ),
        (changed(top__post_processor={"type": "BertProcessing"}), "BertProcessing"),
        (changed(model__merges=["a b c"]), "merge 0 is 'a b c'"),
        (changed(model__merges=["q q"]), "merge 0 is 'q q'"),
        (changed(model__vocab={"a": 0, "b": 0}), "has id 0"),
        (changed(model__vocab={"a": -1}), "has id -1"),
        (changed(model__vocab={"a": "x"}), "has id 'x'"),
        (changed(model__vocab={"世": 0}), "stands for no byte"),
        (changed(model__vocab=[]), "not laid out"),
        (changed(top__added_tokens=[{"id": 0, "content": "<|x|>", "special": True}]), "'<|x|>'"),
        (
            lambda data: data["added_tokens"].append(
                {"id": data["model"]["vocab"]["the"], "content": "the", "special": True}
            ),
            "ordinary text merges into",
        ),
        (
            lambda data: data["added_tokens"].append(
                {"id": 999, "content": "the", "special": True}
            ),
            "'the' has id 999",
        ),
        (changed(model__vocab={}, model__merges=[]), "tokenizer.json"),
        (changed(top__post_processor=begins_with([99999])), "99999"),
        (changed(top__post_processor=begins_with(["x"])), "'x'"),
        (
            changed(
                top__pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {
                            "type": "Split",
                            "pattern": {"Regex": r"\p{Nope}"},
                            "behavior": "Isolated",
                            "invert": False,
                        },
                        BYTE_LEVEL,
                    ],
                }
            ),
            "regex",
        ),
        (
            changed(
                top__added_tokens=[{"id": 999, "content": "<|x|>", "special": True, "lstrip": True}]
            ),
            "lstrip",
        ),
        (
            changed(
                top__added_tokens=[
                    {"id": 999 + i, "content": chr(0x4E00 + i), "special": True}
                    for i in range(2049)
                ]
            ),
            "2049 different characters",
        ),
        (changed(top__pre_tokenizer=BYTE_LEVEL | dict(use_regex=2**31)), '"use_regex": 2147483648'),
        (
            changed(top__pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 21}),
            "has 21 steps",
        ),
        (
            changed(top__added_tokens=[{"id": 999, "content": "x" * 2**14, "special": True}]),
            "too long to be spelled out",
        ),
        (
            lambda data: data["model"]["vocab"].update({"x" * 2**14: 999}),
            "too long to be spelled out",
        ),
        (changed(top__added_tokens=[{"id": 999, "content": "", "special": True}]), "has id 999"),
        *[
            (changed(top__pre_tokenizer=by_pattern(pattern)), says)
            for pattern, says in [
                ("(?:a+)+b", "uses ')+'"),
                ("(?:a*)*", "uses ')*'"),
                ("(?:a|aa){9}", "uses '){'"),
                ("a{1000000}", "uses '{1000000'"),
                ("(?P<x>a)", "uses '('"),
                ("a" * 2001, "has 2001 characters"),
                ("(?:" * 390 + ")?" * 390, "not compile"),
            ]
        ],
    ],
)
def test_what_a_file_asks_for_and_we_lack_is_named(tmp_path, change, says):
    data = describe("gpt2")[0]
    change(data)
    with pytest.raises(ValueError) as error:
        Tokenizer.load(write(tmp_path, data))
    assert (
        says in str(error.value)
        and "tokenizer.json" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_split_pattern_that_takes_forever_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoint.vocabulary.SPLITTING", 0.1)
    tok = load(
        tmp_path, {c: id for id, c in enumerate(ALPHABET)}, [], by_pattern("[a-z]*" * 5 + "[0-9]")
    )
    assert tok.decode(tok.encode("ab1 c")) == "ab1 c"
    with pytest.raises(
        ValueError, match="tokenizer.json: the split pattern .* takes more than 0.1 s"
    ):
        tok.encode("a" * 500)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": NaN}', '{"a": 1, "a": 2}', "\x00"])
def test_json_that_is_none(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is not valid JSON"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"not base64 at all\n", "line 1"),
        (b"YQ== 1\n", "line 1"),
        (b"YQ== 0\nYQ== 1\n", "line 2"),
        (b"YQ== 0\nYg==", "line 2"),
        (b"\x80\x03}q\x00", "line 1"),
        (b"YQ== 0\n", "holds 1 tokens"),
    ],
)
def test_rank_files_that_are_none(tmp_path, content, says):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=says):
        Tokenizer.load(tmp_path)


def test_ranks_beside_a_configuration_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.model.*invalid literal"):
        Tokenizer.load(
            write_ranks(
                tmp_path,
                [b"a"],
                added_tokens_decoder={"x": {"content": "<|begin_of_text|>", "special": True}},
            )
        )


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokenizer.load(tmp_path)


def test_an_end_of_text_that_is_no_control_token(tmp_path):
    with pytest.raises(ValueError, match="says {'eos_token': 'the'}"):
        Tokenizer.load(write(tmp_path, describe("gpt2")[0], eos_token="the"))
