"""The first ten minutes on a GPU: steps that fail, hang or do not fit; texts that part."""

import json
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from conftest import program
from measure import first_contact, gpu_cases
from measure.effort import SENTENCES
from measure.first_contact import plain_model, text_row, wanted_texts
from measure.gpu_parts import QUICK, Scale
from quant import FORMATS, WIDTHS


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(monkeypatch, capfd):
    ran = []

    def run(command, cwd, timeout, check):
        ran.append((command[1:], timeout, check))
        if "broken" in command:
            raise subprocess.CalledProcessError(1, command)
        if "slow" in command:
            raise subprocess.TimeoutExpired(command, timeout)

    clock = iter([0, 10, 545, 550, 560])  # of 580 seconds: 570 are left, 35, 30 and 20
    monkeypatch.setattr(first_contact, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    steps = [("broken", 90, "a"), ("long", 80, "b"), ("slow", 8, "c"), ("last", 7, "d")]
    monkeypatch.setattr(first_contact, "STEPS", steps)
    monkeypatch.setattr(first_contact.subprocess, "run", run)
    assert first_contact.run_first(["--out", "x"]) == 1
    cases = [("broken", 90), ("long", 35), ("slow", 8)]
    flags = ["--out", "x"]
    assert ran == [(["bench.py", "--gpu", name, *flags], limit, True) for name, limit in cases]
    said = capfd.readouterr().err
    assert said.index("should show: a") < said.index("exit status 1") < said.index("should show: b")
    assert "timed out after 8 seconds" in said and "left out: 20 s are left" in said
    assert said.endswith("wrong: broken, slow\n")


def test_steps_are_cases():
    assert [case for case, _, _ in first_contact.STEPS] == [*gpu_cases.CASES]


@pytest.mark.gpu_interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="all cases would be measured")
def test_all_steps_run_with_toy_shapes_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    done = program("bench.py", "--gpu", "first", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("wrong: nothing\n") and "left out" not in done.stderr
    assert json.loads(out.read_text())["gpu"].keys() == gpu_cases.CASES.keys()


# ---- Texts


def test_texts_are_of_all_flags():
    keys = [*first_contact.text_keys(QUICK)]
    assert {bits for bits, _, _ in keys} == {16, *FORMATS}
    assert {kv_bits for _, kv_bits, _ in keys} == {*WIDTHS}
    assert {draft for _, _, draft in keys} == {None, "tiny-draft"}
    assert len(keys) == len({*keys}) == 2 * (len(FORMATS) + len(WIDTHS))


@pytest.mark.parametrize("draft", [None, "tiny-draft"])
@torch.inference_mode()
def test_greedy_texts_are_those_of_plain_torch(draft):
    """In C, and with drafts."""
    assert text_row(QUICK, 1.0, 8, "16", draft) == ["", "ok"]
    assert [len(text) for text in wanted_texts(8, "16")] == [40, 40]
    assert type(plain_model(8).llama.ops).__module__ == "kernels"


@pytest.mark.parametrize("place", [0, 7])
@torch.inference_mode()
def test_where_texts_part_the_cpus_margin_decides(place, monkeypatch):
    """The other text has the runner-up there, and anything after it."""
    plain = plain_model(16)
    wanted = wanted_texts(16, "8")
    tokens = torch.tensor(plain.encode(SENTENCES[1]) + wanted[1][:place])
    logits = plain.llama(tokens)[-1]  # keys in 16 bits: nearly the same
    best, second = logits.topk(2).indices.tolist()
    assert best == wanted[1][place]
    margin = (logits[best] - logits[second]).item()
    parted = [wanted[0], [*wanted[1][:place], second, *[0] * (39 - place)]]  # the second text
    monkeypatch.setattr(first_contact, "greedy_texts", lambda *arguments: parted)
    where, verdict = text_row(QUICK, 1.0, 16, "8", None)
    assert verdict == "WRONG" and f"{SENTENCES[1]} {place}: " in where
    assert float(where.split(": ")[-1]) == pytest.approx(margin, abs=0.1)
    monkeypatch.setattr(first_contact, "TIE", 1.01 * margin + 0.1)
    assert text_row(QUICK, 1.0, 16, "8", None) == [where, "ok: a near-tie"]


# ---- What a GPU's compiler makes


class Binary:
    def __init__(self, n_regs: int, n_spills: int):
        self.n_regs = n_regs
        self.n_spills = n_spills


def test_resources_are_the_most_of_all_kernels_that_were_launched(monkeypatch):
    launches = []

    @contextmanager
    def launching_by(wrap):
        launches.append(wrap(lambda kernel: kernel.binary))
        yield

    def warm_up(llama, cache, vocab_size):
        for name, binary in (("_few", few), ("_edge", edge), ("_few", few)):
            launches[0](SimpleNamespace(fn=SimpleNamespace(__name__=name), binary=binary))

    few, edge = Binary(200, 0), Binary(40, 8)
    monkeypatch.setattr(first_contact, "launching_by", launching_by)
    llama = SimpleNamespace(
        ops=SimpleNamespace(warm_up=warm_up), config=SimpleNamespace(vocab_size=9)
    )
    monkeypatch.setattr(first_contact, "random_model", lambda *arguments: llama)
    for name in ("PagedCache", "torch"):
        monkeypatch.setattr(first_contact, name, Mock())
    _, *cells = first_contact.resource_row(Scale(), 1.0, "INT4", "8/4")
    assert cells == ["2", "200", "8, _edge"]
