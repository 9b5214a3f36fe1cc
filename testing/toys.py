"""Toys whose distributions can be enumerated, and runners that play them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from automaton import Grammars
from drafters import Drafter, ModelDrafter, SelfDrafter
from kernels import Ops
from kvcache import KVCache, KVSpec
from loading import LOOK_UP
from lookup import FirstLookUp, History, LookupDrafter
from model import Llama
from paged import PagedCache
from proof import Distribution, Toy, Walk, WalkingRng, enumerate_distribution
from request import Request, Settings
from runner import ModelRunner
from sampling import probabilities
from settings import PENALTIES
from speculative import Drawing, Proposal, Round


class Cipher(Toy):
    """A toy that stores every token as another one: from its cache other toys read another text.
    As a drafter in the target's cache, it leaves the distribution right only if the target
    overwrites what it stored."""

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


def penalized(
    logits: Sequence[float], prompt: Sequence[int], new: Sequence[int], ends: Sequence[int], **asked
) -> list[float]:
    """The definition of penalties, token by token."""
    chosen = {name: asked.get(name, neutral) for name, neutral in PENALTIES.items()}
    changed = []
    for token, logit in enumerate(logits):
        if token in [*prompt, *new]:
            factor = chosen["repetition_penalty"]
            logit = logit / factor if logit > 0 else logit * factor
        logit -= chosen["presence_penalty"] * (token in new)
        logit -= chosen["frequency_penalty"] * list(new).count(token)
        logit += chosen["logit_bias"].get(token, 0)
        is_early = token in ends and len(new) < chosen["min_tokens"]
        changed.append(-1e300 if is_early else logit)
    return changed


class Kind(NamedTuple):
    """A kind of row."""

    prompt: tuple[int, ...]
    gamma: int
    max_tokens: int
    ends: tuple[int, ...] = ()
    settings: dict[str, Any] = {}

    def request(self, seed: int) -> Request:
        chosen = Settings(seed=seed, max_tokens=self.max_tokens, gamma=self.gamma, **self.settings)
        return Request(list(self.prompt), chosen, self.ends)

    def distribution(self, target: Toy | Llama = TARGET, new: tuple[int, ...] = ()) -> Distribution:
        """The definition: the target alone, a token after the other, each drawn from what the
        grammar allows."""
        if len(new) == self.max_tokens or {*new[-1:]} & {*self.ends}:
            return {(): 1.0}
        tokens = [*self.prompt, *new]
        if isinstance(target, Toy):
            logits = target.table[target.code(tokens)]
        else:
            logits = target(torch.tensor(tokens))[-1]
        chosen = dict(self.settings)
        penalties = {name: chosen.pop(name) for name in PENALTIES.keys() & chosen}
        changed = penalized(logits.tolist(), self.prompt, new, self.ends, **penalties)
        logits = torch.tensor(changed, dtype=logits.dtype)
        if regex := chosen.pop("regex", None):
            logits = logits.masked_fill(~torch.tensor(allowed(regex, new)), -torch.inf)
        distribution = {}
        for token, p in enumerate(probabilities(logits, **chosen).tolist()):
            if p > 0:
                for rest, mass in self.distribution(target, (*new, token)).items():
                    distribution[(token, *rest)] = p * mass
        return distribution


def toy_cache(sequences: int, paged: bool = False) -> KVCache | PagedCache:
    if paged:
        return PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 7 * sequences, 1)
    return KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 7, sequences)


class LastToken(Drafter):
    """Drafts the last token once more."""

    def most(self, request: Request, wanted: int) -> int:
        return wanted

    def propose(self, round: Round) -> Proposal:
        proposal = round.no_drafts()
        drafted, q = proposal
        for b, (request, num_drafts) in enumerate(zip(round.requests, round.num_drafts)):
            drafted[b, :num_drafts] = request.tokens[-1]
            if q is not None:
                q[b, :num_drafts, request.tokens[-1]] = 1
        return proposal


class Apart(LookupDrafter):
    """Each request has a history for itself, with a foreign text. The branches of a walk are
    requests of one batch, and a script must meet the same drafts whenever it is run."""

    def history_of(self, request: Request) -> History:
        if request not in self.histories:
            self.histories[request] = History()
            self.histories[request].update([0, 1, 0, 0, 1, 2, 1, 1, 0, 2])
        return self.histories[request]


WITHOUT_WEIGHTS = {"n-grams": Apart, "last token": LastToken, "nothing": lambda: None}


def toy_runner(
    n: int,
    target=TARGET,
    draft=DRAFT,
    where="own",
    coupled=False,
    make_rng=None,
    by_token=False,
    **options,
) -> ModelRunner:
    """where: the draft's keys and values: its own cache, or the target's, contiguous or paged; or
    what drafts without any; after "ngram," only where nothing likelier is looked up."""
    looks_up_first = where.startswith(LOOK_UP)
    where = where.removeprefix(LOOK_UP)
    cache = toy_cache(n, where == "paged")
    if where in WITHOUT_WEIGHTS:
        drafter = WITHOUT_WEIGHTS[where]()
    elif where == "own":
        drafter = ModelDrafter(draft, toy_cache(n))
    else:
        drafter = SelfDrafter(draft, cache)
    if looks_up_first:
        drafter = FirstLookUp(Apart(), drafter)
        drafter.observe = lambda request: None  # who drafts follows nothing that others draw
    drawing = Drawing(target.V, coupled, make_rng, by_token=by_token)
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
                assert drafter.cache.length(drafter.seqs[request]) < len(request.tokens)
                caches.append((drafter.cache, drafter.seqs[request]))
            for stored, seq in caches:  # accepted drafts, too, by their tokens
                assert stored.sequence(seq).tokens == request.tokens[: stored.length(seq)]


class PaddedRng(WalkingRng):
    """In coupled mode rows of zeros are padding, and nothing is decided there."""

    def __getitem__(self, rows):
        return PaddedRng(super().__getitem__(rows).branches)

    def pick(self, probs: Tensor) -> Tensor:
        rows = probs.sum(-1).nonzero()[:, 0].tolist()
        picked = torch.zeros(len(probs), dtype=torch.int64)
        picked[rows] = WalkingRng([self.branches[row] for row in rows]).pick(probs[rows])
        return picked


@contextmanager
def several_tokens(target: Llama | Toy, n: int) -> Iterator[None]:
    """In the block its steps without drafts draw n tokens of each request, as on a GPU."""
    ops = pytest.importorskip("gpu.steps").MultiStep()
    ops.multi_step = n
    with patch.object(target.ops, "run_rounds", ops.run_rounds):
        yield


def distributions_of(
    kinds: Sequence[Kind], make_runner=toy_runner, serve=play, width: int = 512, **options
) -> list[dict]:
    """The distribution of each kind of row, from batches with rows of all kinds side by side.
    make_runner(n, make_rng, **options): for n rows. serve(runner, requests): to their ends."""

    def run(walk: Walk, n: int) -> list:
        chosen = [branch.decide([1.0] * len(kinds)) for branch in walk.branches]
        requests = [kinds[i].request(row) for row, i in enumerate(chosen)]

        def rng(*keys):
            return PaddedRng(walk(*keys).branches)

        serve(make_runner(n, make_rng=rng, **options), requests)
        return list(zip(chosen, map(new_tokens, requests)))

    distributions = enumerate_distribution(run, width=width)
    return [
        {text: p for (kind, text), p in distributions.items() if kind == i}
        for i in range(len(kinds))
    ]


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
    Kind((0, 2), 2, 3, (0,), dict(repetition_penalty=0.6, logit_bias={1: 0.8, 0: -0.5})),
    Kind((1, 1), 3, 3, (), dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.05)),
    Kind((2,), 2, 3, (1,), dict(presence_penalty=0.7, frequency_penalty=1.1, min_tokens=2)),
]


# ---- With grammars: a vocabulary of four tokens, and what is allowed there, by definition

SPELLING = ("a", "b", "ab", "")
END = 3


class Letters:
    """A tokenizer of these."""

    vocab_size = 4
    specials = {"<end>": END}

    def token_bytes(self, id: int) -> bytes:
        return SPELLING[id].encode()

    def encode(self, text: str, is_first: bool = True) -> list[int]:
        return ["a", "b"].index(text[0]) * [1] + [0] if len(text) == 1 else [0] * len(text)


class FourTokens(Toy):
    """A toy in which each token has some probability: so each grammar can be followed."""

    def __init__(self, seed: int):
        super().__init__(V=4, longest=7, seed=seed)
        self.table = self.table.exp().clamp(min=0.03).log()


@cache
def language(regex: str) -> list[str]:
    """All texts of up to 10 letters that match."""
    texts = ("".join(letters) for n in range(11) for letters in product("ab", repeat=n))
    return [text for text in texts if re.fullmatch(regex, text)]


def allowed(regex: str, new: Sequence[int]) -> list[bool]:
    """Which tokens may follow these: those that lead to a text that matches."""
    text = "".join(SPELLING[token] for token in new)
    begins = [
        any(match.startswith(text + letters) for match in language(regex)) for letters in SPELLING
    ]
    return [*begins[:END], text in language(regex)]


@cache
def grammars() -> Grammars:
    return Grammars(Letters(), {END})


REPEATS = dict(repetition_penalty=1.5, frequency_penalty=0.9, logit_bias={2: 0.5})
RULED = [  # γ from 0 to 3, ends within accepted drafts, every setting, and texts without a grammar
    Kind((2,), 3, 4, (END,), dict(regex="ab?a")),
    Kind((0, 2), 2, 4, (END,), dict(regex="a*b")),
    Kind((2, 1, 0), 1, 3, (END,), dict(regex="(a|ba)*")),
    Kind((0,), 0, 3, (END,), dict(regex="(ab){1,2}")),
    Kind((1, 1), 3, 2, (END,)),
    Kind((0,), 3, 4, (END,), dict(regex="abab")),
    Kind((0, 1), 2, 3, (END,), dict(regex="a?b?a?", temperature=0.5)),
    Kind((1, 0), 2, 3, (END,), dict(regex="[ab]+", temperature=3.0)),
    Kind((2, 1), 2, 3, (END,), dict(regex="b*a*", temperature=0)),
    Kind((0, 1), 2, 3, (END,), dict(regex="[ab]+", top_k=1)),
    Kind((1, 2), 2, 3, (END,), dict(regex="(a|bb)*", top_p=0.6)),
    Kind((2, 1), 2, 3, (END,), dict(regex="[ab]{2}", min_p=0.5)),
    Kind((1, 1), 3, 3, (END,), dict(regex="a+b", temperature=0.7, top_k=2, top_p=0.9, min_p=0.05)),
    Kind((1, 2), 2, 3, (END,), dict(top_k=2)),
    Kind((1, 0), 3, 3, (END,), dict(regex="[ab]+", top_p=0.9, **REPEATS)),
    Kind((0, 1), 2, 3, (END,), dict(regex="a?b*|aa", min_tokens=3)),
]
