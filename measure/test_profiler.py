"""The profiler: a trace with the phases by name, and a program that is as it was."""

import json
import os

import pytest

import loading
from app import cli
from generate import Engine
from measure import profiler
from runner import ModelRunner
from settings import Options, Settings
from testing.programs import largest_file, program


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["tiny-draft", "tiny-eagle"])
def test_phases_are_in_the_trace_and_the_text_is_the_same(tmp_path, capsys, draft):
    file = tmp_path / "trace.json"
    flags = ["--draft", draft, "--gamma", "2", "--seed", "1", "--max-tokens", "8", "Once"]
    assert cli.main(flags) == 0
    text = capsys.readouterr().out
    assert cli.main(["--profile", str(file), *flags]) == 0
    out, error = capsys.readouterr()
    assert out == text
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert names >= set(profiler.PHASES)
    shares = {line.split()[0]: float(line.split()[-1].rstrip("%")) for line in lines(error)}
    assert shares.keys() == set(profiler.PHASES)
    assert all(0 < share < 100 for share in shares.values())
    assert shares["attend"] < shares["draft"] + shares["verify"]


def lines(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.endswith("%")]


@pytest.mark.slow
def test_it_prints_nothing_of_pytorchs_own_and_writes_one_file(tmp_path):
    """In a process of its own: PyTorch's lines do not come from Python."""
    file = tmp_path / "trace.json"
    done = program("generate.py", "--profile", str(file), "--max-tokens", "2", "--seed", "1", "Tom")
    first = [line.split()[0] for line in done.stderr.splitlines()]
    known = {"running", "keys", "2", *profiler.PHASES, str(file)}
    assert done.returncode == 0 and set(first) <= known, done.stderr
    assert first[-1] == str(file) and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("name", ["tiny", "tiny-eagle"])
def test_only_passes_of_the_target_are_verification(name, tmp_path):
    """Though the draft be the same model; the rows of a head are drafting, too."""
    model = loading.Model.load("tiny", "cpu")
    draft = loading.load_draft(model if name == "tiny" else name, model)
    heads = () if name == "tiny" else draft.models
    request = model.request("hello", Settings(seed=0, max_tokens=5, gamma=2))
    with profiler.trace_phases(str(tmp_path / "trace.json"), model.llama, heads):
        engine = Engine(model, draft, Options(max_len=40, max_batch=1), 40)
        steps = sum(1 for _ in engine.batcher.run([request]))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert names.count("verify") == steps
    assert 0 < names.count("draft") and (names.count("draft") > steps) == (name != "tiny")


def test_afterwards_the_operations_are_what_they_were(base, tmp_path):
    llama = loading.Model.load(base).llama
    original = llama.ops
    with (
        pytest.raises(KeyboardInterrupt),
        profiler.trace_phases(str(tmp_path / "trace.json"), llama),
    ):
        assert isinstance(llama.ops, profiler.TimedOps)
        raise KeyboardInterrupt
    assert llama.ops is original


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "nowhere" / "trace.json", tmp_path, tmp_path / "fifo"):
        assert cli.main(["--profile", str(file), "--max-tokens", "2", "Tom"]) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1) and str(file) in error


def test_a_full_disk_is_told_with_the_files_name(tmp_path, capsys):
    file = tmp_path / "trace.json"
    with largest_file(1000):
        assert cli.main(["--profile", str(file), "--max-tokens", "2", "Tom"]) == 2
    told = capsys.readouterr().err
    assert f"error: {file} cannot be written: is the disk full?" in told and lines(told)


def test_ctrl_c_leaves_the_trace_of_what_was_done(base, tmp_path, capsys, monkeypatch):
    def interrupted(self, scheduled):
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    file = tmp_path / "trace.json"
    assert cli.main(["--target", str(base), "--profile", str(file), "Tom"]) == 130
    assert json.loads(file.read_text())["traceEvents"]
    assert "has the trace" in capsys.readouterr().err
