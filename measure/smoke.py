"""Whether a GPU computes what plain torch does.

    python bench.py --gpu smoke      every kernel, in every shape that serving has
    python bench.py --gpu texts      whole texts, greedy and in float32, of the embedded model

In `smoke` a layer of 8B, and a head of 20,480 tokens, run over steps of real tokens, for each way
to store weights, and keys and values, and with norms of heads. The logits are compared with those
of `kernels.Ops` in float32, of the same stored weights and over the same cache:

    ‖out − wanted‖ / ‖wanted‖  ≤  ε + √(ε s)

ε is what rounding to the dtype leaves. Where numbers are rounded to a grid with steps of s (in
standard deviations), as keys, values and the inputs of W8A8 are, a difference of ε moves a share of
ε / s of them to the next step, by s.

Each step runs launch by launch; and as a recording of a rounded shape, made with other tokens, then
replayed, and dropped with its cache. Invariant: together the steps launch every kernel variant that
serving launches (test_smoke.py counts them).

Texts are those of the CPU. Two machines add in another order, so a near-tie may fall otherwise: the
CPU reads each text, and every token must have the best logit, or nearly so. Keys and values of 4
bits have few steps: a sum in another order moves one of 100,000 numbers to the next step, and then
logits by up to 0.01.
"""

import functools
import math
import os
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import Ops, ops_for
from loading import Model, load_draft
from measure.effort import SENTENCES
from measure.gpu_parts import (
    HEAD_NORMS,
    SHAPES,
    WAYS,
    Row,
    Scale,
    judged,
    open_texts,
    random_model,
    relative_error,
)
from measure.serving import serve_texts
from model import Llama
from paged import PagedCache
from quant import FORMATS, WIDTHS, Kind
from request import Settings

ROUNDING = {torch.bfloat16: 2.5e-2, torch.float32: 1e-4}  # ε: twice that of plain bfloat16
GRIDS = {  # s
    "8": 0.03,  # 254 steps for 7 deviations
    "8/4": 0.35,  # 15 steps for 5
    "4": 0.35,
    "W8A8": 4 * 0.03,  # four products, one after the other
    "FP8 W8A8": 4 * 0.09,
}
STEPS = {  # texts x their new tokens: attention has tiles of 16, 32, 64 and 128 rows
    "1 x 1": [1],
    "1 x 8": [8],
    "1 x 16": [16],
    "1 x 17": [17],
    "1 x 100": [100],
    "8 x 1": [1] * 8,
    "4 x 8": [8] * 4,
    "4 x 16": [16] * 4,
    "65 x 1": [1] * 65,
    "3 x 40": [40] * 3,
    "1 + 60 + 3": [1, 60, 3],
}
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "temperature 0": {"temperature": 0.0},
    "top-p": {"top_p": 0.9},
    "all filters": {"temperature": 0.7, "top_k": 500, "top_p": 0.9, "min_p": 0.001},
}
TIE = 1e-3  # of two logits
TIE_OF_4_BITS = 1e-2
MODEL = "tiny"  # that tells them
NUM_TOKENS = 32  # of a text, at most


# ---- Steps ---------------------------------------------------------------------------------------


def smoke_keys(scale: Scale) -> Iterator[tuple[Any, ...]]:
    """Weights, keys and values, dtype, tokens before, new ones. No kernel reads both weights and
    keys, so each width of one goes with 16 bits of the other."""
    dtype = scale.dtype
    pasts = (0, *scale.pasts)
    yield from product(("16 bits",), WIDTHS, (dtype,), pasts, STEPS)
    yield from product(("16 bits",), ("16",), (torch.float32,), pasts, STEPS)
    yield from product([*WAYS][1:], ("16",), (dtype,), scale.pasts[:1], STEPS)
    yield from product((HEAD_NORMS,), WIDTHS, (dtype,), scale.pasts[:1], ("1 x 1", "1 + 60 + 3"))
    yield from product(("sampling",), FILTERS, (1, scale.num_texts + 1))


def smoke_row(scale: Scale, way: str, *key: Any) -> Row:
    if way == "sampling":
        return sampling_row(scale, *key)
    return step_row(scale, way, *key)


