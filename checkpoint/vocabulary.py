"""The vocabulary of a byte-level BPE tokenizer, read from its files and checked.

Two formats say the same: Hugging Face's tokenizer.json (merges in order, ids, regular expressions that cut a text into
pieces, control tokens) and Llama 3's tokenizer.model, a tiktoken file (each token's bytes and rank). tiktoken has no
list of merges: it joins the neighbours that together spell the token of lowest rank. Both give the same tokens if
    rank(token) = number of the merge that completes the token when it is spelled out and merged alone
and a token that no merge completes has no rank. Why: while nothing merges across the ends of a stretch of bytes, it is
merged in a text as it is alone; so two neighbours that spell a token came about by that token's own merges.

Cost: every token is merged alone, once. Not covered, and refused by name: SentencePiece, Unigram, WordPiece, byte
fallback, normalizers, added tokens that swallow spaces. Files are untrusted: sizes, lengths and times are limited.
"""

import base64
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import regex  # tiktoken brings it
import tiktoken

from checkpoint.files import read_json, read_text
from errors import UserError, brief

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2_SPLIT = CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    f"(?i:{CONTRACTIONS})"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_SPLITS = {GPT2_SPLIT, LLAMA3_SPLIT, r"\p{N}", r"\p{N}+"}  # their time is linear in the text
MOST_SPLITS, LONGEST_SPLIT = (
    20,
    2000,
)  # the most patterns of a tokenizer, and characters of one; usual: 10, hundreds
SPLITTING = 10  # seconds that an unknown pattern may take to cut a text
LARGEST_VOCABULARY = 2**26  # the most bytes of a vocabulary file; up to 30 MB are usual
SPELLING = 2**27  # the largest Σ length² of all tokens: `last_merge` takes time in proportion
LLAMA3_CONTROLS = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
SUPPORTED = {
    "type": "BPE",
    "decoder": "ByteLevel",
    **dict.fromkeys(
        (  # and these must be absent or empty:
            "normalizer",
            "byte_fallback",
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
        )
    ),
}
Split = Callable[[str], list[str]]


class Vocabulary(NamedTuple):
    """What a tokenizer file says, checked."""

    tokens: dict[int, bytes]  # every id -> the bytes that it decodes to
    merged: dict[
        bytes, int
    ]  # tokens that merging can make -> id, in the order of merges; tiktoken's rank: the index
    whole: dict[bytes, int]  # pieces that become one token without merging (`ignore_merges`) -> id
    special: dict[str, int]  # added tokens -> id: control tokens,
    plain: dict[str, int]  # and tokens that are searched in any text, before it is split
    splits: list[Split]
    prefix: list[int]  # ids that begin a raw prompt


def reject(file: Path, wrong: str, way_out: str) -> NoReturn:
    raise UserError(f"{file}: {brief(wrong)}; {way_out}")


everything = cache(
    lambda: "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
)  # every character


@cache
def members(character_class: str) -> str:
    r"""The ranges of a class such as \p{L}, for [...] in `re`, by the Unicode edition of tiktoken and `tokenizers`."""
    spell = {bytes([byte]): byte for byte in range(256)}
    asked = tiktoken.Encoding(
        "bytes", pat_str=character_class, mergeable_ranks=spell, special_tokens={}
    )
    inside = set(map(ord, bytes(asked.encode_ordinary(everything())).decode()))
    first, last = (
        sorted(c for c in inside if c - 1 not in inside),
        sorted(c for c in inside if c + 1 not in inside),
    )
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in zip(first, last))


