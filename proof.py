"""The output law of a sampler, exactly: walk through everything that can happen, and add up the probabilities.

A statistical test of a sampler needs millions of samples to see an error of a thousandth, and never says "exact". But all randomness
passes through a coin with two verbs (sampling.py); so put a coin there that does not toss but *decides*: it follows a script, and
notes what else could have happened at each decision, and with what probability. Run the production code once for each script until
no alternative is left:

    law(text) = Σ over the scripts that end in this text of Π over its decisions of their probability

Each text of a wide batch follows a script of its own, so thousands of branches are walked side by side. (`group` texts may share a
script: that gives their joint law.)

The models are toys whose distribution after every text is a row of a table. A toy keeps nothing: it stores each token in the cache
it is given, as a digit, and reads the text back through attention, whose mean of all digits is a number that says which text it is.
So an error of a single token in a cache, in a position, or in what was truncated, changes the law.

Invariant: the probabilities of all scripts add up to 1.

    B rows, one script each (or `group` rows together) · V vocabulary · k drafts
"""
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Script = tuple[int, ...]


class Branch:
    """One way things can go: a script, then always the first thing that is possible."""

    def __init__(self, script: Script):
        self.script, self.path, self.options, self.probability = script, list[int](), list[list[int]](), 1.0

    def decide(self, probs: Sequence[float]) -> int:
        """Take an outcome of positive probability. Where there is only one, nothing is decided."""
        options, step = [i for i, p in enumerate(probs) if p > 0], len(self.path)
        taken = self.script[step] if len(options) > 1 and step < len(self.script) else options[0]
        if len(options) > 1:
            self.path.append(taken)
            self.options.append(options)
        self.probability *= probs[taken]
        return taken

    def others(self) -> list[Script]:
        """The scripts of what else could have happened after this script's end."""
        return [(*self.path[:step], option) for step in range(len(self.script), len(self.path)) for option in self.options[step][1:]]


class Walk:
    """Makes coins like `Keyed`: the row whose request has seed s follows branch s // group."""

    def __init__(self, scripts: Sequence[Script], group: int = 1):
        self.branches, self.group = [Branch(script) for script in scripts], group

    def __call__(self, seeds: Tensor, positions: Tensor, role: int | Tensor) -> "WalkingCoin":
        return WalkingCoin([self.branches[seed // self.group] for seed in seeds.tolist()])


class WalkingCoin:
    def __init__(self, branches: list[Branch]):
        self.branches = branches

    def __getitem__(self, rows: slice | list[int]) -> "WalkingCoin":
        return WalkingCoin(self.branches[rows] if isinstance(rows, slice) else [self.branches[row] for row in rows])

    def ahead(self, V: int) -> None:
        """There is no noise to be made."""

    def accept(self, prob: Tensor) -> Tensor:                                               # float[B, k] -> bool[B, k]
        out = torch.zeros(prob.shape, dtype=torch.bool)
        for b, (branch, row) in enumerate(zip(self.branches, prob.tolist())):
            for j, p in enumerate(row):
                if branch.decide((1 - p, p)) == 0:
                    break                                                                   # nobody reads on
                out[b, j] = True
        return out

    def pick(self, probs: Tensor) -> Tensor:                                                # float[B, V] -> int64[B]
        return torch.tensor([branch.decide(row) for branch, row in zip(self.branches, probs.tolist())], dtype=torch.int64)


def enumerate_law(run: Callable[[Walk, int], Sequence[Any]], group: int = 1, width: int = 1024) -> dict[Any, float]:
    """The law of what `run` returns. run(walk, n) makes n · group texts, seeds 0, 1, …, and returns n outcomes, one a branch."""
    law, waiting = defaultdict[Any, float](float), [()]
    while waiting:
        scripts, waiting = waiting[-width:], waiting[:-width]
        walk = Walk(scripts, group)
        for outcome, branch in zip(run(walk, len(scripts)), walk.branches, strict=True):
            law[outcome] += branch.probability
            waiting += branch.others()
    return dict(law)


# ---- Toys ---------------------------------------------------------------------------------------------------------------------

class Toy:
    """A model of V tokens and texts of up to `longest` of them: logits from a table that the text is an index of."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, V: int = 3, longest: int = 7, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand((V + 1) ** longest, V, generator=generator, dtype=torch.float64) ** 3
        kinds = torch.randint(0, 8, (len(weights), V), generator=generator)
        weights = torch.where(kinds == 0, 0.0, torch.where(kinds == 1, 0.25, weights))      # zeros and ties
        weights[weights.sum(-1) == 0, seed % V] = 1                                         # and here a single token is left
        self.table, self.V = (weights / weights.sum(-1, keepdim=True)).log(), V             # [texts, V]

    def digits(self, tokens: Tensor) -> Tensor:
        """What it stores of each token: 1 to V."""
        return tokens + 1

    def code(self, text: Sequence[int]) -> int:
        """The number of a text: token t at place i is the digit t + 1."""
        return sum((token + 1) * (self.V + 1) ** i for i, token in enumerate(text))

    def __call__(self, tokens: Tensor, step: Any, rows: Tensor | slice | None = None) -> Tensor:
        digit = self.digits(tokens).double() * (self.V + 1.0) ** step.positions             # [T]
        nothing = torch.zeros(len(tokens), 1, 1, dtype=torch.float64)
        mean = step.attend(0, nothing, nothing, digit[:, None, None]).flatten()             # [T], each over its own text so far
        codes = (mean * (step.positions + 1)).round().long()
        return self.table[codes if rows is None else codes[rows]]


class Cipher(Toy):
    """A toy that writes every token as the digit of another: where it has stored something, every other toy reads another text."""

    def digits(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) % self.V + 1


def own_law(toy: Toy, prompt: Sequence[int], count: int, ends: Sequence[int], probs: Callable[[Tensor], Tensor]) -> dict[tuple[int, ...], float]:
    """The law of up to `count` tokens that a toy writes by itself, one after the other, by recursion."""
    if count == 0:
        return {(): 1.0}
    law: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(probs(toy.table[toy.code(prompt)]).tolist()):
        if p > 0:
            rest = {(): 1.0} if token in ends else own_law(toy, [*prompt, token], count - 1, ends, probs)
            law |= {(token, *text): p * mass for text, mass in rest.items()}
    return law


def distance(a: dict[Any, float], b: dict[Any, float]) -> float:
    """The largest difference of two laws."""
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())
