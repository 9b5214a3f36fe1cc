"""What Triton makes of gpu/ for sm_90, run without a GPU, in bfloat16 too.

    python .ci/emulator.py FOLDER [part of a row's name …]
    python .ci/emulator.py FOLDER first      bench.py --gpu first --quick, of a few rows

FOLDER has ptxemu.py, which runs PTX in numpy and is no part of this repository. Rows are those of
`bench.py --gpu smoke` whose names have one of these parts, or all; the layer is smaller, but its
kernels are those of 8B. Copies arrive when they are waited for, programs run in a random order,
what nobody has written is NaN; with RACES=1, what another warp may not have written is a fault.

`first` runs the whole program: steps, recordings and what they ask of torch.cuda are those of
measure/testing.py. Not covered by it: `compile`, whose kernels are never launched, and times.
"""

import math
import os
import sys
import time
from dataclasses import replace
from typing import Any
from unittest import mock

sys.path[:0] = [sys.argv[1], "."]
import ptxemu
import torch

from measure import testing as pretend

if sys.argv[2:] == ["first"]:
    pretend.build_device()  # before the pages that compute are imported

from checkpoint.config import Config
from gpu import GPU
from measure import smoke
from measure.gpu_parts import SHAPES, WRONG, Row, Scale, judged, open_texts, relative_error
from quant import WIDTHS

LAYER = Config(
    256,
    1024,
    1024,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=1024,
)
SHAPES["emulated"] = LAYER
SHAPES["emulated sampling"] = replace(LAYER, vocab_size=20000)
PROCESSORS = 4  # so few that keys and columns are still split
EMPTY = torch.empty


def poisoned(*shape: Any, **how: Any) -> torch.Tensor:
    x = EMPTY(*shape, **how)
    return x.fill_(math.nan if x.is_floating_point() else 77)


def step_row(scale: Scale, way: str, kv_bits: str, dtype: torch.dtype, past: int, step: str) -> Row:
    """As smoke's, but launched once, and never recorded."""
    llama, reference = smoke.model_pair(scale, way, dtype)
    torch.manual_seed(0)
    spec = llama.kv_spec(bits=WIDTHS[kv_bits])
    metadata = open_texts(spec, smoke.STEPS[step], past)
    tokens = torch.randint(1, llama.config.vocab_size, metadata.positions.shape)
    with mock.patch("torch.empty", poisoned):
        output = llama.forward(tokens, metadata, None)
    wanted = reference.forward(tokens, metadata, None)
    rounding = smoke.ROUNDING[dtype]
    grid = smoke.GRIDS.get(kv_bits, 0.0) + smoke.GRIDS.get(way, 0.0)
    return judged([relative_error(output, wanted)], rounding + math.sqrt(rounding * grid))


def first() -> int:
    """`bench.py --gpu first --quick` -> 0; an AssertionError if something is wrong."""
    from measure.test_pretend import first_run

    first_run()
    return 0


@mock.patch.object(smoke, "checked_ops", lambda scale: GPU(records=False))
def rows(parts: list[str]) -> int:
    """Rows of smoke whose names have one of these parts -> 1 if one is wrong, else 0."""
    scale = Scale("emulated sampling", layer="emulated", device="cpu", num_texts=2)
    wrong = 0
    for key in smoke.smoke_keys(scale):
        name = ", ".join(map(str, key))
        if not any(part in name for part in parts):
            continue
        start = time.monotonic()
        try:
            if key[0] == "sampling":
                row = smoke.sampling_row(scale, *key[1:])
            else:
                row = step_row(scale, *key)
        except RuntimeError as error:  # ptxemu.Fault, too
            row = [str(error)[:300], WRONG]
            if "per-tensor scaling" in row[0]:  # on a CPU this PyTorch has FP8 with one scale only
                row = ["left out: FP8 of more than 64 tokens is torch's, and needs a GPU"]
        wrong += row[-1] == WRONG
        print(f"{name:60}", *row, f"{time.monotonic() - start:.1f} s", flush=True)
    print("kernels:", *(f"{name} {count}," for name, count in sorted(ptxemu.STATS.items())))
    return int(wrong > 0)


if __name__ == "__main__":
    ptxemu.ORDER = "shuffled"
    ptxemu.RACES = bool(os.environ.get("RACES"))
    with (
        torch.inference_mode(),
        ptxemu.emulated(),
        mock.patch("gpu.tuning.processors", lambda device: PROCESSORS),
    ):
        sys.exit(first() if sys.argv[2:] == ["first"] else rows(sys.argv[2:] or [""]))
