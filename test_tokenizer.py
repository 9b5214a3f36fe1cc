"""Byte-level BPE against its definition; no text becomes a control token."""

import json
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

import tokenizer
from checkpoint import bytelevel
from checkpoint.bytelevel import (
    GPT2_SPLIT,
    LINEAR,
    LLAMA3_SPLIT,
    MOST_MARKS,
    QWEN2_SPLIT,
    ByteLevel,
    compile_split,
)
from checkpoint.chat import ChatTemplate
from checkpoint.vocabulary import LONGEST_TOKEN, Finder, Vocabulary
from conftest import BYTE_LEVEL, byte_alphabet, tokenizer_json, told
from errors import TooManyTokens, UserError
from tokenizer import Tokenizer

CORPUS = (
    "the cat sat on the mat; it's 2024, the 12345 cats' naïve café — 世界 the the\n\n  cats sat 😀 "
    "I'LL don't\t"
) * 3
# letters that merge in every which way: here the order of merges matters
CORPUS += "".join(random.Random(0).choices("aab ", k=600))
ALPHABET = byte_alphabet()
SPECIALS = ["<|end|>", "<|start|>", "<|endless|>"]


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
    """The definition: split, spell out, and merge the pair that stands first in the list, at its
    leftmost position, until there is none. Of a pair listed twice the later position counts, and
    a byte that the vocabulary lacks is dropped (both as in `tokenizers`)."""
    pieces = [text]
    ids = []
    number = {pair: n for n, pair in enumerate(merges)}
    for pattern in splits:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    for piece in pieces:
        word = [c for c in spell(piece.encode()) if c in vocab]
        if ignore_merges and spell(piece.encode()) in vocab:
            word = [spell(piece.encode())]
        while known := [
            (number[pair], i) for i, pair in enumerate(zip(word, word[1:])) if pair in number
        ]:
            i = min(known)[1]
            word[i : i + 2] = ["".join(word[i : i + 2])]
        ids += [vocab[token] for token in word]
    return ids


ALONE = BYTE_LEVEL | dict(use_regex=False)


def by_pattern(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return dict(type="Split", pattern={"Regex": pattern}, behavior=behavior, invert=invert)


def digits(individual: bool) -> dict[str, Any]:
    return dict(type="Digits", individual_digits=individual)


def punctuation(behavior: str) -> dict[str, Any]:
    return dict(type="Punctuation", behavior=behavior)


def in_turn(*steps: dict[str, Any]) -> dict[str, Any]:
    return dict(type="Sequence", pretokenizers=list(steps))


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": dict(pre=BYTE_LEVEL, splits=[GPT2_SPLIT]),
    "digits": dict(pre=in_turn(digits(True), BYTE_LEVEL), splits=[r"\p{N}", GPT2_SPLIT]),
    "llama3": dict(
        pre=in_turn(by_pattern(LLAMA3_SPLIT), ALONE),
        splits=[LLAMA3_SPLIT],
        ignore_merges=True,
    ),
    "qwen2": dict(pre=in_turn(by_pattern(QWEN2_SPLIT), ALONE), splits=[QWEN2_SPLIT]),
    "lacking": dict(pre=BYTE_LEVEL, splits=[GPT2_SPLIT], lacks=b"\x00\x07\xc3\xf0z"),
}


def describe(kind: str) -> tuple[dict[str, Any], list[tuple[str, str]], dict[str, int]]:
    """tokenizer.json of a kind, its merges and its vocabulary. Ids are not in merge order."""
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
    data = tokenizer_json(
        vocab,
        [" ".join(pair) for pair in merges],
        how["pre"],
        how.get("ignore_merges", False),
        special,
    )
    if kind == "qwen2":
        data["normalizer"] = {"type": "NFC"}
    return data, merges, vocab


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
    return {kind: Tokenizer.load(write(root / kind, describe(kind)[0])) for kind in KINDS}


