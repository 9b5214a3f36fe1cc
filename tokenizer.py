"""Text to tokens and back, with Hugging Face's package `tokenizers`.

    "The cat's"  →  The| cat|'s  →  bytes of each piece  →  merge neighbours  →  ids

Regular expressions cut a text into pieces: words, numbers, runs of spaces. A piece is spelled out
in UTF-8 bytes (Llama 3), or in characters with a ▁ for each space (Llama 2). Then the pair of
neighbours that comes first in the list of merges becomes one token, again and again (Sennrich et
al. 2016; bytes as the alphabet: Radford et al. 2019; ▁: Kudo & Richardson 2018). train/bpe.py shows
what a merge is, and how the list is learned.

Invariants:
  - `encode` yields no control token unless `special` is set. Text that looks like a control token
    is spelled out.
  - decode(encode(text)) == text if the vocabulary has all 256 bytes. A byte that it lacks is
    dropped before merging, and a lone surrogate becomes U+FFFD. (SentencePiece cannot distinguish a
    ▁ from a space, and Qwen's text comes back in Unicode's normal form C. Some files drop white
    space beside some added tokens, or characters that their pattern does not match.)
  - The pieces of an `IncrementalDecoder`, with what `finish` returns, join to the decoded text.

Beside these ordinary tokens, a vocabulary has *added* tokens, which are found in the text before it
is cut into pieces. The *control* tokens among them (begin- and end-of-text, the marks of a chat)
are kept apart, in `specials`: they have a meaning for the model, so a user must not be able to
write them.

checkpoint/vocabulary.py reads the files; chat templates are in checkpoint/chat.py.
Not covered: `clean_up_tokenization_spaces`.
"""

import codecs
import os
from collections.abc import Iterable
from copy import copy
from pathlib import Path

from checkpoint.chat import (
    ChatTemplate,
    Message,
    checked_template,
    load_template,
    replace_surrogates,
)
from checkpoint.files import Json
from checkpoint.gguf import GGUF
from checkpoint.gguf_vocabulary import read_gguf_vocabulary
from checkpoint.hub import is_gguf
from checkpoint.pieces import read_tokenizer_model
from checkpoint.vocabulary import (
    Finder,
    Vocabulary,
    read_tokenizer_config,
    read_tokenizer_json,
    reject,
)
from errors import TooManyTokens, UserError, brief


