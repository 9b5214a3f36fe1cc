"""Exact speculative sampling: one pass of the target verifies drafted tokens.

A decoding step takes as long as reading the weights, whether it computes one token or five. So a
drafter proposes x₁ … x_γ, each drawn from a distribution q_j, and one pass of the target over all
of them gives the distributions p₁ … p_γ₊₁.

Token by token (`verify`), draft x_j is accepted with probability min(1, p_j(x_j) / q_j(x_j)). The
first rejection ends the round with a token drawn from the residual, max(0, p_j − q_j) normalized.
If every draft is accepted, the round ends with a bonus token drawn from p_γ₊₁.

Proof that the output follows p (Leviathan et al. 2023, A.1). At one position, with β = Σ min(p, q):
  1. x comes out as an accepted draft with probability q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)).
  2. So a draft is rejected with probability 1 − β = Σ (p − min(p, q)) = Σ max(0, p − q). The same
     sum normalizes the residual.
  3. x comes out as a correction with probability
     (1 − β) · max(0, p(x) − q(x)) / (1 − β) = max(0, p(x) − q(x)).
  4. Together: min(p(x), q(x)) + max(0, p(x) − q(x)) = p(x), for any q.
  5. Position j counts only if all drafts before it were accepted. Then they are part of the output,
     and p_j is the target's distribution after them. By induction, every token follows p.

As a block (`verify_block`; Sun et al. 2024), a draft that is likelier under p than under q makes up
for an earlier one that is less likely. The first j drafts have the weight

    w_j = min(1, w_j₋₁ · p_j(x_j) / q_j(x_j)),        w₀ = 1

and the residual after them is max(0, w_j p_j₊₁ − q_j₊₁), with the sum m_j. Each draft j passes with
probability h_j = m_j / (m_j + 1 − w_j), independently of the others. All drafts up to the last one
that passes are accepted; if none passes, none is accepted. The round ends with a token drawn from
the residual after the accepted drafts, normalized. After the last draft q is 0, so
h_γ = m_γ = w_γ, the residual is w_γ p, and the token is a bonus.

Proof that the output follows p, and of a claim: given the first j drafts, the probability that at
least these are accepted is w_j. The claim holds for j = γ, because h_γ = w_γ. If it holds for
j + 1, then after the first j drafts, with w = w_j, m = m_j, p = p_j₊₁ and q = q_j₊₁:
  1. x comes out as an accepted draft with probability q(x) · min(1, w p(x)/q(x)) =
     min(w p(x), q(x)).
  2. So at most j drafts are accepted with probability 1 − Σ min(w p, q) = 1 − w + m, and exactly j
     with probability (1 − w + m) · h_j = m. The sum of the residual is also m. At least j are
     accepted with probability (w − m) + m = w, which is the claim for j.
  3. x comes out as a correction with probability m · max(0, w p(x) − q(x)) / m =
     max(0, w p(x) − q(x)).
  4. Together: min(w p(x), q(x)) + max(0, w p(x) − q(x)) = w p(x), for any q.
  5. Position j + 1 counts only if at least j drafts were accepted, which has probability w. Then
     they are part of the output, and x comes out with probability p(x). By induction, every token
     follows p.
Token by token, the first j drafts are accepted with probability Π min(1, p/q) ≤ w_j. So a block is
never worse, and no other rule whose output follows p accepts more on average (Sun et al. 2024,
theorem 2).

Both are exact mode. In coupled mode (Daliri, Musco & Suresh 2024) the target picks with the keyed
noise of each position, as in plain decoding. A draft is picked with the *same* noise, and is
accepted if the target picks it, too. The output then depends only on the target and the seed, but
fewer drafts are accepted: at least (1 − TV) / (1 + TV), against β = 1 − TV token by token, where
TV = ½ Σ |p − q|.
At temperature 0 both modes accept only the target's choice. A round in which every request has
temperature 0 is coupled, because coupled mode needs no q.

Invariant: the number of drafts in a round never depends on that round's draws. If it did, the
output would not follow p.

    B requests of a round · k the most drafts of one of them · V vocabulary · R rows of logits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from devices import send
from grammar import Masks
from kvcache import KVSpec
from request import Request
from sampling import TEXT, Keyed, Setting, check_finite, draft_role, penalize
from settings import SETTINGS

if TYPE_CHECKING:
    from model import Llama


class Proposal(NamedTuple):
    """The drafts of a round."""

    tokens: Tensor  # int64[B, k]; −1: the request has fewer drafts, or logits were not finite
    # The distributions of the drafts, float[B, k + 1, V]; 0 after a request's last draft. None in
    # coupled mode, which needs none.
    q: Tensor | None


class Rng(Protocol):
    """The randomness of a call, for each of its rows: `sampling.Keyed` or `proof.WalkingRng`."""

    def __getitem__(self, rows: slice | list[int]) -> Rng: ...
    def accept(self, prob: Tensor) -> Tensor: ...
    def pick(self, probs: Tensor) -> Tensor: ...


Verify = Callable[[Tensor, Tensor, Tensor, Rng], tuple[Tensor, Tensor]]  # the type of `verify`


def verify(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """Count the accepted drafts, token by token, and draw the token after them.

    p: the target's distributions, float[B, k + 1, V], k ≥ 1; q and drafted: the fields q and tokens
    of a Proposal. After a request's last draft q is 0: nothing is accepted there, and the residual
    is p, so the draw from it is the bonus. -> the number accepted, and the correction or bonus:
    int64[B] each.
    """
    ratio = likelihood_ratio(p, q, drafted)
    ratio = ratio.clamp(max=1)
    passed = rng.accept(ratio)
    accepted = count_leading(passed)
    return accepted, pick_residual(p, q, accepted, rng)


def likelihood_ratio(p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """p(x) / q(x) of each draft x: float[B, k]; 0 after a request's last draft, where q is 0."""
    index = drafted.clamp(min=0)
    index = index[..., None]  # [B, k, 1]
    p_x = p[:, :-1].gather(-1, index)
    q_x = q[:, :-1].gather(-1, index)
    ratio = torch.where(q_x > 0, p_x / q_x, 0)
    return ratio[..., 0]


