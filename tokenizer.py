"""Text to tokens and back: byte-level BPE, merged by tiktoken, token for token as Hugging Face's `tokenizers` does it.

The idea. Regular expressions, one after the other, cut a text into pieces: words, numbers, runs of spaces. A piece is spelled
out in UTF-8 bytes; then, again and again, of all neighbours the pair that stands first in a list of merges becomes one token.
tiktoken knows no pairs: it joins the neighbours whose *bytes* are the token of lowest rank. The two agree exactly when
    rank(token) = number of the merge that completes the token when it is spelled out and merged alone
and tokens that are never completed so have no rank. For as long as nothing merges across its ends, a stretch of bytes evolves
within a text as it does alone; so wherever a pair spells a token, merging has come by that token's own way.

Invariants.
- `encode` never yields a control token, whatever the text (`tokenizers` does, unless told to split special tokens), and in
  `chat` nothing in a message becomes one: no control token of a rendered template can begin inside a message.
- decode(encode(text)) == text if the vocabulary has all 256 bytes. A byte that it lacks (`missing_bytes`) is dropped from its
  piece before merging, as in `tokenizers`. A lone surrogate, which UTF-8 cannot hold, is read as U+FFFD.
- What a stream yields is whole characters, and joined it is what `decode` says.

Costs. Loading merges every token of the vocabulary alone, once, to find its rank. Encoding is linear in the text; each piece is
merged by tiktoken, in compiled code. A stream holds at most three bytes back.

Not covered, and refused by name: SentencePiece, Unigram, WordPiece; normalizers; byte fallback; added tokens that swallow
spaces. `clean_up_tokenization_spaces` is not done: it makes decoding lossy. A template that rewrites messages (cuts out their
middle, changes their case) could still assemble a control token; one that trims, repeats or compares them cannot. `Digits` in
tokenizers 0.23 knows 13 digits, new in Unicode 17, that tiktoken's tables do not.

Sources: Sennrich et al. 2016 (arXiv:1508.07909) for BPE; Radford et al. 2019 (GPT-2) for bytes as its alphabet.
"""
from __future__ import annotations

import base64
import codecs
import json
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from functools import cache, cached_property
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2_SPLIT = CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (f"(?i:{CONTRACTIONS})" r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_CONTROLS = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}


class Vocabulary(NamedTuple):
    """What a tokenizer file says, checked."""
    tokens: dict[int, bytes]    # every id -> what it decodes to
    merged: dict[bytes, int]    # what merging can make -> its id, in the order of merging: tiktoken's rank is the place in here
    whole: dict[bytes, int]     # pieces that are one token before any merging (`ignore_merges`)
    special: dict[str, int]     # added tokens: the control tokens,
    plain: dict[str, int]       # and those that are matched in any text, before it is split
    splits: list[re.Pattern[str]]
    prefix: list[int]           # what a raw prompt starts with


def refuse(file: Path, wrong: str, way_out: str) -> NoReturn:
    raise ValueError(f"{file}: {wrong}; {way_out}")


def clean(text: str) -> str:
    """`text` with U+FFFD for each surrogate: from here on, surrogates are free to stand for something else."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the first place where any of `texts` begins, and the longest that does; nothing if there are none."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'})")


# ---- Splitting -------------------------------------------------------------------------------------------------------

@cache
def members(character_class: str) -> str:
    r"""The ranges of a class such as \p{L}, to stand within the [...] of Python's `re`.

    Python's edition of Unicode varies with its version; that of tiktoken and `tokenizers` is the same. So tiktoken is asked: it
    encodes what its pattern matches and skips the rest, so out of every character there is come the members.
    """
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    spell = {bytes([byte]): byte for byte in range(256)}
    asked = tiktoken.Encoding("bytes", pat_str=character_class, mergeable_ranks=spell, special_tokens={})
    inside = set(map(ord, bytes(asked.encode_ordinary(everything)).decode()))
    first, last = sorted(c for c in inside if c - 1 not in inside), sorted(c for c in inside if c + 1 not in inside)
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in zip(first, last))


def compile_split(file: Path, pattern: str) -> re.Pattern[str]:
    """`pattern`, in the dialect of `tokenizers`, for `re.split`: classes spelled out, what would mean something else refused."""
    out, within = [], False
    for item in re.findall(r"\\[pP]\{\w+\}|\\.|\(\?|&&|\}\+|.", pattern, re.DOTALL):
        if re.match(r"\\[sSpP]", item):
            negated = "^" if item[1].isupper() else ""
            item = members(item) if within else f"[{negated}{members(item[:2].lower() + item[2:])}]"
        elif re.fullmatch(r"\\[^\Wnrt]|&&|\}\+", item) or item in (["["] if within else ["(", "^", "$"]):
            refuse(file, f"the split pattern {pattern!r} uses {item!r}", r"supported are (?..), [..], \p{..}, \s, \r, \n and \t")
        within = item != "]" and (within or item == "[")
        out.append(item)
    try:
        return re.compile(f"({''.join(out)})")
    except (re.error, OverflowError) as error:
        refuse(file, f"the split pattern {pattern!r} does not compile ({error})", "use a tokenizer with a simpler one")


def read_splits(file: Path, node: dict[str, Any]) -> list[re.Pattern[str]]:
    """The regular expressions of a `pre_tokenizer`, in order."""
    steps = node["pretokenizers"] if node["type"] == "Sequence" else [node]
    out = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
                out.append(regex)
            case {"type": "Digits", "individual_digits": bool(each)}:
                out.append(r"\p{N}" if each else r"\p{N}+")
            case {"type": "ByteLevel", "add_prefix_space": False} if step is steps[-1]:
                return [compile_split(file, regex) for regex in out + [GPT2_SPLIT] * step.get("use_regex", True)]
            case _:
                refuse(file, f"the pre_tokenizer asks for {json.dumps(step)}",
                       "supported are Split (a Regex, Isolated), Digits, and at the end ByteLevel without a prefix space")
    refuse(file, "the pre_tokenizer does not end in ByteLevel", "only byte-level BPE is supported")


# ---- Reading the files -----------------------------------------------------------------------------------------------

def read_json(file: Path) -> dict[str, Any]:
    def no(wrong: str) -> NoReturn:
        raise ValueError(wrong)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        return found if len(found) == len(pairs) else no(f"a key stands twice among {list(found)[:3]}...")

    try:
        data = json.loads(file.read_text("utf-8"), object_pairs_hook=unique, parse_constant=no)
        return data if isinstance(data, dict) else no("it holds no object")
    except (ValueError, RecursionError) as error:
        refuse(file, f"is not valid JSON: {error}", "download it again")


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


def spell_out(file: Path, vocab: dict[str, int], added: dict[str, int]) -> dict[str, bytes]:
    """The bytes of each entry. In JSON a byte is a character: printable Latin-1 is itself, U+0100 and up are the 68 others."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    alphabet = {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    spelled = {}
    for text in vocab:
        try:
            spelled[text] = bytes(map(alphabet.__getitem__, text))
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


