"""Products and short steps on a CPU, in C.

A step of one token reads every weight once, for two operations. Reading is the limit: the next bytes must always be
under way. A step of many tokens uses a weight many times: arithmetic is the limit. Both want one order in memory, which
`Weight` makes: sixteen rows of W lie side by side, a panel, and each has a lane of a register:

    for k in K:                             one unit of memory after the other, to the end of the panel
        w = panel[k]                        [16], integers become float32 in registers
        for t in T:                         up to 6 rows of x at a time
            sum[t] += x[t, k] · w           after at most 128 columns: y[t] += sum[t] · scale

bfloat16, two columns a unit, is the upper half of float32: such a checkpoint is read as it is, and multiplied as
float32. All formats of quant.Quantized are read: INT8, INT4, NF4 (a permutation of a register is the look-up) and
FP8 (float16 with a smaller exponent), with a scale for each row or group in bfloat16 or float32, zeros, and columns in
another order, in which x is gathered. Inputs of 8 bits are rounded, and multiplied as float32. Eight columns of 4 bits
share a unit; beside the fewest rows of x INT4 stays integers, and x becomes integers, too (integers.c).

While Python looks for the next operation, no memory is read. So norm, rotation, SwiGLU and attention,
which reads keys and values where they are stored, are one call each; and where all products of a model are in C, all
its layers are one call, and so are all drafts of a round (`Layers`).

Invariant: results are those of kernels.Ops up to the order of sums. A product's error is at most 2e-5 of Σ|x||w|; for
INT4 each |x| counts as at least 2^-8 of the largest of its group. A row of y does not depend, to the bit, on the other
rows; for INT4 only on whether rows are few. NaN in FP8 makes NaN of its whole row of W.

Not covered: float64, float16, groups that do not fall into stretches of at most 128 columns, or of 4 bits into units of
8; sums of integers beside inputs of 8 bits; x in bfloat16 in one call, gradients; only Linux.

    T rows of x, tokens of a step · K in_features · N out_features · C hidden_size · F intermediate_size
    H, G query and key/value heads · D head_dim · V vocab_size
"""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpu.compiled import compile_library
from kernels import Linear, Step
from quant import Quantized, nf4, unpack4

SOURCES = [
    Path(__file__).with_name(f"{name}.c") for name in ("blocks", "integers", "products", "native")
]
WIDE, STRETCH = 16, 128  # rows of W in a panel, and columns of a sum
KINDS = (
    torch.float32,
    torch.bfloat16,
    torch.int8,
    4,
    "nf4",
    torch.float8_e4m3fn,
    "zeros",
)  # as blocks.c counts
P, L = ctypes.c_void_p, ctypes.c_long


# ---- The library -----------------------------------------------------------------------------------------------------


def library() -> ctypes.CDLL | None:
    """The compiled source, or None where it cannot be had."""
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
    flags = ["-O3", "-fopenmp", "-fno-math-errno"]
    if not hasattr(ctypes.CDLL(threads), "__kmpc_fork_call"):
        flags.append("-DGNU_THREADS")
    try:
        source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
        return _declared(compile_library(source, flags, (threads, "-lm"))), ""
    except OSError as error:
        return None, " ".join(str(error).split())