def pick_residual(p: Tensor, q: Tensor, accepted: Tensor, rng: Rng) -> Tensor:
    """Draw the token after the accepted drafts: int64[B]. It is drawn from max(0, p − q) at that
    position, normalized, or from p if that has no mass."""
    rows = torch.arange(len(p), device=p.device)
    p_end = p[rows, accepted]  # [B, V], at the position where the round ends
    q_end = q[rows, accepted]
    residual = p_end - q_end
    residual = residual.clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    probs = torch.where(mass > 0, residual / mass, p_end)  # no mass: p = q, up to rounding
    return rng.pick(probs)


def verify_block(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """`verify` as a block, with the names of the proof."""
    ratio = likelihood_ratio(p, q, drafted)  # [B, k]
    weights = [torch.ones_like(ratio[:, 0])]
    for ratio_j in ratio.unbind(1):
        weight = weights[-1] * ratio_j
        weights.append(weight.clamp(max=1))
    w = torch.stack(weights, 1)  # [B, k + 1]
    weighted = w[..., None] * p
    residual = weighted - q
    residual = residual.clamp(min=0)  # [B, k + 1, V]
    m = residual.sum(-1)  # [B, k + 1]
    rest = 1 - w
    h = m / (m + rest)
    h = torch.where(w == 1, 1, h)  # there h = m / m, and 0 / 0 if p = q
    passed = rng.accept(h[:, 1:])
    accepted = count_to_last(passed)
    return accepted, pick_residual(weighted, q, accepted, rng)


def couple(p: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """`verify` in coupled mode: accept each draft that the target picks, too. The rng has
    B · (k + 1) rows: those of the first request, then those of the next one."""
    B, k = drafted.shape
    rows = p.flatten(0, 1)  # [B · (k + 1), V]
    picked = rng.pick(rows).view(B, k + 1)
    passed = drafted == picked[:, :k]  # −1, where there is no draft, is never picked
    accepted = count_leading(passed)
    token = picked.gather(1, accepted[:, None])
    return accepted, token[:, 0]


def count_leading(passed: Tensor) -> Tensor:
    """The number of True before each row's first False: bool[B, k] -> int64[B]."""
    so_far = passed.long().cumprod(1)
    return so_far.sum(1)


def count_to_last(passed: Tensor) -> Tensor:
    """The length of each row up to its last True: bool[B, k] -> int64[B]."""
    k = passed.shape[1]
    numbers = torch.arange(1, k + 1, device=passed.device)
    numbers = torch.where(passed, numbers, 0)
    return numbers.amax(1)


class Drawing(NamedTuple):
    """How a runner draws and verifies tokens."""

    vocab_size: int  # the tokenizer's; logits beyond it are padding
    coupled: bool = False  # coupled mode; otherwise exact mode
    # Called with seeds, positions and roles, int64[rows] each, in place of `sampling.Keyed`.
    make_rng: Callable[[Tensor, Tensor, Tensor], Rng] | None = None
    by_token: bool = False  # in exact mode: verify token by token instead of as a block


class Round:
    """The requests of a round, named by their index b, and how their tokens are drawn.

    `rngs` has k + 1 rows for each request. A request whose next token is at position n has the keys
    (position, role):

        row        0            1               2              …
        exact      (n, text)    (n, draft 0)    (n, draft 1)   …
        coupled    (n, text)    (n + 1, text)   (n + 2, text)  …

    In exact mode the target uses row 0, to accept drafts (in roles of their own) and to pick the
    token after them; draft j is picked with row j + 1. In coupled mode the target and the draft use
    row j for the token at position n + j.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        num_drafts: Sequence[int],
        drawing: Drawing,
        target: Llama,
    ):
        self.requests = requests
        self.num_drafts = num_drafts
        if all(request.settings.temperature == 0 for request in requests):
            drawing = drawing._replace(coupled=True)
        self.drawing = drawing
        self.vocab_size = drawing.vocab_size
        self.coupled = drawing.coupled
        self.device = target.device
        # Of probabilities:
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self.ops = target.ops
        self.make_rng = drawing.make_rng or partial(Keyed, draw=self.ops.pick)
        self.width = 1 + max(num_drafts, default=0)
        self.first_draft_rng = 0 if self.coupled else 1
        self.masks: Masks | None = None
        if any(request.grammar_state is not None for request in requests):
            self.masks = Masks(requests, self.width, self.vocab_size)
        self.is_penalized = any(request.settings.penalties for request in requests)
        # The host edits the logits after each draft, so it must see the drafts.
        self.edits_logits = self.is_penalized or self.masks is not None

    @cached_property
    def keys(self) -> list[tuple[int, int, int]]:
        """(seed, position, role) of each row of `rngs`: B · width."""
        keys = []
        for request in self.requests:
            seed = request.settings.seed
            position = len(request.tokens)
            if self.coupled:
                keys += [(seed, position + j, TEXT) for j in range(self.width)]
            else:
                keys.append((seed, position, TEXT))
                keys += [(seed, position, draft_role(j)) for j in range(self.width - 1)]
        return keys

    @cached_property
    def rngs(self) -> Rng:
        """One rng with a row for each of `keys`. It is made on first use, when a GPU is already
        computing a pass."""
        keys = send(self.keys, self.device).view(-1, 3)
        seeds, positions, roles = keys.unbind(1)
        return self.make_rng(seeds, positions, roles)

    def text_rng(self) -> Rng:
        """The rows that the target uses: one for each request, or in coupled mode all."""
        if self.coupled:
            return self.rngs
        return self.rngs[:: self.width]

    def draft_rng(self, j: int, rows: Sequence[int]) -> Rng:
        """The rows that draft j of these requests is picked with."""
        first = self.first_draft_rng + j
        if len(rows) == len(self.requests):  # a slice, because indices would be sent to a GPU
            return self.rngs[first :: self.width]
        indices = [row * self.width + first for row in rows]
        return self.rngs[indices]

    def no_drafts(self) -> Proposal:
        """An empty proposal, which a drafter fills."""
        B = len(self.requests)
        k = self.width - 1
        device = self.device
        tokens = torch.full((B, k), -1, dtype=torch.int64, device=device)
        if self.coupled or not k:
            return Proposal(tokens, None)
        shape = B, k + 1, self.vocab_size
        return Proposal(tokens, torch.zeros(shape, dtype=self.dtype, device=device))

    def drafting(self, j: int = 0) -> list[int]:
        """The requests that want a draft j."""
        return [b for b, num_drafts in enumerate(self.num_drafts) if num_drafts > j]

    def with_drafts(self, num_drafts: Sequence[int]) -> Round:
        """The same round with fewer drafts: the others are another drafter's."""
        round = copy(self)
        round.num_drafts = num_drafts
        round.width = 1 + max(num_drafts)
        for name in ("keys", "rngs"):  # they are made for `width`
            round.__dict__.pop(name, None)
        return round

    def setting(self, name: str) -> list[float | int | None]:
        """Each request's value of a sampling setting."""
        return [getattr(request.settings, name) for request in self.requests]

    def pick_drafts(
        self,
        j: int,
        logits: Tensor,
        rows: Sequence[int],
        drafted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draft j of these requests -> q: float[R, V], and the picked tokens: int64[R].

        logits: [R, ≥ V], a row for each request. drafted: int64[B, k], the drafts before it. If a
        request has a grammar or penalties, the host waits for the GPU.
        """
        q = self.probabilities(logits, rows, [j] * len(rows), drafted)
        q = q.to(self.dtype)  # a draft's dtype may differ
        picked = self.draft_rng(j, rows).pick(q)
        if self.masks is not None:
            self.masks.push(rows, picked.tolist())
        return q, picked

    def verify(self, p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Count the accepted drafts of each request, and draw the token after them: int64[B]."""
        drafted, q = proposal
        rng = self.text_rng()
        if self.coupled:
            return couple(p, drafted, rng)
        if self.drawing.by_token:
            return verify(p, q, drafted, rng)
        return self.ops.verify_block(verify_block, p, q, drafted, rng)

    def probabilities(
        self, logits: Tensor, owners: Sequence[int], depths: Sequence[int], drafted: Tensor
    ) -> Tensor:
        """The distributions to draw from: logits [R, ≥ V] -> float[R, V].

        Row i belongs to request owners[i], after depths[i] of its drafts: int64[B, k]. Grammar
        masks overwrite the logits.
        """
        settings: dict[str, Setting] = {}
        for name, neutral in SETTINGS.items():
            values = self.setting(name)
            if len(set(values)) > 1:
                numbers = [neutral if value is None else value for value in values]
                by_row = [numbers[b] for b in owners]
                settings[name] = send(by_row, self.device, torch.float64)
            elif values[0] is not None:  # one number for all requests
                settings[name] = values[0]
        logits = logits[:, : self.vocab_size]  # columns beyond the vocabulary are padding
        if self.is_penalized:
            logits = self.penalized(check_finite(logits), owners, depths, drafted)
        if self.masks is not None:
            logits = self.masks.apply(logits, owners, depths)
        return self.ops.probabilities(logits, self.masks is not None, **settings)

    def penalized(
        self, logits: Tensor, owners: Sequence[int], depths: Sequence[int], drafted: Tensor
    ) -> Tensor:
        """New logits [R, V], each row by its own text: the request's, and the drafts before it."""
        # −1 stands for a draft whose logits were not finite: `check_tokens` raises later.
        drafts = drafted.clamp(min=0).tolist()
        rows = []
        for row, b, depth in zip(logits, owners, depths):
            request = self.requests[b]
            text = request.tokens + drafts[b][:depth]
            more = request.num_prompt_tokens, request.eos_token_ids
            rows.append(penalize(row, text, *more, **request.settings.penalties))
        return torch.stack(rows)


def main() -> None:
    """Demonstration: the distribution of the production code's outputs, beside the target's.

    With proof.py a run walks through every outcome of its random numbers. n outputs are generated
    together, and the one with seed s takes branch s of `walk`. An output has up to 3 tokens, out of
    a vocabulary of 3, and token 0 ends it.
    """

    target = Toy(seed=1)

    def run(walk: Walk, n: int) -> list[tuple[int, ...]]:
        cache, draft_cache = (KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 7, n) for _ in range(2))
        drafter = ModelDrafter(Toy(seed=2), draft_cache)
        runner = ModelRunner(target, cache, Drawing(3, make_rng=walk), drafter=drafter)
        requests = []
        for seed in range(n):
            settings = Settings(seed=seed, max_tokens=3, gamma=2)
            requests.append(Request([1], settings, eos_token_ids=(0,)))
        for _ in Batcher(runner, n).run(requests):
            pass
        return [tuple(request.tokens[1:]) for request in requests]

    distribution = enumerate_distribution(run)
    wanted = sequential_distribution(target, (1,), 3, (0,), lambda logits: logits.softmax(-1))
    print("output, its probability by speculation, and by the target without drafts")
    for output, mass in wanted.items():
        print(f"{str(output):10} {distribution[output]:.15f}  {mass:.15f}")
    error = distance(distribution, wanted)
    print(f"{len(wanted)} outputs: the probabilities differ by at most {error:.1e}")


if __name__ == "__main__":
    from batcher import Batcher
    from drafters import ModelDrafter
    from kvcache import KVCache
    from proof import Toy, Walk, distance, enumerate_distribution, sequential_distribution
    from request import Settings
    from runner import ModelRunner

    main()
