"""Drafters propose the tokens that the target then verifies.

A drafter proposes some tokens for each request of a round, each with the distribution that it was
drawn from. Verification is exact for *any* proposal with a known distribution, so a drafter may be
anything:

    ModelDrafter    a smaller Llama with the target's vocabulary, under the request's own settings
    SelfDrafter     the target's own INT4 copy (`--draft self`), in the target's cache
    NgramDrafter    the tokens that once followed the text's last few: no weights, one-hot

Invariant: between rounds a draft model's cache holds a prefix of the text, without its last token.
If all drafts were accepted, the cache lacks two tokens: the last draft, which was drawn but never
read, and the bonus. The next round reads both.

The target's INT4 copy has no cache of its own, and does not read the prompt. It borrows the
target's cache, stores the last token and all drafts but the last there, and truncates them again.
So it drafts only if all but the text's last token is cached.

A fourth drafter, which reads the target's hidden states, has a page of its own: eagle.py.

A model drafts by a *chain* (`draft`): the logits of the next draft, a pick from them, and the token
that was picked is fed, to go on behind it. A backend may do the whole chain in one call
(`Ops.chain`). The runner (runner.py) calls, in this order:

    open                              a request comes
    max_drafts, num_to_read, fits     a step is planned; nothing changes
    prepare, propose                  before the target's pass
    observe, commit                   after it
    close                             the request has ended

Not covered: trees of drafts.
Leviathan et al. 2023 (arXiv:2211.17192); prompt look-up: Saxena 2023; Yang et al. 2023, LLMA
(2304.04487).

    B requests of a round · k the largest number of drafts in it · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels import send
from kvcache import Cache
from model import Llama
from request import Request
from sampling import check_tokens
from speculative import Proposal, Round

if TYPE_CHECKING:
    from runner import ScheduledRequest


class Observed(NamedTuple):
    """Tokens of a text that the target has read, from position `start` on."""

    request: Request
    start: int
    following: list[int]  # the token after each of them


# ---- A chain of drafts ---------------------------------------------------------------------------


class Chain(Protocol):
    """How a model drafts for the requests of a round. Each draft follows the one before."""

    model: Llama
    cache: Cache

    def logits(self, rows: list[int]) -> Tensor:
        """The logits of the next draft of these requests: [R, ≥ V]."""

    def feed(self, rows: list[int], picked: Tensor) -> None:
        """Go on after the tokens that these requests have just drafted: int64[R]."""


def draft(chain: Chain, round: Round) -> Proposal:
    """Make all drafts of a round: the first of every request, then the second of those that want
    two, …"""
    proposal = round.no_drafts()
    for j in range(max(round.num_drafts)):
        rows = round.drafting(j)
        q, picked = round.pick_drafts(j, chain.logits(rows), rows)  # [R, V], [R]
        proposal.tokens[rows, j] = picked
        if proposal.q is not None:
            proposal.q[rows, j] = q
        chain.feed(rows, picked)
    return proposal


def fastest_draft(chain: Chain, round: Round) -> Proposal:
    """`draft`, but in one call where the model's backend has one."""
    return chain.model.ops.chain(chain, round) or draft(chain, round)


class ModelChain:
    """A Llama drafts. Its cache reserves memory for all drafts at once, because prefix caching must
    not find blocks that hold drafts."""

    def __init__(self, llama: Llama, cache: Cache, round: Round, unread: dict[int, Unread]):
        """unread: for each row of the round that wants drafts, the tokens that the cache lacks."""
        self.model = llama
        self.cache = cache
        self.unread = unread
        self.new = {b: tokens for b, (_, tokens) in unread.items()}  # the next pass reads these
        self.num_read = {b: cache.length(seq) for b, (seq, _) in unread.items()}
        wanted = []
        for b, (seq, tokens) in unread.items():
            later = [0] * (round.num_drafts[b] - 1)  # tokens that are not known yet
            wanted.append((seq, [*tokens, *later]))
        self.reserved = cache.extend(wanted)

    def logits(self, rows: list[int]) -> Tensor:
        spans = []
        for b in rows:
            start = self.num_read[b]
            self.num_read[b] += len(self.new[b])
            spans.append((self.unread[b].seq, start, self.num_read[b]))
        tokens, last = pack_tokens([self.new[b] for b in rows], self.model.device)
        wanted = None if len(tokens) == len(rows) else last  # None: all; each row has one token
        return self.model(tokens, self.cache.metadata(spans), wanted)

    def feed(self, rows: list[int], picked: Tensor) -> None:
        for b, token in zip(rows, check_tokens(picked.tolist())):
            self.new[b] = [token]


