"""The vocabulary of a byte-level BPE tokenizer, read from a tokenizer.json and checked: Llama 3,
and Qwen, which brings texts into Unicode's normal form C first.

The file holds merges in their order, ids, regular expressions that cut a text into pieces, and
control tokens. tiktoken, which merges here (tokenizer.py), has no list of merges: it joins the
neighbours that together spell the token of lowest rank. Both give the same tokens if

    rank(token) = number of the merge that completes the token, spelled out and merged alone

and a token that no merge completes has no rank. Why: while nothing merges across the ends of a
stretch of bytes, it is merged in a text as it is alone; so two neighbours that spell a token came
about by that token's own merges.

A pattern may backtrack without end: a stranger wrote it. For one text it gets PATTERN_SECONDS of a
thread, and none is longer than LONGEST_PATTERN with its repeats written out.

Steps behind `ByteLevel` cut the letters that stand for bytes, so a piece may end amid a character:
what is left of it are lone surrogates then, as Python's `surrogateescape` has them.

Cost: every token is merged alone, once.
Not covered, and refused by name: Unigram, WordPiece, other normalizers. (Byte fallback is
sentencepiece.py's.) The patterns run in `regex`, whose edition of Unicode may be newer than that of
`tokenizers`: a character that only the newer one knows may be cut another way. The same holds for
Python's normal form C.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import regex  # tiktoken brings it

from checkpoint.files import Json
from checkpoint.vocabulary import (
    Ids,
    Ranks,
    TokenTexts,
    Vocabulary,
    read_merges,
    refused_settings,
    reject,
    steps_of,
)
from errors import UserError, brief

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # a digit is a piece
PUNCTUATION = r"[\p{P}!-/:-@\[-`{-~]"  # Unicode's, and all of ASCII's
# Patterns whose time grows in proportion to a text's length.
LINEAR = {GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT, r"\p{N}", r"\p{N}+"}
LINEAR |= {PUNCTUATION, f"{PUNCTUATION}+"}

PATTERN_SECONDS = 5.0  # of a thread, for all patterns and one text
LONGEST_PATTERN = 100_000  # characters
MOST_STEPS = 16  # of a pre_tokenizer
MOST_MARKS = 1000  # combining marks in a row: Python orders n of them in a time like n²
NFC = {"type": "NFC"}  # the one normalizer that is known

# Syntax that means the same in `regex` and in the engine of `tokenizers` (Oniguruma):
ESCAPE = r"\\[pP]\{\w+\}|\\[sSnrt]|\\\W"
CHARACTER_CLASS = rf"\[\^?(?:{ESCAPE}|[^\\\[\]&]|&(?!&))+\]"
PLAIN_SYNTAX = rf"(?:{ESCAPE}|{CHARACTER_CLASS}|\(\?(?:i?:|<?[=!])|\}}(?!\+)|[^\\\[\](^}}])*"

# A text, and its deadline in the time of this thread -> pieces
Split = Callable[[str, float], list[str]]


class ByteLevel(NamedTuple):
    """How a text becomes tokens: cut into pieces, then merged from bytes."""

    merged: dict[bytes, int]  # tokens that merging makes -> id, in the order of their ranks
    # pieces that are a token without merging (`ignore_merges`) -> id
    whole_pieces: dict[bytes, int]
    splits: list[Split]


# ---- Pieces


def normal_form() -> Split:
    """A first step that cuts nothing, and brings a text into Unicode's normal form C. UserError
    for a text that would take it long."""
    too_many = regex.compile(rf"(?<!\p{{M}})\p{{M}}{{{MOST_MARKS}}}")

    def normalize(text: str, deadline: float) -> list[str]:
        if too_many.search(text):
            raise UserError(f"a text has {MOST_MARKS} combining marks in a row; leave some out")
        return [unicodedata.normalize("NFC", text)]

    return normalize


def compile_split(file: Path, pattern: str) -> Split:
    """A function that cuts a text by this pattern. UserError for syntax of uncertain meaning."""
    counts = [int(count) for count in re.findall(r"[{,](\d{1,9})", pattern)]
    if len(pattern) * math.prod(filter(None, counts)) > LONGEST_PATTERN:
        wrong = f"the split pattern {pattern!r}, its repeats written out, is too long"
        reject(file, wrong, f"at most {LONGEST_PATTERN:,} characters make sense")
    try:
        if re.fullmatch(PLAIN_SYNTAX, pattern):
            return timed_split(pattern)
        wrong = f"the split pattern {pattern!r} is not plain"
    except (regex.error, RecursionError) as error:
        wrong = f"the split pattern {pattern!r} does not compile ({error})"
    rule = r"supported are (?:..), (?i:..), looking around, [..], \p{..}, \s, \r, \n, \t, repeats"
    reject(file, wrong, rule)


def timed_split(pattern: str) -> Split:
    """A function that cuts a text by this pattern. UserError if it meets its deadline."""
    compiled = regex.compile(f"({pattern})", regex.MULTILINE)  # $ is the end of a line
    if pattern in LINEAR:
        return lambda text, deadline: compiled.split(text)

    def split(text: str, deadline: float) -> list[str]:
        # `regex` counts the time of all threads: a timeout may come too early for this one.
        factor = 1
        left = deadline - thread_time()
        while left > 0:
            with suppress(TimeoutError):
                return compiled.split(text, timeout=left * factor)  # without the GIL
            factor *= 2
            left = deadline - thread_time()
        raise UserError(
            f"the split pattern {brief(pattern)} takes more than {PATTERN_SECONDS} s for this "
            "text: change the text, or use another tokenizer"
        )

    return split


def read_splits(file: Path, node: Json | None) -> list[Split]:
    """The steps of a `pre_tokenizer`, in order. UserError for steps that are not covered."""
    steps = steps_of(node, "pretokenizers")
    if len(steps) > MOST_STEPS:
        wrong = f"the pre_tokenizer has {len(steps)} steps"
        reject(file, wrong, f"at most {MOST_STEPS} make sense")
    kinds = [step["type"] for step in steps]
    if kinds.count("ByteLevel") != 1:
        reject(file, f"the pre_tokenizer has the steps {kinds}", "ByteLevel must be there, once")
    n = kinds.index("ByteLevel")
    splits = [read_split(file, step) for step in steps[:n]]
    byte_level = {"add_prefix_space": True, "use_regex": True} | steps[n]
    if byte_level["add_prefix_space"]:
        wrong = f"the pre_tokenizer has a step {json.dumps(byte_level)}"
        reject(file, wrong, "ByteLevel must be without a prefix space")
    if byte_level["use_regex"]:
        splits.append(compile_split(file, GPT2_SPLIT))
    return splits + [split_of_letters(read_split(file, step)) for step in steps[n + 1 :]]


def read_split(file: Path, step: Json) -> Split:
    """A step other than ByteLevel."""
    inverted = step.get("invert")
    match step:
        case {"type": "Digits", "individual_digits": individual}:
            return compile_split(file, r"\p{N}" if individual else r"\p{N}+")
        case {"type": "Punctuation", "behavior": "Isolated"}:
            return compile_split(file, PUNCTUATION)
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return compile_split(file, f"{PUNCTUATION}+")
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return compile_split(file, pattern)  # `invert` has no effect here
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed"} if inverted:
            split = compile_split(file, pattern)  # the text between its matches is left out
            return lambda text, deadline: split(text, deadline)[1::2]
    wrong = f"the pre_tokenizer has a step {json.dumps(step)}"
    rule = "Digits, Punctuation (Isolated, Contiguous), Split (by a Regex: Isolated, or Removed and"
    reject(file, wrong, f"supported are {rule} inverted), and ByteLevel")


def split_of_letters(split: Split) -> Split:
    """A step that cuts the letters of GPT-2's alphabet, which stand for the bytes of a text."""
    byte_of = alphabet()
    letters = {byte: letter for letter, byte in byte_of.items()}

    def split_bytes(text: str, deadline: float) -> list[str]:
        spelled = text.encode(errors="surrogateescape").decode("latin-1").translate(letters)
        parts = [bytes(map(byte_of.get, part)) for part in split(spelled, deadline)]
        return [part.decode(errors="surrogateescape") for part in parts]

    return split_bytes


