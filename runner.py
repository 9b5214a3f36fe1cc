"""The model runner: one pass of the target for prompt chunks, decoding and verification.

A *step* is one pass of the target (or a few plain ones at once, the last section of this page). In
a step a request has a *round*, which draws its next token and may verify drafts before that, or
reads a *chunk*, and draws nothing. A request's *pending* tokens are those that the target's cache
lacks (for a drafter: those that it has not read). There is one kind of work, a `ScheduledRequest`:
compute some pending tokens, verify some drafts behind them, and draw. So prefill, re-reading after
preemption, a prefix hit, decoding and verification are one path, in any mix:

                       num_tokens   num_drafts   samples
    chunk of a prompt      512           0        False
    end of the prompt       88           0        True       the first round
    plain decoding           1           0        True
    verification             1           4        True       4 drafts and the last token: 5 rows

`schedule` plans, `fits` asks both caches, `step` runs. Plans change nothing. After a round the
target's cache lacks only the last token of the text, until the request is preempted; a drafter's
may lack more.

    B requests of a round · k the largest number of drafts in it · V vocabulary · T tokens of a step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters import Drafter, ModelChain, Observed, Unread, fastest_draft
from gamma import AutoGamma
from grammar import Grammars, GrammarState
from kernels import send
from kvcache import Cache, CacheFull
from model import Features, Llama
from request import Request, RoundStats, Speculation
from sampling import Keyed, NotFinite, TokenLogprob, check_tokens, token_logprobs
from speculative import Coin, Proposal, Round

MAX_LAG = 8  # tokens that a drafter reads about as quickly as one


class ScheduledRequest(NamedTuple):
    """What a request does in one step."""

    request: Request
    start: int  # tokens of its text that the target's cache has
    num_tokens: int  # pending tokens that the target computes
    num_drafts: int = 0  # drafts that it verifies
    samples: bool = True  # False: a chunk, nothing is drawn

    @property
    def num_new_tokens(self) -> int:
        """Its rows in the target's pass, which its cache stores."""
        return self.num_tokens + self.num_drafts

    @property
    def stop(self) -> int:
        """Tokens of its text that the target has read after the step."""
        return self.start + self.num_tokens


@contextmanager
def named_as_draft() -> Iterator[None]:
    """In the block, logits are a draft's."""
    try:
        yield
    except NotFinite:
        raise NotFinite("the draft", "fetch it again, or leave out --draft") from None


