"""Settings of a request: how its tokens are drawn, how many there are, where the output stops, and
which grammar it follows. Options of an engine, which apply to all its requests.

Each is declared once, as a field of `Settings` or `Options`, with its name, type and default, the
rule for its value, and its help text. The same rules apply to a Python caller, a flag
(app/flags.py), a JSON line and a client of the server. A sampling setting also needs code in
sampling.py. Nothing slow is imported here, so that a mistake in a command is reported at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from errors import UserError, brief, check_names

MAX_LOGPROBS = 20  # how many of the most probable tokens may be reported
MAX_GRAMMAR = 2**17  # characters of a schema, regex, choice or grammar
LEAST_TOP_P = 1e-300  # keeps only the most probable token, and does not underflow to 0 in products
VERIFY = ("block", "token", "coupled")  # how drafts are verified
NOTATIONS = ("schema", "regex", "choice", "grammar")  # names of settings; grammar is in Lark


# ---- Rules ---------------------------------------------------------------------------------------

# A function of a setting's name and value. It returns the value to store, or raises UserError.
Rule = Callable[[str, Any], Any]


def refuse_value(name: str, value: Any, rule: str) -> NoReturn:
    """UserError for a setting, or a field of a request, that breaks its rule."""
    raise UserError(f"{name} is {brief(repr(value), 100)}: it must be {rule}", name)


def within(low: float, high: float, words: str, kind: type = float) -> Rule:
    """A number in a range. words: the range, as an error describes it. kind: int means a whole
    number, and 3.0 is accepted as 3."""
    rule = f"a whole number {words}" if kind is int else words

    def read(name: str, value: Any) -> float:
        is_in_range = type(value) in (int, float) and low <= value <= high
        if not is_in_range or (kind is int and value % 1):
            refuse_value(name, value, rule)
        return int(value) if kind is int else value

    return read


def check_whole(name: str, value: Any, low: int, high: int | None, more: str = "") -> None:
    """UserError unless the value is a whole number in this range."""
    words = f"of at least {low}" if high is None else f"from {low} to {high}"
    within(low, math.inf if high is None else high, words + more, int)(name, value)


def one_of(*words: str) -> Rule:
    """One of these words. For a word such as "8", the number 8 is also accepted."""

    def read(name: str, value: Any) -> str:
        if str(value) not in words:
            refuse_value(name, value, f"{', '.join(words[:-1])} or {words[-1]}")
        return str(value)

    return read


def true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse_value(name, value, "true or false")
    return value


def list_of_texts(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    several = [value] if isinstance(value, str) else value
    if isinstance(several, (list, tuple)):
        if all(isinstance(text, str) and text for text in several):
            return tuple(several)
    refuse_value(name, value, "a text, or a list of texts, none of them empty")


def choices(name: str, value: Any) -> tuple[str, ...]:
    """One or more strings."""
    return list_of_texts(name, value or "")


def unicode_text(name: str, value: Any) -> str:
    """A string that is not empty and can be encoded in UTF-8."""
    if not isinstance(value, str) or not value or re.search("[\ud800-\udfff]", value):
        refuse_value(name, value, "a text that is not empty")
    return value


def json_schema(name: str, value: Any) -> str:
    """A JSON schema, as an object or as a string -> the string."""
    if isinstance(value, str):
        Grammar(name, value).check_size()  # before it is parsed
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if isinstance(schema, dict):
            return json.dumps(schema)
        wrong = "it is something else"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = brief(error, 100)
    refuse_value(name, value, f'a JSON object, such as {{"type": "object"}} ({wrong})')


def top_share(name: str, value: Any) -> float:
    """0 becomes LEAST_TOP_P, which keeps only the most probable token."""
    words = "from 0 (keeps only the most probable token) to 1 (keeps all)"
    return max(within(0, 1, words)(name, value), LEAST_TOP_P)


def biases(name: str, value: Any) -> dict[int, float]:
    """Numbers by tokens, as a dictionary, or in JSON, where a token is a string."""
    number = within(-100, 100, "from -100 to 100")
    try:
        given = json.loads(value) if isinstance(value, str) else value
        return {int(str(token)): number(name, bias) for token, bias in dict(given).items()}
    except (TypeError, ValueError, RecursionError):
        refuse_value(name, value, 'numbers from -100 to 100 by tokens, such as {"262": -5}')


def num_drafts(name: str, value: Any) -> int | None:
    """auto becomes None, which means that gamma.py chooses."""
    if value == "auto":
        return None
    return within(0, math.inf, "of at least 0 or auto", int)(name, value)


# ---- Declarations --------------------------------------------------------------------------------


def checked(default: Any, rule: Rule, help: str, **more: Any) -> Any:
    """A field. A default of None means unset, and is not checked. help: the help text of its flag.
    more: a sampling setting has `neutral`, or, if it depends on the tokens so far,
    `no_penalty`: the value that has no effect."""
    return field(default=default, metadata=dict(rule=rule, help=help, **more))


class Checked:
    """A base class whose fields are `checked`. UserError for a wrong name or value."""

    def __new__(cls, *values: Any, **named: Any) -> Any:
        check_names(named, cls.__dataclass_fields__, cls.__name__[:-1].lower())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                rule = each.metadata["rule"]
                object.__setattr__(self, each.name, rule(each.name, value))


@dataclass(frozen=True)
class Settings(Checked):
    """How one output is generated. For a sampling setting, None means the value that the model's
    makers recommend; for the seed, None means a random one (`loading.Model.complete`)."""

    temperature: float | None = checked(
        None,
        within(0, 1e30, "from 0 (always the most probable token) to 1e30"),
        "0 always picks the most probable token (default: what the model recommends; otherwise 0, "
        "or 0.7 in a chat, or 1 with --top-k, --top-p or --min-p)",
        neutral=1.0,
    )
    _: KW_ONLY
    top_k: int | None = checked(
        None,
        within(0, 2**31, "from 0 (keeps all) to 2^31", int),
        "keep only the k most probable tokens",
        neutral=0,
    )
    top_p: float | None = checked(
        None,
        top_share,
        "keep the fewest tokens whose probabilities add up to this",
        neutral=1.0,
    )
    min_p: float | None = checked(
        None,
        within(0, 1, "between 0 (keeps all) and 1"),
        "keep tokens with at least this share of the largest probability",
        neutral=0.0,
    )
    repetition_penalty: float | None = checked(
        None,
        within(0.01, 100, "from 0.01 to 100"),
        "above 1: what the prompt or the output has becomes less likely (divides positive logits)",
        no_penalty=1.0,
    )
    presence_penalty: float | None = checked(
        None,
        within(-100, 100, "from -100 to 100"),
        "subtract this from the logits of tokens that the output has",
        no_penalty=0.0,
    )
    frequency_penalty: float | None = checked(
        None,
        within(-100, 100, "from -100 to 100"),
        "subtract this from the logit of a token, each time the output has it",
        no_penalty=0.0,
    )
    logit_bias: dict[int, float] | None = checked(
        None,
        biases,
        'numbers to add to the logits of tokens: {"262": -5}; -100 all but forbids one',
        no_penalty={},
    )
    min_tokens: int | None = checked(
        None,
        within(0, math.inf, "of at least 0", int),
        "no end-of-text before this many new tokens, unless a grammar allows nothing else",
        no_penalty=0,
    )
    seed: int | None = checked(
        None,
        within(-(2**63), 2**63 - 1, "from -2^63 to 2^63 - 1", int),
        "the same seed gives the same output (default: a random seed, which is printed)",
    )
    max_tokens: int = checked(
        512,
        within(0, math.inf, "of at least 0", int),
        "generate at most this many tokens (default %(default)s); 0 only reads the prompt",
    )
    stop: tuple[str, ...] = checked((), list_of_texts, "stop before this text; may be repeated")
    gamma: int | None = checked(
        None,
        num_drafts,
        "how many tokens to draft per round; auto (default) measures which number is fastest, "
        "including 0",
    )
    logprobs: int | None = checked(
        None,
        within(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}", int),
        "add to the JSON output ln p of each token and of this many of the most probable tokens "
        "(before filters)",
    )
    prompt_logprobs: int | None = checked(
        None,
        within(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}", int),
        "the same for the prompt's tokens from the second on (with --max-tokens 0, only for these)",
    )
    special: bool = checked(
        False,
        true_or_false,
        "read control tokens in a raw prompt as such tokens (default: as text)",
    )
    thinking: bool | None = checked(
        None,
        true_or_false,
        "whether the model thinks first, for chat templates with this switch, such as Qwen 3's "
        "(default: the template's)",
    )
    schema: str | None = checked(
        None,
        json_schema,
        'a JSON schema: a file, - for standard input, or the schema itself: {"type": …}',
    )
    regex: str | None = checked(None, unicode_text, "a regular expression for the whole output")
    choice: tuple[str, ...] | None = checked(
        None, choices, "the output is one of these texts; repeat the flag for each"
    )
    grammar: str | None = checked(None, unicode_text, "a file with a Lark grammar")

    def __post_init__(self) -> None:
        super().__post_init__()
        grammars = self.grammars()
        if len(grammars) > 1:
            given = " and ".join(grammar.notation for grammar in grammars)
            raise UserError(f"{given} are given: an output can follow only one of them")
        for grammar in grammars:
            grammar.check_size()

    def grammars(self) -> list[Grammar]:
        texts = [(notation, getattr(self, notation)) for notation in NOTATIONS]
        return [Grammar(notation, text) for notation, text in texts if text is not None]

    @cached_property
    def penalties(self) -> dict[str, Any]:
        """The settings of `sampling.penalize` that have an effect."""
        values = {name: getattr(self, name) for name in PENALTIES}
        return {name: x for name, x in values.items() if x not in (None, PENALTIES[name])}

    @property
    def follows(self) -> Grammar | None:
        """The grammar that the output must follow, or None."""
        return next(iter(self.grammars()), None)


@dataclass(frozen=True)
class Options(Checked):
    """How an engine serves all its requests."""

    max_len: int | None = checked(
        None,
        within(2, math.inf, "of at least 2", int),
        "the most tokens of prompt and output together (default: as many as memory allows, up to "
        "the model's limit)",
    )
    max_batch: int = checked(
        16,
        within(1, math.inf, "of at least 1", int),
        "run at most this many requests at a time (default %(default)s)",
    )
    verify: str = checked(
        "block",
        one_of(*VERIFY),
        "how to verify drafts: block (default) accepts the most; token goes one by one; with "
        "coupled (default with --seed, unless --gamma is a number) the output depends only on "
        "the target and the seed",
    )
    use_cache: bool = checked(
        True,
        true_or_false,
        "--no-cache runs generate.py's plain_loop, which reads the whole text again for each token",
    )
    kv: str = checked(
        "paged",
        one_of("paged", "contiguous"),
        "store keys and values in blocks, allocated on demand (paged, default), or in reserved "
        "rows (contiguous)",
    )
    kv_bits: str = checked(
        "16",
        one_of("16", "8", "4", "8/4"),
        "store keys and values in 16 (default), 8 or 4 bits, or keys in 8 and values in 4 (8/4)",
    )
    kv_memory: float | None = checked(
        None,
        within(0, math.inf, "a share of free memory, or bytes"),
        "memory for keys and values: bytes or, up to 1, a share of the free memory (default: what "
        "the requests may need, at most 80 %% of the free memory)",
    )
    prefix_caching: bool = checked(
        True,
        true_or_false,
        "--no-prefix-cache reads every prompt from its beginning, even if another prompt began the "
        "same way",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv == "contiguous" and self.kv_memory is not None:
            raise UserError(
                "kv_memory is for the paged cache, and a contiguous one has max_batch rows of "
                "max_len tokens: leave kv_memory out, or choose the paged cache"
            )


def values_without_effect(key: str) -> dict[str, Any]:
    """Sampling settings -> the value that has no effect. None has no effect, either."""
    return {each.name: each.metadata[key] for each in fields(Settings) if key in each.metadata}


SETTINGS = values_without_effect("neutral")  # of `sampling.probabilities`
PENALTIES = values_without_effect("no_penalty")  # of `sampling.penalize`


def settings_of(given: Mapping[str, Any], defaults: Settings) -> Settings:
    """The settings among the fields of a JSON object. A field that is null or missing keeps its
    default. A grammar replaces a default grammar in another notation."""
    names = Settings.__dataclass_fields__
    chosen = {name: value for name, value in given.items() if name in names and value is not None}
    if not chosen.keys().isdisjoint(NOTATIONS):
        chosen = dict.fromkeys(NOTATIONS) | chosen
    return replace(defaults, **chosen)


def check_in_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    """UserError if a token of the prompt, or of logit_bias, is not in a vocabulary of this size."""
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"the prompt or logit_bias has token {token}, and the model has tokens 0 to "
                f"{vocab_size - 1}: change the prompt, the chat template or logit_bias"
            )


# ---- Grammars: grammar.py ------------------------------------------------------------------------


class Grammar(NamedTuple):
    """A grammar that an output must follow."""

    notation: str  # one of NOTATIONS
    text: str | tuple[str, ...]

    def __str__(self) -> str:
        """The grammar, as errors name it."""
        return f"{self.notation} {brief(self.text, 100)}"

    def check_size(self) -> None:
        """UserError if the grammar is too long to be compiled."""
        size = sum(map(len, self.text))
        if size > MAX_GRAMMAR:
            raise UserError(
                f"{self} has {size:,} characters: at most {MAX_GRAMMAR:,} are compiled; shorten it"
            )
