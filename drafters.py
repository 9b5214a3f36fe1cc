"""Drafters propose the tokens that the target then verifies.

A drafter proposes some tokens for each request of a round, each with the distribution that it was
drawn from. Verification is exact for *any* proposal with a known distribution, so a drafter may be
anything:

    ModelDrafter    a smaller Llama with the target's vocabulary, under the request's own settings
    SelfDrafter     the target's own INT4 copy (`--draft self`), in the target's cache
    LookupDrafter   what followed the same tokens before: no weights (lookup.py)
    FirstLookUp     look-ups first; another drafter drafts where it is more likely to be right

Invariant: between rounds, a draft model's cache holds a prefix of the text, without the text's last
token. If all drafts were accepted, the cache lacks two tokens: the last draft, which was drawn but
never read, and the bonus. The next round reads both.

The target's INT4 copy has no cache of its own and does not read the prompt. It uses the target's
cache: it stores the last token and all drafts but the last there, and then truncates the sequence
to its former length. So it can draft only if every token but the text's last one is cached.

A drafter that reads the target's hidden states has its own page: eagle.py.

A model drafts through a *chain*: it computes the logits of the next draft, a token is picked from
them, and that token is fed back to the model for the draft after it. A backend may run the whole
chain in one call (`Ops.chain`). The runner (runner.py) calls:

    chances, most,              while it plans a step; they store nothing, but may open a sequence
      num_to_read, fits
    propose                     before the target's pass
    observe, learn              after the target's pass
    close                       when the request has ended or is preempted

Not covered: trees of drafts.
Leviathan et al. 2023 (arXiv:2211.17192).

    B requests of a round · k the largest number of drafts in it · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from devices import send
from gamma import Acceptance
from kvcache import Cache
from model import Features, Llama
from request import Request
from sampling import check_tokens
from speculative import Proposal, Round

if TYPE_CHECKING:
    from runner import ScheduledRequest


# ---- A chain of drafts ---------------------------------------------------------------------------


class Chain:
    """How a model drafts for the requests of a round. Each draft depends on the ones before it."""

    model: Llama
    cache: Cache

    def logits(self, rows: list[int]) -> Tensor:
        """The logits of the next draft of these requests: [R, ≥ V]."""
        raise NotImplementedError

    def feed(self, rows: list[int], picked: Tensor) -> None:
        """Take the tokens that these requests have just drafted: int64[R]."""
        raise NotImplementedError

    def one_by_one(self, round: Round) -> Proposal:
        """Make all drafts of a round: the first draft of every request, then the second draft of
        those that want two, and so on."""
        proposal = round.no_drafts()
        for j in range(max(round.num_drafts)):
            rows = round.drafting(j)
            logits = self.logits(rows)
            q, picked = round.pick_drafts(j, logits, rows, proposal.tokens)  # [R, V], [R]
            proposal.tokens[rows, j] = picked
            if proposal.q is not None:
                proposal.q[rows, j] = q
            self.feed(rows, picked)
        return proposal

    def draft(self, round: Round) -> Proposal:
        """Do what `one_by_one` does, in a single call if the model's backend supports that."""
        return self.model.ops.chain(self, round)


class ModelChain(Chain):
    """The chain of a Llama. Memory for all drafts is reserved in advance, so a backend that runs
    the whole chain in one call finds in `reserved` where the keys and values of each draft go."""

    def __init__(
        self, llama: Llama, cache: Cache, round: Round, unread: dict[int, tuple[int, list[int]]]
    ):
        """unread: for each row of the round that wants drafts, its sequence and the tokens that are
        not in the cache yet."""
        self.model = llama
        self.cache = cache
        self.seqs = {b: seq for b, (seq, _) in unread.items()}
        self.new = {b: tokens for b, (_, tokens) in unread.items()}  # for the next pass to read
        # How many tokens of each sequence the passes have read so far.
        self.num_read = {b: cache.length(seq) for b, seq in self.seqs.items()}
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
            spans.append((self.seqs[b], start, self.num_read[b]))
        tokens, last = pack_tokens([self.new[b] for b in rows], self.model.device)
        wanted = None if len(tokens) == len(rows) else last  # None: every token gives logits
        return self.model(tokens, self.cache.metadata(spans), wanted)

    def feed(self, rows: list[int], picked: Tensor) -> None:
        for b, token in zip(rows, check_tokens(picked.tolist())):
            self.new[b] = [token]


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
    """The methods that a runner calls. This base class drafts and stores nothing."""

    is_coupled = False  # True: verified in coupled mode, whatever was asked for
    shares_target_cache = False
    sees_each_token = False  # True: it is called after each token, also while it drafts nothing
    feature_layers: tuple[int, ...] = ()  # layers of the target whose inputs `learn` gets

    def __init__(self) -> None:
        self.acceptance = Acceptance()

    def chances(self, request: Request) -> Sequence[float]:
        """For 1, 2, … drafts of the next round, the probability that all of them are accepted."""
        return self.acceptance.chances()

    def most(self, request: Request, wanted: int) -> int:
        """The number of tokens, at most `wanted`, that can be drafted for this request."""
        return 0

    def num_to_read(self, item: ScheduledRequest) -> int:
        """How many of the text's tokens the drafter reads in a step."""
        return 0

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether there is room for a step's drafts and for the tokens that the drafter reads."""
        return True

    def propose(self, round: Round) -> Proposal:
        """Draft as many tokens for each request as the round wants."""
        return round.no_drafts()

    def observe(self, request: Request) -> None:
        """Called when a round of this request has been verified; it is the last of its rounds."""
        self.acceptance.observe(request.rounds[-1])

    def learn(self, scheduled: Sequence[ScheduledRequest], features: Features | None) -> None:
        """Called after the target has run this step and the requests have their new tokens.
        features: those of all tokens in the pass; None without `feature_layers`."""

    def close(self, request: Request) -> None:
        """Drop what is stored for a request, if anything is."""


