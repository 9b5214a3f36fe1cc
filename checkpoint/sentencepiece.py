"""The vocabulary of a SentencePiece tokenizer (Llama 2, Mistral), read and checked.

It comes in one of two files:

    tokenizer.json    Hugging Face's: merges in their order; a normalizer or a pre_tokenizer
                      ("Metaspace") that says where a text gets a space of its own
    tokenizer.model   SentencePiece's own, a protobuf: pieces with a score and a kind. The merge
                      whose result has the highest score comes first.

A protobuf message is a row of fields: a number that says which field it is and how its value is
stored, then the value. A dozen of SentencePiece's fields matter here.

A text never merges into a control token (CodeLlama's ▁<PRE>): these merges are dropped.

Not covered, and refused by name: Unigram; characters that are rewritten (`precompiled_charsmap`,
other normalizers); vocabularies without all 256 bytes; unused pieces of a tokenizer.model; added
tokens that are searched in a text with its ▁ before it. (Control tokens that ask for this are
searched as they are.) `legacy` and `add_prefix_space` in tokenizer_config.json count for a
tokenizer.model alone.
Protobuf: protobuf.dev/programming-guides/encoding. Fields: sentencepiece_model.proto.
"""

import json
import re
import struct
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.files import Json, read_bytes
from checkpoint.vocabulary import (
    LARGEST_VOCABULARY,
    Ids,
    Ranks,
    TokenTexts,
    Vocabulary,
    added_beside,
    named_tokens,
    read_merges,
    refused_settings,
    reject,
    steps_of,
)

SPACE = "▁"  # U+2581, which stands for a space
BYTE = re.compile("<0x([0-9A-F]{2})>")

# A word: what merges alone. Where no piece has a ▁ behind another letter, nothing merges across
# the beginning of a word.
WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
WORDS_OF_ONE_SPACE = re.compile(f"{SPACE}[^{SPACE}]*|[^{SPACE}]+")
WHOLE_TEXT = re.compile("(?s:.+)")

SCHEMES = ("always", "first", "never")


class Space(NamedTuple):
    """Where a text gets a space."""

    scheme: str  # which parts of a text between added tokens get one: one of SCHEMES
    doubles: bool  # whether a part that begins with a space gets another
    splits: bool = False  # whether words are cut at every space


class SentencePiece(NamedTuple):
    """How a text becomes tokens: a space before it, cut into words, then merged from characters."""

    ranks: Ranks
    ids: Ids  # characters, and what merging makes -> id
    byte_ids: dict[int, int]  # byte -> id
    words: re.Pattern[str]
    space: Space


# ---- tokenizer.json


def read_sentencepiece_json(file: Path, data: Json, config: Json) -> Vocabulary:
    """data: the file's; config: tokenizer_config.json's. UserError for settings that change tokens
    and are not honoured."""
    model = data["model"]
    odd = refused_settings(model, "ignore_merges")
    if odd:
        reject(file, f"its model says {json.dumps(odd)}", "only plain BPE is supported")
    texts = TokenTexts.read(file, data, config)
    return make_vocabulary(
        texts,
        read_merges(file, model["merges"], texts.vocab.keys()),
        read_space(file, data.get("normalizer"), data.get("pre_tokenizer")),
        read_strip(file, data.get("decoder")),
    )


def read_space(file: Path, normalizer: Json | None, pre_tokenizer: Json | None) -> Space:
    """From a `normalizer` (older files) or a `pre_tokenizer` (newer ones)."""
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = steps_of(normalizer, "normalizers")
    if pre_tokenizer is None:
        if normalizers == [prepend, replace]:
            return Space("always", True)
        if normalizers == [replace]:
            return Space("never", False)
    match pre_tokenizer:
        case {"type": "Metaspace", "replacement": "▁"} if not normalizers:
            has_prefix = pre_tokenizer.get("add_prefix_space", True)
            scheme = pre_tokenizer.get("prepend_scheme", "always" if has_prefix else "never")
            if scheme in SCHEMES:
                return Space(scheme, False, pre_tokenizer.get("split", True))
    wrong = json.dumps({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer})
    reject(file, f"it says {wrong}", "supported are Prepend and Replace, or Metaspace")


