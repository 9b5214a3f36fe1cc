"""The vocabulary of a byte-level BPE tokenizer, read from its files and checked.

Two formats say the same: Hugging Face's tokenizer.json (a list of merges, ids, regular expressions that cut a text into pieces,
control tokens), and Llama 3's tokenizer.model, a tiktoken file (each token's bytes and rank).

tiktoken, which does the merging, knows no pairs: it joins the neighbours whose *bytes* are the token of lowest rank. That agrees
with a list of merges exactly when
    rank(token) = number of the merge that completes the token when it is spelled out and merged alone
and tokens that are never completed so have no rank. For as long as nothing merges across its ends, a stretch of bytes evolves
within a text as it does alone; so wherever a pair spells a token, merging has come by that token's own way.

Invariant: what a file asks for and this code does not do is refused by name: SentencePiece, Unigram, WordPiece, normalizers, byte
fallback, added tokens that swallow spaces. (`Digits` in tokenizers 0.23 knows 13 digits, new in Unicode 17, that tiktoken's tables
do not.)

Cost: every token of the vocabulary is merged alone, once.

A model's files are written by strangers. So a file's kind and size are looked at before it is read (`read_file`), what
is said of it fits into a line (`brief`), and a split pattern that is none of those known here gets a time limit.
"""
from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import regex                # tiktoken brings it
import tiktoken

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2_SPLIT = CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (f"(?i:{CONTRACTIONS})" r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KNOWN_SPLITS = {GPT2_SPLIT, LLAMA3_SPLIT, r"\p{N}", r"\p{N}+"}             # these take time in proportion to the text
UNSUPPORTED = ["(", "^", "$", ")*", ")+", "){"]
MOST_SPLITS = 20            # steps that cut a text, one after the other; those in use have less than ten
LONGEST_SPLIT = 2000        # characters of a pattern; those in use have some hundreds
SPLITTING = 10              # seconds that any other pattern may take to cut a text
LARGEST_JSON = 2**22        # bytes of a JSON file,
LARGEST_VOCABULARY = 2**26  # and of a vocabulary; those in use have up to some 30 MB
SPELLING = 2**27            # Σ length² of all tokens: the work of spelling them out goes by it, here some seconds
LLAMA3_CONTROLS = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}


Split = Callable[[str], list[str]]


class Vocabulary(NamedTuple):
    """What a tokenizer file says, checked."""
    tokens: dict[int, bytes]    # every id -> what it decodes to
    merged: dict[bytes, int]    # what merging can make -> its id, in the order of merging: tiktoken's rank is the place in here
    whole: dict[bytes, int]     # pieces that are one token before any merging (`ignore_merges`)
    special: dict[str, int]     # added tokens: the control tokens,
    plain: dict[str, int]       # and those that are matched in any text, before it is split
    splits: list[Split]
    prefix: list[int]           # what a raw prompt starts with


def refuse(file: Path, wrong: str, way_out: str) -> NoReturn:
    raise ValueError(f"{file}: {brief(wrong)}; {way_out}")


def brief(said: object, limit: int = 400) -> str:
    """What there is to say, in one line that can be printed and read: what stands in a file may be of any length."""
    text = str(said)
    text = " ".join((text if len(text) <= 2 * limit else text[:limit] + text[-limit:]).split())
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= limit else f"{text[:limit * 2 // 3]} … {text[-limit // 4:]}"


# ---- Splitting -------------------------------------------------------------------------------------------------------

@cache
def everything() -> str:
    """Every character there is, in order."""
    return "".join(map(chr, range(0xD800))) + "".join(map(chr, range(0xE000, 0x110000)))


@cache
def members(character_class: str) -> str:
    r"""The ranges of a class such as \p{L}, to stand within the [...] of Python's `re`.

    Python's edition of Unicode varies with its version; that of tiktoken and `tokenizers` is the same. So tiktoken is asked: it
    encodes what its pattern matches and skips the rest, so out of every character there is come the members.
    """
    spell = {bytes([byte]): byte for byte in range(256)}
    asked = tiktoken.Encoding("bytes", pat_str=character_class, mergeable_ranks=spell, special_tokens={})
    inside = set(map(ord, bytes(asked.encode_ordinary(everything())).decode()))
    first, last = sorted(c for c in inside if c - 1 not in inside), sorted(c for c in inside if c + 1 not in inside)
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in zip(first, last))


