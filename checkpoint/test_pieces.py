"""SentencePiece's tokens are the package's, from each of its files; where a space belongs."""

import base64
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core

from checkpoint.vocabulary import SPACE
from errors import UserError
from testing.pieces import (
    BYTES,
    SHAPES,
    SPECIALS,
    check_tokens,
    field,
    load,
    tokenizer_json,
    tokenizer_model,
    vocabulary,
)
from testing.programs import told
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("spm")
    result = {shape: load(root / shape, tokenizer_json(shape)) for shape in SHAPES}
    result["model"] = load(root / "model", tokenizer_model())
    return result


WORDS = [" the", "cats", "  ", SPACE, "é", "😀", "\n", "<s>", "<0x41>", "a"]
TEXTS = st.one_of(
    st.text("ab ", max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.sampled_from(WORDS)).map("".join),
)


@cache
def package(shape: str) -> Core:
    content = tokenizer_json("legacy" if shape == "model" else shape)
    return Core.from_str(json.dumps(content | dict(added_tokens=[], post_processor=None)))


@pytest.mark.parametrize("shape", [*SHAPES, "model"])
@given(text=TEXTS)
def test_tokens_are_those_of_the_package(loaded, shape, text):
    """Of tokenizer.model those of the tokenizer.json that says the same. They come back as the
    text, and no control token is among them."""
    tok = loaded[shape]
    ids = check_tokens(tok, package(shape), text, continues=True)
    plain = text.replace(SPACE, " ")
    if not (plain.startswith(" ") and shape[:5] in ("alway", "first")):
        assert tok.decode(ids) == plain


def test_an_empty_step_is_none(loaded, tmp_path):
    empty = dict(type="Sequence", normalizers=[])
    tok = load(tmp_path / "empty", tokenizer_json("first") | dict(normalizer=empty))
    assert tok.prompt(" the cat") == loaded["first"].prompt(" the cat")
    shortened = tokenizer_json("first")
    del shortened["normalizer"], shortened["post_processor"]
    assert load(tmp_path / "short", shortened).prompt(" the cat") == tok.encode(" the cat")


def test_a_text_behind_another_keeps_its_space(loaded):
    """An answer goes on where the prompt ends."""
    tok = loaded["legacy"]
    ids = tok.encode("the cat sat")
    for cut in range(1, len(ids)):
        assert tok.decode(ids[:cut]) + tok.decode(ids[cut:], continues=True) == "the cat sat"
    assert tok.decode(ids[1:]) == "cat sat"
    assert tok.prompt("the") == [1, *tok.encode("the")]


def test_a_prompt_begins_as_the_folder_says(tmp_path):
    none = load(tmp_path / "none", tokenizer_model(), add_bos_token=False)
    assert none.prompt("the") == none.encode("the")
    modern = load(tmp_path / "modern", tokenizer_model(), legacy=False)
    assert modern.encode("the") == [*none.encode("the")]
    assert modern.decode(modern.encode("the", is_first=False)) == "the"
    assert modern.encode("the", is_first=False) != modern.encode("the")
    unspaced = load(tmp_path / "unspaced", tokenizer_model(n3=0))
    assert unspaced.encode("the") == modern.encode("the", is_first=False)
    for legacy in (False, True):
        config = dict(add_prefix_space=False, legacy=legacy)
        tok = load(tmp_path / f"{legacy}", tokenizer_model(), **config)
        assert tok.encode("the") == unspaced.encode("the")
        assert tok.decode(tok.encode(" the")) == " the"
    spaced = load(tmp_path / "spaced", tokenizer_model(), add_prefix_space=None)
    assert spaced.encode("the") == none.encode("the")


def test_a_conversation_puts_a_space_behind_each_control_token(loaded, tmp_path):
    template = "{{ bos_token }}[{{ messages[0].content }}]{{ eos_token }}the"
    turns = [{"role": "user", "content": " the</s>"}]
    ids = vocabulary()
    for shape in ("legacy", "first"):
        config = dict(chat_template=template, bos_token="<s>", eos_token="</s>")
        tok = load(tmp_path / shape, tokenizer_json(shape), **config)
        first, last = (tok.encode(text, is_first=False) for text in ("[ the</s>]", "the"))
        assert tok.chat(turns) == [1, *first, 2, *last]
        assert (first[0] == ids[SPACE]) == (shape == "legacy")


