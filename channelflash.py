"""Flash attention over keys in 4 bits by channel, in place: finished groups as they are stored, a query's own group from the ring.

What kivi.py says by positions, told for a tile of rows whose newest is the token e and whose oldest a:

    keys        0 ··················· ⌊a / 16⌋ 16 ········ ⌊e / 16⌋ 16 ········ e
    in 4 bits   [ every row             ][ rows of later groups ]
    as they are                          [ rows of the same group, up to their own token ]

Both are parts of one softmax (flash.py). So a program walks over finished groups in tiles of N keys, then over the few groups that its own
rows are in, sixteen keys at a time, and the running maximum joins them. Where keys are split over programs, the last has the second walk,
for it has least of the first.

  - A channel's scale and zero are put on in registers (unpack.py), for what is multiplied has to be the number: a product sums over channels,
    so the scale cannot wait until after it; and on the query it would be another query for each group.
  - Raw keys of up to 17 new tokens, and of what their first group has by then, are in the ring once they are stored: 15 + 17 tokens. Of more,
    the ring keeps the last; these texts' raw keys are beside it, from the beginning of their first group on (`fresh`, channelstore.py).

Invariant: flash.py's, and that no row sees a key of its own group in 4 bits, or of another as it was.

Costs of a decoding step: keys D / 2 + 4 D / 16 and values D / 2 + 4 bytes a token and head, once; under a third of 16 bits'.

Not covered: keys of other groups than 16 tokens.

Liu et al. 2024, KIVI (arXiv:2402.02750).

    T tokens of a step · B sequences · H, G heads · R = H / G · D head size · S tokens of a block · M rows, N keys of a tile, F = N / 16 groups
"""
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from flash import LEAST_KEYS, LOG2E, LOWEST, MODELS, Launch, Pool, _finish, _grids, _queries, _weigh, capability, joined
from kvquant import GROUP, KVStore
from unpack import TOKENS, _channels

if TYPE_CHECKING:
    from crosscompile import Report

NEAR = GROUP + 1                                        # new tokens of a text whose raw keys, and those before them in the group, all are in its ring
RING = tl.constexpr(2 * GROUP)