def _threads() -> str | None:
    """The file of the OpenMP library that PyTorch uses: another one would bring threads of its own."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    try:
        torch_cpu = ctypes.CDLL(next(at[5] for at in maps if "/libtorch_cpu" in at[-1]))
        called = ctypes.cast(torch_cpu.GOMP_parallel, P).value
    except (StopIteration, OSError, AttributeError):
        return None
    ranges = ((at[-1], *(int(end, 16) for end in at[0].split("-"))) for at in maps)
    return next(file for file, start, stop in ranges if start <= called < stop)


class Record(ctypes.Structure):
    """A C struct, which has an address as a tensor has."""

    def data_ptr(self) -> int:
        return ctypes.addressof(self)


def address(x: Tensor | Record | None) -> ctypes.c_void_p:
    return P(None if x is None else x.data_ptr())


class At:
    """The type of a C parameter: the address of a tensor or a record, or NULL for None."""

    from_param = staticmethod(address)


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.product.argtypes = lib.rows.argtypes = [At] * 3 + [L]
    lib.rows.restype = L
    (ctypes.c_float * 16).in_dll(lib, "nf4")[:] = nf4().tolist()
    lib.add_norm.argtypes = [At] * 5 + [L, L, ctypes.c_float]
    lib.swiglu.argtypes = [At, At, L, L]
    lib.attend.argtypes = [At] * 5 + [L] * 5
    lib.pick_f32.argtypes = lib.pick_f64.argtypes = [At] * 3 + [L, L]
    lib.layers.argtypes = [At] * 7 + [L]
    lib.soften_rows.argtypes = [At] * 2 + [L, L, ctypes.c_float]
    lib.drafts.argtypes = [At] * 6 + [L, ctypes.c_float] + [At] * 3 + [L, L]
    return lib


# ---- Products --------------------------------------------------------------------------------------------------------


def unquantized(weight: Tensor | Quantized) -> Quantized:
    """A weight as Quantized; a plain matrix has no scales. With at most one scale a row, a group is whole stretches."""
    w = Quantized(weight, None, None, weight.shape[1], 0) if isinstance(weight, Tensor) else weight
    lone = w.scale is None or w.scale.shape[1] == 1
    return w._replace(group=-(-w.columns // STRETCH) * STRETCH) if lone else w


def kind(w: Quantized) -> torch.dtype | str | int:
    """The kind of the stored numbers: an element of `KINDS`."""
    if w.values.dtype == torch.uint8:
        return w.bits
    return w.values.dtype if w.zero is None else "zeros"


def multiplies(weight: Tensor | Quantized, x: torch.dtype = torch.float32) -> bool:
    """Whether C multiplies x, of this dtype, by this matrix."""
    w = unquantized(weight)
    part = min(w.group, STRETCH)  # columns that are multiplied at a time
    return (
        w.values.device.type == "cpu"
        and kind(w) in KINDS
        and x in (torch.float32, torch.bfloat16)
        and w.group % part == part % (8 if w.values.dtype == torch.uint8 else 1) == 0
        and library() is not None
    )


class Weight(Record):
    """W [N, K] as blocks.c reads it: addresses, and the tensors that lie there."""

    _fields_ = [
        *((name, P) for name in ("w", "scale", "zero", "bias", "order")),
        *((name, L) for name in ("N", "K", "group", "kind", "exact", "inputs")),
    ]

    @classmethod
    def of(cls, linear: Linear) -> "Weight":
        """From a weight that `multiplies` accepts."""
        w, bias = unquantized(linear.weight), linear.bias
        values, scale, zero, K, group, order, inputs = w
        exact = scale is not None and scale.dtype != torch.bfloat16
        scale = scale.float() if exact else scale
        if values.dtype == torch.uint8:  # columns 0 to 3 of eight in the lower halves of four bytes
            q = unpack4(torch.nn.functional.pad(values, (0, -values.shape[1] % 4))).view(
                len(values), -1, 2, 4
            )
            values = (q[:, :, 0] | q[:, :, 1] << 4).flatten(1)
        if values.dtype == torch.float8_e4m3fn:  # C reads float16 of 2^-8 the number, and no NaN
            values = values.view(torch.int8)
            scale = (256 * scale).masked_fill_((values & 127 == 127).any(1, True), torch.nan)
        parts = [
            panels(values, {torch.bfloat16: 2, torch.uint8: 4}.get(values.dtype, 1)),
            *(None if part is None else panels(part) for part in (scale, zero)),
            None if bias is None else bias.detach().float(),
            order,
        ]
        self = cls(*map(address, parts), len(values), K, group, KINDS.index(kind(w)), exact, inputs)
        self.held, self.library = [part for part in parts if part is not None], library()
        return self

    def rows(self, which: Tensor) -> Tensor:
        """Rows of W as numbers: an embedding's look-up. int64[R] -> float32[R, K]."""
        out, which = torch.empty(len(which), self.K), which.contiguous()
        if wrong := self.library.rows(self, which, out, len(which)):
            raise IndexError(f"row {which[wrong - 1]} of a matrix of {self.N}")
        return out


