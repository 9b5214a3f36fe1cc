"""Byte-level BPE from text: how a vocabulary is learned.

Cut the text into pieces (words with the space before them), spell each piece in bytes, and then, until there are enough tokens:
find the pair of neighbours that occurs most often and make it one token. The list of these merges, in order, *is* the tokenizer.

Counting is done once. A piece that occurs a thousand times is kept once with its count; a merge changes only the pieces that hold
its pair, and in those only the counts of the pairs around it. So a merge costs what it changes, not the text.

    Invariant: pairs[a, b] = Σ over distinct pieces of (count of the piece) · (neighbours a, b in it), and no pair with count 0 stays.

All 256 bytes are tokens, so every text has a spelling. Ties go to the pair of larger bytes, so the same text gives the same merges.
Cost: 4096 tokens from 10 MB of stories take seconds.

Sennrich et al. 2016 (arXiv:1508.07909) for BPE; Radford et al. 2019 (GPT-2) for bytes as the alphabet and for the split.
"""
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from vocabulary import GPT2_SPLIT, alphabet, compile_split

END = "<|endoftext|>"
Pair = tuple[bytes, bytes]


def learn(texts: Iterable[str], size: int) -> list[Pair]:
    """The merges, in order, after which bytes and merged tokens are `size` in number; fewer where the text has no more pairs."""
    if size < 256:
        raise ValueError(f"a byte-level vocabulary has at least 256 tokens, not {size}")
    pieces = [([bytes([b]) for b in piece.encode()], count) for piece, count in count_pieces(texts).items()]
    pairs, holders = Counter[Pair](), defaultdict[Pair, set[int]](set)      # how often a pair occurs; in which pieces
    for i, (tokens, count) in enumerate(pieces):
        for pair in zip(tokens, tokens[1:]):
            pairs[pair] += count
            holders[pair].add(i)
    merges, known = [], {bytes([b]) for b in range(256)}
    while len(known) < size and pairs:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        known.add(b"".join(best))
        for i in holders.pop(best):
            before, count = pieces[i]
            after = merge(before, best)
            pieces[i] = after, count
            for pair in zip(before, before[1:]):
                pairs[pair] -= count
            for pair in zip(after, after[1:]):
                pairs[pair] += count
                holders[pair].add(i)
            for pair in zip(before, before[1:]):
                if pairs[pair] <= 0:
                    del pairs[pair]
    return merges


def count_pieces(texts: Iterable[str]) -> Counter[str]:
    split, counts = compile_split(Path("bpe.py"), GPT2_SPLIT), Counter[str]()
    for text in texts:
        counts.update(piece for piece in split(text) if piece)
    return counts


def merge(tokens: list[bytes], pair: Pair) -> list[bytes]:
    """`tokens` with every occurrence of the pair joined, from left to right."""
    out, i = [], 0
    while i < len(tokens):
        joined = tuple(tokens[i:i + 2]) == pair
        out.append(b"".join(pair) if joined else tokens[i])
        i += 1 + joined
    return out


def write(folder: Path, merges: list[Pair], max_length: int) -> int:
    """tokenizer.json and tokenizer_config.json as Hugging Face reads them; returns the number of tokens, the last of them END."""
    letters = {byte: letter for letter, byte in alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)
    vocab = {letters[b]: b for b in range(256)}
    for left, right in merges:
        vocab.setdefault(spell(left + right), len(vocab))                   # two merges may spell one token
    end = dict(id=len(vocab), content=END, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
                 byte_fallback=False, ignore_merges=False, vocab=vocab, merges=[f"{spell(a)} {spell(b)}" for a, b in merges])
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=[end], normalizer=None, pre_tokenizer=split,
                     post_processor=None, decoder=split, model=model)
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END, model_max_length=max_length, clean_up_tokenization_spaces=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(vocab) + 1


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the first merges of a text, and how it shrinks.

def main(file: str = __file__) -> None:
    text = Path(file).read_text(encoding="utf-8")
    merges = learn([text], 512)
    pieces = [[bytes([b]) for b in piece.encode()] for piece in count_pieces([text]).elements()]
    print(f"{len(text.encode()):,} bytes of {Path(file).name}; the first merges: {' '.join(repr((a + b).decode(errors='replace')) for a, b in merges[:12])}")
    for n, pair in enumerate([None, *merges]):
        pieces = pieces if pair is None else [merge(piece, pair) for piece in pieces]
        if n in (0, 16, 64, 256):
            print(f"  {n:4} merges: {sum(map(len, pieces)):6,} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
