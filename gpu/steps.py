"""Several tokens a step, without drafts: the host waits for the device once for all of them.

The target drafts for itself. In coupled mode a draft is drawn with the random numbers of plain
decoding at its position. So n drafts of the target are the tokens of n plain steps, and need no
verification. The chain that makes them is one CUDA graph (graphs.py), with no host in between.

Invariant: the requests get the tokens of plain decoding, and the cache holds all but the last one.
Cost: a request that ends within a step has computed up to n − 1 tokens in vain.
Not covered: grammars, penalties and logprobs (the host makes masks, and needs drafts and logits);
look-ups and heads (they see each token); steps with a chunk of a prompt, in which the tokens of the
other texts cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafters import SelfDrafter
from kernels import Ops
from runner import Drawn
from sampling import check_tokens
from speculative import Round

if TYPE_CHECKING:
    from model import Features
    from runner import ModelRunner, ScheduledRequest


class MultiStep(Ops):
    """Operations by which a step without drafts draws `multi_step` tokens of each request."""

    multi_step = 4

    def run_rounds(
        self,
        runner: ModelRunner,
        scheduled: Sequence[ScheduledRequest],
        features: Features | None,
    ) -> list[Drawn]:
        counts = self._counts(runner, scheduled)
        if not counts:
            return super().run_rounds(runner, scheduled, features)
        requests = [item.request for item in scheduled]
        coupled = runner.drawing._replace(coupled=True)
        round = Round(requests, counts, coupled, target=runner.target)
        proposal = SelfDrafter(runner.target, runner.cache).chain(round).draft(round)
        rows = runner.target.group.agree(proposal.tokens.tolist())  # here the host waits
        return [Drawn(check_tokens(row[:count])) for count, row in zip(counts, rows)]

    def _counts(self, runner: ModelRunner, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        """How many tokens each request draws; [] if this step has one pass."""
        n = self.multi_step
        if n == 1 or runner.drafter.sees_each_token:
            return []
        if any(item.num_new_tokens > 1 or not item.samples for item in scheduled):
            return []
        # With a fixed γ, no cache and no other request may change where a request drafts.
        if any(runner.round_size(item.request) > 1 for item in scheduled):
            return []
        settings = [item.request.settings for item in scheduled]
        if any(one.follows or one.logprobs is not None or one.penalties for one in settings):
            return []
        counts = [min(n, item.request.num_remaining) for item in scheduled]
        if max(counts) < n:  # fewer tokens would need a CUDA graph of their own
            return []
        if 0 in counts:  # max_tokens is 0, but a token is computed, and its probabilities checked
            return []
        wanted = [(item.request.seq, count) for item, count in zip(scheduled, counts)]
        return counts if runner.cache.fits(wanted) else []
