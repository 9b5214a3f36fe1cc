"""The vocabulary of a GGUF: SentencePiece's or byte-level BPE, from its metadata.

    tokenizer.ggml.model      "llama": pieces with a score and a kind, as in a tokenizer.model
                              "gpt2": tokens in GPT-2's alphabet, and merges, as in a tokenizer.json
    tokenizer.ggml.pre        the name of the patterns that cut a text, of byte-level BPE
    tokenizer.chat_template   Jinja

The patterns themselves are not stored: `PATTERNS` knows them by name. Neither is Qwen's normalizer
(NFC): it goes with the pattern qwen2, as in Qwen's folders. (llama.cpp leaves it out.)

As in llama.cpp, a text ends with every token that the file names for it, or that is spelled like
one (`ENDS`). These and bos are control tokens, whatever their kind.

Not covered, and refused by name: other models and patterns; tokens after a text.
"""

from typing import Any

from checkpoint.bytelevel import (
    GPT2_SPLIT,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    compile_split,
    make_byte_level,
    normal_form,
)
from checkpoint.gguf import GGUF
from checkpoint.sentencepiece import (
    CONTROL,
    Piece,
    Space,
    index_pieces,
    vocabulary_of_pieces,
)
from checkpoint.vocabulary import TokenTexts, Vocabulary, reject
from errors import UserError

LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
PATTERNS = {
    **dict.fromkeys(LLAMA3, [LLAMA3_SPLIT]),
    **dict.fromkeys(("smollm", "starcoder", "refact"), [r"\p{N}", GPT2_SPLIT]),
    "gpt-2": [GPT2_SPLIT],
    "qwen2": [QWEN2_SPLIT],
}
ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"}
NAMES = ("bos", "eos", "eot", "eom")


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


def metadata(gguf: GGUF, name: str, default: Any = None) -> Any:
    """A setting of the tokenizer."""
    return gguf.metadata.get(f"tokenizer.ggml.{name}", default)


def token_texts(gguf: GGUF) -> list[str]:
    """The text of each token; none, if the file has no vocabulary."""
    tokens = metadata(gguf, "tokens", [])
    if not isinstance(tokens, list):
        reject(gguf.file, f"tokenizer.ggml.tokens is {tokens!r}", "it must be a list of texts")
    return tokens


def named_ids(gguf: GGUF) -> dict[str, int]:
    """ "bos", … -> id, of those that the file names. UserError for an id that no token has."""
    num_tokens = len(token_texts(gguf))
    ids = {}
    for name in NAMES:
        id = metadata(gguf, f"{name}_token_id")
        if id in range(num_tokens):
            ids[name] = id
        elif id is not None:
            wrong = f"tokenizer.ggml.{name}_token_id is {id!r}"
            reject(gguf.file, wrong, f"it must be a token, below {num_tokens}")
    return ids


def end_ids(gguf: GGUF) -> list[int]:
    """The tokens that end a text."""
    named = [id for name, id in named_ids(gguf).items() if name != "bos"]
    spelled = [id for id, text in enumerate(token_texts(gguf)) if text in ENDS]
    return sorted({*named, *spelled})


def named_texts(gguf: GGUF) -> dict[str, str]:
    """ "bos_token", … -> text, for chat templates."""
    tokens = token_texts(gguf)
    return {f"{name}_token": tokens[id] for name, id in named_ids(gguf).items()}


def prefix(gguf: GGUF, default: bool) -> list[int]:
    """The ids that begin a raw prompt."""
    begins = metadata(gguf, "add_bos_token", default)
    return [metadata(gguf, "bos_token_id")] if begins else []


def token_kinds(gguf: GGUF) -> list[int]:
    """The kind of each token."""
    kinds = [*metadata(gguf, "token_type")]
    for id in (*named_ids(gguf).values(), *end_ids(gguf)):
        kinds[id] = CONTROL
    return kinds


def read_pieces(gguf: GGUF) -> Vocabulary:
    """SentencePiece's."""
    columns = token_texts(gguf), metadata(gguf, "scores"), token_kinds(gguf)
    pieces = [Piece(*row) for row in zip(*columns, strict=True)]
    has_space = metadata(gguf, "add_space_prefix", True)
    space = Space("always", True) if has_space else Space("never", False)
    start = prefix(gguf, True)
    return vocabulary_of_pieces(gguf.file, pieces, [], space, start, named_texts(gguf))


def read_merges_of_bytes(gguf: GGUF) -> Vocabulary:
    """Byte-level BPE's."""
    pattern = metadata(gguf, "pre")
    if pattern not in PATTERNS:
        wrong = f"tokenizer.ggml.pre is {pattern!r}"
        reject(gguf.file, wrong, f"the patterns are known of {', '.join(PATTERNS)}")
    kinds = token_kinds(gguf)
    if not {*kinds} <= {*range(1, 6)}:
        wrong = f"its tokenizer.ggml.token_type has {sorted({*kinds})}"
        reject(gguf.file, wrong, "with gpt2, kinds are from 1 to 5")
    rows = zip(token_texts(gguf), kinds, strict=True)
    vocab, entries = index_pieces(gguf.file, [Piece(text, 0.0, kind) for text, kind in rows])
    start = prefix(gguf, pattern in LLAMA3)
    splits = [compile_split(gguf.file, split) for split in PATTERNS[pattern]]
    if pattern == "qwen2":
        splits.insert(0, normal_form(gguf.file))
    return make_byte_level(
        TokenTexts.of(gguf.file, vocab, [*entries.values()], start, named_texts(gguf)),
        metadata(gguf, "merges"),
        splits,
        pattern in LLAMA3,
    )
