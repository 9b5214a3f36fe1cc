"""The model runner: one pass of the target for prompt chunks, decoding and verification.

A *step* is one pass of the target. A request's *pending* tokens are those that are not yet in the
target's cache. In a step, a request either reads a *chunk* of them and draws nothing, or it has a
*round*: it reads all of them, verifies its drafts, if it has any, and draws the next token. Both
are described by a `ScheduledRequest`. So prefill, reading again after preemption, a prefix hit,
decoding and verification share one code path, and a step can mix them:

                       num_tokens   num_drafts   samples
    chunk of a prompt      512           0        False
    end of the prompt       88           0        True       the first round
    plain decoding           1           0        True
    verification             1           4        True       4 drafts and the last token: 5 rows

`schedule` plans a request's part of a step, `fits` asks both caches whether there is room for the
step, and `step` runs it. Planning stores nothing. After a round, only the last token of the
sequence is pending, until the request is preempted. A drafter's cache may lack more tokens.

    B requests of a round · k the largest number of drafts in it · V vocabulary · T tokens of a step
    R rows of logits: first those of rounds, one per draft and one more per request; then those for
    the log-probabilities of the prompts' tokens
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from automaton import Grammars
from devices import live_graphs, send
from drafters import Drafter
from gamma import AutoGamma
from grammar import GrammarState
from kvcache import Cache
from model import Features, Llama
from request import Request, RoundStats, Speculation
from sampling import NotFinite, TokenLogprob, check_finite, check_tokens, token_logprobs
from speculative import Drawing, Proposal, Round

MAX_LAG = 8  # if a drafter has more tokens than this to catch up on, the round is not measured


class ScheduledRequest(NamedTuple):
    """What a request does in one step."""

    request: Request
    start: int  # how many of its tokens are in the target's cache
    num_tokens: int  # pending tokens that the target computes
    num_drafts: int = 0  # drafts to verify
    samples: bool = True  # False: a chunk, so no token is drawn
    # Its rows in the tensors of the step, which `with_rows` counts:
    token_rows: range = range(0)  # of the pass: its pending tokens, then its drafts
    logit_rows: range = range(0)  # of the logits: after its last pending token and each draft
    score_rows: range = range(0)  # of the logits: after its first `num_scores` tokens

    @property
    def num_new_tokens(self) -> int:
        """How many tokens of the target's pass are this request's. The cache stores them all."""
        return self.num_tokens + self.num_drafts

    @property
    def stop(self) -> int:
        """How many of its tokens the target has read after the step."""
        return self.start + self.num_tokens

    @property
    def num_logits(self) -> int:
        return self.num_drafts + 1 if self.samples else 0

    @property
    def num_scores(self) -> int:
        """How many of the computed tokens give the log-probability of the prompt's next token, if
        prompt_logprobs are asked for."""
        if self.request.settings.prompt_logprobs is None:
            return 0
        last = self.request.num_prompt_tokens - 1  # no token of the prompt follows it
        return max(0, min(self.stop, last) - self.start)


def consecutive(sizes: Iterable[int], start: int = 0) -> list[range]:
    """Adjacent ranges of these sizes."""
    ranges = []
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return ranges


def with_rows(scheduled: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
    """Fill in each item's rows. The logits of all rounds come before those of prompts."""
    tokens = consecutive(item.num_new_tokens for item in scheduled)
    logits = consecutive(item.num_logits for item in scheduled)
    scores = consecutive((item.num_scores for item in scheduled), start=logits[-1].stop)
    placed = []
    for item, *rows in zip(scheduled, tokens, logits, scores):
        placed.append(item._replace(token_rows=rows[0], logit_rows=rows[1], score_rows=rows[2]))
    return placed


class Drawn(NamedTuple):
    """What a round drew: its accepted drafts and the token after them."""

    tokens: list[int]
    records: Sequence[TokenLogprob] = ()  # of these tokens, if the request asks for logprobs


