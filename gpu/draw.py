"""From logits to a token on a GPU: a row of 128,000 candidates in seven launches, unsorted.

sampling.py defines the result. Here a row is cut into pieces of PIECE candidates, with a program
for each piece:

    _peaks   for each piece: the largest logit, its first index, and Σ exp((x − largest) / t)
    _weigh   from the peaks of all pieces: p_i = exp((x_i − max) / t) / Σ
    _gather  copies likely candidates, with at least 2⁻¹⁴ of the largest probability, side by side
    _edge    for each row: the smallest probability that the filters keep, and the sum of all kept
    _cut     the kept probabilities, divided by that sum; 0 for the others
    _race    for each piece: the largest p_i / E_i, with the rng's exponentials computed on the way
    _winner  for each row: the best of its pieces' largest

Without top-k, top-p and min-p there are four launches. No shape depends on a number, so a graph can
record them all.

    top-k:   the largest v with   #{i: p_i ≥ v} ≥ k
    top-p:   the largest v with   Σ_{p_i ≥ v} p_i ≥ p · total

The bits of float64 numbers from 0 to 1, read as 62-bit integers, are in the order of the numbers.
So v is found from its highest bits down, three bits in each pass: of eight numbers, the largest
that satisfies the condition. These 21 passes read the likely candidates if they suffice, else the
full row. Of equal candidates the first are kept.

Invariant: the kept candidates, and the token picked with given noise, are those of sampling.py. (A
sum within a rounding of p · total may go either way.) Where logits are not finite, probabilities
are NaN and the token is −1.
Cost: logits are read twice and probabilities written once; filters read probabilities twice and
write them again. The worst case is a flat row: one program reads it 21 times for top-k, and 21
times for top-p.

    B rows · V vocabulary · S pieces of a row
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.tuning import PIECE, TILE
from sampling import GOLDEN, MIX1, MIX2, Setting, column

SUPPORTED = {"temperature", "top_k", "top_p", "min_p"}  # settings of `draw_probabilities`
LIKELY = tl.constexpr(2.0**-14)  # share of the largest probability from which one is likely
GOLDEN_ = tl.constexpr(GOLDEN)
MIX1_ = tl.constexpr(MIX1)
MIX2_ = tl.constexpr(MIX2)


# ---- Probabilities -------------------------------------------------------------------------------


@triton.jit
def _piece(V, PIECE: tl.constexpr):
    """This program's row and piece; the indices of the piece, and which of them exist."""
    b = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    i = s * PIECE + tl.arange(0, PIECE)
    return b, s, i, i < V


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _peaks(
    logits,
    temperature,
    peaks,
    V,
    S,
    stride,
    PIECE: tl.constexpr,
):
    """Piece s of row b -> peaks[b, s]: largest, its first index, Σ exp((x − largest) / t).
    float64[B, S, 3]
    """
    b, s, i, inside = _piece(V, PIECE)
    x = tl.load(logits + b * stride + i, inside, float("-inf"))
    x = x.to(tl.float64)
    t = tl.load(temperature + b)
    high = tl.max(x, 0)
    base = tl.where(high > float("-inf"), high, 0.0)
    divisor = tl.where(t == 0, 1.0, t)
    weights = tl.exp((x - base) / divisor)
    first = tl.min(tl.where(x == high, i, V), 0)
    peak = peaks + (b * S + s) * 3
    tl.store(peak, high)
    tl.store(peak + 1, first.to(tl.float64))
    tl.store(peak + 2, tl.sum(weights, 0))


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
    """Piece s of row b -> its probabilities: out[b]; its likely ones: counts[b, s]; the row's
    largest: tops[b].
    """
    b, s, i, inside = _piece(V, PIECE)
    piece = tl.arange(0, PIECES)  # all pieces of the row
    exists = piece < S
    x = tl.load(logits + b * stride + i, inside, float("-inf"))
    x = x.to(tl.float64)
    t = tl.load(temperature + b)
    divisor = tl.where(t == 0, 1.0, t)
    peak = peaks + (b * S + piece) * 3
    highs = tl.load(peak, exists, float("-inf"))
    high = tl.max(highs, 0)
    firsts = tl.load(peak + 1, exists, 0.0)
    first = tl.min(tl.where(highs == high, firsts, V), 0)
    sums = tl.load(peak + 2, exists, 0.0)
    fades = tl.exp((highs - high) / divisor)
    total = tl.sum(sums * fades, 0)
    p = tl.exp((x - high) / divisor) * (1 / total)
    finite = total == total  # not NaN
    one_hot = tl.where(i == first, 1.0, 0.0)
    p = tl.where((t == 0) & finite, one_hot, p)
    tl.store(out + b * V + i, p, inside)
    if FILTER:
        top = tl.where(t == 0, 1.0, 1 / total)
        is_likely = p >= top * LIKELY
        tl.store(counts + b * S + s, tl.sum(is_likely.to(tl.int32), 0))
        tl.store(tops + b, top)


