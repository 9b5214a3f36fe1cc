"""Drafters: who proposes the tokens that the target then verifies.

A drafter proposes up to γ tokens for each text of a round, each with the distribution that it was drawn from.
Verification is exact for *any* proposal of known distribution, so a drafter may be anything:

    ModelDrafter    a smaller Llama with the target's vocabulary, under the text's own settings
    SelfDrafter     the target's own INT4 copy (`--draft self`), in the target's cache
    NgramDrafter    the tokens after the last occurrence of the text's last few: no weights, a one-hot distribution

Invariant of a model's own cache, between rounds: it holds a prefix of the text, without the last token. After γ drafts,
all accepted, it lacks two: the last draft (drawn, never read) and the bonus; the next round reads both. A copy of the
target needs no cache and no second reading of the prompt: it writes the last token and its drafts after the target's
keys and values, and truncates them; so it drafts only where all but the text's last token is cached.

Not covered: trees of drafts; drafters that read the target's hidden states (EAGLE).
Leviathan et al. 2023 (arXiv:2211.17192); prompt look-up: Saxena 2023; Yang et al. 2023, LLMA (2304.04487).
    B texts of a round · k the largest γ among them · V vocabulary
"""
import time
from collections.abc import Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from request import Request, Round, pack
from sampling import lawful


class Drafter:
    """What a round needs of a drafter; as it stands here, of one that keeps nothing."""
    shares = False                                      # whether it drafts in the target's cache

    def open(self, request: Request) -> None: ...
    def close(self, request: Request) -> None: ...
    def follow(self, request: Request, length: int) -> None: ...        # read the text up to `length`
    def keep(self, request: Request, length: int) -> None: ...          # forget the tokens beyond `length`

    def lag(self, request: Request) -> int:
        """How many tokens of the text it has not read."""
        return 0

    def fits(self, work: Sequence[Any]) -> bool:        # room for a step's drafts, and for the chunks to follow
        return True

    def room(self, request: Request, most: int) -> int:
        """How many tokens it can draft for this text, at most `most`."""
        raise NotImplementedError

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        """Drafts int64[B, k] and their distributions float[B, k, V]: −1 and zero where a text has fewer than k."""
        raise NotImplementedError


def write_drafts(llama: Any, cache: Any, seqs: Sequence[int], unread: Sequence[Sequence[int]], round: Round,
                 publish: bool = True) -> tuple[Tensor, Tensor]:
    """A model's drafts, one token of every text at a time. unread: the tokens of each that the cache lacks."""
    (drafted, q), new = round.nothing(), list(unread)                                   # int64[B, k], float[B, k, V]
    for j in range(drafted.shape[1]):
        live = [b for b, gamma in enumerate(round.gammas) if gamma > j]
        step = cache.extend([(seqs[b], new[b]) for b in live], publish)
        tokens, last = pack([new[b] for b in live], round.device)
        logits = llama(tokens, step, rows=None if len(tokens) == len(live) else last)
        probs = round.probabilities(logits, live)                                       # [len(live), V]
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
        self.seqs: dict[Request, int] = {}              # but for texts that outgrew the draft's context

    def open(self, request: Request) -> None:
        self.seqs[request], _ = self.cache.open(request.tokens)

    def close(self, request: Request) -> None:
        if request in self.seqs:
            self.cache.free(self.seqs.pop(request))

    def lag(self, request: Request) -> int:
        return len(request.tokens) - self.cache.length(self.seqs[request]) if request in self.seqs else 0

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
        except BaseException:                           # Ctrl-C too
            self.cache.truncate(seq, have)
            raise

    def fits(self, work: Sequence[Any]) -> bool:
        """A round reads its unread tokens and all drafts but the last; a chunk is as long as the target's."""
        mine = [w for w in work if w.request in self.seqs and w.num_drafts != 0]
        sizes = [w.num_tokens if w.num_drafts is None else self.lag(w.request) + w.num_drafts - 1 for w in mine]
        return self.cache.fits([(self.seqs[w.request], size) for w, size in zip(mine, sizes)])

    def room(self, request: Request, most: int) -> int:
        """The text and γ − 1 drafts must fit into the context. Once γ = 1 does not, the text drafts no more."""
        if (fits := self.cache.max_len - len(request.tokens) + 1) < 1:
            self.close(request)
        return min(most, fits) if request in self.seqs else 0

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        seqs = [self.seqs.get(request, -1) for request in round.requests]
        unread = [r.tokens[-self.lag(r):] if gamma else [] for r, gamma in zip(round.requests, round.gammas)]
        return self.llama.ops.draft(write_drafts, self.llama, self.cache, seqs, unread, round)

    def keep(self, request: Request, length: int) -> None:
        if (seq := self.seqs.get(request)) is not None:
            self.cache.truncate(seq, min(self.cache.length(seq), length))
            self.cache.settle(seq, request.tokens)


class SelfDrafter(Drafter):
    """The target's INT4 copy, in the target's cache. There is always room: the target will write more."""
    shares = True

    def __init__(self, llama: Any, cache: Any):
        self.llama, self.cache = llama, cache

    def room(self, request: Request, most: int) -> int:
        """None for the first token. (γ depends on the text alone, not on what is pending: a twin's prompt is not.)"""
        return most if len(request.tokens) > request.prompt else 0

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        """Nothing is published: these keys and values are not the target's, and the tokens may be rejected."""
        seqs, unread = [request.seq for request in round.requests], [request.tokens[-1:] for request in round.requests]
        before = [self.cache.length(seq) for seq in seqs]
        try:
            return self.llama.ops.draft(write_drafts, self.llama, self.cache, seqs, unread, round, False)
        finally:                                        # Ctrl-C too
            for seq, length in zip(seqs, before):
                self.cache.truncate(seq, length)

    @torch.inference_mode()
    def estimate(self) -> float:
        """Seconds of a drafted token, from those of a pass through one layer and of a pass through none."""
        part, seconds = copy(self.llama), []
        for count in (0, 0, 1, 1):                      # the first of each warms up
            part.layers, start = self.llama.layers[:count], time.perf_counter()
            part(torch.zeros(1, dtype=torch.int64, device=part.device))
            seconds.append(time.perf_counter() - start)
        return seconds[1] + max(0.0, seconds[3] - seconds[1]) * len(self.llama.layers)


class NgramDrafter(Drafter):
    """Looks the last n tokens up in the text before them, longest n first, and proposes the tokens that followed."""

    def __init__(self, longest: int = 3):
        self.longest, self.texts = longest, WeakKeyDictionary[Request, str]()               # a character is a token

    def room(self, request: Request, most: int) -> int:
        return len(self.look_up(request, most))

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        drafted, q = round.nothing()
        for b, (request, gamma) in enumerate(zip(round.requests, round.gammas)):
            for j, token in enumerate(self.look_up(request, gamma)):
                drafted[b, j], q[b, j, token] = token, 1
        return drafted, q

    def look_up(self, request: Request, count: int) -> list[int]:
        """Up to `count` tokens. The copy may run into its own start: a text that repeats itself goes on doing so."""
        text = self.texts.get(request, "")
        self.texts[request] = text = text + "".join(map(chr, request.tokens[len(text):]))
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            if (at := text.rfind(text[-n:], 0, -1)) >= 0:
                return [ord(text[at + n + j % (len(text) - n - at)]) for j in range(count)]
        return []
