"""Whether C computes what the plain definitions say: each operation, once, on a ragged example.

A compiler can be wrong. GCC 12 loses the sum of a softmax on ARM with SVE, and every token that is
drawn becomes token 0. So after C is compiled, and whenever it is loaded, its results are compared
with those of kernels.Ops, in some 10 ms. If one is wrong, no C is used (cpu/__init__.py).

The example has each kind of weights, keys and values that C reads, and no size is a multiple of a
register's: a lane too many or too few shows. The bound is wide, because a wrong instruction changes
the first digits.

Invariant: no generator of random numbers is touched.
Not covered: passes and drafts of one call, which call the same functions; wrong C that does not
return.

    T rows of x · N, K rows and columns of W · G key/value heads · D head size · V vocab_size
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import HeadNorm, Linear, Ops
from kvcache import AttentionMetadata, Cache, KVSpec, SequenceSlice
from quant import FORMATS, Quantized, quantize
from sampling import Keyed
from speculative import verify_block

BOUND = 1e-3  # of an error's norm, beside the norm of what is right
N = 70  # five panels
K = 149  # more than a stretch
ROWS = (1, 2, 3, 4, 5, 6, 33)  # of x: C has code for each number up to 6, and for more
G = 2
D = 18
STEPS = ((0, 140), (140, 145))  # tokens [start, stop) of a text: a prompt; a few, which look back
KEYS_AND_VALUES = (  # bits, and the dtype of the other numbers
    ((16, 8), torch.float32),
    ((4, 16), torch.bfloat16),
    ((8, 4), torch.float32),
)
V = 600
PLAIN = Ops()


class Trial(NamedTuple):
    """An operation, its example in C, and the right result."""

    operation: str
    run: Callable[[], Tensor]
    wanted: Tensor


@torch.inference_mode()
def first_wrong(ops: Ops, put_back: Collection[str] = ()) -> str:
    """The first operation that raises an exception, or is not what kernels.Ops says; empty if there
    is none.

    put_back: operations that run as the pages have them (edits.py). Examples with one of these are
    left out, because a reader's body may be unfinished.
    """
    examples = [make(ops) for make, operations in EXAMPLES.items() if not operations & {*put_back}]
    for trial in chain(*examples):
        wanted = trial.wanted.float()
        try:
            result = trial.run()
        except Exception:  # a softmax that makes NaN raises NotFinite
            return trial.operation
        error = (result - wanted).norm()
        if not error <= BOUND * wanted.norm():  # it may be NaN
            return trial.operation
    return ""


def waves(*shape: int) -> Tensor:
    """Numbers between −1 and 1, no two alike."""
    n = torch.arange(1, 1 + prod(shape), dtype=torch.float32)
    x = 2 * (0.618034 * n).frac() - 1
    return x.view(shape)


def weights() -> dict[str, Tensor | Quantized]:
    """[N, K], of each kind, with each kind of scales and zeros."""
    w = waves(N, K)
    kinds = {f"{bits}": quantize(w, bits, 32) for bits in FORMATS}
    eight = kinds["8"]
    four = kinds["4"]
    zeros = 9 * torch.arange(N, dtype=torch.int16)[:, None]  # some are beyond 255
    one_zero = torch.full_like(four.zero, 7)
    backwards = torch.arange(K).flip(0)
    return {
        "float32": w,
        "bfloat16": w.bfloat16(),
        **kinds,
        "8, zeros": eight._replace(zero=zeros),
        "8, input 8": eight._replace(input_bits=8),
        "fp8, input 8": kinds["fp8"]._replace(input_bits=8),
        "4, one zero": four._replace(zero=one_zero),
        "4, fractions": four._replace(zero=four.zero.float() + 0.3),
        "4, order": four._replace(scale=four.scale.half(), order=backwards),
    }


def products(ops: Ops) -> Iterator[Trial]:
    """Products of each number of rows of x; and look-ups of rows of W."""
    x = waves(max(ROWS), K)
    bias = waves(N)
    tokens = torch.arange(N)
    row_of = torch.cat([torch.arange(T) for T in ROWS])  # the row of x that each result is of
    for name, weight in weights().items():
        packed = ops.pack_weight(Linear(weight, bias), x.dtype)
        plain = PLAIN.embed(tokens, Linear(weight), x.dtype).float()  # all of W
        yield Trial(
            f"look-up (weights: {name})",
            lambda: ops.embed(tokens[-3:], packed, x.dtype),
            plain[-3:],
        )
        if "input" in name:  # the plain product must round x, too
            plain = weight
        wanted = PLAIN.linear(x, Linear(plain, bias))
        yield Trial(
            f"product (weights: {name})",
            lambda: torch.cat([ops.linear(x[:T], packed) for T in ROWS]),
            wanted[row_of],
        )


def between_products(ops: Ops) -> Iterator[Trial]:
    """RMSNorm, with and without a sum before it; SwiGLU."""
    x = waves(3, 2 * D)
    for delta in (None, x.flip(1)):
        wanted = PLAIN.add_norm(x, delta, x[0], 1e-5)
        yield Trial(
            "RMSNorm",
            lambda: torch.cat(ops.add_norm(x, delta, x[0], 1e-5)),
            torch.cat(wanted),
        )
    gate_up = Linear(waves(2 * K, 2 * D))
    packed = ops.pack_weight(gate_up, x.dtype)
    wanted = PLAIN.swiglu(x, gate_up)
    yield Trial("SwiGLU", lambda: ops.swiglu(x, packed), wanted)


def attentions(ops: Ops) -> Iterator[Trial]:
    """Over keys and values of each width; in plain torch the text is read at once."""
    T = STEPS[-1][1]
    qkv = waves(T, 4 * G, D)  # two query heads read a head of keys
    for bits, dtype in KEYS_AND_VALUES:
        spec = KVSpec(1, G, D, dtype=dtype, bits=bits)
        wanted = attended(PLAIN, spec, qkv, [(0, T)])
        yield Trial(
            f"attention (bits of keys and values: {bits})",
            lambda: attended(ops, spec, qkv, STEPS),
            wanted,
        )


def attended(ops: Ops, spec: KVSpec, qkv: Tensor, steps: Sequence[tuple[int, int]]) -> Tensor:
    """What attention gives to the tokens of a text that is read in these steps: [T, 2 G, D]."""
    cache = Cache(
        replace(spec, ops=ops),
        num_blocks=2,
        block_size=100,
        max_len=200,
    )
    cos, sin = waves(2, len(qkv), 1, D // 2)
    weight = waves(2 * D)
    norm = HeadNorm(weight, eps=1e-5)
    results = []
    for start, stop in steps:
        new = slice(start, stop)
        rope = cos[new], sin[new]
        slices = [SequenceSlice([1, 0], start, stop)]
        metadata = AttentionMetadata(slices, cache.block_size, cache)
        out = ops.attend(qkv[new], G, rope, metadata, 0, norm)
        results.append(out)
    return torch.cat(results)


def sampled(ops: Ops) -> Iterator[Trial]:
    """Probabilities, and what is drawn from them."""
    logits = 4 * waves(9, V)
    logits[1, 5] = -torch.inf
    temperature = torch.tensor([0.7, 1, 0], dtype=torch.float32).repeat(3)
    probs = PLAIN.probabilities(logits, temperature=temperature)
    yield Trial("softmax", lambda: ops.probabilities(logits, temperature=temperature), probs)
    top_k = torch.tensor([0, 5, 9], dtype=torch.int64).repeat(3)
    filters = dict(top_k=top_k, top_p=0.8, min_p=0.05)
    wanted = PLAIN.probabilities(logits, **filters)
    yield Trial("filters", lambda: ops.probabilities(logits, **filters), wanted)
    rng = Keyed(torch.arange(9), torch.arange(9))
    wanted = rng.pick(probs)
    yield Trial("pick", lambda: ops.pick(probs, rng.streams), wanted)
    third = torch.arange(V) // 200
    q = torch.tensor([0.0035, 0.0015, 0], dtype=torch.float32)[third].repeat(99, 3, 1)
    p = q.clone()
    lighter = torch.tensor([0.001, 0.0025, 0.0015], dtype=torch.float32)
    p[::2] = lighter[third]  # the weight of draft 0 counts
    q[:, -1] = 0  # after the last draft
    drafted = torch.zeros(99, 2, dtype=torch.int64)
    drafted[::3, 1] = 599  # which q does not allow
    rng = Keyed(torch.arange(99), torch.arange(99))
    wanted = verify_block(p, q, drafted, rng)
    yield Trial(
        "verify",
        lambda: torch.cat(ops.verify_block(verify_block, p, q, drafted, rng)),
        torch.cat(wanted),
    )


EXAMPLES = {  # and the operations that each calls
    products: {"embed", "linear"},
    between_products: {"add_norm", "swiglu"},
    attentions: {"attend"},
    sampled: {"probabilities", "pick", "verify_block"},
}
