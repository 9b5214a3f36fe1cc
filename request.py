"""A request: a prompt with its settings, the tokens generated so far, and the result.

`OutputStream` turns a request's tokens into text as they come. Stop strings are searched for in the
*text*, because a stop string may begin and end inside a token. The end of the text is held back
while it could be the beginning of a stop string: the longest suffix that is a proper prefix of one.

Invariant: a request's tokens are its prompt, followed by all tokens generated so far. The caches
do not hold the last one, because the next pass reads it for its logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from grammar import GrammarState
from sampling import TokenLogprob
from settings import Settings
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Message = dict[str, Any]  # {"role": …, "content": …}
Show = Callable[[str, str], None]  # is called with a piece of text and its last token's origin


class RoundStats(NamedTuple):
    """The counts of a past round of one request (runner.py)."""

    num_drafts: int
    num_accepted: int
    batch_size: int = 1  # requests that shared the round


@dataclass(eq=False)  # compared, and hashed, by identity
class Request:
    """One request, from its prompt to its last token."""

    tokens: list[int]  # the prompt, then the new tokens; the last one is not cached yet
    settings: Settings  # seed is not None
    eos_token_ids: Collection[int] = ()
    seq: int | None = None  # the sequence in the target's cache; None: it is not open
    rounds: list[RoundStats] = field(default_factory=list)
    # The origin of each new token: plain; accepted (a draft); corrected (after a rejected draft);
    # or bonus (at the end of a round in which every draft was accepted).
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the new tokens, if asked for
    # For the prompt's tokens from the second on, if asked for. Siblings share the list.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    sibling: Request | None = None  # this request waits until its sibling has read their prompt
    turn: float = 0.0  # the queue is ordered by turn, then by arrival: serve.py is fair to clients
    arrived: float = 0.0  # seconds, by time.perf_counter
    number: int = 0  # from 1 on, in the order in which requests come to a batch
    started: float = 0.0  # when the request was first admitted (batcher.py)
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # tokens of the prompt that were cached at the first admission
    compiled: LLMatcher | None = None  # the grammar, if it was compiled early
    grammar_state: GrammarState | None = None  # set while a runner has the request open
    error: str = ""  # why the output ended before its grammar did
    is_cut: bool = False  # an end-of-text token ended the output where its grammar may not end
    is_reply: bool = False  # the output answers a conversation instead of continuing the prompt

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.num_prompt_tokens = len(self.tokens)

    def sibling_text(self, i: int) -> Request:
        """A request for another output of this prompt. Its seed is this one's plus i, wrapped to
        64 bits."""
        seed = (self.settings.seed + i + 2**63) % 2**64 - 2**63
        settings = replace(self.settings, seed=seed)
        return Request(
            self.tokens,
            settings,
            self.eos_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            sibling=self,
            compiled=self.compiled,
            is_reply=self.is_reply,
        )

    @property
    def num_remaining(self) -> int:
        """The number of tokens that may still be generated."""
        return self.num_prompt_tokens + self.settings.max_tokens - len(self.tokens)

    @property
    def finish_reason(self) -> str:
        """stop, length or error; empty while there are tokens left to read or generate. With a
        grammar, "stop" means that the grammar may end there. If a stop token that the grammar does
        not know as its end cuts the output elsewhere, the reason is "length"."""
        if self.error:
            return "error"
        if len(self.tokens) > self.num_prompt_tokens and self.tokens[-1] in self.eos_token_ids:
            return "length" if self.is_cut else "stop"
        # With max_tokens of 0, the prompt is read in a round, too.
        return "length" if self.num_remaining == 0 and self.rounds else ""

    @property
    def acceptance(self) -> float | None:
        """α = accepted / examined drafts. A round examines its drafts up to the first rejection."""
        accepted = sum(stats.num_accepted for stats in self.rounds)
        examined = sum(min(stats.num_accepted + 1, stats.num_drafts) for stats in self.rounds)
        return accepted / examined if examined else None


# ---- Text ----------------------------------------------------------------------------------------


class StopStrings:
    """Cuts a stream of text before the first complete stop string. If several become complete at
    the same character, it cuts before the longest."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.held = ""  # a suffix of the text that could be the beginning of a stop string
        self.is_complete = False

    def feed(self, piece: str) -> str:
        """Add `piece` to the text -> the text that can be shown now."""
        if self.is_complete:
            return ""
        text = self.held + piece
        found = []  # (end, start) of each stop string: the one that ends first counts
        for stop in self.stops:
            if stop in text:
                start = text.find(stop)
                found.append((start + len(stop), start))
        if found:
            self.is_complete = True
            self.held = ""
            _, start = min(found)
            return text[:start]
        num_held = max((self._num_begun(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_begun(self, text: str, stop: str) -> int:
        """The length of the text's longest suffix that is a proper prefix of this stop string."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0


class Speculation(NamedTuple):
    """How much drafts helped a request. speed_up: measured, relative to plain decoding."""

    acceptance: float | None = None
    tokens_per_round: float | None = None
    speed_up: float | None = None


@dataclass
class Result:
    """A finished output, and what it cost."""

    prompt: str | list[Message]
    prompt_tokens: list[int]
    seed: int
    index: int = 0
    tokens: list[int] = field(default_factory=list)  # the new tokens
    text: str = ""  # decoded, cut before a stop string
    finish_reason: str = ""  # stop (a token or a string), length, interrupted, error
    error: str = ""
    seconds_to_first_token: float = 0.0  # from arrival
    num_first_tokens: int = 0  # tokens that arrived together at that moment
    seconds: float = 0.0  # from arrival to the last token
    seconds_queued: float = 0.0  # from arrival to admission
    speculation: Speculation | None = None
    logprobs: list[TokenLogprob] | None = None  # of `tokens`, if asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens from the second on

    @property
    def tokens_per_second(self) -> float | None:
        """The speed after the first round; None if all tokens came in that round."""
        seconds = self.seconds - self.seconds_to_first_token
        return (len(self.tokens) - self.num_first_tokens) / seconds if seconds > 0 else None


class OutputStream:
    """One request's output as it grows, in whole characters and cut before a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        prompt: str | list[Message],
        show: Show | None = None,
        index: int = 0,
    ):
        self.request = request
        self.show = show
        self.result = Result(prompt, list(request.tokens), request.settings.seed, index=index)
        # A grammar sees every byte, including a leading space, which some tokenizers drop.
        continues = not request.is_reply or request.settings.follows is not None
        self.decoder = tokenizer.incremental_decoder(continues)
        self.stops = StopStrings(request.settings.stop)
        self.origin = "plain"  # of the last token

    @property
    def is_done(self) -> bool:
        return self.stops.is_complete or bool(self.request.finish_reason)

    def feed(self, new_tokens: Sequence[int]) -> None:
        """Show the request's new tokens. Tokens after a stop string are dropped."""
        request = self.request
        result = self.result
        result.seconds = time.perf_counter() - request.arrived
        if not result.tokens:
            result.seconds_to_first_token = result.seconds
            result.num_first_tokens = len(new_tokens)
        first = len(request.origins) - len(new_tokens)
        for token, origin in zip(new_tokens, request.origins[first:]):
            self.origin = origin
            result.tokens.append(token)
            if token not in request.eos_token_ids:
                self._emit(self.stops.feed(self.decoder.feed(token)))
            if self.stops.is_complete:
                return

    def _emit(self, piece: str) -> None:
        if piece:
            self.result.text += piece
            if self.show is not None:
                self.show(piece, self.origin)

    def finish(self, reason: str = "") -> Result:
        """Show the rest of the text -> the result. reason: why the request was cancelled, if it
        was."""
        rest = self.stops.feed(self.decoder.finish())
        rest += self.stops.held  # no more text can complete a stop string
        self.stops.held = ""
        self._emit(rest)
        result = self.result
        if self.request.started:  # the request was admitted
            result.seconds_queued = self.request.started - self.request.arrived
        if self.request.settings.logprobs is not None:
            result.logprobs = self.request.logprobs[: len(result.tokens)]
        if self.request.settings.prompt_logprobs is not None:
            result.prompt_logprobs = self.request.prompt_logprobs
        # Not whole: cancelled before the last step's tokens were fed.
        is_whole = len(result.tokens) == len(self.request.origins)
        if self.stops.is_complete:
            reason = "stop"
        elif is_whole and self.request.finish_reason:  # it finished before it could be cancelled
            reason = self.request.finish_reason
        result.finish_reason = reason
        result.error = self.request.error if reason == "error" else ""
        return result
