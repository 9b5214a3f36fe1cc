"""Text to tokens and back: byte-level BPE, merged by tiktoken, token for token as Hugging Face's `tokenizers` does it.

Regular expressions, one after the other, cut a text into pieces: words, numbers, runs of spaces. A piece is spelled out in UTF-8
bytes; then, again and again, of all neighbours the pair that stands first in a list of merges becomes one token (Sennrich et al.
2016; bytes as the alphabet: Radford et al. 2019). vocabulary.py reads that list.

Invariants:
- `encode` never yields a control token, whatever the text (`tokenizers` does, unless told to split special tokens), and in
  `chat` nothing in a message becomes one: no control token of a rendered template can begin inside a message.
- decode(encode(text)) == text if the vocabulary has all 256 bytes. A byte that it lacks (`missing_bytes`) is dropped from its
  piece before merging, as in `tokenizers`. A lone surrogate, which UTF-8 cannot hold, is read as U+FFFD.
- What a stream yields is whole characters, and joined it is what `decode` says.

A template is a stranger's program. It runs in jinja2's sandbox, which keeps it from everything but its arguments, and
within limits of time, memory and output (`bounded`, `Sandbox`).

Costs: encoding is linear in the text; each piece is merged in tiktoken's compiled code. A stream holds back three bytes at most.

Not covered: `clean_up_tokenization_spaces`, which makes decoding lossy. A template that rewrites messages (cuts out their middle,
changes their case) could still assemble a control token; one that trims, repeats or compares them cannot.
A template that compares two lists, each of which holds another twice, and so on, takes time that
nobody counts; without Linux nobody counts memory, either.
"""
from __future__ import annotations

import codecs
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vocabulary import Vocabulary, brief, read_json, read_ranks, read_text, read_tokenizer_json, refuse

TEMPLATE = 2**17            # characters that a chat template may have; those in use have some thousands
TIME = 10.0                 # seconds that it may take for a conversation,
MEMORY = 2**28              # bytes, on top of what is taken,
OUTPUT = 2**20              # and characters that it may make beyond four times the conversation's


def clean(text: str) -> str:
    """`text` with U+FFFD for each surrogate: from here on, surrogates are free to stand for something else."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the first place where any of `texts` begins, and the longest that does; nothing if there are none."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'})")


def bounded(run: Callable[[], str]) -> str:
    """Run foreign code, but end what takes too long, at its next line of Python: TimeoutError; on Linux also what takes
    too much memory: MemoryError."""
    end, outer = time.monotonic() + TIME, sys.gettrace()

    def look(frame: Any, event: str, arg: Any) -> Any:
        return look if time.monotonic() < end else late()

    def late() -> NoReturn:
        raise TimeoutError(f"it takes more than {TIME:g} s")
    taken = Path("/proc/self/statm")                    # first, in pages, this process's addresses: they are limited
    resource = importlib.import_module("resource") if taken.exists() else None
    if resource is not None:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        most = int(taken.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most if limits[0] < 0 else min(most, limits[0]), limits[1]))
    sys.settrace(look)
    try:
        return run()
    except MemoryError:
        raise MemoryError(f"it takes more than {MEMORY >> 20} MiB") from None
    finally:
        sys.settrace(outer)
        if resource is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's, without what takes one line, but any time; nothing of a template is computed while it is compiled."""
    intercepted_binops = frozenset(("*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], optimized=False,
                         finalize=jinja2.pass_context(lambda context, value: value))
        del self.filters["round"], self.tests["divisibleby"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if any(isinstance(n, int) and abs(n) > 2**31 for n in (left, right)) or (operator == "**" and abs(right) > 64):
            raise OverflowError(f"numbers too large for {operator}")
        return super().call_binop(context, operator, left, right)


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
        if strange := [id for id in vocabulary.prefix if id not in vocabulary.tokens]:
            refuse(file, f"a prompt is to begin with the tokens {strange}", "they must be in the vocabulary")
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
        if template is not None and (not isinstance(template, str) or len(template) > TEMPLATE):
            refuse(file, f"beside it, the chat template is {template!r}",
                   f"it must be a text of at most {TEMPLATE} characters")
        self.chat_template = template and clean(template)
        # Until a template is rendered, a surrogate stands for each character of a message at which a control token begins.
        self._stand_in = {c: chr(0xD800 + n) for n, c in enumerate(sorted({text[0] for text in self.specials}))}
        if len(self._stand_in) > 2**11:
            refuse(file, f"its control tokens begin with {len(self._stand_in)} different characters",
                   "at most 2048 are supported")
        self._restore = {ord(surrogate): c for c, surrogate in self._stand_in.items()}
        self._beginnings = {text[:n] for text in self.specials for n in range(1, len(text))}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json, or else tokenizer.model, and what stands beside it: tokenizer_config.json, chat_template.jinja."""
        folder = Path(folder)
        files = [folder / name for name in ("tokenizer.json", "tokenizer.model")]
        file = next(filter(os.path.lexists, files), None)
        if file is None:
            raise FileNotFoundError(f"{folder}: there is no tokenizer.json or tokenizer.model; name the folder of a model")
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json(config_file) if os.path.lexists(config_file) else {}
        try:
            template = read_text(template_file) if os.path.lexists(template_file) else config.get("chat_template")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            return cls(file, read_tokenizer_json(file) if file.suffix == ".json" else read_ranks(file, config), config, template)
        except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            if str(error).startswith(str(folder)):
                raise
            refuse(file, f"it, or what stands beside it, is not laid out as it should be ({error!r})", "download them again")

    def difference(self, other: Tokenizer) -> str | None:
        """The first token that does not mean the same in both vocabularies, in words; None if all do."""
        mine, its = self._vocabulary.tokens, other._vocabulary.tokens
        id = next((id for id in sorted(mine.keys() | its.keys()) if mine.get(id) != its.get(id)), None)
        return None if id is None else f"token {id} is {mine.get(id)} in one and {its.get(id)} in the other"

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is nothing but text: what looks like a control token is spelled out."""
        ids: list[int] = []
        for n, part in enumerate(any_of(self._vocabulary.plain).split(clean(text))):
            ids += [self._vocabulary.plain[part]] if n % 2 else self._merge(part)
        return ids

    def _merge(self, text: str) -> list[int]:
        pieces, ids, missing = [text], [], bytes(self.missing_bytes)
        for split in self._vocabulary.splits:
            pieces = [part for piece in pieces for part in split(piece) if part]
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
            template, size = self._template, sum(len(text) for message in messages for text in message.values())
            text = bounded(lambda: template.render(messages=messages, tools=None, documents=None,
                                                   add_generation_prompt=add_generation_prompt, **self._named))
            if len(text) > OUTPUT + 4 * size:
                raise ValueError(f"it makes {len(text)} characters of {size}")
            return text
        except Exception as error:                  # a template is foreign code: whatever it raises is what it says
            told = brief(str(error)[:10_000].translate(self._restore))
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

        sandbox = Sandbox()
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
