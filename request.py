"""A request: a prompt with its settings, the tokens made so far, and the result.

Stop strings are searched in the *text*, because a stop string may begin and end inside a token. The end of a text is
held back while it could begin one: held back = the longest suffix of the text that is a proper prefix of a stop string.

`read_requests` reads lines of JSON, {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, "id": "a"}. The prompt
is a text, or chat messages; settings have the names that `Settings` gives them.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint.files import parse_json
from errors import UserError
from kernels import Ops, send
from sampling import SETTINGS, TEXT, Keyed, Setting, check_settings, draft_role
from tokenizer import Tokenizer

MAX_TOKENS = 512  # the default
WHOLE = (
    ("max_tokens", 1, math.inf, "of at least 1"),
    ("seed", -(2**63), 2**63 - 1, "of at most 64 bits"),
    ("gamma", 0, math.inf, "of at least 0, or auto"),
)
Message = dict[str, str]  # {"role": …, "content": …}
Show = Callable[[str, str], None]  # gets a piece of text, and the origin of its last token


@dataclass(frozen=True)
class Settings:
    """How one text is made. None: the model's own choice (generate.Model.complete). `stop` may be one string, too."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    gamma: int | None = None  # tokens drafted a round; None or "auto": gamma.py chooses

    def __post_init__(self) -> None:
        check_settings(self.temperature, self.top_k, self.top_p, self.min_p)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(
            isinstance(stop, str) and stop for stop in stops
        ):
            raise UserError(
                f"stop is {self.stop!r}: it must be a text, or a list of texts, none of them empty"
            )
        vars(self).update(
            stop=tuple(stops), gamma=None if self.gamma == "auto" else self.gamma
        )  # frozen dataclass
        for name, least, most, rule in WHOLE:
            value = getattr(self, name)
            if not (
                type(value) is int
                and least <= value <= most
                or value is None
                and name != "max_tokens"
            ):
                raise UserError(f"{name} is {value!r}: it must be a whole number {rule}")


class RoundStats(NamedTuple):
    """What a past round did for one text (speculative.py)."""

    drafted: int
    accepted: int  # drafts that stood; if tokens were made ahead, all but the last
    seconds: float
    texts: int = 1  # how many texts shared the round


@dataclass(eq=False)
class Request:
    """One text in the making."""

    tokens: list[int]  # the prompt, then the new tokens; no cache holds the last one
    settings: Settings  # seed and temperature are not None
    ends: Collection[int] = ()  # end-of-text tokens
    seq: int = -1  # its sequence in the target's cache
    rounds: list[RoundStats] = field(default_factory=list)
    origins: list[str] = field(
        default_factory=list
    )  # of each new token: plain, accepted, corrected or bonus
    twin: "Request | None" = None  # a request with the same prompt, to fork the cache from
    arrived: float = 0.0  # seconds, by time.perf_counter
    started: float = 0.0  # when first admitted (batcher.py)
    preempted: int = 0  # how often

    def __post_init__(self) -> None:
        self.tokens, self.prompt = list(self.tokens), len(self.tokens)

    @property
    def left(self) -> int:  # tokens that may still be made
        return self.prompt + self.settings.max_tokens - len(self.tokens)

    @property
    def finish_reason(self) -> str:  # empty while tokens are left to make
        stopped = len(self.tokens) > self.prompt and self.tokens[-1] in self.ends
        return "stop" if stopped else "length" if self.left == 0 else ""

    @property
    def acceptance(self) -> float | None:
        """α: accepted drafts over examined drafts. A round examines its drafts up to the first rejection."""
        examined = sum(min(round.accepted + 1, round.drafted) for round in self.rounds)
        return sum(round.accepted for round in self.rounds) / examined if examined else None