def panels(x: Tensor, unit: int = 1) -> Tensor:
    """[N, K] -> [⌈N / WIDE⌉, ⌈K / unit⌉, WIDE], `unit` columns in a unit; 16 rows side by side, padded with 0."""
    N, K = x.shape
    if N % WIDE or K % unit:
        x = torch.nn.functional.pad(x, (0, -K % unit, 0, -N % WIDE))
    x = (
        x.detach().view(torch.int32) if unit > 1 else x.detach()
    )  # a unit is four bytes, and moves as one
    return x.view(-1, WIDE, x.shape[1]).transpose(1, 2).contiguous()


def product(x: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ + bias. x: [T, K], float32 or bfloat16; sums are float32 -> [T, N], as x."""
    if x.shape[1] != weight.K:
        raise ValueError(
            f"rows of {x.shape[1]} numbers cannot be multiplied by a matrix of {weight.K} columns"
        )
    y = torch.empty(len(x), weight.N)
    if len(x):
        weight.library.product(x.float().contiguous(), weight, y, len(x))
    return y.to(x.dtype)


# ---- Between the products, as kernels.Ops has them -------------------------------------------------------------------


def serves(*tensors: Tensor | None) -> bool:
    """Whether there is C for these tensors: float32 on a CPU, without gradients."""
    return library() is not None and all(
        x is None
        or x.dtype == torch.float32
        and x.device.type == "cpu"
        and not (x.requires_grad and torch.is_grad_enabled())
        for x in tensors
    )


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (T, C), x, delta = x.shape, x.contiguous(), None if delta is None else delta.contiguous()
    y, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    library().add_norm(x, delta, weight, total, y, T, C, eps)
    return total, y


def swiglu(x: Tensor) -> Tensor:
    T, F = x.shape[0], x.shape[1] // 2
    y = torch.empty(T, F)
    library().swiglu(x.contiguous(), y, T, F)
    return y


def soften(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) [B, V], V > 0; temperature 0: one-hot, first maximum. NaN in rows not finite."""
    library().soften_rows(
        logits.contiguous(), probs := torch.empty(logits.shape), *logits.shape, temperature
    )
    return probs


def race(probs: Tensor, streams: Tensor) -> Tensor:
    """sampling.pick in C. probs: float32 or float64 [B, V], V > 0; streams: int64[B, 1] -> int64[B]."""
    (B, V), picked = probs.shape, torch.zeros(len(probs), dtype=torch.int64)
    run = library().pick_f64 if probs.dtype == torch.float64 else library().pick_f32
    run(probs.contiguous(), streams.expand(B, 1).contiguous(), picked, B, V)
    return picked


# ---- Attention -------------------------------------------------------------------------------------------------------


class _Kept(Record):
    _fields_ = [("numbers", P), ("scale", P), ("kind", L)]


class _Step(Record):
    _fields_ = [
        ("keys", _Kept),
        ("values", _Kept),
        ("tables", P),
        ("S", L),
        ("block", L),
        ("head", L),
        ("positions", P),
        ("slots", P),
        ("starts", P),
        ("most", L),
        ("work", L),
        ("layer", L),
    ]


def reads(*stores: Any) -> bool:
    """Whether `attend` reads these keys and values: on a CPU, not of 4 bits, the tokens of a head side by side."""
    parts = [store.parts[0] for store in stores]
    return all(
        x.dtype in KINDS[:3] and x.device.type == "cpu" and x.stride(2) == x.shape[4] for x in parts
    )


def places(step: Step) -> _Step:
    """Where the tokens of a step belong, for C: made once a step. It holds addresses of the step's tensors."""
    if (made := vars(step).get("native")) is None:
        made = step.native = _Step.from_buffer_copy(_layout(step.cache))
        made.positions, made.slots, made.starts, _, made.tables = map(
            torch.Tensor.data_ptr, step.places
        )
        made.S, made.most = step.block_size, step.shape[2]
        made.work = sum((stop - start) * stop for _, start, stop in step.spans)
    return made


def _layout(cache: Any) -> _Step:
    """Where the keys and values of a cache are: the part that all its steps share."""
    if "native" not in vars(cache):
        keys, values = cache.keys.parts, cache.values.parts
        layer, block, _, head, _ = (distance // keys[0].shape[4] for distance in keys[0].stride())
        kept = [
            _Kept(address(x), *map(address, scale or [None]), KINDS.index(x.dtype))
            for x, *scale in (keys, values)
        ]
        cache.native = _Step(*kept, block=block, head=head, layer=layer)
    return cache.native


def attend(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, step: Step, G: int, layer: int
) -> Tensor:
    """qkv: float32[T, H + 2 G, D]; without cos and sin, q and k are rotated already -> [T, H, D]."""
    T, heads, D = qkv.shape
    out = torch.empty(T, heads - 2 * G, D)
    library().attend(qkv.contiguous(), cos, sin, out, places(step), layer, T, heads - 2 * G, G, D)
    return out


# ---- All layers in one call ------------------------------------------------------------------------------------------


class _Layer(Record):
    _fields_ = [(name, P) for name in ("input_norm", "post_norm", "qkv", "o", "gate_up", "down")]


class Layers(Record):
    """All layers of a float32 model, and its last norm: addresses, and what lies there."""

    _fields_ = [
        *((name, P) for name in ("layers", "norm", "embed", "head")),
        *((name, L) for name in "LHGD"),
        ("eps", ctypes.c_float),
    ]

    @classmethod
    def of(cls, llama: Any) -> "Layers | None":
        """None if C cannot do all products, or the model is not float32."""
        every = [[getattr(layer, name) for name, _ in _Layer._fields_] for layer in llama.layers]
        products = [llama.embed, llama.head, *(part for _, _, *parts in every for part in parts)]
        if (
            not every
            or not serves(llama.norm)
            or not all(isinstance(part, Weight) for part in products)
        ):
            return None
        c, layers = (
            llama.config,
            (_Layer * len(every))(*(_Layer(*map(address, parts)) for parts in every)),
        )
        self = cls(
            ctypes.addressof(layers),
            *map(address, (llama.norm, llama.embed, llama.head)),
            len(every),
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rms_norm_eps,
        )
        self.held, (_, _, qkv, _, gate_up, _) = [layers, llama.norm, products, every], every[0]
        self.room, self.logits = (
            2 * (qkv.K + max(gate_up.N, qkv.N)),
            llama.head.N,
        )  # for a token; for all
        return self

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        """The rows that the head multiplies: [T, C]. x: [T, C]; it is overwritten. cos, sin: [T, 1, D]."""
        out, room = torch.empty_like(x), torch.empty(len(x) * self.room)
        library().layers(self, x, out, room, cos, sin, places(step), len(x))
        return out

    def drafts(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: Step,
        temperature: float,
        streams: Tensor,
        V: int,
    ) -> tuple[Tensor, Tensor]:
        """The next k tokens of a text, int64[k], and their distributions, softmax(logits / temperature): float32[k, V].

        x: [T, C], embeddings before; it is overwritten. cos, sin: [T + k − 1, 1, D]; step: of T + k − 1 tokens;
        streams: int64[k, 1], one for each pick.
        """
        (T, C), k = x.shape, len(streams)
        room, drafted = (
            torch.empty(T * (self.room + C) + self.logits),
            torch.zeros(k, dtype=torch.int64),
        )
        q = torch.empty(k, V)
        library().drafts(
            self,
            x,
            room,
            cos,
            sin,
            places(step),
            T,
            temperature,
            streams.contiguous(),
            drafted,
            q,
            k,
            V,
        )
        return drafted, q


if __name__ == "__main__":
    print(
        f"there is no C here: {why_not()}. Everything runs as PyTorch does it."
        if why_not()
        else "there is C here."
    )