def compile_split(file: Path, pattern: str) -> Split:
    """What cuts a text by `pattern`, in the dialect of `tokenizers`: classes spelled out, what differs there refused.

    A group that repeats is refused, too: matching could take time exponential in the text. What still takes long is
    stopped: `regex` has a clock, but is several times slower than `re`, which therefore has the patterns known here.
    """
    out, within = [], False
    if len(pattern) > LONGEST_SPLIT:
        refuse(file, f"the split pattern {pattern!r} has {len(pattern)} characters",
               f"at most {LONGEST_SPLIT} are supported")
    items = r"\\[pP]\{\w+\}|\\.|\(\?(?:i?:|<?[=!])|\)(?:[*+]|\{)|\{\d*,?\d{4,}|&&|\}\+|."
    for item in re.findall(items, pattern, re.DOTALL):
        if re.match(r"\\[sSpP]", item):
            negated = "^" if item[1].isupper() else ""
            item = members(item) if within else f"[{negated}{members(item[:2].lower() + item[2:])}]"
        elif re.fullmatch(r"\\[^\Wnrt]|&&|\}\+|\{.+", item) or item in (["["] if within else UNSUPPORTED):
            refuse(file, f"the split pattern {pattern!r} uses {item!r}",
                   r"supported are (?:..) once or not at all, (?i:..), looking around, [..], \p{..}, \s, \r, \n, \t "
                   "and repeats of up to 999")
        within = item != "]" and (within or item == "[")
        out.append(item)
    try:
        compiled = re.compile(f"({''.join(out)})")
        return compiled.split if pattern in KNOWN_SPLITS else in_time(file, pattern, regex.compile(compiled.pattern))
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        refuse(file, f"the split pattern {pattern!r} does not compile ({error})", "use a tokenizer with a simpler one")


def in_time(file: Path, pattern: str, compiled: Any) -> Split:
    def split(text: str) -> list[str]:
        try:
            return compiled.split(text, timeout=SPLITTING)
        except TimeoutError:
            refuse(file, f"the split pattern {pattern!r} takes more than {SPLITTING} s for {len(text)} characters",
                   "shorten the text")
    return split


def read_splits(file: Path, node: dict[str, Any]) -> list[Split]:
    """The regular expressions of a `pre_tokenizer`, in order."""
    steps = node["pretokenizers"] if node["type"] == "Sequence" else [node]
    out = []
    if len(steps) > MOST_SPLITS:
        refuse(file, f"the pre_tokenizer has {len(steps)} steps", f"at most {MOST_SPLITS} are supported")
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
                out.append(regex)
            case {"type": "Digits", "individual_digits": bool(each)}:
                out.append(r"\p{N}" if each else r"\p{N}+")
            case {"type": "ByteLevel", "add_prefix_space": False} if step is steps[-1]:
                if not isinstance(own := step.get("use_regex", True), bool):
                    refuse(file, f"the pre_tokenizer's use_regex is {own!r}", "it must be true or false")
                return [compile_split(file, regex) for regex in out + [GPT2_SPLIT] * own]
            case _:
                refuse(file, f"the pre_tokenizer asks for {json.dumps(step)}",
                       "supported are Split (a Regex, Isolated), Digits, and at the end ByteLevel without a prefix space")
    refuse(file, "the pre_tokenizer does not end in ByteLevel", "only byte-level BPE is supported")


# ---- Reading the files -----------------------------------------------------------------------------------------------