def test_added_tokens_are_found_in_any_text(tmp_path):
    id = len(vocabulary())
    entries = {str(id): dict(content="<tool>", special=False)}
    tok = load(tmp_path, tokenizer_model(), added_tokens_decoder=entries)
    assert tok.encode("the<tool>cat") == [*tok.encode("the"), id, *tok.encode("cat")]
    assert tok.decode([id]) == "<tool>"


def test_no_text_merges_into_a_control_token(tmp_path):
    vocab = vocabulary() | {"<": 900, "s>": 901, "s": 902, ">": 903}
    more = dict(vocab=vocab, merges=[["s", ">"], ["<", "s>"]])
    tok = load(tmp_path, tokenizer_json(**more))
    assert tok.encode("<s>") == [vocab[SPACE], 900, 901]


def test_a_piece_with_a_space_behind_a_letter_merges_across_words(tmp_path):
    """Though it is the only one."""
    pieces = [*SPECIALS, *BYTES, SPACE, "a", "b", f"a{SPACE}"]
    vocab = {text: id for id, text in enumerate(pieces)}
    content = tokenizer_json("none", vocab=vocab, merges=[["a", SPACE]])
    assert load(tmp_path, content).encode("a b") == [vocab[f"a{SPACE}"], vocab["b"]]


def test_of_a_field_that_is_there_twice_the_last_value_counts(tmp_path):
    piece = field(1, b"<first>") + field(1, b"<last>") + field(3, 1) + field(3, 4)
    tok = load(tmp_path, tokenizer_model() + field(1, piece))
    assert tok.encode("<last>") == [len(vocabulary())]


def test_tokens_and_names_may_stand_in_files_of_their_own(tmp_path):
    """added_tokens.json, special_tokens_map.json; null is as if it were left out."""
    id = len(vocabulary())
    more = {"<im>": id, "</im>": id + 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps(more))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</im>"}')
    config = dict(legacy=None, add_bos_token=None, bos_token=None)
    config["chat_template"] = "{{ bos_token + messages[0].content + eos_token }}"
    tok = load(tmp_path, tokenizer_model(), **config)
    assert tok.prompt("the<im></im>") == [1, *tok.encode("the"), id, *tok.encode("</im>")]
    assert id + 1 not in tok.encode("</im>")
    (tmp_path / "added_tokens.json").write_text(json.dumps(more | {"</s>": 2, "<s>": 1}))
    repeated = load(tmp_path, tokenizer_model(), **config)
    assert repeated.specials == tok.specials and 2 not in repeated.encode("</s>")
    assert tok.chat([{"role": "user", "content": "the"}]) == [1, *tok.encode("the"), id + 1]


def test_a_normalized_token_is_found_where_nothing_is_normalized(tmp_path):
    id = len(vocabulary())
    entry = dict(id=id, content="<tool>", normalized=True)
    data = tokenizer_json("first")
    data["added_tokens"].append(entry)
    assert load(tmp_path / "json", data).encode("<tool>") == [id]
    config = dict(added_tokens_decoder={str(id): entry})
    tok = load(tmp_path / "modern", tokenizer_model(), legacy=False, **config)
    assert tok.encode("<tool>") == [id]
    with pytest.raises(UserError, match="normalized text"):
        load(tmp_path / "legacy", tokenizer_model(), **config)


def test_a_reply_has_no_space_of_its_own(loaded):
    """Streamed, too: a text that continues a prompt keeps it."""
    tok = loaded["legacy"]
    ids = [1, *tok.encode("the  cat")]
    for continues in (False, True):
        decoder = tok.incremental_decoder(continues)
        streamed = "".join(map(decoder.feed, ids)) + decoder.finish()
        assert streamed == tok.decode(ids, continues=continues) == " " * continues + "the  cat"