class IncrementalDecoder:
    """Tokens go in, and whole characters come out. An incomplete character is held back."""

    def __init__(self, tokenizer: "Tokenizer", strips: bool) -> None:
        self._tokenizer = tokenizer
        self._strips = strips  # whether to drop the next byte if it is a space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        if self._strips and data:
            data = data.removeprefix(b" ")
            self._strips = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest of the text: U+FFFD if a character is incomplete, otherwise nothing."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """Text to tokens and back. specials: the control tokens, text -> id. eos_token_id: the id of
    the token that tokenizer_config.json names, or None. chat_template, tool_template: the sources
    of the templates for conversations without and with tools, or None."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = max(vocabulary.tokens) + 1
        self.specials = vocabulary.special
        self._special_ids = set(self.specials.values())
        self.not_merged = self.specials | vocabulary.added  # text -> id
        self._finder = Finder(vocabulary.added, vocabulary.swallows)  # finds them in a user's text
        self.eos_token_id = self.not_merged.get(vocabulary.named.get("eos_token"))
        self.missing_bytes = vocabulary.missing_bytes
        self.chat_template = template
        self.tool_template = tool_template or template
        self._templates = {
            source: ChatTemplate(vocabulary, source)
            for source in (template, tool_template)
            if source is not None
        }

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a GGUF, or a model folder's tokenizer.json or tokenizer.model and, if they exist,
        tokenizer_config.json and chat_template.jinja. UserError names the file."""
        path = Path(path)
        if is_gguf(path):
            gguf = GGUF.open(path)
            key = "tokenizer.chat_template"
            sources = [gguf.metadata.get(name) for name in (key, f"{key}.tool_use")]
            templates = [checked_template(path, source) for source in sources]
            return cls(read_gguf_vocabulary(gguf), *templates)
        config = read_tokenizer_config(path)
        templates = [load_template(path, config, name) for name in ("default", "tool_use")]
        return cls(load_vocabulary(path, config), *templates)

    def limited_to(self, num_rows: int) -> "Tokenizer":
        """This tokenizer for a model whose embedding has this many rows. Added tokens without a row
        (<pad>, say) are left out. UserError if an ordinary token has no row."""
        vocabulary = self._vocabulary
        ordinary = vocabulary.tokens.keys() - {*self.not_merged.values()}
        last = max(ordinary)
        if last >= num_rows:
            raise UserError(
                f"{vocabulary.file}: it has token {last}, {brief(vocabulary.tokens[last])}, and "
                f"the model has {num_rows} tokens: they belong to different models"
            )
        tokenizer = copy(self)
        tokenizer.vocab_size = min(self.vocab_size, num_rows)
        return tokenizer

    def difference(self, other: "Tokenizer") -> str | None:
        """Describe the first token that differs or is missing in the other vocabulary; None if they
        agree."""
        ours = self._vocabulary.tokens
        theirs = other._vocabulary.tokens
        for id in sorted(ours.keys() | theirs.keys()):
            if ours.get(id) != theirs.get(id):
                return f"token {id} is {ours.get(id)} in one and {theirs.get(id)} in the other"
        if other.vocab_size < self.vocab_size:  # its model has fewer rows
            return f"tokens from {other.vocab_size} on are missing"
        return None

    # ---- Text to tokens

    def encode(
        self, text: str, is_first: bool = True, special: bool = False, most: int | None = None
    ) -> list[int]:
        """The tokens of a plain text. A control token in it is spelled out like any other text,
        unless `special` is set.

        is_first: nothing comes before this text; some models then put a space before it. most:
        UserError, before the rest is read, if there are more tokens.
        """
        ids = self._vocabulary.added
        finder = self._finder
        if special:
            ids = self.not_merged
            finder = Finder(ids, self._vocabulary.swallows)
        parts = finder.split(replace_surrogates(text))  # text, added token, text, …
        return self._join([ids.get(part, part) for part in parts], is_first, most)

    def _join(self, parts: list[str | int], is_first: bool, most: int | None) -> list[int]:
        """The tokens of texts and of the ids between them."""
        ids = []
        for n, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            for merged in self._vocabulary.merger.merge(part, is_first and n == 0):
                ids += merged
                if most is not None and len(ids) > most:
                    raise TooManyTokens(
                        f"at least {most + 1:,} tokens, and at most {most:,} fit: shorten the text"
                    )
        return ids

    def prompt(self, text: str, special: bool = False, most: int | None = None) -> list[int]:
        """The tokens of a text to continue: begin-of-text, if the model has one, and the text's
        tokens. With `special` the text may spell begin-of-text itself. most: as in `encode`."""
        prefix = self._vocabulary.prefix
        ids = self.encode(text, special=special, most=most)
        return ids if special and ids[: len(prefix)] == prefix else prefix + ids

    def spelled_control(self, text: str) -> str:
        """The first control token spelled in a text, or an empty string."""
        parts = Finder(self.specials).split(text)
        return parts[1] if len(parts) > 1 else ""

    def template(self, has_tools: bool) -> ChatTemplate | None:
        """The chat template, of conversations with tools or without."""
        return self._templates.get(self.tool_template if has_tools else self.chat_template)

    def chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[Json] | None = None,
        most: int | None = None,
        how: Json = {},
    ) -> list[int]:
        """The tokens of a conversation, [{"role": …, "content": …}, …], laid out by the chat
        template. tools: functions that an answer may call, as OpenAI's protocol has them. most: as
        in `encode`; how: more values for the template, such as enable_thinking."""
        template = self.template(tools is not None)
        if template is None:
            raise UserError(
                "there is no chat template; use a text, or a folder with a chat_template.jinja"
            )
        options = how | {"add_generation_prompt": add_generation_prompt, "tools": tools}
        parts = template.parts(messages, options)
        return self._join(parts, True, most)

    # ---- Tokens to text

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """The bytes of a token; b"" for an unused id, or for a control token unless `special`."""
        if not 0 <= id < self.vocab_size:
            raise UserError(f"there is no token {id}; ids are below {self.vocab_size}")
        if id in self._special_ids and not special:
            return b""
        return self._vocabulary.tokens.get(id, b"")

    def decode(self, ids: Iterable[int], special: bool = False, continues: bool = False) -> str:
        """The text of these tokens, with control tokens only if `special`, and with U+FFFD for
        bytes that are not UTF-8. continues: other tokens came before, so a first space is kept."""
        text = b"".join(self.token_bytes(id, special) for id in ids).decode(errors="replace")
        if self._vocabulary.strips and not continues:
            return text.removeprefix(" ")
        return text

    def incremental_decoder(self, continues: bool = False) -> IncrementalDecoder:
        """A decoder that does what `decode` does, token by token."""
        return IncrementalDecoder(self, self._vocabulary.strips and not continues)


def load_vocabulary(folder: Path, config: Json) -> Vocabulary:
    """Read a folder's tokenizer.json or, if there is none, its tokenizer.model. config: the fields
    of tokenizer_config.json."""
    file = folder / "tokenizer.json"
    model_file = folder / "tokenizer.model"
    try:
        if not os.path.lexists(file) and model_file.exists():
            file = model_file
            return read_tokenizer_model(file, config)
        return read_tokenizer_json(file, config)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        wrong = f"it, or tokenizer_config.json, is not laid out as it should be ({error!r})"
        reject(file, wrong, "download them again")


def main() -> None:
    """Demonstration: the tokens of some texts, streamed back into text. A control token that a user
    writes stays text."""
    tokenizer = Tokenizer.load(Path(__file__).parent / "models" / "tiny")
    control = next(iter(tokenizer.specials))
    for text in ("Once upon a time, a dragon.", "Größe 😀 12345", f"a user's {control}"):
        ids = tokenizer.encode(text)
        print("|".join(tokenizer.token_bytes(id).decode(errors="replace") for id in ids))
        decoder = tokenizer.incremental_decoder()
        streamed = "".join(map(decoder.feed, ids)) + decoder.finish()
        controls = set(ids) & set(tokenizer.specials.values())
        print(f"  {len(ids)} tokens; streamed back: {streamed == text}; {len(controls)} controls")


if __name__ == "__main__":
    main()
