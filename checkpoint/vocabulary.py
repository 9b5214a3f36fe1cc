"""The vocabulary of a tokenizer: its files, checked, and the package that merges texts by them.

A vocabulary has tokens, each with an id and the bytes that it decodes to. The package `tokenizers`
makes them out of text by a tokenizer.json: it normalizes a text, cuts it into pieces, and merges
neighbours in each. (train/bpe.py shows what a merge is.) A tokenizer.model and a GGUF are
rewritten to that form (pieces.py, gguf_vocabulary.py).

*Added* tokens are found before a text is merged. Those that are *special* control a model: they are
never found in a user's text. So this page finds added tokens, and the package has none: special
tokens are taken out of the vocabulary that it gets, and merges of them, too.

An added token may swallow the white space before it or behind it (`lstrip`, `rstrip`).

Not covered, and refused by name: Unigram and WordPiece; decoders but ByteLevel and SentencePiece's;
added tokens that are found as whole words alone, or in a text that was normalized; tokens after a
text.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tokenizers import Tokenizer as Core
from tokenizers import models

from checkpoint.files import Json, read_json
from errors import UserError, brief

# Chat templates write these. Other names (pad_token, …) stand in no text, so that it does no harm
# if they name what is no token.
WRITTEN = ("bos_token", "eos_token")
TEXTS = ("<tool_call>", "</tool_call>")  # that some models mark as special: clients read them
LARGEST_VOCABULARY = 2**26  # the most bytes of a vocabulary file; up to 30 MB are usual

WHITE_SPACE = (  # Unicode's. (Python strips four more.)
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
SPACES = re.compile(f"[{WHITE_SPACE}]*")

Ids = dict[str, int]  # text of a token -> id
Merge = Callable[[str], list[int]]  # a text without added tokens -> ids


def reject(file: Path, wrong: str, remedy: str) -> NoReturn:
    raise UserError(f"{file}: {brief(wrong)}; {remedy}")


# ---- Added tokens


class Swallows(NamedTuple):
    """Added tokens that swallow the white space before them, or behind them."""

    before: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()


class Finder:
    """Finds added tokens in a text, whatever their number: a place costs a look-up for each length
    of a token, where `re` would try one token after the other."""

    def __init__(self, tokens: Iterable[str], swallows: Swallows = Swallows()) -> None:
        self._tokens = {*tokens}
        self._swallows = swallows
        self._lengths = sorted({*map(len, self._tokens)}, reverse=True)
        letters = "".join({token[0] for token in self._tokens})
        self._first = re.compile(f"[{re.escape(letters)}]" if letters else "(?!)")

    def token_at(self, text: str, i: int) -> str:
        """The longest token that begins at this letter, or nothing."""
        parts = (text[i : i + length] for length in self._lengths)
        return next((part for part in parts if part in self._tokens), "")

    def split(self, text: str) -> list[str]:
        """Text, token, text, …"""
        parts = []
        end = 0  # of the last token, and of what belongs to it
        next_start = 0  # where the next token may begin: in its white space, too
        for found in self._first.finditer(text):
            i = found.start()
            token = self.token_at(text, i) if i >= next_start else ""
            if token:
                before = text[end:i]
                if token in self._swallows.before:
                    before = before.rstrip(WHITE_SPACE)
                parts += [before, token]
                next_start = end = i + len(token)
                if token in self._swallows.behind:
                    end = SPACES.match(text, end).end()
        return [*parts, text[end:]]


# ---- Merging

# A long text is merged in parts, cut between two words, so that one with too many tokens is refused
# in time. No token reaches across such a place, so the tokens are those of the whole text.
PART = 2**16  # characters
LETTER = r"[^\W\d_]"
CUT = re.compile(f"(?<={LETTER}) (?={LETTER})")
ACROSS = re.compile(f"(?:{LETTER}|\ufffd) ")  # in a token that a cut would tear
PROBE = "The cat's mat,it is 12345 words  of\n\n  a \u4e16\u754c \u0438 text. IT'S so e\u0301 end"


class Merger:
    """The tokens of a text without added tokens.

    first: of a text that nothing precedes. rest: of others, which some models give no space of
    their own.
    """

    def __init__(self, first: Merge, rest: Merge, tokens: Iterable[bytes]) -> None:
        self._first = first
        self._rest = rest
        texts = (token.decode(errors="replace") for token in tokens)
        self._skips = None if any(map(ACROSS.search, texts)) else self._find_skips()

    def _find_skips(self) -> int | None:
        """How many characters to leave out where a text is cut: the space, if the model gives each
        text one. None: parts have other tokens than the whole."""
        parts = CUT.sub("\0 ", PROBE).split("\0")
        for skips in (0, 1):
            rest = sum((self._rest(part[skips:]) for part in parts[1:]), [])
            if all(merge(PROBE) == merge(parts[0]) + rest for merge in (self._first, self._rest)):
                return skips
        return None

    def merge(self, text: str, is_first: bool) -> Iterator[list[int]]:
        """The tokens of one part of the text after the other."""
        merge = self._first if is_first else self._rest
        while text:
            cut = None if self._skips is None else CUT.search(text, PART)
            end = cut.start() if cut else len(text)
            yield unless_given_up(merge, text[:end])
            text = text[end + (self._skips or 0) :]
            merge = self._rest


def unless_given_up(merge: Merge, text: str) -> list[int]:
    """The tokens of a text. UserError where a pattern has too many ways to match it: then both
    packages panic, and what they raise is no Exception."""
    try:
        return merge(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer cannot handle a text of {len(text):,} characters ({brief(error)}): "
            "change the text, or use another tokenizer"
        ) from None


def make_merge(file: Path, data: Json, vocab: Ids, merges: list[tuple[str, str]]) -> Merge:
    """What the package makes of a text by a tokenizer.json, with these tokens and merges."""
    parts = {name: data.get(name) for name in ("normalizer", "pre_tokenizer")}
    settings = {name: bool(data["model"].get(name)) for name in ("ignore_merges", "byte_fallback")}
    empty = dict(type="BPE", vocab={}, merges=[])
    whole = dict(version="1.0", added_tokens=[], model=empty) | parts
    try:
        core = Core.from_str(json.dumps(whole))
        core.model = models.BPE(vocab, merges, **settings)
    except Exception as error:
        reject(file, f"the package tokenizers refuses it ({error})", "download it again")

    # encode would hold the GIL
    return lambda text: core.encode_batch_fast([text], add_special_tokens=False)[0].ids


# ---- The vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's files hold, checked."""

    file: Path
    tokens: dict[int, bytes]  # every id -> the bytes that it decodes to
    special: Ids  # control tokens -> id: never found in a text
    added: Ids  # other added tokens -> id: found in any text, before it is merged
    prefix: list[int]  # ids that begin a raw prompt
    named: dict[str, str]  # "bos_token", … -> text, for chat templates
    merger: Merger
    strips: bool = False  # whether decoding takes the first space away
    swallows: Swallows = Swallows()
    missing_bytes: bytes = b""  # that are no token: a text loses them