@triton.jit
def _finished(start, end, base, x, own, o, drift, m, l, keys, k_scale, k_zero, v, v_scale, v_zero, table, g, groups, block_stride, token_stride, scale,
              G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, V_BITS: tl.constexpr, MASKED: tl.constexpr):
    """The finished groups of N keys from `start` on, which is a group's; of them rows x: [M, WIDE] see those before their own."""
    F: tl.constexpr = N // TOKENS
    i, f = tl.arange(0, N), tl.arange(0, F)
    group, token = start // TOKENS + i % F, i // F                                # of each key; neighbours are in different groups: unpack.py
    seen = group * TOKENS < end if MASKED else tl.full((N,), True, tl.int1)
    first = start // TOKENS + f
    there = first * TOKENS < end if MASKED else tl.full((F,), True, tl.int1)
    if S:
        EACH: tl.constexpr = S // TOKENS
        block, unit = tl.load(table + group // EACH, seen, 0).to(tl.int64), tl.load(table + first // EACH, there, 0).to(tl.int64)
        vectors = base + block * block_stride + (group % EACH * TOKENS + token) * token_stride
        group, first = block * EACH + group % EACH, unit * EACH + first % EACH
    else:
        block = tl.load(table).to(tl.int64)
        vectors = base + block * block_stride + (group * TOKENS + token) * token_stride
        group, first = block * groups + group, block * groups + first
    steps, zeros = _grids(v_scale, v_zero, vectors, seen, V_BITS)
    numbers = _channels(keys, k_scale, k_zero, (group * G + g) * TOKENS + token, first * G + g, seen, there, D, WIDE, F, x.dtype)
    scores = tl.dot(x, tl.trans(numbers), input_precision="tf32x3")                 # [M, N]
    if MASKED:
        before = start + i % F * TOKENS
        scores = tl.where(before[None, :] < own[:, None], scores, float("-inf"))
    return _weigh(scores, scale, seen, vectors, o, drift, m, l, v, steps, zeros, D, WIDE, V_BITS, x.dtype)


@triton.jit
def _own(start, end, base, x, position, o, drift, m, l, raw, v, v_scale, v_zero, table, block_stride, token_stride, scale,
         G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V_BITS: tl.constexpr):
    """The group from `start` on, for those of the rows x that are in it. raw: [16], where its keys are as they were."""
    token, d = tl.arange(0, TOKENS), tl.arange(0, WIDE)
    keys = start + token
    seen = keys < end
    if S:
        vectors = base + tl.load(table + start // S).to(tl.int64) * block_stride + (start % S + token) * token_stride
    else:
        vectors = base + tl.load(table).to(tl.int64) * block_stride + keys * token_stride
    steps, zeros = _grids(v_scale, v_zero, vectors, seen, V_BITS)
    k = tl.load(raw[:, None] + d[None, :], seen[:, None] & (d < D)[None, :], 0).to(x.dtype)                     # [16, WIDE]
    scores = tl.dot(x, tl.trans(k), input_precision="tf32x3")                       # [M, 16]
    scores = tl.where((keys[None, :] <= position[:, None]) & (start == position // TOKENS * TOKENS)[:, None], scores, float("-inf"))
    return _weigh(scores, scale, seen, vectors, o, drift, m, l, v, steps, zeros, D, WIDE, V_BITS, x.dtype)


@triton.jit(do_not_specialize=["table_stride", "total", "fewest", "most", "least", "groups"])
def _attend(q, out, parts, peaks, keys, k_scale, k_zero, ring, fresh, v, v_scale, v_zero, table, query_start, lengths, q_token, q_head, block_stride,
            token_stride, head_stride, table_stride, total, scale, fewest, most, least, groups, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
            WIDE: tl.constexpr, S: tl.constexpr, V_BITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, NEAR: tl.constexpr):
    """A program for (sequence and key/value head, M rows, a split). Sequences with fewer than `fewest` or over `most` queries are not this launch's."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    first = tl.load(query_start + b)
    n = tl.load(query_start + b + 1) - first
    tile = tl.cdiv(n * R, M) - 1 - tl.program_id(1)                               # the last tile has most to do: it begins
    if (n < fewest) | (n > most) | (tile < 0):
        return
    past = tl.load(lengths + b) - n
    x, token, head, position, inside, inner = _queries(q, first, n, past, tile, g, q_token, q_head, R, D, WIDE, M)
    table += b * table_stride
    base = g.to(tl.int64) * head_stride

    own = position // TOKENS * TOKENS                                             # [M]
    oldest = (past + tile * M // R) // TOKENS * TOKENS                            # of these
    last = past + tl.minimum(tile * M + M - 1, n * R - 1) // R
    begin, end = 0, last // TOKENS * TOKENS
    mine, stop = oldest, last + 1                                                 # what is read as it is
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(end, N), tl.num_programs(2)), tl.cdiv(least, N)) * N
        begin = tl.program_id(2) * share
        mine = tl.where(tl.program_id(2) == tl.num_programs(2) - 1, oldest, stop)
        end = tl.minimum(end, begin + share)
    o, drift = tl.zeros((M, WIDE), tl.float32), tl.zeros((M,), tl.float32)
    m, l = tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32)
    if M > 64:                                                                    # tiles that all rows see whole
        whole = tl.maximum(begin, tl.minimum(end, oldest) // N * N)
        for start in tl.range(begin, whole, N):
            o, drift, m, l = _finished(start, end, base, x, own, o, drift, m, l, keys, k_scale, k_zero, v, v_scale, v_zero, table, g, groups,
                                       block_stride, token_stride, scale, G, S, D, WIDE, N, V_BITS, False)
        begin = whole
    for start in tl.range(begin, end, N):
        o, drift, m, l = _finished(start, end, base, x, own, o, drift, m, l, keys, k_scale, k_zero, v, v_scale, v_zero, table, g, groups,
                                   block_stride, token_stride, scale, G, S, D, WIDE, N, V_BITS, True)
    kept = tl.load(table + table_stride - 1).to(tl.int64) * RING
    beside = first.to(tl.int64) + b * TOKENS - past // TOKENS * TOKENS
    for start in tl.range(mine, stop, TOKENS, num_stages=1):
        i = start + tl.arange(0, TOKENS)
        if n > NEAR:
            raw = fresh + ((beside + i) * G + g) * D
        else:
            raw = ring + ((kept + i % RING) * G + g) * D
        o, drift, m, l = _own(start, stop, base, x, position, o, drift, m, l, raw, v, v_scale, v_zero, table, block_stride, token_stride, scale,
                              G, S, D, WIDE, V_BITS)
    _finish(o, drift, m, l, token, head, inside, inner, out, parts, peaks, total, G * R, D, WIDE, V_BITS, SPLIT)


def shape(rows: int, wide: int, block: int, arch: int, size: int = 2) -> tuple[int, int, int]:
    """N, num_warps and num_stages for M rows of numbers of `size` bytes: as much in flight as registers and shared memory allow without spilling."""
    if size == 4:
        return 16, 4 if rows == 16 else 8, 2                                          # as in flash.py
    small, narrow = max(1, wide // 128), wide <= 64
    stages = 5 if block else 3                                                    # the table of blocks is read a tile earlier still
    if rows == 16:
        return (128 if arch >= 90 else 64) // small, 4, stages
    if rows <= 64:
        return (64 if rows == 32 or arch >= 90 else 32) // small, 4, stages
    return (64 if narrow and arch >= 90 else 32) // small, 8, 3


def attend(q: Tensor, keys: KVStore, ring: Tensor, fresh: Tensor, v: Pool, tables: Tensor, query_start: Tensor, lengths: Tensor,
           launches: Sequence[Launch], block: int = 0, out: Tensor | None = None) -> Tensor:
    """Causal attention of the newest tokens of B sequences, whose keys and values are stored.

    q: [T, H, D], of which sequence b has rows query_start[b] to query_start[b + 1]; keys: [N, F, G, 16, D], groups of one layer; ring:
    [texts, 32, G, D]; fresh: [T + 16 B, G, D], raw keys of the texts with over NEAR new tokens; lengths: int32[B], keys of each; tables:
    int32[B, most], the blocks of each, of `block` tokens (0: one block each), and in the last column its ring. -> [T, H, D]
    """
    H, D, G, groups = *q.shape[1:], ring.shape[2], keys.parts[0].shape[1]
    wide = max(32, triton.next_power_of_2(D))

    def one(launch: Launch, grid: tuple[int, int, int], out: Tensor, part: Tensor, peak: Tensor) -> None:
        N, warps, stages = shape(launch.rows, wide, block, capability(q.device), q.dtype.itemsize)
        _attend[grid](q, out, part, peak, *keys.parts, ring, fresh, *v[:3], tables, query_start, lengths, q.stride(0), q.stride(1), *v.strides,
                      tables.stride(0), len(q) * H, D ** -0.5 * LOG2E, launch.fewest, launch.most, LEAST_KEYS, groups, G, H // G, D, wide, block, v.bits,
                      launch.rows, N, launch.splits > 1, NEAR, num_warps=warps, num_stages=stages)
    return joined(one, q, G, query_start, launches, out)


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what the kernel needs of a GPU that is not there. `python channelflash.py all`: two models, all tiles, sm_80 too.

def compiled(arch: int, model: str, rows: int, block: int = 16, kind: str = "bf16") -> "Report":
    """The attention kernel for M rows of bfloat16 (or another kind), as it is compiled for blocks of `block` tokens (0: one block a text)."""
    from crosscompile import compile_for
    H, G, D = MODELS[model]
    N, warps, stages = shape(rows, D, block, arch, 4 if kind == "fp32" else 2)
    split = rows < 128
    types = dict.fromkeys(("q", "out", "ring", "fresh"), f"*{kind}") | dict(k_scale="*bf16", k_zero="*i16", v_scale="*bf16", v_zero="*i16")
    types |= dict.fromkeys(("table", "query_start", "lengths"), "*i32") | dict.fromkeys(("keys", "v"), "*u8")
    types |= dict.fromkeys(_attend.arg_names[15:27], "i32") | dict(q_token="i32:16", q_head="i32:16", block_stride="i32:16", scale="fp32")
    types |= dict.fromkeys(("parts", "peaks"), "*fp32" if split else f"*{kind}")
    fixed = dict(G=G, R=H // G, D=D, WIDE=D, S=block, V_BITS=4, M=rows, N=N, SPLIT=split, NEAR=NEAR) | {"head_stride" if block else "token_stride": 1}
    return compile_for(_attend, types, fixed, arch, warps, stages)


def table(archs: Sequence[int], models: Sequence[str], rows: Sequence[int]) -> list[list[Any]]:
    """A row for each kernel: architecture, model, M, registers, spills, shared memory, wgmma, mma, programs a multiprocessor has registers for."""
    found = []
    for arch, model, M in [(arch, model, M) for arch in archs for model in models for M in rows]:
        report = compiled(arch, model, M)
        found.append([arch, model, M, *report[:3], report.wgmma, report.count("mma.sync"), report.programs])
    return found


def main(*arguments: str) -> None:
    every = "all" in arguments
    print(f"{'':6}{'model':>6}{'rows':>6}{'registers':>11}{'spills':>8}{'shared':>9}{'wgmma':>7}{'mma':>5}{'programs':>10}")
    for arch, *row in table((90, 80) if every else (90,), list(MODELS) if every else ["8B"], (16, 32, 64, 128) if every else (16, 128)):
        print(f"sm_{arch:<3}" + "{:>6}{:6}{:11}{:8}{:9,}{:7}{:5}{:10}".format(*row))


if __name__ == "__main__":
    main(*sys.argv[1:])
