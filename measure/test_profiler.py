"""Phases: they add up to the whole, name the trace, and leave no trace in the program."""

import json
import os
import time
from functools import partial

import pytest

import generate
from app import cli
from measure import profiler
from speculative import Decoder

main = partial(cli.main, profiled=profiler.profiled)


def test_a_phase_inside_another_counts_as_itself(monkeypatch):
    spent = [0.0]  # the clock, which goes on by what is appended
    monkeypatch.setattr(time, "perf_counter", lambda: sum(spent))
    watch = profiler.Phases()
    inner = watch.within("attend")(lambda: spent.append(2.0))
    outer = watch.within("verify")(lambda: (spent.append(1.0), inner(), spent.append(3.0)))
    outer()
    spent.append(5.0)
    watch.turn()
    assert watch.seconds == {"verify": 4.0, "attend": 2.0, "the rest": 5.0}
    assert [line.split()[0] for line in watch.lines()] == [
        "draft",
        "verify",
        "attend",
        "sample",
        "the",
    ]


def test_afterwards_the_operations_are_what_they_were(base, tmp_path):
    llama = generate.Model.load(base).llama
    own = llama.ops
    with pytest.raises(KeyboardInterrupt), profiler.profiled(str(tmp_path / "trace.json"), [llama]):
        assert isinstance(llama.ops, profiler.Timed)
        raise KeyboardInterrupt
    assert llama.ops is own


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_command_writes_a_trace_with_the_phases_by_name(dtype, tmp_path, capsys):
    file = tmp_path / "trace.json"
    plain = [
        "--dtype",
        dtype,
        "--draft",
        "tiny-draft",
        "--gamma",
        "2",
        "--seed",
        "1",
        "--max-tokens",
        "8",
        "Once upon a time",
    ]
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
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "has the trace" in capsys.readouterr().err