def steps_of(node: Json | None, name: str) -> list[Json]:
    """The steps of a part of a tokenizer.json, which is none, one, or a sequence. name: of the list
    in a sequence."""
    if node is None:
        return []
    return node[name] if node["type"] == "Sequence" else [node]


def alphabet() -> Ids:
    """GPT-2's character for each byte: itself if printable in Latin-1, else U+0100 and up."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    letters = {chr(byte): byte for byte in itself}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(others)}


SPACE = "▁"  # U+2581, which stands for a space in SentencePiece's tokens
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {
    "type": "Replace",
    "pattern": {"String": " "},
    "content": SPACE,
}
STRIP = {
    "type": "Strip",
    "content": " ",
    "start": 1,
    "stop": 0,
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "use_regex": False,
    "trim_offsets": False,
}
SPACES_BACK = [
    {
        "type": "Replace",
        "pattern": {"String": SPACE},
        "content": " ",
    },
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def texts_with(setting: str, entries: list[Json]) -> frozenset[str]:
    """The added tokens that have this setting."""
    return frozenset(entry["content"] for entry in entries if entry.get(setting))


def make_vocabulary(
    file: Path,
    data: Json,
    entries: list[Json],
    prefix: list[int],
    named: dict[str, str],
    merge: Merge | None = None,
) -> Vocabulary:
    """data: a tokenizer.json's model, normalizer, pre_tokenizer and decoder; as `rest`, what is
    otherwise for a text behind another. entries: the added tokens. merge: what merges texts, if it
    is not the package. UserError for what is wrong, or is not honoured."""
    check_model(file, data)
    vocab = data["model"]["vocab"]
    check_added(file, vocab, entries, prefix)
    merges = read_merges(file, data["model"]["merges"], vocab.keys())
    special = {}
    added = {}
    for entry in entries:
        is_special = entry.get("special") and entry["content"] not in TEXTS
        kind = special if is_special else added
        kind[entry["content"]] = entry["id"]
    for name in WRITTEN:
        text = named.get(name)
        if text and text not in special | added:
            wrong = f"{name} is {text!r}, which is none of its added tokens"
            reject(file, wrong, "correct the name in tokenizer_config.json, or add the token")
    normalized = texts_with("normalized", entries) & added.keys()
    normalizer = (data | data.get("rest", {})).get("normalizer")
    if normalized and steps_of(normalizer, "normalizers") not in ([], [REPLACE]):
        wrong = f"{min(normalized)!r} is searched in the normalized text"
        reject(file, wrong, "added tokens must say normalized: false")
    is_byte_level, strips = read_decoder(file, data.get("decoder"))
    byte_of = alphabet() if is_byte_level else {f"<0x{byte:02X}>": byte for byte in range(256)}
    missing = byte_of.keys() - vocab.keys()
    unknown = data["model"].get("unk_token")
    if missing and unknown:
        wrong = f"unk_token is {unknown!r}, and of the 256 bytes {len(missing)} are no token"
        reject(file, wrong, "no control token may stand in a user's text")
    spell = spell_bytes if is_byte_level else spell_pieces
    tokens = {id: spell(text, byte_of) for text, id in vocab.items()}
    if special.keys() & vocab.keys():
        vocab = {text: id for text, id in vocab.items() if text not in special}
        merges = [pair for pair in merges if not special.keys() & {*pair, "".join(pair)}]
    first = merge or make_merge(file, data, vocab, merges)
    rest = make_merge(file, data | data["rest"], vocab, merges) if "rest" in data else first
    merger = Merger(first, rest, [tokens[id] for id in vocab.values()])
    tokens |= {id: text.encode() for text, id in (special | added).items()}
    swallows = Swallows(texts_with("lstrip", entries), texts_with("rstrip", entries))
    missing_bytes = bytes(sorted(byte_of[letter] for letter in missing))
    return Vocabulary(
        file=file,
        tokens=tokens,
        special=special,
        added=added,
        prefix=prefix,
        named=named,
        merger=merger,
        strips=strips,
        swallows=swallows,
        missing_bytes=missing_bytes,
    )


def check_model(file: Path, data: Json) -> None:
    """UserError for settings of a tokenizer.json's model that are not honoured."""
    model = data["model"]
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    odd = {name: model[name] for name in names if model.get(name)}
    if not model["vocab"]:
        reject(file, "its vocabulary is empty", "download it again")
    if model.get("type", "BPE") != "BPE":
        odd["type"] = model["type"]
    if odd:
        reject(file, f"its model says {json.dumps(odd)}", "only plain BPE is supported")


