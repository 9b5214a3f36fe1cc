"""The vocabulary of a byte-level BPE tokenizer, read from a tokenizer.json and checked.

The file holds merges in their order, ids, regular expressions that cut a text into pieces, and
control tokens. tiktoken, which merges here (tokenizer.py), has no list of merges: it joins the
neighbours that together spell the token of lowest rank. Both give the same tokens if

    rank(token) = number of the merge that completes the token, spelled out and merged alone

and a token that no merge completes has no rank. Why: while nothing merges across the ends of a
stretch of bytes, it is merged in a text as it is alone; so two neighbours that spell a token came
about by that token's own merges.

Cost: every token is merged alone, once.
Not covered, and refused by name: SentencePiece, Unigram, WordPiece, byte fallback, normalizers,
added tokens that swallow spaces. The patterns run in `regex`, whose edition of Unicode may be newer
than that of `tokenizers`: a character that only the newer one knows may be cut another way.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import regex  # tiktoken brings it

from checkpoint.files import Json, read_json
from errors import UserError, brief

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Syntax that means the same in `regex` and in the engine of `tokenizers` (Oniguruma):
ESCAPE = r"\\[pP]\{\w+\}|\\[sSnrt]|\\\W"
CHARACTER_CLASS = rf"\[\^?(?:{ESCAPE}|[^\\\[\]&]|&(?!&))+\]"
PLAIN_SYNTAX = rf"(?:{ESCAPE}|{CHARACTER_CLASS}|\(\?(?:i?:|<?[=!])|\}}(?!\+)|[^\\\[\](^$}}])*"

LARGEST_VOCABULARY = 2**26  # the most bytes of a vocabulary file; up to 30 MB are usual
ABSENT = (  # settings of a tokenizer.json that change tokens, and are not honoured
    "normalizer",
    "byte_fallback",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)


Ids = dict[str, int]  # text of a token -> id


class Vocabulary(NamedTuple):
    """What a tokenizer's files hold, checked."""

    file: Path
    tokens: dict[int, bytes]  # every id -> the bytes that it decodes to
    merged: dict[bytes, int]  # tokens that merging makes -> id, in the order of their ranks
    whole_pieces: dict[
        bytes, int
    ]  # pieces that are a token without merging (`ignore_merges`) -> id
    special: Ids  # control tokens -> id: never found in a text
    added: Ids  # other added tokens -> id: found in any text, before it is cut
    splits: list[Callable[[str], list[str]]]
    prefix: list[int]  # ids that begin a raw prompt
    named: dict[str, str]  # "bos_token", … -> text, for chat templates


def reject(file: Path, wrong: str, way_out: str) -> NoReturn:
    raise UserError(f"{file}: {brief(wrong)}; {way_out}")


def read_tokenizer_config(folder: Path) -> Json:
    """tokenizer_config.json, which a folder may lack."""
    file = folder / "tokenizer_config.json"
    return read_json(file) if os.path.lexists(file) else {}


def load_vocabulary(folder: Path, config: Json) -> Vocabulary:
    """From a folder's tokenizer.json. config: tokenizer_config.json's."""
    file = folder / "tokenizer.json"
    try:
        return read_tokenizer_json(file, config)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        wrong = f"it, or tokenizer_config.json, is not laid out as it should be ({error!r})"
        reject(file, wrong, "download them again")


def named_tokens(config: Json) -> dict[str, str]:
    """ "bos_token", "eos_token", … -> text."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


# ---- Pieces


def compile_split(file: Path, pattern: str) -> Callable[[str], list[str]]:
    """A function that cuts a text by this pattern. UserError for syntax of uncertain meaning."""
    try:
        if re.fullmatch(PLAIN_SYNTAX, pattern):
            return regex.compile(f"({pattern})").split
        wrong = f"the split pattern {pattern!r} is not plain"
    except (regex.error, OverflowError, RecursionError) as error:
        wrong = f"the split pattern {pattern!r} does not compile ({error})"
    rule = r"supported are (?:..), (?i:..), looking around, [..], \p{..}, \s, \r, \n, \t, repeats"
    reject(file, wrong, rule)


def read_splits(file: Path, node: Json) -> list[Callable[[str], list[str]]]:
    """The steps of a `pre_tokenizer`, in order. UserError for steps that are not covered."""
    steps = node["pretokenizers"] if node["type"] == "Sequence" else [node]
    *first_steps, last = steps
    patterns = [split_pattern(file, step) for step in first_steps]
    last = {"add_prefix_space": True, "use_regex": True} | last
    if last["type"] != "ByteLevel" or last["add_prefix_space"] is not False:
        wrong = f"the pre_tokenizer ends with {json.dumps(last)}"
        reject(file, wrong, "it must end with ByteLevel without a prefix space")
    if last["use_regex"]:
        patterns.append(GPT2_SPLIT)
    return [compile_split(file, pattern) for pattern in patterns]


def split_pattern(file: Path, step: Json) -> str:
    """The regular expression of a step before the last one."""
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return step["pattern"]["Regex"]
    wrong = f"the pre_tokenizer has a step {json.dumps(step)}"
    reject(file, wrong, "supported are Split (Regex, Isolated), Digits, and at the end ByteLevel")


def added_pattern(added: Iterable[str]) -> re.Pattern[str]:
    """A pattern whose `split` cuts a text at added tokens, longest first: text, token, text, …"""
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


# ---- tokenizer.json


def read_tokenizer_json(file: Path, config: Json) -> Vocabulary:
    """Hugging Face's format. UserError for settings that change tokens and are not honoured."""
    data = read_json(file, LARGEST_VOCABULARY)
    model = data["model"]
    vocab = model["vocab"]
    check_model(file, data)
    special, added = read_added(file, data["added_tokens"], vocab)
    spelled = spell_tokens(file, vocab, special | added)
    numbers = read_merges(file, model["merges"], spelled)
    last = {text: last_merge(text, numbers) for text in spelled}  # the number of the last merge
    for text in special:
        if last.get(text) is not None:
            reject(file, f"{text!r} is special, and what ordinary text merges into", "rename it")
    reachable = sorted((text for text in last if last[text] is not None), key=last.__getitem__)
    if not reachable:
        reject(file, "no byte is a token", "only byte-level BPE is supported")
    whole_pieces = {}
    if model.get("ignore_merges"):
        whole_pieces = {word: vocab[text] for text, word in spelled.items() if text not in special}
    tokens = {vocab[text]: word for text, word in spelled.items()}
    tokens |= {id: text.encode() for text, id in (special | added).items()}
    return Vocabulary(
        file=file,
        tokens=tokens,
        merged={spelled[text]: vocab[text] for text in reachable},
        whole_pieces=whole_pieces,
        special=special,
        added=added,
        splits=read_splits(file, data["pre_tokenizer"]),
        prefix=read_prefix(file, data["post_processor"]),
        named=named_tokens(config),
    )


