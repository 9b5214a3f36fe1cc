"""Steps: every width in the same turns, sizes that the context has room for, and an older CPU in rows of its own."""

from types import SimpleNamespace

import pytest
import torch

from measure import report, steps
from measure.pair import QUICK, weight_bytes


def test_ratios_are_of_the_same_turn_and_the_first_turn_does_not_count(monkeypatch):
    clock = iter([9.0, 1.0, *(4.0, 2.0), *(6.0, 1.0), *(2.0, 2.0)])
    monkeypatch.setattr(steps, "step_seconds", lambda *size: next(clock))
    assert steps.compare(dict(a=None, b=None), 0, 1, 3) == dict(a=(4.0, 1.0), b=(2.0, 2.0))


def test_a_step_is_of_the_rows_that_it_says(monkeypatch):
    models, asked = steps.of_all_widths("tiny"), []
    sizes, llama = [weight_bytes(llama) for llama in models.values()], models["INT4"]
    assert 1.8 < sizes[0] / sizes[1] < 4 and 1.5 < sizes[1] / sizes[2] < 2
    forward = type(llama.ops).forward
    monkeypatch.setattr(
        type(llama.ops),
        "forward",
        lambda self, plain, llama, tokens, step, rows: (
            asked.append((len(tokens), step.spans[0][2], rows))
            or forward(self, plain, llama, tokens, step, rows)
        ),
    )
    assert steps.step_seconds(llama, 9, 5) > 0 and steps.step_seconds(llama, 0, 7) > 0
    assert asked == [(9, 9, slice(-1, None)), (5, 14, None), (7, 7, slice(-1, None))]


@pytest.mark.parametrize("march, told", [("", "its own"), ("x86-64-v3", "x86-64-v3")])
def test_a_row_for_each_width_and_cpu(march, told, monkeypatch):
    monkeypatch.setenv("LLAMA_MARCH", march)
    monkeypatch.delenv("LLAMA_NATIVE", raising=False)
    model = SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=200), weight_dtype=torch.bfloat16
    )
    monkeypatch.setattr(steps, "of_all_widths", lambda target: dict.fromkeys(steps.WIDTHS, model))
    monkeypatch.setattr(steps, "step_seconds", lambda llama, past, new: float(new))
    rows = steps.steps(QUICK, "a/folder", "folder")
    assert [row["width"] for row in rows.values()] == ["bfloat16", "INT8", "INT4"]
    assert all(key.startswith(f"folder, {told}, ") for key in rows)
    assert all(
        row["rows64"] == 1 and row["prompt128_seconds"] == 128 and "rows256" not in row
        for row in rows.values()
    )
    (table,) = report.sections(dict(steps=rows))
    assert table.rows[0][3] == "1 s" and table.rows[1][3] == "1x" and table.rows[1][-1] == ""