def test_tiktokens_ranks_are_llama_3s_tokens(tmp_path):
    """With the control tokens that tokenizer_config.json names."""
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" c", b" cat", b"12"]
    lines = [b"%s %d\n" % (base64.b64encode(word), rank) for rank, word in enumerate(words)]
    named = {"300": dict(content="<|begin|>", special=True), "301": dict(content="<t>")}
    config = dict(added_tokens_decoder=named, bos_token="<|begin|>")
    tok = load(tmp_path, b"".join(lines), **config)
    text = "the cat 1234<|begin|><t>é\n"
    spelled = [words.index(word) for word in (b"the", b" cat", b" ", b"12")] + [*b"34<|begin|>"]
    assert tok.prompt(text) == [300, *spelled[:4], *b"3", *b"4<|begin|>", 301, *"é\n".encode()]
    assert tok.decode(tok.prompt(text)) == text and tok.specials == {"<|begin|>": 300}
    without = load(tmp_path, b"".join(lines), **config, add_bos_token=False)
    assert without.prompt(text) == tok.encode(text)
    with pytest.raises(UserError, match="tokenizer.model: it lacks 1 of the 256 bytes"):
        load(tmp_path, b"".join(lines[1:]), **config)


# ---- What is refused


REFUSED = told(  # of `model`, or of the whole tokenizer.json
    """
    model {"type": "Unigram"} → Unigram
    model {"dropout": 0.1} → dropout
    model {"continuing_subword_prefix": "##"} → continuing_subword_prefix
    model {"end_of_word_suffix": "</w>"} → end_of_word_suffix
    model {"merges": ["a b c"]} → merge 0 is 'a b c'
    model {"merges": ["a 语"]} → merge 0 is 'a 语'
    model {"vocab": 3} → not laid out
    top {"normalizer": {"type": "?"}} → the package tokenizers refuses it
    top {"decoder": {"type": "ByteLevel"}} → of the 256 bytes
    top {"decoder": null} → its decoder is null
    top {"post_processor": {"type": "BertProcessing"}} → BertProcessing
    top {"added_tokens": [{"id": 900, "content": "x", "normalized": true}]} → normalized text
    """
)
REFUSED_MODEL: list[tuple[bytes, str]] = [
    (tokenizer_model(t3=1), "model_type is 1"),
    (tokenizer_model(n2=b"map"), "rewrites a text"),
    (tokenizer_model(n4=1), "rewrites a text"),
    (tokenizer_model(n5=0), "rewrites a text"),
    (tokenizer_model(t24=1), "rewrites a text"),
    (tokenizer_model() + field(1, field(1, b"the") + field(3, 1)), "there twice"),
    (tokenizer_model() + field(1, field(1, b"zz") + field(3, 5)), "unused"),
    (tokenizer_model()[:-1], "cut off"),
    (b"aGVsbG8= 0\nIQ== 1\n", "tiktoken's list of ranks, which has no control tokens"),
    (b"", "not SentencePiece's"),
]


def test_what_is_not_honoured_is_named(tmp_path):
    vocab = vocabulary()
    del vocab["<0x41>"]
    scheme = dict(type="Metaspace", replacement=SPACE, prepend_scheme="x")
    metaspace = tokenizer_json() | dict(normalizer=None, pre_tokenizer=scheme)
    contents = [(metaspace, "the package tokenizers refuses it")]
    contents.append((tokenizer_json(vocab=vocab), "256 bytes 1 are no token"))
    for line, says in REFUSED:
        place, text = line.split(" ", 1)
        change = json.loads(text)
        content = tokenizer_json(**change) if place == "model" else tokenizer_json() | change
        contents.append((content, says))
    for i, (content, says) in enumerate(contents + REFUSED_MODEL):
        with pytest.raises(UserError) as error:
            load(tmp_path / str(i), content)
        said = str(error.value)
        assert says in said and "tokenizer." in said and "\n" not in said, (says, said)
    odd: list[Any] = [[], "s", *({"3": entry} for entry in (5, {}, {"content": 5}))]
    for decoder in [*odd, {"x": {"content": "a"}}, {"3": {"content": ["a"]}}]:
        with pytest.raises(UserError, match="tokenizer.model: .*(not laid out|one id)"):
            load(tmp_path / "odd", tokenizer_model(), added_tokens_decoder=decoder)
    with pytest.raises(UserError, match="add_eos_token"):
        load(tmp_path / "end", tokenizer_model(), add_eos_token=True)


def test_a_link_to_nothing_is_no_missing_file(tmp_path):
    """A tokenizer.model beside it may be of other tokens."""
    load(tmp_path, tokenizer_model())
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
