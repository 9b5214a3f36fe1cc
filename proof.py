"""The exact distribution of a sampler's outputs, as a sum over every possible run.

All randomness passes through an rng with two methods (sampling.py). The rng here follows a script
of outcomes. At each decision it records the probability of the outcome that it takes, and a new
script for each other outcome. This goes on until every script has been run. Then

    distribution(output) = Σ over the scripts that end in this output of
                Π over a script's decisions of the outcome's probability

`enumerate_distribution` computes the distribution of the production code, and
`sequential_distribution` that of the target. Tests check that their `distance` is only a rounding
error; `python speculative.py` prints both.

Invariant: the probabilities of all scripts add up to 1. Each request of a wide batch follows its
own script, or `group` requests share one, which gives their joint distribution. Cost: one run for
each possible sequence of outcomes. So the models are toys with outputs of a few tokens, out of a
vocabulary of three.

    B rows, one request each · k drafted tokens · V vocabulary · T tokens of a step
    R rows of logits
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import Ops
from parallel import Group

if TYPE_CHECKING:
    from kvcache import AttentionMetadata

Distribution = dict[Any, float]  # the probability of each output


class Branch:
    """One possible run. It follows a script, and then takes the first possible outcome each time.

    path: the outcomes so far, without those of decisions that have only one possible outcome.
    others: scripts for the outcomes that were not taken. (For decisions within the script, they
    were recorded by the run that wrote the script.)
    """

    def __init__(self, script: Sequence[int]):
        self.script = script
        self.probability = 1.0
        self.path: list[int] = []
        self.others: list[tuple[int, ...]] = []

    def decide(self, probs: Sequence[float]) -> int:
        """Choose between outcomes with these probabilities -> the index of one."""
        possible = [i for i, p in enumerate(probs) if p > 0]
        outcome = possible[0]
        if len(possible) > 1:
            if len(self.path) < len(self.script):
                outcome = self.script[len(self.path)]
            else:
                self.others += [(*self.path, other) for other in possible[1:]]
            self.path.append(outcome)
        self.probability *= probs[outcome]
        return outcome


class Walk:
    """Makes rngs, like `Keyed`. A request with seed s follows branch s // group."""

    def __init__(self, scripts: Sequence[Sequence[int]], group: int = 1):
        self.branches = [Branch(script) for script in scripts]
        self.group = group

    def __call__(self, seeds: Tensor, positions: Tensor, role: int | Tensor) -> WalkingRng:
        """positions and role are ignored, because a run makes its decisions in a fixed order."""
        return WalkingRng([self.branches[seed // self.group] for seed in seeds.tolist()])


class WalkingRng:
    """An rng with the methods of `Keyed`. Row b follows branches[b]."""

    def __init__(self, branches: list[Branch]):
        self.branches = branches

    def __getitem__(self, rows: slice | list[int]) -> WalkingRng:
        if isinstance(rows, slice):
            return WalkingRng(self.branches[rows])
        return WalkingRng([self.branches[row] for row in rows])

    def accept(self, prob: Tensor) -> Tensor:
        """Decide on every draft: float[B, k] -> bool[B, k]."""
        accepted = []
        for branch, row in zip(self.branches, prob.tolist()):
            accepted.append([branch.decide((1 - p, p)) == 1 for p in row])
        return torch.tensor(accepted, dtype=torch.bool).view(prob.shape)

    def pick(self, probs: Tensor) -> Tensor:
        """float[B, V] -> int64[B]."""
        picked = []
        for branch, row in zip(self.branches, probs.tolist()):
            picked.append(branch.decide(row))
        return torch.tensor(picked, dtype=torch.int64)


def enumerate_distribution(
    run: Callable[[Walk, int], Sequence[Any]], group: int = 1, width: int = 1024
) -> Distribution:
    """The distribution of what run(walk, n) returns.

    A run generates n · group outputs, with the seeds 0, 1, …, and returns n results: the outputs,
    or one tuple of outputs for each group.
    width: the most scripts that one run follows.
    """
    distribution = defaultdict(float)
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        walk = Walk(waiting[-width:], group)
        del waiting[-width:]
        texts = run(walk, len(walk.branches))
        for text, branch in zip(texts, walk.branches, strict=True):
            distribution[text] += branch.probability
            waiting += branch.others
    return dict(distribution)


class Toy:
    """A model with a vocabulary of V tokens, for sequences of up to `longest` tokens. It is a table
    of logits with a row for each sequence.

    The row's number is the sequence's code, in base V + 1: token t at position i adds
    (t + 1) · (V + 1)^i. With V = 3 the code of [2, 0] is 3 · 1 + 1 · 4 = 7. A toy sees the earlier
    tokens only through attention: what a token adds is stored as its value, and every key is 0. So
    attention returns the mean (3.5), and the mean times the length is the code. One wrong token in
    the target's cache therefore changes the distribution.
    """

    device = torch.device("cpu")
    dtype = torch.float64
    ops = Ops()
    group = Group()

    def __init__(self, V: int = 3, longest: int = 7, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand((V + 1) ** longest, V, generator=generator, dtype=torch.float64)
        weights = weights**3  # makes some much larger than others
        kinds = torch.randint(0, 8, weights.shape, generator=generator)
        weights[kinds == 0] = 0  # impossible tokens
        weights[kinds == 1] = 0.25  # ties
        weights[weights.sum(-1) == 0, seed % V] = 1  # at least one token is possible
        self.V = V
        logs = (weights / weights.sum(-1, keepdim=True)).log()  # [codes, V]
        self.table = logs.clamp(min=-1000)  # e^-1000 is 0, but the logits stay finite

    def price(self, context: int) -> int:
        return 1

    def code(self, text: Sequence[int]) -> int:
        """A sequence's row in the table."""
        return sum((token + 1) * (self.V + 1) ** i for i, token in enumerate(text))

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None = None,
        features: None = None,
    ) -> Tensor:
        """The logits after each token, or after the tokens at these indices: int64[T] -> [R, V]."""
        positions = metadata.positions.double()
        counts = ((tokens + 1) * (self.V + 1) ** positions)[:, None, None]  # [T, 1, 1]
        zeros = torch.zeros_like(counts)
        qkv = torch.cat((zeros, zeros, counts), dim=1)
        mean = self.ops.attend(qkv, 1, None, metadata, 0).flatten()
        codes = (mean * (positions + 1)).round().long()
        if logits_indices is not None:
            codes = codes[logits_indices]
        return self.table[codes]


def sequential_distribution(
    toy: Toy,
    prompt: Sequence[int],
    count: int,
    ends: Sequence[int],
    probs: Callable[[Tensor], Tensor],
) -> Distribution:
    """The distribution of up to `count` tokens of a toy, one token at a time, by recursion."""
    if count == 0:
        return {(): 1.0}
    distribution = {}
    for token, p in enumerate(probs(toy.table[toy.code(prompt)]).tolist()):
        if p > 0:
            remaining = 0 if token in ends else count - 1
            rest = sequential_distribution(toy, [*prompt, token], remaining, ends, probs)
            for text, mass in rest.items():
                distribution[(token, *text)] = p * mass
    return distribution


def surprise(texts: Sequence[Any], distribution: Distribution) -> float:
    """How far the frequencies of outputs are from a distribution: Pearson's χ², in standard
    deviations from its mean. Outputs that are expected less than five times are counted together.
    ∞ if an output has probability 0."""
    counts = Counter(texts)
    if counts.keys() - distribution.keys():
        return math.inf
    cells = []  # (how often an output came, how often it was expected)
    rare = [0, 0.0]
    for text, p in distribution.items():
        expected = p * len(texts)
        if expected >= 5:
            cells.append((counts[text], expected))
        else:
            rare[0] += counts[text]
            rare[1] += expected
    if rare[1] > 0:
        cells.append(tuple(rare))
    chi_squared = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1  # the mean of χ²; its variance is twice as large
    return (chi_squared - freedom) / math.sqrt(2 * freedom)


def distance(a: Distribution, b: Distribution) -> float:
    """The largest difference between two distributions, over all outputs."""
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def main() -> None:
    """Demonstration: what a grammar's masks do to whole outputs (grammar.py).

    A mask allows or forbids one token. It does not see how probable the rest of an output is. So
    outputs do not follow the target's distribution p, restricted to what the grammar allows
    (arXiv:2605.07698):

        share of x    = p(x) / Σ p(y), over all outputs y that are allowed
        with masks, x = Π_i p(x_i | x_<i) / Σ p(t | x_<i), over all tokens t that are allowed there
    """
    toy = Toy(seed=10)
    grammar = [(0, 0), (1, 0), (1, 2)]  # all outputs that are allowed

    def masked_probs(output: tuple) -> Tensor:
        logits = toy.table[toy.code([0, *output])].clone()
        for token in range(toy.V):
            begun = (*output, token)
            is_allowed = [other[: len(begun)] == begun for other in grammar]
            if not any(is_allowed):
                logits[token] = -math.inf
        return logits.softmax(-1)

    def sample(walk: Walk, n: int) -> list[tuple]:
        """n outputs of two tokens."""
        numbers = torch.arange(n)
        rng = walk(numbers, numbers, 0)
        outputs: list[tuple] = [()] * n
        for _ in range(2):
            probs = torch.stack([masked_probs(output) for output in outputs])
            picked = rng.pick(probs).tolist()
            for row, token in enumerate(picked):
                outputs[row] = (*outputs[row], token)
        return outputs

    masked = enumerate_distribution(sample)
    target = sequential_distribution(toy, [0], 2, (), lambda logits: logits.softmax(-1))
    mass = sum(map(target.get, grammar))
    print("output      target      share    with masks")
    for output in grammar:
        p = target[output]
        share = p / mass
        print(f"{output} {p:10.3f} {share:10.3f} {masked[output]:10.3f}")


if __name__ == "__main__":
    main()
