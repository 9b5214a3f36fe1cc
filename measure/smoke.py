"""Whether a GPU computes what plain torch does: every kernel, in every shape that serving has.

    python bench.py --gpu smoke

A layer with the heads of 8B and a head of a few thousand tokens runs over steps of real tokens, for
each way to store weights, and keys and values. Its logits are compared with those of `kernels.Ops`
in float32, of the same stored weights and over the same cache:

    ‖out − wanted‖ / ‖wanted‖  ≤  ε + √(n ε s)

ε is what rounding to the dtype leaves. Where a number is rounded to a grid with steps of s (in
standard deviations), as keys, values and W8A8's inputs are, a difference of ε moves one in s / ε
numbers to the next step, by s; n such roundings follow each other.

Each step runs three times: launch by launch; as a recording of a rounded shape, which begins with
a run; and replayed. Invariant: together the steps launch every kernel variant that serving launches
(test_smoke.py counts them).
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels import Ops, ops_for
from kvcache import AttentionMetadata
from measure.gpu_parts import (
    SHAPES,
    WAYS,
    Measurements,
    Row,
    Scale,
    judged,
    random_model,
    relative_error,
)
from model import Llama
from paged import PagedCache
from quant import WIDTHS

Kind = tuple[str, str, torch.dtype]
Models = Callable[[], tuple[Llama, Llama]]
HEADERS = ("a step", "error: launched, recorded, replayed", "at most", "")
ROUNDING = {torch.bfloat16: 1.5e-2, torch.float32: 1e-4}  # ε
KV_STEPS = {"16": 0.0, "8": 0.03, "8/4": 0.35, "4": 0.35}  # s: 7 or 5 deviations in 254 or 15 steps
INPUT_STEPS = {"W8A8": 0.03, "FP8 W8A8": 0.09}
PRODUCTS = 4  # whose inputs are rounded, of a layer
SPREAD = 2.0  # of old keys and values, so that some count much more than others
STEPS = (  # new tokens of each text: attention has tiles of 16, 32, 64 and 128 rows
    [1],
    [8],
    [16],
    [17],
    [100],
    [1] * 8,
    [8] * 4,
    [16] * 4,
    [1] * 65,
    [40] * 3,
    [1, 60, 3, 1],
)
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "temperature 0": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.01},
    "all filters": {"temperature": 0.7, "top_k": 500, "top_p": 0.9, "min_p": 0.001},
}


def smoke_rows(scale: Scale, bandwidth: float) -> Measurements:
    """Weights in each way, keys and values in each width, and float32; then sampling."""
    for way, kv_bits, dtype in kinds(scale):
        models = functools.cache(partial(model_pair, way, dtype, scale))
        kind = f"{way}, KV {kv_bits}, {str(dtype).removeprefix('torch.')}"
        limit = most_error(way, kv_bits, dtype)
        pasts = (0, *scale.pasts) if way == "16 bits" else scale.pasts[:1]
        for past, counts in product(pasts, STEPS):
            name = f"{kind}: {len(counts)} texts, {max(counts)} tokens after {past}"
            yield name, partial(step_row, models, kv_bits, counts, past, limit)
    for (name, settings), rows in product(FILTERS.items(), (1, scale.num_texts + 1)):
        yield f"sampling, {name}: {rows} texts", partial(sampling_row, settings, rows, scale)


def kinds(scale: Scale) -> list[Kind]:
    """Weights, keys and values, dtype. No kernel reads both weights and keys."""
    found = [(way, "16", scale.dtype) for way in WAYS]
    found += [("16 bits", kv_bits, scale.dtype) for kv_bits in WIDTHS if kv_bits != "16"]
    return [*found, ("16 bits", "16", torch.float32)]


def most_error(way: str, kv_bits: str, dtype: torch.dtype) -> float:
    rounding = ROUNDING[dtype]
    steps = KV_STEPS[kv_bits] + PRODUCTS * INPUT_STEPS.get(way, 0.0)
    return rounding + math.sqrt(rounding * steps)


# ---- Steps ---------------------------------------------------------------------------------------


def checked_ops(scale: Scale) -> Ops:
    """Those of a GPU; on a CPU, which cpu/ tests, plain ones, to try this page."""
    return ops_for(scale.device) if scale.on_gpu else Ops()


def model_pair(way: str, dtype: torch.dtype, scale: Scale) -> tuple[Llama, Llama]:
    """The model to check, and its reference."""
    llama = random_model(scale.layer, way, scale, dtype, checked_ops(scale))
    reference = random_model(scale.layer, way, scale, torch.float32, Ops())
    return llama, reference


def step_row(models: Models, kv_bits: str, counts: list[int], past: int, limit: float) -> Row:
    """A step of texts with so many new tokens. past: tokens of the first text before."""
    llama, reference = models()
    torch.manual_seed(0)
    metadata = open_texts(llama, kv_bits, counts, past)
    tokens = torch.randint(llama.config.vocab_size, (sum(counts),), device=llama.device)
    outputs = [llama.forward(tokens, metadata, None)]
    outputs += [llama(tokens, metadata) for _ in range(2)]
    wanted = reference.forward(tokens, metadata, None)
    return judged([relative_error(output, wanted) for output in outputs], limit)


def open_texts(llama: Llama, kv_bits: str, counts: Sequence[int], past: int) -> AttentionMetadata:
    """New texts with random keys and values -> the step of `counts` more tokens of each."""
    longest = past + max(counts)
    num_blocks = len(counts) * (longest // 16 + 1)
    cache = PagedCache.of(llama, num_blocks, bits=WIDTHS[kv_bits])
    seqs = [cache.open(())[0] for _ in counts]
    if past:
        old = [(seq, [0] * max(1, past - 5 * i)) for i, seq in enumerate(seqs)]
        slot_mapping = cache.extend(old).slot_mapping.long()
        shape = len(slot_mapping), llama.config.num_key_value_heads, llama.config.head_dim
        for store in (cache.keys, cache.values):
            numbers = SPREAD * torch.randn(shape, device=llama.device)
            store.write(0, slot_mapping, numbers)
    return cache.extend([(seq, [0] * n) for seq, n in zip(seqs, counts)])


# ---- Sampling ------------------------------------------------------------------------------------


def sampling_row(settings: dict[str, Any], rows: int, scale: Scale) -> Row:
    """Probabilities of random logits, and picks from them: the share of other tokens."""
    ops = checked_ops(scale)
    V = SHAPES[scale.target].vocab_size
    logits = 3 * torch.randn(rows, V, device=scale.device).to(scale.dtype)
    streams = torch.arange(rows, device=scale.device)[:, None]
    probs = ops.probabilities(logits, **settings)
    wanted = Ops().probabilities(logits, **settings)
    differ = ops.pick(wanted, streams) != Ops().pick(wanted, streams)
    errors = [relative_error(probs, wanted), differ.float().mean().item()]
    return judged(errors, 1e-5)
