"""A small SentencePiece vocabulary, learned by the definition, in each of its files."""

import json
import random
import struct
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from checkpoint.vocabulary import SPACE
from tokenizer import Tokenizer

CORPUS = "the cat sat on the mat ; naïve café 世界 the the  cats   sat (the) aab aba baa aaab " * 2
CORPUS += "".join(random.Random(0).choices("aab ", k=300))
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LEGACY = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
# shape -> normalizer, pre_tokenizer
SHAPES: dict[str, tuple[Any, Any]] = {
    "legacy": (LEGACY, None),
    "none": (REPLACE, None),
    **{
        f"{scheme}{' cut' * split}": (
            None,
            dict(type="Metaspace", replacement=SPACE, prepend_scheme=scheme, split=split),
        )
        for scheme in ("always", "first", "never")
        for split in (False, True)
    },
}


@cache
def learned() -> list[str]:
    """Characters and merged pieces of a small corpus, the first merged first."""
    words = [list(SPACE + word) for word in CORPUS.split(" ")]
    pieces = sorted(set("".join(map("".join, words))))
    for _ in range(70):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        pieces.append("".join(pair))
        words = [scan(word, {pair: 0}) for word in words]
    return list(dict.fromkeys([*pieces, SPACE * 2, SPACE * 4]))


def scan(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """The definition: merge the pair of the lowest rank, the leftmost of equal ones, again and
    again."""
    symbols = list(symbols)
    while True:
        pairs = enumerate(zip(symbols, symbols[1:]))
        found = [(ranks[pair], i) for i, pair in pairs if pair in ranks]
        if not found:
            return symbols
        _, i = min(found)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def vocabulary() -> dict[str, int]:
    return {text: id for id, text in enumerate([*SPECIALS, *BYTES, *learned()])}


def all_ranks() -> dict[tuple[str, str], int]:
    """Every way to make a piece of two: as SentencePiece does it, by the rank of the piece."""
    pieces = learned()
    return {
        (text[:i], text[i:]): rank
        for rank, text in enumerate(pieces)
        for i in range(1, len(text))
        if text[:i] in pieces and text[i:] in pieces
    }


def tokenizer_json(shape: str = "legacy", **more: Any) -> dict[str, Any]:
    normalizer, pre_tokenizer = SHAPES[shape]
    merges = sorted(all_ranks(), key=lambda pair: all_ranks()[pair])
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if not shape.startswith(("none", "never")):
        decoders.append(STRIP)
    first = {"SpecialToken": {"id": "<s>"}}
    sequence = {"Sequence": {"id": "A"}}
    return dict(
        added_tokens=[dict(id=i, content=text, special=True) for i, text in enumerate(SPECIALS)],
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        post_processor=dict(
            type="TemplateProcessing",
            single=[first, sequence],
            special_tokens={"<s>": {"ids": [1]}},
        ),
        decoder=dict(type="Sequence", decoders=decoders),
        model=dict(
            type="BPE",
            dropout=None,
            unk_token="<unk>",
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=True,
            byte_fallback=True,
            vocab=vocabulary(),
            merges=[list(pair) for pair in merges],
        )
        | more,
    )


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def tokenizer_model(**changed: int | bytes) -> bytes:
    """SentencePiece's file. changed: fields of the trainer (t3=…) or the normalizer (n3=…)."""
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | dict.fromkeys(BYTES, 6)
    message = b""
    for id, text in enumerate(vocabulary()):
        piece = field(1, text.encode()) + field(2, float(-id)) + field(3, kinds.get(text, 1))
        message += field(1, piece)
    trainer: dict[str, Any] = {
        "t3": 2,
        "t24": 0,
        "t35": 1,
        "t40": 0,
        "t41": 1,
        "t42": 2,
        "t43": 2**64 - 1,
    }
    normalizer: dict[str, Any] = {"n1": b"identity", "n2": b"", "n3": 1, "n4": 0, "n5": 1}
    for number, names in ((2, trainer), (3, normalizer)):
        names |= {name: value for name, value in changed.items() if name in names}
        message += field(number, b"".join(field(int(n[1:]), v) for n, v in names.items()))
    return message


def load(folder: Path, content: dict[str, Any] | bytes, **config: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if isinstance(content, bytes):
        (folder / "tokenizer.model").write_bytes(content)
    else:
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def check_tokens(tok: Tokenizer, package: Core, text: str, continues: bool = False) -> list[int]:
    """They are those of the package, none is a control token, and streamed they are the text that
    they are at once, in whole characters."""
    ids = tok.encode(text)
    assert ids == package.encode(text, add_special_tokens=False).ids
    assert not {*ids} & {*tok.specials.values()}
    decoder = tok.incremental_decoder(continues)
    pieces = [decoder.feed(id) for id in ids] + [decoder.finish()]
    assert "".join(pieces) == tok.decode(ids, continues=continues)
    is_whole = all("\ufffd" not in piece for piece in pieces)
    assert is_whole or "\ufffd" in text or tok.missing_bytes
    return ids
