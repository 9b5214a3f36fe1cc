"""The GPU cases on toy shapes; on a GPU, the texts of the embedded model are those of the CPU."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from measure import gpu_cases
from measure.gpu_parts import QUICK, SHAPES, Scale, device_seconds, random_engine, random_model
from measure.serving import random_request
from model import Llama, weight_bytes

OTHERS = sorted(gpu_cases.CASES.keys() - {"decode"})  # which .ci/run asks for
SLOW = [pytest.param(name, marks=pytest.mark.gpu_interpreter) for name in OTHERS]


@pytest.mark.parametrize("name", ["decode", *SLOW])
@torch.inference_mode()
def test_each_case_runs_and_fills_its_columns(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stored = []
    results = gpu_cases.run_case(name, True, lambda found: stored.append(json.dumps(found["gpu"])))
    case = results["gpu"][name]
    assert len(stored) == len(case["rows"]) > 0
    assert {len(row) for row in case["rows"]} == {len(case["headers"])}
    assert all(isinstance(cell, str) for row in case["rows"] for cell in row)
    assert json.loads(stored[0])[name]["rows"] == case["rows"][:1]


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_the_coin_accepts_with_its_probability_whatever_the_models_say(alpha):
    zeros = torch.zeros(4000, dtype=torch.int64)
    coin = gpu_cases.BiasedCoin(torch.arange(4000), zeros, alpha=alpha)
    stands = coin.accept(torch.tensor([[0.001, 1.0, 0.0]]).expand(4000, 3))
    assert abs(stands[:, :2].float().mean() - alpha) < 0.02
    assert not stands[:, 2].any()  # an absent draft
    assert coin[:10].alpha == alpha
    assert isinstance(coin[[1, 2]], gpu_cases.BiasedCoin)


@torch.inference_mode()
def test_acceptance_in_the_production_loop_is_the_coins():
    llama = random_model("tiny", "16 bits", QUICK)
    engine = random_engine(llama, llama, 200, 1)
    engine.runner.make_coin = partial(gpu_cases.BiasedCoin, alpha=0.8)
    request = random_request(8, 160, 1, gamma=3)
    list(engine.batcher.run([request]))
    assert abs(request.acceptance - 0.8) < 0.1


@torch.inference_mode()
def test_random_models_are_finite_and_as_large_as_their_bits():
    plain = random_model("tiny", "16 bits", QUICK)
    for way in ("INT8", "INT4", "NF4", "W8A8"):
        llama = random_model("tiny", way, QUICK)
        logits = llama(torch.arange(5))
        assert logits.isfinite().all() and logits.std() > 1e-3
        assert weight_bytes(llama) < 0.4 * weight_bytes(plain)


def test_shapes_are_those_of_the_models():
    for name, billions in (("8B", 8.03), ("1B", 1.236)):
        llama = Llama(SHAPES[name], "meta", seed=None)
        count = sum(tensor.numel() for tensor in llama.named_tensors().values())
        assert abs(count / 1e9 - billions) < 0.005


def test_a_stream_is_timed_after_a_turn_that_warms_up(monkeypatch):
    seconds = iter([1e6, 3.0, 1.0, 2.0])
    served = [SimpleNamespace(seconds_per_token=next(seconds)) for _ in range(4)]
    asked = []

    def serve(engine, requests):
        asked.append([(len(r.tokens), r.settings.max_tokens, r.settings.gamma) for r in requests])
        return served.pop(0)

    monkeypatch.setattr(gpu_cases, "serve_at_once", serve)
    scale = Scale(context=7, count=5, turns=3)
    assert gpu_cases.stream_seconds(None, scale, 2, 3) == 2.0
    assert asked == [[(7, 5, 2)] * 3] * 4


def test_on_a_gpu_a_recording_is_timed(monkeypatch):
    graphs = pytest.importorskip("gpu.graphs", exc_type=ImportError)
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(graphs, "record", lambda run: lambda: calls.append("replay"))
    scale = Scale(repeats=2)
    device_seconds(lambda: calls.append("run"), scale)
    assert calls[0] == "run" and set(calls[1:]) == {"replay"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_greedy_texts_on_a_gpu_are_the_cpus():
    results = gpu_cases.run_case("texts", False, lambda found: None)
    assert gpu_cases.wrong_rows(results) == []