def checked_ops(scale: Scale) -> Ops:
    """Those of a GPU; on a CPU, which cpu/ tests, plain ones, to try this page."""
    return Ops() if scale.device == "cpu" else ops_for(scale.device)


@functools.lru_cache(1)
def model_pair(scale: Scale, way: str, dtype: torch.dtype) -> tuple[Llama, Llama]:
    """The model to check, and its reference."""
    llama = random_model(scale.layer, way, scale, dtype, checked_ops(scale))
    return llama, random_model(scale.layer, way, scale, torch.float32, Ops())


def step_row(scale: Scale, way: str, kv_bits: str, dtype: torch.dtype, past: int, step: str) -> Row:
    llama, reference = model_pair(scale, way, dtype)
    torch.manual_seed(0)
    metadata = open_texts(llama.kv_spec(bits=WIDTHS[kv_bits]), STEPS[step], past)
    V = llama.config.vocab_size
    tokens = torch.randint(1, V, metadata.positions.shape, device=llama.device)
    llama(tokens - 1, metadata)  # this makes the recording
    outputs = [llama.forward(tokens, metadata, None), llama(tokens, metadata)]
    wanted = reference.forward(tokens, metadata, None)
    rounding = ROUNDING[dtype]
    grid = GRIDS.get(kv_bits, 0.0) + GRIDS.get(way, 0.0)
    limit = rounding + math.sqrt(rounding * grid)
    errors = [relative_error(output, wanted) for output in outputs]
    return judged(errors, limit)


# ---- Sampling ------------------------------------------------------------------------------------


def sampling_row(scale: Scale, filters: str, num_rows: int) -> Row:
    """Probabilities of random logits; and of the picks from them, the share of other tokens."""
    torch.manual_seed(0)
    ops = checked_ops(scale)
    settings = FILTERS[filters]
    V = SHAPES[scale.target].vocab_size
    logits = 3 * torch.randn(num_rows, V, device=scale.device).to(scale.dtype)
    streams = torch.arange(num_rows, device=scale.device)[:, None]
    wanted = Ops().probabilities(logits, **settings)
    probs = ops.probabilities(logits, **settings)
    wanted_tokens = Ops().pick(wanted, streams)
    differ = ops.pick(wanted, streams) != wanted_tokens
    share = differ.float().mean().item()
    return judged([relative_error(probs, wanted), share], 1e-5)


# ---- Texts ---------------------------------------------------------------------------------------


def text_keys(scale: Scale) -> Iterator[tuple[Any, ...]]:
    """Bits of weights, bits of keys and values, draft."""
    for draft in (None, "tiny-draft"):
        yield from product((16,), WIDTHS, (draft,))
        yield from product(FORMATS, ("16",), (draft,))


def text_row(scale: Scale, bits: Kind, kv_bits: str, draft: str | None) -> Row:
    """How far below the CPU's best logit those of a text's tokens are, at most: of two texts, in
    one batch."""
    model = Model.load(MODEL, scale.device, torch.float32, bits)
    drafts = load_draft(draft, model, torch.float32)
    prompts = [model.encode(prompt) for prompt in SENTENCES[:2]]
    count = min(NUM_TOKENS, scale.count)
    settings = Settings(temperature=0.0, seed=0, max_tokens=count, gamma=3)
    texts = serve_texts(model, drafts, prompts, settings, kv_bits).texts
    margins = []
    for prompt, text in zip(prompts, texts):
        logits = plain_logits(bits, kv_bits, prompt + text)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])
        margins.append((logits.amax(1, keepdim=True) - chosen).max().item())
    return judged(margins, TIE_OF_4_BITS if 4 in WIDTHS[kv_bits] else TIE)


@functools.cache
def plain_model(bits: Kind) -> Model:
    """On the CPU, in plain torch."""
    with mock.patch.dict(os.environ, LLAMA_PLAIN="1"):
        return Model.load(MODEL, "cpu", torch.float32, bits)


def plain_logits(bits: Kind, kv_bits: str, tokens: list[int]) -> Tensor:
    """Those of the CPU, after each of these tokens: float[T, V]."""
    llama = plain_model(bits).llama
    cache = PagedCache(llama.kv_spec(bits=WIDTHS[kv_bits]), len(tokens))
    seq, _ = cache.open(())
    return llama(torch.tensor(tokens), cache.extend([(seq, tokens)]))
