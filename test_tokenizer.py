"""Tokens are those of the package for the whole file; no text becomes a control token."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core

from checkpoint import vocabulary
from checkpoint.gguf_vocabulary import QWEN2_SPLIT
from checkpoint.pieces import LLAMA3_SPLIT
from checkpoint.vocabulary import Finder
from errors import TooManyTokens, UserError
from testing.folders import BYTE_LEVEL, byte_alphabet, tokenizer_json
from testing.pieces import check_tokens
from testing.programs import told
from tokenizer import Tokenizer

ALPHABET = byte_alphabet()
SPECIALS = ["<|end|>", "<|start|>", "<|endless|>"]


def spell(data: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in data)


ALONE = BYTE_LEVEL | dict(use_regex=False)


def by_pattern(pattern: str) -> dict[str, Any]:
    return dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)


def in_turn(*steps: dict[str, Any]) -> dict[str, Any]:
    return dict(type="Sequence", pretokenizers=list(steps))


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": dict(pre=BYTE_LEVEL),
    "spaced": dict(pre=BYTE_LEVEL | dict(add_prefix_space=True)),
    "llama3": dict(pre=in_turn(by_pattern(LLAMA3_SPLIT), ALONE), ignore_merges=True),
    "qwen2": dict(pre=in_turn(by_pattern(QWEN2_SPLIT), ALONE)),
    "sevens": dict(pre=in_turn(by_pattern("(?m:.{7})"), ALONE)),  # parts have other tokens
    "across": dict(pre=ALONE, more=["s Ġ", "sĠ c"]),  # no place is between two words
    "lacking": dict(pre=BYTE_LEVEL, lacks=b"\x00\x07\xc3\xf0z"),
}
MERGES = "t h|th e|Ġ c|a t|Ġc at|Ã ©|e r|a a|aa b|Ġ Ġ|Ċ Ċ|Ġ the|1 2|3 4|. Ċ".split("|")


def describe(kind: str) -> dict[str, Any]:
    """tokenizer.json of a kind. Ids are not in the order of merges."""
    how = KINDS[kind]
    lacks = spell(how.get("lacks", b""))
    merges = [merge for merge in MERGES + how.get("more", []) if not {*merge} & {*lacks}]
    texts = [c for c in ALPHABET if c not in lacks]
    texts += [merge.replace(" ", "") for merge in merges]
    if kind == "llama3":
        texts.append(spell("wörtlich".encode()))  # reachable by no merge, but as a whole piece
    vocab = {text: id for id, text in enumerate(reversed(texts))}
    special = {text: len(vocab) + i for i, text in enumerate(SPECIALS)}
    data = tokenizer_json(vocab, merges, how["pre"], how.get("ignore_merges", False), special)
    if kind == "qwen2":
        data["normalizer"] = {"type": "NFC"}
    return data


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
    return {kind: Tokenizer.load(write(root / kind, describe(kind))) for kind in KINDS}


WORDS = st.sampled_from(
    ["the", " cat", "cats", "'s", "'LL", " 12345", "\n", "  ", "\t", "é", "世", "😀", "\x00", "z"]
    + ["wörtlich", " sat on", "0", "—", ".", "e", "\u0301", "\u0323", "\u212b", *SPECIALS]
)
TEXTS = st.one_of(
    st.text("ab ", max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(WORDS, max_size=12).map("".join),
)


@cache
def package(kind: str) -> Core:
    core = Core.from_str(json.dumps(describe(kind)))
    core.encode_special_tokens = True
    return core


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_tokens_are_those_of_the_package(loaded, kind, text):
    """Whether a text is merged as a whole, or in parts; and they come back as the text."""
    tok = loaded[kind]
    ids = check_tokens(tok, package(kind), text)  # TEXTS holds control tokens
    if kind not in ("lacking", "qwen2", "spaced"):
        assert tok.decode(ids) == text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "PART", 1)
        assert tok.encode(text) == ids
        assert tok.encode(text, most=len(ids)) == ids
        if ids:
            with pytest.raises(UserError, match="at least .* tokens, and at most"):
                tok.encode(text, most=len(ids) - 1)


def test_of_a_text_with_too_many_tokens_not_all_is_merged(loaded, monkeypatch):
    monkeypatch.setattr(vocabulary, "PART", 100)
    text = "the cat sat " * 1000
    for kind in ("gpt2", "llama3", "qwen2"):
        with pytest.raises(UserError) as error:
            loaded[kind].encode(text, most=50)
        assert int(re.findall("at least (.*) tokens", str(error.value))[0]) < 150


def test_a_pattern_that_gives_a_text_up_is_one_line(tmp_path):
    """The package panics, which is no Exception; the next text is right."""
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    tok = load(tmp_path, vocab, [], in_turn(by_pattern("(?:a|a)*[bc]{2}"), ALONE))
    with pytest.raises(UserError, match="cannot handle a text of 41 characters .* change the text"):
        tok.encode("a" * 40 + "b")
    assert tok.decode(tok.encode("abba")) == "abba"


@given(st.sets(st.text("ab^]-", min_size=1, max_size=3)), st.text("ab^]-c", max_size=20))
def test_added_tokens_are_found_longest_first(tokens, text):
    by_length = sorted(tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, by_length)) or "(?!)"
    assert Finder(tokens).split(text) == re.split(f"({pattern})", text)


def swallowing(folder: Path, texts: list[str], special: bool, template: str = "") -> Tokenizer:
    """With added tokens that take the white space before them, behind them, or both."""
    data = tokenizer_json({c: id for id, c in enumerate(ALPHABET)}, [])
    for id, text in enumerate(texts, 301):
        flags = dict(lstrip="l" in text, rstrip="r" in text)
        data["added_tokens"].append(dict(id=id, content=text, special=special) | flags)
    return Tokenizer.load(write(folder, data, chat_template=template))


def test_added_tokens_may_swallow_white_space(tmp_path):
    """Unicode's, in texts; in a conversation, a message's too."""
    tok = swallowing(tmp_path, ["<l>", "<r>", "<lr>", " !"], special=False)
    for text, left in (
        ("a <l> b", "a<l> b"),
        ("a <r> b", "a <r>b"),
        ("a \t\n<lr>\u3000\x85 b", "a<lr>b"),
        ("a \x1c<l><r>\x1d", "a \x1c<l><r>\x1d"),  # Python would strip these
        ("<r> \n <l>", "<r><l>"),
        (" <lr> <r> ", "<lr><r>"),
    ):
        assert tok.decode(tok.encode(text)) == left
    assert tok.encode("a <l>")[-1] == 301
    assert tok.encode("<r> !") == [302, 304]  # though the first swallows a part of the second
    template = "<l>{{ messages[0].content }}<r>{{ messages[0].role }}"
    tok = swallowing(tmp_path, ["<l>", "<r>"], special=True, template=template)
    ids = tok.chat([dict(role=" user ", content=" a <l> <r> ")])
    assert tok.decode(ids, special=True) == "<l> a <l> <r> <r>user "
    assert [id for id in ids if id > 300] == [301, 302]


def test_other_files_of_a_folder_may_add_tokens(tmp_path):
    """Of one that tokenizer.json has, tokenizer.json tells."""
    decoder = {"900": dict(content="<im>", special=True), "7": dict(content="<|end|>")}
    template = "<im>{{ messages[0].content }}<more><|end|>"
    config = dict(added_tokens_decoder=decoder, chat_template=template)
    (tmp_path / "added_tokens.json").write_text('{"<more>": 901, "<|end|>": 8}')
    tok = Tokenizer.load(write(tmp_path, describe("gpt2"), **config))
    assert tok.encode("<more>") == [901] and 900 not in tok.encode("<im>")
    ids = tok.chat([dict(role="user", content="a<im>")])
    assert ids == [900, *tok.encode("a<im>"), 901, tok.specials["<|end|>"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_not_read_beyond_what_fits(tmp_path, kind):
    """All parts of a text count together. Exactly `most` tokens fit."""
    template = "{{ messages[0].content }}<|end|>{{ messages[1].content }}"
    tok = Tokenizer.load(write(tmp_path, describe(kind), chat_template=template))
    turns = [dict(role="user", content=text) for text in ("the cat sat", " on the mat")]
    for encode in (partial(tok.encode, "the cat's"), partial(tok.chat, turns)):
        tokens = encode()
        assert encode(most=len(tokens)) == tokens
        for most in range(len(tokens) - 1):  # one token of the chat is no text's
            with pytest.raises(TooManyTokens, match=f"^at least {most + 1} tokens, and at most"):
                encode(most=most)


def test_other_threads_go_on_while_a_long_piece_is_merged(loaded):
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(lambda: loaded["gpt2"].encode("ab" * 500_000))
        for _ in range(20):
            time.sleep(0.001)
        assert not late.done()


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
    data = describe("gpt2")
    data["added_tokens"].append(dict(id=data["model"]["vocab"]["the"], content="the", special=True))
    assert Tokenizer.load(write(tmp_path, data)).encode("the") == [
        data["model"]["vocab"]["th"],
        data["model"]["vocab"]["e"],
    ]


def begins_with(ids: Any) -> dict[str, Any]:
    first = [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    named = {"B": {"id": "B", "ids": ids, "tokens": ["B"]}}
    step = dict(type="TemplateProcessing", single=first, pair=[], special_tokens=named)
    return dict(type="Sequence", processors=[dict(BYTE_LEVEL), step])


def test_the_post_processor_says_what_a_prompt_begins_with_unless_add_bos_token_does(tmp_path):
    """As in transformers. (The tokenizer.json of DeepSeek-R1-Distill-Qwen-7B has no bos.)"""
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    special = {"<s>": 300, "<t>": 301}
    for post, config, prefix in (
        (None, {}, []),
        (None, {"bos_token": "<s>", "pad_token": "[PAD]"}, []),
        (None, {"bos_token": "<s>", "add_bos_token": True}, [300]),
        (None, {"bos_token": None, "add_bos_token": True}, []),
        (begins_with([300]), {"bos_token": "<t>", "add_bos_token": True}, [301]),
        (begins_with([300]), {"bos_token": "<s>", "add_bos_token": False}, []),
        (begins_with([300]), {"bos_token": "<s>", "add_bos_token": None}, [300]),
        (begins_with([300]), {"add_bos_token": False}, [300]),
        (begins_with([300]), {"bos_token": {"content": "<t>"}}, [300]),
    ):
        tok = load(tmp_path, vocab, [], special=special, post=post, config=config)
        assert tok.prompt("x") == prefix + tok.encode("x")
    with pytest.raises(UserError, match="tokenizer_config.json: add_eos_token is true"):
        load(tmp_path, vocab, [], config={"add_eos_token": True})


def test_a_prompt_begins_with_tokens(tmp_path):
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    for ids in ([99999], ["x"], [None], [True], [[1]]):
        with pytest.raises(UserError, match="tokenizer.json: .*begins with|not laid out"):
            load(tmp_path, vocab, [], special={"<s>": 300}, post=begins_with(ids))


def test_missing_bytes_are_known(loaded):
    assert (
        set(loaded["lacking"].missing_bytes) == set(b"\x00\x07\xc3\xf0z")
        and not loaded["gpt2"].missing_bytes
    )
    assert loaded["lacking"].encode("z\x00\x07") == []
    assert loaded["lacking"].decode(loaded["lacking"].encode("cazt")) == "cat"


def test_a_lone_surrogate_is_a_replacement_character(loaded):
    assert loaded["gpt2"].encode("a\udc80b") == loaded["gpt2"].encode("a\ufffdb")


def test_a_decoder_yields_whole_characters_and_loses_nothing(loaded):
    tok = loaded["gpt2"]
    id_of = {tok.token_bytes(id): id for id in range(256)}
    ids = [id_of[bytes([byte])] for byte in "é世😀".encode() + b"\xf0\x9f"]
    decoder = tok.incremental_decoder()
    pieces = [decoder.feed(id) for id in ids]
    assert pieces == ["", "é", "", "", "世", "", "", "", "😀", "", ""]
    assert decoder.finish() == "\ufffd"
    assert "".join(pieces) + "\ufffd" == tok.decode(ids)


def test_control_tokens_are_left_out_of_a_text_unless_asked_for(loaded):
    tok = loaded["gpt2"]
    ids = tok.encode("a") + [tok.specials["<|end|>"]] + tok.encode("b")
    assert tok.decode(ids) == "ab" and tok.decode(ids, special=True) == "a<|end|>b"
    decoder = tok.incremental_decoder()
    assert "".join(map(decoder.feed, ids)) + decoder.finish() == "ab"
    for id in (9999, -1):
        with pytest.raises(UserError, match=f"there is no token {id}"):
            tok.decode([id])


def test_tags_of_calls_are_text_though_special(tmp_path):
    tags = {"<tool_call>": 300, "</tool_call>": 301}
    bytes_ = {c: id for id, c in enumerate(ALPHABET)}
    tok = load(tmp_path, bytes_, [], special={**tags, "<|end|>": 302})
    assert tok.decode([300, 302, 301]) == "<tool_call></tool_call>"


def test_a_conversation_with_tools_may_have_a_template_of_its_own(loaded):
    vocabulary = loaded["gpt2"]._vocabulary
    message = {"role": "user", "content": "a"}
    for templates, wanted in (
        (("b{{ messages[0].content }}", "c{{ messages[0].content }}"), "ca"),
        (("b{{ messages[0].content }}", None), "ba"),
        ((None, "c{{ messages[0].content }}"), "ca"),
    ):
        tok = Tokenizer(vocabulary, *templates)
        assert tok.decode(tok.chat([message], tools=[])) == wanted
        if templates[0] is not None:
            assert tok.decode(tok.chat([message])) == "ba"


def test_a_raw_prompt_means_the_control_tokens_that_it_spells_if_asked_for(tmp_path, loaded):
    tok = loaded["gpt2"]
    text = "a<|start|><|endless|> b<|end"
    start, endless = tok.specials["<|start|>"], tok.specials["<|endless|>"]
    ids = [*tok.encode("a"), start, endless, *tok.encode(" b<|end")]
    assert tok.encode(text, special=True) == ids != tok.encode(text)
    assert tok.spelled_control(text) == "<|start|>" and tok.spelled_control(" b<|end") == ""
    data = describe("gpt2") | {"post_processor": begins_with([start])}
    begun = Tokenizer.load(write(tmp_path, data))
    assert begun.prompt(text, special=True) == [start, *ids]
    assert begun.prompt("<|start|>" + text, special=True) == [start, *ids]  # one is enough
    assert begun.prompt("<|start|>") == [start, *tok.encode("<|start|>")]


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


def test_a_conversation_is_laid_out_by_the_folder_s_template(tmp_path):
    template = "{{ eos_token }}{{ messages[0].content }}{{ 'the' if add_generation_prompt }}"
    folder = write(tmp_path, describe("gpt2"), chat_template=template, eos_token="<|end|>")
    tok = Tokenizer.load(folder)
    assert tok.chat_template == template
    ids = tok.chat([{"role": "user", "content": "<|end|>"}])
    assert ids == [tok.specials["<|end|>"], *tok.encode("<|end|>the")]
    without = Tokenizer.load(write(tmp_path, describe("gpt2")))
    with pytest.raises(UserError, match="there is no chat template"):
        without.chat([{"role": "user", "content": "x"}])


# ---- What is refused

REFUSED = told(
    """
    model {"type": "Unigram"} → Unigram
    model {"type": "WordPiece"} → WordPiece
    model {"unk_token": "a", "vocab": {"a": 0}, "merges": []} → unk_token
    model {"dropout": 0.1} → dropout
    model {"continuing_subword_prefix": "##"} → continuing_subword_prefix
    model {"merges": ["a b c"]} → merge 0 is 'a b c'
    model {"merges": ["q q"]} → merge 0 is 'q q'
    model {"merges": [["a"]]} → merge 0 is ['a']
    model {"vocab": {"a": 0, "b": 0}} → two tokens have one id
    model {"vocab": {"a": -1}} → has id -1
    model {"vocab": {"a": "x"}} → has id 'x'
    model {"vocab": 3} → not laid out
    model {"vocab": {}, "merges": []} → its vocabulary is empty
    top {"normalizer": {"type": "?"}} → the package tokenizers refuses it
    top {"decoder": {"type": "Metaspace"}} → Metaspace
    top {"decoder": null} → decoder
    top {"pre_tokenizer": {"type": "?"}} → the package tokenizers refuses it
    top {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}} → refuses it
    top {"post_processor": {"type": "BertProcessing"}} → BertProcessing
    token {"id": 0} → two tokens have one id
    token {"id": 999, "content": "the"} → 'the' has id 999
    token {"id": 999, "content": ""} → has id 999
    token {"id": 999, "content": "<|end|>"} → '<|end|>' has id 999
    token {"id": 999, "single_word": true} → single_word
    """
)


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    """A tokenizer.json, and what is said about it."""
    for line, says in REFUSED:
        kind, text = line.split(" ", 1)
        change = json.loads(text)
        data = describe("gpt2")
        match kind:
            case "model":
                data["model"].update(change)
            case "top":
                data.update(change)
            case "token":
                data["added_tokens"].append(dict(content="<|x|>", special=True) | change)
        yield data, says


def test_settings_that_are_not_honoured_are_named(tmp_path):
    for data, says in refused():
        with pytest.raises(UserError) as error:
            Tokenizer.load(write(tmp_path, data))
        said = str(error.value)
        assert says in said and "tokenizer.json" in said and "\n" not in said, (says, said)
    for name, text in (("bos_token", "<s>"), ("eos_token", "the")):
        with pytest.raises(UserError, match=f"{name} is '{text}', which is none of its added"):
            Tokenizer.load(write(tmp_path, describe("gpt2"), **{name: text}))


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
