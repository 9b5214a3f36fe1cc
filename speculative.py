"""Exact speculative sampling: one pass of the target verifies drafted tokens; the text follows the target's law.

A decoding step takes as long as reading the weights, for one token or for five. So a drafter proposes x₁ … x_γ, each
drawn from a distribution q_j, and one pass of the target over all of them gives the distributions p₁ … p_γ₊₁. Draft x_j
is accepted with probability min(1, p_j(x_j) / q_j(x_j)). The first rejection ends the round with a token drawn from the
residual, max(0, p_j − q_j) normalized. If all are accepted, a bonus token from p_γ₊₁ ends it: the residual of q = 0.

Proof that the text follows p (Leviathan et al. 2023, A.1). At one position, with β = Σ min(p, q):
  1. x comes out as an accepted draft with probability q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)).
  2. So a draft is rejected with probability 1 − β = Σ (p − min(p, q)) = Σ max(0, p − q), the residual's normalization.
  3. x comes out as a correction with probability (1 − β) · max(0, p(x) − q(x)) / (1 − β) = max(0, p(x) − q(x)).
  4. Together: min(p(x), q(x)) + max(0, p(x) − q(x)) = p(x), whatever q was.
  5. Position j counts only if all drafts before it were accepted: p_j is conditioned on the text itself; induction.

Coupled mode (Daliri, Musco & Suresh 2024): the target picks with the keyed noise of each position, as in plain
decoding; a draft, picked with the *same* noise, is accepted if the target picks it, too. The text then depends on
target and seed alone, but fewer drafts are accepted: at least (1 − TV) / (1 + TV), against β = 1 − TV in exact mode.
Invariants: γ never depends on its round's draws; after a round the target's cache lacks only a text's last token.
B texts of a round · k the largest γ of a round · V vocabulary · T tokens of a step · R rows of logits
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from drafters import Drafter, write_drafts
from gamma import Auto, Costs, expected_tokens, mean_gains
from kernels import send
from kvcache import CacheFull
from request import Request, Round, RoundStats, Speculation, pack
from sampling import Keyed, lawful

ROOM = 2**25  # probabilities that tokens made ahead may take


def mark(device: torch.device) -> float | torch.cuda.Event:
    """The time in seconds; on a GPU an event after the work queued so far, without waiting for that work."""
    if device.type != "cuda":
        return time.perf_counter()
    (event := torch.cuda.Event(enable_timing=True)).record()
    return event


def between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds between two marks. Events must be over: call it after the host has waited for later work."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def verify(p: Tensor, q: Tensor, drafted: Tensor, coin: Any) -> tuple[Tensor, Tensor]:
    """How many drafts are accepted, and the token after them. Never waits for the device.
    p: float[B, k+1, V] target; q: float[B, k, V] draft; drafted: int64[B, k]. A row with fewer than k drafts is padded:
    q is zero, drafted −1. -> accepted: int64[B], how many drafts; token: int64[B], the correction or the bonus."""
    B, k, V = q.shape
    if k == 0:
        return torch.zeros(B, dtype=torch.int64, device=p.device), coin.pick(p[:, 0])
    x = drafted.clamp(min=0)[..., None]  # [B, k, 1]
    p_x, q_x = p[:, :k].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]  # [B, k]
    stands = coin.accept(torch.where(q_x > 0, p_x / q_x, 0).clamp(max=1))
    accepted = stands.long().cumprod(1).sum(1)  # up to a rejection
    at = accepted[:, None, None].expand(B, 1, V)
    p_at, q_at = p.gather(1, at)[:, 0], q.gather(1, at.clamp(max=k - 1))[:, 0]  # [B, V]
    residual = (p_at - torch.where(accepted[:, None] < k, q_at, 0)).clamp(min=0)  # bonus: q = 0
    mass = residual.sum(-1, keepdim=True)
    return accepted, coin.pick(torch.where(mass > 0, residual / mass, p_at))  # no mass: p ≈ q


def couple(p: Tensor, drafted: Tensor, coin: Any) -> tuple[Tensor, Tensor]:
    """`verify` in coupled mode: a draft is accepted if the target picks the same token. coin: B · (k + 1) rows."""
    B, k = drafted.shape
    picked = coin.pick(p.flatten(0, 1)).view(B, k + 1)
    accepted = ((drafted == picked[:, :k]) & (drafted >= 0)).long().cumprod(1).sum(1)
    return accepted, picked.gather(1, accepted[:, None])[:, 0]


class Scheduled(NamedTuple):
    """One text in a step: it reads num_tokens pending tokens, and verifies num_drafts drafts (None: it only reads)."""

    request: Request
    num_tokens: int
    num_drafts: int | None

    @property
    def size(self) -> int:  # its tokens in the pass
        return self.num_tokens + (self.num_drafts or 0)


class Decoder:
    """A target and its cache, a drafter or none, and measured costs, for all texts decoded together. vocab: the
    tokenizer's size (logits beyond are padding). budget: most tokens of a text in a step; ahead: see `_ahead`."""

    def __init__(
        self,
        target: Any,
        cache: Any,
        vocab: int,
        drafter: Drafter | None = None,
        coupled: bool = False,
        coin: Callable[[Tensor, Tensor, int], Any] | None = None,
        budget: int = 512,
        ahead: int = 1,
    ):
        self.target, self.cache, self.vocab, self.drafter = (
            target,
            cache,
            vocab,
            drafter or Drafter(),
        )
        self.coupled, self.coin, self.budget = (
            coupled,
            coin or partial(Keyed, picks=target.ops.pick),
            budget,
        )
        self.gains: list[float] | None = None  # by γ, of the last round's texts
        self.ahead, self.costs, self.auto = ahead, Costs(), WeakKeyDictionary[Request, Auto]()

    @property
    def drafts(self) -> bool:
        return type(self.drafter) is not Drafter

    def open(self, request: Request, twin: Request | None = None) -> None:
        """Open a text in both caches, in the target's as a fork of a twin with the same prompt; or CacheFull."""
        self.drafter.open(request)
        try:
            request.seq = self.cache.fork(twin.seq) if twin else self.cache.open(request.tokens)[0]
        except CacheFull:
            self.drafter.close(request)
            raise
        if twin:
            self.cache.truncate(
                request.seq, min(self.cache.length(request.seq), request.prompt - 1)
            )
        self.auto.setdefault(request, Auto(self.costs))

    def close(self, request: Request) -> None:
        self.cache.free(request.seq)
        self.drafter.close(request)

    def lag(self, request: Request) -> int:
        """How many tokens of a text are pending: the target's cache lacks them."""
        return len(request.tokens) - self.cache.length(request.seq)

    def plan(self, request: Request, left: int | None = None) -> Scheduled | None:
        """What a text does next, with at most `left` tokens: a round, or a chunk of pending tokens; None: it waits."""
        left, pending = self.budget if left is None else left, self.lag(request)
        gamma = self._gamma(
            request, min(request.left, self.budget) - 1
        )  # never a function of `left`
        if pending + gamma <= left and not (
            gamma and pending > 1 and self.drafter.shares
        ):  # it drafts in this cache
            return Scheduled(request, pending, gamma)
        chunk = min(left, pending - 1)
        return Scheduled(request, chunk, None) if chunk > 0 else None

    def fits(self, work: Sequence[Scheduled]) -> bool:
        """Whether both caches have room for all this work."""
        return self.cache.fits([(w.request.seq, w.size) for w in work]) and (
            not self.drafts or self.drafter.fits(work)
        )

    def _gamma(self, request: Request, most: int) -> int:
        """How many tokens to draft: as the settings say, or as many as pay."""
        if not self.drafts or most < 1:
            return 0
        fixed, lag = request.settings.gamma, self.drafter.lag(request)
        wanted = self.auto[request].choose(most, self.gains) if fixed is None else min(fixed, most)
        if (
            wanted and fixed is None and lag > self.budget
        ):  # long without drafts: the drafter reads a chunk
            self.drafter.follow(request, len(request.tokens) - lag + self.budget)
            return 0
        return self.drafter.room(request, wanted) if wanted else 0

    @torch.inference_mode()
    def step(self, work: Sequence[Scheduled]) -> dict[Request, list[int]]:
        """Do the planned work in one pass of the target -> the new tokens of each text that had a round."""
        rounds = [w for w in work if w.num_drafts is not None]
        before = [self.cache.length(w.request.seq) for w in work]
        try:
            outcome, times = self._pass(work, rounds)
        except BaseException:  # Ctrl-C too: restore the caches
            for w, length in zip(work, before):
                self.cache.truncate(w.request.seq, length)
                self.drafter.close(w.request)  # the drafter reads its text again
                self.drafter.open(w.request)
            raise
        for w, length in zip(work, before):
            if w.num_drafts is None:
                self.drafter.follow(w.request, length + w.num_tokens)
        seconds = sum(times)
        grown = {
            w.request: self._finish(
                w.request, drafts, last, RoundStats(w.num_drafts, stood, seconds, len(rounds))
            )
            for w, (*drafts, stood, last) in zip(rounds, outcome)
        }
        if self.drafts:
            self._learn(work, [*grown], *times)
        return grown

    def _ahead(self, work: Sequence[Scheduled]) -> list[int]:
        """How many plain tokens n each text makes before the host sees one; [] where the host must see each. The target
        drafts them all, coupled, so none needs verifying. Of such a round RoundStats has drafted 0, accepted n − 1."""
        counts = [
            min(self.ahead, w.request.left) for w in work if w.size == 1 and w.num_drafts == 0
        ]
        small = len(work) * self.ahead * self.vocab <= ROOM and not self.drafts
        return (
            counts
            if (
                small
                and len(counts) == len(work)
                and max(counts) == self.ahead > 1
                and self.cache.fits([(w.request.seq, n) for w, n in zip(work, counts)])
            )
            else []
        )

    def _pass(
        self, work: Sequence[Scheduled], rounds: Sequence[Scheduled]
    ) -> tuple[list[list[int]], Any]:
        """Each round's drafts, how many are accepted, the token after them; seconds of drafting and of the pass."""
        target, now, ahead = self.target, lambda: mark(self.target.device), self._ahead(work)
        round = Round(
            [w.request for w in rounds],
            ahead or [w.num_drafts for w in rounds],
            self.vocab,
            target.device,
            target.dtype,
            self.coin,
            self.coupled or bool(ahead),
            target.ops,
        )
        start = now()
        if ahead:  # n tokens: n − 1 accepted, and 1 after
            seqs, unread = zip(*((request.seq, request.tokens[-1:]) for request in round.requests))
            made, end = (
                target.ops.draft(write_drafts, target, self.cache, seqs, unread, round)[0],
                now(),
            )
            rows = [lawful(row[:n]) for row, n in zip(target.ops.agree(made.tolist()), ahead)]
            return [[*row[:-1], len(row) - 1, row[-1]] for row in rows], self._seconds(
                start, start, end
            )
        drafted, q = (self.drafter.propose if any(round.gammas) else Round.nothing)(round)
        drawn, p, coin = (
            now(),
            self._read(work, drafted, round),
            round.text_coin(),
        )  # p: [B, k+1, V]
        accepted, token = couple(p, drafted, coin) if self.coupled else verify(p, q, drafted, coin)
        outcome, end = torch.cat((drafted, accepted[:, None], token[:, None]), 1), now()
        outcome = target.ops.agree(outcome.tolist())  # a GPU is waited for here, and only here
        lawful(
            [
                token
                for row, gamma in zip(outcome, round.gammas)
                for token in (*row[:gamma], row[-1])
            ]
        )
        return outcome, self._seconds(start, drawn, end) if rounds else (0.0, 0.0)

    def _seconds(self, start: Any, drawn: Any, end: Any) -> Sequence[float]:
        """Seconds of drafting and of the pass, in all processes the first one's times: all must choose the same γ."""
        seconds = between(start, drawn), between(drawn, end)
        return self.target.ops.agree(seconds) if self.drafts else seconds

    def _learn(
        self,
        work: Sequence[Scheduled],
        requests: Sequence[Request],
        drafting: float,
        verifying: float,
    ) -> None:
        """Update the costs, each text's acceptance and the gains, for the γ of the next step."""
        drafted = [request.rounds[-1].drafted for request in requests]
        caught_up = [
            self.drafter.shares or len(r.rounds) > 1 and r.rounds[-2].drafted for r in requests
        ]
        if requests and all(drafted) and all(caught_up):
            self.costs.drafts.saw(max(drafted), drafting)
        if all(w.num_tokens == 1 and w.num_drafts is not None for w in work):
            self.costs.passes.saw(len(work) + sum(drafted), verifying)
        for request in requests:
            self.auto[request].saw(*request.rounds[-1])
        going = [r for r in requests if not r.finish_reason]
        self.gains = None
        if any(r.settings.gamma is None for r in going):
            self.gains = mean_gains(
                self.costs, [self.auto[r].alpha for r in going], 2 * self.costs.largest or 1
            )

    def _read(self, work: Sequence[Scheduled], drafted: Tensor, round: Round) -> Tensor:
        """The target's distributions after the pending tokens and after each draft: float[B, k+1, V], padded with zero.
        Only the device knows the drafts. So on the host ~i, which is negative and no token, stands for element i of
        drafted: [B, k]; on the device ~ gives back i. The cache stores −1, until `settle` gives it the tokens.
        """
        B, k = drafted.shape
        new, rows, places, b, end = list[list[int]](), list[int](), list[int](), 0, 0
        for w in work:
            new.append(self._pending(w) + [~(b * k + j) for j in range(w.num_drafts or 0)])
            end += len(new[-1])
            if w.num_drafts is not None:
                rows += range(end - w.num_drafts - 1, end)  # [R], of the logits,
                places += range(b * (k + 1), b * (k + 1) + w.num_drafts + 1)  # and in the result
                b += 1
        tokens, _ = pack(new, round.device)
        if k:
            tokens = torch.where(
                tokens < 0, drafted.clamp(min=0).flatten()[(~tokens).clamp(min=0)], tokens
            )
        step = self.cache.extend(
            [(w.request.seq, [max(token, -1) for token in piece]) for w, piece in zip(work, new)]
        )
        logits = self.target(
            tokens, step, rows=None if len(rows) == len(tokens) else send(rows, round.device)
        )
        probs = round.probabilities(logits, [place // (k + 1) for place in places])
        if len(rows) < B * (k + 1):
            probs = probs.new_zeros(B * (k + 1), probs.shape[-1]).index_copy_(
                0, send(places, round.device), probs
            )
        return probs.view(B, k + 1, probs.shape[-1])

    def _pending(self, w: Scheduled) -> list[int]:
        return w.request.tokens[self.cache.length(w.request.seq) :][: w.num_tokens]

    def _finish(
        self, request: Request, drafted: list[int], token: int, stats: RoundStats
    ) -> list[int]:
        """Append the accepted drafts and the token, up to an end-of-text; both caches forget rejected drafts."""
        new = [*drafted[: stats.accepted], token]
        new = new[: next((i + 1 for i, token in enumerate(new) if token in request.ends), len(new))]
        last = "bonus" if stats.accepted == stats.drafted else "corrected"
        kinds = ["accepted"] * stats.accepted + [last] if stats.drafted else ["plain"] * len(new)
        request.tokens += new
        request.origins += kinds[: len(new)]
        request.rounds.append(stats)
        self._keep(request, len(request.tokens) - 1)  # all but the last token
        return new

    def _keep(self, request: Request, length: int) -> None:
        """Truncate a text in both caches to `length` tokens; the target's cache learns tokens it has as −1."""
        self.cache.truncate(request.seq, min(self.cache.length(request.seq), length))
        self.cache.settle(request.seq, request.tokens)
        if self.drafts:
            self.drafter.keep(request, length)

    def report(self, request: Request) -> Speculation | None:
        """A text's acceptance and speed-up, over all rounds but the first (with the prompt); None without drafts."""
        if not self.drafts or not (rounds := request.rounds[1:]):
            return None
        found = Speculation(
            request.acceptance, sum(stats.accepted + 1 for stats in rounds) / len(rounds)
        )
        costs, alpha = self.costs, found.acceptance or 0.0
        plain = [costs.plain(r.texts) for r in rounds]
        if None in plain:
            return found
        gain = sum((r.accepted + 1) * cost for r, cost in zip(rounds, plain)) / sum(
            r.seconds for r in rounds
        )
        spent = sum(
            (costs.passes.at(r.texts * (1 + r.drafted)) + r.drafted * costs.drafting(r.drafted))
            / cost
            for r, cost in zip(rounds, plain)
        )
        widest, most = (
            max(r.texts * (1 + r.drafted) for r in rounds),
            max(r.drafted for r in rounds),
        )
        known = widest <= costs.passes.known[-1][0] and most <= costs.largest
        predicted = (
            sum(expected_tokens(alpha, r.drafted) for r in rounds) / spent if known else None
        )
        return found._replace(speed_up=gain, predicted_speed_up=predicted)

    @torch.inference_mode()
    def measure_plain(self, request: Request) -> None:
        """If every round drafts, time plain decoding once, by two passes over one token. Their logits are not used."""
        work = [Scheduled(request, 1, 0)]
        while (
            self.drafts
            and self.costs.plain() is None
            and self.lag(request) == 1
            and self.fits(work)
        ):
            _, (_, seconds) = self._pass(work, work)
            self.costs.passes.saw(1, seconds)
            self._keep(request, len(request.tokens) - 1)


def main() -> None:
    def run(walk: Any, n: int) -> list[tuple[int, ...]]:
        cache, draft_cache = (KVCache(1, 1, 1, 7, n, dtype=torch.float64) for _ in range(2))
        decoder = Decoder(target, cache, 3, ModelDrafter(Toy(seed=2), draft_cache), coin=walk)
        requests = [
            Request([1], Settings(seed=row, max_tokens=3, gamma=2), ends=(0,)) for row in range(n)
        ]
        list(Batcher(decoder, n).run(requests))
        return [tuple(request.tokens[1:]) for request in requests]

    target = Toy(seed=1)
    law, own = enumerate_law(run), own_law(target, (1,), 3, (0,), lambda logits: logits.softmax(-1))
    print(
        *(f"{str(text):10} {law[text]:.15f}  {mass:.15f}" for text, mass in own.items()), sep="\n"
    )
    print(
        f"{len(own)} texts, speculatively and by the target alone: they differ by at most {distance(law, own):.1e}"
    )


if __name__ == "__main__":
    from batcher import Batcher
    from drafters import ModelDrafter
    from kvcache import KVCache
    from proof import Toy, distance, enumerate_law, own_law
    from request import Settings

    main()
