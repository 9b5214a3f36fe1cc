"""Smoke: it launches what serving launches, and what is wrong is WRONG."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton.runtime.interpreter import InterpretedFunction

from checkpoint.config import Config
from drafters import ModelDrafter
from gpu import GPU, warm_up
from gpu.test_variants import binder, counted, serve
from measure import smoke
from measure.gpu_parts import SHAPES, WAYS, Scale, random_engine, random_model
from measure.serving import random_request, serve_at_once
from model import Llama
from paged import PagedCache
from quant import WIDTHS

pytestmark = [
    pytest.mark.gpu_interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted, not made"),
]
SHAPE = Config(67, 256, 256, 1, 8, 2, 32, 1024)  # `serve` draws from 67 tokens
SCALE = Scale(target="variants", layer="variants", device="cpu")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(smoke, "checked_ops", lambda scale: GPU())
    monkeypatch.setitem(SHAPES, "variants", SHAPE)


@torch.inference_mode()
def smoke_variants() -> dict[str, set[str]]:
    with counted() as variants:
        for _, measure in smoke.smoke_rows(SCALE, 1.0):
            measure()
    return variants


def serving_variants(way: str, kv_bits: str) -> dict[str, set[str]]:
    llama = random_model("variants", way, SCALE, ops=GPU())

    def make_cache() -> PagedCache:
        return PagedCache.of(llama, 100, bits=WIDTHS[kv_bits])

    with counted() as variants:
        for count in (256, 1):
            drafter = ModelDrafter(llama, make_cache()) if way == "16 bits" else None
            serve(llama, make_cache(), drafter, count)
        for num_texts in (1, 20):
            engine = random_engine(llama, None, 400, num_texts)
            requests = []
            for seed in range(num_texts):
                request = random_request(5 + 300 // num_texts, 40, seed)
                request.tokens = [token % 67 for token in request.tokens]
                requests.append(request)
            serve_at_once(engine, requests)
    return variants


def missing(smoked: dict[str, set[str]], served: dict[str, set[str]]) -> dict[str, set[str]]:
    found = {name: served[name] - smoked.get(name, set()) for name in served}
    return {name: variants for name, variants in found.items() if variants}


def test_smoke_launches_all_variants_of_serving():
    smoked = smoke_variants()
    for way, kv_bits in (("16 bits", "16"), ("INT4", "8/4")):
        served = serving_variants(way, kv_bits)
        assert len(served["_attend"]) >= 6 and len(served) >= 10
        assert missing(smoked, served) == {}, (way, kv_bits)


@pytest.mark.parametrize("count", [8, 16])
def test_a_variant_that_no_step_launches_is_missed(count, monkeypatch):
    """Those of 32 and of 64 rows."""
    monkeypatch.setattr(smoke, "kinds", lambda scale: [("16 bits", "16", scale.dtype)])
    monkeypatch.setattr(smoke, "STEPS", [step for step in smoke.STEPS if max(step) != count])
    found = missing(smoke_variants(), serving_variants("16 bits", "16"))
    assert found.keys() == {"_attend"}


@torch.inference_mode()
def warmed_up(shape: Config) -> dict[str, set[str]]:
    """What a warm-up of a layer of this shape launches, with weights in all ways: on "meta"."""
    variants: dict[str, set[str]] = {}

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, kinds, options = binder(kernel)(*args, **options)
        variants.setdefault(kernel.fn.__name__, set()).add(f"{kinds} {options}")

    with mock.patch.object(InterpretedFunction, "run", launch):
        for layout in WAYS.values():
            config = replace(shape, num_hidden_layers=1, vocab_size=128256, quantization=layout)
            llama = Llama(config, "meta", torch.bfloat16, seed=None, ops=GPU()).pack_weights()
            warm_up(llama, PagedCache.of(llama, 100))
    return variants


def test_the_layer_that_is_checked_has_the_variants_of_8b():
    assert warmed_up(SHAPES["layer"]) == warmed_up(SHAPES["8B"])
