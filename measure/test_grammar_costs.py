"""What grammars cost: steps of as many texts with and without, in turns."""

import pytest

from measure import grammar_costs
from measure.effort import QUICK
from runner import ModelRunner

pytest.importorskip("llguidance", reason="requirements-extra.txt is not installed")


def test_steps_with_and_without_take_turns_and_the_share_is_their_median(monkeypatch):
    steps = []
    step = ModelRunner.step

    def recorded(self, scheduled):
        steps.append(sum(item.request.grammar_state is not None for item in scheduled))
        assert len(scheduled) == 16 and all(item.samples for item in scheduled)
        return step(self, scheduled)

    times = iter([1.0] + [2.0, 1.0, 4.0, 3.0] + [5.0, 5.0] * (QUICK.longest - 3))
    seconds_of = grammar_costs.seconds_of
    monkeypatch.setattr(ModelRunner, "step", recorded)
    monkeypatch.setattr(
        grammar_costs, "seconds_of", lambda work: (seconds_of(work), next(times))[1]
    )
    (row,) = grammar_costs.grammar_costs(QUICK).values()
    assert steps == [16, 0] * QUICK.longest
    assert row == dict(target="tiny", vocab_size=4096, first_mask=1, share=0)