class ModelDrafter(Drafter):
    """A model with its own cache. It reads each chunk of a prompt after the target has read it. It
    reads the tokens of rounds without drafts only when it drafts again. A request that is longer
    than the model's context gets no more drafts."""

    def __init__(self, model: Llama, cache: Cache):
        super().__init__()
        self.model = model
        self.cache = cache
        self.seqs: dict[Request, int] = {}  # in `cache`

    def seq_of(self, request: Request) -> int:
        """The request's sequence, opened on first use."""
        if request not in self.seqs:
            self.seqs[request], _ = self.cache.open(request.tokens)
        return self.seqs[request]

    def most(self, request: Request, wanted: int) -> int:
        """The text and all drafts but the last must fit into the context."""
        return max(0, min(wanted, self.cache.max_len - len(request.tokens) + 1))

    def num_to_read(self, item: ScheduledRequest) -> int:
        """For a round with drafts: every token that is not in the cache yet. For a chunk: at most
        as many as the target reads. Without drafts, or beyond the context: none."""
        if len(item.request.tokens) > self.cache.max_len:
            return 0
        if item.samples and not item.num_drafts:
            return 0
        missing = item.stop - self.cache.length(self.seq_of(item.request))
        return missing if item.samples else max(0, min(missing, item.num_tokens))

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """A round stores the tokens that are not in the cache yet, and all drafts but the last."""
        wanted = []
        for item in scheduled:
            count = self.num_to_read(item) + max(0, item.num_drafts - 1)
            if count:
                wanted.append((self.seq_of(item.request), count))
        return self.cache.fits(wanted)

    def propose(self, round: Round) -> Proposal:
        unread = {}
        for b in round.drafting():
            request = round.requests[b]
            seq = self.seq_of(request)
            unread[b] = (seq, request.tokens[self.cache.length(seq) :])
        return ModelChain(self.model, self.cache, round, unread=unread).draft(round)

    @torch.inference_mode()
    def learn(self, scheduled: Sequence[ScheduledRequest], features: Features | None) -> None:
        new = []  # (sequence, tokens of chunks that the target has read)
        for item in scheduled:
            count = self.num_to_read(item)
            if count and not item.samples:
                seq = self.seq_of(item.request)
                start = self.cache.length(seq)
                new.append((seq, item.request.tokens[start : start + count]))
        if new:
            tokens, _ = pack_tokens([piece for _, piece in new], self.model.device)
            # The logits are not needed, so ask for as few as possible.
            self.model(tokens, self.cache.extend(new), slice(-1, None))
        for item in scheduled:
            if item.request in self.seqs:
                self.cache.commit(self.seqs[item.request], item.request.tokens)
            if len(item.request.tokens) > self.cache.max_len:
                self.close(item.request)

    def close(self, request: Request) -> None:
        if request in self.seqs:
            self.cache.free(self.seqs.pop(request))


class SelfDrafter(Drafter):
    """The target's INT4 copy. It stores its tokens in the target's cache and removes them again.
    The target's own pass stores more tokens than that, so `fits` has nothing to check."""

    shares_target_cache = True

    def __init__(self, model: Llama, cache: Cache):
        super().__init__()
        self.model = model
        self.cache = cache

    def most(self, request: Request, wanted: int) -> int:
        """No drafts before the first new token: drafts would need the prompt's keys and values
        first, in a step of its own (`ModelRunner.schedule`)."""
        return wanted if len(request.tokens) > request.num_prompt_tokens else 0

    def chain(self, round: Round) -> Chain:
        """A chain that reads only the last token of each request; the others are in the cache."""
        unread = {}
        for b in round.drafting():
            request = round.requests[b]
            unread[b] = (request.seq, request.tokens[-1:])
        return ModelChain(self.model, self.cache, round, unread=unread)

    def propose(self, round: Round) -> Proposal:
        seqs = [round.requests[b].seq for b in round.drafting()]
        lengths = [self.cache.length(seq) for seq in seqs]
        proposal = self.chain(round).draft(round)
        for seq, length in zip(seqs, lengths):
            self.cache.truncate(seq, length)
        return proposal


def main() -> None:
    """Demonstration: how many drafts of each drafter are accepted, for the same prompt."""
    target = Model.load("tiny")
    asked = dict(temperature=0, max_tokens=100, gamma=3)
    for name in ("ngram", "self", "tiny-draft", "tiny-eagle"):
        drafts = generate("Once upon a time", target, draft=name, **asked).speculation
        print(
            f"{name:10} {drafts.acceptance:4.0%} accepted, {drafts.tokens_per_round:.2f} tokens "
            "per round of 3 drafts"
        )


if __name__ == "__main__":
    from generate import generate
    from loading import Model

    main()
