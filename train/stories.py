"""Training text: stories end to end, and the crops (windows of tokens) that a training step reads.

A file holds stories, each ended by a line <|endoftext|>. Half of a step's crops begin where a story begins, so openings
are learned at position 0, where a prompt begins; the other half begin anywhere. The crops of step i depend on i alone,
so a killed run resumes from its checkpoint with the same crops. Every tenth story is held out.
"""

import lzma
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from errors import UserError
from tokenizer import Tokenizer
from train.bpe import END


def read_file(file: str) -> str:
    """The text of a file, which may be compressed (.xz). ValueError if it is not UTF-8, or without end."""
    if Path(file).exists() and not Path(file).is_file():
        raise UserError(f"{file} is a folder or a device: name a file of text")
    try:
        with (lzma.open if file.endswith(".xz") else open)(file, "rt", encoding="utf-8") as lines:
            return lines.read()
    except (UnicodeError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text: {error}") from None


def read_stories(files: Sequence[str]) -> list[str]:
    """The stories in some files, each ended by a line <|endoftext|>."""
    try:
        stories = [
            story
            for file in files
            for part in read_file(file).split(END)
            if (story := part.strip())
        ]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error.filename}: no such file; --data takes stories, each ended by {END}"
        ) from None
    if len(stories) < 10:
        raise UserError(
            f"{' '.join(files)}: {len(stories)} stories; at least 10 are needed, each ended by {END}"
        )
    return stories


def hold_out(stories: Sequence[str]) -> tuple[list[str], list[str]]:
    """(stories to train on, held-out stories)."""
    return [story for i, story in enumerate(stories) if i % 10 != 9], list(stories[9::10])


class Corpus:
    """Stories end to end, an end-of-text token after each."""

    def __init__(self, tokens: Tensor, end: int, size: int | None = None):
        self.tokens, self.bytes = tokens, size  # int64[S]; bytes of the stories
        self.starts = torch.cat(
            (torch.zeros(1, dtype=torch.int64), (tokens == end).nonzero()[:, 0] + 1)
        )

    @classmethod
    def encode(cls, stories: Sequence[str], tokenizer: Tokenizer, end: int) -> "Corpus":
        return cls(
            torch.tensor([token for story in stories for token in (*tokenizer.encode(story), end)]),
            end,
            sum(len(story.encode()) for story in stories),
        )

    def crops(self, count: int, length: int, seed: int) -> Tensor:
        """`count` random crops, by this seed: int64[count, length + 1]. ValueError if the text is too short."""
        last = len(self.tokens) - length - 1
        if last < 1:
            raise UserError(
                f"a text of {len(self.tokens)} tokens is too short for crops of {length + 1}: "
                "give more data, or a smaller --length"
            )
        generator, starts = torch.Generator().manual_seed(seed), self.starts[self.starts < last]
        coins = torch.rand(count, generator=generator)
        begin = starts[torch.randint(len(starts), (count,), generator=generator)]
        at = torch.where(coins < 0.5, begin, torch.randint(last, (count,), generator=generator))
        return self.tokens[at[:, None] + torch.arange(length + 1)]

    def windows(self, length: int, count: int) -> Tensor:
        """The first `count` windows, each beginning with the last token of the previous: int64[≤ count, length + 1]"""
        return (
            self.tokens.unfold(0, length + 1, length)
            if len(self.tokens) > length
            else self.tokens[None]
        )[:count]
