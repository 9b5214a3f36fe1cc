"""What Triton makes of gpu/ for sm_90, run without a GPU, in bfloat16 too.

    cd PROJECT && [RACES=1] [STEPS=90:1,0:1+60+3] PYTHONPATH=TRITON_3.6 python /…/emulator.py [part of a kind's name …]

ptxemu.py, beside this file, runs PTX in numpy. Steps and kinds are those of gpu/test_layer.py (STEPS:
some of them, past:tokens+tokens…); the layer is smaller, but its kernels are those of 8B. Every step
is run twice, as the second one may fetch ahead. RACES=1: what another warp may not have written is a
fault. LLAMA_GPU_OFF as always.
"""

import math
import os
import sys
import time
import types
from dataclasses import replace
from typing import Any
from unittest import mock

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.getcwd()]
os.environ.pop("TRITON_INTERPRET", None)
conftest = types.ModuleType("conftest")  # the true one turns Triton's interpreter on
conftest.examples = lambda count: hypothesis.settings(max_examples=count)
sys.modules["conftest"] = conftest
import hypothesis
import ptxemu
import torch

from checkpoint.config import Config
from gpu import GPU
from gpu.test_layer import CHECKED, GRIDS, KINDS, ROUNDING
from kernels import Ops
from measure.gpu_parts import SHAPES, open_texts, random_model
from measure.sizes import GPU_SIZES
from quant import WIDTHS

SHAPES["emulated"] = Config(
    256,
    1024,
    1024,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=1024,
)
SIZES = replace(GPU_SIZES, device="cpu")
PROCESSORS = 4  # so few that keys and columns are still split
EMPTY = torch.empty
if os.environ.get("STEPS"):
    CHECKED = []
    for word in os.environ["STEPS"].split(","):
        past, _, step = word.partition(":")
        CHECKED.append((int(past), [int(n) for n in step.split("+")]))
torch.set_num_threads(1)


def poisoned(*shape: Any, **how: Any) -> torch.Tensor:
    x = EMPTY(*shape, **how)
    return x.fill_(math.nan if x.is_floating_point() else 77)


def run(way: str, kv_bits: str, dtype: torch.dtype) -> int:
    llama = random_model("emulated", way, SIZES, dtype, GPU(records=False))
    plain = random_model("emulated", way, SIZES, torch.float32, Ops())
    limit = ROUNDING[dtype]
    limit += math.sqrt(limit * (GRIDS.get(kv_bits, 0.0) + GRIDS.get(way, 0.0)))
    wrong = 0
    for past, step in CHECKED:
        start = time.monotonic()
        torch.manual_seed(0)
        metadata = open_texts(llama.kv_spec(bits=WIDTHS[kv_bits]), step, past)
        tokens = torch.randint(1, 256, metadata.positions.shape)
        try:
            with mock.patch("torch.empty", poisoned):
                out = llama.forward(tokens, metadata, None)
                fetches = ptxemu.STATS["prefetches"]
                again = llama.forward(tokens, metadata, None)
            fetches = ptxemu.STATS["prefetches"] - fetches
            wanted = plain.forward(tokens, metadata, None)
            error = ((out.float() - wanted).norm() / wanted.norm()).item()
            told = f"{error:.1e} of {limit:.1e}, {fetches} prefetches" + " TWICE DIFFERS" * (not torch.equal(out, again))
            is_wrong = not error <= limit or not torch.equal(out, again)
        except RuntimeError as failure:  # ptxemu.Fault, too
            told = str(failure)[:300]
            is_wrong = "per-tensor scaling" not in told  # FP8 of many rows: torch's, needs a GPU
        wrong += is_wrong
        name = f"{way}, {kv_bits}, {dtype}, {past}, {len(step)} x {step[0]}"
        print(name, told, "WRONG" * is_wrong, f"{time.monotonic() - start:.1f} s", flush=True)
    return wrong


if __name__ == "__main__":
    ptxemu.ORDER = "shuffled"
    ptxemu.RACES = bool(os.environ.get("RACES"))
    parts = sys.argv[1:] or [""]
    with (
        torch.inference_mode(),
        ptxemu.emulated(),
        mock.patch("gpu.tuning.processors", lambda device: PROCESSORS),
    ):
        found = [run(*kind) for kind in KINDS if any(part in str(kind) for part in parts)]
    print("launches:", dict(ptxemu.STATS), "wrong:", sum(found))
    sys.exit(1 if any(found) else 0)
