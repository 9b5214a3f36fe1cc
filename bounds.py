"""Limits on grammars: those that cost too much are refused before they are compiled.

Anybody may send a grammar to a server, and llguidance (automaton.py) compiles it without a time
limit. So what makes it slow is counted first:

    characters of regular expressions   compiling takes up to quadratic time
    rules and terminals of Lark         llguidance recurses once for each
    multipleOf in schemas               llguidance goes through every remainder

Two kinds of grammars are refused because llguidance would silently follow a different one: numbers
that do not fit into 64 bits, and a backslash that escapes nothing.

Invariant: a grammar that passes is compiled within seconds, on a stack of automaton.STACK bytes.
Cost: linear in the characters of the grammar.
Not covered: a grammar that names control tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from errors import UserError, brief
from settings import Grammar

# settings.py limits the total number of characters.
MAX_PATTERN_CHARACTERS = 2**13  # of all regular expressions
MAX_NAMES = 1000  # rules and terminals in Lark
# Of all multipleOf in schemas: their sum, because each has its remainders, and their least common
# multiple, because a number may have to be a multiple of every one.
MAX_REMAINDERS = 100_000
# The parts of a Lark grammar that are counted or refused. Comments and strings come first, so that
# nothing inside them is counted.
LARK_WORDS = re.compile(
    r"(?://|#).*"  # a comment
    r'|"(?:\\.|[^"\\])*"'  # a string
    r"|(?P<pattern>/(?:\\.|[^/\\])*/)"  # a regular expression
    r"|(?P<control><)"  # the beginning of a control token's name
    r"|(?P<name>\w\s*:)"  # the end of a rule's or a terminal's name
    r"|(?P<json>%json\s*)"  # what comes before a JSON schema
    r"|(?P<regex>%regex)"  # what comes before a regular expression
)


def check_bounds(grammar: Grammar) -> None:
    """UserError if the grammar costs too much to compile, or would be read as a different one."""
    schemas = schemas_of(grammar)
    check_cost(grammar, schemas)
    check_numbers(grammar, schemas)
    check_patterns(grammar, schemas)
    if any(word["control"] for word in lark_words(grammar)):
        raise UserError("the grammar names a control token, <…>: it may only spell out text")


def schemas_of(grammar: Grammar) -> list[Any]:
    """The JSON schemas in a grammar. UserError if one is not JSON."""
    if grammar.notation == "schema":
        return [json.loads(grammar.text)]
    schemas = []
    for word in lark_words(grammar):
        if word["json"]:
            try:
                schema, _ = json.JSONDecoder().raw_decode(grammar.text, word.end())
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"a %json in the grammar is not valid JSON: {brief(error)}"
                ) from None
            schemas.append(schema)
    return schemas


def lark_words(grammar: Grammar) -> list[re.Match]:
    """The parts that are counted or refused, if the grammar is written in Lark."""
    return [*LARK_WORDS.finditer(grammar.text)] if grammar.notation == "grammar" else []


def check_cost(grammar: Grammar, schemas: list[Any]) -> None:
    """UserError if compiling takes too long, or too deep a stack. schemas: from `schemas_of`."""
    words = lark_words(grammar)
    patterns = [*patterns_of(grammar, schemas), *(word["pattern"] or "" for word in words)]
    num_characters = sum(map(len, patterns))
    if any(word["regex"] for word in words):  # %regex: any part may be a regular expression
        num_characters = len(grammar.text)
    num_names = sum(bool(word["name"]) for word in words)
    multiples = []
    for name, number in numbers_of(schemas):
        if name == "multipleOf":
            multiples.append(without_point(number))
    num_remainders = max(sum(multiples), min(10**18, math.lcm(*multiples)))
    for size, most, unit in (
        (num_characters, MAX_PATTERN_CHARACTERS, "characters of regular expressions"),
        (num_names, MAX_NAMES, "rules and terminals"),
        (num_remainders, MAX_REMAINDERS, "remainders of multipleOf"),
    ):
        if size > most:
            raise UserError(
                f"{grammar} has {size:,} {unit}: at most {most:,} are compiled; shorten it"
            )


def check_numbers(grammar: Grammar, schemas: list[Any]) -> None:
    """UserError for a number that llguidance would change: it reads floats of 64 bits, and
    truncates whole numbers to 64 bits."""
    for name, number in numbers_of(schemas):
        largest = 2**63 - 1
        if name.startswith("exclusive"):  # llguidance adds or subtracts 1
            largest = 2**53 - 1
        is_read = abs(number) <= largest and min(float(number), largest) == number
        if not is_read and name not in ("default", "examples"):
            raise UserError(
                f"{grammar}: {name} has {brief(number, 100)}, and whole numbers are exact only "
                "up to 2^53; leave it out, or ask for a text of digits"
            )


def without_point(number: float) -> int:
    """The digits of a number without its decimal point: 25 for 2.5."""
    number = min(10**18, abs(number))  # infinity, too, becomes 10^18
    while number % 1:
        number *= 10
    return int(number)


def values_of(schemas: list[Any]) -> Iterator[tuple[str, Any]]:
    """Every value in JSON schemas, with the name of the field that holds it or its list."""
    parts: list[tuple[str, Any]] = [("", schemas)]
    while parts:
        name, value = parts.pop()
        yield name, value
        if isinstance(value, list):
            parts += [(name, each) for each in value]
        if isinstance(value, dict):
            parts += value.items()


def numbers_of(schemas: list[Any]) -> Iterator[tuple[str, float]]:
    """The numbers among the values of JSON schemas."""
    for name, value in values_of(schemas):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def check_patterns(grammar: Grammar, schemas: list[Any]) -> None:
    """UserError for a backslash that llguidance would drop."""
    for pattern in patterns_of(grammar, schemas):
        num_last = len(pattern) - len(pattern.rstrip("\\"))
        if num_last % 2:
            raise UserError(
                f"{grammar}: the regular expression {brief(pattern, 100)} ends with a backslash "
                "that escapes nothing; write two"
            )


def patterns_of(grammar: Grammar, schemas: list[Any]) -> Iterator[str]:
    """The regular expressions of a regex or of JSON schemas, or anything that looks like one."""
    if grammar.notation == "regex":
        yield grammar.text
    for name, value in values_of(schemas):
        if name == "pattern" and isinstance(value, str):
            yield value
        if name == "patternProperties" and isinstance(value, dict):
            yield from value
