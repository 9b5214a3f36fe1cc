"""Text to tokens by SentencePiece's byte-pair encoding, for Llama 2, Mistral and their kin.

    "Hello wörld"  →  ▁Hello▁wörld  →  ▁Hello | ▁wörld  →  characters  →  merge neighbours  →  ids

The alphabet is characters; in tokenizer.py it is bytes. A space is a character like others, written
▁, and a text usually gets one before its first word: a word then has the same tokens wherever it
stands. Again and again, the two neighbours that stand first in the list of merges become one token
(Sennrich et al. 2016; SentencePiece: Kudo & Richardson 2018). A character that is no token becomes
its bytes in UTF-8, a token each: <0xC3> <0xB6> ("byte fallback").

Cost: a word of n characters takes O(n log n). A heap holds the merges that neighbours could do now,
and a linked list the tokens that are left. Short words are remembered.

Invariant: tokens are those of `tokenizers` for a tokenizer.json, and those of `sentencepiece` for a
tokenizer.model. Control tokens differ: a text has none, and a template's are found as they stand
(checkpoint/sentencepiece.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from checkpoint.sentencepiece import SPACE

if TYPE_CHECKING:
    from checkpoint.sentencepiece import SentencePiece

REMEMBERED = 2**16  # words
LONGEST_REMEMBERED = 32  # characters


class SentencePieceBPE:
    """Texts to ids, with the merges of a vocabulary."""

    missing_bytes = b""

    def __init__(self, merges: SentencePiece) -> None:
        self.merges = merges
        self._remembered = lru_cache(REMEMBERED)(self._encode_word)

    def encode(self, text: str, is_first: bool, deadline: float) -> Iterator[int]:
        """The ids of a text without added tokens. is_first: nothing comes before it.
        deadline: only the patterns of tokenizer.py need it."""
        for word in self.merges.words.findall(self._with_space(text, is_first)):
            if len(word) <= LONGEST_REMEMBERED:
                yield from self._remembered(word)
            else:
                yield from self._encode_word(word)

    def _with_space(self, text: str, is_first: bool) -> str:
        """The text with ▁ for spaces, and one before it where the model wants it."""
        space = self.merges.space
        text = text.replace(" ", SPACE)
        wanted = space.scheme == "always" or (space.scheme == "first" and is_first)
        if text and wanted and (space.doubles or not text.startswith(SPACE)):
            return SPACE + text
        return text

    def _encode_word(self, word: str) -> list[int]:
        ids = []
        for token in merge_characters(word, self.merges.ranks):
            if token in self.merges.ids:
                ids.append(self.merges.ids[token])
            else:
                ids += [self.merges.byte_ids[byte] for byte in token.encode()]
        return ids


def merge_characters(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """The tokens of a word. ranks: neighbours that merge -> their rank. The lowest rank merges
    first, and among equals the leftmost."""
    n = len(word)
    tokens = list(word)  # a token stands where its first character stood; elsewhere ""
    before = list(range(-1, n - 1))  # where the token before this one stands
    after = list(range(1, n + 1))
    heap: list[tuple[int, int, str, str]] = []

    def offer(left: int) -> None:
        """Put the merge of the token at `left` and the next one on the heap, if there is one."""
        if left < 0 or after[left] == n:
            return
        pair = (tokens[left], tokens[after[left]])
        if pair in ranks:
            heappush(heap, (ranks[pair], left, *pair))

    for left in range(n):
        offer(left)
    while heap:
        _, left, first, second = heappop(heap)
        right = after[left]
        if tokens[left] != first or right == n or tokens[right] != second:
            continue  # one of both is part of another token by now
        tokens[left] = first + second
        tokens[right] = ""
        after[left] = after[right]
        if after[left] < n:
            before[after[left]] = left
        offer(before[left])
        offer(left)
    return [token for token in tokens if token]


def main() -> None:
    """The demonstration merges two texts by a list of five merges."""
    merges = ["l o", "lo w", "▁ low", "e r", "▁low er"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    for text in ("▁low▁lower", "▁slow▁löw"):
        print(f"{text}: {' | '.join(merge_characters(text, ranks))}")


if __name__ == "__main__":
    main()
