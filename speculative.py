"""Exact speculative sampling: a small model guesses ahead, the large one checks all guesses in one pass, and the text follows
the large one's distribution exactly.

A decoding step costs what reading the weights costs, for one token or for five. So let a draft propose γ tokens x₁ … x_γ, x_j drawn
from its distribution q_j, and run the target once over all of them: that gives its distributions p₁ … p_γ₊₁ at every place. Then

    x_j stands with probability min(1, p_j(x_j) / q_j(x_j));  at the first that does not, a token is drawn from the residual
    r_j = max(0, p_j − q_j) / Σ max(0, p_j − q_j) instead, and the round ends;  if all stand, one more is drawn from p_γ₊₁.

Proof that what comes out follows p (Leviathan et al. 2023, A.1). One place: write β = Σ_x min(p(x), q(x)).
  1. x comes out as an accepted draft with probability q(x) · min(1, p(x)/q(x)) = min(q(x), p(x)).
  2. So something is accepted with probability β, and rejected with 1 − β.
  3. Σ max(0, p − q) = Σ (p − min(p, q)) = 1 − β: the residual's normalization is the probability of getting there.
  4. x comes out as a correction with probability (1 − β) · max(0, p(x) − q(x)) / (1 − β) = max(0, p(x) − q(x)).
  5. Together: min(p(x), q(x)) + max(0, p(x) − q(x)) = p(x), whatever q was.
A text: place j is looked at only if all drafts before it stood, so p_j is the target's distribution after the very text that comes
out; by induction each token follows it, given those before. What the draft wrote after the first rejection is thrown away unread.
The bonus is the same rule with q = 0: nothing is accepted, and the residual is p. γ may depend on the past, never on what was drawn.

`Decoder.step` is one pass of the target over any mix of work: rounds, and chunks of prompts. A text's pending tokens are those that
its cache lacks; a round reads them and γ drafts after them. So a prompt, plain decoding (γ = 0) and verification are one path.

Coupled mode (Daliri, Musco & Suresh 2024): the target picks with the keyed noise of each place, as in plain decoding, and a draft, picked
with the *same* noise, stands if it is that very token. The text then depends on the target and the seed alone. The price: two
distributions that differ by TV = 1 − β pick the same token with probability at least (1 − TV) / (1 + TV), less than β = 1 − TV.

Invariant: after a step each cache holds a prefix of its text, the target's all but the last token.

    B texts of a round · k the largest γ among them · V vocabulary · T tokens of a step · R rows of logits
"""
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from drafters import Drafter, ModelDrafter, Round, pack
from gamma import Auto, Costs, Together, between, expected_tokens, mark
from kernels import send
from kvcache import CacheFull
from request import Request, Settings, Speculation, Taken
from sampling import Keyed, accept_role


def verify(p: Tensor, q: Tensor, drafted: Tensor, coin: Any) -> tuple[Tensor, Tensor]:
    """Which drafts stand, and the token that comes after them.

    p: float[B, k+1, V] target; q: float[B, k, V] draft; drafted: int64[B, k]. Where a row drafted fewer than k, q is all zero and
    drafted is −1. -> accepted: int64[B], how many stand; token: int64[B], the correction or the bonus. Never waits for the device.
    """
    B, k, V = q.shape
    if k == 0:
        return torch.zeros(B, dtype=torch.int64, device=p.device), coin.pick(p[:, 0])
    x = drafted.clamp(min=0)[..., None]                                                     # [B, k, 1]
    p_x, q_x = p[:, :k].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]                      # [B, k]
    stands = coin.accept(torch.where(q_x > 0, p_x / q_x, 0).clamp(max=1))
    accepted = stands.long().cumprod(1).sum(1)                                              # [B], up to the first that does not
    at = accepted[:, None, None].expand(B, 1, V)
    p_there, q_there = p.gather(1, at)[:, 0], q.gather(1, at.clamp(max=k - 1))[:, 0]        # [B, V]
    q_there = torch.where(accepted[:, None] < k, q_there, 0)                                # after the last draft it is 0
    residual = (p_there - q_there).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    return accepted, coin.pick(torch.where(mass > 0, residual / mass, p_there))             # no mass: p = q up to rounding


def couple(p: Tensor, drafted: Tensor, coin: Any) -> tuple[Tensor, Tensor]:
    """As `verify`, in coupled mode: the target picks at every place, and the drafts that agree stand. `coin` has B · (k + 1) rows."""
    B, k = drafted.shape
    picked = coin.pick(p.flatten(0, 1)).view(B, k + 1)
    accepted = (drafted == picked[:, :k]).long().cumprod(1).sum(1)
    return accepted, picked.gather(1, accepted[:, None])[:, 0]


