"""Merges are those of counting everything anew each time; and the files work."""

from collections import Counter
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.gguf_vocabulary import GPT2_SPLIT
from tokenizer import Tokenizer
from train import bpe
from train.bpe import END, Pair, learn, merge, save_tokenizer

TEXTS = st.lists(st.text(alphabet="ab c'sé1", max_size=25), min_size=1, max_size=5)


def slow(texts: list[str], size: int) -> list[Pair]:
    words = [
        [bytes([b]) for b in piece.encode()]
        for text in texts
        for piece in regex.findall(GPT2_SPLIT, text)
    ]
    learned: list[Pair] = []
    while 256 + len(learned) < size:
        count = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not count:
            break
        learned.append(max(count, key=lambda pair: (count[pair], pair)))
        words = [merge(word, learned[-1]) for word in words]
    return learned


@given(TEXTS, st.integers(256, 276))
def test_merges_are_those_of_counting_anew_each_time(texts: list[str], size: int) -> None:
    merges = learn(texts, size)
    assert merges == slow(texts, size)
    assert len({a + b for a, b in merges}) == len(merges)


def test_merge_goes_from_the_left() -> None:
    assert merge([b"a", b"a", b"a"], (b"a", b"a")) == [b"aa", b"a"]
    assert merge([b"a", b"b", b"a", b"b", b"b"], (b"a", b"b")) == [b"ab", b"ab", b"b"]


@given(TEXTS, st.text("ab c'sé1\n", max_size=40))
def test_tokens_are_those_of_the_package(tmp_path, texts: list[str], text: str) -> None:
    merges = learn(texts, 290)
    save_tokenizer(tmp_path, merges)
    tok = Tokenizer.load(tmp_path)
    assert [tok.token_bytes(id) for id in tok.encode(text)] == bpe.merge_text(text, merges)


def test_the_files_are_a_tokenizer_with_every_byte(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat, the cat's mat", "größe 世界"]
    merges = learn(texts, 286)
    save_tokenizer(tmp_path, merges)
    tok = Tokenizer.load(tmp_path)
    assert tok.vocab_size == 256 + len(merges) + 1 and not tok.missing_bytes
    assert tok.specials == {END: tok.vocab_size - 1}
    for text in [*texts, "\x00 anything 😀", END]:
        assert tok.decode(tok.encode(text)) == text
    assert len(tok.encode(" the")) == 1
    save_tokenizer(tmp_path, [(b"s", b"s")])
    assert Tokenizer.load(tmp_path).encode("ss'ss") == [256, *b"'ss"]  # pieces: ss, 's, s


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 256"):
        learn(["a"], 255)


def test_a_run_that_is_stopped_leaves_no_half_of_a_tokenizer(tmp_path, monkeypatch):
    """tokenizer.json says that the tokenizer is whole."""
    real = bpe.write_json

    def stopped(file, data):
        real(file, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(bpe, "write_json", stopped)
    with pytest.raises(KeyboardInterrupt):
        bpe.save_tokenizer(tmp_path, [])
    assert not (tmp_path / "tokenizer.json").exists()
