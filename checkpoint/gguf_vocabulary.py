"""The vocabulary of a GGUF: SentencePiece's or byte-level BPE, rewritten to a tokenizer.json.

    tokenizer.ggml.model      "llama": pieces with a score and a kind, as in a tokenizer.model
                              "gpt2": tokens in GPT-2's alphabet, and merges, as in a tokenizer.json
    tokenizer.ggml.pre        the name of the patterns that cut a text, of byte-level BPE
    tokenizer.chat_template   Jinja

The patterns themselves are not stored: `PRE_TOKENIZERS` knows them by name. They are those of the
models' own tokenizer.json; "default" is llama.cpp's, for models that its converter did not know. A
vocabulary of Llama 3 has Llama 3's patterns even if its file names none, as in files of its first
weeks. Qwen's normalizer (NFC) is not stored, either: it goes with the pattern qwen2, as in Qwen's
folders. (llama.cpp leaves it out.)

As in llama.cpp, a text ends with every token that the file names for it, or that is spelled like
one (`ENDS`). These and bos are control tokens, whatever their kind.

Not covered, and refused by name: other models and patterns; tokens after a text.
"""

from typing import Any, NamedTuple

from checkpoint.files import Json
from checkpoint.gguf import GGUF
from checkpoint.pieces import CONTROL, LLAMA3_SPLIT, Piece, index_pieces, piece_data
from checkpoint.vocabulary import BYTE_LEVEL, Vocabulary, make_vocabulary, reject
from errors import UserError

# ---- The patterns

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # a digit is a piece
TEKKEN_SPLIT = (  # Mistral Nemo's, Mistral Small's
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHINESE_AND_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CASED_LETTERS = (  # of Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, …
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


class PreTokenizer(NamedTuple):
    """How a text is cut into pieces before they are merged."""

    patterns: list[str]
    keeps_tokens: bool = False  # whether a piece that is a token stays whole (`ignore_merges`)
    begins: bool = False  # whether bos begins a prompt, if the file does not say
    normalizes: bool = False  # to Unicode's normal form C, before the patterns

    def steps(self) -> Json:
        """The `pre_tokenizer` of a tokenizer.json."""
        splits = [
            dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)
            for pattern in self.patterns
        ]
        return dict(type="Sequence", pretokenizers=[*splits, BYTE_LEVEL])


LLAMA3 = PreTokenizer([LLAMA3_SPLIT], keeps_tokens=True, begins=True)
DIGITS_THEN_GPT2 = PreTokenizer([r"\p{N}", GPT2_SPLIT])
PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3),
    "smaug-bpe": LLAMA3._replace(begins=False),
    "dbrx": PreTokenizer([LLAMA3_SPLIT]),
    "tekken": PreTokenizer([TEKKEN_SPLIT], keeps_tokens=True, begins=True),
    **dict.fromkeys(("smollm", "starcoder", "refact"), DIGITS_THEN_GPT2),
    "gpt-2": PreTokenizer([GPT2_SPLIT]),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer([QWEN2_SPLIT], normalizes=True)),
    "deepseek-coder": PreTokenizer(
        ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_AND_KOREAN, r"\p{N}"]
    ),
    "deepseek-llm": PreTokenizer(
        [
            "[\r\n]",
            rf"\s?[{CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            CHINESE_AND_KOREAN,
            r"\p{N}",
        ]
    ),
    "default": PreTokenizer([r"[\p{P}$+<=>\^~|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"]),
}
BEGIN_OF_LLAMA3 = 128000  # the id of <|begin_of_text|>

# ---- The vocabulary

ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"}
NAMES = ("bos", "eos", "eot", "eom")


def read_gguf_vocabulary(gguf: GGUF) -> Vocabulary:
    """A file's vocabulary. UserError names the file and what is not honoured."""
    try:
        model = metadata(gguf, "model")
        if metadata(gguf, "add_eos_token", False):
            reject(gguf.file, "add_eos_token is true", "supported are tokens before a text")
        readers = {"llama": read_gguf_sentencepiece, "gpt2": read_gguf_byte_level}
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