class Work(NamedTuple):
    """What one text does in a step: read so many of its pending tokens, and then verify `gamma` drafts; None: it only reads."""
    request: Request
    read: int
    gamma: int | None

    @property
    def size(self) -> int:
        """Its tokens in the pass."""
        return self.read + (self.gamma or 0)


class Decoder:
    """A target and its cache, a drafter or none, and what steps cost. One for all the texts that are made together.

    vocab: tokens that stand for text (logits beyond are padding). budget: the most tokens of one text in one step.
    """

    def __init__(self, target: Any, cache: Any, vocab: int, drafter: Drafter | None = None, coupled: bool = False,
                 coin: Callable[[Tensor, Tensor, int], Any] = Keyed, budget: int = 512):
        self.target, self.cache, self.vocab, self.drafter = target, cache, vocab, drafter
        self.coupled, self.coin, self.budget = coupled, coin, budget
        self.together: Together | None = None                                               # the texts of the last round that go on
        self.costs, self.auto = Costs(), WeakKeyDictionary[Request, Auto]()                 # what was learnt of a text outlives its places

    def open(self, request: Request, twin: Request | None = None) -> None:
        """Give a text its places in both caches, forked from those of a twin with the same prompt, if it has one; CacheFull if there are none."""
        if self.drafter is not None:
            self.drafter.open(request)
        try:
            if twin is None:
                request.seq, _ = self.cache.open(request.tokens)
            else:
                request.seq = self.cache.fork(twin.seq)
                self.cache.truncate(request.seq, min(self.cache.length(request.seq), request.prompt - 1))
        except CacheFull:
            if self.drafter is not None:
                self.drafter.close(request)
            raise
        self.auto.setdefault(request, Auto(self.costs))

    def close(self, request: Request) -> None:
        self.cache.free(request.seq)
        if self.drafter is not None:
            self.drafter.close(request)

    def plan(self, request: Request, left: int | None = None) -> Work | None:
        """What to do next for a text, in a step with `left` tokens to give: a round, if its pending tokens and its drafts are no
        more than that, or a chunk of what is pending; None if it must wait. (γ does not depend on what is left: the text would, too.)"""
        left, pending = self.budget if left is None else left, len(request.tokens) - self.cache.length(request.seq)
        gamma = self._gamma(request, min(request.left, self.budget) - 1)                    # the pass itself makes one token
        first = gamma > 0 and pending > 1 and self.drafter.shares                           # who drafts in this cache needs it whole
        if pending + gamma <= left and not first:
            return Work(request, pending, gamma)
        return Work(request, min(left, pending - 1), None) if min(left, pending - 1) > 0 else None

    def fits(self, work: Sequence[Work]) -> bool:
        """Whether both caches have room for all this work."""
        return (self.cache.fits([(w.request.seq, w.size) for w in work])
                and (self.drafter is None or self.drafter.fits(work)))

    def _gamma(self, request: Request, most: int) -> int:
        """How many tokens to draft: as the settings say, or as many as pay."""
        if self.drafter is None or most < 1:
            return 0
        fixed = request.settings.gamma
        if fixed is None:
            wanted = self.auto[request].choose(most, self.together)
        else:
            wanted = min(fixed, most)
        if wanted and fixed is None and self.drafter.lag(request) > self.budget:            # it has not drafted for long:
            self.drafter.follow(request, len(request.tokens) - self.drafter.lag(request) + self.budget)      # it catches up in chunks
            return 0
        return self.drafter.room(request, wanted) if wanted else 0

    @torch.inference_mode()
    def step(self, work: Sequence[Work]) -> dict[Request, list[int]]:
        """Do all this work, as planned, in one pass of the target -> what each text of a round has grown by."""
        rounds = [w for w in work if w.gamma is not None]
        round = Round([w.request for w in rounds], [w.gamma for w in rounds], self.vocab, self.target.device, self.target.dtype, self.coin, self.coupled)
        before = [self.cache.length(w.request.seq) for w in work]
        try:
            start = mark(round.device)
            drafted, q = self.drafter.propose(round) if any(round.gammas) else round.nothing()
            drawn = mark(round.device)
            p = self._read(work, drafted, round)                                            # [B, k+1, V]
            accepted, token = couple(p, drafted, round.text_coin()) if self.coupled else verify(p, q, drafted, round.text_coin())
            outcome, end = torch.cat((drafted, accepted[:, None], token[:, None]), 1), mark(round.device)
            outcome = outcome.tolist()                                                      # a GPU is waited for here, and only here
        except BaseException:                                                               # Ctrl-C too: what was promised was not stored
            self._take_back(work, before)
            raise
        if rounds and all(w.gamma and (self.drafter.shares or w.request.rounds and w.request.rounds[-1].drafted) for w in rounds):
            self.costs.saw_draft(max(round.gammas), between(start, drawn))                  # no draft had to catch up first
        if all(w.read == 1 and w.gamma is not None for w in work):
            self.costs.saw_pass(len(work) + sum(round.gammas), between(drawn, end))
        for w, length in zip(work, before):
            if w.gamma is None and self.drafter is not None:
                self.drafter.follow(w.request, length + w.read)
        grown = {w.request: self._finish(w, guesses, last, Taken(w.gamma, stood, between(start, end), len(rounds)))
                 for w, (*guesses, stood, last) in zip(rounds, outcome)}
        alphas = [self.auto[request].alpha for request in grown if not request.finish_reason]
        self.together = Together(self.costs, alphas) if alphas else None
        return grown

    def _read(self, work: Sequence[Work], drafted: Tensor, round: Round) -> Tensor:
        """The target's distributions after the pending tokens and after each draft: float[B, k+1, V]; zero where a text drafted fewer. Only the
        device knows the drafts: draft i of them all is ~i among the tokens that are sent there, and −1 to the cache, until it is settled."""
        B, k = drafted.shape
        drafts = iter([[~(b * k + j) for j in range(gamma)] for b, gamma in enumerate(round.gammas)])
        new = [self._pending(w) + ([] if w.gamma is None else next(drafts)) for w in work]
        tokens, _ = pack(new, round.device)
        if k:
            tokens = torch.where(tokens < 0, drafted.flatten()[(~tokens).clamp(min=0)], tokens)
        ends = list(accumulate(map(len, new)))
        rows = [row for w, end in zip(work, ends) if w.gamma is not None for row in range(end - w.gamma - 1, end)]
        owner = [b for b, gamma in enumerate(round.gammas) for _ in range(gamma + 1)]       # [R], the text of each row,
        place = [b * (k + 1) + j for b, gamma in enumerate(round.gammas) for j in range(gamma + 1)]         # and its place in the result
        step = self.cache.extend([(w.request.seq, [max(token, -1) for token in piece]) for w, piece in zip(work, new)])
        logits = self.target(tokens, step, rows=None if len(rows) == len(tokens) else send(rows, round.device))
        probs = round.probabilities(logits, round.columns(owner))                           # a GPU is busy meanwhile
        if len(rows) < B * (k + 1):
            probs = probs.new_zeros(B * (k + 1), probs.shape[-1]).index_copy_(0, send(place, round.device), probs)
        return probs.view(B, k + 1, probs.shape[-1])

    def _pending(self, w: Work) -> list[int]:
        have = self.cache.length(w.request.seq)
        return w.request.tokens[have:have + w.read]

    def _finish(self, w: Work, drafted: list[int], token: int, taken: Taken) -> list[int]:
        """The text grows, to the first end-of-text at most; both caches forget what was rejected."""
        request, accepted, new = w.request, taken.accepted, [*drafted[:taken.accepted], token]
        new = new[:next((i + 1 for i, token in enumerate(new) if token in request.ends), len(new))]
        own = "plain" if w.gamma == 0 else "bonus" if accepted == w.gamma else "corrected"
        request.tokens += new
        self._keep(request, len(request.tokens) - 1)                                        # all but the last token
        request.whose += (["accepted"] * accepted + [own])[:len(new)]
        request.rounds.append(taken)
        self.auto[request].saw(*taken)
        return new

    def _keep(self, request: Request, length: int) -> None:
        """In both caches, at most so many tokens of a text."""
        self.cache.truncate(request.seq, min(self.cache.length(request.seq), length))
        if self.drafter is not None:
            self.cache.settle(request.seq, request.tokens)
            self.drafter.keep(request, length)

    def _take_back(self, work: Sequence[Work], before: Sequence[int]) -> None:
        """After a pass that failed: the caches as they were; a drafter reads its texts again."""
        for w, length in zip(work, before):
            self.cache.truncate(w.request.seq, length)
            if self.drafter is not None:
                self.drafter.close(w.request)
                self.drafter.open(w.request)

    def report(self, request: Request) -> Speculation | None:
        """How speculation went in the rounds of a text, but for the first, which reads the prompt."""
        rounds = request.rounds[1:]
        if self.drafter is None or not rounds:
            return None
        made, plain = sum(taken.accepted + 1 for taken in rounds), [self.costs.plain(taken.texts) for taken in rounds]
        if None in plain:
            return Speculation(request.acceptance, made / len(rounds))
        alpha, draft = request.acceptance or 0.0, self.costs.drafting()
        gain = sum((taken.accepted + 1) * cost for taken, cost in zip(rounds, plain)) / sum(taken.seconds for taken in rounds)
        predicted = sum(expected_tokens(alpha, taken.drafted) for taken in rounds) / sum(1 + taken.drafted * draft / cost for taken, cost in zip(rounds, plain))
        return Speculation(request.acceptance, made / len(rounds), gain, predicted)

    @torch.inference_mode()
    def measure_plain(self, request: Request) -> None:
        """Where every round drafts, nobody knows what plain decoding costs: time two passes over one token, once. What they yield is not used."""
        while self.drafter is not None and self.costs.plain() is None and len(request.tokens) - self.cache.length(request.seq) == 1:
            if not self.cache.fits([(request.seq, 1)]):
                return
            round, w = Round([request], [0], self.vocab, self.target.device, self.target.dtype), Work(request, 1, 0)
            start = mark(round.device)
            token, end = round.text_coin().pick(self._read([w], round.nothing()[0], round)[:, 0]), mark(round.device)
            token.tolist()                                                                  # waits
            self.costs.saw_pass(1, between(start, end))
            self._keep(request, len(request.tokens) - 1)


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: one round in slow motion, and the law of a toy's texts, enumerated, beside the target's own.