def check_added(file: Path, vocab: Ids, entries: list[Json], prefix: list[int]) -> None:
    """UserError unless every token has a text and an id of its own, and `prefix` is of them."""
    ids = dict(vocab)
    for entry in entries:
        text = entry["content"]
        if entry.get("single_word"):
            reject(file, f"{text!r} sets single_word", "only plain matching is supported")
        if ids.setdefault(text, entry["id"]) != entry["id"]:
            reject(file, f"{text!r} has id {entry['id']!r} and {ids[text]!r}", "one is right")
    for text, id in ids.items():
        if not text or type(id) is not int or not 0 <= id < 2**31:
            reject(file, f"{text!r} has id {id!r}", "each token needs a text, and an id from 0")
    known = set(ids.values())
    if len(known) < len(ids):
        reject(file, "two tokens have one id", "each token needs an id of its own")
    for id in prefix:
        if type(id) is not int or id not in known:
            wrong = f"a prompt begins with token {id!r}"
            reject(file, wrong, "it must be one of the vocabulary")


def read_merges(file: Path, merges: list[Any], tokens: Collection[str]) -> list[tuple[str, str]]:
    """The pairs that merge, in order. UserError unless they are tokens that make a token."""
    pairs = []
    for rank, merge in enumerate(merges):
        pair = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(pair) != 2 or not tokens >= {*pair, "".join(pair)}:
            rule = "two tokens, and what they merge into, must be in the vocabulary"
            reject(file, f"merge {rank} is {merge!r}", rule)
        pairs.append(pair)
    return pairs


