"""CI's limits: a figure beyond one ends the program, and a speed is measured again."""

import json
from importlib import import_module
from types import ModuleType

import pytest

from measure.steps import PAST
from testing.pages import ROOT


@pytest.fixture
def limits(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return import_module("limits")


@pytest.mark.parametrize(
    "values, num_measured, status",
    [
        ([2.0], 1, None),
        ([1.2, 1.6], 2, None),  # near its limit: once more
        ([0.5, 1.2, 0.9, 0.1], 4, None),  # the best counts
        ([0.5, 0.6, 0.9, 0.1], 4, 1),
        ([3.5], 1, 1),
    ],
)
def test_a_figure_beyond_its_limit_ends_the_program(
    limits, values, num_measured, status, monkeypatch
):
    limit = limits.Limit("speed", "ratio", 1.0, most=3.0, again=1.5)
    monkeypatch.setattr(limits, "LIMITS", [limit])
    left = list(values)
    ended = None
    try:
        limits.check("speed", lambda: {"ratio": left.pop(0)})
    except SystemExit as end:
        ended = end.code
    assert (len(values) - len(left), ended) == (num_measured, status)


def test_limits_of_steps_are_near_what_was_measured(limits):
    """A real model's steps hold them on every CPU; four times as slow, they would not."""
    num_seen = 0
    for path in (ROOT / "results").glob("*.json"):
        rows = json.loads(path.read_text(encoding="utf-8")).get("steps", {})
        for (past, new), gains in limits.STEPS.items():
            size = f"rows{new}" if past == PAST else f"prompt{new}"
            for width, least in zip(limits.WIDTHS_OF_STEPS, gains, strict=True):
                gain = rows.get(f"smollm2, {width}", {}).get(size)
                if gain is not None:
                    num_seen += 1
                    assert gain >= least, (path.name, width, size)
                    assert gain / 4 < least, (path.name, width, size)
    assert num_seen >= 30