def slow_motion(p: Tensor, q: Tensor, drafted: Tensor, seed: int) -> None:
    """A round of one row, said aloud. p: [1, k+1, V], q: [1, k, V], drafted: [1, k]."""
    show = lambda probs: " ".join(f"{x:.3f}" for x in probs.tolist())
    seeds = torch.tensor([seed])
    u = Keyed(seeds, seeds)._uniform(torch.tensor([accept_role(j) for j in range(q.shape[1])]))[0]
    accepted, token = (int(x) for x in verify(p, q, drafted, Keyed(seeds, seeds)))
    for j, x in enumerate(drafted[0].tolist()):
        ratio = (p[0, j, x] / q[0, j, x]).item()
        print(f"  place {j + 1}: the draft says q = {show(q[0, j])} and draws {x}\n{'':11}the target says p = {show(p[0, j])}\n"
              f"{'':11}min(1, p/q) = {min(1, ratio):.3f}, u = {u[j]:.3f}: {'stands' if j < accepted else 'rejected'}")
        if j == accepted:
            left = (p[0, j] - q[0, j]).clamp(min=0)
            print(f"{'':11}max(0, p − q) = {show(left)}; normalized, it gives {token}")
            return
    print(f"  bonus:   all stand; the target says {show(p[0, -1])} and draws {token}")


