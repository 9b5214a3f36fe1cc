"""Output that follows a grammar: a JSON schema, a regular expression, a choice, or Lark.

After each token of an output, the grammar allows some tokens and forbids the others: the *mask* of
that prefix. A token is drawn from the target's distribution, restricted to the mask, and
renormalized:

    p̃(x | prefix) ∝ p(x | prefix) · 1[x is allowed after prefix]

So the logits of forbidden tokens become −∞, before temperature and filters. End-of-text is allowed
where the output may end; where nothing else can follow, only end-of-text is allowed.

A round of speculation has a mask for each number of drafts: after the output so far, after the
output and one draft, and so on. Masks on the target's logits make the output exact; masks on the
draft model's logits only raise acceptance.

    output {"age":   drafts 4 2 }    after     {"age":    {"age":4       {"age":42      {"age":42}
                                     allowed   a digit    a digit, }     a digit, }     end-of-text

An output's automaton (automaton.py) reads the drafts to make these masks, and takes them back when
the round is over. Making a mask takes time, so a worker thread does it while models compute:

    engine thread    makes draft 1    makes draft 2    the target's pass    apply, verify    settle
    worker thread    mask 0           reads draft 1,   reads draft 2,
                                      mask 1           mask 2

`Masks.start` begins with mask 0, `push` hands over a draft, `apply` waits for the worker, and
`settle` takes the drafts back. So only one thread at a time uses an automaton: the worker from
`start` until `apply` has waited, and otherwise the engine thread.

Invariant: between rounds an automaton has read its output's tokens, but not end-of-text.

An output ends

- where its grammar ends, even if its request ignores end-of-text;
- at a stop token of its request. If the grammar may not end there, the output was cut, and
  finish_reason is `length`;
- with an error, if its masks take too much work (automaton.LIMITS) or too much time (SLOW_MASK),
  because all requests of the batch wait for them.

Cost: `python bench.py --target NAME` measures it; masks within a string of bounded length take
longest.

Koo, Liu & He 2024 (arXiv:2407.08103); Dong et al. 2024, XGrammar (arXiv:2411.15100).

    R rows of logits · V vocabulary · W = ⌈V / 32⌉ words of a mask, a bit for each token
    k the largest number of drafts in a round
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from automaton import Grammars
from devices import send

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from request import Request

# Seconds. llguidance fills all masks of one depth together. If that takes longer than SLOW_STEP,
# the next ones are filled and timed one by one, to find the output that is at fault: it ends if its
# own mask takes longer than SLOW_MASK.
SLOW_STEP = 0.03
SLOW_MASK = 0.01


# ---- The state of an output ----------------------------------------------------------------------


class GrammarState:
    """How far an output has come in its grammar."""

    def __init__(self, grammars: Grammars, compiled: LLMatcher, tokens: Iterable[int]):
        """compiled: the automaton before the first token. tokens: the output so far."""
        self.grammars = grammars
        self.compiled = compiled
        self.tokens: list[int] = []  # of the output, without end-of-text
        # The output ends with an error: a token is not allowed, or its masks take too much.
        self.has_failed = False
        self._start_over()
        self._follow(tokens)

    def _start_over(self) -> None:
        """Make `matcher`: a copy of the automaton that has read the output's tokens, no drafts."""
        self.matcher = self.compiled.deep_copy()
        self.matcher.try_consume_tokens(self.tokens)
        self.num_drafts = 0  # that the matcher has read after them
        # A draft was forbidden or ended the output: later drafts are not read, and need no mask.
        self.drafts_ended = False

    def _follow(self, new: Iterable[int]) -> None:
        """Read new tokens of the output."""
        for token in new:
            if token in self.grammars.eos_token_ids:
                # An error shows only when a mask is computed, and such a mask allows nothing but
                # end-of-text. So compute one, and ask whether the output may end here.
                self.matcher.compute_bitmask()
                self.has_failed |= self.matcher.is_error() or not self.matcher.is_accepting()
                return
            self.tokens.append(token)
            if not self.matcher.try_consume_tokens([token]):
                self.has_failed = True

    @property
    def may_end(self) -> bool:
        """Whether the output may end here."""
        return self.matcher.is_accepting()

    def push(self, draft: int) -> None:
        """Read a draft, unless one before it was forbidden or ends the output."""
        if self.drafts_ended:
            return
        # −1 is no token: the request has fewer drafts, or their logits were not finite.
        is_token = draft >= 0 and draft not in self.grammars.eos_token_ids
        if is_token and self.matcher.try_consume_tokens([draft]):
            self.num_drafts += 1
        else:
            self.drafts_ended = True

    def settle(self, new: Iterable[int]) -> None:
        """A round is over: take its drafts back, and read the tokens that it made."""
        if not self.matcher.rollback(self.num_drafts):  # impossible after an error
            self._start_over()
        self.num_drafts = 0
        self.drafts_ended = False
        self._follow(new)
        if self.has_failed:
            self.grammars.forget()

    def fill_timed(self, mask: Tensor) -> None:
        """In the worker: fill a mask, int32[W], and end the output if that takes too long."""
        start = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        self.has_failed |= time.thread_time() - start > SLOW_MASK

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """The first of these tokens, as many as may follow the output. This changes nothing."""
        return list(tokens[: self.matcher.validate_tokens(list(tokens))])

    def forced(self, count: int) -> list[int]:
        """At most `count` tokens of the text that must follow the output. This changes nothing."""
        text = self.matcher.compute_ff_bytes().decode(errors="ignore")  # ff: fast-forward
        tokens = self.grammars.tokenizer.encode(text, is_first=False)
        return self.allowed(tokens[:count])


