"""A step on a CPU, in C: near what memory gives, for a few tokens, and near what the CPU multiplies, for many (`python native.py`).

A step of one token reads every weight once and multiplies it once: two operations for four bytes. A core has time to spare, if the next bytes
are always under way. A step of many multiplies what it reads many times, and has none. Both want the same order in memory, which `Weight` makes
when a model is loaded: sixteen rows of W lie side by side, a panel, and a sum for each is in a lane of a register:

    for k in K:                             one unit of memory after the other, to the end of the panel
        w = panel[k]                        [16], whole numbers become float32 in registers
        for t in T:                         up to 6 rows of x at a time
            sum[t] += x[t, k] · w           after at most 128 columns: y[t] += sum[t] · scale

INT8 has a scale for each row, INT4 a scale and a zero for each row and group. Two columns share a unit in INT4 (a byte) and in bfloat16 (a pair, which
is multiplied as it is where there are instructions for it, x then being bfloat16, too). Accumulating over 128 columns at a time also keeps the error
small: at most 2e-5 of Σ|x||w|, whatever the instruction set (test_quantmatmul.py).

A row's numbers do not depend on how many rows there are, to the bit: all sums run in one order.

And what lies between. Memory stands still while Python finds the next operation. So what
a layer does between two products is one call (as fused.py's on a GPU), attention reads keys and values where they lie and takes another, and
where all weights are this page's, all layers are one call together, as a CUDA graph is one launch (graphs.py), and so are all tokens that a
model drafts in a round: `Layers`.

It is compiled when first needed, by the gcc that Triton asks for, too (compiled.py), and shares PyTorch's threads. Where these are
GCC's, clang is refused: it asks for LLVM's. Without a compiler, or with LLAMA_NATIVE=0, everything runs as PyTorch does it, and gives the same up
to the order of sums.

Invariant: what is computed here is what matmul.py, quantmatmul.py, model.py, kernels.py and sampling.py say.

Not covered: float64 and float16, other groups of INT4 than 32, 64 and 128, a whole model of bfloat16 in one call, gradients, other systems than Linux.

    T rows (tokens of a step) · K in_features · N out_features · C hidden_size · F intermediate_size · H, G heads · D head_dim · V vocab_size
"""
import ctypes
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compiled

SOURCE = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("products.c", "native.c", "nativedrafts.c"))
WIDE = 16                                               # rows of W in a panel
KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)        # of numbers, as C counts them; uint8: two of 4 bits
FLAGS = ("-O3", "-fopenmp", "-fno-math-errno")
GNU = """#ifdef __clang__
#error clang asks for the threads of LLVM's OpenMP, and PyTorch has GCC's: CC=gcc
#endif
"""


# ---- The compiler ---------------------------------------------------------------------------------------------------------------

@cache
def library() -> ctypes.CDLL | None:
    """What native.c became, or None where it cannot be had: `why_not()` says why."""
    return _library()[0]


def why_not() -> str:
    """Why there is no library, in a few words; empty if there is one."""
    return _library()[1]


@cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("LLAMA_NATIVE") == "0":
        return None, "LLAMA_NATIVE=0"
    if platform.system() != "Linux":
        return None, f"{platform.system()} is not Linux"
    if (threads := _threads()) is None:
        return None, "this PyTorch has no OpenMP threads to share"
    gnu = not hasattr(ctypes.CDLL(threads), "__kmpc_fork_call")
    try:
        return _declared(compiled.library(GNU * gnu + SOURCE, FLAGS, (threads, "-lm"))), ""
    except OSError as error:
        return None, " ".join(str(error).split())


