"""The vocabulary of a tokenizer, and what all tokenizers' files have in common.

A vocabulary has tokens, each with an id and the bytes that it decodes to. Two kinds of byte-pair
encoding make them out of text: on bytes (bytelevel.py) and on characters (sentencepiece.py). In
both, *added* tokens are found before a text is merged. Those that are *special* control a model:
they are never found in a user's text.

An added token may swallow the white space before it or behind it (`lstrip`, `rstrip`).

Not covered, and refused by name: added tokens that are found as whole words alone; tokens after a
text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from checkpoint.files import Json, read_json
from errors import UserError, brief

if TYPE_CHECKING:
    from checkpoint.bytelevel import ByteLevel
    from checkpoint.sentencepiece import SentencePiece

# Chat templates write these. Other names (pad_token, …) stand in no text, so that it does no harm
# if they name what is no token.
WRITTEN = ("bos_token", "eos_token")
LONGEST_TOKEN = 256  # characters of an added one
TEXTS = ("<tool_call>", "</tool_call>")  # that some models mark as special: clients read them
LARGEST_VOCABULARY = 2**26  # the most bytes of a vocabulary file; up to 30 MB are usual

WHITE_SPACE = (  # Unicode's. (Python strips four more.)
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
SPACES = re.compile(f"[{WHITE_SPACE}]*")

Ids = dict[str, int]  # text of a token -> id
Ranks = dict[tuple[str, ...], int]  # neighbours that merge -> the lower, the earlier


class Swallows(NamedTuple):
    """Added tokens that swallow the white space before them, or behind them."""

    before: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's files hold, checked."""

    file: Path
    tokens: dict[int, bytes]  # every id -> the bytes that it decodes to
    special: Ids  # control tokens -> id: never found in a text
    added: Ids  # other added tokens -> id: found in any text, before it is merged
    prefix: list[int]  # ids that begin a raw prompt
    named: dict[str, str]  # "bos_token", … -> text, for chat templates
    merges: ByteLevel | SentencePiece
    strips: bool = False  # whether decoding takes the first space away
    swallows: Swallows = Swallows()


def reject(file: Path, wrong: str, way_out: str) -> NoReturn:
    raise UserError(f"{file}: {brief(wrong)}; {way_out}")


def read_optional(file: Path) -> Json:
    """The object in a JSON file, which a folder may lack; null is as if it were left out."""
    data = read_json(file) if os.path.lexists(file) else {}
    return {name: value for name, value in data.items() if value is not None}


def steps_of(node: Json | None, name: str) -> list[Json]:
    """The steps of a part of a tokenizer.json, which is none, one, or a sequence. name: of the list
    in a sequence."""
    if node is None:
        return []
    return node[name] if node["type"] == "Sequence" else [node]


def read_tokenizer_config(folder: Path) -> Json:
    """tokenizer_config.json; where that names no token, special_tokens_map.json may."""
    file = folder / "tokenizer_config.json"
    config = read_optional(folder / "special_tokens_map.json") | read_optional(file)
    if config.get("add_eos_token"):
        reject(file, "add_eos_token is true", "supported are tokens before a text")
    return config


def refused_settings(model: Json, *more: str) -> Json:
    """The settings of a tokenizer.json's model that change tokens, and are not honoured: name ->
    value. more: names that one kind of tokenizer refuses."""
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", *more)
    refused = {name: model[name] for name in names if model.get(name)}
    if model.get("type", "BPE") != "BPE":
        refused["type"] = model["type"]
    return refused


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


def texts_with(setting: str, entries: list[Json]) -> frozenset[str]:
    """The added tokens that have this setting."""
    return frozenset(entry["content"] for entry in entries if entry.get(setting))


