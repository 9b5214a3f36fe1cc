"""Smoke launches what serving launches, and what is wrong is WRONG."""

import math
import re
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
import bench
from checkpoint.config import Config
from gpu import GPU, draw, graphs
from gpu.testing import DEVICE, recorded
from kernels import Ops
from measure import smoke
from measure.gpu_parts import (
    HEAD_NORMS,
    QUICK,
    SHAPES,
    WAYS,
    Scale,
    judged,
    random_engine,
    random_model,
)
from model import Llama
from paged import PagedCache
from quant import FORMATS, WIDTHS

SHAPE = Config(
    272,
    256,
    256,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
)
SCALE = Scale(target="variants", layer="variants", device="cpu")
not_on_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted only")
Variants = dict[str, set[str]]  # of each kernel, as Triton names the kinds of its arguments


# ---- What is wrong


class Broken(Ops):
    """SwiGLU is wrong in steps of many rows, a norm fails in one of 16, the coin is another."""

    def swiglu(self, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        return super().swiglu(x, gate_up) * (9 if len(x) > 60 else 1)

    def add_norm(self, x: torch.Tensor, *more: Any) -> Any:
        if len(x) == 16:
            raise RuntimeError("an illegal address\nand more of it")
        return super().add_norm(x, *more)

    def pick(self, probs: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        return super().pick(probs, streams + 1)


@pytest.mark.slow
def test_what_is_wrong_is_told_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smoke, "checked_ops", lambda scale: Broken())
    monkeypatch.setattr(smoke, "WAYS", ("16 bits", "INT8"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    smoke.model_pair.cache_clear()
    out = tmp_path / "out.json"
    status = bench.main(["--gpu", "smoke", "--quick", "--out", str(out)])
    smoke.model_pair.cache_clear()
    rows = bench.load_results(out)["gpu"]["smoke"]["rows"]
    said = capsys.readouterr().err
    assert status == 1 and len(rows) > 150
    other_picks = 0
    for name, errors, _, verdict in rows:
        step = name.split(", ")[-1]
        if step == "1 x 16":
            assert (errors, verdict) == ("", "WRONG: RuntimeError: an illegal address")
        elif step in ("1 x 100", "4 x 16", "65 x 1", "3 x 40", "1 + 60 + 3"):
            assert verdict == "WRONG", name
        elif name.startswith("sampling") and "temperature 0" not in name:
            other_picks += verdict == "WRONG"
        else:
            assert verdict == "ok", name
    assert other_picks >= 3
    assert "and more of it" in said and "Traceback" in said
    assert re.search(r"\d+ rows are wrong: look at the first, 16 bits, .* 1 x 16; an ", said)


def test_an_error_that_is_no_number_is_wrong():
    assert judged([0.0, 0.01], 0.01)[-1] == "ok"
    assert judged([0.0, math.nan], 0.01)[-1] == judged([0.02], 0.01)[-1] == "WRONG"


@pytest.mark.gpu_interpreter
@torch.inference_mode()
def test_a_recording_is_replayed_with_other_tokens_than_its_own(variants):
    scale = replace(QUICK, device=str(DEVICE))
    key = ("16 bits", "8/4", torch.float32, 9, "1 x 8")
    with recorded() as recordings:
        assert smoke.smoke_row(scale, *key)[-1] == "ok"
    assert len(recordings) == 1
    with mock.patch.object(graphs, "record", lambda run: lambda: None):  # stale
        launched, replayed = smoke.smoke_row(scale, *key)[0].split()
    assert float(launched) < 1e-5 < 0.1 < float(replayed)


# ---- Texts


def test_texts_are_of_all_flags():
    keys = [*smoke.text_keys(QUICK)]
    assert {bits for bits, _, _ in keys} == {16, *FORMATS}
    assert {kv_bits for _, kv_bits, _ in keys} == {*WIDTHS}
    assert {draft for _, _, draft in keys} == {None, "tiny-draft"}
    assert len(keys) == len({*keys}) == 2 * (len(FORMATS) + len(WIDTHS))


@pytest.mark.parametrize("draft", [None, "tiny-draft"])
@torch.inference_mode()
def test_greedy_texts_are_those_of_plain_torch(draft):
    """In C, and with drafts."""
    scale = replace(QUICK, count=smoke.NUM_TOKENS)
    assert smoke.text_row(scale, 8, "16", draft) == ["0.0e+00 0.0e+00", "1.0e-03", "ok"]
    assert type(smoke.plain_model(8).llama.ops).__module__ == "kernels"


@pytest.mark.parametrize("kv_bits, tie", [("16", 1e-3), ("8", 1e-3), ("8/4", 1e-2), ("4", 1e-2)])
def test_the_cpus_logits_judge_every_token(kv_bits, tie, monkeypatch):
    """The second text has a token that is not the CPU's, and the CPU's after it."""
    texts = [[1, 2, 3, 4], [1, 2, 0, 4]]
    monkeypatch.setattr(smoke.Model, "load", lambda *arguments: SimpleNamespace(encode=list))
    monkeypatch.setattr(smoke, "load_draft", lambda *arguments: None)
    monkeypatch.setattr(smoke, "SENTENCES", ([5, 6, 7], [5]))
    monkeypatch.setattr(smoke, "serve_texts", lambda *arguments: SimpleNamespace(texts=texts))
    for margin, verdict in ((0.9 * tie, "ok"), (1.1 * tie, "WRONG")):

        def plain_logits(bits: int, width: str, tokens: list[int]) -> torch.Tensor:
            """The token before is the best one's: but 3 follows 2, and 0 is nearly as good."""
            assert (bits, width) == (16, kv_bits)
            logits = torch.zeros(len(tokens), 8, dtype=torch.float64)
            logits[-5:-1, 1:5] = 7 * torch.eye(4, dtype=torch.float64)
            logits[-3, 0] = 7 - margin
            return logits

        monkeypatch.setattr(smoke, "plain_logits", plain_logits)
        wanted = [f"0.0e+00 {margin:.1e}", f"{tie:.1e}", verdict]
        assert smoke.text_row(QUICK, 16, kv_bits, None) == wanted


# ---- What is launched


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu/test_variants.py, where the kernels' variants are counted."""
    monkeypatch.setattr(smoke, "checked_ops", lambda scale: GPU())
    monkeypatch.setitem(SHAPES, "variants", SHAPE)
    smoke.model_pair.cache_clear()
    yield import_module("gpu.test_variants")
    smoke.model_pair.cache_clear()


@torch.inference_mode()
def smoke_variants(page: Any) -> Variants:
    with page.counted() as found:
        for key in smoke.smoke_keys(SCALE):
            smoke.smoke_row(SCALE, *key)
    return found


@cache
@torch.inference_mode()
def serving_variants(page: Any, way: str, kv_bits: str) -> Variants:
    """Of 256 requests together, and of one text; drafted, and several tokens at a time."""
    llama = random_model("variants", way, SCALE, ops=GPU())
    found: Variants = {}
    for draft, max_batch in product((None, llama), (70, 1)):
        with page.counted():  # a warm-up
            batcher = random_engine(llama, draft, 640, max_batch, kv_bits).batcher
        with page.counted() as variants:
            page.serve(batcher, 256 if max_batch > 1 else 1)
        for name, kinds in variants.items():
            found.setdefault(name, set()).update(kinds)
    return found


def missing(smoked: Variants, served: Variants) -> Variants:
    found = {name: served[name] - smoked.get(name, set()) for name in served}
    return {name: kinds for name, kinds in found.items() if kinds}


@pytest.mark.gpu_interpreter
@not_on_a_gpu
def test_smoke_launches_all_variants_of_serving(variants):
    smoked = smoke_variants(variants)
    for way, kv_bits in (("16 bits", "16"), ("INT4", "8/4"), (HEAD_NORMS, "8/4")):
        served = serving_variants(variants, way, kv_bits)
        assert len(served["_attend"]) >= 6 and len(served) >= 10
        assert missing(smoked, served) == {}, (way, kv_bits)


@pytest.mark.gpu_interpreter
@not_on_a_gpu
@pytest.mark.parametrize("count", [8, 16])
def test_a_variant_that_no_step_launches_is_missed(count, variants, monkeypatch):
    """Those of 32 and of 64 rows."""
    steps = {name: counts for name, counts in smoke.STEPS.items() if max(counts) != count}
    monkeypatch.setattr(smoke, "STEPS", steps)
    monkeypatch.setattr(smoke, "WAYS", ("16 bits",))
    found = missing(smoke_variants(variants), serving_variants(variants, "16 bits", "16"))
    assert found.keys() == {"_attend"}


@torch.inference_mode()
def warmed_up(page: Any, shape: Config) -> Variants:
    """What a warm-up of a layer of this shape launches, with weights in all ways: on "meta"."""
    found: Variants = {}

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, kinds, options = page.binder(kernel)(*args, **options)
        found.setdefault(kernel.fn.__name__, set()).add(f"{kinds} {options}")

    with mock.patch.object(page.InterpretedFunction, "run", launch):
        for layout in WAYS.values():
            config = replace(shape, num_hidden_layers=1, quantization=layout)
            llama = Llama(config, "meta", torch.bfloat16, seed=None, ops=GPU()).pack_weights()
            llama.ops.warm_up(llama, PagedCache(llama.kv_spec(), 100), config.vocab_size)
    return found


@pytest.mark.gpu_interpreter
@not_on_a_gpu
def test_the_layer_that_is_checked_has_the_variants_of_8b(variants):
    """Sampling is checked with the vocabulary of 8B itself."""
    found = missing(warmed_up(variants, SHAPES["layer"]), warmed_up(variants, SHAPES["8B"]))
    assert found.keys() <= vars(draw).keys()