def pack(pieces: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The pieces' tokens end to end: int64[T]; and the index of each piece's last token: int64[len(pieces)]."""
    ends = send([end - 1 for end in accumulate(map(len, pieces))], device)
    return send([token for piece in pieces for token in piece], device), ends


class Round:
    """The texts of a round, a row each: how many drafts each wants (its γ), its settings and its coins.
    coin(seeds, positions, roles): `Keyed`, or proof.Walk. Exact mode: roles text, draft 0, draft 1, … at the round's
    first position. Coupled mode: the role text at each token's position."""

    def __init__(
        self,
        requests: Sequence[Request],
        gammas: Sequence[int],
        vocab: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        coin: Callable[[Tensor, Tensor, int], Any] = Keyed,
        coupled: bool = False,
        ops: Ops | None = None,
    ):
        self.requests, self.gammas, self.vocab, self.device = requests, gammas, vocab, device
        self.coin, self.coupled, self.ops = coin, coupled, ops or Ops()
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32  # of probabilities
        self.width, self.own = 1 + max(gammas, default=0), 1 - coupled  # coins a text; draft 0's
        roles = [TEXT, *map(draft_role, range(self.width - 1))]
        self.places = [
            (request.settings.seed, len(request.tokens) + j * coupled, TEXT if coupled else role)
            for request in requests
            for j, role in enumerate(roles)
        ]

    @cached_property
    def coins(self) -> Any:
        """The coins of all texts, end to end: B · width rows. Made on first use, while a GPU is busy with its pass."""
        return self.coin(*send(self.places, self.device).view(-1, 3).unbind(1))

    def nothing(self) -> tuple[Tensor, Tensor]:
        """No drafts, to be filled: tokens int64[B, k], all −1, and distributions float[B, k, V], all zero."""
        B, k, device = len(self.requests), self.width - 1, self.device
        return torch.full((B, k), -1, device=device), torch.zeros(
            B, k, self.vocab, dtype=self.dtype, device=device
        )

    def settings(self, name: str) -> list[float | None]:
        return [getattr(request.settings, name) for request in self.requests]

    def probabilities(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """logits [R, ≥ V] -> float[R, V]. rows: each row's text. A setting equal in all rows becomes one number."""
        columns: list[Setting] = []
        for name, neutral in SETTINGS.items():
            every = self.settings(name)
            column = [every[row] for row in rows] or [None]
            numbers = [neutral if value is None else value for value in column]
            columns.append(
                column[0] if len(set(column)) == 1 else send(numbers, self.device, torch.float64)
            )
        return self.ops.probabilities(
            logits[:, : self.vocab], *columns
        )  # beyond the vocabulary: padding

    def draft_coin(self, j: int, rows: Sequence[int]) -> Any:
        """The coin of draft j in these rows: a coin of its own; in coupled mode the target's coin at that position."""
        all_rows, first = len(rows) == len(self.requests), self.own + j
        return (
            self.coins[first :: self.width]
            if all_rows
            else self.coins[[row * self.width + first for row in rows]]
        )

    def text_coin(self) -> Any:
        """The target's coin: a row for each text; in coupled mode `width` rows for each text, one for each position."""
        return self.coins if self.coupled else self.coins[:: self.width]


class StopStrings:
    """Cuts a stream of text before the first stop string. found: one came; held: a suffix that could begin one."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held, self.found = tuple(stops), "", False

    def feed(self, piece: str) -> str:
        text = "" if self.found else self.held + piece
        held = max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        cuts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        cut, self.found = min(cuts, default=len(text) - held), self.found or bool(cuts)
        self.held = "" if self.found else text[cut:]
        return text[:cut]


class Speculation(NamedTuple):
    """Speed-ups are over plain decoding: as measured, and by the formula (1 − α^(γ+1)) / (1 − α) / (w + γ c)."""

    acceptance: float | None = None
    tokens_per_round: float | None = None
    speed_up: float | None = None
    predicted_speed_up: float | None = None


@dataclass
class Result:
    """A finished text, and its cost. tokens: all new ones; text: the decoded tokens, cut before a stop string."""

    prompt: str | list[Message]
    prompt_tokens: list[int]
    seed: int
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""  # stop (a token or a string), length, interrupted, error
    first: float = 0.0  # seconds from arrival to the first token,
    total: float = 0.0  # to the last token,
    queued: float = 0.0  # and to admission
    speculation: Speculation | None = None

    def to_dict(self) -> dict[str, Any]:
        stats = dict(
            prompt_tokens=len(self.prompt_tokens),
            tokens=len(self.tokens),
            seconds_to_first_token=self.first,
            tokens_per_second=self.rate,
            seconds_queued=self.queued,
        )
        stats |= (self.speculation or Speculation())._asdict()
        return dict(
            index=self.index,
            prompt=self.prompt,
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            text=self.text,
            seed=self.seed,
            finish_reason=self.finish_reason,
            stats=stats,
        )

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first; None where all came in one round."""
        return (
            (len(self.tokens) - 1) / (self.total - self.first) if self.total > self.first else None
        )

    def summary(self) -> str:
        rate, drafts = f", then {self.rate:.1f} tokens/s" if self.rate else "", ""
        if self.speculation:
            alpha, per_round, gain, predicted = self.speculation
            faster = f": {gain:.2f} times as fast as plain decoding" if gain else ""
            faster += f"; by the formula {predicted:.2f}" if predicted else ""
            accepted = "no drafts" if alpha is None else f"{alpha:.0%} of the drafts accepted"
            drafts = f"\n{accepted}, {per_round:.2f} tokens a round{faster}"
        return (
            f"{len(self.tokens)} tokens ({self.finish_reason}): the first after {1e3 * self.first:.0f} ms{rate}; "
            f"seed {self.seed}{drafts}"
        )


class Writer:
    """One request's text as it grows: whole characters, cut before a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        prompt: str | list[Message],
        show: Show = lambda piece, origin: None,
        index: int = 0,
    ):
        self.request, self.show = request, show
        self.result = Result(prompt, list(request.tokens), request.settings.seed, index)
        self.stream, self.stops = tokenizer.incremental_decoder(), StopStrings(request.settings.stop)

    @property
    def done(self) -> bool:
        return self.stops.found or bool(self.request.finish_reason)

    def feed(self, new: Sequence[int]) -> None:
        """Show the request's newest tokens, `new`. Tokens after a stop string are dropped."""
        request, result = self.request, self.result
        result.total = time.perf_counter() - request.arrived
        for token, origin in zip(new, request.origins[len(request.origins) - len(new) :]):
            result.tokens.append(token)
            result.first = result.first or result.total
            if token not in request.ends:
                self._emit(self.stops.feed(self.stream.feed(token)), origin)
            if self.stops.found:
                break

    def _emit(self, piece: str, origin: str) -> None:
        if piece:
            self.result.text += piece
            self.show(piece, origin)

    def finish(self, reason: str = "") -> Result:
        """Show the rest of the text -> the whole result. reason: why the request was cancelled, if it was."""
        self._emit(self.stops.feed(self.stream.finish()) + self.stops.held, "plain")
        self.result.queued = max(0.0, self.request.started - self.request.arrived)
        self.result.finish_reason = (
            "stop" if self.stops.found else reason or self.request.finish_reason
        )
        return self.result


KINDS = {
    "prompt": (str | list, "a text, or chat messages"),
    "id": (object, ""),
    "system": (str | None, "a text"),
    "raw": (bool | None, "true or false"),
    "chat": (bool | None, "true or false"),
}
NAMES = (*KINDS, *Settings.__dataclass_fields__)  # that a line may have


def read_requests(
    lines: Iterable[str],
    model: Any,
    defaults: Settings,
    max_len: int | None,
    system: str | None = None,
    chat: bool | None = None,
) -> Iterator[tuple[int, dict[str, Any], Request | ValueError]]:
    """For each line that is not blank: its number, from 1; its JSON object; its Request, or a ValueError.
    model: a `generate.Model`; defaults: the settings where a line has none."""
    for number, text in ((n, line) for n, line in enumerate(lines, 1) if line.strip()):
        asked: dict[str, Any] = {}
        try:
            asked = _object(text)
            for name, (kind, rule) in KINDS.items():
                if not isinstance(asked.get(name), kind):
                    raise UserError(f"{name} is {asked[name]!r}: it must be {rule}")
            if asked.get("chat") and asked.get("raw"):
                raise UserError("chat and raw are both true: leave one out")
            chosen = {
                name: asked[name]
                for name in Settings.__dataclass_fields__
                if asked.get(name) is not None
            }
            how = asked.get("chat") or (False if asked.get("raw") else chat)
            yield (
                number,
                asked,
                model.request(
                    asked["prompt"],
                    replace(defaults, **chosen),
                    asked.get("system", system),
                    how,
                    max_len,
                ),
            )
        except ValueError as error:
            yield number, asked, error


def _object(text: str) -> dict[str, Any]:
    try:
        json.dumps(asked := parse_json(text))  # the result repeats it, so it must be JSON
        if not isinstance(asked, dict) or "prompt" not in asked:
            raise UserError('there is no "prompt"')
    except (ValueError, RecursionError) as error:
        raise UserError(f'{error}: a line must be a JSON object like {{"prompt": "…"}}') from None
    if unknown := [repr(name) for name in asked if name not in NAMES]:
        raise UserError(f"{', '.join(unknown)} is unknown here: a line may have {', '.join(NAMES)}")
    return asked