def compile_split(file: Path, pattern: str) -> Split:
    """A function that cuts a text by `pattern`, written for `tokenizers`, with its character classes spelled out.
    ValueError for syntax that differs in `re`, and for a group that repeats: its time could be exponential. An unknown
    pattern runs in `regex`, which has a time limit but is several times slower than `re`."""
    if len(pattern) > LONGEST_SPLIT:
        reject(
            file,
            f"a split pattern has {len(pattern)} characters",
            f"at most {LONGEST_SPLIT} are supported",
        )
    out, within = [], False
    items = r"\\[pP]\{\w+\}|\\.|\(\?(?:i?:|<?[=!])|\)(?:[*+]|\{)|\{\d*,?\d{4,}|&&|\}\+|."
    for item in re.findall(items, pattern, re.DOTALL):
        unsupported = ["["] if within else ["(", "^", "$", ")*", ")+", "){"]
        if re.match(r"\\[sSpP]", item):
            item = (
                members(item)
                if within
                else f"[{'^' * item[1].isupper()}{members(item[:2].lower() + item[2:])}]"
            )
        elif item in unsupported or re.fullmatch(r"\\[^\Wnrt]|&&|\}\+|\{.+", item):
            reject(
                file,
                f"the split pattern {pattern!r} uses {item!r}",
                r"supported are (?:..) once or not at all, "
                r"(?i:..), looking around, [..], \p{..}, \s, \r, \n, \t and repeats of up to 999",
            )
        within = item != "]" and (within or item == "[")
        out.append(item)
    try:
        quick = re.compile(f"({''.join(out)})")
        timed = None if pattern in KNOWN_SPLITS else regex.compile(quick.pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        reject(
            file,
            f"the split pattern {pattern!r} does not compile ({error})",
            "use a tokenizer with a simpler one",
        )

    def in_time(text: str) -> list[str]:
        try:
            return timed.split(text, timeout=SPLITTING)
        except TimeoutError:
            reject(
                file,
                f"the split pattern {pattern!r} takes more than {SPLITTING} s",
                "shorten the text",
            )

    return in_time if timed else quick.split


def read_splits(file: Path, node: dict[str, Any]) -> list[Split]:
    """The regular expressions of a `pre_tokenizer`, in order, compiled. ValueError for steps that are not covered."""
    steps = node["pretokenizers"] if node["type"] == "Sequence" else [node]
    patterns = []
    for step in steps[:MOST_SPLITS]:
        match {"use_regex": True} | step:
            case {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            }:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": bool(each)}:
                patterns.append(r"\p{N}" if each else r"\p{N}+")
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(own)} if (
                step is steps[-1]
            ):
                return [compile_split(file, pattern) for pattern in patterns + [GPT2_SPLIT] * own]
            case _:
                break
    reject(
        file,
        f"the pre_tokenizer has {len(steps)} steps, and the first that does not fit is {json.dumps(step)}",
        f"at most {MOST_SPLITS} are supported: Split (Regex, Isolated), Digits, and at the end ByteLevel without a "
        "prefix space",
    )


def read_added(
    file: Path, entries: list[dict[str, Any]], vocab: dict[str, int]
) -> list[dict[str, int]]:
    """The added tokens, special and plain: text -> id. ValueError unless all tokens have different texts and ids."""
    pairs = [*vocab.items(), *((entry["content"], entry["id"]) for entry in entries)]
    if (work := sum(len(text) ** 2 for text, _ in pairs)) > SPELLING:
        reject(
            file,
            f"its tokens are too long to be spelled out: Σ length² is {work}",
            f"at most {SPELLING}",
        )
    ids, texts = dict[str, int](), dict[int, str]()
    for text, id in pairs:
        valid = text and type(id) is int and id >= 0
        if not valid or ids.setdefault(text, id) != id or texts.setdefault(id, text) != text:
            reject(
                file,
                f"{text!r} has id {id!r}, but {text!r} is {ids.get(text)!r} and {id!r} is {texts.get(id)!r}",
                "each token needs a text and an id, from 0, of its own",
            )
    if odd := [
        e["content"] for e in entries if e.get("lstrip") or e.get("rstrip") or e.get("single_word")
    ]:
        reject(
            file,
            f"{odd[0]!r} sets lstrip, rstrip or single_word",
            "only plain matching is supported",
        )
    return [
        {
            entry["content"]: entry["id"]
            for entry in entries
            if bool(entry.get("special")) == special
        }
        for special in (True, False)
    ]


def alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, as JSON has it: itself if printable in Latin-1, U+0100 and up for 68 others."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


def last_merge(token: str, numbers: dict[tuple[str, ...], int]) -> int | None:
    """The number of the merge that completes `token` if spelled out and merged alone; -1: one byte; None: no merge."""
    parts, last = list(token), -1
    while len(parts) > 1:
        last, i = min(
            (numbers.get(pair, math.inf), i) for i, pair in enumerate(zip(parts, parts[1:]))
        )
        if last == math.inf:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return last