def listed(gguf: GGUF, name: str, default: list[Any] | None = None) -> list[Any]:
    """A list of the tokenizer. UserError for what is none."""
    values = metadata(gguf, name, default)
    if not isinstance(values, list):
        wrong = f"tokenizer.ggml.{name} is {values!r}; it must be a list"
        reject(gguf.file, wrong, "have the model converted again")
    return values


def token_texts(gguf: GGUF) -> list[str]:
    """The text of each token; none, if the file has no vocabulary."""
    return listed(gguf, "tokens", [])


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
    """The ids that begin a raw prompt. default: whether bos does, if the file does not say.
    UserError if it does, and the file does not say which token it is."""
    if not metadata(gguf, "add_bos_token", default):
        return []
    bos = metadata(gguf, "bos_token_id")
    if bos is None:
        wrong = "a prompt begins with bos, and no tokenizer.ggml.bos_token_id says what that is"
        reject(gguf.file, wrong, "write it (`gguf-new-metadata --special-token-by-id bos ID`)")
    return [bos]


def token_kinds(gguf: GGUF) -> list[int]:
    """The kind of each token: what the file says, but for names and ends."""
    kinds = [*listed(gguf, "token_type")]
    for id in (*named_ids(gguf).values(), *end_ids(gguf)):
        kinds[id] = CONTROL
    return kinds


def read_gguf_sentencepiece(gguf: GGUF) -> Vocabulary:
    """A vocabulary of pieces with scores."""
    columns = token_texts(gguf), listed(gguf, "scores"), token_kinds(gguf)
    pieces = [Piece(*row) for row in zip(*columns, strict=True)]
    vocab, entries = index_pieces(gguf.file, pieces)
    data = piece_data(pieces, vocab, metadata(gguf, "add_space_prefix", True))
    start = prefix(gguf, True)
    return make_vocabulary(gguf.file, data, [*entries.values()], start, named_texts(gguf))


def read_gguf_byte_level(gguf: GGUF) -> Vocabulary:
    """A vocabulary of byte-level BPE."""
    pre = pre_tokenizer(gguf)
    kinds = token_kinds(gguf)
    if not {*kinds} <= {*range(1, 6)}:
        wrong = f"its tokenizer.ggml.token_type has {sorted({*kinds})}"
        reject(gguf.file, wrong, "with gpt2, kinds are from 1 to 5")
    rows = zip(token_texts(gguf), kinds, strict=True)
    vocab, entries = index_pieces(gguf.file, [Piece(text, 0.0, kind) for text, kind in rows])
    start = prefix(gguf, pre.begins)
    model = dict(vocab=vocab, merges=listed(gguf, "merges"), ignore_merges=pre.keeps_tokens)
    data = dict(model=model, pre_tokenizer=pre.steps(), decoder=BYTE_LEVEL)
    if pre.normalizes:
        data["normalizer"] = {"type": "NFC"}
    return make_vocabulary(gguf.file, data, [*entries.values()], start, named_texts(gguf))


def pre_tokenizer(gguf: GGUF) -> PreTokenizer:
    """The one that the file names. Without a name, or with "default", a vocabulary that has Llama
    3's first control token gets Llama 3's. UserError for a name that is not known."""
    name = metadata(gguf, "pre")
    begin = token_texts(gguf)[BEGIN_OF_LLAMA3 : BEGIN_OF_LLAMA3 + 1]
    if name in (None, "default") and begin == ["<|begin_of_text|>"]:
        return LLAMA3
    if name not in PRE_TOKENIZERS:
        reject(
            gguf.file,
            f"tokenizer.ggml.pre is {name!r}, and the patterns are known of "
            f"{', '.join(PRE_TOKENIZERS)}",
            "if it has those of one, write its name (`gguf-new-metadata --pre-tokenizer NAME`)",
        )
    return PRE_TOKENIZERS[name]
