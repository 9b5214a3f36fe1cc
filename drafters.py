"""Drafters propose the tokens that the target then verifies.

A drafter proposes some tokens for each request of a round, each with the distribution that it was
drawn from. Verification is exact for *any* proposal with a known distribution, so a drafter may be
anything:

    ModelDrafter    a smaller Llama with the target's vocabulary, under the request's own settings
    SelfDrafter     the target's own INT4 copy (`--draft self`), in the target's cache
    NgramDrafter    the tokens that once followed the text's last few: no weights, one-hot

Invariant: between rounds a draft model's cache holds a prefix of the text, without its last token.
If all drafts were accepted, the cache lacks two tokens, the last draft (drawn, never read) and the
bonus: the next round reads both.

The target's INT4 copy has no cache of its own, and does not read the prompt: it borrows the
target's cache, stores the last token and all drafts but the last there, and truncates them again;
so it drafts only if all but the text's last token is cached.

A fourth, which reads the target's hidden states, has a page of its own: eagle.py.

Not covered: trees of drafts.
Leviathan et al. 2023 (arXiv:2211.17192); prompt look-up: Saxena 2023; Yang et al. 2023, LLMA
(2304.04487).

    B requests of a round · k the largest number of drafts in it · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels import send
from kvcache import Cache
from model import Llama
from request import Request
from speculative import Proposal, Round

if TYPE_CHECKING:
    from runner import ScheduledRequest


class Observed(NamedTuple):
    """Tokens of a text that the target has read, from position `start` on."""

    request: Request
    start: int
    following: list[int]  # the token after each


class Drafter:
    """What a runner calls; in this base class nothing is drafted, and nothing is stored."""

    shares_target_cache = False
    feature_layers: tuple[int, ...] = ()  # layers of the target whose inputs `observe` gets

    def open(self, request: Request) -> None:
        """Take a new request."""

    def close(self, request: Request) -> None:
        """Forget a request."""

    def num_pending(self, request: Request) -> int:
        """How many tokens of the text the drafter has not read."""
        return 0

    def read(self, request: Request, count: int) -> None:
        """Read so many pending tokens, without drafting."""

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether there is room for a step's drafts, and for what it reads. Changes nothing."""
        return True

    def max_drafts(self, request: Request, wanted: int) -> int:
        """How many tokens, at most `wanted`, can be drafted for this request. Changes nothing."""
        return 0

    def propose(self, round: Round) -> Proposal:
        """Draft as many tokens for each request as the round wants."""
        return round.empty_drafts()

    def observe(self, observed: Sequence[Observed], features: Tensor) -> None:
        """The target has read these tokens. features: [T, layers, C] of all, end to end."""

    def commit(self, request: Request, num_new: int) -> None:
        """The text has grown by `num_new` tokens: forget what is stored of rejected drafts."""

    def restore(self, request: Request, length: int) -> None:
        """A step was interrupted: forget what was read after the first `length` tokens."""


