"""Text to tokens and back: byte-level BPE, merged by tiktoken, token for token as Hugging Face's `tokenizers` does it.

Regular expressions, one after the other, cut a text into pieces: words, numbers, runs of spaces. A piece is spelled out
in UTF-8 bytes; then, again and again, the pair of neighbours that comes first in a list of merges (vocabulary.py)
becomes one token (Sennrich et al. 2016; bytes as the alphabet: Radford et al. 2019). Cost: linear in the text.

Invariants: `encode` never yields a control token; in `chat`, no control token of a rendered template begins inside a
message. decode(encode(text)) == text if the vocabulary has all 256 bytes; a byte that it lacks is dropped before
merging, as in `tokenizers`, and a lone surrogate becomes U+FFFD. Streamed text, joined, equals decoded text.

A chat template is untrusted code: it runs in a sandbox, with limits on time, memory (on Linux) and output. Not covered:
the time limit does not stop a comparison of nested lists; a template that rewrites messages (cuts out their middle,
changes their case) could assemble a control token, while trimming and repeating cannot; `clean_up_tokenization_spaces`.
"""

import codecs
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.files import read_json, read_text
from checkpoint.vocabulary import Vocabulary, read_ranks, read_tokenizer_json, reject
from errors import UserError, brief

TEMPLATE = 2**17  # the most characters of a chat template; a few thousand are usual
TIME = 10.0  # limits of rendering a conversation: seconds,
MEMORY = 2**28  # bytes on top of those in use,
OUTPUT = 2**20  # and characters beyond four times the conversation's


def clean(text: str) -> str:
    """`text` with U+FFFD for each surrogate: after this, a surrogate can serve as a stand-in (`Tokenizer._inert`)."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def cut(text: str, added: dict[str, int], encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of a text: the ids of `added` tokens in it, longest first, and `encode` of the text between them."""
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)"
    parts = enumerate(re.split(f"({pattern})", text))
    return [id for n, part in parts for id in ([added[part]] if n % 2 else encode(part))]


