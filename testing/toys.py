"""Toys whose distributions can be enumerated, and runners that play them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters import Drafter, ModelDrafter, NgramDrafter, SelfDrafter
from kernels import Ops
from kvcache import KVCache, KVSpec
from paged import PagedCache
from proof import Toy, Walk, WalkingCoin, enumerate_law, sequential_law
from request import Request, Settings
from runner import ModelRunner
from sampling import probabilities
from speculative import Drawing, Proposal, Round


class Cipher(Toy):
    """A toy that stores every token as another one: from its cache other toys read another text.
    As a drafter in the target's cache, it leaves the law right only if the target overwrites it."""

    def __call__(self, tokens, *others):
        return super().__call__((tokens + 1) % self.V, *others)


class Place(NamedTuple):
    """What a round asks of its target."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    ops: Ops = Ops()


CPU = torch.device("cpu")
TARGET = Toy(seed=1)
DRAFT = Toy(seed=2)
COPY = Cipher(seed=2)  # what it stores, no other toy can read


class Kind(NamedTuple):
    """A kind of row."""

    prompt: tuple[int, ...]
    gamma: int
    max_tokens: int
    ends: tuple[int, ...] = ()
    settings: dict[str, float] = {}

    def request(self, seed: int) -> Request:
        chosen = Settings(seed=seed, max_tokens=self.max_tokens, gamma=self.gamma, **self.settings)
        return Request(list(self.prompt), chosen, self.ends)

    def law(self, target: Toy = TARGET) -> dict:
        """The target's own."""
        return sequential_law(
            target,
            self.prompt,
            self.max_tokens,
            self.ends,
            lambda logits: probabilities(logits, **self.settings),
        )


def toy_cache(sequences: int, paged: bool = False) -> KVCache | PagedCache:
    if paged:
        return PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 7 * sequences, 1)
    return KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 7, sequences)


def toy_runner(
    n: int,
    target=TARGET,
    draft=DRAFT,
    where="own",
    coupled=False,
    make_coin=None,
    by_token=False,
    **options,
) -> ModelRunner:
    """where: the draft's keys and values: its own cache, or the target's, contiguous or paged; or
    n-grams, which have none."""
    cache = toy_cache(n, where == "paged")
    drafter = ModelDrafter(draft, toy_cache(n))
    if where == "n-grams":
        drafter = NgramDrafter()
    elif where != "own":
        drafter = SelfDrafter(draft, cache)
    drawing = Drawing(target.V, coupled, make_coin, by_token=by_token)
    return ModelRunner(target, cache, drawing, drafter=drafter, **options)


def new_tokens(request: Request) -> tuple[int, ...]:
    return tuple(request.tokens[request.num_prompt_tokens :])


def play(runner: ModelRunner, requests: Sequence[Request]) -> None:
    """All texts to their ends, and what must hold after every step."""
    for request in requests:
        runner.open(request)
    drafter = runner.drafter
    while scheduled := [runner.schedule(r) for r in requests if not r.finish_reason]:
        assert all(item.num_new_tokens <= runner.budget for item in scheduled)
        new = runner.step(scheduled)
        for item in scheduled:
            request = item.request
            assert request.num_remaining >= 0
            assert item.samples == (request in new)
            caches = [(runner.cache, request.seq)]
            if item.samples:
                assert runner.num_pending(request) == 1
            if isinstance(drafter, ModelDrafter) and request in drafter.seqs:
                assert drafter.length(request) < len(request.tokens)
                caches.append((drafter.cache, drafter.seqs[request]))
            for cache, seq in caches:  # accepted drafts, too, by their tokens
                assert cache.sequence(seq).tokens == request.tokens[: cache.length(seq)]


class PaddedCoin(WalkingCoin):
    """In coupled mode rows of zeros are padding, and nothing is decided there."""

    def __getitem__(self, rows):
        return PaddedCoin(super().__getitem__(rows).branches)

    def pick(self, probs: Tensor) -> Tensor:
        rows = probs.sum(-1).nonzero()[:, 0].tolist()
        picked = torch.zeros(len(probs), dtype=torch.int64)
        picked[rows] = WalkingCoin([self.branches[row] for row in rows]).pick(probs[rows])
        return picked


def laws_of(kinds: Sequence[Kind], make_runner=toy_runner, **options) -> list[dict]:
    """The law of each kind of row, from batches in which rows of all kinds lie side by side.
    make_runner(n, make_coin, **options): for n rows."""

    def run(walk: Walk, n: int) -> list:
        chosen = [branch.decide([1.0] * len(kinds)) for branch in walk.branches]
        requests = [kinds[i].request(row) for row, i in enumerate(chosen)]

        def coin(*keys):
            return PaddedCoin(walk(*keys).branches)

        play(make_runner(n, make_coin=coin, **options), requests)
        return list(zip(chosen, map(new_tokens, requests)))

    laws = enumerate_law(run, width=512)
    return [{text: p for (kind, text), p in laws.items() if kind == i} for i in range(len(kinds))]


KINDS = [  # γ from 0 to 3, ends and limits anywhere, and every setting
    Kind((2,), 3, 4, (2,)),
    Kind((0, 2), 2, 4, (0,)),
    Kind((2, 1, 0), 1, 3),
    Kind((0,), 0, 3),
    Kind((1, 1), 3, 2, (2,)),
    Kind((0, 1), 2, 3, (), dict(temperature=0.5)),
    Kind((1, 0), 2, 3, (1,), dict(temperature=3.0)),
    Kind((2, 1), 2, 3, (), dict(temperature=0)),
    Kind((0, 1), 2, 3, (), dict(top_k=2)),
    Kind((1, 2), 2, 3, (), dict(top_p=0.6)),
    Kind((2, 1), 2, 3, (), dict(min_p=0.5)),
    Kind((1, 1), 3, 3, (), dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.05)),
]


class LastToken(Drafter):
    """Drafts the last token once more."""

    def max_drafts(self, request: Request, wanted: int) -> int:
        return wanted

    def propose(self, round: Round) -> Proposal:
        proposal = round.no_drafts()
        drafted, q = proposal
        for b, (request, num_drafts) in enumerate(zip(round.requests, round.num_drafts)):
            drafted[b, :num_drafts] = request.tokens[-1]
            if q is not None:
                q[b, :num_drafts, request.tokens[-1]] = 1
        return proposal