class TokenTexts(NamedTuple):
    """The texts of a tokenizer's tokens, before it is known how they merge."""

    file: Path
    vocab: Ids
    special: Ids
    added: Ids
    normalized: frozenset[str]  # added tokens that are searched in a text that was normalized
    swallows: Swallows
    prefix: list[int]
    named: dict[str, str]

    @classmethod
    def of(
        cls, file: Path, vocab: Ids, entries: list[Json], prefix: list[int], named: dict[str, str]
    ) -> TokenTexts:
        """entries: the added tokens. UserError unless every token has a text and an id of its
        own."""
        special = {}
        others = {}
        for entry in entries:
            text = entry["content"]
            is_special = entry.get("special") and text not in TEXTS
            kind = special if is_special else others
            kind[text] = entry["id"]
        normalized = texts_with("normalized", entries) & others.keys()
        swallows = Swallows(texts_with("lstrip", entries), texts_with("rstrip", entries))
        texts = cls(file, vocab, special, others, normalized, swallows, prefix, named)
        texts.check(entries)
        return texts

    def check(self, entries: list[Json]) -> None:
        """What is wrong with the added tokens, names, ids and the prefix: UserError."""
        file = self.file
        ids = dict(self.vocab)
        for entry in entries:
            text = entry["content"]
            if len(text) > LONGEST_TOKEN:
                wrong = f"{text!r} is an added token of {len(text):,} characters"
                reject(file, wrong, f"at most {LONGEST_TOKEN} make sense")
            if entry.get("single_word"):
                reject(file, f"{text!r} sets single_word", "only plain matching is supported")
            if ids.setdefault(text, entry["id"]) != entry["id"]:
                reject(file, f"{text!r} has id {entry['id']!r} and {ids[text]!r}", "one is right")
        for name in WRITTEN:
            text = self.named.get(name)
            if text and text not in self.special | self.added:
                wrong = f"{name} is {text!r}, which is none of its added tokens"
                reject(file, wrong, "correct the name in tokenizer_config.json, or add the token")
        for text, id in ids.items():
            if not text or type(id) is not int or id < 0:
                reject(file, f"{text!r} has id {id!r}", "each token needs a text, and an id from 0")
        known = set(ids.values())
        if len(known) < len(ids):
            reject(file, "two tokens have one id", "each token needs an id of its own")
        for id in self.prefix:
            if type(id) is not int or id not in known:
                wrong = f"a prompt begins with token {id!r}"
                reject(file, wrong, "it must be one of the vocabulary")

    def refuse_normalized(self) -> None:
        """UserError if an added token is searched in a text that was normalized."""
        if self.normalized:
            wrong = f"{min(self.normalized)!r} is searched in the normalized text"
            reject(self.file, wrong, "added tokens must say normalized: false")

    @classmethod
    def read(cls, file: Path, data: Json, config: Json) -> TokenTexts:
        """From a tokenizer.json. config: tokenizer_config.json's, which may add tokens. Where it
        says whether bos begins a prompt, that counts, as in transformers: DeepSeek's distilled
        models say it there alone."""
        prefix = read_prefix(file, data.get("post_processor"))
        vocab = data["model"]["vocab"]
        named = named_tokens(config)
        ids = {entry["content"]: entry["id"] for entry in data["added_tokens"]}
        beside = added_beside(file, config, named)
        more = [entry for text, entry in beside.items() if text not in ids]
        ids |= {entry["content"]: entry["id"] for entry in more}
        if "add_bos_token" in config and "bos_token" in named:
            prefix = [ids.get(named["bos_token"])] if config["add_bos_token"] else []
        return cls.of(file, vocab, data["added_tokens"] + more, prefix, named)

    def vocabulary(
        self,
        words: dict[str, bytes],
        merges: ByteLevel | SentencePiece,
        strips: bool = False,
    ) -> Vocabulary:
        """words: what each token of `vocab` decodes to."""
        tokens = {self.vocab[text]: word for text, word in words.items()}
        tokens |= {id: text.encode() for text, id in (self.special | self.added).items()}
        known = self.special, self.added, self.prefix, self.named
        return Vocabulary(self.file, tokens, *known, merges, strips, self.swallows)


def read_merges(file: Path, merges: list[Any], tokens: Collection[str]) -> Ranks:
    """The pairs that merge -> their number in the list; of a pair listed twice, the later one."""
    ranks = {}
    for rank, merge in enumerate(merges):
        pair = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(pair) != 2 or not tokens >= {*pair, "".join(pair)}:
            rule = "two tokens, and what they merge into, must be in the vocabulary"
            reject(file, f"merge {rank} is {merge!r}", rule)
        ranks[pair] = rank
    return ranks


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
