"""The whole program as on a GPU, by measure/testing.py: the CPU's texts, no tensor of the host
there, one wait a step."""

import io
import json
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
pytestmark = pytest.mark.gpu_interpreter
from measure import first_contact
from measure import testing as pretend
from testing.folders import write_model
from testing.programs import program

SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
DRAFTS = ["--draft", "DRAFT", "--gamma", "2"]
CASES = {
    "greedy, in rows": ["--temperature", "0", "--kv", "contiguous"],
    "several": ["--n", "2", "--kv-bits", "8/4"],
    "n-grams": ["--draft", "ngram", "--gamma", "2"],
    "drafts": ["--temperature", "0.8", "--top-p", "0.9", "--min-p", "0.01", *DRAFTS],
    "INT8, coupled": ["--bits", "8", "--kv-bits", "8", *DRAFTS, "--verify", "coupled"],
    "FP8": ["--bits", "fp8"],
    "INT4": ["--bits", "4"],
    "NF4": ["--bits", "nf4"],
    "its own draft": ["--draft", "self", "--gamma", "2", "--kv-bits", "4"],
    "float64": ["--dtype", "float64"],
}
SMOKED = (("16 bits", "8/4"), ("INT4", "16"), ("sampling", "all filters"))
ONCE = {"_run", "_verify", "_decode_multi_step"}  # a step
OTHERS = {"draft", "feed"}  # where a draft has much to read


def text(device: str, arguments: list[str]) -> str:
    """What the program prints."""
    from app.cli import main

    flags = ["--device", device, "--max-tokens", "6", "--seed", "3"]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*flags, *arguments, "hello hello hello"])
    assert status == 0, err.seek(0) or err.read()
    out.seek(0)
    return out.read()


def runs() -> dict[str, Any]:
    """Each case: [is it the CPU's text (or an error), where it waited, for how many steps]."""
    from runner import ModelRunner

    found = {}
    steps = []
    step = ModelRunner.step

    def counted(self: ModelRunner, scheduled: Any) -> Any:
        if not steps and pretend.PRESENT:
            pretend.PRESENT[-1].waits.clear()  # those of loading
        steps.append(scheduled)
        return step(self, scheduled)

    ModelRunner.step = counted
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = str(write_model(Path(folder, "a"), **SHAPE))
        draft = str(write_model(Path(folder, "b"), seed=3, **SHAPE))
        for name, arguments in CASES.items():
            flags = ["--target", target]
            if "--dtype" not in arguments:
                flags += ["--dtype", "float32"]
            flags += [draft if word == "DRAFT" else word for word in arguments]
            wanted = text("cpu", flags)
            steps.clear()
            with pretend.pretended() as waits:
                try:
                    same: bool | str = text("cuda", flags) == wanted
                except RuntimeError as error:  # this case's: the others go on
                    same = str(error)
                found[name] = [same, waits, len(steps)]
    return found


def first_run() -> dict[str, Any]:
    """`bench.py --gpu first --quick`, of a few rows and a layer -> its tables: every step, from end
    to end; and smoke is right."""
    import bench
    from measure import gpu_parts, smoke

    smoke.STEPS = {"1 x 1": [1], "1 + 20 + 2": [1, 20, 2]}
    smoke.FILTERS = {"all filters": smoke.FILTERS["all filters"]}
    some = [key for key in smoke.smoke_keys(gpu_parts.QUICK) if key[:2] in SMOKED]
    bench.gpu_cases.QUICK = replace(gpu_parts.QUICK, count=5)  # a first token, and a look
    cases = bench.gpu_cases.CASES
    for name, case in cases.items():
        cases[name] = case._replace(keys=lambda scale, keys=case.keys: islice(keys(scale), 1))
    cases["smoke"] = cases["smoke"]._replace(keys=lambda scale: some)
    cases["texts"] = cases["texts"]._replace(keys=lambda scale: [(16, "8", None)])
    with tempfile.TemporaryDirectory() as folder, pretend.pretended():
        smoke.MODEL = str(write_model(Path(folder, "a"), **SHAPE))
        out = Path(folder, "out.json")
        assert bench.main(["--gpu", "first", "--quick", "--out", str(out)]) == 0
        first = json.loads(out.read_text())["gpu"]
    assert first.keys() == {stage.name for stage in first_contact.STEPS if stage.case != "compile"}
    for section in first.values():
        assert all(len(row) == len(section["headers"]) for row in section["rows"])
    assert len(first["smoke"]["rows"]) == 3 * 2 + 2 + 2
    return first


def wrong() -> list[str]:
    """What is done to tensors there as one must not -> what is said of it."""
    said = []
    with pretend.pretended() as waits:
        x = torch.arange(3, device="cuda")
        record = pretend.PRESENT[-1].record
        mistakes = (
            lambda: x + torch.ones(3),
            lambda: torch.cat((x, torch.tensor([1]))),
            lambda: record(lambda: (x + 1).tolist()),
            lambda: record(lambda: x.copy_(torch.ones(3))),
            lambda: record(lambda: torch.ones(3).to("cuda")),
            lambda: record(lambda: torch.tensor([1], device="cuda")),
        )
        for mistake in mistakes:
            with pytest.raises(RuntimeError) as error:
                mistake()
            said.append(str(error.value))
        assert (x + torch.tensor(1)).sum().item() == 6
        assert x[x > 1].cpu().tolist() == [2]
        assert waits == ["wrong"] * 3
        replay = record(lambda: x.add_(1))
        replay()
        assert x.tolist() == [2, 3, 4]
    return said


CODE = """
import json
from measure import testing as pretend
pretend.build_device()
from measure import test_pretend as page
print(json.dumps({}))
"""


def found_there(wanted: str) -> Any:
    """What functions of this page return, in a process of their own."""
    done = program("-c", CODE.format(wanted))
    if "RuntimeError: no device" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def observed() -> Any:
    """The runs; and what is said of mistakes."""
    return found_there("[page.runs(), page.wrong()]")


@pytest.mark.parametrize("name", CASES)
def test_the_program_as_on_a_gpu(name, observed):
    same, waits, steps = observed[0][name]
    assert same is True
    assert sum(waits.count(wait) for wait in ONCE) == steps > 1
    assert set(waits) <= ONCE | OTHERS
    if name in ("greedy, in rows", "float64"):
        assert steps == 3  # a prompt, four tokens ahead, one


def test_what_would_fail_there_fails_here(observed):
    said = observed[1]
    assert all("on the host" in error for error in said[:2])
    assert "waits for the device" in said[2]
    assert all("copies from the host" in error for error in said[3:]) and len(said) == 6


def test_the_first_minutes_there():
    """.ci/run leaves it out where .ci/emulator.py does the same."""
    rows = found_there("page.first_run()")["smoke"]["rows"]
    assert any(" 0.0e+00" not in row[1] for row in rows)  # the kernels' sums are in another order
