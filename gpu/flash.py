"""Flash attention over the cache in place: one kernel for prompts, chunks, verification and single tokens.

A program takes M rows of one sequence: its newest tokens times the R = H / G query heads that share a key/value head.
It walks over the keys in tiles of N and keeps, of each row, the largest score so far, the sum of the weights and the
weighted sum of the values:

    m' = max(m, max_j s_j)      p_j = 2^(s_j − m')      l = 2^(m − m') l + Σ_j p_j      o = 2^(m − m') o + Σ_j p_j v_j

so o / l is exactly the softmax's weighted mean, though no score leaves the chip. All R heads share one read of a tile.

  - A table of blocks says where the keys are. A contiguous cache has one block of max_len tokens for each text.
  - INT8 and INT4 are unpacked in registers (unpack.py). A vector with a single scale enters the product as integers: a
    key's scale multiplies its column of scores, a value's scale its weights, and the zeros of 4-bit values are
    subtracted once, Σ_j p_j (v_j − z_j) = Σ_j p_j v_j − Σ_j p_j z_j. 16 bits hold these integers exactly: keys as
    float16, with rows of q divided by their largest number; values as bfloat16. 4-bit keys are dequantized to q's type.
  - Few queries with a long past would occupy few programs. So the keys are split, each split writes (o / l, m +
    log2 l), and a second kernel weighs the splits (Flash-Decoding). Their number follows from shapes that the host
    knows. A split without keys writes −∞ and weighs nothing, so a captured graph stays valid while texts grow.
  - A step has one launch for sequences of few rows (tiles of 16 to 64) and one for sequences of many (tiles of 128).
  - float32 products are computed as three tf32 products (`tf32x3`), which leave out less than 2⁻²⁰.

Invariant: places that belong to no sequence of the step, in the cache or in `out`, affect no result and stay unwritten.
Costs of a decoding step: K and V once, 2 · m · G · D · bytes; of a prompt: 2 · n² · H · D operations, half of 4 n² H D.
Not covered: tensor maps and specialized warps (FlashAttention-3), better for prompts on sm_90; sliding windows.

Dao et al. 2022 (arXiv:2205.14135); Dao 2023, FlashAttention-2 (2307.08691); Dao et al. 2023, Flash-Decoding.

    T tokens of a step · B sequences · H, G heads · D head size · S tokens of a block · M rows, N keys of a tile
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.crosscompile import SHARED, STORED, Report, compile_for, print_table
from gpu.unpack import _numbers, _steps
from quant import WIDTHS

LOWEST = tl.constexpr(-1e30)  # below every score; unlike −∞ it may be subtracted from itself
LOG2E = 1.4426950408889634
MOST_SPLITS, LEAST_KEYS = 128, 128  # the most splits of a sequence, the fewest keys of a split


@triton.jit
def _weigh(
    scores,
    scale,
    seen,
    vectors,
    o,
    drift,
    m,
    l,
    v,
    steps,
    zeros,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    V_BITS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The equation above for the next N keys. scores: [M, N], −∞ for keys that a row does not see -> o, drift, m, l."""
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - top[:, None])  # [M, N]
    fade = tl.exp2(m - top)
    l = l * fade + tl.sum(p, 1)
    if V_BITS < 16:
        p *= steps.to(tl.float32)[None, :]
    wide: tl.constexpr = (
        v.dtype.element_ty if V_BITS == 16 else tl.float32 if dtype == tl.float32 else tl.bfloat16
    )
    p = p.to(wide)
    if V_BITS == 4:
        bias: tl.constexpr = 16 if wide == tl.bfloat16 else 0  # of `_steps`
        drift = drift * fade + tl.sum(p.to(tl.float32) * (zeros.to(tl.float32) + bias)[None, :], 1)
    o = tl.dot(
        p,
        _steps(v, vectors, seen, D, WIDE, V_BITS, wide),
        o * fade[:, None],
        input_precision="tf32x3",
    )
    return o, drift, top, l