def read_prefix(file: Path, node: dict[str, Any] | None) -> list[int]:
    """The ids that a `post_processor` puts before a text. As in `tokenizers`, `add_bos_token` plays no part."""
    prefix: list[int] = []
    for step in (
        [] if node is None else node["processors"] if node["type"] == "Sequence" else [node]
    ):
        match step:
            case {
                "type": "TemplateProcessing",
                "single": [*first, {"Sequence": {"id": "A"}}],
                "special_tokens": named,
            }:
                prefix += [id for part in first for id in named[part["SpecialToken"]["id"]]["ids"]]
            case _ if step["type"] != "ByteLevel":
                reject(
                    file,
                    f"the post_processor asks for {json.dumps(step)}",
                    "supported are tokens before a text",
                )
    return prefix


def read_tokenizer_json(file: Path) -> Vocabulary:
    """Hugging Face's format. ValueError for unsupported settings that change tokens. Truncation is the caller's."""
    data = read_json(file, LARGEST_VOCABULARY)
    model, decoder, vocab, byte_of = (
        data["model"],
        data["decoder"],
        data["model"]["vocab"],
        alphabet(),
    )
    says = data | {"type": "BPE"} | model | {"decoder": decoder and decoder["type"]}
    if odd := {
        key: says.get(key) for key, value in SUPPORTED.items() if (says.get(key) or None) != value
    }:
        reject(
            file,
            f"it says {json.dumps(odd)}",
            f"only byte-level BPE is supported: {json.dumps(SUPPORTED)}",
        )
    special, plain = read_added(file, data["added_tokens"], vocab)
    added = special | plain
    spelled = {
        text: bytes(map(byte_of.__getitem__, text)) for text in vocab if byte_of.keys() >= {*text}
    }
    if strange := [text for text in vocab if text not in spelled and text not in added]:
        reject(
            file,
            f"{strange[0]!r} holds a character that stands for no byte",
            "only byte-level BPE is supported",
        )
    numbers = dict[tuple[str, ...], int]()
    for n, merge in enumerate(model["merges"]):
        pair = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(pair) != 2 or any(text not in spelled for text in (*pair, "".join(pair))):
            reject(
                file,
                f"merge {n} is {merge!r}",
                "two tokens, and what they merge into, must be in the vocabulary",
            )
        numbers[pair] = n
    last = {text: n for text in spelled if (n := last_merge(text, numbers)) is not None}
    if lost := [text for text in special if text in last]:
        reject(
            file,
            f"{lost[0]!r} is special, and what ordinary text merges into",
            "no text may become special",
        )
    merged = {spelled[text]: vocab[text] for text in sorted(last, key=last.__getitem__)}
    whole = {
        word: vocab[text]
        for text, word in spelled.items()
        if text not in special and model.get("ignore_merges")
    }
    tokens = {vocab[text]: word for text, word in spelled.items()} | {
        id: text.encode() for text, id in added.items()
    }
    return Vocabulary(
        tokens,
        merged,
        whole,
        special,
        plain,
        read_splits(file, data["pre_tokenizer"]),
        read_prefix(file, data["post_processor"]),
    )


def read_ranks(file: Path, config: dict[str, Any]) -> Vocabulary:
    """Llama 3's tokenizer.model: on each line a token's bytes in base64 and its rank, which is its id."""
    merged = dict[bytes, int]()
    for n, line in enumerate(read_text(file, LARGEST_VOCABULARY, "latin-1").splitlines()):
        try:
            word, rank = line.split()
            if merged.setdefault(base64.b64decode(word, validate=True), int(rank)) != n:
                raise ValueError
        except ValueError:
            reject(
                file,
                f"line {n + 1} is {line[:40]!r}, not a new token in base64 and its rank, {n}",
                "it must be a complete tiktoken rank file (a SentencePiece model, such as Llama 2's, is none)",
            )
    names = (f"<|reserved_special_token_{n}|>" for n in range(256))
    llama3 = {
        128_000 + n: {"content": LLAMA3_CONTROLS.get(n) or next(names), "special": True}
        for n in range(256)
    }
    entries = (config.get("added_tokens_decoder") or llama3).items()
    special, plain = read_added(file, [entry | {"id": int(id)} for id, entry in entries], {})
    added = special | plain
    if len(merged) != (start := min(added.values())):
        reject(
            file,
            f"holds {len(merged)} tokens, but added ones begin at {start}",
            "is tokenizer_config.json there?",
        )
    tokens = {id: word for word, id in merged.items()} | {
        id: text.encode() for text, id in added.items()
    }
    prefix = [special[LLAMA3_CONTROLS[0]]] if config.get("add_bos_token", True) else []
    return Vocabulary(
        tokens, merged, {}, special, plain, [compile_split(file, LLAMA3_SPLIT)], prefix
    )
