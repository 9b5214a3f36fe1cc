"""Texts of random JSON schemas beside the `jsonschema` package: each that ends validates.

Schemas come from hypothesis: objects with optional properties, arrays, enums, numbers with bounds,
strings with lengths, patterns and formats, nested. 16 texts at a time are made in one batch, with
drafts of another kind from batch to batch, and in both modes of verification. No text may have
white space outside its strings, and most must end before max_tokens.

TEST_TIMES (conftest.py) takes more schemas; TEST_MODEL, a model's folder, is asked for 100, too.
"""

import json
import os
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import grammar
from conftest import TIMES
from generate import Engine
from loading import Draft, Model, load_draft
from request import OutputStream, Result, Settings

pytest.importorskip("llguidance", reason="the extra 'server' is not installed")
pytest.importorskip("jsonschema", reason="the validator is installed by .ci/run")
from jsonschema import Draft202012Validator, FormatChecker

from settings import Options

BATCH = 16
FORMATS = ("date", "time", "uuid", "ipv4", "email", "date-time", "hostname")
CHECKED = FormatChecker(["uuid", "ipv4", "email"])  # those that need no other package
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][0-9]+-?[0-9]{1,3}$", "^(ab|cd)*$", "^\\w+ \\w+$", "^é+$")


def strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 3), st.integers(3, 12))
    return st.one_of(
        lengths.map(lambda pair: dict(type="string", minLength=pair[0], maxLength=pair[1])),
        st.sampled_from(PATTERNS).map(lambda pattern: dict(type="string", pattern=pattern)),
        st.sampled_from(FORMATS).map(lambda name: dict(type="string", format=name)),
    )


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-200, 100), st.integers(0, 300))
    return st.one_of(
        bounds.map(lambda pair: dict(type="integer", minimum=pair[0], maximum=pair[0] + pair[1])),
        bounds.map(
            lambda pair: dict(
                type="number", exclusiveMinimum=pair[0], maximum=pair[0] + pair[1] + 1
            )
        ),
        st.integers(1, 9).map(
            lambda step: dict(type="integer", minimum=0, maximum=90, multipleOf=step)
        ),
    )


def atoms() -> st.SearchStrategy[dict[str, Any]]:
    letters = st.characters(max_codepoint=0x24F)  # SmolLM2 has no token for some bytes of others
    texts = st.text(letters, max_size=5)
    values = st.one_of(st.integers(-9, 9), st.booleans(), st.none(), texts)
    return st.one_of(
        strings(),
        numbers(),
        st.sampled_from([dict(type="boolean"), dict(type="null"), dict(type=["integer", "null"])]),
        st.lists(values, min_size=1, max_size=4).map(lambda some: dict(enum=some)),
        values.map(lambda value: dict(const=value)),
    )


@st.composite
def objects(draw: Any, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.text('abcdé_ "', min_size=1, max_size=4), max_size=4, unique=True))
    properties = {name: draw(inner) for name in names}
    required = [name for name in names if draw(st.booleans())]
    return dict(type="object", properties=properties, required=required, additionalProperties=False)


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(0, 2), st.integers(2, 4))
    return st.builds(
        lambda items, size: dict(type="array", items=items, minItems=size[0], maxItems=size[1]),
        inner,
        sizes,
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas, nested at random."""
    nested = st.recursive(
        atoms(),
        lambda inner: st.one_of(
            objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=3).map(any_of)
        ),
        max_leaves=6,
    )
    return st.one_of(objects(nested), arrays(nested), nested)


def any_of(some: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(anyOf=some)


def random_schemas(count: int) -> list[dict[str, Any]]:
    """The same ones in each run."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas())
    def collect(schema: dict[str, Any]) -> None:
        found.append(schema)

    collect()
    return found[:count]


def check(schema: dict[str, Any], result: Result) -> None:
    """AssertionError unless the text follows the schema, or, if it was cut short, begins well."""
    told = f"{json.dumps(schema)}\n{result.text!r} ({result.finish_reason}) {result.error}"
    assert result.finish_reason in ("stop", "length"), told
    outside = re.sub(r'"(?:\\.|[^"\\])*"?', "", result.text)
    assert not re.search(r"\s", outside), f"white space: {told}"
    if result.finish_reason == "stop":
        value = json.loads(result.text)
        errors = list(Draft202012Validator(schema, format_checker=CHECKED).iter_errors(value))
        assert not errors, f"{told}\n{errors[0].message}"


def generate_each(
    model: Model, batch: list[dict[str, Any]], draft: Draft | None, coupled: bool, max_tokens: int
) -> list[Result]:
    """A text for each of these settings, all in one batch."""
    streams = []
    for i, follows in enumerate(batch):
        gamma = None if draft is None else 1 + i % 4
        chosen = Settings(1.0, seed=i, max_tokens=max_tokens, gamma=gamma, **follows)
        request = model.request("Once upon a time", chosen, chat=False)
        streams.append(OutputStream(model.tokenizer, request, "", index=i))
    max_len = max_tokens + 20
    engine = Engine(
        model,
        draft,
        Options(max_len=max_len, max_batch=BATCH, verify="coupled" if coupled else "block"),
        tokens=BATCH * max_len,
    )
    return sorted(engine.serve(streams), key=lambda result: result.index)


def generate_in_turns(
    model: Model, drafts: list[Draft | None], waiting: list[dict[str, Any]], max_tokens: int = 200
) -> list[Result]:
    """A text for each of these settings, with each draft and in both modes of verification."""
    turns = [(draft, coupled) for coupled in (False, True) for draft in drafts]
    results = []
    for turn, first in enumerate(range(0, len(waiting), BATCH)):
        draft, coupled = turns[turn % len(turns)]
        batch = waiting[first : first + BATCH]
        results += generate_each(model, batch, draft, coupled, max_tokens)
    return results


def run_schemas(model: Model, drafts: list[Draft | None], count: int) -> Counter[str]:
    """A text of each of `count` schemas -> how many ended for which reason."""
    waiting = random_schemas(count)
    results = generate_in_turns(model, drafts, [dict(schema=schema) for schema in waiting])
    for schema, result in zip(waiting, results, strict=True):
        check(schema, result)
    return Counter(result.finish_reason for result in results)


def every_draft(model: Model) -> list[Draft | None]:
    return [None, *(load_draft(name, model) for name in ("tiny-draft", "ngram", "tiny-eagle"))]


def test_texts_of_random_schemas_validate(monkeypatch):
    """And texts without masks are found out."""
    model = Model.load("tiny", "cpu")
    count = 48 + 12 * TIMES
    assert run_schemas(model, every_draft(model), count)["stop"] > count / 2
    monkeypatch.setattr(grammar, "forbid", lambda logits, rows, masks: logits)
    with pytest.raises(AssertionError):
        run_schemas(model, [None], 16)


@pytest.mark.skipif("TEST_MODEL" not in os.environ, reason="TEST_MODEL names no model")
def test_a_real_models_texts_validate():
    model = Model.load(os.environ["TEST_MODEL"], "cpu")
    drafts = [None, *(load_draft(name, model) for name in ("ngram", "self"))]
    assert run_schemas(model, drafts, 100)["stop"] > 50