class ModelDrafter(Drafter):
    """A model with a cache of its own. A text longer than its context gets no drafts any more."""

    def __init__(self, llama: Llama, cache: Cache):
        self.llama = llama
        self.cache = cache
        self.seqs: dict[Request, int] = {}  # of requests that fit into the context

    def open(self, request: Request) -> None:
        if len(request.tokens) <= self.cache.max_len:
            self.seqs[request], _ = self.cache.open(request.tokens)

    def close(self, request: Request) -> None:
        if request in self.seqs:
            self.cache.free(self.seqs.pop(request))

    def num_pending(self, request: Request) -> int:
        if request not in self.seqs:
            return 0
        return len(request.tokens) - self.cache.length(self.seqs[request])

    @torch.inference_mode()
    def read(self, request: Request, count: int) -> None:
        seq = self.seqs[request]
        length = self.cache.length(seq)
        new = request.tokens[length : length + count]
        metadata = self.cache.extend([(seq, new)])
        # No logits are wanted: the fewest.
        self.llama(send(new, self.llama.device), metadata, logits_indices=slice(-1, None))

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """A round stores the text's pending tokens and all drafts but the last."""
        wanted = []
        for item in scheduled:
            count = item.num_catch_up
            if item.num_drafts:
                count = self.num_pending(item.request) + item.num_drafts - 1
            if count:
                wanted.append((self.seqs[item.request], count))
        return self.cache.fits(wanted)

    def max_drafts(self, request: Request, wanted: int) -> int:
        """The text and all drafts but the last must fit into the context."""
        if request not in self.seqs:
            return 0
        return min(wanted, self.cache.max_len - len(request.tokens) + 1)

    def propose(self, round: Round) -> Proposal:
        """k passes, each of which drafts a token of every request: the loop is `Ops.draft`."""
        seqs = [self.seqs.get(request, -1) for request in round.requests]  # −1: has no drafts
        pending = []
        for seq, request, num_drafts in zip(seqs, round.requests, round.num_drafts):
            pending.append(request.tokens[self.cache.length(seq) :] if num_drafts else [])
        return self.llama.ops.draft(self.llama, self.cache, seqs, pending, round)

    def commit(self, request: Request, num_new: int) -> None:
        if request in self.seqs:
            self.cache.commit(self.seqs[request], request.tokens, num_new)
            if len(request.tokens) > self.cache.max_len:
                self.close(request)

    def restore(self, request: Request, length: int) -> None:
        if request in self.seqs:
            self.cache.truncate(self.seqs[request], length)


class SelfDrafter(Drafter):
    """The target's INT4 copy, in the target's cache. It stores fewer tokens there than the target
    will store in its pass, so `fits` has nothing to ask."""

    shares_target_cache = True

    def __init__(self, llama: Llama, cache: Cache):
        self.llama = llama
        self.cache = cache

    def max_drafts(self, request: Request, wanted: int) -> int:
        """0 until the first new token: so the target reads a prompt and draws in one step."""
        return wanted if len(request.tokens) > request.num_prompt_tokens else 0

    def propose(self, round: Round) -> Proposal:
        """cache_blocks=False: no other text finds blocks with the copy's keys and values."""
        seqs = [request.seq for request in round.requests]
        pending = [request.tokens[-1:] for request in round.requests]
        lengths = [self.cache.length(seq) for seq in seqs]
        drafts = self.llama.ops.draft(
            self.llama, self.cache, seqs, pending, round, cache_blocks=False
        )
        for seq, length in zip(seqs, lengths):
            self.cache.truncate(seq, length)
        return drafts


class NgramDrafter(Drafter):
    """Finds the text's last n tokens earlier in the text, largest n first, and what followed."""

    def __init__(self, longest: int = 3):
        self.longest = longest
        self.texts: dict[Request, str] = {}  # a character for each token: `rfind` finds tokens

    def open(self, request: Request) -> None:
        self.texts[request] = "".join(map(chr, request.tokens))

    def close(self, request: Request) -> None:
        del self.texts[request]

    def commit(self, request: Request, num_new: int) -> None:
        self.texts[request] += "".join(map(chr, request.tokens[-num_new:]))

    def restore(self, request: Request, length: int) -> None:
        self.open(request)

    def max_drafts(self, request: Request, wanted: int) -> int:
        return len(self.look_up(request, wanted))

    def propose(self, round: Round) -> Proposal:
        drafted, q = round.empty_drafts()
        for b, (request, num_drafts) in enumerate(zip(round.requests, round.num_drafts)):
            for j, token in enumerate(self.look_up(request, num_drafts)):
                drafted[b, j] = token
                if q is not None:
                    q[b, j, token] = 1
        return drafted, q

    def look_up(self, request: Request, count: int) -> list[int]:
        """At most `count` tokens. What a grammar forces comes before what the text has had."""
        state = request.grammar_state
        if state is None:
            return self._find(request, count)
        return state.forced(count) or state.allowed(self._find(request, count))

    def _find(self, request: Request, count: int) -> list[int]:
        """`count` tokens, or none. Near the text's end, the tokens after the match are repeated."""
        text = self.texts[request]
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            start = text.rfind(text[-n:], 0, -1)  # without the last token: not the suffix itself
            if start >= 0:
                followers = text[start + n :]
                return [ord(followers[j % len(followers)]) for j in range(count)]
        return []
