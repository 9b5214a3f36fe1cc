"""Processes: the ratio is theirs over one's, in turns; and they make the text that was asked."""

from measure import shards
from measure.effort import Effort


def test_the_ratio_is_of_the_same_turn(monkeypatch):
    speeds = iter([2.0, 1.0, 3.0, 6.0, 4.0, 1.0])  # one process, two processes, …
    asked = []

    def tokens_per_second(target, n, count):
        asked.append((target, n, count))
        return next(speeds)

    monkeypatch.setattr(shards, "tokens_per_second", tokens_per_second)
    monkeypatch.setattr(shards.torch.cuda, "device_count", lambda: 1)
    (row,) = shards.parallel(Effort(turns=3, num_tokens=5))
    assert asked == [("tiny", 1, 5), ("tiny", 2, 5)] * 3
    assert (row["ratio"], row["one"], row["many"]) == (0.5, 3.0, 1.0)
    monkeypatch.setattr(shards, "tokens_per_second", lambda target, n, count: n)
    monkeypatch.setattr(shards.torch.cuda, "device_count", lambda: 4)
    assert shards.parallel(Effort(turns=1))[0]["ratio"] == 4


def test_two_processes_make_a_text():
    assert shards.tokens_per_second("tiny", 2, 3) > 0