# ---- Filters -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["likely"])
def _gather(
    probs,
    tops,
    counts,
    likely,
    V,
    S,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Copy the likely candidates of piece s of row b to likely[b], behind those of the pieces
    before it.
    """
    b, s, i, inside = _piece(V, PIECE)
    piece = tl.arange(0, PIECES)
    p = tl.load(probs + b * V + i, inside, -1.0)
    top = tl.load(tops + b)
    is_likely = p >= top * LIKELY
    counts_before = tl.load(counts + b * S + piece, piece < s, 0)
    rank = tl.cumsum(is_likely.to(tl.int32), 0)  # 1 for the first
    target = tl.sum(counts_before, 0) + rank - 1
    tl.store(likely + b * V + target, p, is_likely)


@triton.jit
def _beyond(numbers, count, least, lowest, TILE: tl.constexpr):
    """Of `count` numbers: how many exceed `least`; the sum of these from `lowest` on; how many
    equal `least`.
    """
    above = tl.zeros((TILE,), tl.float64)
    mass = tl.zeros((TILE,), tl.float64)
    equal = tl.zeros((TILE,), tl.float64)
    for start in tl.range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        p = tl.load(numbers + i, i < count, -1.0)
        more = p > least
        above += tl.where(more, 1.0, 0.0)
        mass += tl.where(more & (p >= lowest), p, 0.0)
        equal += tl.where(p == least, 1.0, 0.0)
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def _largest(numbers, count, target, MASS: tl.constexpr, TILE: tl.constexpr):
    """Of `count` numbers p: the largest v with #{p ≥ v} ≥ target (MASS: with Σ_{p ≥ v} p ≥ target),
    or 0.
    """
    prefix = tl.zeros((8,), tl.int64)  # the bits found so far
    digit = tl.arange(0, 8)
    for level in tl.range(21):
        bits = prefix + (digit.to(tl.int64) << (60 - 3 * level))
        v = bits.to(tl.float64, bitcast=True)
        total = tl.zeros((8,), tl.float64)
        for start in tl.range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            p = tl.load(numbers + i, i < count, -1.0)
            counted = p[None, :] >= v[:, None]  # [8, TILE]
            unit = p[None, :] if MASS else 1.0
            total += tl.sum(tl.where(counted, unit, 0.0), 1)
        enough = (digit == 0) | (total >= target)
        best = tl.max(tl.where(enough, bits, 0), 0)
        prefix = tl.zeros((8,), tl.int64) + best
    found_bits = tl.max(prefix, 0)
    return found_bits.to(tl.float64, bitcast=True)


@triton.jit
def _choose(row, aside, num_likely, V, enough):
    """Where to read, and how many numbers: the likely candidates if they are enough, else the full
    row.
    """
    numbers = row + tl.where(enough, aside, 0)
    count = tl.where(enough, num_likely, V)
    return numbers, count


@triton.jit(do_not_specialize=["aside"], do_not_specialize_on_alignment=["k", "p", "m"])
def _edge(
    probs,
    aside,
    counts,
    tops,
    k,
    p,
    m,
    edges,
    V,
    S,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Row b -> edges[b]: the smallest kept probability, how many equal ones are kept (V: all),
    min-p's threshold, the sum of all kept ones. float64[B, 4]. The likely candidates lie `aside`
    numbers behind probs.
    """
    b = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    likely_counts = tl.load(counts + b * S + piece, piece < S, 0)
    num_likely = tl.sum(likely_counts, 0)
    row = probs + b * V
    top = tl.load(tops + b)
    n = tl.floor(tl.load(k + b))  # candidates to keep
    keeps_all = (n < 1) | (n > V)
    n = tl.where(keeps_all, V, n)
    least = tl.zeros((), tl.float64)
    total = tl.full((), 1.0, tl.float64)  # mass that top-k leaves
    if n < V:
        numbers, count = _choose(row, aside, num_likely, V, num_likely >= n)
        least = _largest(numbers, count, n, False, TILE)
        above, mass, _ = _beyond(numbers, count, least, 0.0, TILE)
        total = mass + (n - above) * least
    wanted = tl.load(p + b) * total
    if wanted < total:
        _, likely_mass, _ = _beyond(row + aside, num_likely, 0.0, 0.0, TILE)
        numbers, count = _choose(row, aside, num_likely, V, likely_mass >= wanted)
        edge = _largest(numbers, count, wanted, True, TILE)
        above, mass, _ = _beyond(numbers, count, edge, 0.0, TILE)
        missing = wanted - mass
        equals = tl.maximum(tl.ceil(missing / edge), 1.0)  # how many that equal `edge` are kept
        mass_of_fewer = mass + (equals - 1) * edge
        rounded_up = (equals > 1) & (mass_of_fewer >= wanted)  # the quotient was
        equals -= tl.where(rounded_up, 1.0, 0.0)
        n = tl.where(edge > 0, tl.minimum(n, above + equals), n)
        least = tl.maximum(least, edge)
    lowest = tl.load(m + b) * top
    enough = tl.maximum(least, lowest) >= top * LIKELY
    numbers, count = _choose(row, aside, num_likely, V, enough)
    above, mass, equal = _beyond(numbers, count, least, lowest, TILE)
    ties = tl.minimum(n - above, equal)
    most_ties = tl.where(ties < equal, ties, V)
    mass_of_ties = tl.where(least >= lowest, ties * least, 0.0)
    target = edges + b * 4
    tl.store(target, least)
    tl.store(target + 1, most_ties)
    tl.store(target + 2, lowest)
    tl.store(target + 3, mass + mass_of_ties)


@triton.jit
def _cut(probs, edges, out, V, PIECE: tl.constexpr, TILE: tl.constexpr):
    """Piece s of row b: out = p / (the kept sum) where p is kept, else 0."""
    b, s, i, inside = _piece(V, PIECE)
    row = probs + b * V
    edge = edges + b * 4
    p = tl.load(row + i, inside, -1.0)
    least = tl.load(edge)
    ties = tl.load(edge + 1)
    lowest = tl.load(edge + 2)
    mass = tl.load(edge + 3)
    tie = p == least
    before = tl.zeros((), tl.float64)
    if ties < V:  # of equal ones keep the first
        _, _, before = _beyond(row, s * PIECE, least, 0.0, TILE)
    rank = before + tl.cumsum(tie.to(tl.int32), 0)  # among equal ones
    first_ties = tie & (rank <= ties)
    keep = ((p > least) | first_ties) & (p >= lowest)
    not_finite = p != p
    share = tl.where(keep | not_finite, p * (1 / mass), 0.0)
    tl.store(out + b * V + i, share, inside)


def draw_probabilities(
    logits: Tensor,
    temperature: Setting = 1.0,
    top_k: Setting = None,
    top_p: Setting = None,
    min_p: Setting = None,
) -> Tensor:
    """`sampling.probabilities` on a GPU. logits: [B, V] -> float32[B, V], float64 if the logits are
    float64.
    """
    B, V = logits.shape
    S = triton.cdiv(V, PIECE)
    pieces = triton.next_power_of_2(S)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    device = logits.device
    out = torch.empty(B, V, device=device, dtype=dtype)
    if out.numel() == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    stride = logits.stride(0)
    peaks = torch.empty(B, S, 3, device=device, dtype=torch.float64)
    t = column(1.0 if temperature is None else temperature, logits)
    _peaks[B, S](
        logits,
        t,
        peaks,
        V,
        S,
        stride,
        PIECE,
    )
    filters = top_k is not None or top_p is not None or min_p is not None
    probs = out
    counts = tops = peaks  # not written
    if filters:
        both = torch.empty(2, B, V, device=device, dtype=torch.float64)
        probs, likely = both
        counts = torch.empty(B, S, device=device, dtype=torch.int32)
        tops = torch.empty(B, device=device, dtype=torch.float64)
    _weigh[B, S](
        logits,
        t,
        peaks,
        probs,
        counts,
        tops,
        V,
        S,
        stride,
        pieces,
        PIECE,
        filters,
    )
    if not filters:
        return out
    edges = torch.empty(B, 4, device=device, dtype=torch.float64)
    k = column(0 if top_k is None else top_k, logits)
    p = column(1 if top_p is None else top_p, logits)
    m = column(0 if min_p is None else min_p, logits)
    _gather[B, S](
        probs,
        tops,
        counts,
        likely,
        V,
        S,
        pieces,
        PIECE,
    )
    _edge[B,](
        probs,
        B * V,
        counts,
        tops,
        k,
        p,
        m,
        edges,
        V,
        S,
        pieces,
        TILE,
    )
    _cut[B, S](probs, edges, out, V, PIECE, TILE)
    return out


# ---- The pick ------------------------------------------------------------------------------------


@triton.jit
def _mix(z):
    """SplitMix64's finalizer, as in sampling.py. Its shifts bring in zeros, Triton's copies of the
    sign.
    """
    z ^= (z >> 30) & 0x3FFFFFFFF
    z *= MIX1_
    z ^= (z >> 27) & 0x1FFFFFFFFF
    z *= MIX2_
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize_on_alignment=["streams"])
def _race(
    probs,
    streams,
    best,
    V,
    S,
    stride,
    PIECE: tl.constexpr,
):
    """Piece s of row b -> best[b, s] = (its largest p_i / E_i, the first index of it): float64[B,
    S, 2].
    """
    b, s, i, inside = _piece(V, PIECE)
    p = tl.load(probs + b * stride + i, inside, -1.0)
    p = p.to(tl.float64)
    key = tl.load(streams + b + tl.arange(0, 1))  # [1]
    count = (i + 1).to(tl.int64)
    bits = _mix(_mix(key) + count * GOLDEN_)
    mantissa = (bits >> 12) & 0xFFFFFFFFFFFFF
    u = mantissa.to(tl.float64) * 2.0**-52 + 2.0**-53  # in (0, 1)
    speed = p / -tl.log(u)
    high = tl.max(speed, 0)
    first = tl.min(tl.where(speed == high, i, V), 0)
    entry = best + (b * S + s) * 2
    tl.store(entry, high)
    tl.store(entry + 1, first.to(tl.float64))


