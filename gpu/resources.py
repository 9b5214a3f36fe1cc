"""The resources of every kernel: registers, spills, shared memory, compiled for GPUs that are not
there.

    python -m gpu.resources

prints a row for each kernel and shape of Llama 3.1 8B (crosscompile.py says what the columns mean).
What the tests hold: no kernel of a decoding step spills, all fit into shared memory, and
attention's and the products' loops copy ahead.

    T rows · N, K a product's shape · H, G heads · D head size · C, F widths · V vocabulary
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from gpu import draw, flash, fused, store, weightonly
from gpu.crosscompile import SHARED, STORED, Report, compile_for, print_table
from quant import FAR, MOST4, MOST8, TINY, WIDTHS, Kind

MODELS = {  # H, G, D
    "8B": (32, 8, 128),
    "3B": (24, 8, 128),
    "1B": (32, 8, 64),
    "wide": (16, 8, 256),
}
SHAPES = {  # N, K
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "1B qkv": (3072, 2048),
    "1B o": (2048, 2048),
    "1B gate, up": (16384, 2048),
    "1B down": (2048, 8192),
    "1B head": (128256, 2048),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_attention(
    arch: int, model: str, bits: Sequence[int], rows: int, block: int = 16, kind: str = "bf16"
) -> Report:
    """`_attend` for `rows` rows of type `kind`, and blocks of `block` tokens (0: one block a
    sequence).
    """
    H, G, D = MODELS[model]
    key_bits, value_bits = bits
    split = rows < 128
    size = DTYPES[kind].itemsize
    M, N, warps, stages = flash.tile_shape(rows, H // G, D, bits, block, arch, size)
    stored = STORED | {16: (f"*{kind}", None, None)}
    pools = stored[key_bits] + stored[value_bits]
    types = {
        "q out": f"*{kind}",
        "parts peaks": "*fp32" if split else f"*{kind}",
        "scale": "fp32",
        "block_tables cu_seqlens seq_lens": "*i32",
        "q_token q_head block_stride": "i32:16",
        "token_stride table_stride total fewest most least": "i32",
    }
    types |= dict(zip(("k", "k_scale", "k_zero", "v", "v_scale", "v_zero"), pools))
    constants = dict(
        G=G,
        R=H // G,
        D=D,
        WIDE=D,
        S=block,
        K_BITS=key_bits,
        V_BITS=value_bits,
        M=M,
        N=N,
        SPLIT=split,
        head_stride=1,
    )
    return compile_for(flash._attend, types, constants, arch, warps, stages)


def compile_merge(arch: int) -> Report:
    """`_merge`, for 8B."""
    types = {
        "out": "*bf16",
        "parts peaks": "*fp32",
        "cu_seqlens": "*i32",
        "splits total fewest most": "i32",
    }
    constants = dict(H=32, D=128, WIDE=128, MOST=flash.MOST_SPLITS)
    return compile_for(flash._merge, types, constants, arch, 1)


def compile_store(arch: int, D: int, bits: Sequence[int]) -> Report:
    """`_store` with rotation, for 32 heads on 8 of size D."""
    key_bits, value_bits = bits
    pools = STORED[key_bits] + STORED[value_bits]
    types = {
        "q k v turned cos sin": "*bf16",
        "slot_mapping": "*i32",
        "q_token q_head k_token k_head v_token v_head S block_stride": "i32:16",
        "token_stride": "i32",
    }
    types |= dict(zip(("keys", "k_scale", "k_zero", "values", "v_scale", "v_zero"), pools))
    constants = dict(
        G=8,
        R=4,
        ROWS=4,
        D=D,
        WIDE=D,
        K_BITS=key_bits,
        V_BITS=value_bits,
        TURN=True,
        TINY=TINY,
        FAR=FAR,
        MOST8=MOST8,
        MOST4=MOST4,
        head_stride=1,
    )
    return compile_for(store._store, types, constants, arch, 1)


def compile_fused(C: int, F: int, D: int, arch: int = 90) -> dict[str, Report]:
    """The kernels of fused.py, for a model of this size."""
    size, warps = fused.norm_shape(C)
    types = {
        "x delta weight total y cos sin": "*bf16",
        "C F D row head": "i32:16",
        "eps": "fp32",
        "heads": "i32",
    }
    half = triton.next_power_of_2(D // 2)
    return {
        "add_norm": compile_for(fused._add_norm, types, dict(SIZE=size), arch, warps),
        "swiglu": compile_for(fused._swiglu, types, dict(SIZE=1024), arch),
        "rotate": compile_for(fused._rotate, types, dict(HEADS=8, HALF=half), arch),
    }


def compile_sampling(V: int, logits: str = "bf16", arch: int = 90) -> dict[str, Report]:
    """The kernels of draw.py, for a vocabulary of V."""
    types = {
        "V S stride aside": "i32",
        "temperature peaks likely tops k p m edges best probs out": "*fp64",
        "logits": f"*{logits}",
        "counts": "*i32",
        "streams": "*i64",
    }
    pieces = triton.next_power_of_2(triton.cdiv(V, draw.PIECE))
    constants = dict(PIECES=pieces, PIECE=draw.PIECE, TILE=draw.TILE, FILTER=True)
    float32_out = types | {"out": "*fp32"}
    float32_probs = types | {"probs": "*fp32"}
    index_out = types | {"out": "*i64"}
    return {
        "peaks": compile_for(draw._peaks, types, constants, arch),
        "weigh": compile_for(draw._weigh, types, constants, arch),
        "gather": compile_for(draw._gather, types, constants, arch),
        "edge": compile_for(draw._edge, types, constants, arch),
        "cut": compile_for(draw._cut, float32_out, constants, arch),
        "race": compile_for(draw._race, float32_probs, constants, arch),
        "winner": compile_for(draw._winner, index_out, constants, arch),
    }


def compile_product(
    T: int, N: int, K: int, bits: Kind, group: int = 128, dtype: str = "bf16", arch: int = 90
) -> Report:
    """The kernel of weightonly.py that multiplies T rows by an [N, K] of these bits, or dequantizes
    it.
    """
    cut = weightonly.plan_product(T, N, K, bits, group)
    pairs = "*i64" if dtype == "fp32" else "*i32"
    types = {
        "x": pairs if bits == 4 else f"*{dtype}",
        "bias": None,
        "y out": f"*{dtype}",
        "parts": "*fp32",
        "T M": "i32",
        "N K": "i32:16",
    }
    types |= dict(zip(("w", "scale", "zero"), STORED[bits]))
    number_bits = 4 if bits == 4 else 8
    constants = weightonly.kernel_constants(cut, K, number_bits, DTYPES[dtype])
    constants["B"] = cut.at_once or 2048 // cut.group
    if T > weightonly.ROWS:
        return compile_for(weightonly._dequantize, types, constants, arch, 4, cut.num_stages)
    kernel = weightonly._few if cut.at_once else weightonly._many
    return compile_for(kernel, types, constants, arch, cut.num_warps, cut.num_stages)


def reports(arch: int) -> Iterator[tuple[str, Report]]:
    """Each kernel, for 8B."""
    for name, bits in WIDTHS.items():
        for rows in (16, 128):
            yield f"attend, K/V {name}, {rows} rows", compile_attention(arch, "8B", bits, rows)
    yield "merge", compile_merge(arch)
    for name, bits in WIDTHS.items():
        yield f"store, K/V {name}", compile_store(arch, 128, bits)
    yield from compile_fused(4096, 14336, 128, arch).items()
    yield from compile_sampling(128256, arch=arch).items()
    for bits in (4, 8):
        for T in (1, 64, 512):
            report = compile_product(T, *SHAPES["8B o"], bits, arch=arch)
            yield f"product, INT{bits}, {T} rows", report


def table() -> Iterator[list[Any]]:
    """A row for each kernel and architecture."""
    for arch in SHARED:
        for name, report in reports(arch):
            numbers = report.registers, report.spills, report.shared, report.ahead
            yield [name, arch, *numbers, report.programs]


if __name__ == "__main__":
    print_table("kernel sm registers spills shared ahead programs", table())