def check_model(file: Path, data: Json) -> None:
    """UserError for another kind of tokenizer, or a setting that is not honoured."""
    model = data["model"]
    decoder = data["decoder"] or {}
    settings = data | model
    odd = {name: settings[name] for name in ABSENT if settings.get(name)}
    if model.get("type", "BPE") != "BPE":
        odd["type"] = model["type"]
    if decoder.get("type") != "ByteLevel":
        odd["decoder"] = decoder.get("type")
    if odd:
        reject(file, f"it says {json.dumps(odd)}", "only byte-level BPE is supported")


def read_added(file: Path, entries: list[Json], vocab: Ids) -> tuple[Ids, Ids]:
    """The added tokens, special and others: text -> id. UserError unless every token of the
    vocabulary has a text and an id of its own."""
    special = {}
    others = {}
    ids = dict(vocab)
    for entry in entries:
        text = entry["content"]
        if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            wrong = f"{text!r} sets lstrip, rstrip or single_word"
            reject(file, wrong, "only plain matching is supported")
        if ids.setdefault(text, entry["id"]) != entry["id"]:
            reject(file, f"{text!r} has id {entry['id']!r} and {ids[text]!r}", "one is right")
        kind = special if entry.get("special") else others
        kind[text] = entry["id"]
    for text, id in ids.items():
        if not text or type(id) is not int or id < 0:
            reject(file, f"{text!r} has id {id!r}", "each token needs a text, and an id from 0")
    if len(set(ids.values())) < len(ids):
        reject(file, "two tokens have one id", "each token needs an id of its own")
    return special, others


def alphabet() -> Ids:
    """GPT-2's character for each byte: itself if printable in Latin-1, else U+0100 and up."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    letters = {chr(byte): byte for byte in itself}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def spell_tokens(file: Path, vocab: Ids, added: Ids) -> dict[str, bytes]:
    """The tokens that are spelled in GPT-2's alphabet -> their bytes. All others must be added."""
    byte_of = alphabet()
    spelled = {}
    for text in vocab:
        if byte_of.keys() >= set(text):
            spelled[text] = bytes(byte_of[letter] for letter in text)
        elif text not in added:
            wrong = f"{text!r} holds a character that stands for no byte"
            reject(file, wrong, "only byte-level BPE is supported")
    return spelled


def read_merges(
    file: Path, merges: list[Any], spelled: dict[str, bytes]
) -> dict[tuple[str, ...], int]:
    """The pairs that merge -> their number in the list; of a pair listed twice, the later one."""
    numbers = {}
    for n, merge in enumerate(merges):
        pair = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(pair) != 2 or not spelled.keys() >= {*pair, "".join(pair)}:
            rule = "two tokens, and what they merge into, must be in the vocabulary"
            reject(file, f"merge {n} is {merge!r}", rule)
        numbers[pair] = n
    return numbers


def last_merge(token: str, numbers: dict[tuple[str, ...], int]) -> int | None:
    """The number of the merge that completes this token when it is spelled out and merged alone;
    -1: it is one byte; None: no merge completes it."""
    parts = list(token)
    number = -1
    while len(parts) > 1:
        candidates = enumerate(zip(parts, parts[1:]))
        number, i = min((numbers.get(pair, math.inf), i) for i, pair in candidates)
        if number == math.inf:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return number


def read_prefix(file: Path, node: Json | None) -> list[int]:
    """The ids that a `post_processor` puts before a text. As in `tokenizers`, `add_bos_token` in
    tokenizer_config.json plays no part."""
    if node is None:
        return []
    prefix: list[int] = []
    for step in node["processors"] if node["type"] == "Sequence" else [node]:
        match step:
            case {"type": "ByteLevel"}:
                continue
            case {"type": "TemplateProcessing", "single": [*first, {"Sequence": {"id": "A"}}]}:
                for part in first:
                    prefix += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
            case _:
                wrong = f"the post_processor asks for {json.dumps(step)}"
                reject(file, wrong, "supported are tokens before a text")
    return prefix
