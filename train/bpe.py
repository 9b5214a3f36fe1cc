"""Byte-level BPE from text: how a vocabulary is learned.

Cut the text into pieces (words with the space before them), spell each piece in bytes, and then, until there are enough
tokens: find the pair of neighbours that occurs most often and make it one token. The list of these merges, in order,
*is* the tokenizer. Of equally frequent pairs the one with the larger bytes wins. Equal pieces are stored once, with
their count, and a merge changes only the pieces that hold its pair.

    Invariant: pairs[a, b] = Σ over distinct pieces of (count of the piece) · (neighbours a, b in it), never 0

Sennrich et al. 2016 (arXiv:1508.07909) for BPE; Radford et al. 2019 (GPT-2) for bytes as the alphabet and the split.
"""

import json
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from checkpoint.vocabulary import GPT2_SPLIT, alphabet, compile_split
from errors import UserError

END = "<|endoftext|>"
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)  # of a tokenizer
Pair = tuple[bytes, bytes]


def learn(texts: Iterable[str], size: int) -> list[Pair]:
    """The merges, in order, until there are `size` tokens, 256 bytes included, or no pairs. ValueError if below 256."""
    if size < 256:
        raise UserError(f"a byte-level vocabulary has at least 256 tokens, not {size}")
    pieces = [(spell(piece), count) for piece, count in count_pieces(texts).items()]
    pairs, holders = (
        Counter[Pair](),
        defaultdict[Pair, set[int]](set),
    )  # count of a pair; pieces that have held it

    def tally(i: int, sign: int) -> None:
        tokens, count = pieces[i]
        for pair in zip(tokens, tokens[1:]):
            pairs[pair] += sign * count
            holders[pair].add(i)
            if not pairs[pair]:
                del pairs[pair]

    for i in range(len(pieces)):
        tally(i, 1)
    merges, known = list[Pair](), set[bytes]()
    while 256 + len(known) < size and pairs:
        merges.append(best := max(pairs, key=lambda pair: (pairs[pair], pair)))
        known.add(b"".join(best))
        for i in holders.pop(best):
            tally(i, -1)
            pieces[i] = merge(pieces[i][0], best), pieces[i][1]
            tally(i, 1)
    return merges


def count_pieces(texts: Iterable[str]) -> Counter[str]:
    split = compile_split(Path("bpe.py"), GPT2_SPLIT)
    return Counter(piece for text in texts for piece in split(text) if piece)


def spell(piece: str) -> list[bytes]:
    return [bytes([byte]) for byte in piece.encode()]


def merge(tokens: list[bytes], pair: Pair) -> list[bytes]:
    """`tokens` with every occurrence of the pair joined, from left to right."""
    out, i = list[bytes](), 0
    while i < len(tokens):
        joined = tuple(tokens[i : i + 2]) == pair
        out.append(b"".join(pair) if joined else tokens[i])
        i += 1 + joined
    return out


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copy the files of these names that exist."""
    for file in filter(Path.exists, (source / name for name in names)):
        shutil.copy(file, folder)


def save_tokenizer(folder: Path, merges: list[Pair], max_length: int) -> int:
    """tokenizer.json and tokenizer_config.json, as Hugging Face reads them -> the number of tokens, END the last."""
    letters = {byte: letter for letter, byte in alphabet().items()}
    words = [["".join(letters[byte] for byte in token) for token in pair] for pair in merges]
    texts = dict.fromkeys(
        [*(letters[byte] for byte in range(256)), *map("".join, words)]
    )  # without repeats
    end = dict(
        id=len(texts),
        content=END,
        single_word=False,
        lstrip=False,
        rstrip=False,
        normalized=False,
        special=True,
    )
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(
        type="BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=False,
        vocab={text: id for id, text in enumerate(texts)},
        merges=[" ".join(pair) for pair in words],
    )
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[end],
        normalizer=None,
        pre_tokenizer=split,
        post_processor=None,
        decoder=split,
        model=model,
    )
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    return len(texts) + 1


# ---- The demonstration: the first merges of a text, and how it shrinks -----------------------------------------------


def main(file: str = __file__) -> None:
    text = Path(file).read_text(encoding="utf-8")
    merges, pieces = learn([text], 512), [spell(piece) for piece in count_pieces([text]).elements()]
    first = " ".join(repr((a + b).decode(errors="replace")) for a, b in merges[:12])
    print(f"{len(text.encode()):,} bytes of {Path(file).name}; the first merges: {first}")
    for n, pair in enumerate([*merges, (b"", b"")]):
        if n in (0, 16, 64, 256):
            print(f"  {n:4} merges: {sum(map(len, pieces)):6,} tokens")
        pieces = [merge(piece, pair) for piece in pieces]


if __name__ == "__main__":
    main(*sys.argv[1:])
