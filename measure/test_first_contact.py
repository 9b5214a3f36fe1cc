"""The first minutes on a GPU: steps that die, hang or are wrong; kernels compiled before."""

import json
import os
import time

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu.tuning import SWITCHES
from measure import first_contact, gpu_cases, precompile
from measure.first_contact import STEPS, Stage
from measure.gpu_cases import OFF, Case
from testing.programs import program


@pytest.fixture
def first(monkeypatch):
    """Runs steps of a case that does what its keys say -> the status, and all that was stored."""

    def row(scale, how, *more):
        if how == "dies":
            os._exit(7)
        if how == "hangs":
            time.sleep(100)
        is_wrong = how == "is wrong" and "splits" not in os.environ[OFF]
        return [str(os.getpid()), "WRONG" if is_wrong else "ok"]

    def run(**cases):
        steps = []
        made = {}
        for name, keys in cases.items():
            case, _, off = name.partition("_without_")
            made[case] = Case(("how", "process", ""), lambda scale, keys=keys: keys, row)
            steps.append(Stage(case, 0.5 if ("hangs",) in keys else 60, f"sees {name}", off=off))
        stored = []
        monkeypatch.setattr(first_contact, "STEPS", steps)
        for page in (first_contact, gpu_cases):
            monkeypatch.setattr(page, "CASES", made)
        return first_contact.run_first(False, lambda results: stored.append(results["gpu"])), stored

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_cases, "read_bandwidth", lambda *how: 1e12)
    monkeypatch.setattr(gpu_cases, "machine", lambda *how: {"machine": "a GPU"})
    return run


def test_a_step_that_dies_or_hangs_is_named_and_the_next_one_is_clean(first, capfd):
    good = [("a",), ("b",)]
    status, stored = first(
        one=good, two=[("a",), ("dies",), ("b",)], three=[("hangs",)], four_without_early=good
    )
    assert status == 1
    last = {name: section["rows"] for found in stored for name, section in found.items()}
    assert [[row[0] for row in rows] for rows in last.values()] == [["a", "b"], ["a"], ["a", "b"]]
    assert [*last] == ["one", "two", "four, without early"]
    processes = {row[1] for rows in last.values() for row in rows}
    assert len(processes) == 3 and str(os.getpid()) not in processes
    said = capfd.readouterr().err
    assert said.index("sees one") < said.index("at dies: its process ended with status 7")
    assert "at hangs: killed after 0 s" in said
    assert said.endswith("one: ok\ntwo: 1 wrong, first dies\nthree: 1 wrong, first hangs\n"
                         "four, without early: ok\n")  # fmt: skip


def test_wrong_rows_are_run_again_without_each_part(first, capfd):
    """One of each kind."""
    keys = [("is wrong", 1, 2, 3), ("fine",), ("is wrong", 1, 2, 4), ("is wrong", 2, 2, 4)]
    status, stored = first(smoke=keys, next=[("a",)])
    said = capfd.readouterr().err
    assert status == 1 and "smoke: 3 wrong, first is wrong, 1, 2, 3" in said
    assert "smoke, without splits: 0 of 2 are wrong" in said
    for part in {*SWITCHES} - {"splits"}:
        assert f"smoke, without {part}: 2 of 2 are wrong" in said
    assert [*stored[-1]] == ["next"] and {*map(len, stored)} == {1}


def test_without_time_a_step_is_left_out(first, monkeypatch, capfd):
    monkeypatch.setattr(first_contact, "ALL_SECONDS", 5)
    assert first(one=[("a",)]) == (1, [])
    assert "one: 1 wrong, first no time was left" in capfd.readouterr().err


def test_steps_are_all_cases_and_kernels_are_compiled_and_checked_first():
    cases = [step.case for step in STEPS]
    assert {*cases} == {"compile", *gpu_cases.CASES}
    assert cases[:5] == ["machine", "compile", "smoke", "texts", "decode"]
    assert all(step.seconds < first_contact.ALL_SECONDS for step in STEPS)


# ---- Compiling

CODE = """
import sys, json
from multiprocessing import get_context
from measure import precompile
def parallel(tasks):
    with get_context("fork").Pool(2) as pool:
        return pool.map(precompile.compile_rows, tasks, chunksize=1)
one = ("kernels", [("product", "INT8", 1)])
found = parallel([one]) + parallel([one])
from triton import knobs
knobs.runtime.jit_cache_hook = lambda **about: True  # nothing is compiled from here on
tasks = precompile.tasks()
found += parallel([(case, keys[-1:]) for case, keys in tasks])
print(json.dumps([found, sorted({case for case, _ in tasks})]))
"""


@pytest.mark.gpu_interpreter
def test_kernels_are_compiled_for_a_gpu_that_is_not_here_and_found_again(tmp_path, monkeypatch):
    """And a row of every kind, of every step, is reached."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = program("-c", CODE)
    assert done.returncode == 0, done.stderr
    (first, second, *others), cases = json.loads(done.stdout)
    assert (first, second) == ([1, 0, []], [0, 1, []])
    assert {*cases} == gpu_cases.CASES.keys() - precompile.WITHOUT_KERNELS
    assert [row for *_, wrong in others for row in wrong] == []
    assert [*tmp_path.glob("*/_product.cubin")]
