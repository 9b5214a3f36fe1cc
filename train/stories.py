"""Text to learn from: stories end to end, and the pieces that a training step sees.

A file holds stories, each ended by a line <|endoftext|>. Encoded, they lie in one row of tokens with an end-of-text token after each;
a step of training takes crops of it. Half of the crops begin where a story begins, so that openings are learned at position 0, where
a prompt begins; the other half begin anywhere. Which crops step i gets depends on i alone: a run that was killed sees after its
checkpoint what it would have seen.

Held out, and never learned from by any model: every tenth story.

    S tokens of a text · N tokens of a crop
"""
import lzma
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenizer import Tokenizer
from train.bpe import END


def read_stories(files: Sequence[str]) -> list[str]:
    """The stories in some files (.xz too), each ended by a line <|endoftext|>."""
    stories: list[str] = []
    for file in files:
        try:
            with lzma.open(file, "rt", encoding="utf-8") if file.endswith(".xz") else open(file, encoding="utf-8") as lines:
                stories += filter(None, (story.strip() for story in lines.read().split(END)))
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: there is no such file; --data takes texts whose stories end with a line {END}") from None
        except (UnicodeError, lzma.LZMAError, EOFError, OSError) as error:
            raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from None
    if len(stories) < 10:
        raise ValueError(f"{' '.join(files)}: {len(stories)} stories; at least 10 are needed, each ended by a line {END}")
    return stories


def hold_out(stories: Sequence[str]) -> tuple[list[str], list[str]]:
    """(to learn from, held out): every tenth story is never learned from."""
    return [story for i, story in enumerate(stories) if i % 10 != 9], list(stories[9::10])


class Text:
    """Stories end to end, an end-of-text token after each."""

    def __init__(self, tokens: Tensor, end: int, size: int | None = None):
        self.tokens, self.bytes = tokens, size                                          # int64[S]; bytes of the text without ends
        self.starts = torch.cat((torch.zeros(1, dtype=torch.int64), (tokens == end).nonzero()[:, 0] + 1))

    @classmethod
    def encode(cls, stories: Sequence[str], tokenizer: Tokenizer, end: int) -> "Text":
        return cls(torch.tensor([token for story in stories for token in (*tokenizer.encode(story), end)]), end,
                   sum(len(story.encode()) for story in stories))

    def crops(self, count: int, length: int, seed: int) -> Tensor:
        """Pieces of length + 1 tokens, half of them from a story's beginning: int64[count, length + 1]."""
        last = len(self.tokens) - length - 1
        if last < 1:
            raise ValueError(f"a text of {len(self.tokens)} tokens is too short for crops of {length + 1}: give more data, or a smaller --length")
        generator, starts = torch.Generator().manual_seed(seed), self.starts[self.starts < last]
        coins = torch.rand(count, generator=generator)
        begin = starts[torch.randint(len(starts), (count,), generator=generator)]
        anywhere = torch.randint(last, (count,), generator=generator)
        at = torch.where(coins < 0.5, begin, anywhere)
        return self.tokens[at[:, None] + torch.arange(length + 1)]

    def windows(self, length: int, count: int) -> Tensor:
        """The first `count` pieces of length + 1 tokens, each beginning with the last token of the one before: int64[<= count, length + 1]."""
        pieces = self.tokens.unfold(0, length + 1, length) if len(self.tokens) > length else self.tokens[None]
        return pieces[:count]
