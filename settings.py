"""What can be asked for: how a text is drawn, how long it is, where it stops, what it follows; and
how its prompt is read.

A setting of sampling has a line in `SETTINGS` and in `RULES`, a field of `Settings`, and its lines
in sampling.py. Nothing slow is imported here, so that a command's mistake is told at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, NoReturn

from errors import UserError, brief, check_names

MAX_TOKENS = 512  # the default
MAX_LOGPROBS = 20  # most probable tokens whose logprobs are told
MAX_GRAMMAR = 2**17  # characters of a schema, regex, choice or grammar
SETTINGS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # these change nothing, like None
LEAST_TOP_P = 1e-300  # the most probable token has more; and times a share it is not 0
RULES = {  # name -> smallest value, largest value, the rule in words
    "temperature": (0, 1e30, "from 0 (always the most probable token) to 1e30"),
    "top_k": (0, 2**31, "a whole number from 0 (keeps all) to 2^31"),
    "top_p": (0, 1, "from 0 (keeps the most probable alone) to 1 (keeps all)"),
    "min_p": (0, 1, "between 0 (keeps all) and 1"),
}
VERIFY = ("block", "token", "coupled")  # how drafts are verified
NOTATIONS = ("schema", "regex", "choice", "grammar")  # as settings name them; grammar: in Lark


# ---- The settings of a text ----------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How one text is made. A sampling setting of None is the one that the model's makers
    recommend, and a seed of None is drawn (`generate.Model.complete`)."""

    temperature: float | None = None
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = MAX_TOKENS  # 0: the prompt is read, and nothing is made
    stop: tuple[str, ...] = ()  # may be given as one string or a list
    gamma: int | None = None  # tokens drafted a round; None or "auto": gamma.py chooses
    logprobs: int | None = None  # record ln p of each token, and of so many of the most probable
    prompt_logprobs: int | None = None  # the same, of the prompt's tokens from the second on
    special: bool = False  # the text of a control token in a raw prompt is that token
    thinking: bool | None = None  # a chat template's enable_thinking (Qwen 3); None: its default
    # A text follows at most one of these (grammar.py).
    schema: str | None = None  # a JSON schema; may be given as an object
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # may be given as one text or a list
    grammar: str | None = None  # in Lark

    def __new__(cls, *values: Any, **named: Any) -> Settings:
        check_names(named, cls.__dataclass_fields__, "setting")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_settings(**{name: getattr(self, name) for name in SETTINGS})
        if not isinstance(self.special, bool):
            refuse_value("special", self.special, "true or false")
        if self.top_p is not None and self.top_p < LEAST_TOP_P:
            object.__setattr__(self, "top_p", LEAST_TOP_P)
        if self.gamma == "auto":
            object.__setattr__(self, "gamma", None)
        object.__setattr__(self, "stop", checked_texts("stop", self.stop))
        check_whole("max_tokens", self.max_tokens, 0, None)
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.gamma is not None:
            check_whole("gamma", self.gamma, 0, None, " or auto")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.thinking, bool | None):
            refuse_value("thinking", self.thinking, "true or false")
        if self.schema is not None:
            object.__setattr__(self, "schema", checked_schema(self.schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", checked_texts("choice", self.choice or ""))
        for notation in ("regex", "grammar"):
            if getattr(self, notation) is not None:
                check_text(notation, getattr(self, notation))
        given = [notation for notation in NOTATIONS if getattr(self, notation) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given: a text follows one of them")
        if self.follows is not None:
            self.follows.check_size()

    @property
    def follows(self) -> Grammar | None:
        """The grammar of the text; None: the text is free."""
        for notation in NOTATIONS:
            text = getattr(self, notation)
            if text is not None:
                return Grammar(notation, text)
        return None


# ---- The options of an engine --------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How an engine makes all of its texts."""

    # Tokens of the longest text; None: as many as model and memory allow.
    max_len: int | None = None
    max_batch: int = 16  # texts at a time
    # How drafts are verified: as a block or token by token, which keeps the law of the texts; or
    # coupled, which makes each text depend on target and seed alone.
    verify: str = "block"
    use_cache: bool = True
    kv: str = "paged"  # blocks on demand; or contiguous: max_batch rows of max_len
    kv_bits: str | int = 16  # 16, 8, 4 or "8/4": keys in 8, values in 4
    kv_memory: float | None = None  # bytes of the paged cache; up to 1: a share of free memory
    prefix_caching: bool = True

    def __new__(cls, *values: Any, **named: Any) -> Options:
        check_names(named, cls.__dataclass_fields__, "option")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_choice("verify", self.verify, VERIFY)
        check_choice("kv", self.kv, ("paged", "contiguous"))
        check_whole("max_batch", self.max_batch, 1, None)
        if type(self.max_len) not in (int, type(None)):  # its range is the model's
            refuse_value("max_len", self.max_len, "a whole number")
        for name in ("use_cache", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                refuse_value(name, getattr(self, name), "true or false")
        if type(self.kv_memory) not in (int, float, type(None)):
            refuse_value("kv_memory", self.kv_memory, "a share of free memory, or bytes")
        if self.kv == "contiguous" and self.kv_memory is not None:
            raise UserError(
                "kv_memory is for the paged cache: a contiguous one has max_batch rows of max_len"
            )


# ---- Checks --------------------------------------------------------------------------------------


def refuse_value(name: str, value: Any, rule: str) -> NoReturn:
    """UserError for a setting, or a field of a request, that breaks its rule."""
    error = UserError(f"{name} is {brief(repr(value), 100)}: it must be {rule}")
    error.param = name
    raise error


def check_known(tokens: Sequence[int], vocab_size: int) -> None:
    """UserError for a prompt's token that a model with so many tokens does not have."""
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"the prompt has token {token}, and the model has {vocab_size}, from 0 on: change "
                "the prompt, or the chat template"
            )


def check_settings(**settings: Any) -> None:
    """UserError for a sampling setting out of its range. A setting of None is not set."""
    for name, value in settings.items():
        if value is None:
            continue
        low, high, rule = RULES[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_in_range = is_number and low <= value <= high
        if not is_in_range or (name == "top_k" and value % 1):
            refuse_value(name, value, rule)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """UserError unless the value is one of these."""
    if value not in choices:
        refuse_value(name, value, " or ".join(choices))


def checked_texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several, as a tuple. UserError for anything else."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)):
        if all(isinstance(text, str) and text for text in texts):
            return tuple(texts)
    refuse_value(name, value, "a text, or a list of texts, none of them empty")


def check_whole(name: str, value: Any, low: int, high: int | None, otherwise: str = "") -> None:
    """UserError unless the value is a whole number from `low` to `high` (None: no limit)."""
    is_whole = type(value) is int
    is_low = is_whole and value < low
    is_high = is_whole and high is not None and value > high
    if not is_whole or is_low or is_high:
        rule = f"from {low} to {high}"
        if high is None:
            rule = f"of at least {low}"
        refuse_value(name, value, f"a whole number {rule}{otherwise}")


# ---- What a text may follow: grammar.py ----------------------------------------------------------


class Grammar(NamedTuple):
    """What a text must follow."""

    notation: str  # one of NOTATIONS
    text: str | tuple[str, ...]

    def __str__(self) -> str:
        """The grammar, as errors name it."""
        return f"{self.notation} {brief(self.text, 100)}"

    def check_size(self) -> None:
        """UserError for a text that is too long to be compiled."""
        size = sum(map(len, self.text))
        if size > MAX_GRAMMAR:
            raise UserError(
                f"{self} has {size:,} characters: at most {MAX_GRAMMAR:,} are compiled; shorten it"
            )


def checked_schema(schema: Any) -> str:
    """A JSON schema, as an object or as its text -> the text. UserError for anything else."""
    if isinstance(schema, str):
        Grammar("schema", schema).check_size()  # before it is read as JSON
    try:
        fields = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(fields, dict):
            return json.dumps(fields)
        wrong = "it is something else"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = brief(error, 100)
    refuse_value("schema", schema, f'a JSON object, such as {{"type": "object"}} ({wrong})')


def check_text(notation: str, text: Any) -> None:
    """UserError unless it is a text, not empty, that UTF-8 can spell."""
    if not isinstance(text, str) or not text or re.search("[\ud800-\udfff]", text):
        refuse_value(notation, text, "a text that is not empty")