def read_decoder(file: Path, node: Json | None) -> tuple[bool, bool]:
    """Whether tokens are spelled in GPT-2's alphabet (or else in SentencePiece's pieces), and
    whether decoding takes the first space away."""
    steps = steps_of(node, "decoders")
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return True, False
    if steps not in (SPACES_BACK, [*SPACES_BACK, STRIP]):
        reject(
            file, f"its decoder is {json.dumps(node)}", "supported are ByteLevel's and Llama 2's"
        )
    return False, STRIP in steps


def spell_bytes(text: str, byte_of: Ids) -> bytes:
    """What a token of byte-level BPE decodes to. One with other letters stands for itself."""
    try:
        return bytes(map(byte_of.__getitem__, text))
    except KeyError:
        return text.encode()


def spell_pieces(text: str, byte_of: Ids) -> bytes:
    """What one of SentencePiece's pieces decodes to."""
    if text in byte_of:
        return bytes([byte_of[text]])
    return text.replace(SPACE, " ").encode()


# ---- tokenizer.json, and what stands beside it


def read_tokenizer_json(file: Path, config: Json) -> Vocabulary:
    """From a tokenizer.json. config: tokenizer_config.json's, which may add tokens. Where it
    says whether bos begins a prompt, that counts, as in transformers: DeepSeek's distilled
    models say it there alone."""
    data = read_json(file, LARGEST_VOCABULARY)
    prefix = read_prefix(file, data.get("post_processor"))
    named = named_tokens(config)
    ids = {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    beside = added_beside(file, config, named)
    more = [entry for text, entry in beside.items() if text not in ids]
    ids |= {entry["content"]: entry["id"] for entry in more}
    if "add_bos_token" in config and "bos_token" in named:
        prefix = [ids.get(named["bos_token"])] if config["add_bos_token"] else []
    steps = steps_of(data.get("pre_tokenizer"), "pretokenizers")
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    rest = [step | never if step.get("prepend_scheme") == "first" else step for step in steps]
    if rest != steps:
        data["rest"] = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": rest}}
    return make_vocabulary(file, data, data["added_tokens"] + more, prefix, named)


def read_prefix(file: Path, node: Json | None) -> list[int]:
    """The ids that a `post_processor` puts before a text."""
    prefix: list[int] = []
    for step in steps_of(node, "processors"):
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


def read_optional(file: Path) -> Json:
    """The object in a JSON file, which a folder may lack; null is as if it were left out."""
    data = read_json(file) if os.path.lexists(file) else {}
    return {name: value for name, value in data.items() if value is not None}


def read_tokenizer_config(folder: Path) -> Json:
    """tokenizer_config.json; where that names no token, special_tokens_map.json may."""
    file = folder / "tokenizer_config.json"
    config = read_optional(folder / "special_tokens_map.json") | read_optional(file)
    if config.get("add_eos_token"):
        reject(file, "add_eos_token is true", "supported are tokens before a text")
    return config


def named_tokens(config: Json) -> dict[str, str]:
    """ "bos_token", "eos_token", … -> text."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def added_beside(file: Path, config: Json, named: dict[str, str]) -> dict[str, Json]:
    """The tokens that other files of the folder add: text -> entry, as in a tokenizer.json. config:
    tokenizer_config.json's, which says more of them than added_tokens.json."""
    entries = {}
    for text, id in read_optional(file.with_name("added_tokens.json")).items():
        entries[text] = {"content": text, "id": id, "special": text in named.values()}
    for id, entry in config.get("added_tokens_decoder", {}).items():
        entries[entry["content"]] = {"id": int(id)} | entry
    return entries
