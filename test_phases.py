"""Phases: they add up to the whole, name the trace, and leave no trace in the program."""
import json
import os
import time

import pytest

import phases
from generate import main
from nativestep import NativeStep
from sampling import Keyed
from speculative import Decoder


def test_a_phase_inside_another_counts_as_itself():
    watch = phases.Phases()
    inner = watch.named(lambda: time.sleep(0.02), "attend")
    outer = watch.named(lambda: (time.sleep(0.01), inner(), time.sleep(0.01)), "verify")
    with watch.watched():
        outer()
    assert 0.02 <= watch.seconds["verify"] < 0.04 and 0.02 <= watch.seconds["attend"] < 0.04 and watch.seconds["the rest"] < 0.02
    assert [line.split()[0] for line in watch.lines()] == ["draft", "verify", "attend", "sample", "the"]


def test_afterwards_every_function_is_what_it_was():
    own = {(owner, name): vars(owner)[name] for owner, name, _ in phases.PHASES}
    try:
        with phases.Phases().watched():
            assert all(vars(owner)[name] is not run for (owner, name), run in own.items()) and not NativeStep.whole
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert NativeStep.whole and all(vars(owner)[name] is run for (owner, name), run in own.items()) and (Keyed, "pick") in own


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_command_writes_a_trace_with_the_phases_by_name(dtype, tmp_path, capsys):
    file = tmp_path / "trace.json"
    plain = ["--dtype", dtype, "--draft", "tiny-draft", "--gamma", "2", "--seed", "1", "--max-tokens", "8", "Once upon a time"]
    assert main(plain) == 0
    text = capsys.readouterr().out
    assert main(["--profile", str(file), *plain]) == 0
    out, err = capsys.readouterr()
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"draft", "verify", "attend", "sample"} <= names and out == text
    lines = [line for line in err.splitlines() if line.endswith("%")]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines]
    assert len(lines) == 5 and 99 < sum(shares) < 101 and min(shares) > 0


def test_a_file_that_cannot_be_written_is_refused_and_nothing_is_replaced(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "nowhere" / "trace.json", tmp_path, tmp_path / "fifo", "/dev/null"):
        assert main(["--profile", str(file), "--max-tokens", "2", "Tom"]) == 2
        out, err = capsys.readouterr()
        assert not out and str(file) in err and err.count("\n") == 1
    assert (tmp_path / "fifo").is_fifo() and os.stat("/dev/null").st_mode & 0o170000 == 0o020000


def test_ctrl_c_leaves_the_trace_of_what_was_done(base, tmp_path, capsys, monkeypatch):
    def interrupted(self, work):
        raise KeyboardInterrupt
    monkeypatch.setattr(Decoder, "step", interrupted)
    assert main(["--target", str(base), "--profile", str(tmp_path / "trace.json"), "Tom"]) == 130
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] and "has the trace" in capsys.readouterr().err