def _threads() -> str | None:
    """The file of the OpenMP library that PyTorch uses, of all that are loaded: another would bring threads of its own."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    try:
        torch_cpu = ctypes.CDLL(next(at[5] for at in maps if "/libtorch_cpu" in at[-1]))
        address = ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (StopIteration, OSError, AttributeError):
        return None
    return next(at[5] for at in maps if int(at[0].split("-")[0], 16) <= address < int(at[0].split("-")[1], 16))


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    P, L = ctypes.c_void_p, ctypes.c_long
    lib.product.argtypes = lib.rows.argtypes = [P, P, P, L]
    lib.rows.restype = L
    lib.add_norm.argtypes = [P, P, P, P, P, L, L, ctypes.c_float]
    lib.rotate.argtypes = [P, P, P, P, L, L, L, L]
    lib.swiglu.argtypes = [P, P, L, L]
    lib.attend.argtypes = [P] * 5 + [L] * 5
    lib.pick_f32.argtypes = lib.pick_f64.argtypes = [P, P, P, L, P, L, L]
    lib.layers.argtypes = [P, L] + [P] * 7 + [L] * 5 + [ctypes.c_float]
    lib.drafts.argtypes = [P, L] + [P] * 8 + [L] * 5 + [ctypes.c_float] * 2 + [P] * 4 + [L] * 2
    return lib


# ---- The operations -------------------------------------------------------------------------------------------------------------

def serves(*tensors: Tensor | None) -> bool:
    """Whether there is C for such tensors: float32 on a CPU, without gradients."""
    for x in tensors:
        if x is not None and (x.dtype != torch.float32 or x.device.type != "cpu" or x.requires_grad and torch.is_grad_enabled()):
            return False
    return library() is not None


def multiplies(x: torch.dtype, weight: Tensor, group: int = 0) -> bool:
    """Whether there is a product of rows of dtype x by such numbers: [N, K], of `group` columns that share a scale in INT4."""
    return (weight.device.type == "cpu" and weight.dtype in KINDS and x in (torch.float32, torch.bfloat16)
            and (weight.dtype != torch.uint8 or group in (32, 64, 128)) and library() is not None)


class Weight(ctypes.Structure):
    """W [N, K] as products.c reads it. It holds addresses, and the tensors that lie there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("w", "scale", "zero", "bias")] + [(name, ctypes.c_long) for name in ("N", "K", "group", "kind")]

    @classmethod
    def of(cls, values: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, zero: Tensor | None = None, columns: int = 0, group: int = 0) -> "Weight":
        """values: [N, K] float32, bfloat16 or int8, or uint8, two `columns` in each; bias: [N]; scale, zero: as quant.py has them."""
        parts = [panels(values, 2 if values.dtype == torch.bfloat16 else 1), *(None if part is None else panels(part) for part in (scale, zero)),
                 None if bias is None else bias.detach().float()]
        self = cls(*(None if part is None else part.data_ptr() for part in parts), len(values), columns or values.shape[1],
                   group if values.dtype == torch.uint8 else values.shape[1], KINDS.index(values.dtype))
        self.held, self.library = [part for part in parts if part is not None], library()
        return self

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.held)

    def rows(self, which: Tensor) -> Tensor:
        """Rows of W as numbers: an embedding's look-up. int64[R] -> float32[R, K]."""
        out, which = torch.empty(len(which), self.K), which.contiguous()
        if wrong := self.library.rows(ctypes.byref(self), which.data_ptr(), out.data_ptr(), len(which)):
            raise IndexError(f"row {which[wrong - 1]} of a matrix of {self.N}")
        return out