def read_strip(file: Path, node: Json | None) -> bool:
    """Whether a `decoder` takes the first space away."""
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = steps_of(node, "decoders")
    if steps not in (decoders, [*decoders, strip]):
        reject(file, f"its decoder is {json.dumps(node)}", "SentencePiece's is supported")
    return strip in steps


# ---- What both files have


def make_vocabulary(texts: TokenTexts, ranks: Ranks, space: Space, strips: bool) -> Vocabulary:
    """UserError unless all bytes are tokens."""
    file, vocab, special, *_ = texts
    if space == Space("always", True):
        texts.refuse_normalized()
    bytes_ = {text: int(found[1], 16) for text in vocab if (found := BYTE.fullmatch(text))}
    byte_ids = {byte: vocab[text] for text, byte in bytes_.items()}
    if len(byte_ids) < 256:
        wrong = f"{256 - len(byte_ids)} of the tokens <0x00> to <0xFF> are missing"
        reject(file, wrong, "a character that is no token needs them")
    no_text = special | bytes_
    ranks = {pair: rank for pair, rank in ranks.items() if "".join(pair) not in no_text}
    merged = {*map("".join, ranks)}
    ids = {
        text: id
        for text, id in vocab.items()
        if text in merged or (len(text) == 1 and text not in special)
    }
    decoded = {text: text.replace(SPACE, " ").encode() for text in vocab}
    decoded |= {text: bytes([byte]) for text, byte in bytes_.items()}
    words = WORDS_OF_ONE_SPACE if space.splits else WORDS
    if not space.splits and any(SPACE in text.lstrip(SPACE) for text in ids):
        words = WHOLE_TEXT
    merges = SentencePiece(ranks, ids, byte_ids, words=words, space=space)
    return texts.vocabulary(decoded, merges, strips)


# ---- tokenizer.model

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # kinds of a piece
BPE = 2  # a model_type
RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")  # a line of tiktoken's: a token in base64, its rank
# Fields of a tokenizer.model, by their numbers.
PIECES, TRAINER, NORMALIZER = range(1, 4)
TEXT, SCORE, KIND = range(1, 4)  # of a piece
MODEL_TYPE, SPACE_BEHIND = 3, 24  # of the trainer; the latter: words end with their ▁
IDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}  # and their defaults
CHARSMAP, ADDS_SPACE, REMOVES_SPACES, ESCAPES_SPACES = range(2, 6)  # of the normalizer


class Piece(NamedTuple):
    """A token: its id is its place among the pieces."""

    text: str
    score: float  # of two merges, that with the higher score comes first
    kind: int


def read_sentencepiece_model(file: Path, config: Json) -> Vocabulary:
    """From a tokenizer.model. config: tokenizer_config.json's, which may add tokens, and says what
    a prompt begins with."""
    content = read_bytes(file, LARGEST_VOCABULARY)
    if RANK.match(content):
        wrong = "it is tiktoken's list of ranks, as Llama 3 has it, and not SentencePiece's"
        reject(file, wrong, "its control tokens are in a tokenizer.json, which is needed beside it")
    try:
        message = read_message(content)
        trainer = read_message(last(message, TRAINER, b""))
        normalizer = read_message(last(message, NORMALIZER, b""))
        pieces = [read_piece(piece) for piece in message[PIECES]]
        named_ids = {name: last(trainer, *field) for name, field in IDS.items()}
        named = {name: pieces[id].text for name, id in named_ids.items() if id < len(pieces)}
    except (LookupError, TypeError, ValueError, struct.error) as error:
        reject(file, f"it is not SentencePiece's ({error!r})", "a tokenizer.json does as well")
    model_type = last(trainer, MODEL_TYPE, 1)
    if model_type != BPE:
        reject(file, f"its model_type is {model_type}", "only BPE (2) is supported")
    rewrites = last(normalizer, CHARSMAP, b"") or last(normalizer, REMOVES_SPACES, 1)
    if rewrites or not last(normalizer, ESCAPES_SPACES, 1) or last(trainer, SPACE_BEHIND, 0):
        reject(file, "it rewrites a text before merging", "a tokenizer.json does as well")
    if any(piece.kind == UNUSED for piece in pieces):
        reject(file, "it has unused pieces", "a tokenizer.json does as well")
    begins = config.get("add_bos_token", True) and "bos_token" in named
    space = Space("never", False)
    if last(normalizer, ADDS_SPACE, 1) and config.get("add_prefix_space", True):
        scheme = "always" if config.get("legacy", True) else "first"
        space = Space(scheme, True)
    named |= named_tokens(config)
    added = added_beside(file, config, named)
    prefix = [named_ids["bos_token"]] if begins else []
    return vocabulary_of_pieces(file, pieces, added, space, prefix, named)


