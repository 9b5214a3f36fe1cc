"""Top-k and top-p by threshold: which value is the last that is kept, found without sorting a row of 128,000 candidates.

Both ask for the largest v such that what is at least v is enough: k numbers, or a share p of the mass.

    top-k:   the largest v with   #{i: p_i ≥ v} ≥ k               top-p:   the largest v with   Σ_{p_i ≥ v} p_i ≥ p · total

A probability is a float64 between 0 and 1, whose 62 bits, read as a whole number, are in the same order as the numbers. So v is found from its
highest bit down: a bit stays if what is at least v with it is still enough. That is a pass over the row for each bit; `_level` tries the
16 values of four bits in one. Above v all are kept; of those that equal v, as many as are wanted, the lowest index first, as
`sampling.probabilities` has it: the law is the same, to the tie. What has a sum near p · total, by a rounding, may go either way there and here.

On a GPU a level is one launch, in which many programs share a row: each counts in its piece and leaves 16 sums; the next launch adds them up,
in order, before it begins. No host looks at anything, no shape depends on a number, so all of it can be captured in a graph: 17 launches for
either of k and p. `largest` in plain torch is the specification, one pass a bit, and what a CPU runs.

Not covered: sampling on a CPU, where sorting the few largest candidates takes less (sampling.py).

    B rows · V vocabulary · S pieces of a row
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

BITS = 62                                               # of 1.0, the largest
PIECE = 4096                                            # numbers of a row that a program looks through


@triton.jit
def _found(found, sums, target, b, shift, S, PIECES: tl.constexpr):
    """The bits of row b's value that are known after the level at `shift`: those before it, and the most of its 16 that is enough."""
    s, digit = tl.arange(0, PIECES), tl.arange(0, 16)
    each = tl.load(sums + (b * S + s)[:, None] * 16 + digit[None, :], mask=(s < S)[:, None], other=0.0)
    enough = (tl.sum(each, 0) >= tl.load(target + b)) & (digit > 0)
    return tl.load(found + b) | (tl.sum(enough.to(tl.int64), 0) << shift)


@triton.jit
def _level(keys, target, found, sums, next_found, next_sums, V, S, shift, FIRST: tl.constexpr, MASS: tl.constexpr, PIECES: tl.constexpr,
           PIECE: tl.constexpr, SIZE: tl.constexpr):
    """A piece of a row: what is at least the value with each of 16 digits at `shift`, into next_sums: float64[B, S, 16]."""
    b, s = tl.program_id(0), tl.program_id(1)
    known = tl.zeros((), tl.int64)
    if not FIRST:
        known = _found(found, sums, target, b, shift + 4, S, PIECES)
    if s == 0:
        tl.store(next_found + b, known)
    tried = known | (tl.arange(0, 16).to(tl.int64) << shift)                                # [16]; negative: beyond the highest bit
    total = tl.zeros((16,), tl.float64)
    for start in tl.range(s * PIECE, tl.minimum(s * PIECE + PIECE, V), SIZE):
        at = start + tl.arange(0, SIZE)
        key = tl.load(keys + b.to(tl.int64) * V + at, mask=at < V, other=-1)
        value = key.to(tl.float64, bitcast=True) if MASS else tl.full((SIZE,), 1.0, tl.float64)
        total += tl.sum(tl.where((key[None, :] >= tried[:, None]) & (tried >= 0)[:, None], value[None, :], 0.0), 1)
    tl.store(next_sums + (b * S + s) * 16 + tl.arange(0, 16), total)


@triton.jit
def _last(target, found, sums, out, S, PIECES: tl.constexpr):
    b = tl.program_id(0)
    tl.store(out + b, _found(found, sums, target, b, 0, S, PIECES))


def largest(probs: Tensor, target: Tensor, mass: bool) -> Tensor:
    """The largest v such that `target` of a row's numbers are at least v, or their mass is `target`; 0 where there is none.

    probs: float64[B, V] in [0, 1], target: float64[B, 1] above 0 -> float64[B, 1]
    """
    keys = probs.contiguous().view(torch.int64)
    if probs.is_cuda or knobs.runtime.interpret:
        return by_levels(keys, target.contiguous(), mass).view(torch.float64)
    return by_bits(keys, target, mass).view(torch.float64)