def panels(x: Tensor, unit: int = 1) -> Tensor:
    """[N, K] -> [⌈N / WIDE⌉, ⌈K / unit⌉, WIDE, unit]: rows side by side, filled up with zeros."""
    N, K = x.shape
    if N % WIDE or K % unit:
        x = torch.nn.functional.pad(x, (0, -K % unit, 0, -N % WIDE))
    return x.detach().view(-1, WIDE, x.shape[1] // unit, unit).transpose(1, 2).contiguous()


def product(x: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ + bias. x: [T, K], float32 or bfloat16 (rounded to that beside such a weight) -> [T, N], as x."""
    if x.shape[1] != weight.K:
        raise ValueError(f"rows of {x.shape[1]} numbers cannot be multiplied by a matrix of {weight.K} columns")
    T, dtype, own = x.shape[0], x.dtype, torch.bfloat16 if weight.kind == 1 else torch.float32
    given = x if dtype == own else x.to(own)
    if not given.is_contiguous():
        given = given.contiguous()
    y = torch.empty(T, weight.N)
    if T:
        weight.library.product(given.data_ptr(), ctypes.byref(weight), y.data_ptr(), T)
    return y if dtype == torch.float32 else y.to(dtype)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm. x, delta: [T, C] (None: nothing is added, and x returned)."""
    (T, C), x = x.shape, x.contiguous()
    y, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    delta = None if delta is None else delta.contiguous()
    library().add_norm(x.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), total.data_ptr(), y.data_ptr(), T, C, eps)
    return total, y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """model.rotate. x: [T, heads, D], heads whole; cos, sin: [T, 1, D], the first half of sin negated."""
    T, heads, D = x.shape
    x, y = x if x.stride()[1:] == (D, 1) else x.contiguous(), torch.empty(T, heads, D)
    library().rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), T, heads, D, x.stride(0))
    return y


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up. x: [T, 2 F], gate first -> [T, F]."""
    T, F = x.shape[0], x.shape[1] // 2
    x, y = x.contiguous(), torch.empty(T, F)
    library().swiglu(x.data_ptr(), y.data_ptr(), T, F)
    return y


class _Kept(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("kind", ctypes.c_long)]


class _Past(ctypes.Structure):
    _fields_ = [("keys", _Kept), ("values", _Kept), ("table", ctypes.c_void_p)] + [(name, ctypes.c_long) for name in ("S", "block", "head")]


class Step(ctypes.Structure):
    """Where the tokens of a pass belong, for `attend`; nativestep.py makes it."""

    _fields_ = [("past", _Past), ("positions", ctypes.c_void_p), ("owner", ctypes.c_void_p), ("most", ctypes.c_long), ("work", ctypes.c_long)]

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor], positions: Tensor, owner: Tensor, tables: Tensor, S: int, seen: int) -> "Step":
        """keys, values: numbers [L, N, S, G, D], and of INT8 a scale for each vector, alike in memory; positions, owner: int64[T], of each token;
        tables: int64[B, most], of each text; seen: keys, by all queries. It holds addresses: the tensors must outlive it."""
        D, (_, block, _, head, _) = keys[0].shape[-1], keys[0].stride()
        kept = [_Kept(numbers.data_ptr(), scale[0].data_ptr() if scale else None, KINDS.index(numbers.dtype)) for numbers, *scale in (keys, values)]
        return cls(_Past(*kept, tables.data_ptr(), S, block // D, head // D), positions.data_ptr(), owner.data_ptr(), tables.shape[1], seen)


def attend(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, step: Step, G: int, at: int) -> Tensor:
    """Rotate q and k, store k and v, and attend. qkv: [T, H + 2 G, D]; cos, sin: [T, 1, D], or None, where q and k are turned already; at: vectors
    before this layer's -> [T, H, D]"""
    (T, heads, D), qkv = qkv.shape, qkv.contiguous()
    out, turned = torch.empty(T, heads - 2 * G, D), (None, None) if cos is None else (cos.data_ptr(), sin.data_ptr())
    library().attend(qkv.data_ptr(), *turned, out.data_ptr(), ctypes.byref(step), at, T, heads - 2 * G, G, D)
    return out


def pick(probs: Tensor, place: Tensor, role: Tensor | int) -> Tensor:
    """sampling.Keyed.pick. probs: float32 or float64 [B, V], V > 0; place: int64[B, 1]; role: int64[B, 1] or one for all -> int64[B]."""
    (B, V), probs = probs.shape, probs.contiguous()
    place = place.expand(B, 1).contiguous()
    each, picked = isinstance(role, Tensor), torch.zeros(B, dtype=torch.int64)
    role = role.contiguous() if each else torch.tensor([role])
    run = library().pick_f64 if probs.dtype == torch.float64 else library().pick_f32
    run(probs.data_ptr(), place.data_ptr(), role.data_ptr(), int(each), picked.data_ptr(), B, V)
    return picked


# ---- All layers in one call -----------------------------------------------------------------------------------------------------

class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "qkv", "o", "gate_up", "down")]


