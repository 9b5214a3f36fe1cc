"""Steps: every width in the same turns, and only sizes that the context holds."""

from types import SimpleNamespace

from measure import report, steps
from measure.effort import QUICK
from model import weight_bytes


def test_ratios_are_of_the_same_turn_and_the_first_turn_does_not_count(monkeypatch):
    seconds = iter([9.0, 1.0, *(4.0, 1.0), *(6.0, 2.0), *(2.0, 2.0)])
    monkeypatch.setattr(steps, "step_seconds", lambda *size: next(seconds))
    found = steps.compare({"a": None, "b": None}, 0, 1, 3)
    assert found == {"a": (4.0, 1.0), "b": (2.0, 3.0)}


def test_a_step_has_the_rows_that_it_says(monkeypatch):
    models = steps.load_widths("tiny")
    sizes = [weight_bytes(llama) for llama in models.values()]
    assert 1.8 < sizes[0] / sizes[1] < 4
    assert 1.5 < sizes[1] / sizes[2] < 2
    llama = models["INT4"]
    seen = []
    forward = type(llama.ops).forward

    def observed(self, llama, tokens, metadata, logits_indices, features):
        seen.append((len(tokens), metadata.sequences[0].seq_len, logits_indices))
        return forward(self, llama, tokens, metadata, logits_indices, features)

    monkeypatch.setattr(type(llama.ops), "forward", observed)
    assert steps.step_seconds(llama, 9, 5) > 0
    assert steps.step_seconds(llama, 0, 7) > 0
    last = slice(-1, None)
    assert seen == [(9, 9, last), (5, 14, None), (7, 7, last)]


def test_sizes_beyond_the_context_are_left_out(monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=200))
    monkeypatch.setattr(steps, "load_widths", lambda target: dict.fromkeys(steps.WIDTHS, model))
    monkeypatch.setattr(steps, "step_seconds", lambda llama, past, new: float(new))
    rows = steps.steps(QUICK, "folder")
    assert list(rows) == ["folder, float32", "folder, INT8", "folder, INT4"]
    for row in rows.values():
        assert (row["rows64"], row["prompt128_seconds"]) == (1.0, 128.0)
        assert "rows256" not in row and "prompt512" not in row
    (table,) = report.sections({"steps": rows})
    cells = dict(zip(table.headers, table.rows[1]))
    assert (cells["rows 5"], cells["rows 256"]) == ("5000 ms, 1x", "")
