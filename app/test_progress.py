"""What is shown while a model is loaded: nothing for a while, then as the stream can take it."""

import re

import pytest
import torch

from app import progress
from app.progress import EVERY, QUIET, REWRITE, WIPE, ProgressLine, describe, shown_progress
from conftest import write_model
from model import Llama


@pytest.fixture
def clock(monkeypatch):
    """A clock to be set."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "perf_counter", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_is_rewritten_at_a_terminal_and_rare_in_a_pipe(
    is_terminal, clock, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    line = ProgressLine()
    between = REWRITE if is_terminal else EVERY
    shown = []
    for i in range(1000):
        clock.now += QUIET / 20
        line.show(f"step {i}")
        err = capsys.readouterr().err
        assert err in ("", f"{WIPE}step {i}" if is_terminal else f"step {i}\n")
        if err:
            shown.append(clock.now)
    assert shown[0] - 100 >= QUIET * 0.99
    gaps = [after - before for before, after in zip(shown, shown[1:])]
    assert between * 0.99 < min(gaps) and max(gaps) < between + QUIET / 19
    line.wipe()
    assert capsys.readouterr().err == (WIPE if is_terminal else "")


@pytest.mark.parametrize("bits", [16, 4])
def test_loading_shows_tensors_and_bytes_and_then_what_runs(tmp_path, capsys, monkeypatch, bits):
    monkeypatch.setattr(progress, "QUIET", -1)
    monkeypatch.setattr(progress, "EVERY", 0)
    folder = write_model(tmp_path)
    with pytest.raises(ZeroDivisionError), shown_progress():
        llama = Llama.load(folder, "cpu", torch.float64, bits=bits)
        1 / 0
    err = capsys.readouterr().err
    counts = re.findall(r"loading: (\d+) of (\d+) tensors, \d+ of \d+ MB\n", err)
    assert counts[-1][0] == counts[-1][1] and len(counts) > 5
    assert "packing: " in err
    Llama.load(folder, "cpu", torch.float64, bits=bits)
    assert not capsys.readouterr().err  # nobody watches any more
    text = describe("this", [llama, llama])
    assert text.startswith(f"running this: {'float64' if bits == 16 else 'INT4'} weights, 0 MB")
    assert text.endswith(f"with the draft's; computed in float64 on cpu, threads: {threads()}")


def threads() -> int:
    return torch.get_num_threads()