def main() -> None:
    from kvcache import KVCache
    from proof import Toy, distance, enumerate_law, own_law
    from sampling import draft_role

    generator = torch.Generator().manual_seed(2)
    p, q = (torch.rand(1, k, 4, generator=generator).softmax(-1) ** 3 for k in (4, 3))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    for seed in (1, 6):
        print(f"a round of three drafts, 4 tokens, seed {seed}")
        seeds = torch.tensor([seed])
        slow_motion(p, q, torch.stack([Keyed(seeds, seeds, draft_role(j)).pick(q[:, j]) for j in range(3)], 1), seed)

    target, draft, prompt, runs = Toy(seed=1), Toy(seed=2), (1,), []

    def run(walk: Any, n: int) -> list[tuple[int, ...]]:
        cache, draft_cache = (KVCache(1, 1, 1, 7, n, dtype=torch.float64) for _ in range(2))
        maker = Decoder(target, cache, 3, ModelDrafter(draft, draft_cache), coin=walk)
        requests = [Request(list(prompt), Settings(seed=row, max_tokens=3, gamma=2), ends=(0,)) for row in range(n)]
        for request in requests:
            maker.open(request)
        while work := [maker.plan(request) for request in requests if not request.finish_reason]:
            maker.step(work)
        runs.append(n)
        return [tuple(request.tokens[1:]) for request in requests]

    law, own = enumerate_law(run), own_law(target, prompt, 3, (0,), lambda logits: logits.softmax(-1))
    print("\nthe texts of a toy of 3 tokens (0 ends a text), by everything that can happen in the production loop, and by the target alone")
    for text, mass in sorted(own.items(), key=lambda item: -item[1])[:8]:
        print(f"  {' '.join(map(str, text)):8} {law[text]:.15f}  {mass:.15f}")
    print(f"{len(own)} texts, {sum(runs):,} branches: the largest difference is {distance(law, own):.1e}")


if __name__ == "__main__":
    main()
