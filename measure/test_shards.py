"""Processes: the ratio is one's seconds over theirs, in turns; and they begin and end."""

from measure import shards
from measure.effort import QUICK, Effort


def test_the_ratio_is_of_the_same_turn(monkeypatch):
    seconds = iter([(2.0), (1.0), (3.0), (6.0), (4.0), (1.0)])  # one process, two processes, …
    asked = []

    def token_seconds(name, n, device, count):
        asked.append(n)
        return next(seconds)

    monkeypatch.setattr(shards, "token_seconds", token_seconds)
    row = shards.compare_processes("tiny", 2, 3, "cpu", 5)
    assert asked == [1, 2] * 3
    assert (row["ratio"], row["one"], row["many"]) == (2.0, 1 / 3, 1.0)


def test_shapes_are_known(monkeypatch):
    monkeypatch.setattr(shards, "compare_processes", lambda name, *sizes: name)
    monkeypatch.setattr(shards.torch.cuda, "device_count", lambda: 1)
    assert set(shards.parallel(Effort())) <= set(shards.SHAPES)
    assert shards.parallel(QUICK) == ["tiny"]
    monkeypatch.setattr(shards, "compare_processes", lambda *sizes: sizes[:4])
    monkeypatch.setattr(shards.torch.cuda, "device_count", lambda: 4)
    assert shards.parallel(Effort(turns=3)) == [("8B", 4, 3, "cuda")]


def test_processes_begin_and_end():
    assert 0 < shards.token_seconds("tiny", 2, "cpu", 2) < 60