def bounded(run: Callable[[], str]) -> str:
    """Run foreign code: TimeoutError at its next line of Python after TIME; on Linux, MemoryError beyond MEMORY."""

    def look(frame: Any, event: str, arg: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError
        return look

    end, outer, used = time.monotonic() + TIME, sys.gettrace(), Path("/proc/self/statm")
    if limited := used.exists():
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = (
            int(used.read_text().split()[0]) * resource.getpagesize() + MEMORY
        )  # first: pages of addresses
        resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(most, soft), hard))
    sys.settrace(look)
    try:
        return run()
    finally:
        sys.settrace(outer)  # first: the lines below must not be interrupted
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the additions of transformers, without features that can hang in one line or run early."""

    intercepted_binops = frozenset(("*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=jinja2.pass_context(lambda context, value: value),
        )
        del self.filters["round"], self.tests["divisibleby"]
        self.filters["tojson"] = lambda x, ensure_ascii=False, **how: json.dumps(
            x, ensure_ascii=ensure_ascii, **how
        )
        self.globals |= dict(
            raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
        )

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if any(isinstance(n, int) and abs(n) > 2**31 for n in (left, right)) or (
            operator == "**" and abs(right) > 64
        ):
            raise OverflowError(f"numbers too large for {operator}")
        return super().call_binop(context, operator, left, right)


class Stream(NamedTuple):
    """Tokens in, whole characters out: up to three bytes of a character wait for the next token, or for `finish`."""

    feed: Callable[[int], str]
    finish: Callable[[], str]


class Tokenizer:
    """`bos` is the token that begins a text; whether a raw prompt begins with it, `prompt` decides by the files."""

    def __init__(
        self, file: Path, vocabulary: Vocabulary, config: dict[str, Any], template: str | None
    ) -> None:
        if not vocabulary.tokens.keys() >= {*vocabulary.prefix}:
            reject(
                file,
                f"a prompt is to begin with the tokens {vocabulary.prefix}",
                "they must be in the vocabulary",
            )
        self._file, self._vocabulary, self.specials = file, vocabulary, vocabulary.special
        self._hidden, self._ids = set(self.specials.values()), list(vocabulary.merged.values())
        ranks = {word: rank for rank, word in enumerate(vocabulary.merged)}
        self._bpe = tiktoken.Encoding("bpe", pat_str=".", mergeable_ranks=ranks, special_tokens={})
        self.missing_bytes = frozenset(byte for byte in range(256) if bytes([byte]) not in ranks)
        self.vocab_size = max(vocabulary.tokens) + 1
        self._named = {
            name: text
            for name, value in config.items()
            if name.endswith("_token")
            and isinstance(text := value["content"] if isinstance(value, dict) else value, str)
        }
        ends = {
            name: self._named[name] for name in ("bos_token", "eos_token") if name in self._named
        }
        if not {*ends.values()} <= self.specials.keys():
            reject(file, f"tokenizer_config.json says {ends}", "these must be special added tokens")
        self.bos = self.specials.get(
            self._named.get("bos_token", ""), next(iter(vocabulary.prefix), None)
        )
        if template is not None and (not isinstance(template, str) or len(template) > TEMPLATE):
            reject(
                file,
                f"its chat template is {template!r}",
                f"it must be a text of at most {TEMPLATE} characters",
            )
        self.chat_template, self._template = (
            template and clean(template),
            None,
        )  # compiled when it is used
        # While a template is rendered, a surrogate stands for each character in a message that begins a control token.
        self._stand_in = {
            c: chr(0xD800 + n) for n, c in enumerate(sorted({text[0] for text in self.specials}))
        }
        if (count := len(self._stand_in)) > 2**11:
            reject(
                file,
                f"its control tokens begin with {count} different characters",
                "at most 2048 are supported",
            )
        self._restore = {ord(surrogate): c for c, surrogate in self._stand_in.items()}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """From a folder's tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja."""
        merges, *others = (
            Path(folder) / name
            for name in (
                "tokenizer.json",
                "tokenizer.model",
                "tokenizer_config.json",
                "chat_template.jinja",
            )
        )
        ranks, settings, jinja = (file if os.path.lexists(file) else None for file in others)
        file = ranks if ranks and not os.path.lexists(merges) else merges
        config = read_json(settings) if settings else {}
        try:
            template = read_text(jinja) if jinja else config.get("chat_template")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            return cls(
                file,
                read_ranks(file, config) if file == ranks else read_tokenizer_json(file),
                config,
                template,
            )
        except (
            AttributeError,
            IndexError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            if str(error).startswith(str(file.parent)):
                raise
            reject(
                file,
                f"it, or a file beside it, is not laid out as it should be ({error!r})",
                "download them again",
            )

    def difference(self, other: "Tokenizer") -> str | None:
        """The first token that differs between both vocabularies, in words; None if they are equal."""
        mine, its = self._vocabulary.tokens, other._vocabulary.tokens
        other_ids = (id for id in sorted(mine.keys() | its.keys()) if mine.get(id) != its.get(id))
        return next(
            (
                f"token {id} is {mine.get(id)} in one and {its.get(id)} in the other"
                for id in other_ids
            ),
            None,
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of a plain text. Text that looks like a control token is spelled out like any other text."""
        return cut(clean(text), self._vocabulary.plain, self._merge)

    def _merge(self, text: str) -> list[int]:
        pieces, ids, whole, missing = [text], [], self._vocabulary.whole, bytes(self.missing_bytes)
        for split in self._vocabulary.splits:
            pieces = [part for piece in pieces for part in split(piece) if part]
        for word in map(str.encode, pieces):
            if word in whole:
                ids.append(whole[word])
            elif word := word.translate(
                None, missing
            ):  # tiktoken panics on an unknown byte and on b""
                ids += [self._ids[rank] for rank in self._bpe._encode_single_piece(word)]
        return ids

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text for the model to continue: the tokenizer's own first tokens, then the text's."""
        return self._vocabulary.prefix + self.encode(text)

    def token_bytes(self, id: int, special: bool = True) -> bytes:
        if (word := self._vocabulary.tokens.get(index(id))) is None:
            raise UserError(
                f"{self._file}: there is no token {id}; ids are below {self.vocab_size}, some unused"
            )
        return word if special or index(id) not in self._hidden else b""

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of some tokens, with control tokens only if `special`, and U+FFFD for bytes that are not UTF-8."""
        return b"".join(self.token_bytes(id, special) for id in ids).decode(errors="replace")

    def incremental_decoder(self) -> Stream:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return Stream(
            lambda token: decode(self.token_bytes(token, special=False)),
            lambda: decode(b"", final=True),
        )

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation, [{"role": .., "content": ..}, ..], laid out by the model's own template."""
        if self.chat_template is None:
            raise UserError(
                f"{self._file.parent}: there is no chat template; add chat_template.jinja, or use text"
            )
        for n, message in enumerate(messages):
            if not isinstance(message, dict) or {k: type(message[k]) for k in message} != {
                "role": str,
                "content": str,
            }:
                raise UserError(
                    f"message {n} is {message!r}; it must hold a role and a content, both text, no more"
                )
        messages = [
            {key: self._inert(text) for key, text in message.items()} for message in messages
        ]
        most = OUTPUT + 4 * sum(len(text) for message in messages for text in message.values())
        given = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            self._template = self._template or Sandbox().from_string(self.chat_template)
            if len(text := bounded(lambda: self._template.render(given | self._named))) > most:
                raise UserError(f"it makes {len(text)} characters")
        except Exception as error:  # a template is foreign code: it may raise anything
            told = brief(f"{type(error).__name__}: {str(error)[:10_000]}".translate(self._restore))
            raise UserError(
                f"{self._file.parent}: the chat template fails on this conversation: {told}; it may take "
                f"{TIME:g} s, {MEMORY >> 20} MiB and {most} characters"
            ) from error
        return cut(text, self.specials, lambda part: self.encode(part.translate(self._restore)))

    def _inert(self, text: str) -> str:
        """A message with stand-ins: no control token begins in it, not even one that following text would complete."""
        text, controls = clean(text), tuple(self.specials)
        end, longest = len(text.rstrip()), max(map(len, controls), default=0)
        begins = lambda i: (
            text.startswith(controls, i)
            or (
                0 < end - i < longest
                and any(control.startswith(text[i:end]) for control in controls)
            )
        )
        return "".join(
            self._stand_in[c] if c in self._stand_in and begins(i) else c
            for i, c in enumerate(text)
        )


def main() -> None:
    """Shows the tokens of a text, streamed back, and that a control token written by a user stays text."""
    tok = Tokenizer.load(Path(__file__).parent / "models" / "tiny")
    for text in (
        "Once upon a time, there was a dragon.",
        "Größe 😀 12345",
        f"a user's {[*tok.specials, ''][0]}",
    ):
        ids, stream = tok.encode(text), tok.stream()
        print("|".join(tok.token_bytes(id).decode(errors="replace") for id in ids))
        streamed = "".join(map(stream.feed, ids)) + stream.finish()
        print(
            f"  {len(ids)} tokens; streamed back: {streamed == text}; control tokens: {len(tok._hidden & {*ids})}"
        )


if __name__ == "__main__":
    main()
