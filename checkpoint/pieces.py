"""A tokenizer.model, rewritten to a tokenizer.json (vocabulary.py): SentencePiece's, or tiktoken's.

    SentencePiece's (Llama 2, Mistral)   a protobuf: pieces with a score and a kind. The merge whose
                                         result has the highest score comes first.
    tiktoken's (Llama 3)                 a line for each token: its bytes in base64, and its rank,
                                         which is its id. tiktoken merges by these ranks.

A protobuf message is a row of fields: a number that says which field it is and how its value is
stored, then the value. A dozen of SentencePiece's fields matter here.

tiktoken's file has no control tokens: they are in tokenizer_config.json's added_tokens_decoder.

Not covered, and refused by name: Unigram; characters that are rewritten (`precompiled_charsmap`);
unused pieces of a tokenizer.model. `legacy` and `add_prefix_space` in tokenizer_config.json count
for a tokenizer.model alone.
Protobuf: protobuf.dev/programming-guides/encoding. Fields: sentencepiece_model.proto.
"""

import base64
import re
import struct
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken

from checkpoint.files import Json, read_bytes
from checkpoint.vocabulary import (
    BYTE_LEVEL,
    LARGEST_VOCABULARY,
    PREPEND,
    REPLACE,
    SPACES_BACK,
    STRIP,
    Ids,
    Vocabulary,
    added_beside,
    alphabet,
    make_vocabulary,
    named_tokens,
    reject,
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # kinds of a piece
BPE = 2  # a model_type
RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")  # a line of tiktoken's
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


def read_tokenizer_model(file: Path, config: Json) -> Vocabulary:
    """From a tokenizer.model. config: tokenizer_config.json's, which may add tokens, and says what
    a prompt begins with."""
    content = read_bytes(file, LARGEST_VOCABULARY)
    return (read_ranks if RANK.match(content) else read_sentencepiece)(file, content, config)


# ---- tiktoken's


def read_ranks(file: Path, content: bytes, config: Json) -> Vocabulary:
    """From tiktoken's list of ranks, as Llama 3 has it."""
    named = named_tokens(config)
    added = added_beside(file, config, named)
    if not added:
        wrong = "it is tiktoken's list of ranks, which has no control tokens"
        reject(file, wrong, "tokenizer_config.json must name them, or a tokenizer.json be there")
    rows = [line.split() for line in content.splitlines()]
    ranks = {base64.b64decode(word): int(rank) for word, rank in rows}
    lacking = 256 - sum(len(word) == 1 for word in ranks)
    if lacking:
        reject(file, f"it lacks {lacking} of the 256 bytes", "fetch it again")
    merge = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    letters = {byte: letter for letter, byte in alphabet().items()}
    vocab = {"".join(map(letters.get, word)): rank for word, rank in ranks.items()}
    data = dict(model=dict(vocab=vocab, merges=[]), decoder=BYTE_LEVEL)
    begins = config.get("add_bos_token", True) and named.get("bos_token") in added
    prefix = [added[named["bos_token"]]["id"]] if begins else []
    return make_vocabulary(
        file, data, [*added.values()], prefix, named, merge=merge.encode_ordinary
    )


# ---- SentencePiece's


def read_sentencepiece(file: Path, content: bytes, config: Json) -> Vocabulary:
    """From SentencePiece's protobuf."""
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
    has_space = last(normalizer, ADDS_SPACE, 1) and config.get("add_prefix_space", True)
    named |= named_tokens(config)
    vocab, entries = index_pieces(file, pieces)
    controls = [text for text, entry in entries.items() if entry["special"]]
    entries |= added_beside(file, config, named)
    for text in controls:  # whatever the other files say
        entries[text] = entries[text] | {"special": True}
    data = piece_data(pieces, vocab, has_space)
    if has_space and not config.get("legacy", True):
        data["rest"] = {"normalizer": REPLACE}
    prefix = [named_ids["bos_token"]] if begins else []
    return make_vocabulary(file, data, [*entries.values()], prefix, named)


def piece_data(pieces: list[Piece], vocab: Ids, has_space: bool) -> Json:
    """A tokenizer.json's model, normalizer and decoder. has_space: whether each text gets one.

    A piece is made of any two that it consists of, by its score."""
    normal = sorted((piece for piece in pieces if piece.kind == NORMAL), key=lambda p: -p.score)
    merges = []
    for text, *_ in normal:
        halves = [(text[:i], text[i:]) for i in range(1, len(text))]
        merges += [pair for pair in halves if vocab.keys() >= {*pair}]
    normalizers = [PREPEND, REPLACE] if has_space else [REPLACE]
    return dict(
        model=dict(vocab=vocab, merges=merges, byte_fallback=True),
        normalizer=dict(type="Sequence", normalizers=normalizers),
        decoder=dict(type="Sequence", decoders=SPACES_BACK + [STRIP] * bool(has_space)),
    )


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