def read_tokenizer_json(file: Path) -> Vocabulary:
    data = read_json(file)
    check_supported(file, data)
    model, vocab = data["model"], data["model"]["vocab"]
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
    for n, line in enumerate(file.read_bytes().splitlines()):
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
    special, plain = read_added(file, [entry | {"id": int(id)} for id, entry in entries.items()], {})
    if len(merged) != (start := min((special | plain).values())):
        refuse(file, f"holds {len(merged)} tokens, but the added ones begin at {start}", "is it whole, and its tokenizer_config.json there?")
    tokens = {id: word for word, id in merged.items()} | {id: text.encode() for text, id in (special | plain).items()}
    prefix = [special[LLAMA3_CONTROLS[0]]] if config.get("add_bos_token", True) else []
    return Vocabulary(tokens, merged, {}, special, plain, [compile_split(file, LLAMA3_SPLIT)], prefix)


# ---- The tokenizer ---------------------------------------------------------------------------------------------------

class Stream:
    """Tokens in, whole characters out: bytes that end within a character wait for the next token, or for `finish`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer._visible(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """`bos` is the token for the beginning of a text; whether a raw prompt starts with it is for `prompt` to say."""

    def __init__(self, file: Path, vocabulary: Vocabulary, config: dict[str, Any], template: str | None) -> None:
        self._file, self._vocabulary, self.specials = file, vocabulary, vocabulary.special
        self._hidden, self._ids = set(self.specials.values()), list(vocabulary.merged.values())
        ranks = {word: rank for rank, word in enumerate(vocabulary.merged)}
        self._bpe = tiktoken.Encoding("bpe", pat_str=".", mergeable_ranks=ranks, special_tokens={})
        self.missing_bytes = frozenset(byte for byte in range(256) if bytes([byte]) not in ranks)
        self.vocab_size = max(vocabulary.tokens) + 1
        named = {name: text["content"] if isinstance(text, dict) else text for name, text in config.items() if name.endswith("_token")}
        self._named = {name: text for name, text in named.items() if isinstance(text, str)}
        for name in self._named.keys() & {"bos_token", "eos_token"}:
            if self._named[name] not in self.specials:
                refuse(file, f"{name} is {self._named[name]!r} in tokenizer_config.json", "it must be one of the special added tokens")
        bos = self._named.get("bos_token")
        self.bos = self.specials[bos] if bos else next(iter(vocabulary.prefix), None)
        self.chat_template = template and clean(template)
        # Until a template is rendered, a surrogate stands for each character of a message at which a control token begins.
        self._stand_in = {c: chr(0xD800 + n) for n, c in enumerate(sorted({text[0] for text in self.specials}))}
        self._restore = {ord(surrogate): c for c, surrogate in self._stand_in.items()}
        self._beginnings = {text[:n] for text in self.specials for n in range(1, len(text))}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json, or else tokenizer.model, and what stands beside it: tokenizer_config.json, chat_template.jinja."""
        folder = Path(folder)
        file = next((file for name in ("tokenizer.json", "tokenizer.model") if (file := folder / name).exists()), None)
        if file is None:
            raise FileNotFoundError(f"{folder}: there is no tokenizer.json or tokenizer.model; name the folder of a model")
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json(config_file) if config_file.exists() else {}
        try:
            template = template_file.read_text("utf-8") if template_file.exists() else config.get("chat_template")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            return cls(file, read_tokenizer_json(file) if file.suffix == ".json" else read_ranks(file, config), config, template)
        except (AttributeError, IndexError, KeyError, TypeError, UnicodeError) as error:
            refuse(file, f"it, or what stands beside it, is not laid out as it should be ({error!r})", "download them again")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is nothing but text: what looks like a control token is spelled out."""
        ids: list[int] = []
        for n, part in enumerate(any_of(self._vocabulary.plain).split(clean(text))):
            ids += [self._vocabulary.plain[part]] if n % 2 else self._merge(part)
        return ids

    def _merge(self, text: str) -> list[int]:
        pieces, ids, missing = [text], [], bytes(self.missing_bytes)
        for split in self._vocabulary.splits:
            pieces = [part for piece in pieces for part in split.split(piece) if part]
        for piece in pieces:
            word = piece.encode()
            if word in self._vocabulary.whole:
                ids.append(self._vocabulary.whole[word])
            elif word := word.translate(None, missing):     # tiktoken panics on a byte it does not know, and on none at all
                ids += [self._ids[rank] for rank in self._bpe._encode_single_piece(word)]
        return ids

    def prompt(self, text: str) -> list[int]:
        """A text for the model to continue, begun as its tokenizer begins a text."""
        return self._vocabulary.prefix + self.encode(text)

    def token_bytes(self, id: int) -> bytes:
        if (word := self._vocabulary.tokens.get(index(id))) is None:
            raise ValueError(f"{self._file}: there is no token {index(id)}; ids are below {self.vocab_size}, and some of them unused")
        return word

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of some tokens, control tokens left out unless `special`, with U+FFFD for what is no UTF-8."""
        return b"".join(map(self.token_bytes if special else self._visible, ids)).decode(errors="replace")

    def _visible(self, id: int) -> bytes:
        return b"" if index(id) in self._hidden else self.token_bytes(id)

    def stream(self) -> Stream:
        return Stream(self)

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation, [{"role": .., "content": ..}, ..], laid out by the model's own template.

        What the template and the messages put between two control tokens is encoded in one go, as plain text.
        """
        ids: list[int] = []
        for n, part in enumerate(any_of(self.specials).split(self._render(messages, add_generation_prompt))):
            ids += [self.specials[part]] if n % 2 else self.encode(part.translate(self._restore))
        return ids

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if self.chat_template is None:
            raise ValueError(f"{self._file.parent}: there is no chat template; add chat_template.jinja, or continue plain text")
        for n, message in enumerate(messages):
            if not isinstance(message, dict) or sorted(message) != ["content", "role"] or {*map(type, message.values())} != {str}:
                raise ValueError(f"message {n} is {message!r}; it must hold a role and a content, both text, and nothing else")
        messages = [{key: self._inert(text) for key, text in message.items()} for message in messages]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._named)
        except Exception as error:                  # a template is foreign code: whatever it raises is what it says
            told = " ".join(str(error).translate(self._restore).split())
            raise ValueError(f"{self._file.parent}: the chat template fails on this conversation: {told}") from error

    def _inert(self, text: str) -> str:
        """A message in which, until its stand-ins are restored, no control token begins, nor would if more text followed."""
        text, controls = clean(text), tuple(self.specials)
        end, longest = len(text.rstrip()), max(map(len, controls), default=0)

        def stand_in(match: re.Match[str]) -> str:
            i, c = match.start(), match.group()
            begins = text.startswith(controls, i) or (end - i < longest and text[i:end] in self._beginnings)
            return self._stand_in[c] if begins else c
        return any_of(self._stand_in).sub(stand_in, text)

    @cached_property
    def _template(self) -> jinja2.Template:
        """The chat template, compiled in jinja2's sandbox, with what transformers offers its templates."""
        def raise_exception(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        sandbox.filters["tojson"] = tojson
        sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
        return sandbox.from_string(self.chat_template)


# ---- The demonstration -----------------------------------------------------------------------------------------------

def main(arguments: list[str]) -> int:
    """Shows the tokens of a text, and that a control token written by a user stays text."""
    folder = Path(arguments[0] if arguments else Path(__file__).parent / "models" / "tiny")
    try:
        tok = Tokenizer.load(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder.name}: ids below {tok.vocab_size}, {len(tok.specials)} of them control tokens: {', '.join(list(tok.specials)[:4])}")
    control = next(iter(tok.specials), "<|none|>")
    for text in ("Once upon a time, there was a dragon named Zog.", "Größe 😀 12345", f"What a user writes: {control}"):
        ids = tok.encode(text)
        print("\n" + "|".join(tok.token_bytes(id).decode(errors="replace") for id in ids))
        stream = tok.stream()
        shown = [stream.feed(id) for id in ids] + [stream.finish()]
        print(f"  {len(ids)} tokens for {len(text.encode())} bytes; back again: {tok.decode(ids) == text}; "
              f"streamed in whole characters: {''.join(shown) == text}; control tokens: {len(set(ids) & set(tok.specials.values()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