def read_file(file: Path, limit: int) -> bytes:
    """All of an ordinary file (not a pipe or a device, which may have no end) of at most `limit` bytes.

    FileNotFoundError or ValueError names it.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: a model folder needs config.json, *.safetensors and a tokenizer")
    if not file.is_file():
        raise ValueError(f"{file} is no ordinary file: fetch it again")
    if (size := file.stat().st_size) > limit:
        raise ValueError(f"{file} has {size} bytes: at most {limit} make sense; fetch it again")
    with file.open("rb") as opened:
        return opened.read(size)


def read_text(file: Path, limit: int = LARGEST_JSON) -> str:
    try:
        return read_file(file, limit).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}): fetch it again") from None


def read_json(file: Path, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file, strictly: no NaN, no key twice. FileNotFoundError or ValueError names the file."""
    def no(wrong: str) -> NoReturn:
        raise ValueError(wrong)

    def finite(number: str) -> float:
        return value if math.isfinite(value := float(number)) else no(f"the number {number} is too large")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        return found if len(found) == len(pairs) else no(f"a key stands twice among {list(found)[:3]}...")

    text = read_text(file, limit)
    try:
        data = json.loads(text, object_pairs_hook=unique, parse_float=finite,
                          parse_constant=lambda name: no(f"{name} is not a JSON number"))
        return data if isinstance(data, dict) else no(f"it holds a {type(data).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {brief(error)}; fetch it again") from None


