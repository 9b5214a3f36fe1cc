"""The vocabulary of a GGUF: SentencePiece's or byte-level BPE, from its metadata.

    tokenizer.ggml.model      "llama": pieces with a score and a kind, as in a tokenizer.model
                              "gpt2": tokens in GPT-2's alphabet, and merges, as in a tokenizer.json
    tokenizer.ggml.pre        the name of the patterns that cut a text, of byte-level BPE
    tokenizer.chat_template   Jinja

The patterns themselves are not stored: `PATTERNS` knows them by name.

Not covered, and refused by name: other models and patterns; tokens after a text.
"""

from typing import Any

from checkpoint.bytelevel import GPT2_SPLIT, compile_split, make_byte_level
from checkpoint.gguf import GGUF
from checkpoint.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    Piece,
    Space,
    vocabulary_of_pieces,
)
from checkpoint.vocabulary import Vocabulary, read_added, reject
from errors import UserError

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), [LLAMA3_SPLIT]),
    **dict.fromkeys(("smollm", "starcoder", "refact"), [r"\p{N}", GPT2_SPLIT]),
    "gpt-2": [GPT2_SPLIT],
}
NAMES = ("bos", "eos", "unknown", "padding")


def read_gguf_vocabulary(gguf: GGUF) -> Vocabulary:
    """UserError names the file and what is not honoured."""
    try:
        model = metadata(gguf, "model")
        if metadata(gguf, "add_eos_token", False):
            reject(gguf.file, "add_eos_token is true", "supported are tokens before a text")
        readers = {"llama": read_pieces, "gpt2": read_merges_of_bytes}
        if model not in readers:
            wrong = f"tokenizer.ggml.model is {model!r}"
            reject(gguf.file, wrong, "supported are llama (SentencePiece) and gpt2 (bytes)")
        return readers[model](gguf)
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reject(gguf.file, f"its tokenizer is not as it should be ({error!r})", "fetch it again")


def metadata(gguf: GGUF, name: str, *default: Any) -> Any:
    """A setting of the tokenizer. KeyError if there is none, and no default."""
    key = f"tokenizer.ggml.{name}"
    return gguf.metadata.get(key, *default) if default else gguf.metadata[key]


def named_ids(gguf: GGUF) -> dict[str, int]:
    """ "bos_token", … -> id, of those that the file names."""
    ids = {f"{name}_token": metadata(gguf, f"{name}_token_id", None) for name in NAMES}
    return {name: id for name, id in ids.items() if id is not None}


def named_texts(gguf: GGUF, tokens: list[str]) -> dict[str, str]:
    """ "bos_token", … -> text, for chat templates."""
    short = {"unknown_token": "unk_token", "padding_token": "pad_token"}
    return {short.get(name, name): tokens[id] for name, id in named_ids(gguf).items()}


def prefix(gguf: GGUF, default: bool) -> list[int]:
    """The ids that begin a raw prompt."""
    begins = metadata(gguf, "add_bos_token", default)
    return [metadata(gguf, "bos_token_id")] if begins else []


def read_pieces(gguf: GGUF) -> Vocabulary:
    """SentencePiece's."""
    tokens = metadata(gguf, "tokens")
    columns = tokens, metadata(gguf, "scores"), metadata(gguf, "token_type")
    pieces = [Piece(*row) for row in zip(*columns, strict=True)]
    has_space = metadata(gguf, "add_space_prefix", True)
    space = Space("each", True) if has_space else Space("none", False)
    named = named_texts(gguf, tokens)
    return vocabulary_of_pieces(gguf.file, pieces, [], space, prefix(gguf, True), named)


def read_merges_of_bytes(gguf: GGUF) -> Vocabulary:
    """Byte-level BPE's."""
    tokens = metadata(gguf, "tokens")
    kinds = metadata(gguf, "token_type")
    pattern = metadata(gguf, "pre", None)
    if pattern not in PATTERNS:
        wrong = f"tokenizer.ggml.pre is {pattern!r}"
        reject(gguf.file, wrong, f"the patterns are known of {', '.join(PATTERNS)}")
    vocab = {}
    entries = []
    for id, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == NORMAL:
            vocab[text] = id
        elif kind != UNUSED:  # padding
            is_special = kind in (CONTROL, UNKNOWN)
            entries.append({"content": text, "id": id, "special": is_special})
    is_llama3 = PATTERNS[pattern] == [LLAMA3_SPLIT]
    return make_byte_level(
        gguf.file,
        vocab,
        metadata(gguf, "merges"),
        read_added(gguf.file, entries, vocab),
        [compile_split(gguf.file, split) for split in PATTERNS[pattern]],
        is_llama3,
        prefix(gguf, is_llama3),
        named_texts(gguf, tokens),
    )
