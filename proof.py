"""The law of a sampler (the distribution of its texts), exactly: a sum over every possible run.

All randomness passes through a coin with two methods (sampling.py). The coin here follows a script of outcomes. At each
decision it notes the outcome's probability, and scripts for the other outcomes, until every script has been run:

    law(text) = Σ over the scripts that end in this text of Π over a script's decisions of the outcome's probability

Invariant: the probabilities of all scripts add up to 1. Each text of a wide batch follows its own script, or `group`
texts share one, which gives their joint law. The models are toys: a table gives the distribution after each text. A toy
stores tokens as digits and reads the text back through attention: one wrong token in a cache changes the law.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import Ops


class Branch:
    """One possible run: it follows a script, then takes first possible outcomes. others: scripts of other outcomes."""

    def __init__(self, script: Sequence[int]):
        self.script, self.probability = script, 1.0
        self.path, self.others = list[int](), list[tuple[int, ...]]()

    def decide(
        self, probs: Sequence[float]
    ) -> int:  # a decision has at least two possible outcomes
        taken, *others = (i for i, p in enumerate(probs) if p > 0)
        if others and len(self.path) < len(self.script):
            taken = self.script[len(self.path)]
        else:
            self.others += [(*self.path, other) for other in others]
        self.path += [taken] if others else []
        self.probability *= probs[taken]
        return taken


class Walk:
    """Makes coins, as `Keyed` does: a request with seed s follows branch s // group."""

    def __init__(self, scripts: Sequence[Sequence[int]], group: int = 1):
        self.branches, self.group = [Branch(script) for script in scripts], group

    def __call__(self, seeds: Tensor, positions: Tensor, role: int | Tensor) -> "WalkingCoin":
        return WalkingCoin([self.branches[seed // self.group] for seed in seeds.tolist()])


class WalkingCoin:
    """A coin with the methods of `Keyed`; row b follows branches[b]."""

    def __init__(self, branches: list[Branch]):
        self.branches = branches

    def __getitem__(self, rows: slice | list[int]) -> "WalkingCoin":
        return WalkingCoin(
            self.branches[rows] if isinstance(rows, slice) else [self.branches[row] for row in rows]
        )

    def accept(self, prob: Tensor) -> Tensor:  # float[B, k] -> bool[B, k]
        stood = [
            next((j for j, p in enumerate(row) if not branch.decide((1 - p, p))), len(row))
            for branch, row in zip(self.branches, prob.tolist())
        ]
        return (
            torch.arange(prob.shape[1]) < torch.tensor(stood)[:, None]
        )  # later ones do not matter

    def pick(self, probs: Tensor) -> Tensor:  # float[B, V] -> int64[B]
        return torch.tensor(
            list(map(Branch.decide, self.branches, probs.tolist())), dtype=torch.int64
        )


def enumerate_law(
    run: Callable[[Walk, int], Sequence[Any]], group: int = 1, width: int = 1024
) -> dict[Any, float]:
    """The law of the outcomes of run(walk, n), which makes n · group texts, seeds 0, 1, …, and returns n outcomes."""
    law, waiting = defaultdict[Any, float](float), [()]
    while waiting:
        walk, waiting = Walk(waiting[-width:], group), waiting[:-width]
        for outcome, branch in zip(run(walk, len(walk.branches)), walk.branches, strict=True):
            law[outcome] += branch.probability
            waiting += branch.others
    return dict(law)


class Toy:
    """A model of V tokens, for texts of up to `longest` tokens: the text's code is the row of a table of logits."""

    device, dtype, ops, shift = (
        torch.device("cpu"),
        torch.float64,
        Ops(),
        0,
    )  # shift: added to stored digits

    def __init__(self, V: int = 3, longest: int = 7, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand((V + 1) ** longest, V, generator=generator, dtype=torch.float64) ** 3
        kinds = torch.randint(0, 8, (len(weights), V), generator=generator)
        weights[kinds == 0], weights[kinds == 1] = 0, 0.25  # zeros and ties
        weights[weights.sum(-1) == 0, seed % V] = 1  # where all are zeros
        self.table, self.V = (weights / weights.sum(-1, keepdim=True)).log(), V  # [texts, V]

    def code(
        self, text: Sequence[int]
    ) -> int:  # in base V + 1, token t at place i is the digit t + 1
        return sum((token + 1) * (self.V + 1) ** i for i, token in enumerate(text))

    def __call__(
        self, tokens: Tensor, metadata: Any, logits_indices: Tensor | slice | None = None
    ) -> Tensor:
        at, shifted = metadata.positions, (tokens + self.shift) % self.V + 1
        digits = (shifted.double() * (self.V + 1.0) ** at)[:, None, None]
        mean = self.ops.store_and_attend(
            0 * digits, 0 * digits, digits, metadata, 0
        ).flatten()  # of a text
        codes = (mean * (at + 1)).round().long()
        return self.table[codes if logits_indices is None else codes[logits_indices]]


def sequential_law(
    toy: Toy,
    prompt: Sequence[int],
    count: int,
    ends: Sequence[int],
    probs: Callable[[Tensor], Tensor],
) -> dict[tuple[int, ...], float]:
    """The law of up to `count` tokens that a toy makes alone, one after the other, by recursion."""
    chances = probs(toy.table[toy.code(prompt)]).tolist() if count else ()
    return {
        (token, *text): p * mass
        for token, p in enumerate(chances)
        if p > 0
        for text, mass in sequential_law(
            toy, [*prompt, token], 0 if token in ends else count - 1, ends, probs
        ).items()
    } or {(): 1.0}


def distance(
    a: dict[Any, float], b: dict[Any, float]
) -> float:  # the largest difference of two laws
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())