class Unread(NamedTuple):
    """Tokens of a text that a cache lacks."""

    seq: int
    tokens: list[int]


def chain_in_cache(llama: Llama, cache: Cache, round: Round) -> ModelChain:
    """A chain in the target's cache, which lacks only the last token of each text."""
    unread = {}
    for b in round.drafting():
        request = round.requests[b]
        unread[b] = Unread(request.seq, request.tokens[-1:])
    return ModelChain(llama, cache, round, unread=unread)


def pack_tokens(pieces: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The pieces end to end, int64[T], and the index of each piece's last token."""
    tokens = []
    last = []
    for piece in pieces:
        tokens += piece
        last.append(len(tokens) - 1)
    return send(tokens, device), send(last, device)


# ---- Drafters ------------------------------------------------------------------------------------


class Drafter:
    """The methods that a runner calls. This base class drafts nothing, and stores nothing."""

    shares_target_cache = False
    feature_layers: tuple[int, ...] = ()  # layers of the target whose inputs `observe` gets

    def open(self, request: Request) -> None:
        """Take a new request."""

    def close(self, request: Request) -> None:
        """Forget a request, if it was taken."""

    def length(self, request: Request) -> int:
        """The number of the text's tokens that the drafter has read, or need not read."""
        return len(request.tokens)

    def num_to_read(self, item: ScheduledRequest) -> int:
        """The number of the text's tokens that the drafter reads in a step, to draft or in
        `prepare`."""
        return 0

    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Read what texts without drafts still have to read, in a step that runs these plans."""

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether there is room for a step's drafts and for the tokens it reads. This changes
        nothing."""
        return True

    def max_drafts(self, request: Request, wanted: int) -> int:
        """The number of tokens, at most `wanted`, that can be drafted for this request. This
        changes nothing."""
        return 0

    def propose(self, round: Round) -> Proposal:
        """Draft as many tokens for each request as the round wants."""
        return round.no_drafts()

    def observe(self, observed: Sequence[Observed], features: Tensor) -> None:
        """The target has read these tokens. features: [T, layers, C], all texts end to end."""

    def commit(self, request: Request, num_new: int) -> None:
        """The text has grown by `num_new` tokens: forget what is stored of rejected drafts."""


class ModelDrafter(Drafter):
    """A model with a cache of its own. A text longer than its context gets no more drafts.
    budget: the most tokens of a text that it reads in a step without drafting; of a longer text
    fewer (`Llama.price`)."""

    def __init__(self, model: Llama, cache: Cache, budget: int = 512):
        self.model = model
        self.cache = cache
        self.budget = budget
        self.seqs: dict[Request, int] = {}  # the requests that fit into the context

    def open(self, request: Request) -> None:
        if len(request.tokens) <= self.cache.max_len:
            self.seqs[request], _ = self.cache.open(request.tokens)

    def close(self, request: Request) -> None:
        if request in self.seqs:
            self.cache.free(self.seqs.pop(request))

    def length(self, request: Request) -> int:
        if request not in self.seqs:
            return len(request.tokens)
        return self.cache.length(self.seqs[request])

    def num_to_read(self, item: ScheduledRequest) -> int:
        """A round with drafts reads all that the cache lacks. A chunk reads as much as the target
        does. After many rounds without drafts, a step reads what the budget allows."""
        missing = item.stop - self.length(item.request)
        most = max(item.num_tokens, self._most(item.request))
        if item.num_drafts:
            return missing
        if item.samples and missing <= most:
            return 0
        return max(0, min(most, missing))

    def _most(self, request: Request) -> int:
        """The tokens that the budget allows."""
        return self.budget // self.model.price(self.length(request))

    @torch.inference_mode()
    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> None:
        for item in scheduled:
            count = self.num_to_read(item)
            if count and not item.num_drafts:
                start = self.length(item.request)
                new = item.request.tokens[start : start + count]
                metadata = self.cache.extend([(self.seqs[item.request], new)])
                # No logits are wanted: ask for the fewest.
                self.model(send(new, self.model.device), metadata, slice(-1, None))

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """A round stores the text's pending tokens and all drafts but the last."""
        wanted = []
        for item in scheduled:
            count = self.num_to_read(item) + max(0, item.num_drafts - 1)
            if count:
                wanted.append((self.seqs[item.request], count))
        return self.cache.fits(wanted)

    def max_drafts(self, request: Request, wanted: int) -> int:
        """The text and all drafts but the last must fit into the context. With γ `auto` there are
        no drafts while much is to be read. With a fixed γ the round reads all of it: a seed must
        give the same text, whatever a cache holds."""
        if request not in self.seqs:
            return 0
        lag = len(request.tokens) - self.length(request)
        if request.settings.gamma is None and lag > self._most(request):
            return 0
        return min(wanted, self.cache.max_len - len(request.tokens) + 1)

    def propose(self, round: Round) -> Proposal:
        unread = {}
        for b in round.drafting():
            request = round.requests[b]
            seq = self.seqs[request]
            unread[b] = Unread(seq, request.tokens[self.cache.length(seq) :])
        return fastest_draft(ModelChain(self.model, self.cache, round, unread=unread), round)

    def commit(self, request: Request, num_new: int) -> None:
        if request in self.seqs:
            self.cache.commit(self.seqs[request], request.tokens, num_new)
            if len(request.tokens) > self.cache.max_len:
                self.close(request)


class BorrowingDrafter(Drafter):
    """A drafter in the target's cache, which takes back what it stored there. It stores fewer
    tokens than the target will store in its pass, so `fits` has nothing to ask."""

    shares_target_cache = True

    def __init__(self, model: Llama, cache: Cache):
        self.model = model
        self.cache = cache

    def max_drafts(self, request: Request, wanted: int) -> int:
        """There are no drafts before the first new token, so the target reads a prompt and draws in
        one step."""
        return wanted if len(request.tokens) > request.num_prompt_tokens else 0

    def propose(self, round: Round) -> Proposal:
        seqs = [round.requests[b].seq for b in round.drafting()]
        lengths = [self.cache.length(seq) for seq in seqs]
        proposal = fastest_draft(self.chain(round), round)
        for seq, length in zip(seqs, lengths):
            self.cache.truncate(seq, length)
        return proposal

    def chain(self, round: Round) -> Chain:
        raise NotImplementedError


class SelfDrafter(BorrowingDrafter):
    """The target's INT4 copy."""

    def chain(self, round: Round) -> Chain:
        return chain_in_cache(self.model, self.cache, round)


class NgramDrafter(Drafter):
    """Looks for an earlier place of the text's last n tokens, the largest n first, and proposes
    what followed there."""

    def __init__(self, longest: int = 3):
        self.longest = longest
        self.texts: dict[Request, str] = {}  # a character for each token: `rfind` finds tokens

    def open(self, request: Request) -> None:
        self.texts[request] = "".join(map(chr, request.tokens))

    def close(self, request: Request) -> None:
        self.texts.pop(request, None)

    def commit(self, request: Request, num_new: int) -> None:
        self.texts[request] += "".join(map(chr, request.tokens[-num_new:]))

    def max_drafts(self, request: Request, wanted: int) -> int:
        return len(self.look_up(request, wanted))

    def propose(self, round: Round) -> Proposal:
        proposal = round.no_drafts()
        for b, (request, num_drafts) in enumerate(zip(round.requests, round.num_drafts)):
            for j, token in enumerate(self.look_up(request, num_drafts)):
                proposal.tokens[b, j] = token
                if proposal.q is not None:
                    proposal.q[b, j, token] = 1
        return proposal

    def look_up(self, request: Request, count: int) -> list[int]:
        """At most `count` tokens. The tokens that a grammar forces come first; if there are none,
        the text's own."""
        state = request.grammar_state
        if state is None:
            return self._find(request, count)
        return state.forced(count) or state.allowed(self._find(request, count))

    def _find(self, request: Request, count: int) -> list[int]:
        """`count` tokens, or none. Where the match lies near the text's end, the tokens after it
        are repeated."""
        text = self.texts[request]
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            start = text.rfind(text[-n:], 0, -1)  # without the last token: not the suffix itself
            if start >= 0:
                followers = text[start + n :]
                return [ord(followers[j % len(followers)]) for j in range(count)]
        return []


def main() -> None:
    """The demonstration: what the drafts of each drafter are worth, for the same text."""
    target = Model.load("tiny")
    asked = dict(temperature=0, max_tokens=100, gamma=3)
    for name in ("ngram", "self", "tiny-draft", "tiny-eagle"):
        drafts = generate("Once upon a time", target, draft=name, **asked).speculation
        print(
            f"{name:10} {drafts.acceptance:4.0%} accepted, {drafts.tokens_per_round:.2f} tokens a "
            "round of 3 drafts"
        )


if __name__ == "__main__":
    from generate import Model, generate

    main()