class ModelRunner:
    """A target, its cache and perhaps a drafter, for all requests that are decoded together.

    vocab_size: the tokenizer's (logits beyond it are padding). coupled: the mode of verification.
    make_coin: makes coins from (seeds, positions, roles). budget: tokens of a step. multi_step:
    plain tokens that are made before the host looks at them. grammars: None: no request has one.
    """

    def __init__(
        self,
        target: Llama,
        cache: Cache,
        vocab_size: int,
        drafter: Drafter | None = None,
        coupled: bool = False,
        make_coin: Callable[[Tensor, Tensor, Tensor], Coin] | None = None,
        budget: int = 512,
        multi_step: int = 1,
        grammars: Grammars | None = None,
    ):
        self.target = target
        self.cache = cache
        self.vocab_size = vocab_size
        self.has_drafter = drafter is not None
        self.drafter = drafter or Drafter()
        self.coupled = coupled
        self.make_coin = make_coin or partial(Keyed, draw=target.ops.pick)
        self.budget = budget
        self.multi_step = multi_step
        self.grammars = grammars
        self.auto_gamma = AutoGamma()
        self.next_gamma = 0  # where a request does not fix its own

    # ---- Requests

    def open(self, request: Request, sibling: Request | None = None) -> None:
        """Open a request for the drafter, and in the target's cache: anew, or as a fork of a
        sibling with the same prompt. CacheFull before anything has changed."""
        self.drafter.open(request)
        try:
            if sibling is None:
                request.seq, _ = self.cache.open(request.tokens)
            else:  # the prompt's last token is computed again, for its logits
                request.seq = self.cache.fork(sibling.seq)
                length = min(self.cache.length(request.seq), request.num_prompt_tokens - 1)
                self.cache.truncate(request.seq, length)
        except CacheFull:
            self.drafter.close(request)
            raise
        if request.settings.follows is not None:
            new = request.tokens[request.num_prompt_tokens :]
            start = request.compiled or self.grammars.compile(request.settings.follows)
            request.grammar_state = GrammarState(self.grammars, start, new)
            request.eos_token_ids = {*request.eos_token_ids, *self.grammars.eos_token_ids}

    def close(self, request: Request) -> None:
        self.cache.free(request.seq)
        self.drafter.close(request)
        request.grammar_state = None

    def num_pending(self, request: Request) -> int:
        """How many tokens of the text the target's cache lacks."""
        return len(request.tokens) - self.cache.length(request.seq)

    # ---- Plans: they change nothing

    def round_size(self, request: Request) -> int:
        """The tokens that every step must leave room for: a round of the γ that this request
        fixes."""
        if not self.has_drafter:
            return 1
        return 1 + (request.settings.gamma or 0)

    def schedule(self, request: Request, budget: int | None = None) -> ScheduledRequest:
        """What a request does next, with at most `budget` tokens: a round, or a chunk."""
        if budget is None:
            budget = self.budget
        start = self.cache.length(request.seq)
        num_pending = len(request.tokens) - start
        num_drafts = self._num_drafts(request, budget - num_pending)
        # A drafter that has the target's keys and values needs those of all but the last token.
        must_read = num_pending > 1 and self.drafter.shares_target_cache
        if (num_drafts and must_read) or num_pending + num_drafts > budget:
            num_tokens = min(budget, num_pending - 1)  # the last token is for the round
            return ScheduledRequest(request, start, num_tokens, samples=False)
        return ScheduledRequest(request, start, num_pending, num_drafts)

    def _num_drafts(self, request: Request, room: int) -> int:
        """γ: as the request says, or as many as pay, of the `room` in the step."""
        most = min(request.num_remaining, self.budget) - 1  # a round makes one token more
        wanted = request.settings.gamma
        if wanted is None:  # only then cut: a fixed γ must not depend on the texts beside it
            wanted = min(self.next_gamma, max(0, room))
        wanted = min(wanted, most)
        return self.drafter.max_drafts(request, wanted) if wanted > 0 else 0

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether both caches have room for a step."""
        wanted = [(item.request.seq, item.num_new_tokens) for item in scheduled]
        if not self.cache.fits(wanted):
            return False
        return self.drafter.fits(scheduled)

    # ---- A step

    @torch.inference_mode()
    def step(self, scheduled: Sequence[ScheduledRequest]) -> dict[Request, list[int]]:
        """Run the plans in one pass -> the new tokens of each request that had a round."""
        lengths = [self.drafter.length(item.request) for item in scheduled]
        try:
            return self._step(scheduled)
        except BaseException:  # Ctrl-C too: both caches are as before
            for item, length in zip(scheduled, lengths):
                self.cache.truncate(item.request.seq, item.start)
                self.drafter.restore(item.request, length)
                if item.request.grammar_state is not None:
                    item.request.grammar_state.restore()
            raise

    def _step(self, scheduled: Sequence[ScheduledRequest]) -> dict[Request, list[int]]:
        rounds = [item for item in scheduled if item.samples]
        is_typical = self.has_drafter and self._is_typical(scheduled)
        start = time.perf_counter()
        self.drafter.prepare(scheduled)
        features = None
        if self.drafter.feature_layers:
            num_tokens = sum(item.num_new_tokens for item in scheduled)
            features = self.target.empty_features(self.drafter.feature_layers, num_tokens)
        round_tokens, logits = self._run(scheduled, rounds, features)
        logprobs = self._logprobs(rounds, round_tokens, logits)
        if features is not None:
            self._observe(scheduled, round_tokens, features)
        seconds = time.perf_counter() - start  # the host has waited for the device
        if self.has_drafter and rounds:
            (seconds,) = self.target.group.agree([seconds])  # the first process's
            if is_typical:
                num_drafts = [item.num_drafts for item in rounds]
                num_accepted = [len(new) - 1 for new in round_tokens]
                self.auto_gamma.observe(num_drafts, num_accepted, seconds)
            self.next_gamma = self.auto_gamma.choose(len(rounds))
        new_tokens = {}
        for item, new in zip(rounds, round_tokens):
            stats = RoundStats(item.num_drafts, len(new) - 1, len(rounds))
            new_tokens[item.request] = self._finish(item.request, new, stats)
            if item.request in logprobs:
                item.request.logprobs += logprobs[item.request][: len(new)]
        return new_tokens

    def _is_typical(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether a step's time says what a round costs: nobody reads a prompt, or catches up."""
        for item in scheduled:
            if not item.request.rounds or item.num_tokens > 1:
                return False
            if self.drafter.num_to_read(item) > MAX_LAG:
                return False
        return True

    def _run(
        self,
        scheduled: Sequence[ScheduledRequest],
        rounds: Sequence[ScheduledRequest],
        features: Features | None,
    ) -> tuple[list[list[int]], Tensor]:
        """-> what each round made: the accepted drafts, and a token; and the logits that all this
        was drawn from, [Σ (drafts + 1), V], round after round. features: to be filled."""
        counts = self._multi_step_counts(scheduled)
        if counts:  # nobody asks for logits
            return self._decode_multi_step(rounds, counts), torch.empty(0)
        round = self._round(rounds, [item.num_drafts for item in rounds], self.coupled)
        has_drafts = bool(round.drafting())
        with named_as_draft():
            proposal = self.drafter.propose(round) if has_drafts else round.no_drafts()
        if round.masks is not None:
            round.masks.push_all(proposal.tokens.tolist())
        logits = self._run_target(scheduled, round, proposal, features)
        if not rounds:
            return [], logits
        p, logits = self._probabilities(round, logits)
        if has_drafts:
            accepted, token = round.verify(p, proposal)
        else:
            token = round.text_coin().pick(p[:, 0])  # [B]
            accepted = torch.zeros_like(token)
        packed = torch.cat((proposal.tokens, accepted[:, None], token[:, None]), 1)  # [B, k+2]
        packed = self.target.group.agree(packed.tolist())  # here the host waits for a GPU
        round_tokens = []
        for n, (*row, num_accepted, last) in zip(round.num_drafts, packed):
            check_tokens([last])
            with named_as_draft():
                check_tokens(row[:n])
            round_tokens.append([*row[:num_accepted], last])
        return round_tokens, logits

    def _run_target(
        self,
        scheduled: Sequence[ScheduledRequest],
        round: Round,
        proposal: Proposal,
        features: Features | None,
    ) -> Tensor:
        """The target's pass -> the logits after each round's last pending token and after each of
        its drafts, round after round: [R, ≥ V]. features: to be filled.

        Only the device knows the drafts: the host puts 0 at their places, and the device fills them
        in. A chunk of two tokens, then a round of one token with two drafts:

            input_ids   5 8 | 3 0 0       last   2 of the round       logits of   2 3 4
        """
        input_ids: list[int] = []  # [T]
        to_store = []  # (sequence, its tokens)
        last = []  # where each round's last pending token is in input_ids
        for item in scheduled:
            pending = item.request.tokens[item.start : item.stop]
            new = pending + [0] * item.num_drafts
            to_store.append((item.request.seq, new))
            input_ids += new
            if item.samples:
                last.append(len(input_ids) - item.num_drafts - 1)
        steps = torch.arange(round.width)
        places = torch.tensor(last, dtype=torch.int64)[:, None] + steps  # [B, k + 1], in input_ids
        device = self.target.device
        tokens = send(input_ids, device)
        is_draft = round.is_row[:, 1:]
        if is_draft.any():
            sources = is_draft.flatten().nonzero()[:, 0]
            drafts = proposal.tokens.flatten()[send(sources, device)]
            # −1: not finite, which `check_tokens` is to tell
            tokens[send(places[:, 1:][is_draft], device)] = drafts.clamp(min=0)
        wanted = places[round.is_row]
        logits_indices = None  # all
        if len(wanted) < len(input_ids):
            logits_indices = send(wanted, device)
        return self.target(tokens, self.cache.extend(to_store), logits_indices, features)

    def _probabilities(self, round: Round, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distributions, float[B, k + 1, V], padded with zero; and its logits, as they
        are before masks. logits: those of `_run_target`."""
        self.target.ops.check_logits(logits[:, : self.vocab_size])
        kept = logits
        asks = any(count is not None for count in round.setting("logprobs"))
        if round.masks is not None and asks:
            kept = logits.clone()  # masks are applied in place
        owners = round.is_row.nonzero()[:, 0]  # whose each row is
        probs = round.probabilities(logits, owners.tolist())  # [R, V]
        B, width = round.is_row.shape
        V = probs.shape[1]
        if len(owners) < B * width:
            padded = probs.new_zeros(B * width, V)
            rows = round.is_row.flatten().nonzero()[:, 0]
            probs = padded.index_copy_(0, send(rows, self.target.device), probs)
        return probs.view(B, width, V), kept

    def _logprobs(
        self,
        rounds: Sequence[ScheduledRequest],
        round_tokens: Sequence[list[int]],
        logits: Tensor,
    ) -> dict[Request, list[TokenLogprob]]:
        """Of the requests that ask for them: a draft's, and its correction's, are those of the row
        that verified it. logits: as `_run` returns them."""
        logprobs = {}
        first_row = 0
        for item, new in zip(rounds, round_tokens):
            num_top = item.request.settings.logprobs
            if num_top is not None:
                rows = logits[first_row : first_row + len(new), : self.vocab_size]
                logprobs[item.request] = token_logprobs(rows, new, num_top)
            first_row += item.num_drafts + 1
        return logprobs

    def _observe(
        self,
        scheduled: Sequence[ScheduledRequest],
        round_tokens: Sequence[list[int]],
        features: Features,
    ) -> None:
        """Show the drafter what the pass computed of the tokens that stay in the texts."""
        made = iter(round_tokens)
        observed = []
        kept = []  # features of the tokens that stay
        counts = [item.num_new_tokens for item in scheduled]
        for item, values in zip(scheduled, features.values.split(counts)):
            new = next(made) if item.samples else []
            count = item.num_tokens + max(0, len(new) - 1)  # pending tokens and accepted drafts
            following = item.request.tokens[item.start + 1 : item.start + count + 1] + new
            observed.append(Observed(item.request, item.start, following[:count]))
            kept.append(values[:count])
        self.drafter.observe(observed, torch.cat(kept))

    def _round(
        self, rounds: Sequence[ScheduledRequest], num_drafts: Sequence[int], coupled: bool
    ) -> Round:
        return Round(
            [item.request for item in rounds],
            num_drafts,
            self.vocab_size,
            self.target.device,
            self.target.dtype,
            self.make_coin,
            coupled,
            self.target.ops,
        )

    def _finish(self, request: Request, new: list[int], stats: RoundStats) -> list[int]:
        """Append what a round made, up to an end-of-text -> the new tokens."""
        for i, token in enumerate(new):
            if token in request.eos_token_ids:
                del new[i + 1 :]
                break
        if stats.num_drafts == 0:
            origins = ["plain"] * len(new)
        elif stats.num_accepted == stats.num_drafts:
            origins = ["accepted"] * stats.num_accepted + ["bonus"]
        else:
            origins = ["accepted"] * stats.num_accepted + ["corrected"]
        request.tokens += new
        request.origins += origins[: len(new)]
        request.rounds.append(stats)
        if request.grammar_state is not None:
            request.grammar_state.settle(new)
            if request.grammar_state.has_failed:
                request.error = (
                    "its grammar allows no token of this model here, or takes too much work for a "
                    "mask: simplify it"
                )
        self.cache.commit(request.seq, request.tokens, len(new))
        self.drafter.commit(request, len(new))
        return new

    # ---- Several plain tokens on the device, before the host waits for them

    def _multi_step_counts(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        """How many plain tokens each request makes; []: one each, by an ordinary step.

        A step with a chunk of a prompt is an ordinary one: there the other texts' tokens ride along
        in the chunk's pass, for nothing. So is a step with a grammar: the host makes its masks.
        """
        n = self.multi_step
        if n == 1 or self.has_drafter:
            return []
        if any(item.num_tokens > 1 or not item.samples for item in scheduled):
            return []
        settings = [item.request.settings for item in scheduled]
        if any(one.follows is not None or one.logprobs is not None for one in settings):
            return []  # the host makes masks, and needs logits
        counts = [min(n, item.request.num_remaining) for item in scheduled]
        # All texts end before n: a smaller n would need a CUDA graph of its own (gpu/graphs.py).
        if max(counts) < n:
            return []
        wanted = [(item.request.seq, count) for item, count in zip(scheduled, counts)]
        return counts if self.cache.fits(wanted) else []

    def _decode_multi_step(
        self, rounds: Sequence[ScheduledRequest], counts: Sequence[int]
    ) -> list[list[int]]:
        """The target is its own drafter. In coupled mode a draft is drawn with the random numbers
        of plain decoding at its position, so n drafts are the tokens of n plain steps."""
        round = self._round(rounds, counts, True)
        unread = {}
        for b, item in enumerate(rounds):
            unread[b] = Unread(item.request.seq, item.request.tokens[-1:])
        chain = ModelChain(self.target, self.cache, round, unread)
        rows = self.target.group.agree(fastest_draft(chain, round).tokens.tolist())
        return [check_tokens(row[:n]) for n, row in zip(counts, rows)]

    def report(self, request: Request) -> Speculation | None:
        """What drafts were worth to a text; None without a drafter."""
        return self.auto_gamma.report(request) if self.has_drafter else None
