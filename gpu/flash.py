"""flash.py's kernel, and what makes it fast: one for prompts, chunks, verification, single tokens.

The equation and its letters are flash.py's: a program takes some rows (new tokens times the R = H /
G heads that share a key/value head), walks over their keys in tiles, and keeps of each row `top`,
`l` and `o`. What is added:

  - A table of blocks says where the keys are. A contiguous cache has one block of max_len tokens
    for each text.
  - INT8 and INT4 are unpacked in registers (unpack.py). A vector with a single scale enters the
    product as integers: a key's scale multiplies its column of scores, a value's scale its weights,
    and the zeros z of 4-bit values are subtracted once: Σ_j p_j (v_j − z_j) = o − drift, where
    drift = Σ_j p_j z_j. 16 bits hold these integers exactly: keys as float16, with rows of q
    divided by their largest number; values as bfloat16. 4-bit keys are dequantized to q's type.
  - Few queries with a long past would occupy few programs. So the keys are split, each split writes
    (o / l, top + log2 l) and counts itself, and the last to arrive weighs all of them in order
    (Flash-Decoding, without its second launch). Their number follows from shapes that the host
    knows. A split without keys writes (0, −∞) and weighs nothing, so a captured graph stays valid
    while texts grow. The counters are 0 before: the kernel that stores the keys clears them.
  - A step has one launch for sequences of few rows (tiles of 16 to 64) and one for sequences of
    many (tiles of 128). A tile of many rows has keys that all rows see: these need no mask.
  - float32 products are computed as three tf32 products (`tf32x3`), which leave out less than 2⁻²⁰.

Invariant: slots that belong to no sequence of the step, in the cache or in `out`, affect no result
and stay unwritten.
Scratch of a split: T · H · D float32 numbers, T of the whole step.
Costs of a decoding step: K and V once, 2 · keys · G · D · bytes, and 4 · H · D bytes a split,
written and read; of a prompt of n: 2 · n² · H · D operations, half of 4 n² H D. One launch for each
kind.
Not covered: tensor maps and specialized warps (FlashAttention-3), better for prompts on sm_90;
sliding windows.

Dao et al. 2022 (arXiv:2205.14135); Dao 2023, FlashAttention-2 (2307.08691); Dao et al. 2023,
Flash-Decoding.

    T tokens of a step · B sequences · H, G heads · D head size, WIDE a power of 2 from it on
    S tokens of a block · ROWS, KEYS of a tile
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import gpu.tuning as tuning
from gpu.tuning import MERGED, Launch
from gpu.unpack import _numbers, _steps

LOWEST = tl.constexpr(-1e30)  # below every score; unlike −∞ it may be subtracted from itself
LOG2E = 1.4426950408889634


@triton.jit
def _walk(
    begin,
    end,
    queries,
    keys,
    values,
    place,
    state,
    D: tl.constexpr,
    S: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """flash.py's loop over the keys from `begin` to `end`, a tile at a time; MASKED: some rows do
    not see some of them, or `end` is inside a tile.

    queries: x [ROWS, WIDE], their positions, and the scale of their scores. keys, values: a pool,
    its scales, its zeros. place: where the vectors are. -> the new state.
    """
    x, position, score_scale = queries
    k, k_scale, k_zero = keys
    v, v_scale, v_zero = values
    base, block_table, block_stride, token_stride = place
    WIDE: tl.constexpr = x.shape[1]
    top, l, o, drift = state
    for start in tl.range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)  # positions of the keys
        visible = j < end if MASKED else tl.full((KEYS,), True, tl.int1)
        if S:
            block = tl.load(block_table + j // S, visible, 0).to(tl.int64)
            vectors = base + block * block_stride + j % S * token_stride
        else:
            vectors = base + j * token_stride  # [KEYS], int64
        # scales and zeros: too small for asynchronous copies, so they are loaded early, used last
        steps = tl.load(v_scale + vectors, visible, 0) if V_BITS < 16 else 0  # [KEYS]
        zeros = tl.load(v_zero + vectors, visible, 0) if V_BITS == 4 else 0
        if K_BITS == 4:
            numbers = _numbers(k, k_scale, k_zero, vectors, visible, D, WIDE, x.dtype)
        else:
            numbers = _steps(k, vectors, visible, D, WIDE, K_BITS, x.dtype)
        s = tl.dot(x, tl.trans(numbers), input_precision="tf32x3")  # [ROWS, KEYS]
        scale = score_scale
        if K_BITS == 8:
            s *= tl.load(k_scale + vectors, visible, 0).to(tl.float32)[None, :]
            s *= score_scale
            scale = 1.0
        if MASKED:
            s = tl.where(j[None, :] <= position[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        l = l * fade + tl.sum(p, 1)
        if V_BITS == 16:
            wide: tl.constexpr = v.dtype.element_ty
        else:
            wide: tl.constexpr = tl.float32 if x.dtype == tl.float32 else tl.bfloat16
            p *= steps.to(tl.float32)[None, :]
        weights = p.to(wide)
        if V_BITS == 4:
            bias: tl.constexpr = 16 if wide == tl.bfloat16 else 0  # of `_steps`
            zero = zeros.to(tl.float32) + bias
            drift = drift * fade + tl.sum(weights.to(tl.float32) * zero[None, :], 1)
        numbers = _steps(v, vectors, visible, D, WIDE, V_BITS, wide)  # [KEYS, WIDE]
        o = tl.dot(weights, numbers, o * fade[:, None], input_precision="tf32x3")
        top = higher
    return top, l, o, drift


@triton.jit
def _merge(
    out,
    parts,
    peaks,
    origin,
    row,
    end_row,
    total,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out = Σ_s 2^peak_s part_s / Σ_s 2^peak_s for the rows from `row` to `end_row`.

    Some rows and splits at a time, always in the same order.
    """
    SOME: tl.constexpr = ROWS // 4
    SPLITS: tl.constexpr = max(1, MERGED // SOME)
    splits = tl.num_programs(2)
    split = tl.arange(0, SPLITS)[:, None, None]
    d = tl.arange(0, WIDE)[None, None, :]
    while row < end_row:
        rows = row + tl.arange(0, SOME)[None, :, None]
        index = origin + rows // R * H + rows % R  # [1, SOME, 1], of T · H
        l = tl.zeros((SPLITS, SOME, 1), tl.float32)
        top = l + LOWEST
        o = tl.zeros((SPLITS, SOME, WIDE), tl.float32)
        for start in tl.range(0, splits, SPLITS, num_stages=4):
            part = index + (start + split) * total  # [SPLITS, SOME, 1]
            mask = (rows < end_row) & (start + split < splits)
            # others wrote: ".cg" reads past this multiprocessor's own cache
            peak = tl.load(peaks + part, mask, float("-inf"), cache_modifier=".cg")
            numbers = tl.load(parts + part * D + d, mask & (d < D), 0, cache_modifier=".cg")
            higher = tl.maximum(top, peak)
            fade = tl.exp2(top - higher)
            weight = tl.exp2(peak - higher)
            l = l * fade + weight
            o = o * fade + weight * numbers
            top = higher
        weight = tl.exp2(top - tl.max(top, 0, keep_dims=True))
        l = tl.maximum(tl.sum(l * weight, 0, keep_dims=True), 1.0)  # l ≥ 1 where there are keys
        o = tl.sum(o * weight, 0, keep_dims=True) / l  # [1, SOME, WIDE]
        mask = (rows < end_row) & (d < D)
        tl.store(out + index * D + d, o.to(out.dtype.element_ty), mask)
        row += SOME


# Triton compiles a kernel again for arguments that are 1, or multiples of 16, but not for these:
@triton.jit(
    do_not_specialize=["table_stride", "total", "fewest", "most", "least"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens", "seq_lens"],
)
def _attend(
    q,
    out,
    parts,
    peaks,
    arrivals,
    k,
    k_scale,
    k_zero,
    v,
    v_scale,
    v_zero,
    block_tables,
    cu_seqlens,
    seq_lens,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program for (sequence and key/value head, ROWS rows, a split), of sequences with `fewest`
    to `most` queries.
    """
    tuning.begin_early(EARLY)
    b = tl.program_id(0) // G
    g = tl.program_id(0) % G
    first = tl.load(cu_seqlens + b)
    n = tl.load(cu_seqlens + b + 1) - first
    tile = tl.cdiv(n * R, ROWS) - 1 - tl.program_id(1)  # the last tile has most keys: it begins
    if (n < fewest) | (n > most) | (tile < 0):
        return
    past = tl.load(seq_lens + b) - n
    first_row = tile * ROWS
    row = first_row + tl.arange(0, ROWS)  # [ROWS]: of the sequence's n · R
    d = tl.arange(0, WIDE)
    token = first + row // R
    head = g * R + row % R
    position = past + row // R
    end_row = tl.minimum(first_row + ROWS, n * R)
    row_mask = row < end_row
    mask = row_mask[:, None] & (d < D)[None, :]  # [ROWS, WIDE]
    query = token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head
    x = tl.load(q + query + d[None, :], mask, 0)  # [ROWS, WIDE]
    if K_BITS == 8 and x.dtype != tl.float32:  # x into float16's range
        largest = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-30)[:, None]
        x = (x.to(tl.float32) / largest).to(tl.float16)
        scale = scale * largest  # [ROWS, 1]
    block_table = block_tables + b * table_stride
    base = g.to(tl.int64) * head_stride
    if not S:
        base += tl.load(block_table).to(tl.int64) * block_stride
    queries = (x, position, scale)
    keys = (k, k_scale, k_zero)
    values = (v, v_scale, v_zero)
    place = (base, block_table, block_stride, token_stride)

    begin = 0
    end = past + (end_row - 1) // R + 1  # the keys that the last row sees
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, KEYS), tl.num_programs(2))
        share = tl.maximum(share, tl.cdiv(least, KEYS)) * KEYS
        begin = tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
    zeros = tl.zeros((ROWS,), tl.float32)
    state = (zeros + LOWEST, zeros, tl.zeros((ROWS, WIDE), tl.float32), zeros)
    if ROWS > 64:
        seen_by_all = tl.minimum(end, past + first_row // R + 1) // KEYS * KEYS
        stop = tl.maximum(begin, seen_by_all)
        state = _walk(
            begin, stop, queries, keys, values, place, state, D, S, K_BITS, V_BITS, KEYS, False
        )
        begin = stop
    state = _walk(begin, end, queries, keys, values, place, state, D, S, K_BITS, V_BITS, KEYS, True)
    top, l, o, drift = state
    if V_BITS == 4:
        o -= drift[:, None]
    o /= tl.where(l > 0, l, 1.0)[:, None]  # padding has no keys: 0, never NaN
    H: tl.constexpr = G * R
    index = token.to(tl.int64) * H + head  # [ROWS], of T · H
    if SPLIT:
        part = index + tl.program_id(2) * total
        tl.store(peaks + part, top + tl.log2(l), row_mask)
        tl.store(parts + part[:, None] * D + d[None, :], o, mask)
        tl.debug_barrier()  # all threads have written
        # n tokens have at most n tiles, as R ≤ ROWS: each tile has a counter of its own
        counter = arrivals + (first + tile) * G + g
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(2) - 1:
            origin = (first.to(tl.int64) * G + g) * R
            _merge(out, parts, peaks, origin, first_row, end_row, total, H, R, D, WIDE, ROWS)
    else:
        tl.store(out + index[:, None] * D + d[None, :], o.to(out.dtype.element_ty), mask)


# ---- Launches ------------------------------------------------------------------------------------


class LayerStore(NamedTuple):
    """Keys or values of one layer, [blocks, S, G, D], as a kernel reads them: numbers, or integers
    with scales and zeros.
    """

    steps: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bits: int  # 16: not quantized
    strides: tuple[int, int, int]  # of a block, a token, a head, in vectors

    @classmethod
    def of(cls, store: Any, layer: int) -> "LayerStore":
        parts = [part[layer] for part in store.parts]
        missing = [None] * (3 - len(parts))
        width = parts[0].shape[-1]
        strides = tuple(stride // width for stride in parts[0].stride()[:3])
        return cls(*parts, *missing, store.bits, strides)


def flash_attention(
    q: Tensor,
    k: LayerStore,
    v: LayerStore,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    launches: Sequence[Launch],
    block: int = 0,
    out: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of B sequences over their stored keys and values.

    q: [T, H, D], sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1]; seq_lens: int32[B], new
    keys included; block_tables: int32[B, blocks], of `block` tokens (0: one block a sequence). ->
    [T, H, D]; rows of no sequence are not written.
    """
    T, H, D = q.shape
    G = k.steps.shape[-2]
    B = len(cu_seqlens) - 1
    R = H // G
    device = q.device
    if out is None:
        out = torch.empty((T, H, D), dtype=q.dtype, device=device)
    if arrivals is None:
        arrivals = torch.zeros(T, G, dtype=torch.int32, device=device)
    wide = max(tuning.LEAST_DEPTH, triton.next_power_of_2(D))
    for fewest, most, rows, splits in launches:
        arch = tuning.capability(device)
        shape = tuning.tile_shape(rows, R, D, (k.bits, v.bits), block, arch, q.dtype.itemsize)
        rows, keys, warps, stages, registers = shape
        if R > rows:  # tiles of one token would share a counter
            splits = 1
        parts = out
        peaks = out
        if splits > 1:
            parts = torch.empty(splits * T * H * D, dtype=torch.float32, device=device)
            peaks = torch.empty(splits * T * H, dtype=torch.float32, device=device)
        early = tuning.starts_early(device, rows <= 64 and splits > 1)
        _attend[B * G, triton.cdiv(most * R, rows), splits](
            q,
            out,
            parts,
            peaks,
            arrivals,
            *k[:3],
            *v[:3],
            block_tables,
            cu_seqlens,
            seq_lens,
            q.stride(0),
            q.stride(1),
            *k.strides,
            block_tables.stride(0),
            T * H,
            D**-0.5 * LOG2E,
            fewest,
            most,
            tuning.LEAST_KEYS,
            G,
            R,
            D,
            wide,
            block,
            k.bits,
            v.bits,
            rows,
            keys,
            splits > 1,
            early,
            num_warps=warps,
            num_stages=stages,
            maxnreg=registers,
            launch_pdl=early,
        )
    return out