@triton.jit
def _winner(best, out, V, S, PIECES: tl.constexpr):
    """Row b -> out[b]: the index of the largest p_i / E_i of all pieces; −1 if p is NaN."""
    b = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    exists = piece < S
    entry = best + (b * S + piece) * 2
    speed = tl.load(entry, exists, -1.0)
    index = tl.load(entry + 1, exists, 0.0)
    fastest = tl.max(speed, 0)
    winner = tl.min(tl.where(speed == fastest, index, V), 0)
    token = tl.where(fastest >= 0, winner, -1.0)
    tl.store(out + b, token.to(tl.int64))


def draw_token(probs: Tensor, streams: Tensor) -> Tensor:
    """`sampling.pick` on a GPU. probs: float[B, V]; streams: int64[B, 1], the keys of the noise ->
    int64[B].
    """
    B, V = probs.shape
    S = triton.cdiv(V, PIECE)
    if probs.stride(1) != 1:
        probs = probs.contiguous()
    out = torch.zeros(B, dtype=torch.int64, device=probs.device)
    best = torch.empty(B, S, 2, dtype=torch.float64, device=probs.device)
    if probs.numel():
        streams = streams.expand(B, 1).contiguous()
        _race[B, S](
            probs,
            streams,
            best,
            V,
            S,
            probs.stride(0),
            PIECE,
        )
        _winner[B,](best, out, V, S, triton.next_power_of_2(S))
    return out