@contextmanager
def named_as_draft() -> Iterator[None]:
    """If this block raises NotFinite, the error names the draft as the model at fault."""
    try:
        yield
    except NotFinite:
        raise NotFinite("the draft", "fetch it again, or leave out --draft") from None


class ModelRunner:
    """A target, its cache and, optionally, a drafter, for all requests that are decoded together.

    budget: the most work in a step, in tokens (see `work`). grammars: None if no request has a
    grammar.
    """

    def __init__(
        self,
        target: Llama,
        cache: Cache,
        drawing: Drawing,
        drafter: Drafter | None = None,
        budget: int = 512,
        grammars: Grammars | None = None,
    ):
        self.target = target
        self.cache = cache
        self.has_drafter = drafter is not None
        self.drafter = drafter or Drafter()
        self.drawing = drawing._replace(coupled=drawing.coupled or self.drafter.is_coupled)
        self.budget = budget
        self.grammars = grammars
        self.auto_gamma = AutoGamma()
        self.batch_size = 1  # requests of the last rounds

    # ---- Requests

    def open(self, request: Request) -> None:
        """Open a request in the target's cache. CacheFull is raised before anything has changed."""
        may_find = request.tokens  # in the cache
        if request.settings.prompt_logprobs is not None:
            # A token found in the cache is not computed, so it gives no logprob for the next one.
            # So only tokens whose next one has its logprob already may be found.
            may_find = may_find[: len(request.prompt_logprobs) + 1]
        request.seq, _ = self.cache.open(may_find)
        if request.settings.follows is not None:
            try:
                self._open_grammar(request)
            except BaseException:  # Ctrl-C, too
                self.close(request)
                raise

    def _open_grammar(self, request: Request) -> None:
        compiled = request.compiled or self.grammars.compile(request.settings.follows)
        new_tokens = request.tokens[request.num_prompt_tokens :]  # after preemption
        request.grammar_state = GrammarState(self.grammars, compiled, new_tokens)
        request.eos_token_ids = {*request.eos_token_ids, *self.grammars.eos_token_ids}

    def close(self, request: Request) -> None:
        """Free what `open` and the drafter took for a request, which may not be open."""
        if request.seq is not None:
            self.cache.free(request.seq)
            request.seq = None
        self.drafter.close(request)
        request.grammar_state = None

    def num_pending(self, request: Request) -> int:
        """How many of the request's tokens are not in the target's cache."""
        return len(request.tokens) - self.cache.length(request.seq)

    def report(self, request: Request) -> Speculation | None:
        """How much the drafts helped a request; None without a drafter."""
        return self.auto_gamma.report(request) if self.has_drafter else None

    # ---- Planning: nothing is stored

    def round_size(self, request: Request) -> int:
        """How many tokens each step reserves for this request: one for its last token and, if γ is
        fixed, one for each draft. (With γ auto, drafts take half of what is left: batcher.py.)"""
        if not self.has_drafter:
            return 1
        return 1 + (request.settings.gamma or 0)

    def schedule(self, request: Request, budget: int | None = None) -> ScheduledRequest:
        """Plan a request's next round or chunk, with at most `budget` of work."""
        if budget is None:
            budget = self.budget
        start = self.cache.length(request.seq)
        num_pending = self.num_pending(request)
        pending = ScheduledRequest(request, start, num_pending)
        num_drafts = self._num_drafts(request, left=budget - self.work(pending))
        whole_round = pending._replace(num_drafts=num_drafts)
        # A drafter in the target's cache needs the keys and values of all but the last token. So
        # the target reads these first, and the drafts come in the next step.
        can_draft = num_pending == 1 or not self.drafter.shares_target_cache
        if self.work(whole_round) <= budget and (can_draft or num_drafts == 0):
            return whole_round
        # A chunk leaves the last token for the round. If only that token is pending, the chunk is
        # empty, and the batcher drops it.
        num_tokens = min(self._longest_chunk(start, budget), num_pending - 1)
        return ScheduledRequest(request, start, num_tokens, samples=False)

    def work(self, item: ScheduledRequest) -> int:
        """How much of a step's budget an item takes: 1 for the first token and 1 for each draft, as
        reserved by `round_size`, and `Llama.price` for each other token."""
        return 1 + item.num_drafts + (item.num_tokens - 1) * self.target.price(item.start)

    def _longest_chunk(self, start: int, budget: int) -> int:
        """The most tokens from `start` on that fit into `budget`."""
        return 1 + (budget - 1) // self.target.price(start)

    def _num_drafts(self, request: Request, left: int) -> int:
        """γ of the next round. left: the part of the budget that the pending tokens leave; if it
        is negative, there is no room for a round."""
        if not self.has_drafter or left < 0:
            return 0
        gamma = request.settings.gamma
        if gamma is None:
            pay = self.auto_gamma.choose(self.batch_size, self.drafter.chances(request))
            gamma = min(pay, left)
        # A fixed γ ignores `left`, because it must not depend on the other requests of the step.
        most = min(request.num_remaining, self.budget) - 1  # a round adds one more token
        gamma = min(gamma, most)
        return self.drafter.most(request, gamma) if gamma > 0 else 0

    def fits(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether both caches have room for a step."""
        wanted = [(item.request.seq, item.num_new_tokens) for item in scheduled]
        if not self.cache.fits(wanted):
            return False
        return self.drafter.fits(scheduled)

    # ---- A step

    @torch.inference_mode()
    def step(self, scheduled: Sequence[ScheduledRequest]) -> dict[Request, list[int]]:
        """Run a step -> the new tokens of each request that had a round. If the step fails or is
        interrupted, its requests are closed."""
        scheduled = with_rows(scheduled)
        try:
            with self._timed(scheduled):
                return self._step(scheduled)
        except BaseException:  # Ctrl-C, too
            for item in scheduled:
                self.close(item.request)
            raise

    def _step(self, scheduled: Sequence[ScheduledRequest]) -> dict[Request, list[int]]:
        rounds = [item for item in scheduled if item.samples]
        features = None  # the hidden states that an EAGLE head reads
        if self.drafter.feature_layers:
            T = scheduled[-1].token_rows.stop
            features = self.target.empty_features(self.drafter.feature_layers, T)
        # A backend may run several plain rounds at once (gpu/steps.py). The plain one calls
        # `run_rounds`, below.
        drawn = self.target.ops.run_rounds(self, scheduled, features)
        new_tokens = {}
        for item, (tokens, records) in zip(rounds, drawn):
            num_rounds = 1 if item.num_drafts else len(tokens)
            stats = RoundStats(item.num_drafts, len(tokens) - num_rounds, len(rounds))
            new = self._finish(item.request, tokens, [stats] * num_rounds)
            item.request.logprobs += records[: len(new)]
            new_tokens[item.request] = new
        self.drafter.learn(scheduled, features)
        for item in scheduled:  # keep the accepted tokens, and drop rejected drafts
            self.cache.commit(item.request.seq, item.request.tokens)
        return new_tokens

    @contextmanager
    def _timed(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[None]:
        """Choose γ for the next step, from the drafts and the time of the step that runs in this
        block."""
        rounds = [item for item in scheduled if item.samples]
        if not rounds or not self.has_drafter:
            yield
            return
        is_typical = self._is_typical(scheduled)
        counts = [len(item.request.rounds) for item in rounds]
        num_graphs = len(live_graphs)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start  # the step has waited for the device
        if len(live_graphs) > num_graphs:  # it was slow: it recorded a CUDA graph
            is_typical = False
        # All processes must choose the same γ.
        nanoseconds, is_typical = self.target.group.agree([int(1e9 * seconds), is_typical])
        if is_typical:
            num_drafts = [item.num_drafts for item in rounds]
            num_rounds = max(len(item.request.rounds) - n for item, n in zip(rounds, counts))
            self.auto_gamma.observe(num_drafts, 1e-9 * nanoseconds / num_rounds, num_rounds)
        for item in rounds:
            self.drafter.observe(item.request)
        self.batch_size = len(rounds)

    def _is_typical(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether a step took time only for its rounds: no request has its first round or reads
        more than its last token, and the drafter has at most MAX_LAG tokens to read for each."""
        for item in scheduled:
            if not item.request.rounds or item.num_tokens > 1:
                return False
            if self.drafter.num_to_read(item) > MAX_LAG:
                return False
        return True

    def run_rounds(
        self, scheduled: Sequence[ScheduledRequest], features: Features | None
    ) -> list[Drawn]:
        """Run the passes of a step: the drafter's, and then the target's, which fills `features`.
        Return what each round drew, and record the prompts' log-probabilities."""
        rounds = [item for item in scheduled if item.samples]
        requests = [item.request for item in rounds]
        num_drafts = [item.num_drafts for item in rounds]
        round = Round(requests, num_drafts, self.drawing, target=self.target)
        has_drafts = any(round.num_drafts)
        with named_as_draft():
            proposal = self.drafter.propose(round) if has_drafts else round.no_drafts()
        if round.masks is not None:  # start filling the grammars' masks for the rows after drafts
            round.masks.push_all(proposal.tokens.T.tolist())
        logits = self._run_target(scheduled, rounds, proposal, features)
        self._record_prompts(scheduled, logits)
        if not rounds:
            return []
        asks = any(request.settings.logprobs is not None for request in requests)
        unmasked = logits
        if asks and round.masks is not None:  # masks are applied in place
            unmasked = logits.clone()
        p = self._probabilities(rounds, round, logits, proposal.tokens)
        if has_drafts:
            round_tokens = self._verify(round, p, proposal)
        else:
            round_tokens = self._pick(round, p)
        return [self._drawn(item, new, unmasked) for item, new in zip(rounds, round_tokens)]

    def _pick(self, round: Round, p: Tensor) -> list[list[int]]:
        """The next token of each request of a round without drafts."""
        picked = round.text_rng().pick(p[:, 0])  # int64[B], drawn by the target's rng
        tokens = self.target.group.agree(picked.tolist())  # here the host waits for a GPU
        return [[token] for token in check_tokens(tokens)]

    def _verify(self, round: Round, p: Tensor, proposal: Proposal) -> list[list[int]]:
        """The accepted drafts of each request, and the token after them."""
        accepted, token = round.verify(p, proposal)
        packed = torch.cat((proposal.tokens, accepted[:, None], token[:, None]), 1)  # [B, k + 2]
        rows = self.target.group.agree(packed.tolist())  # here the host waits for a GPU
        round_tokens = []
        # A row: k drafts (−1 beyond the request's own), the number accepted, the token after them.
        for num_drafts, (*drafts, num_accepted, last) in zip(round.num_drafts, rows):
            check_tokens([last])
            with named_as_draft():
                check_tokens(drafts[:num_drafts])
            round_tokens.append([*drafts[:num_accepted], last])
        return round_tokens

    def _run_target(
        self,
        scheduled: Sequence[ScheduledRequest],
        rounds: Sequence[ScheduledRequest],
        proposal: Proposal,
        features: Features | None,
    ) -> Tensor:
        """Run the target's pass, which fills `features` -> its logits [R, ≥ V], in the order of
        `with_rows`.

        The drafted token ids are on the device, and the host need not wait for them: it writes a 0
        in place of each draft, and the device fills them in. The last pending token of a round and
        each of its drafts give logits.
        """
        to_store = []  # (sequence, its tokens)
        for item in scheduled:
            pending = item.request.tokens[item.start : item.stop]
            to_store.append((item.request.seq, pending + [0] * item.num_drafts))
        k = proposal.tokens.shape[1]
        logits_indices: list[int] = []
        holes: list[int] = []  # where drafts belong in the pass
        drafts: list[int] = []  # their indices in the flattened proposal, [B · k]
        for b, item in enumerate(rounds):
            logits_indices += item.token_rows[item.num_tokens - 1 :]
            holes += item.token_rows[item.num_tokens :]
            drafts += range(b * k, b * k + item.num_drafts)
        for item in scheduled:
            logits_indices += item.token_rows[: item.num_scores]
        device = self.target.device
        tokens = send([token for _, new in to_store for token in new], device)
        if holes:
            # A draft is −1 if its logits were not finite; `check_tokens` raises later.
            proposed = proposal.tokens.flatten().clamp(min=0)
            tokens[send(holes, device)] = proposed[send(drafts, device)]
        wanted = None  # all tokens give logits
        if logits_indices != [*range(len(tokens))]:
            wanted = send(logits_indices, device)
        return self.target(tokens, self.cache.extend(to_store), wanted, features)

    def _probabilities(
        self, rounds: Sequence[ScheduledRequest], round: Round, logits: Tensor, drafted: Tensor
    ) -> Tensor:
        """The logits of `_run_target` -> the target's distributions, float[B, k + 1, V]. Rows
        beyond a request's own drafts are zero."""
        counts = [item.num_logits for item in rounds]
        owners: list[int] = []  # the request of each row
        depths: list[int] = []  # how many drafts come before each row
        for b, count in enumerate(counts):
            owners += [b] * count
            depths += range(count)
        # The rows of prompts, which come after those of rounds, are not sampled.
        probs = round.probabilities(logits[: len(owners)], owners, depths, drafted)  # [·, V]
        if min(counts) == round.width:  # all have k drafts: k + 1 rows
            return probs.unflatten(0, (-1, round.width))
        return pad_sequence(probs.split(counts), batch_first=True)

    def _drawn(self, item: ScheduledRequest, tokens: list[int], logits: Tensor) -> Drawn:
        """Add the tokens' log-probabilities, if they are asked for. For a draft or its correction,
        they come from the row that verified it."""
        num_top = item.request.settings.logprobs
        if num_top is None:
            return Drawn(tokens)
        rows = logits[item.logit_rows[: len(tokens)], : self.drawing.vocab_size]
        return Drawn(tokens, token_logprobs(rows, tokens, num_top))

    def _record_prompts(self, scheduled: Sequence[ScheduledRequest], logits: Tensor) -> None:
        """Store the log-probabilities of prompts' tokens, where they are asked for."""
        for item in scheduled:
            if item.num_scores:
                request = item.request
                start = item.start
                stop = start + item.num_scores
                rows = check_finite(logits[item.score_rows, : self.drawing.vocab_size])
                following = request.tokens[start + 1 : stop + 1]
                records = token_logprobs(rows, following, request.settings.prompt_logprobs)
                # They may be there already: after a preemption, or from a sibling.
                request.prompt_logprobs[start:stop] = records

    def _finish(self, request: Request, new: list[int], rounds: list[RoundStats]) -> list[int]:
        """Append the tokens of a round, or of several plain ones, to the request, up to an
        end-of-text token. Return the new tokens."""
        del new[request.num_remaining :]  # if max_tokens is 0, a token was drawn anyway
        for i, token in enumerate(new):
            if token in request.eos_token_ids:
                del new[i + 1 :]
                break
        stats = rounds[-1]
        if stats.num_drafts == 0:
            origins = ["plain"] * len(new)
        elif stats.num_accepted == stats.num_drafts:
            origins = ["accepted"] * stats.num_accepted + ["bonus"]
        else:
            origins = ["accepted"] * stats.num_accepted + ["corrected"]
        request.tokens += new
        request.origins += origins[: len(new)]
        request.rounds += rounds
        if request.grammar_state is not None:
            self._settle_grammar(request, new)
        return new

    def _settle_grammar(self, request: Request, new: list[int]) -> None:
        """Advance the grammar by a round's tokens. The grammar may end the output."""
        state = request.grammar_state
        if request.finish_reason == "stop" and new[-1] not in self.grammars.eos_token_ids:
            state.settle(new[:-1])  # a stop token of the request, which is not shown, ended it
            request.is_cut = not state.may_end
        else:
            state.settle(new)
        # Each process times its own masks, and one may have found them too slow.
        if self.target.group.agree(state.has_failed):
            request.error = (
                "its grammar allows no token of this model here, or takes too much work for a "
                "mask: simplify it"
            )