# ---- The masks of a round ------------------------------------------------------------------------


class Masks:
    """The masks of a round: k + 1 for each request with a grammar, after 0, 1, … k drafts.

    A set bit allows its token. Masks that nobody needs have all bits set: those after a draft that
    the grammar forbids or that ends the output. A request is named by its index in the round.
    """

    def __init__(self, requests: Sequence[Request], width: int, vocab_size: int):
        """width: k + 1."""
        self.states: dict[int, GrammarState] = {}  # of the requests that have a grammar
        for b, request in enumerate(requests):
            if request.grammar_state is not None:
                self.states[b] = request.grammar_state
                self.grammars = request.grammar_state.grammars  # one for all
        self.first_rows = {b: width * i for i, b in enumerate(self.states)}  # of `bits`
        shape = width * len(self.states), math.ceil(vocab_size / 32)
        self.bits = torch.full(shape, -1, dtype=torch.int32)  # [rows, W]; −1: all bits set
        self.tasks: list[Future] = []  # of the worker; task j fills the masks after j drafts

    def start(self) -> None:
        """Let the worker fill the masks before any draft. A second call does nothing."""
        if not self.tasks:
            self.tasks = [self.grammars.worker.submit(self._fill, 0, [*self.states])]

    def push(self, requests: Iterable[int], drafts: Iterable[int]) -> None:
        """Let the worker read the next draft of these requests, and fill the masks after it."""
        self.start()
        depth = len(self.tasks)
        own = {b: draft for b, draft in zip(requests, drafts) if b in self.states}
        self.tasks.append(self.grammars.worker.submit(self._read, depth, own))

    def push_all(self, drafts: Sequence[Sequence[int]]) -> None:
        """Push those drafts of a round that have not been pushed yet. drafts[j]: draft j of every
        request."""
        self.start()
        num_pushed = len(self.tasks) - 1
        for each in drafts[num_pushed:]:
            self.push(range(len(each)), each)

    def _read(self, depth: int, drafts: dict[int, int]) -> None:
        """In the worker: read a draft of each request, then fill the masks after it."""
        for b, draft in drafts.items():
            self.states[b].push(draft)
        self._fill(depth, drafts)

    def _fill(self, depth: int, requests: Iterable[int]) -> None:
        """In the worker: fill the masks of these requests after `depth` drafts."""
        wanted = []
        for b in requests:
            if not self.states[b].drafts_ended:
                wanted.append((self.states[b], self.first_rows[b] + depth))
        start = time.perf_counter()
        if self.grammars.is_slow:
            for state, row in wanted:
                state.fill_timed(self.bits[row])
        elif wanted:
            jobs = [(state.matcher, row) for state, row in wanted]
            num_rows, words = self.bits.shape
            row_bytes = 4 * words
            address = self.bits.data_ptr()
            self.grammars.executor.unsafe_compute_mask_ptr(jobs, address, row_bytes, num_rows)
        self.grammars.is_slow = time.perf_counter() - start > SLOW_STEP

    def apply(self, logits: Tensor, owners: Sequence[int], depths: Sequence[int]) -> Tensor:
        """Set the logits of forbidden tokens to −∞, in place: [R, V]. Row i belongs to request
        owners[i], after depths[i] of its drafts. Wait for the worker if a mask is needed."""
        masked = []  # rows of `logits`
        masks = []  # their rows of `bits`
        for row, (b, depth) in enumerate(zip(owners, depths)):
            if b in self.states:
                masked.append(row)
                masks.append(self.first_rows[b] + depth)
        if not masked:
            return logits
        self.start()
        for task in self.tasks:
            task.result()
        return forbid(logits, masked, self.bits[masks])


def forbid(logits: Tensor, rows: Sequence[int], masks: Tensor) -> Tensor:
    """Add −∞ to each logit of these rows whose bit is 0, in place: [R, V].

    masks: int32[len(rows), W], on the host. Token i has bit i % 32 of word i // 32. A table turns
    each byte of a mask into eight numbers to add, 0 or −∞.
    """
    device = logits.device
    numbers = torch.arange(256, device=device)
    places = torch.arange(8, device=device)
    bits = (numbers[:, None] >> places) & 1  # of each byte: [256, 8]
    table = bits.to(logits.dtype).log()  # log 1 = 0, log 0 = −∞
    each_byte = send(masks.contiguous().view(torch.uint8).int(), device)  # [rows, 4 W]
    bias = F.embedding(each_byte, table)
    bias = bias.flatten(1)
    V = logits.shape[1]
    return logits.index_add_(0, send(rows, device), bias[:, :V])


def main() -> None:
    """The demonstration counts the tokens that may follow, after each token of an output."""
    model = Model.load("tiny", "cpu")
    asked = Grammar("regex", "(Tom|Lily) saw [0-9]{1,2} dogs?\\.")
    state = GrammarState(model.grammars, model.grammars.compile(asked), [])
    for token in model.encode("Tom saw 12 dogs."):
        state.settle([token])
        mask = int.from_bytes(state.matcher.compute_bitmask(), "little")
        text = model.tokenizer.decode([token])
        print(f"{text!r:8} then one of {mask.bit_count()} tokens")


if __name__ == "__main__":
    from loading import Model
    from settings import Grammar

    main()
