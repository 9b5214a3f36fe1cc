"""Stories from files, and the pieces of them that training sees."""

import lzma
from pathlib import Path

import pytest
import torch

from tokenizer import Tokenizer
from train.bpe import END
from train.stories import Corpus, hold_out, read_stories

STORIES = [f"Story {i} is {'long ' * (i % 4)}\nand ends." for i in range(23)]
TEXT = Corpus(
    torch.cat([torch.tensor([*story.encode(), 256]) for story in STORIES]),
    256,
    sum(map(len, STORIES)),
)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz"])
def test_stories_are_what_stands_between_ends(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    text = f"\n{END}\n".join(STORIES) + f"\n{END}\n"
    file.write_bytes(lzma.compress(text.encode()) if name.endswith("xz") else text.encode())
    assert read_stories([str(file), str(file)]) == STORIES * 2


@pytest.mark.parametrize(
    ("content", "says", "name"),
    [
        (b"one story", "1 stories; at least 10", "a.txt"),
        (b"\xff\xfe", "cannot be read as UTF-8", "a.txt"),
        (lzma.compress(b"story" * 99)[:-9], "cannot be read as UTF-8", "a.txt.xz"),  # cut
        (None, "No such file", "a.txt"),
    ],
    ids=["few", "no text", "cut", "none"],
)
def test_what_is_no_file_of_stories_is_refused(
    tmp_path: Path, content: bytes | None, says: str, name: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        read_stories([str(file)])


def test_every_tenth_is_held_out() -> None:
    heard, unheard = hold_out(STORIES)
    assert unheard == [STORIES[9], STORIES[19]] and sorted(heard + unheard) == sorted(STORIES)


def test_a_corpus_is_stories_with_an_end_after_each(base: Path) -> None:
    corpus = Corpus.encode(["größe", "b"], Tokenizer.load(base), 256)
    assert corpus.tokens.tolist() == [*"größe".encode(), 256, *b"b", 256]
    assert corpus.bytes == 8 and corpus.starts.tolist() == [0, 8, 10]


def test_crops_depend_on_the_step_alone_and_lie_in_the_text() -> None:
    text = TEXT
    assert torch.equal(text.crops(4, 16, 9), text.crops(4, 16, 9)) and not torch.equal(
        text.crops(4, 16, 9), text.crops(4, 16, 10)
    )
    everywhere = {tuple(piece.tolist()) for piece in text.tokens.unfold(0, 17, 1)}
    assert all(
        tuple(crop.tolist()) in everywhere for step in range(20) for crop in text.crops(8, 16, step)
    )
    size = len(text.tokens)
    assert torch.equal(text.crops(2, size - 1, 0), text.tokens.expand(2, -1))
    with pytest.raises(ValueError, match="too short"):
        text.crops(1, size, 0)


def test_half_of_the_crops_begin_a_story() -> None:
    begins = [
        bool((crop[:6] == torch.tensor([*b"Story "])).all())
        for step in range(50)
        for crop in TEXT.crops(8, 16, step)
    ]
    assert 0.4 < sum(begins) / len(begins) < 0.65


def test_windows_predict_each_token_once() -> None:
    assert torch.equal(TEXT.windows(16, 3), TEXT.windows(16, 1000)[:3])
    short = Corpus(torch.arange(16), 256)
    assert torch.equal(short.windows(16, 3), torch.arange(16)[None])
    windows = TEXT.windows(16, 1000)
    assert (
        torch.equal(windows[:, 1:].flatten(), TEXT.tokens[1 : 1 + 16 * len(windows)])
        and len(TEXT.tokens) - 16 * len(windows) <= 16
    )