def vocabulary_of_pieces(
    file: Path,
    pieces: list[Piece],
    added: dict[str, Json],
    space: Space,
    prefix: list[int],
    named: dict[str, str],
) -> Vocabulary:
    """added: tokens beside the pieces, or what is known of some of them, as in a tokenizer.json. (A
    piece that controls the model does so whatever they say.)"""
    vocab, entries = index_pieces(file, pieces)
    controls = [text for text, entry in entries.items() if entry["special"]]
    entries |= added
    for text in controls:
        entries[text] = entries[text] | {"special": True}
    ranks = rank_pairs([piece for piece in pieces if piece.kind == NORMAL])
    texts = TokenTexts.of(file, vocab, [*entries.values()], prefix, named)
    return make_vocabulary(texts, ranks, space, space.scheme != "never")


def index_pieces(file: Path, pieces: list[Piece]) -> tuple[Ids, dict[str, Json]]:
    """Text -> id; text -> entry of the pieces that are added tokens, as in a tokenizer.json.
    Without unused pieces, which a GGUF may have. UserError for a text that is there twice."""
    vocab = {}
    entries = {}
    for id, (text, _, kind) in enumerate(pieces):
        if kind == UNUSED:
            continue
        if text in vocab:
            reject(file, f"piece {id}, {text!r}, is there twice", "fetch it again")
        vocab[text] = id
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            entries[text] = {"content": text, "id": id, "special": kind != USER_DEFINED}
    return vocab, entries


def rank_pairs(pieces: list[Piece]) -> Ranks:
    """All pairs of pieces, or of characters, that together are a piece -> their rank: the number
    of higher scores."""
    texts = {piece.text for piece in pieces}
    scores = sorted({piece.score for piece in pieces}, reverse=True)
    rank_of = {score: rank for rank, score in enumerate(scores)}
    ranks = {}
    for text, score, _ in pieces:
        for i in range(1, len(text)):
            pair = (text[:i], text[i:])
            if all(len(part) == 1 or part in texts for part in pair):
                ranks[pair] = rank_of[score]
    return ranks


def read_piece(data: bytes) -> Piece:
    message = read_message(data)
    (score,) = struct.unpack("<f", last(message, SCORE, bytes(4)))
    return Piece(last(message, TEXT, b"").decode(), score, last(message, KIND, NORMAL))


def last(message: dict[int, list[Any]], field: int, default: Any) -> Any:
    """The value of a field; of several, the last."""
    return message.get(field, [default])[-1]


def read_message(data: bytes) -> dict[int, list[Any]]:
    """A message of a protobuf: field -> its values: whole numbers, or bytes. LookupError or
    ValueError for what is none."""
    fields = defaultdict[int, list[Any]](list)
    stream = BytesIO(data)
    while stream.tell() < len(data):
        key = read_varint(stream)
        kind = key & 7
        if kind == 0:
            value = read_varint(stream)
        else:
            size = read_varint(stream) if kind == 2 else {1: 8, 5: 4}[kind]
            if size > len(data) - stream.tell():
                raise ValueError(f"at byte {stream.tell()} a field is cut off")
            value = stream.read(size)
        fields[key >> 3].append(value)
    return dict(fields)


def read_varint(stream: BytesIO) -> int:
    """A whole number, 7 bits a byte, the lowest first; the highest bit says that more follow."""
    value = 0
    for shift in range(0, 70, 7):
        (byte,) = stream.read(1)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError(f"at byte {stream.tell()} a number has more than 10 bytes")
