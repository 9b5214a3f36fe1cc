"""The GPU cases on toy shapes."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from checkpoint.weights import weight_bytes
from kvcache import KVSpec
from measure import gpu_cases, gpu_parts, gpu_peers
from measure.gpu_parts import SHAPES, random_engine, random_model, stopwatch
from measure.serving import random_request, serve
from measure.sizes import QUICK, Sizes
from model import Llama


@pytest.mark.parametrize("name", ["decode", pytest.param("all", marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_each_case_runs_and_fills_its_columns(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stored = []
    results = gpu_cases.run_cases(name, True, lambda found: stored.append(json.dumps(found["gpu"])))
    cases = results["gpu"]
    assert [*cases] == ([*gpu_cases.CASES] if name == "all" else [name])
    assert len(stored) == sum(len(case["rows"]) for case in cases.values())
    ((first, case),) = json.loads(stored[0]).items()
    assert case["rows"] == cases[first]["rows"][:1]
    for case in cases.values():
        assert {len(row) for row in case["rows"]} == {len(case["headers"])}
        assert all(isinstance(cell, str) for row in case["rows"] for cell in row)


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_the_rng_accepts_with_its_probability_whatever_the_models_say(alpha):
    zeros = torch.zeros(4000, dtype=torch.int64)
    rng = gpu_cases.BiasedRng(torch.arange(4000), zeros, alpha=alpha)
    passed = rng.accept(torch.tensor([[0.001, 1.0, 0.0]]).expand(4000, 3))
    first, second, absent = passed.float().mean(0)
    assert abs(first - alpha) < 0.02 and abs(second - alpha**2) < 0.02 and absent == 0
    assert rng[:10].alpha == alpha
    assert isinstance(rng[[1, 2]], gpu_cases.BiasedRng)


@torch.inference_mode()
def test_acceptance_in_the_production_loop_is_the_rngs():
    llama = random_model("tiny", "16 bits", QUICK)
    engine = random_engine(llama, llama, 200, 1)
    rng = partial(gpu_cases.BiasedRng, alpha=0.8)
    engine.runner.drawing = engine.runner.drawing._replace(make_rng=rng)
    request = random_request(8, 160, 1, gamma=3)
    list(engine.batcher.run([request]))
    assert abs(request.acceptance - 0.8) < 0.1


@torch.inference_mode()
def test_our_attention_reads_as_many_keys_as_the_peers():
    """Those of `gpu_peers.sdpa`: of each text all tokens of sizes.prompt."""
    c = SHAPES["tiny"]
    token = KVSpec(1, c.num_key_value_heads, c.head_dim, dtype=QUICK.dtype).bytes(1)
    for num_texts, count in ((1, QUICK.prompt), (4, 1)):
        _, read = gpu_parts.attention_call(QUICK, num_texts, count, "16")
        assert read == num_texts * QUICK.prompt * token


@torch.inference_mode()
def test_random_models_are_finite_and_as_large_as_their_bits():
    plain = random_model("tiny", "16 bits", QUICK)
    for way in ("INT8", "INT4", "NF4", "W8A8"):
        llama = random_model("tiny", way, QUICK)
        logits = llama(torch.arange(5))
        assert logits.isfinite().all() and logits.std() > 1e-3
        assert weight_bytes(llama) < 0.4 * weight_bytes(plain)


@torch.inference_mode()
def test_a_cpu_speculates_in_few_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_cases, "CPU_SIZES", replace(QUICK, pairs=(("INT4", "INT8"),)))
    loaded = []

    def random_model(name, way, sizes):
        loaded.append(way)
        return gpu_parts.random_model(name, way, sizes)

    monkeypatch.setattr(gpu_cases, "random_model", random_model)
    results = gpu_cases.run_cases("speculation", False, lambda found: None)
    ((name, *gains),) = results["gpu"]["speculation"]["rows"]
    assert name == "INT4, INT8, 0.7" and loaded == ["INT4", "INT8"]
    assert all(float(gain) > 0 for gain in gains)


@torch.inference_mode()
def test_a_server_reads_every_prompt_that_it_is_timed_with(monkeypatch):
    """Prompts of the turn before would be in the prefix cache."""
    turns = []

    def spy(engine, requests):
        turns.append({tuple(request.tokens[:3]) for request in requests})
        return serve(engine, requests)

    monkeypatch.setattr(gpu_cases, "serve", spy)
    gpu_cases.serving_row(QUICK, 4)
    before, timed = turns
    assert not before & timed


def test_peers_get_as_few_key_value_heads_as_ours(monkeypatch):
    c = SHAPES["tiny"]
    seen = []
    monkeypatch.setattr(gpu_peers, "stopwatch", lambda run, sizes: run)
    monkeypatch.setattr(
        gpu_peers.F,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: seen.append((k.shape[1], options["enable_gqa"])),
    )
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        gpu_peers.sdpa(backend, QUICK, 2, 1)()
    assert seen == [(c.num_key_value_heads, True)] * 2


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

    monkeypatch.setattr(gpu_parts, "serve", serve)
    sizes = Sizes(context=7, count=5, turns=3)
    assert gpu_parts.stream_seconds(None, sizes, 2) == 2.0
    assert asked == [[(7, 5, 2)]] * 4


def test_on_a_gpu_a_recording_is_timed(monkeypatch):
    graphs = pytest.importorskip("gpu.graphs", exc_type=ImportError)
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(graphs, "record", lambda run: lambda: calls.append("replay"))
    sizes = Sizes(repeats=2)
    stopwatch(lambda: calls.append("run"), sizes)()
    assert calls[0] == "run" and set(calls[1:]) == {"replay"}


def test_a_text_is_a_first_token_and_whole_looks():
    """The prompt's step makes the first one; then no look of the host is for less than it may."""
    gpu = pytest.importorskip("gpu.graphs", exc_type=ImportError) and pytest.importorskip("gpu")
    for sizes in (Sizes(), QUICK):
        assert (sizes.count - 1) % gpu.GPU.multi_step == 0


def test_a_peer_takes_turns_with_ours_and_one_that_is_not_there_is_named(monkeypatch):
    times = iter([9.0, 4.0, 6.0, 8.0])  # once more than ours, to see whether it runs
    our_times = iter([2.0, 1.0, 4.0])
    asked = []

    def rival(sizes, *key):
        asked.append(key)
        return lambda: next(times)

    monkeypatch.setitem(gpu_peers.RIVALS, "cuBLAS", rival)
    monkeypatch.setattr(gpu_peers, "our_seconds", lambda *key: lambda: next(our_times))
    row = gpu_peers.peer_row(Sizes(turns=3), "cuBLAS", 8)
    assert (row, asked) == (["6000", "2000", "2.00"], [(8,)])
    monkeypatch.setitem(gpu_peers.RIVALS, "cuBLAS", lambda sizes, rows: 1 / 0)
    assert (
        gpu_peers.peer_row(Sizes(), "cuBLAS", 8)[-1] == "none: ZeroDivisionError division by zero"
    )


def test_all_peers_of_a_gpu_are_asked():
    names = {name for name, *_ in gpu_peers.peer_keys(Sizes())}
    assert names >= {*gpu_peers.RIVALS, "FLASH_ATTENTION", "CUDNN_ATTENTION"}