@triton.jit
def _finish(
    o,
    drift,
    m,
    l,
    token,
    head,
    inside,
    inner,
    out,
    parts,
    peaks,
    total,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    V_BITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write the results of M rows, or of their split. token, head, inside: [M]; inner: [M, WIDE]."""
    if V_BITS == 4:
        o -= drift[:, None]
    o /= tl.where(l > 0, l, 1.0)[:, None]  # padding has no keys: 0, never NaN
    d = tl.arange(0, WIDE)
    place = token.to(tl.int64) * H + head  # [M], of T · H
    if SPLIT:
        place += tl.program_id(2) * total
        tl.store(peaks + place, m + tl.log2(l), inside)
        tl.store(parts + place[:, None] * D + d[None, :], o, inner & (l > 0)[:, None])
    else:
        tl.store(out + place[:, None] * D + d[None, :], o.to(out.dtype.element_ty), inner)


@triton.jit
def _tile(
    start,
    end,
    base,
    x,
    position,
    o,
    drift,
    m,
    l,
    k,
    k_scale,
    k_zero,
    v,
    v_scale,
    v_zero,
    table,
    block_stride,
    token_stride,
    scale,
    S: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`_weigh` the keys from `start` to start + N for the queries x: [M, WIDE]."""
    keys = start + tl.arange(0, N)
    seen = keys < end if MASKED else tl.full((N,), True, tl.int1)
    if S:
        vectors = (
            base
            + tl.load(table + keys // S, seen, 0).to(tl.int64) * block_stride
            + keys % S * token_stride
        )
    else:
        vectors = base + keys * token_stride  # [N], int64
    steps = (
        tl.load(v_scale + vectors, seen, 0) if V_BITS < 16 else 0
    )  # [N], too small for asynchronous
    zeros = (
        tl.load(v_zero + vectors, seen, 0) if V_BITS == 4 else 0
    )  # copies: loaded early, used last
    if K_BITS == 4:
        y = _numbers(k, k_scale, k_zero, vectors, seen, D, WIDE, x.dtype)
    else:
        y = _steps(k, vectors, seen, D, WIDE, K_BITS, x.dtype)
    scores = tl.dot(x, tl.trans(y), input_precision="tf32x3")  # [M, N]
    if K_BITS == 8:
        scores *= tl.load(k_scale + vectors, seen, 0).to(tl.float32)[None, :]
    if MASKED:
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    if K_BITS == 8:
        scores, scale = scores * scale[:, None], 1.0
    return _weigh(
        scores, scale, seen, vectors, o, drift, m, l, v, steps, zeros, D, WIDE, V_BITS, x.dtype
    )


@triton.jit
def _queries(
    q,
    first,
    n,
    past,
    tile,
    g,
    q_token,
    q_head,
    R: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
):
    """A tile of M rows of a sequence -> queries [M, WIDE]; token, head, position of each; whether it is in the step."""
    row, d = tile * M + tl.arange(0, M), tl.arange(0, WIDE)
    token, head, inside = first + row // R, g * R + row % R, row < n * R  # [M]
    inner = inside[:, None] & (d < D)[None, :]
    x = tl.load(
        q + token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + d[None, :], inner, 0
    )
    return x, token, head, past + row // R, inside, inner


# Triton compiles a kernel again for arguments that are 1, or multiples of 16, but not for these parameters:
@triton.jit(
    do_not_specialize=["table_stride", "total", "fewest", "most", "least"],
    do_not_specialize_on_alignment=["table", "query_start", "lengths"],
)
def _attend(
    q,
    out,
    parts,
    peaks,
    k,
    k_scale,
    k_zero,
    v,
    v_scale,
    v_zero,
    table,
    query_start,
    lengths,
    q_token,
    q_head,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    total,
    scale,
    fewest,
    most,
    least,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    S: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A program for (sequence and key/value head, M rows, a split), of sequences with `fewest` to `most` queries."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    first = tl.load(query_start + b)
    n = tl.load(query_start + b + 1) - first
    tile = tl.cdiv(n * R, M) - 1 - tl.program_id(1)  # the last tile has most keys: it begins
    if (n < fewest) | (n > most) | (tile < 0):
        return
    past = tl.load(lengths + b) - n
    x, token, head, position, inside, inner = _queries(
        q, first, n, past, tile, g, q_token, q_head, R, D, WIDE, M
    )
    if K_BITS == 8:  # x into float16's range
        if x.dtype != tl.float32:
            largest = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-30)
            x = (x.to(tl.float32) / largest[:, None]).to(tl.float16)
            scale = scale * largest
        else:
            scale = scale + tl.zeros((M,), tl.float32)
    table += b * table_stride
    base = g.to(tl.int64) * head_stride
    if not S:
        base += tl.load(table).to(tl.int64) * block_stride

    begin, end = (
        0,
        past + tl.minimum(tile * M + M - 1, n * R - 1) // R + 1,
    )  # the keys that the last row sees
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(end, N), tl.num_programs(2)), tl.cdiv(least, N)) * N
        begin = tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
    o, drift = tl.zeros((M, WIDE), tl.float32), tl.zeros((M,), tl.float32)
    m, l = tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32)
    if M > 64:  # tiles that all rows see: no mask
        whole = tl.maximum(begin, tl.minimum(end, past + tile * M // R + 1) // N * N)
        for start in tl.range(begin, whole, N):
            o, drift, m, l = _tile(
                start,
                end,
                base,
                x,
                position,
                o,
                drift,
                m,
                l,
                k,
                k_scale,
                k_zero,
                v,
                v_scale,
                v_zero,
                table,
                block_stride,
                token_stride,
                scale,
                S,
                D,
                WIDE,
                K_BITS,
                V_BITS,
                N,
                False,
            )
        begin = whole
    for start in tl.range(begin, end, N):
        o, drift, m, l = _tile(
            start,
            end,
            base,
            x,
            position,
            o,
            drift,
            m,
            l,
            k,
            k_scale,
            k_zero,
            v,
            v_scale,
            v_zero,
            table,
            block_stride,
            token_stride,
            scale,
            S,
            D,
            WIDE,
            K_BITS,
            V_BITS,
            N,
            True,
        )
    _finish(
        o,
        drift,
        m,
        l,
        token,
        head,
        inside,
        inner,
        out,
        parts,
        peaks,
        total,
        G * R,
        D,
        WIDE,
        V_BITS,
        SPLIT,
    )


@triton.jit(
    do_not_specialize=["splits", "total", "fewest", "most"],
    do_not_specialize_on_alignment=["query_start"],
)
def _merge(
    out,
    parts,
    peaks,
    query_start,
    splits,
    total,
    fewest,
    most,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    MOST: tl.constexpr,
):
    """A program for (head, new token of a sequence, sequence): out = Σ_s 2^peak_s part_s / Σ_s 2^peak_s."""
    first = tl.load(query_start + tl.program_id(2))
    n = tl.load(query_start + tl.program_id(2) + 1) - first
    if (n < fewest) | (n > most) | (tl.program_id(1) >= n):
        return
    place = (first + tl.program_id(1)).to(tl.int64) * H + tl.program_id(0)
    every, few, d = tl.arange(0, MOST), tl.arange(0, 8), tl.arange(0, WIDE)
    top = tl.maximum(
        tl.max(tl.load(peaks + place + every * total, every < splits, float("-inf")), 0), LOWEST
    )
    o, l = tl.zeros((WIDE,), tl.float32), tl.zeros((8,), tl.float32)
    for start in tl.range(0, splits, 8):
        part = place + (start + few) * total
        weight = tl.exp2(
            tl.load(peaks + part, start + few < splits, float("-inf")) - top
        )  # 0: without keys
        o += tl.sum(
            weight[:, None]
            * tl.load(
                parts + part[:, None] * D + d[None, :], (weight > 0)[:, None] & (d < D)[None, :], 0
            ),
            0,
        )
        l += weight
    tl.store(
        out + place * D + d, (o / tl.maximum(tl.sum(l, 0), 1.0)).to(out.dtype.element_ty), d < D
    )  # l ≥ 1


class LayerStore(NamedTuple):
    """Keys or values of one layer, [N, S, G, D], as a kernel reads them: numbers, or integers with scales and zeros."""

    steps: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bits: int  # 16: not quantized
    strides: tuple[int, int, int]  # of a block, a token, a head, in vectors

    @classmethod
    def of(cls, kept: Any, layer: int) -> "LayerStore":
        steps, scale, zero = (*(part[layer] for part in kept.parts), None, None)[:3]
        return cls(
            steps,
            scale,
            zero,
            kept.bits,
            tuple(stride // steps.shape[-1] for stride in steps.stride()[:-1]),
        )


class Launch(NamedTuple):
    """One launch of `_attend`: the sequences with `fewest` to `most` queries, and how they are cut."""

    fewest: int
    most: int
    rows: int  # M
    splits: int


def plan_launches(
    counts: Sequence[int], longest: int, H: int, G: int, processors: int
) -> list[Launch]:
    """A launch for sequences of up to 64 rows, one for longer ones. counts: queries of each; longest: the most keys."""
    R = H // G
    few, many = [n for n in counts if 0 < n * R <= 64], [n for n in counts if n * R > 64]
    launches = []
    if few:
        rows = max(16, triton.next_power_of_2(max(few) * R))
        launches.append(
            Launch(1, max(few), rows, count_splits(len(few) * G, longest, 2 * processors))
        )
    if many:
        tiles = sum(-(-n * R // 128) for n in many)
        launches.append(
            Launch(
                max(few, default=0) + 1,
                max(many),
                128,
                count_splits(tiles * G, longest, processors),
            )
        )
    return launches


def count_splits(programs: int, longest: int, slots: int) -> int:
    """How often to split the keys, so that the last round of `slots` programs at a time is nearly full."""
    if programs >= 4 * slots:
        return 1
    most = max(1, min(MOST_SPLITS, longest // LEAST_KEYS))
    busy = [
        programs * s / slots / -(-programs * s // slots) for s in range(1, most + 1)
    ]  # share of the slots
    return next(s for s, share in enumerate(busy, 1) if share >= 0.9 * max(busy))


def tile_shape(
    rows: int, R: int, D: int, bits: tuple[int, int], block: int, arch: int, size: int = 2
) -> tuple[int, int, int, int]:
    """M, N, num_warps and num_stages for `rows` rows and numbers of `size` bytes: as much in flight as registers and
    shared memory hold without spilling."""
    stages, exact, wide = (
        5 if block else 3,
        bits == (16, 16),
        max(16, triton.next_power_of_2(D)),
    )  # 2 for the table
    if size == 4:  # a product is three in tf32
        if wide > 128:
            return 16, 16, 8, stages
        return rows, 16, 4 if rows == 16 else 8, stages if arch == 90 else 2
    if rows <= 64:
        keys = 128 if rows == 16 and wide <= 64 else 64
        warps = 4 if exact or rows != 32 or wide <= 64 else 8
    else:  # `wgmma` takes fewer registers than sm_80's `mma`
        roomy = exact + (wide <= 64) >= (1 if arch == 90 else 2)
        whole = (
            exact and arch == 90 and D == 128 and R in (1, 2, 4, 8)
        )  # other R: too many registers
        keys, warps = 128 if whole else 64 if roomy else 32, 8
    return rows, keys // max(1, wide // 128), warps, stages


@cache
def capability(device: torch.device) -> int:
    """90 for an H100, 80 for an A100; 90 where there is no GPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def flash_attention(
    q: Tensor,
    k: LayerStore,
    v: LayerStore,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    launches: Sequence[Launch],
    block: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of B sequences over their stored keys and values.

    q: [T, H, D], sequence b has rows starts[b] to starts[b + 1]; lengths: int32[B], new keys included; tables: int32[B,
    M], blocks of `block` tokens (0: one block a sequence). -> [T, H, D]; rows of no sequence are not written.
    """
    (T, H, D), G, B = q.shape, k.steps.shape[-2], len(starts) - 1
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device) if out is None else out
    wide, arch = max(16, triton.next_power_of_2(D)), capability(q.device)
    for fewest, most, rows, splits in launches:
        part, peak = (
            out
            if splits == 1
            else torch.empty(splits * T * H * width, dtype=torch.float32, device=q.device)
            for width in (D, 1)
        )
        rows, keys, warps, stages = tile_shape(
            rows, H // G, D, (k.bits, v.bits), block, arch, q.dtype.itemsize
        )
        _attend[B * G, -(-most * (H // G) // rows), splits](
            q,
            out,
            part,
            peak,
            *k[:3],
            *v[:3],
            tables,
            starts,
            lengths,
            q.stride(0),
            q.stride(1),
            *k.strides,
            tables.stride(0),
            T * H,
            D**-0.5 * LOG2E,
            fewest,
            most,
            LEAST_KEYS,
            G,
            H // G,
            D,
            wide,
            block,
            k.bits,
            v.bits,
            rows,
            keys,
            splits > 1,
            num_warps=warps,
            num_stages=stages,
        )
        if splits > 1:
            _merge[H, most, B](
                out,
                part,
                peak,
                starts,
                splits,
                T * H,
                fewest,
                most,
                H,
                D,
                wide,
                MOST_SPLITS,
                num_warps=1,
            )
    return out


# ---- The demonstration: the kernels' resources, without a GPU. `… all`: two models, all tiles, sm_80 too -------------

MODELS = {
    "8B": (32, 8, 128),
    "3B": (24, 8, 128),
    "1B": (32, 8, 64),
    "wide": (16, 8, 256),
}  # H, G, D
MERGING = {
    "out": "*bf16",
    "parts peaks": "*fp32",
    "query_start": "*i32",
    "splits total fewest most": "i32",
}


def compile_attention(
    arch: int, model: str, bits: Sequence[int], rows: int, block: int = 16, kind: str = "bf16"
) -> Report:
    """The attention kernel for `rows` rows of type `kind`, and blocks of `block` tokens (0: one block a sequence)."""
    (H, G, D), (K, V), split, stored = (
        MODELS[model],
        bits,
        rows < 128,
        STORED | {16: (f"*{kind}", None, None)},
    )
    types = {
        "q out": f"*{kind}",
        "parts peaks": "*fp32" if split else f"*{kind}",
        "scale": "fp32",
        "table query_start lengths": "*i32",
        "q_token q_head block_stride": "i32:16",
        "token_stride table_stride total fewest most least": "i32",
    }
    types |= dict(zip(_attend.arg_names[4:10], stored[K] + stored[V]))
    M, N, warps, stages = tile_shape(
        rows, H // G, D, (K, V), block, arch, 4 if kind == "fp32" else 2
    )
    fixed = dict(
        G=G,
        R=H // G,
        D=D,
        WIDE=D,
        S=block,
        K_BITS=K,
        V_BITS=V,
        M=M,
        N=N,
        SPLIT=split,
        head_stride=1,
    )
    return compile_for(_attend, types, fixed, arch, warps, stages)


def attention_table(
    archs: Iterable[int], models: Iterable[str], rows: Sequence[int]
) -> list[list[Any]]:
    """For each kernel: architecture, model, bits, M, `Report`'s first four, wgmma, programs of a multiprocessor."""
    found = []
    for arch, model in product(archs, models):
        D = MODELS[model][2]
        made = [
            (f"{K}/{V}", M, compile_attention(arch, model, (K, V), M))
            for K, V in WIDTHS.values()
            for M in rows
        ]
        made += [
            (
                "merge",
                1,
                compile_for(_merge, MERGING, dict(H=32, D=D, WIDE=D, MOST=MOST_SPLITS), arch, 1),
            )
        ]
        found += [
            [arch, model, kind, M, *own[:4], own.count("wgmma.mma"), own.programs]
            for kind, M, own in made
        ]
    return found


if __name__ == "__main__":
    shown = (
        (SHARED, ("8B", "1B"), (16, 32, 64, 128))
        if "all" in sys.argv
        else ((90,), ("8B",), (16, 128))
    )
    print_table(
        "sm model K/V rows registers spills shared ahead wgmma programs", attention_table(*shown)
    )