# ---- tokenizer.json


def read_byte_level(file: Path, data: Json, config: Json) -> Vocabulary:
    """data: the file's; config: tokenizer_config.json's. UserError for settings that change tokens
    and are not honoured."""
    check_model(file, data)
    model = data["model"]
    texts = TokenTexts.read(file, data, config)
    splits = read_splits(file, data.get("pre_tokenizer"))
    if steps_of(data.get("normalizer"), "normalizers"):
        splits.insert(0, normal_form())
        texts.refuse_normalized()
    return make_byte_level(texts, model["merges"], splits, bool(model.get("ignore_merges")))


def make_byte_level(
    texts: TokenTexts, merges: list[Any], splits: list[Split], ignore_merges: bool
) -> Vocabulary:
    """The vocabulary of these tokens and merges. UserError unless merges make tokens of tokens."""
    file, vocab, special, added, *_ = texts
    spelled = spell_tokens(file, vocab, special | added)
    numbers = read_merges(file, merges, spelled.keys())
    last = {text: last_merge(text, numbers) for text in spelled}  # the number of the last merge
    for text in special:
        if last.get(text, math.inf) < math.inf:
            reject(file, f"{text!r} is special, and what ordinary text merges into", "rename it")
    reachable = sorted((text for text in last if last[text] < math.inf), key=last.__getitem__)
    if not reachable:
        reject(file, "no byte is a token", "the bytes of a text must be tokens")
    whole_pieces = {}
    if ignore_merges:
        whole_pieces = {word: vocab[text] for text, word in spelled.items() if text not in special}
    merged = {spelled[text]: vocab[text] for text in reachable}
    return texts.vocabulary(spelled, ByteLevel(merged, whole_pieces, splits))


def check_model(file: Path, data: Json) -> None:
    """UserError for another kind of tokenizer, or a setting that is not honoured."""
    model = data["model"]
    decoder = data.get("decoder") or {}
    odd = refused_settings(model)
    if steps_of(data.get("normalizer"), "normalizers") not in ([], [NFC]):
        odd["normalizer"] = data["normalizer"]
    if alphabet().keys() - model["vocab"].keys() and model.get("unk_token"):
        odd["unk_token"] = model["unk_token"]  # for the bytes that are no token
    if decoder.get("type") != "ByteLevel":
        odd["decoder"] = decoder.get("type")
    if odd:
        reject(file, f"it says {json.dumps(odd)}", "only byte-level BPE is supported")


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


def last_merge(token: str, numbers: Ranks) -> float:
    """The number of the merge that completes this token when it is spelled out and merged alone;
    below all of them for a single byte, ∞ if no merge completes it."""
    parts = list(token)
    number = -1
    while len(parts) > 1 and number < math.inf:
        found = [numbers.get(pair, math.inf) for pair in zip(parts, parts[1:])]
        number = min(found)
        i = found.index(number)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return number
