"""Without a GPU: the coin, random models, errors and peers on toy shapes; and on a GPU, the CPU's own tokens."""

import json
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch

from generate import Model
from kernels import Ops
from measure import gpucases, gpukernels, gpumodels
from measure.gpumodels import QUICK, TOY
from measure.pair import random_request, weight_bytes
from sampling import probabilities

ROOF = (1e10, 1e11)


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_the_coin_accepts_with_its_probability_whatever_the_models_say(alpha):
    coin = gpucases.Biased(torch.arange(4000), torch.zeros(4000, dtype=torch.int64), alpha=alpha)
    stands = coin.accept(torch.tensor([[0.001, 1.0, 0.0]]).expand(4000, 3))
    assert abs(stands[:, :2].float().mean() - alpha) < 0.02 and not stands[:, 2].any()
    assert coin[:10].alpha == alpha and isinstance(coin[[1, 2]], gpucases.Biased)
    other = gpucases.Biased(torch.arange(4), torch.zeros(4, dtype=torch.int64), alpha=0.1)
    assert (other.alpha, coin.alpha) == (0.1, alpha)


def test_acceptance_in_the_production_loop_is_the_coins():
    target, draft = (gpumodels.random_model(config, 16, QUICK) for _, config in QUICK.models)
    made = gpumodels.random_engine(target, draft, 400, 400, 1)
    made.decoder.coin = partial(gpucases.Biased, alpha=0.8)
    one = random_request(8, 300, 1, gamma=3)
    list(made.batch.run([one]))
    assert len(one.tokens) == 308 and abs(one.acceptance - 0.8) < 0.08


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_random_models_are_finite_and_of_the_size_of_their_bits(bits):
    llama = gpumodels.random_model(TOY, bits, QUICK)
    logits = llama(torch.arange(5))
    assert logits.isfinite().all() and logits.std() > 1e-3
    share = weight_bytes(llama) / weight_bytes(gpumodels.random_model(TOY, 16, QUICK))
    assert share == 1 if bits == 16 else share < {8: 0.4, 4: 0.4}[bits]
    plain = gpumodels.random_model(TOY, 16, QUICK)
    x = torch.randn(64, TOY.hidden_size)
    sizes = [model.ops.linear(x, model.layers[0].gate_up).std() for model in (llama, plain)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


def test_the_shapes_are_those_of_the_models():
    from model import Llama

    for config, billions in ((gpumodels.LLAMA_8B, 8.03), (gpumodels.LLAMA_1B, 1.236)):
        count = sum(place.numel() for place in Llama(config, "meta", seed=None).places().values())
        assert abs(count / 1e9 - billions) < 0.005


# ---- Right


@torch.inference_mode()
def test_a_wrong_kernel_and_one_that_fails_are_lines_beside_the_others(monkeypatch):
    class Wrong(Ops):
        def look_back(self, *args):
            return 1.003 * super().look_back(*args)

        def swiglu(self, x):
            raise OSError("no such\nthing")

        def rotate(self, x, cos, sin):
            return super().rotate(x, cos, sin) * torch.nan

    monkeypatch.setattr(gpukernels, "ops_for", lambda device: Wrong())
    monkeypatch.setattr(gpukernels, "texts", lambda *more: [])
    *rows, note = islice(gpukernels.smoke_rows(QUICK, ROOF), 1, None)
    wrong = {name: off for name, off, most, verdict, _ in rows if verdict == "WRONG"}
    assert len(wrong) == 2 + 2 + 5 + 2 and note == "11 are WRONG" and len(rows) > 40
    assert wrong["toy, SwiGLU"] == "OSError: no such thing"
    assert all(
        off == pytest.approx(0.003, rel=0.01) for name, off in wrong.items() if "attention" in name
    )


@torch.inference_mode()
@pytest.mark.parametrize("records", [True, False])
def test_texts_are_the_cpus(records):
    pytest.importorskip("gpu")
    plain, drafted = (
        gpukernels.texts(QUICK, "cpu", "8/4", draft, records) for draft in (None, "tiny-draft")
    )
    assert plain == drafted and all(len(text) > QUICK.count for text in plain)


def test_by_sorting_has_the_law_of_sampling():
    logits = (4 * gpumodels.random_numbers(QUICK, 1, 16)).expand(2000, -1)  # one row, many times
    for setting in gpukernels.FILTERS.values():
        law = probabilities(logits[:1], 0.6, **setting)[0]
        drawn = torch.bincount(gpukernels.by_sorting(logits, **setting), minlength=16) / 2000
        assert (drawn - law).abs().max() < 0.05 and not drawn[law == 0].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_is_right_on_a_gpu():
    *_, note = gpukernels.smoke_rows(gpumodels.Scale(), ROOF)
    assert note == "all is as it should be"


def test_on_a_gpu_a_recording_is_clocked(monkeypatch):
    graphs, done = pytest.importorskip("gpu.graphs"), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(graphs, "record", lambda run: lambda: done.append("replay"))
    gpumodels.device_seconds(
        lambda: done.append("run"), replace(QUICK, device="cuda", turns=2), atleast=0
    )
    assert done[0] == "run" and set(done[1:]) == {"replay"}


# ---- Rows


@torch.inference_mode()
def test_by_the_clock_the_formula_is_that_of_the_gamma_that_was_taken():
    target, draft = (gpumodels.random_model(config, 16, QUICK) for _, config in QUICK.models)
    for gamma, streams in ((2, 1), (None, 2)):
        _, taken, told, gain, formula, share = gpucases.speculate(
            target, draft, 0.7, gamma, streams, QUICK
        )
        assert taken == "2" if gamma else 0 <= float(taken.removeprefix("by the clock: ")) < 8
        assert told == str(streams) and float(formula) > 0
        assert float(share) == pytest.approx(float(gain) / float(formula), rel=0.1)


def test_what_is_built_and_recorded_first_is_not_counted(monkeypatch):
    target, draft = (gpumodels.random_model(config, 16, QUICK) for _, config in QUICK.models)
    calls, own = [], gpucases.at_once

    def slow_at_first(engine, requests):
        calls.append(engine)
        served = own(engine, requests)
        return served._replace(
            gaps=[1.0] * len(served.gaps) if len(calls) > 2 else [1e6 * len(calls)]
        )

    monkeypatch.setattr(gpucases, "at_once", slow_at_first)
    with torch.inference_mode():
        *_, gain, _, _ = gpucases.speculate(target, draft, 0.7, 2, 1, QUICK)
    assert len(calls) == 4 and len(set(map(id, calls))) == 2 and 1 <= float(gain) <= 3


class Fake:
    attention = "sdpa"

    def __init__(self, *shape):
        if shape[0] == TOY:
            raise OSError("no memory")

    def seconds_a_token(self, cache, **lengths):
        if cache == "static":
            raise OSError("no such\nthing")
        return 0.5

    def batched(self, work):
        return 10.0


@torch.inference_mode()
def test_beside_peers_what_is_not_there_or_fails_is_named(monkeypatch):
    told = "transformers is not installed here, so nothing is compared with it: pip install transformers"
    monkeypatch.setattr(gpucases, "installed", lambda name: False)
    *_, note = gpucases.serving_rows(QUICK, ROOF)
    assert note == f"no figure for 2 of them by transformers' continuous batching: {told}"
    monkeypatch.setattr(gpucases, "installed", lambda name: True)
    monkeypatch.setattr(gpucases, "RandomTransformers", Fake)
    _, _, *rows = gpucases.stream_rows(QUICK, ROOF)
    assert [isinstance(row, str) for row in rows] == [False] * 4 + [True] * 2 + [False] * 5 + [True]
    assert rows[4] == "no figure for toy, transformers, dynamic cache: OSError: no memory"
    assert rows[10][:2] == ["toy draft, transformers, dynamic cache (sdpa)", 2.0]
    assert rows[11] == "no figure for toy draft, transformers, static cache: OSError: no such thing"
    monkeypatch.setattr(Fake, "__init__", lambda *shape: None)
    _, _, ours, *_, theirs = gpucases.serving_rows(QUICK, ROOF)
    assert theirs[:2] == ["2 of them by transformers' continuous batching (sdpa)", "10 tokens/s"]
    assert float(theirs[3]) == pytest.approx(float(ours[1].split()[0]) / 10, rel=0.02)


def test_what_is_compiled_after_a_warm_up_is_counted(monkeypatch):
    gpu, knobs = pytest.importorskip("gpu"), pytest.importorskip("triton").knobs
    order, made, tiny = [], gpukernels.at_once, Model.load("tiny", "cpu", torch.float32)
    monkeypatch.setattr(
        gpu,
        "warm_up",
        lambda llama, cache: order.append(
            (llama is tiny.llama, knobs.runtime.jit_post_compile_hook)
        ),
    )
    monkeypatch.setattr(
        gpukernels,
        "at_once",
        lambda *work: (made(*work), knobs.runtime.jit_post_compile_hook(fn="late")),
    )
    assert (
        gpukernels.compiled_after_warm_up(tiny) == 1
        and order == [(True, None)]
        and knobs.runtime.jit_post_compile_hook is None
    )


def test_the_model_of_a_step_counts_bytes_launches_and_waits():
    x, model = torch.ones(3), gpumodels.StepModel(100.0, 0.5, 2.0)
    assert gpumodels.launches(lambda: [x.mul_(2) for _ in range(7)], QUICK) == 7
    assert model.seconds(1000.0, 4, 2) == 10 + 4 * 0.5 + 2 / 2
    measured = gpumodels.StepModel.measured(QUICK, ROOF)
    assert measured.bandwidth == ROOF[0] and 0 < measured.launch < measured.wait


def test_rows_are_told_and_kept_as_they_come(monkeypatch, capsys):
    def rows(scale, roof):
        yield "title", ("what", "how much")
        yield ["one", 1 / 3]
        yield "a note"
        raise KeyboardInterrupt

    kept = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(gpucases.CASES, "decode", rows)
    with pytest.raises(KeyboardInterrupt):
        gpucases.run_case(
            "decode", True, lambda found: kept.append(json.dumps(found["gpu"]["decode"]))
        )
    first, second = map(json.loads, kept)
    assert (
        first["rows"] == second["rows"] == [["one", "0.333"]]
        and len(second["notes"]) == len(first["notes"]) + 1
    )
    assert capsys.readouterr().err.splitlines()[-2:] == ["one  0.333", "a note"]
