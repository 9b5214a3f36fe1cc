"""Byte-level BPE from text: how a vocabulary is learned.

Cut the text into pieces (words with the space before them), spell each piece in bytes, and then,
until there are enough tokens: find the pair of neighbours that occurs most often and make it one
token. The list of these merges, in order, *is* the tokenizer. Of equally frequent pairs the one
with the larger bytes wins. Equal pieces are stored once, with their count, and a merge changes only
the pieces that hold its pair. No two merges make the same token: how the bytes of a token are
merged does not depend on what stands around them.

    Invariant: pairs[a, b] = Σ over distinct pieces of (count of the piece) · (times a, b in it)

Sennrich et al. 2016 (arXiv:1508.07909) for BPE; Radford et al. 2019 (GPT-2) for bytes as the
alphabet and the split.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex  # tiktoken brings it

from checkpoint.files import write_json
from checkpoint.gguf_vocabulary import GPT2_SPLIT
from checkpoint.vocabulary import alphabet
from errors import UserError

END = "<|endoftext|>"
Pair = tuple[bytes, bytes]


def learn(texts: Iterable[str], size: int) -> list[Pair]:
    """The merges, in order, until there are `size` tokens, 256 bytes included, or no pairs."""
    if size < 256:
        raise UserError(f"a byte-level vocabulary has at least 256 tokens, not {size}")
    counts = count_pieces(texts)
    pieces = [spell(piece) for piece in counts]
    weights = list(counts.values())  # how often each piece occurs
    pairs = Counter[Pair]()
    holders = defaultdict[Pair, set[int]](set)  # the pieces that have held a pair

    def add_pairs(i: int, weight: int) -> None:
        for pair in zip(pieces[i], pieces[i][1:]):
            pairs[pair] += weight
            holders[pair].add(i)

    for i, weight in enumerate(weights):
        add_pairs(i, weight)
    merges = []
    while pairs and 256 + len(merges) < size:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] == 0:
            break
        merges.append(best)
        for i in holders.pop(best):
            add_pairs(i, -weights[i])
            pieces[i] = merge(pieces[i], best)
            add_pairs(i, weights[i])
    return merges


def count_pieces(texts: Iterable[str]) -> Counter[str]:
    """How often each piece occurs."""
    counts = Counter()
    for text in texts:
        counts.update(regex.findall(GPT2_SPLIT, text))
    return counts


def spell(piece: str) -> list[bytes]:
    return [bytes([byte]) for byte in piece.encode()]


def merge(tokens: list[bytes], pair: Pair) -> list[bytes]:
    """`tokens` with every occurrence of the pair joined, from left to right."""
    merged = []
    i = 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            merged.append(b"".join(pair))
            i += 2
        else:
            merged.append(tokens[i])
            i += 1
    return merged


def merge_text(text: str, merges: list[Pair]) -> list[bytes]:
    """The tokens of a text: in each piece the neighbours that stand first in the list merge, again
    and again, until none is left. (tokenizer.py has a package do this.)"""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    tokens = []
    for piece in regex.findall(GPT2_SPLIT, text):
        word = spell(piece)
        while pairs := ranks.keys() & {*zip(word, word[1:])}:
            word = merge(word, min(pairs, key=ranks.__getitem__))
        tokens += word
    return tokens


def save_tokenizer(folder: Path, merges: list[Pair]) -> None:
    """Write a tokenizer's files, as Hugging Face reads them."""
    letters = {byte: letter for letter, byte in alphabet().items()}
    vocab = {letters[byte]: byte for byte in range(256)}
    lines = []
    for pair in merges:
        left, right = ("".join(letters[byte] for byte in token) for token in pair)
        lines.append(f"{left} {right}")
        vocab[left + right] = len(vocab)
    end = dict(id=len(vocab), content=END, special=True, normalized=False)
    end |= dict(single_word=False, lstrip=False, rstrip=False)
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = dict(
        version="1.0",
        added_tokens=[end],
        normalizer=None,
        pre_tokenizer=split,
        post_processor=None,
        decoder=split,
        model=dict(type="BPE", vocab=vocab, merges=lines),
    )
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "tokenizer.json", tokenizer)  # last: where it is, nothing is learned again


def main(file: str = __file__) -> None:
    """The demonstration: how a text shrinks."""
    text = Path(file).read_text(encoding="utf-8")
    print(f"{Path(file).name}: {len(text.encode()):,} bytes")
    merges = learn([text], 512)
    for n in (1, 16, 64, 256):
        last = b"".join(merges[n - 1])
        print(f"{n:5} merges, the last {last!r}: {len(merge_text(text, merges[:n])):,} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
