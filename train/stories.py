"""Training text: stories end to end, and the crops (windows of tokens) that a training step reads.

A file holds stories, each ended by a line <|endoftext|>. Half of a step's crops begin where a story
begins, so openings are learned at position 0, where a prompt begins; the other half begin anywhere.
The crops of step i depend on i alone, so a killed run resumes from its checkpoint with the same
crops. Every tenth story is held out.

    S tokens of a corpus · B crops · N tokens of a crop
"""

import lzma
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from errors import UserError
from tokenizer import Tokenizer
from train.bpe import END

T = TypeVar("T")


def read_file(file: str) -> str:
    """The text of a file, which may be compressed (.xz). UserError if it is not UTF-8."""
    opener = lzma.open if file.endswith(".xz") else open
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            return lines.read()
    except (UnicodeError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text: {error}") from None


def split_stories(text: str) -> list[str]:
    """The stories in a text, each ended by <|endoftext|>."""
    stories = [part.strip() for part in text.split(END)]
    return [story for story in stories if story]


def read_stories(files: Sequence[str]) -> list[str]:
    """The stories in some files: at least ten, or every tenth would be none."""
    stories = []
    for file in files:
        stories += split_stories(read_file(file))
    if len(stories) < 10:
        raise UserError(
            f"{' '.join(files)}: {len(stories)} stories; at least 10 are needed, "
            f"each ended by {END}"
        )
    return stories


def hold_out(stories: Sequence[T]) -> tuple[list[T], list[T]]:
    """(stories, or other texts, to train on, held-out ones)."""
    train = [story for i, story in enumerate(stories) if i % 10 != 9]
    return train, list(stories[9::10])


class Corpus:
    """Stories end to end. Each begins as a prompt does, and an end-of-text token follows it."""

    def __init__(self, tokens: Tensor, end: int, size: int | None = None):
        self.tokens = tokens  # int64[S]
        self.bytes = size  # of the stories
        after_ends = (tokens == end).nonzero()[:, 0] + 1
        self.starts = torch.cat((torch.tensor([0]), after_ends))

    @classmethod
    def encode(cls, stories: Sequence[str], tokenizer: Tokenizer, end: int) -> "Corpus":
        tokens = []
        for story in stories:
            tokens += tokenizer.prompt(story)
            tokens.append(end)
        size = sum(len(story.encode()) for story in stories)
        return cls(torch.tensor(tokens), end, size)

    def crops(self, count: int, length: int, seed: int) -> Tensor:
        """`count` random crops, by this seed: int64[B, N + 1]. UserError if a text is too short."""
        last = len(self.tokens) - length - 1
        if last < 0:
            raise UserError(
                f"a text of {len(self.tokens)} tokens is too short for crops of {length + 1}: "
                "give more data, or a smaller --length"
            )
        last = max(last, 1)  # a text of one crop begins it at 0
        generator = torch.Generator().manual_seed(seed)
        rngs = torch.rand(count, generator=generator)
        starts = self.starts[self.starts < last]
        of_stories = starts[torch.randint(len(starts), (count,), generator=generator)]
        anywhere = torch.randint(last, (count,), generator=generator)
        begins = torch.where(rngs < 0.5, of_stories, anywhere)  # [B]
        return self.tokens[begins[:, None] + torch.arange(length + 1)]

    def windows(self, length: int, count: int) -> Tensor:
        """The first `count` windows: int64[≤ B, N + 1].

        Each begins with the last token of the one before it. A short text is one window.
        """
        if len(self.tokens) <= length:
            return self.tokens[None]
        return self.tokens.unfold(0, length + 1, length)[:count]
