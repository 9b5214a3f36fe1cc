"""Drafters propose the tokens that the target then verifies.

A drafter proposes up to γ tokens for each text of a round, each with the distribution that it was drawn from.
Verification is exact for *any* proposal with a known distribution, so a drafter may be anything:

    ModelDrafter    a smaller Llama with the target's vocabulary, under the text's own settings
    SelfDrafter     the target's own INT4 copy (`--draft self`), in the target's cache
    NgramDrafter    the tokens that once followed the text's last few tokens: no weights, one-hot distributions

Invariant: between rounds a draft model's cache holds a prefix of the text, without its last token. If all γ drafts were
accepted, the cache lacks two tokens, the last draft (drawn, never read) and the bonus: the next round reads both.
The target's INT4 copy needs no cache and does not read the prompt. It stores the last token and its drafts behind the
target's keys and values, and truncates them again; so it drafts only if all but the text's last token is cached.

Not covered: trees of drafts; drafters that read the target's hidden states (EAGLE).
Leviathan et al. 2023 (arXiv:2211.17192); prompt look-up: Saxena 2023; Yang et al. 2023, LLMA (2304.04487).
    B texts of a round · k the largest γ among them · V vocabulary
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from request import Request, Round, pack
from sampling import lawful


class Drafter:
    """The methods that a round calls; in this base class, those of a drafter without a cache."""

    shares = False  # whether it stores its drafts in the target's cache

    def open(self, request: Request) -> None: ...
    def close(self, request: Request) -> None: ...
    def follow(
        self, request: Request, length: int
    ) -> None: ...  # read the text's tokens up to `length`
    def keep(
        self, request: Request, length: int
    ) -> None: ...  # truncate the draft's cache to `length`

    def lag(self, request: Request) -> int:
        """How many tokens of the text the drafter has not read."""
        return 0

    def fits(
        self, work: Sequence[Any]
    ) -> bool:  # is there room for a step's drafts, and its chunks of prompts?
        return True

    def room(self, request: Request, most: int) -> int:
        """How many tokens the drafter can draft for this text, at most `most`."""
        raise NotImplementedError

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        """Drafts int64[B, k] and their distributions float[B, k, V]: −1 and zeros where a text has fewer than k."""
        raise NotImplementedError


def write_drafts(
    llama: Any,
    cache: Any,
    seqs: Sequence[int],
    unread: Sequence[Sequence[int]],
    round: Round,
    publish: bool = True,
) -> tuple[Tensor, Tensor]:
    """`propose` by a model: each pass drafts one token of every text. unread: each text's tokens not in the cache."""
    (drafted, q), new = round.nothing(), list(unread)  # int64[B, k], float[B, k, V]
    for j in range(drafted.shape[1]):
        live = [b for b, gamma in enumerate(round.gammas) if gamma > j]
        step = cache.extend([(seqs[b], new[b]) for b in live], publish)
        tokens, last = pack([new[b] for b in live], round.device)
        logits = llama(tokens, step, rows=None if len(tokens) == len(live) else last)
        probs = round.probabilities(logits, live)  # [len(live), V]
        picked = round.draft_coin(j, live).pick(probs)
        where = slice(None) if len(live) == len(drafted) else live
        drafted[where, j], q[where, j] = picked, probs
        for b, token in zip(live, lawful(picked.tolist())):
            new[b] = [token]
    return drafted, q