class Layers:
    """The layers of a model whose products are all this page's, and its last norm: what model.Llama does for a few tokens, without a Python between
    two operations, in float32.

    It holds addresses, and what lies there.
    """

    def __init__(self, llama: Any):
        first, self.held = llama.layers[0], list[Any]()
        self.own, self.count, self.eps = (_Layer * len(llama.layers))(), len(llama.layers), llama.norm.eps
        self.norm, self.heads, self.kv_heads, self.head_dim = self._at(llama.norm.weight), first.heads, first.kv_heads, first.head_dim
        for place, layer in zip(self.own, llama.layers):
            place.input_norm, place.post_norm = self._at(layer.input_norm.weight), self._at(layer.post_norm.weight)
            place.qkv, place.o = self._at(layer.qkv_proj.own), self._at(layer.o_proj.own)
            place.gate_up, place.down = self._at(layer.gate_up_proj.own), self._at(layer.down_proj.own)
        self.head, self.embed, self.logits = self._at(llama.head.own), self._at(llama.embed.own), llama.head.own.N
        self.room = 2 * (first.qkv_proj.in_features + max(first.gate_up_proj.out_features, first.qkv_proj.out_features))

    def _at(self, part: Tensor | Weight) -> int:
        self.held.append(part)
        return part.data_ptr() if isinstance(part, Tensor) else ctypes.addressof(part)

    @staticmethod
    def of(llama: Any) -> "Layers | None":
        """None where some product is not this page's, or numbers are not float32."""
        linears = [linear for layer in llama.layers for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)]
        return Layers(llama) if all(linear.own is not None for linear in (*linears, llama.head, llama.embed)) and serves(llama.norm.weight) else None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, step: Step, at: int) -> Tensor:
        """What the head multiplies: [T, C]. x: [T, C]; it is written on. cos, sin: [T, 1, D]; at: vectors of a layer's keys."""
        T, out, room = x.shape[0], torch.empty_like(x), torch.empty(x.shape[0] * self.room)
        library().layers(self.own, self.count, self.norm, x.data_ptr(), out.data_ptr(), room.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                         ctypes.byref(step), at, T, self.heads, self.kv_heads, self.head_dim, self.eps)
        return out

    def drafts(self, x: Tensor, cos: Tensor, sin: Tensor, step: Step, at: int, temperature: float, place: Tensor, role: Tensor, V: int) -> tuple[Tensor, Tensor]:
        """What a text goes on with, token by token: int64[k], and what each was drawn from, softmax(logits / temperature): float32[k, V].

        x: [T, C], of the tokens before; it is written on. cos, sin: [T + k − 1, 1, D]; step: for T + k − 1 tokens; place, role: int64[k, 1],
        of each pick's coin.
        """
        T, k = x.shape[0], place.shape[0]
        place, role, room = place.contiguous(), role.contiguous(), torch.empty(T * (self.room + x.shape[1]) + self.logits)
        drafted, q = torch.zeros(k, dtype=torch.int64), torch.empty(k, V)
        library().drafts(self.own, self.count, self.norm, self.embed, self.head, x.data_ptr(), room.data_ptr(), cos.data_ptr(),
                         sin.data_ptr(), ctypes.byref(step), at, T, self.heads, self.kv_heads, self.head_dim, self.eps, temperature, place.data_ptr(),
                         role.data_ptr(), drafted.data_ptr(), q.data_ptr(), k, V)
        return drafted, q


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: products of a few rows read as fast as memory can be read, those of many multiply as fast as the CPU can.

@torch.inference_mode()
def main() -> None:
    from matmul import read_bandwidth, seconds
    from quant import quantize
    if library() is None:
        print(f"there is no C here: {why_not()}. Everything runs as PyTorch does it.")
        return
    roof, plain = read_bandwidth(), [torch.randn(1536, 576) for _ in range(64)]                                  # 226 MB
    eight, four = ([quantize(w, bits) for w in plain] for bits in (8, 4))
    kinds = [("float32", [Weight.of(w) for w in plain], torch.float32), ("bfloat16", [Weight.of(w.bfloat16()) for w in plain], torch.bfloat16),
             ("INT8", [Weight.of(q.values, scale=q.scale) for q in eight], torch.float32),
             ("INT4", [Weight.of(q.values, None, q.scale, q.zero, q.columns, q.group) for q in four], torch.float32)]
    print(f"this machine reads {roof / 1e9:.1f} GB/s; products of so many rows by 64 matrices of 1536 x 576: milliseconds, and the share of the roof")
    print(f"{'rows':>6}{'PyTorch float32':>18}" + "".join(f"{name:>16}" for name, _, _ in kinds))
    for T in (1, 2, 4, 8, 16, 64, 256):
        x = torch.randn(T, 576)
        spent = [(sum(w.nbytes for w in plain), seconds(lambda: [torch.nn.functional.linear(x, w) for w in plain], 3))]
        spent += [(sum(w.nbytes for w in own), seconds(lambda: [product(x.to(dtype), w) for w in own], 3)) for _, own, dtype in kinds]
        print(f"{T:6}  " + "".join(f"{1e3 * taken:10.1f} {size / taken / roof:5.0%}" for size, taken in spent))


if __name__ == "__main__":
    main()