def check_supported(file: Path, data: dict[str, Any]) -> None:
    """Refuse by name what would change the tokens and is not done here. (Truncation and padding are the caller's affair.)"""
    model, decoder = data["model"], data["decoder"]
    if model.get("type", "BPE") != "BPE" or decoder is None or decoder["type"] != "ByteLevel":
        refuse(file, f"its model is {model.get('type')!r}, its decoder {json.dumps(decoder)}", "supported are BPE and ByteLevel")
    for name in ("normalizer", "byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if value := data.get(name) or model.get(name):
            refuse(file, f"{name} is {json.dumps(value)}", "only byte-level BPE without it is supported")


def read_added(file: Path, entries: list[dict[str, Any]], vocab: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The added tokens, special and plain, once sure that among them and the vocabulary each has one text and one id."""
    ids: dict[str, int] = {}
    texts: dict[int, str] = {}
    for text, id in [*vocab.items(), *((entry["content"], entry["id"]) for entry in entries)]:
        if type(id) is not int or id < 0 or not text or ids.setdefault(text, id) != id or texts.setdefault(id, text) != text:
            refuse(file, f"{text!r} has id {id!r}, but {text!r} is {ids.get(text)!r} and {id!r} is {texts.get(id)!r}",
                   "each token needs a text and an id, from 0, of its own")
    for entry in entries:
        if any(entry.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            refuse(file, f"the added token {entry['content']!r} sets lstrip, rstrip or single_word", "only plain matching is supported")
    special = {entry["content"]: entry["id"] for entry in entries if entry.get("special")}
    return special, {entry["content"]: entry["id"] for entry in entries if not entry.get("special")}


def alphabet() -> dict[str, int]:
    """The character that stands for each byte in JSON: printable Latin-1 for itself, U+0100 and up for the 68 others (GPT-2's)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def spell_out(file: Path, vocab: dict[str, int], added: dict[str, int]) -> dict[str, bytes]:
    """The bytes of each entry."""
    byte_of, spelled = alphabet(), {}
    for text in vocab:
        try:
            spelled[text] = bytes(map(byte_of.__getitem__, text))
        except KeyError as error:
            if text not in added:
                refuse(file, f"the token {text!r} holds {error}, which stands for no byte", "only byte-level BPE is supported")
    return spelled


def read_merges(file: Path, merges: list[Any], spelled: dict[str, bytes]) -> dict[tuple[str, ...], int]:
    numbers = {}
    for n, merge in enumerate(merges):
        pair = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(pair) != 2 or any(text not in spelled for text in (*pair, "".join(pair))):
            refuse(file, f"merge {n} is {merge!r}", "it must name two tokens that, like what they merge into, are in the vocabulary")
        numbers[pair] = n
    return numbers


def last_merge(token: str, numbers: dict[tuple[str, ...], int]) -> int:
    """The merge that completes `token`, spelled out and merged alone. -1: it is a single byte; sys.maxsize: nothing completes it."""
    parts, last = list(token), -1
    while len(parts) > 1:
        waiting = [numbers.get(pair, sys.maxsize) for pair in zip(parts, parts[1:])]
        if (last := min(waiting)) == sys.maxsize:
            break
        i = waiting.index(last)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return last


def read_prefix(file: Path, node: dict[str, Any] | None) -> list[int]:
    """The ids that a `post_processor` puts before a text. As in `tokenizers`, it alone decides, not `add_bos_token`."""
    prefix: list[int] = []
    for step in [] if node is None else node["processors"] if node["type"] == "Sequence" else [node]:
        match step:
            case {"type": "ByteLevel"}:
                pass
            case {"type": "TemplateProcessing", "single": [*before, {"Sequence": {"id": "A"}}], "special_tokens": named}:
                prefix += [id for part in before for id in named[part["SpecialToken"]["id"]]["ids"]]
            case _:
                refuse(file, f"the post_processor asks for {json.dumps(step)}", "supported are ByteLevel, and tokens before the text")
    return prefix


def check_lengths(file: Path, texts: Iterable[str | bytes]) -> None:
    """Before anything is done with tokens that takes as many steps, or letters, as the square of their length."""
    if (work := sum(len(text)**2 for text in texts)) > SPELLING:
        refuse(file, f"its tokens are too long to be spelled out: their lengths, squared, add up to {work}",
               f"at most {SPELLING} is supported")


def read_tokenizer_json(file: Path) -> Vocabulary:
    data = read_json(file, LARGEST_VOCABULARY)
    check_supported(file, data)
    model, vocab = data["model"], data["model"]["vocab"]
    check_lengths(file, [*vocab, *(entry["content"] for entry in data["added_tokens"])])
    special, plain = read_added(file, data["added_tokens"], vocab)
    spelled = spell_out(file, vocab, special | plain)
    numbers = read_merges(file, model["merges"], spelled)
    last = {text: last_merge(text, numbers) for text in spelled}
    for text in special.keys() & last.keys():
        if last[text] < sys.maxsize:
            refuse(file, f"the special token {text!r} is also what ordinary text merges into", "no text may become a special token")
    merged = {spelled[text]: vocab[text] for text in sorted(last, key=last.__getitem__) if last[text] < sys.maxsize}
    whole = {word: vocab[text] for text, word in spelled.items() if text not in special} if model.get("ignore_merges") else {}
    tokens = {vocab[text]: word for text, word in spelled.items()} | {id: text.encode() for text, id in (special | plain).items()}
    return Vocabulary(tokens, merged, whole, special, plain,
                      read_splits(file, data["pre_tokenizer"]), read_prefix(file, data["post_processor"]))


def read_ranks(file: Path, config: dict[str, Any]) -> Vocabulary:
    """Llama 3's tokenizer.model: a token a line, its bytes in base64 and its rank, which is its id."""
    merged: dict[bytes, int] = {}
    for n, line in enumerate(read_file(file, LARGEST_VOCABULARY).splitlines()):
        try:
            word, rank = line.split()
            if merged.setdefault(base64.b64decode(word, validate=True), int(rank)) != n:
                raise ValueError
        except ValueError:
            refuse(file, f"line {n + 1} is {line[:40]!r}, not a new token in base64 and its rank, {n}",
                   "it must be a complete tiktoken rank file (a SentencePiece model, such as Llama 2's, is none)")
    reserved = iter(range(256))
    llama3 = {128_000 + n: LLAMA3_CONTROLS.get(n) or f"<|reserved_special_token_{next(reserved)}|>" for n in range(256)}
    entries = config.get("added_tokens_decoder") or {id: {"content": text, "special": True} for id, text in llama3.items()}
    check_lengths(file, [*merged, *(entry["content"] for entry in entries.values())])
    special, plain = read_added(file, [entry | {"id": int(id)} for id, entry in entries.items()], {})
    if len(merged) != (start := min((special | plain).values())):
        refuse(file, f"holds {len(merged)} tokens, but the added ones begin at {start}", "is it whole, and its tokenizer_config.json there?")
    tokens = {id: word for word, id in merged.items()} | {id: text.encode() for text, id in (special | plain).items()}
    prefix = [special[LLAMA3_CONTROLS[0]]] if config.get("add_bos_token", True) else []
    return Vocabulary(tokens, merged, {}, special, plain, [compile_split(file, LLAMA3_SPLIT)], prefix)