class ModelDrafter(Drafter):
    """A model with a cache of its own."""

    def __init__(self, llama: Any, cache: Any):
        self.llama, self.cache = llama, cache
        self.seqs: dict[Request, int] = {}  # of texts that fit into the draft's context

    def open(self, request: Request) -> None:
        self.seqs[request], _ = self.cache.open(request.tokens)

    def close(self, request: Request) -> None:
        if request in self.seqs:
            self.cache.free(self.seqs.pop(request))

    def lag(self, request: Request) -> int:
        return (
            len(request.tokens) - self.cache.length(self.seqs[request])
            if request in self.seqs
            else 0
        )

    @torch.inference_mode()
    def follow(self, request: Request, length: int) -> None:
        if length > self.cache.max_len:
            self.close(request)
        have = len(request.tokens) - self.lag(request)
        if not (unread := request.tokens[have:length]):
            return
        seq, (tokens, _) = self.seqs[request], pack([unread], self.llama.device)
        try:
            self.llama(tokens, self.cache.extend([(seq, unread)]), rows=slice(-1, None))
        except BaseException:  # Ctrl-C too
            self.cache.truncate(seq, have)
            raise

    def fits(self, work: Sequence[Any]) -> bool:
        """A round stores the text's unread tokens and all drafts but the last; a chunk is as long as the target's."""
        mine = [w for w in work if w.request in self.seqs and w.num_drafts != 0]
        sizes = [
            w.num_tokens if w.num_drafts is None else self.lag(w.request) + w.num_drafts - 1
            for w in mine
        ]
        return self.cache.fits([(self.seqs[w.request], size) for w, size in zip(mine, sizes)])

    def room(self, request: Request, most: int) -> int:
        """The text and γ − 1 drafts must fit into the context. A text too long for γ = 1 gets no drafts any more."""
        if (fits := self.cache.max_len - len(request.tokens) + 1) < 1:
            self.close(request)
        return min(most, fits) if request in self.seqs else 0

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        seqs = [self.seqs.get(request, -1) for request in round.requests]
        unread = [
            r.tokens[-self.lag(r) :] if gamma else []
            for r, gamma in zip(round.requests, round.gammas)
        ]
        return self.llama.ops.draft(write_drafts, self.llama, self.cache, seqs, unread, round)

    def keep(self, request: Request, length: int) -> None:
        if (seq := self.seqs.get(request)) is not None:
            self.cache.truncate(seq, min(self.cache.length(seq), length))
            self.cache.settle(seq, request.tokens)


class SelfDrafter(Drafter):
    """The target's INT4 copy, in the target's cache. It needs no room of its own: the target will store more tokens."""

    shares = True

    def __init__(self, llama: Any, cache: Any):
        self.llama, self.cache = llama, cache

    def room(self, request: Request, most: int) -> int:
        """No drafts before the first new token, even if a fork has the prompt cached: γ depends on the text alone."""
        return most if len(request.tokens) > request.prompt else 0

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        """No block is published: the copy's keys and values are not the target's, and its tokens may be rejected."""
        seqs, unread = (
            [request.seq for request in round.requests],
            [request.tokens[-1:] for request in round.requests],
        )
        before = [self.cache.length(seq) for seq in seqs]
        try:
            return self.llama.ops.draft(
                write_drafts, self.llama, self.cache, seqs, unread, round, False
            )
        finally:  # Ctrl-C too
            for seq, length in zip(seqs, before):
                self.cache.truncate(seq, length)


class NgramDrafter(Drafter):
    """Finds the text's last n tokens earlier in the text, largest n first, and proposes the tokens that followed."""

    def __init__(self, longest: int = 3):
        self.longest, self.texts = (
            longest,
            WeakKeyDictionary[Request, str](),
        )  # a character is a token

    def room(self, request: Request, most: int) -> int:
        return len(self.look_up(request, most))

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        drafted, q = round.nothing()
        for b, (request, gamma) in enumerate(zip(round.requests, round.gammas)):
            for j, token in enumerate(self.look_up(request, gamma)):
                drafted[b, j], q[b, j, token] = token, 1
        return drafted, q

    def look_up(self, request: Request, count: int) -> list[int]:
        """`count` tokens, or none. If the occurrence is near the text's end, the tokens after it are repeated."""
        text = self.texts.get(request, "")
        self.texts[request] = text = text + "".join(map(chr, request.tokens[len(text) :]))
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            if (at := text.rfind(text[-n:], 0, -1)) >= 0:
                return [ord(text[at + n + j % (len(text) - n - at)]) for j in range(count)]
        return []
