"""Steps: every width in the same turns, with the rows that a step says."""

from checkpoint.weights import weight_bytes
from measure import steps


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
