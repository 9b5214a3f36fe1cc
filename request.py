"""A request: what is asked of a text, the text in the making, and what comes back.

`Settings` say how a text is to be made, `Request` is how far it has come, `StopStrings` where it must end, `Result` what it became
and what it took.

Stop strings are found in the *text*, not among the tokens: a stop string may begin in the middle of one token and end in the
middle of another. So the end of what was made is held back for as long as it could be the beginning of one.

    held back: the longest suffix of the text that is a proper prefix of a stop string
"""
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sampling import check_settings

MAX_TOKENS = 512                                        # unless asked otherwise
Message = dict[str, str]                                # {"role": …, "content": …}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Settings:
    """How one text is to be made. Whatever is None is the model's own choice (`Model.complete`)."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    gamma: int | None = None                            # tokens drafted a round; None: as many as pay

    def __post_init__(self) -> None:
        check_settings(self.temperature, self.top_k, self.top_p, self.min_p)
        if not _whole(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens!r}: it must be a whole number of at least 1")
        if self.gamma is not None and (not _whole(self.gamma) or self.gamma < 0):
            raise ValueError(f"gamma is {self.gamma!r}: it must be a whole number of at least 0, or None for as many drafts as pay")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"a stop string is {repr(stop) if stop != '' else 'empty'}: it must be text of at least one character")
        if self.seed is not None and (not _whole(self.seed) or not -2**63 <= self.seed < 2**63):
            raise ValueError(f"seed is {self.seed!r}: it must be a whole number of at most 64 bits")


class Taken(NamedTuple):
    """A round that went by (speculative.py): drafts, how many of them stood, the seconds it took, and how many texts shared them."""
    drafted: int
    accepted: int
    seconds: float
    texts: int = 1


@dataclass(eq=False)
class Request:
    """One text in the making: `tokens` are the prompt and then what was made; a cache holds the first so many of them, never all."""
    tokens: list[int]
    settings: Settings                                  # complete: a seed, a temperature
    ends: Collection[int] = ()                          # end-of-text tokens
    seq: int = -1                                       # its sequence in the target's cache
    rounds: list[Taken] = field(default_factory=list)
    whose: list[str] = field(default_factory=list)      # of each token made: plain, or accepted, corrected, bonus
    twin: "Request | None" = None                       # another with the same prompt: what it has read need not be read again
    arrived: float = 0.0                                # seconds, by time.perf_counter: when it was asked for,
    started: float = 0.0                                # and when it was first let in (batcher.py)
    preempted: int = 0                                  # how often it had to make room

    def __post_init__(self) -> None:
        self.tokens, self.prompt = list(self.tokens), len(self.tokens)

    @property
    def left(self) -> int:
        """How many tokens may still be made."""
        return self.settings.max_tokens - (len(self.tokens) - self.prompt)

    @property
    def finish_reason(self) -> str:
        """Empty while there is something left to make."""
        if len(self.tokens) > self.prompt and self.tokens[-1] in self.ends:
            return "stop"
        return "length" if self.left == 0 else ""

    @property
    def acceptance(self) -> float | None:
        """α: of the drafts that were looked at (those up to the first that was rejected), the share that stood."""
        looked_at = sum(min(taken.accepted + 1, taken.drafted) for taken in self.rounds)
        return sum(taken.accepted for taken in self.rounds) / looked_at if looked_at else None


class StopStrings:
    """Cuts a stream of text exactly before the first stop string, which may come in pieces.

    `feed` holds back what may be the beginning of one; `found` says that one came.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held, self.found = tuple(stops), "", False

    def feed(self, piece: str) -> str:
        if self.found:
            return ""
        self.held += piece
        cut = min((at for stop in self.stops if (at := self.held.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.found, out, self.held = True, self.held[:cut], ""
            return out
        longest = max((n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])), default=0)
        out, self.held = self.held[:len(self.held) - longest], self.held[len(self.held) - longest:]
        return out

    def finish(self) -> str:
        out, self.held = self.held, ""
        return out


class Speculation(NamedTuple):
    """How speculation went: of the drafts that were looked at the share that stood; tokens a round; how many times as fast as plain
    decoding it was, going by what a plain pass costs in this run; and what (1 − α^(γ+1)) / (1 − α) / (1 + γ c) predicts."""
    acceptance: float | None = None
    tokens_per_round: float | None = None
    speed_up: float | None = None
    predicted_speed_up: float | None = None

    def summary(self) -> str:
        accepted = "no drafts" if self.acceptance is None else f"{self.acceptance:.0%} of the drafts accepted"
        gain = (f": {self.speed_up:.2f} times as fast as plain decoding; by the formula {self.predicted_speed_up:.2f}") if self.speed_up else ""
        return f"{accepted}, {self.tokens_per_round:.2f} tokens a round{gain}"


@dataclass
class Result:
    """A finished text, and what it took. `tokens` are all that were made; `text` ends before a stop string."""
    prompt: str | list[Message]
    prompt_tokens: list[int]
    seed: int
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""                             # stop: an end-of-text token or a stop string; length: a limit; interrupted
    first: float = 0.0                                  # seconds
    total: float = 0.0
    queued: float = 0.0
    speculation: Speculation | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(index=self.index, prompt=self.prompt, prompt_tokens=self.prompt_tokens, tokens=self.tokens, text=self.text,
                    seed=self.seed, finish_reason=self.finish_reason, stats=dict(
                        prompt_tokens=len(self.prompt_tokens), tokens=len(self.tokens), seconds_to_first_token=self.first,
                        tokens_per_second=self.rate, seconds_queued=self.queued,
                        **(self.speculation or Speculation())._asdict()))

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first; None where there are none, or all came in one round."""
        return (len(self.tokens) - 1) / (self.total - self.first) if self.total > self.first else None

    def summary(self) -> str:
        rate = f", then {self.rate:.1f} tokens/s" if self.rate else ""
        return (f"{len(self.tokens)} tokens ({self.finish_reason}): the first after {self.first:.2f} s{rate}; seed {self.seed}"
                + (f"\n{self.speculation.summary()}" if self.speculation else ""))