REFERENCES = {
    kind: (KINDS[kind]["splits"], *describe(kind)[1:], KINDS[kind].get("ignore_merges", False))
    for kind in KINDS
}
WORDS = st.sampled_from(
    ["the", " cat", "cats", "'s", "'LL", " 12345", "\n", "  ", "\t", "é", "世", "😀", "\x00", "z"]
    + ["wörtlich", " sat on", "0", "—", ".", "e", "\u0301", "\u0323", "\u212b", *SPECIALS]
)
TEXTS = st.one_of(
    st.text("ab ", max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(WORDS, max_size=12).map("".join),
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_tokens_are_those_of_the_definition(loaded, kind, text):
    tok, (splits, merges, vocab, ignore) = loaded[kind], REFERENCES[kind]
    ids = tok.encode(text)
    if kind == "qwen2":
        text = unicodedata.normalize("NFC", text)
    assert ids == reference(text, splits, merges, vocab, ignore)
    # whatever the text: TEXTS holds control tokens
    assert not set(ids) & set(tok.specials.values())
    if kind != "lacking":
        assert tok.decode(ids) == text
    decoder = tok.incremental_decoder()
    pieces = [decoder.feed(id) for id in ids]
    assert all("\ufffd" not in piece or "\ufffd" in text or kind == "lacking" for piece in pieces)
    assert "".join(pieces) + decoder.finish() == tok.decode(ids)


@st.composite
def merge_lists(draw) -> tuple[list[tuple[str, str]], list[str], bool]:
    """Untrained merges in any order, some twice; tokens that no merge makes; ignore_merges."""
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


def test_marks_that_would_take_a_normal_form_long_are_refused(loaded):
    text = "a" + "\u0301" * (MOST_MARKS - 1)
    assert loaded["qwen2"].encode(text) and loaded["gpt2"].encode(text + "\u0301")
    with pytest.raises(UserError, match="marks in a row; leave some out"):
        loaded["qwen2"].encode(text + "\u0301")


THREE = "[0-9][0-9][0-9]"
SENTENCE = "ab12 it's  3"
SIGNS = "a$$b…+ c12345"
LETTERS = "aò1²b"  # in GPT-2's alphabet aÃ²1Â²b, where ² is a digit, too
PIECES: list[tuple[str, list[Any], str]] = [  # a text, steps, and the pieces between |
    (SENTENCE, [BYTE_LEVEL], "ab|12| it|'s| | 3"),
    (SENTENCE, [ALONE], SENTENCE),
    (SENTENCE, [digits(True), BYTE_LEVEL], "ab|1|2| it|'s|  |3"),
    (SENTENCE, [digits(False), BYTE_LEVEL], "ab|12| it|'s|  |3"),
    (SENTENCE, [by_pattern(LLAMA3_SPLIT), ALONE], "ab|12| it|'s| | |3"),
    (
        SENTENCE,
        [by_pattern(r"[^\S\r\n]?\p{L}+"), by_pattern(r"[\P{N}]+"), ALONE],
        "ab|12| it|'|s|  |3",
    ),
    (SENTENCE, [by_pattern(r"\p{L}+", invert=True), ALONE], "ab|12 |it|'|s|  3"),
    (SENTENCE, [by_pattern(r"\p{L}+| +", "Removed", True), ALONE], "ab| |it|s|  "),
    ("a  \nb  \n\nc ", [by_pattern(r"\s+$"), ALONE], "a|  |\nb|  \n|\nc| "),
    (SIGNS, [punctuation("Isolated"), ALONE], "a|$|$|b|…|+| c12345"),
    (SIGNS, [punctuation("Contiguous"), ALONE], "a|$$|b|…+| c12345"),
    (
        SIGNS,
        [punctuation("Contiguous"), BYTE_LEVEL, digits(False), by_pattern(THREE)],
        "a|$$|b|…+| c|123|45",
    ),
    (LETTERS, [digits(False), ALONE], "aò|1²|b"),
    (LETTERS, [ALONE, digits(False)], "a\xc3|\xb21|\xc2|\xb2|b"),
    (LETTERS, [ALONE, digits(True), by_pattern("1")], "a\xc3|\xb2|1|\xc2|\xb2|b"),
]


def test_a_text_is_cut_into_pieces_one_step_after_the_other(tmp_path):
    for text, steps, expected in PIECES:
        data = text.encode()
        parts = {spell(data[i:j]) for j in range(len(data) + 1) for i in range(j)}
        # any piece is a token: one sees the pieces
        vocab = {part: id for id, part in enumerate(sorted(parts.union(ALPHABET)))}
        pre = in_turn(*steps)
        tok = load(tmp_path, vocab, [], pre, ignore_merges=True)
        pieces = b"|".join(map(tok.token_bytes, tok.encode(text)))
        is_cut_amid_a_character = "\xc3" in expected
        encoding = "latin-1" if is_cut_amid_a_character else "utf-8"
        assert pieces.decode(encoding) == expected, steps


def test_settings_without_effect_are_none(tmp_path):
    data = describe("gpt2")[0]
    tok = Tokenizer.load(write(tmp_path, data))
    for name, value in (
        ("normalizer", dict(type="Sequence", normalizers=[])),
        ("model", data["model"] | dict(unk_token="the")),  # all bytes are tokens
        ("normalizer", None),
        ("post_processor", None),
        ("post_processor", dict(type="Sequence", processors=[])),
    ):
        changed = data | {name: value}
        if value is None:
            del changed[name]
        same = Tokenizer.load(write(tmp_path, changed))
        assert same.prompt("the 1 ~é") == tok.prompt("the 1 ~é")


def test_patterns_of_well_known_models_are_plain(tmp_path):
    for pattern in (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}",
        "[一-龥]+",
    ):
        assert (
            "".join(compile_split(tmp_path, pattern)(SENTENCE, time.thread_time() + 9)) == SENTENCE
        )


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
    tok = Tokenizer.load(write(tmp_path, describe("gpt2")[0], **config))
    assert tok.encode("<more>") == [901] and 900 not in tok.encode("<im>")
    ids = tok.chat([dict(role="user", content="a<im>")])
    assert ids == [900, *tok.encode("a<im>"), 901, tok.specials["<|end|>"]]


def test_many_added_tokens_take_no_longer():
    tokens = ["a" * n + chr(0x100 + i) for n in range(1, 200) for i in range(400)]
    text = "a" * 4000
    start = time.thread_time()
    assert Finder(tokens).split(text) == [text]
    none = ByteLevel({}, {}, [])
    special = {token: 300 + n for n, token in enumerate(tokens)}
    vocabulary = Vocabulary(
        Path("tokenizer.json"), {}, special, added={}, prefix=[], named={}, merges=none
    )
    template = ChatTemplate(vocabulary, "{{ messages[0].content }}")
    turns = [dict(role="user", content=text)]
    assert template.tokens(turns, False, lambda text, is_first: [len(text)]) == [4000]
    assert time.thread_time() - start < 2


@given(st.lists(WORDS | st.characters(exclude_categories=["Cs"]), max_size=12).map("".join))
def test_long_pieces_are_merged_like_short_ones(loaded, text):
    for kind in KINDS:
        encode = loaded[kind].encode
        expected = encode(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "LONG_PIECE", 0)
            assert encode(text) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_not_read_beyond_what_fits(tmp_path, kind):
    """All parts of a text count together. Exactly `most` tokens fit."""
    template = "{{ messages[0].content }}<|end|>{{ messages[1].content }}"
    tok = Tokenizer.load(write(tmp_path, describe(kind)[0], chat_template=template))
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
    data = describe("gpt2")[0] | {"post_processor": begins_with([start])}
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
    folder = write(tmp_path, describe("gpt2")[0], chat_template=template, eos_token="<|end|>")
    tok = Tokenizer.load(folder)
    assert tok.chat_template == template
    ids = tok.chat([{"role": "user", "content": "<|end|>"}])
    assert ids == [tok.specials["<|end|>"], *tok.encode("<|end|>the")]
    without = Tokenizer.load(write(tmp_path, describe("gpt2")[0]))
    with pytest.raises(UserError, match="there is no chat template"):
        without.chat([{"role": "user", "content": "x"}])


# ---- What is refused

REFUSED = told(
    """
    model {"type": "Unigram"} → Unigram
    model {"type": "WordPiece"} → WordPiece
    model {"unk_token": "a", "vocab": {"a": 0}} → unk_token
    model {"dropout": 0.1} → dropout
    model {"continuing_subword_prefix": "##"} → continuing_subword_prefix
    model {"merges": ["a b c"]} → merge 0 is 'a b c'
    model {"merges": ["q q"]} → merge 0 is 'q q'
    model {"merges": [["a"]]} → merge 0 is ['a']
    model {"vocab": {"a": 0, "b": 0}} → two tokens have one id
    model {"vocab": {"a": -1}} → has id -1
    model {"vocab": {"a": "x"}} → has id 'x'
    model {"vocab": {"世": 0}} → stands for no byte
    model {"vocab": 3} → not laid out
    model {"vocab": {}, "merges": []} → tokenizer.json
    top {"normalizer": {"type": "NFKC"}} → normalizer
    top {"normalizer": {"type": "NFC", "x": 1}} → normalizer
    top {"decoder": {"type": "Metaspace"}} → Metaspace
    top {"decoder": null} → decoder
    top {"pre_tokenizer": {"type": "Whitespace"}} → Whitespace
    top {"pre_tokenizer": {"type": "ByteLevel"}} → prefix
    top {"pre_tokenizer": null} → ByteLevel must be there
    top {"post_processor": {"type": "BertProcessing"}} → BertProcessing
    token {"id": 0} → two tokens have one id
    token {"id": 999, "content": "the"} → 'the' has id 999
    token {"id": 999, "content": ""} → has id 999
    token {"id": 999, "content": "<|end|>"} → '<|end|>' has id 999
    token {"id": 999, "single_word": true} → single_word
    """
)
STEPS: list[tuple[list[Any], str]] = [
    ([BYTE_LEVEL | {"add_prefix_space": True}], "prefix"),
    ([digits(True)], "the steps ['Digits']"),
    ([], "ByteLevel must be there, once"),
    ([BYTE_LEVEL, BYTE_LEVEL], "ByteLevel must be there, once"),
    ([BYTE_LEVEL, dict(type="Metaspace")], "Metaspace"),
    ([by_pattern("a", "Removed"), BYTE_LEVEL], "Removed"),
    ([by_pattern("a", "Contiguous"), BYTE_LEVEL], "Contiguous"),
    ([punctuation("MergedWithNext"), BYTE_LEVEL], "MergedWithNext"),
    ([by_pattern("a") | dict(pattern={"String": "a"}), BYTE_LEVEL], "String"),
]


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    """A tokenizer.json, and what is said about it."""
    for line, says in REFUSED:
        kind, text = line.split(" ", 1)
        change = json.loads(text)
        data = describe("gpt2")[0]
        match kind:
            case "model":
                data["model"].update(change)
            case "top":
                data.update(change)
            case "token":
                data["added_tokens"].append(dict(content="<|x|>", special=True) | change)
        yield data, says
    for steps, says in STEPS:
        pre = in_turn(*steps)
        yield describe("gpt2")[0] | dict(pre_tokenizer=pre), says
    data = describe("gpt2")[0]
    merged = dict(id=data["model"]["vocab"]["the"], content="the", special=True)
    data["added_tokens"].append(merged)
    yield data, "ordinary text merges"


def test_settings_that_are_not_honoured_are_named(tmp_path):
    for data, says in refused():
        with pytest.raises(UserError) as error:
            Tokenizer.load(write(tmp_path, data))
        said = str(error.value)
        assert says in said and "tokenizer.json" in said and "\n" not in said, (says, said)
    for name, text in (("bos_token", "<s>"), ("eos_token", "the")):
        with pytest.raises(UserError, match=f"{name} is '{text}', which is none of its added"):
            Tokenizer.load(write(tmp_path, describe("gpt2")[0], **{name: text}))


def test_patterns_that_other_engines_read_another_way_are_refused(tmp_path):
    for pattern in (
        r"\p{Nope}",
        r"\h+",
        r"\w+",
        r"[[a]b]",
        r"[a&&b]",
        r"(a)",
        r"(?P<x>a)",
        r"(?<x>a)",
        r"(?>a)",
        r"^a$",
        r"\p{N}{1,3}+",
        r"(?:a",
        r"[a",
        "a" * 10 + "{1,99999999999999999999}",
    ):
        with pytest.raises(UserError, match="tokenizer.json: the split pattern"):
            compile_split(tmp_path / "tokenizer.json", pattern)


def test_patterns_are_not_too_long_with_their_repeats_written_out(tmp_path):
    for pattern in ("a" * 100_000, "a" * 93 + "a{1000}", "a{2}" * 11):
        compile_split(tmp_path, pattern)
    for pattern in ("a" * 100_001, "a" * 94 + "a{1000}", "a{2}" * 12, "(?:(?:a{99}){99}){0,99}"):
        with pytest.raises(UserError, match="repeats written out, is too long; at most 100,000"):
            compile_split(tmp_path, pattern)
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    steps = [digits(True)] * 15
    assert load(tmp_path, vocab, [], in_turn(*steps, ALONE))
    with pytest.raises(UserError, match="has 17 steps; at most 16 make sense"):
        pre = in_turn(*steps, *steps[:1], ALONE)
        load(tmp_path, vocab, [], pre)


# Each a doubles the ways to fail. (`regex` sees at once that a text without b or c fails.)
BACKTRACKING = "(?:a|a)*[bc]{2}"


def test_patterns_have_their_seconds_for_all_parts_of_a_text(tmp_path, monkeypatch):
    """Whether one part takes them, or many do together; and the next text has its own."""
    monkeypatch.setattr(tokenizer, "PATTERN_SECONDS", 0.1)
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    pre = in_turn(by_pattern(BACKTRACKING), ALONE)
    config = dict(chat_template="{{ messages[0].content }}")
    tok = load(tmp_path, vocab, [], pre, plain={"<x>": 300}, config=config)
    for text in ("a" * 30_000 + "b", "a" * 40 + "b\n", ("a" * 18 + "b<x>") * 3000):
        for encode in (tok.encode, lambda text: tok.chat([dict(role="user", content=text)])):
            start = time.thread_time()
            with pytest.raises(UserError, match="^the split pattern .* takes more"):
                encode(text)
            assert 0.07 < time.thread_time() - start < 2
            assert tok.decode(encode("abba")) == "abba"


def test_other_threads_go_on_while_a_pattern_backtracks(tmp_path):
    split = compile_split(tmp_path, BACKTRACKING)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(lambda: split("a" * 40 + "b", time.thread_time() + 0.4))
        for _ in range(20):
            time.sleep(0.001)
        assert not late.done()
        assert isinstance(late.exception(), UserError)


def test_the_time_of_other_threads_counts_for_no_pattern(tmp_path, monkeypatch):
    """As if fifty computed: `regex` counts their time, too."""
    monkeypatch.setattr(bytelevel, "thread_time", lambda: time.thread_time() / 50)
    text = "ab " * 200_000
    ends = bytelevel.thread_time() + 0.04
    assert "".join(compile_split(tmp_path, "[a-z]+")(text, ends)) == text


@pytest.mark.parametrize("pattern", LINEAR)
def test_patterns_that_are_not_timed_are_linear(pattern, tmp_path):
    split = compile_split(tmp_path, pattern)
    for text in (" ", "\n", " \n", "a", "1", "!", "'", "a1", "é!", " '"):
        start = time.thread_time()
        assert "".join(split(text * 50_000 + "\u200b", 0.0)) == text * 50_000 + "\u200b"
        assert time.thread_time() - start < 1


def test_added_tokens_are_not_too_long(tmp_path):
    vocab = {c: id for id, c in enumerate(ALPHABET)}
    longest = "x" * LONGEST_TOKEN
    assert load(tmp_path, vocab, [], special={longest: 300}).specials == {longest: 300}
    with pytest.raises(UserError, match="is an added token of 257 characters; at most 256"):
        load(tmp_path, vocab, [], special={longest + "x": 300})


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
