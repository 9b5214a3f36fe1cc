"""From logits to a token on a GPU: a row of 128,000 candidates in seven launches, unsorted.

sampling.py defines the result. Here a row is cut into pieces of PIECE candidates, with a program for each piece:

    _peaks   for each piece: the largest logit, its first index, and Σ exp((x − largest) / t)
    _weigh   from the peaks of all pieces: p_i = exp((x_i − max) / t) / Σ
    _gather  copies the likely candidates, those with at least 2⁻¹⁴ of the largest probability, side by side
    _edge    a program for each row: the smallest probability that the filters keep, and the sum of all that they keep
    _cut     the kept probabilities, divided by that sum; 0 for the others
    _race    for each piece: the largest p_i / E_i, with the coin's exponentials computed on the way
    _winner  for each row: the best of its pieces' largest

Without top-k, top-p and min-p there are four launches. No shape depends on a number, so a graph can record them all.

    top-k:   the largest v with   #{i: p_i ≥ v} ≥ k          top-p:   the largest v with   Σ_{p_i ≥ v} p_i ≥ p · total

The bits of float64 numbers from 0 to 1, read as 62-bit integers, are in the order of the numbers. So v is found from
its highest bits down, three bits in each pass: of eight numbers, the largest that satisfies the condition. These 21
passes read the likely candidates if they suffice, else the whole row. Of equal candidates the first are kept.

Invariant: the kept candidates, and the token picked with given noise, are those of sampling.py. (A sum within a
rounding of p · total may go either way.) Where logits are not finite, probabilities are NaN and the token is −1.
Cost: logits are read twice and probabilities written once; filters read probabilities twice and write them again. The
worst case is a flat row: one program reads it 21 times for top-k, and 21 times for top-p.

    B rows · V vocabulary · S pieces of a row
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.crosscompile import SHARED, compile_for, print_table
from sampling import GOLDEN, MIX1, MIX2, Setting, column

PIECE = 2048  # candidates of a row that a program holds in registers
TILE = 1024  # candidates that `_edge` reads at a time
LIKELY = tl.constexpr(2.0**-14)  # share of the largest probability from which one is likely
GOLDEN_, MIX1_, MIX2_ = tl.constexpr(GOLDEN), tl.constexpr(MIX1), tl.constexpr(MIX2)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _peaks(logits, temperature, peaks, V, S, stride, PIECE: tl.constexpr):
    """Piece s of row b -> peaks[b, s] = (largest, its first index, Σ exp((x − largest) / t)): float64[B, S, 3]."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = s * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + b * stride + at, mask=at < V, other=float("-inf")).to(tl.float64)
    t, high = tl.load(temperature + b), tl.max(x, 0)
    share = tl.exp((x - tl.where(high > float("-inf"), high, 0.0)) / tl.where(t == 0, 1.0, t))
    place = peaks + (b * S + s) * 3
    tl.store(place, high)
    tl.store(place + 1, tl.min(tl.where(x == high, at, V), 0).to(tl.float64))
    tl.store(place + 2, tl.sum(share, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _weigh(
    logits,
    temperature,
    peaks,
    out,
    counts,
    tops,
    V,
    S,
    stride,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    FILTER: tl.constexpr,
):
    """Piece s of row b -> its probabilities: out[b]; how many are likely: counts[b, s]; the row's largest: tops[b]."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, piece = s * PIECE + tl.arange(0, PIECE), tl.arange(0, PIECES)
    x = tl.load(logits + b * stride + at, mask=at < V, other=float("-inf")).to(tl.float64)
    t = tl.load(temperature + b)
    warm, place = tl.where(t == 0, 1.0, t), peaks + (b * S + piece) * 3
    highs = tl.load(place, mask=piece < S, other=float("-inf"))
    high = tl.max(highs, 0)
    first = tl.min(tl.where(highs == high, tl.load(place + 1, mask=piece < S, other=0.0), V), 0)
    total = tl.sum(tl.load(place + 2, mask=piece < S, other=0.0) * tl.exp((highs - high) / warm), 0)
    one_hot = (t == 0) & (total == total)  # NaN: the logits are not finite
    p = tl.where(one_hot, tl.where(at == first, 1.0, 0.0), tl.exp((x - high) / warm) * (1 / total))
    tl.store(out + b * V + at, p, mask=at < V)
    if FILTER:
        top = tl.where(t == 0, 1.0, 1 / total)
        tl.store(counts + b * S + s, tl.sum((p >= top * LIKELY).to(tl.int32), 0))
        tl.store(tops + b, top)


@triton.jit(do_not_specialize_on_alignment=["likely"])
def _gather(probs, tops, counts, likely, V, S, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Copy the likely candidates of piece s of row b to likely[b], behind those of the pieces before it."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, piece = s * PIECE + tl.arange(0, PIECE), tl.arange(0, PIECES)
    p = tl.load(probs + b * V + at, mask=at < V, other=-1.0)
    mine = p >= tl.load(tops + b) * LIKELY
    place = (
        tl.sum(tl.load(counts + b * S + piece, mask=piece < s, other=0), 0)
        + tl.cumsum(mine.to(tl.int32), 0)
        - 1
    )
    tl.store(likely + b * V + place, p, mask=mine)


@triton.jit
def _beyond(numbers, count, least, lowest, TILE: tl.constexpr):
    """Of `count` numbers: how many exceed `least`; the sum of these, if at least `lowest`; how many equal `least`."""
    above, mass, equal = (
        tl.zeros((TILE,), tl.float64),
        tl.zeros((TILE,), tl.float64),
        tl.zeros((TILE,), tl.float64),
    )
    for start in tl.range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        p = tl.load(numbers + at, mask=at < count, other=-1.0)
        above += tl.where(p > least, 1.0, 0.0)
        mass += tl.where((p > least) & (p >= lowest), p, 0.0)
        equal += tl.where(p == least, 1.0, 0.0)
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def _largest(numbers, count, target, MASS: tl.constexpr, TILE: tl.constexpr):
    """Of `count` numbers p: the largest v with #{p ≥ v} ≥ target (MASS: with Σ_{p ≥ v} p ≥ target), or 0."""
    known, digit = tl.zeros((8,), tl.int64), tl.arange(0, 8)
    for level in tl.range(21):
        tried = known + (digit.to(tl.int64) << (60 - 3 * level))
        v, total = tried.to(tl.float64, bitcast=True), tl.zeros((8,), tl.float64)
        for start in tl.range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            p = tl.load(numbers + at, mask=at < count, other=-1.0)
            total += tl.sum(tl.where(p[None, :] >= v[:, None], p[None, :] if MASS else 1.0, 0.0), 1)
        known = tl.zeros((8,), tl.int64) + tl.max(
            tl.where((digit == 0) | (total >= target), tried, 0), 0
        )
    return tl.max(known, 0).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["aside"], do_not_specialize_on_alignment=["k", "p", "m"])
def _edge(
    probs, aside, counts, tops, k, p, m, edges, V, S, PIECES: tl.constexpr, TILE: tl.constexpr
):
    """Row b -> edges[b] = (the smallest probability that is kept, how many equal ones are kept, min-p's threshold, the
    sum of all that are kept): float64[B, 4]. The likely candidates lie `aside` numbers behind the row; where they
    suffice, the row is not read."""
    b, piece = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    few = tl.sum(tl.load(counts + b * S + piece, mask=piece < S, other=0), 0)
    row, top, n = probs + b * V, tl.load(tops + b), tl.floor(tl.load(k + b))
    n = tl.where((n < 1) | (n > V), V, n)
    least, total = tl.zeros((), tl.float64), tl.full((), 1.0, tl.float64)
    if n < V:
        enough = few >= n
        numbers, count = row + tl.where(enough, aside, 0), tl.where(enough, few, V)
        least = _largest(numbers, count, n, False, TILE)
        above, mass, _ = _beyond(numbers, count, least, 0.0, TILE)
        total = mass + (n - above) * least  # mass left by top-k
    share = tl.load(p + b) * total
    if share < total:
        _, held, _ = _beyond(row + aside, few, 0.0, 0.0, TILE)
        enough = held >= share
        numbers, count = row + tl.where(enough, aside, 0), tl.where(enough, few, V)
        edge = _largest(numbers, count, share, True, TILE)
        above, mass, _ = _beyond(numbers, count, edge, 0.0, TILE)
        equals = tl.maximum(
            tl.ceil((share - mass) / edge), 1.0
        )  # how many equal `edge`; the quotient
        equals -= tl.where(
            (equals > 1) & (mass + (equals - 1) * edge >= share), 1.0, 0.0
        )  # may be rounded up
        n = tl.where(edge > 0, tl.minimum(n, above + equals), n)
        least = tl.maximum(least, edge)
    lowest = tl.load(m + b) * top
    enough = tl.maximum(least, lowest) >= top * LIKELY
    above, mass, equal = _beyond(
        row + tl.where(enough, aside, 0), tl.where(enough, few, V), least, lowest, TILE
    )
    place, ties = edges + b * 4, tl.minimum(n - above, equal)
    tl.store(place, least)
    tl.store(place + 1, tl.where(ties < equal, ties, V))
    tl.store(place + 2, lowest)
    tl.store(place + 3, mass + tl.where(least >= lowest, ties * least, 0.0))


@triton.jit
def _cut(probs, edges, out, V, PIECE: tl.constexpr, TILE: tl.constexpr):
    """Piece s of row b: out = p / (the kept sum) where p is kept, else 0."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, row, place = s * PIECE + tl.arange(0, PIECE), probs + b * V, edges + b * 4
    p = tl.load(row + at, mask=at < V, other=-1.0)
    least, ties, lowest, mass = (
        tl.load(place),
        tl.load(place + 1),
        tl.load(place + 2),
        tl.load(place + 3),
    )
    tie, before = p == least, tl.zeros((), tl.float64)
    if ties < V:  # of equal ones keep the first
        _, _, before = _beyond(row, s * PIECE, least, 0.0, TILE)
    keep = ((p > least) | (tie & (before + tl.cumsum(tie.to(tl.int32), 0) <= ties))) & (p >= lowest)
    tl.store(out + b * V + at, tl.where(keep | (p != p), p * (1 / mass), 0.0), mask=at < V)


def draw_probabilities(
    rows: Tensor,
    temperature: Setting,
    top_k: Setting,
    top_p: Setting,
    min_p: Setting,
    dtype: torch.dtype,
) -> Tensor:
    """`sampling.probabilities` on a GPU. rows: float[B, V] logits -> [B, V] in `dtype`."""
    (B, V), filters = rows.shape, not top_k is top_p is min_p is None
    empty = partial(torch.empty, device=rows.device, dtype=torch.float64)
    rows, S, out = (
        rows if rows.stride(1) == 1 else rows.contiguous(),
        triton.cdiv(V, PIECE),
        empty(B, V, dtype=dtype),
    )
    if rows.numel() == 0:
        return out
    pieces, peaks, stride = triton.next_power_of_2(S), empty(B, S, 3), rows.stride(0)
    t = column(1.0 if temperature is None else temperature, rows)
    _peaks[B, S](rows, t, peaks, V, S, stride, PIECE)
    if not filters:
        _weigh[B, S](rows, t, peaks, out, peaks, peaks, V, S, stride, pieces, PIECE, False)
        return out
    (probs, likely), counts, tops, edges = (
        empty(2, B, V),
        empty(B, S, dtype=torch.int32),
        empty(B),
        empty(B, 4),
    )
    k, p, m = (
        column(off if value is None else value, rows)
        for value, off in ((top_k, 0), (top_p, 1), (min_p, 0))
    )
    _weigh[B, S](rows, t, peaks, probs, counts, tops, V, S, stride, pieces, PIECE, True)
    _gather[B, S](probs, tops, counts, likely, V, S, pieces, PIECE)
    _edge[B,](probs, B * V, counts, tops, k, p, m, edges, V, S, pieces, TILE)
    _cut[B, S](probs, edges, out, V, PIECE, TILE)
    return out


@triton.jit
def _mix(z):
    """SplitMix64's finalizer, as sampling.py has it."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX1_
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX2_
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@triton.jit(do_not_specialize_on_alignment=["streams"])
def _race(probs, streams, best, V, S, stride, PIECE: tl.constexpr):
    """Piece s of row b -> best[b, s] = (its largest p_i / E_i, the first index of it): float64[B, S, 2]."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = s * PIECE + tl.arange(0, PIECE)
    p = tl.load(probs + b * stride + at, mask=at < V, other=-1.0).to(tl.float64)
    begin = _mix(tl.load(streams + b + tl.arange(0, 1)))  # [1]
    bits = _mix(begin + (at + 1).to(tl.int64) * GOLDEN_)
    u = ((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) * 2.0**-52 + 2.0**-53  # in (0, 1)
    speed = p / -tl.log(u)
    high = tl.max(speed, 0)
    tl.store(best + (b * S + s) * 2, high)
    tl.store(best + (b * S + s) * 2 + 1, tl.min(tl.where(speed == high, at, V), 0).to(tl.float64))


@triton.jit
def _winner(best, out, V, S, PIECES: tl.constexpr):
    b, piece = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    place = best + (b * S + piece) * 2
    speed = tl.load(place, mask=piece < S, other=-1.0)
    where, fastest = tl.load(place + 1, mask=piece < S, other=0.0), tl.max(speed, 0)
    tl.store(
        out + b,
        tl.where(fastest >= 0, tl.min(tl.where(speed == fastest, where, V), 0), -1.0).to(tl.int64),
    )


def draw_token(probs: Tensor, streams: Tensor) -> Tensor:
    """`sampling.pick` on a GPU. probs: float[B, V]; streams: int64[B, 1], the key of each row's noise -> int64[B]."""
    (B, V), d, S = probs.shape, probs.device, triton.cdiv(probs.shape[1], PIECE)
    probs = probs if probs.stride(1) == 1 else probs.contiguous()
    out, best = (
        torch.zeros(B, dtype=torch.int64, device=d),
        torch.empty(B, S, 2, dtype=torch.float64, device=d),
    )
    if probs.numel():
        _race[B, S](probs, streams.expand(B, 1).contiguous(), best, V, S, probs.stride(0), PIECE)
        _winner[B,](best, out, V, S, triton.next_power_of_2(S))
    return out


# ---- The demonstration: the kernels' resources, compiled without a GPU -----------------------------------------------


def compile_sampling(V: int, logits: str = "bf16", arch: int = 90) -> dict[str, list[int]]:
    """Kernel -> its registers, spills and shared memory, for a vocabulary of V."""
    types = {
        "V S stride aside": "i32",
        "temperature peaks likely tops k p m edges best probs out": "*fp64",
        "logits": f"*{logits}",
        "counts": "*i32",
        "streams": "*i64",
    }
    own = {_cut: {"out": "*fp32"}, _race: {"probs": "*fp32"}, _winner: {"out": "*i64"}}
    fixed = dict(
        PIECES=triton.next_power_of_2(triton.cdiv(V, PIECE)), PIECE=PIECE, TILE=TILE, FILTER=True
    )
    return {
        kernel.__name__: list(compile_for(kernel, types | own.get(kernel, {}), fixed, arch)[:3])
        for kernel in (_peaks, _weigh, _gather, _edge, _cut, _race, _winner)
    }


if __name__ == "__main__":
    found = (
        (arch, name, *numbers)
        for arch in SHARED
        for name, numbers in compile_sampling(128256, arch=arch).items()
    )
    print_table("sm kernel registers spills shared", found)