def by_bits(keys: Tensor, target: Tensor, mass: bool) -> Tensor:
    """int64[B, V] -> int64[B, 1], plainly."""
    found = torch.zeros_like(target, dtype=torch.int64)
    weight = keys.view(torch.float64) if mass else torch.ones_like(keys, dtype=torch.float64)
    for bit in reversed(range(BITS)):
        tried = found | 1 << bit
        found = torch.where(torch.where(keys >= tried, weight, 0).sum(-1, keepdim=True) >= target, tried, found)
    return found


def by_levels(keys: Tensor, target: Tensor, mass: bool) -> Tensor:
    """int64[B, V] -> int64[B, 1], four bits a launch."""
    (B, V), S = keys.shape, triton.cdiv(keys.shape[1], PIECE)
    found, sums = torch.empty(2, B, 1, dtype=torch.int64, device=keys.device), torch.empty(2, B, S, 16, dtype=torch.float64, device=keys.device)
    pieces, at = triton.next_power_of_2(S), 0
    if B == 0:
        return found[0]
    for shift in reversed(range(0, BITS, 4)):
        _level[B, S](keys, target, found[at], sums[at], found[1 - at], sums[1 - at], V, S, shift, shift + 4 >= BITS, mass, pieces, PIECE, min(512, PIECE))
        at = 1 - at
    _last[B,](target, found[at], sums[at], found[1 - at], S, pieces)
    return found[1 - at]


def beyond(probs: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """How many of a row are larger, and their mass: float64[B, 1] each."""
    above = probs > least
    return above.sum(-1, keepdim=True).double(), torch.where(above, probs, 0).sum(-1, keepdim=True)


def keep_top(probs: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Zero all but the most probable of each row: k, and of these the fewest that hold a share p. probs: float64[B, V]; k, p: float64[B, 1]."""
    V = probs.shape[-1]
    n, least, total = (torch.full_like(probs[:, :1], value) for value in (V, 0, 1))
    if k is not None:
        n = torch.where((k < 1) | (k > V), V, k.trunc())
        least = largest(probs, n, mass=False)
        above, mass = beyond(probs, least)
        total = torch.where(n < V, mass + (n - above) * least, 1)                           # what top-k left
    if p is not None:
        share = p * total
        edge = largest(probs, torch.where(p < 1, share, torch.inf), mass=True)
        above, mass = beyond(probs, edge)
        equals = ((share - mass) / edge).ceil().clamp(min=1)                                # of those at the edge, so many
        equals -= ((equals > 1) & (mass + (equals - 1) * edge >= share)).double()           # the quotient may be rounded up
        n, least = torch.where(edge > 0, torch.minimum(n, above + equals), n), torch.maximum(least, edge)
    above, ties = probs > least, probs == least
    keep = above | (ties & (ties.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    return torch.where(keep | (n == V), probs, 0)


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the same candidates as by sorting, and what the compiler makes of a level.

def compiled(V: int, mass: bool, arch: int = 90) -> list[int]:
    """Registers, spills and shared memory of a level."""
    from crosscompile import compile_for
    kinds = {"*i64": ("keys", "found", "next_found"), "*fp64": ("target", "sums", "next_sums"), "i32": ("V", "S", "shift")}
    fixed = dict(FIRST=False, MASS=mass, PIECES=triton.next_power_of_2(triton.cdiv(V, PIECE)), PIECE=PIECE, SIZE=512)
    return list(compile_for(_level, {name: kind for kind, names in kinds.items() for name in names}, fixed, arch)[:3])


def main() -> None:
    from sampling import probabilities
    logits = torch.randn(2, 128256, generator=torch.Generator().manual_seed(0)) * 3
    probs = logits.double().softmax(-1)
    for name, k, p in (("top-k 50", 50, None), ("top-p 0.9", None, 0.9), ("both", 5000, 0.9)):
        column = lambda value: None if value is None else torch.full((2, 1), value, dtype=torch.float64)
        kept, sorted_ = keep_top(probs, column(k), column(p)) > 0, probabilities(logits, top_k=k, top_p=p) > 0
        print(f"{name:10} of {logits.shape[1]:,}: {kept.sum(-1).tolist()} kept; the same as by sorting: {torch.equal(kept, sorted_)}")
    for arch in (90, 80):
        for mass in (False, True):
            print(f"a level, sm_{arch}, {'mass' if mass else 'numbers':8} registers, spills, shared memory: {compiled(128256, mass, arch)}")


if __name__ == "__main__":
    main()
