"""Products and short steps on a CPU, in C.

A step of one token reads every weight once, for two operations. Reading is the limit: the next
bytes must always be under way. A step of many tokens uses a weight many times: arithmetic is the
limit. Both want one order in memory, which `Weight` makes: sixteen rows of W lie side by side, a
panel, and each has a lane of a register:

    for k in K:                         in the order of memory, to the panel's end
        w = panel[k]                    [16]
        for t in T:                     up to 6 rows of x at a time (3, where units are of four)
            sum[t] += x[t, k] · w       after a stretch, at most 128 columns: y[t] += sum[t] · scale

A lane holds a *unit*: one column of float32 or FP8, two of bfloat16 or INT8 (on ARM four of INT8,
where there is a dot product of four bytes), eight of INT4 or NF4.
Floating point is multiplied as float32, of which bfloat16 is the upper half; FP8 is float16 with a
smaller exponent, and NF4's look-up is a permutation of a register. INT8 and INT4 are multiplied as
whole numbers: x becomes 16 bits, with a scale for each row and stretch, and the sums are exact.
Where the CPU multiplies tiles (Intel's AMX), prompts and batches by INT8 and INT4 are made of them,
with the same bits. There, x becomes two bfloat16 for all products by bfloat16, which are made of
tiles, or for one or two rows of vectors, with the same bits (tiles.c).
Scales of W are bfloat16, float16 or float32, zeros int16 or float32. Where W's columns are stored
in another order, x is gathered in that order. For W8A8, x is rounded to 8 bits before.

While Python looks for the next operation, no memory is read. So norm, rotation, SwiGLU and
attention, which reads keys and values where they are stored, are one call each; and where all
products of a model are in C, all its layers are one call, and so are all drafts of a round
(`NativeModel`).

C functions get addresses as plain integers, which ctypes converts without running Python code: so
Ctrl-C arrives before or after a call, as KeyboardInterrupt (`call`). Every address of a tensor is
made by `address`, which compares the tensor with what the source declares there. Another dtype is
an exception, because C would read other numbers, or write beyond the tensor's end. So is another
shape, wherever two tensors must agree (`shaped`, `step_of`).

Invariant: results are those of kernels.Ops up to the order of sums. A product's error is at most
2e-5 of Σ|x||w|; beside INT8 and INT4, x is off by at most 2^-16 of the largest |x| of its stretch,
too (a little more on ARM). Products by INT8 and INT4 have the same bits on every x86 with AVX2. NaN
in FP8 makes NaN of its row of W.

Invariant: equal bits. A row of any operation here does not depend, to the bit, on the other rows of
the step, or on threads: all loops add in one order for a row. So logits are a function of the text
before them: alone or in a batch, drafted or not, preempted or not, in any chunks. The same holds of
EAGLE's rows, and of what is drawn from. Exceptions are what PyTorch computes: float64 and float16,
matrices that C does not multiply (`multiplies`), and everything where there is no compiler. Two
CPUs with other instructions differ, because their registers have other lengths.

Not covered: float64, float16 and gradients; groups that are no whole number of units, or are
longer than 128 columns and no multiple of 128; a step of bfloat16 in one call; Windows. On macOS
no C has run yet.

    T rows of x, tokens of a step · K in_features · N out_features · C hidden_size
    F intermediate_size · H, G query and key/value heads · D head_dim · V vocab_size
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu.compiled import cache_folder, compile_library, is_mac
from kernels import HeadNorm, Linear
from quant import Kind, Quantized, nf4
from sampling import Keyed, NotFinite, Setting, accept_role, column
from settings import SETTINGS

if TYPE_CHECKING:
    from checkpoint.weights import Layer
    from eagle import EagleHead
    from kvcache import AttentionMetadata, Cache, Store
    from model import Features, Llama, Rope
    from speculative import Proposal

SOURCES = ("blocks.c", "products.c", "tiles.c", "native.c")
SORTS = ("real", "whole")  # of the blocks in blocks.c
FLAGS = ("-O3", "-fno-math-errno", "-ffp-contract=off")  # no fused multiply-add but `fused`
LOADING = threading.Lock()  # one thread at a time compiles and declares
WITHOUT_C = "no C here, so this CPU is up to 5 times slower, and weights may take twice the memory"
WIDE = 16  # rows of W in a panel
STRETCH = 128  # columns of a sum
KINDS = (torch.float32, torch.bfloat16, 8, 4, "nf4", "fp8")  # of weights, numbered as in blocks.c
CACHED = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)  # in caches, numbered likewise
UNITS = {torch.bfloat16: 2, 4: 8, "nf4": 8}  # columns of a unit, which must have one scale
INTEGERS = {2: torch.int16, 4: torch.int32}  # by their bytes
SCALES = [torch.bfloat16, torch.float32, torch.float16]  # numbered as SCALE_… in blocks.c
POINTER = ctypes.c_void_p
LONG = ctypes.c_long
FLOAT = ctypes.c_float


# ---- The library -------------------------------------------------------------------------------


@dataclass
class Loaded:
    """The library; or None, and the reason in a few words."""

    library: ctypes.CDLL | None
    why_not: str = ""

    def give_up(self, reason: str) -> None:
        """Use no C from now on; a warning tells why."""
        self.library = None
        self.why_not = reason
        warnings.warn(f"{WITHOUT_C}: {reason}")


def library() -> ctypes.CDLL | None:
    """The compiled source, or None where it cannot be compiled."""
    return load_library().library


def language() -> str:
    """What the library was compiled for, as the first line of a program says it."""
    lib = library()
    if LONG.in_dll(lib, "has_tiles").value:
        return "C with AMX tiles"
    name = ctypes.addressof(ctypes.c_char.in_dll(lib, "instructions"))
    return f"C for {ctypes.string_at(name).decode()}"


def why_not() -> str:
    """Why there is no library, in a few words; empty if there is one."""
    return load_library().why_not


@functools.cache
def load_library() -> Loaded:
    """The library, or None; a warning tells why, unless the user has turned C off."""
    if os.environ.get("LLAMA_NATIVE") == "0":
        return Loaded(None, "LLAMA_NATIVE=0")
    loaded = Loaded(None)
    try:
        with LOADING:
            loaded.library = build_library()
    except OSError as error:
        loaded.give_up(" ".join(str(error).split()))
    return loaded


def distrust(operation: str) -> None:
    """Use no C from now on, because this operation of it is wrong."""
    load_library().give_up(
        f"as compiled here, {operation} is wrong: set CC to another compiler, or update this one "
        f"and remove {cache_folder()}"
    )


def source() -> str:
    """The program in C."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in SOURCES)


def translation_units() -> list[str]:
    """The program in parts, to compile side by side: the blocks of each sort, and all else."""
    declared = "".join(f"#define BLOCKS_{sort} DECLARE\n" for sort in SORTS)
    blocks = Path(__file__).with_name(SOURCES[0]).read_text(encoding="utf-8")
    texts = [declared + source()]
    for sort in SORTS:
        defined = declared.replace(f"{sort} DECLARE", f"{sort} DEFINE")
        texts.append(defined + blocks)
    return texts


def build_library() -> ctypes.CDLL:
    """Compile, load and declare it. OSError: why there is none."""
    if platform.system() not in ("Linux", "Darwin"):
        raise OSError(f"{platform.system()} is neither Linux nor macOS")
    openmp = openmp_library()
    if openmp is None:
        raise OSError("this PyTorch has no OpenMP threads to share")
    flags = [*FLAGS]
    if is_mac():  # its compiler has no OpenMP, and the file of PyTorch's is not where its name says
        flags += ["-Xclang", "-fopenmp", f"-I{Path(torch.__file__).parent}/include"]
        linked = ["-lm"]
        ctypes.CDLL(openmp, ctypes.RTLD_GLOBAL)  # so what is not linked is found
    else:
        flags.append("-fopenmp")
        linked = [openmp, "-lm"]
    if not hasattr(ctypes.CDLL(openmp), "__kmpc_fork_call"):  # not LLVM's OpenMP
        flags.append("-DGNU_THREADS")
    lib = compile_library(translation_units(), flags, linked)
    if not lib.runs_here():
        raise OSError("this CPU lacks instructions of the one that LLAMA_MARCH names: unset it")
    declare(lib, source())
    table = (FLOAT * 16).in_dll(lib, "nf4")
    table[:] = nf4().tolist()
    LONG.in_dll(lib, "has_tiles").value = lib.ask_for_tiles()
    return lib


def openmp_library() -> str | None:
    """The file of PyTorch's OpenMP library: another one would bring threads of its own.

    It is the file that is mapped where a function of OpenMP is, as libtorch_cpu finds it.
    """
    if is_mac():
        file = Path(torch.__file__).parent / "lib" / "libomp.dylib"
        return str(file) if file.exists() else None
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, file = line.split(maxsplit=5)
        start, stop = addresses.split("-")
        mappings.append((int(start, 16), int(stop, 16), file))
    torch_files = [file for _, _, file in mappings if "/libtorch_cpu" in file]
    if not torch_files:
        return None
    torch_cpu = ctypes.CDLL(torch_files[0])
    if not hasattr(torch_cpu, "GOMP_parallel"):
        return None
    function = ctypes.cast(torch_cpu.GOMP_parallel, POINTER).value
    return next(file for start, stop, file in mappings if start <= function < stop)


def declare(lib: ctypes.CDLL, source: str) -> None:
    """Tell ctypes what the source declares: functions' parameters, structures' fields."""
    source = re.sub(" *//.*", "", source)
    for result, name, parameters in re.findall(r"^(void|long) (\w+)\(([^)]*)\)", source, re.M):
        declare_function(getattr(lib, name), parameters, LONG if result == "long" else None)
    for pick, number in ((lib.pick_f32, "float"), (lib.pick_f64, "double")):  # a macro defines them
        parameters = f"{number} *probs, int64_t *streams, int64_t *picked, long B, long V"
        declare_function(pick, parameters, None)
    for name, structure in STRUCTURES.items():
        if not hasattr(structure, "_fields_"):  # another thread has been here
            (fields,) = re.findall(rf"^typedef struct {{([^}}]*)}} {name};", source, re.M)
            structure.declared = declared(fields, ";")
            structure._fields_ = [(name, kind) for name, (kind, _) in structure.declared.items()]


def declare_function(function: Any, parameters: str, result: Any) -> None:
    by_name = declared(parameters, ",").values()
    function.argtypes = [parameter.kind for parameter in by_name]
    function.dtypes = [parameter.dtypes for parameter in by_name]
    function.restype = result


class Declared(NamedTuple):
    """A parameter or a field in C."""

    kind: Any  # of ctypes
    dtypes: tuple[torch.dtype, ...]  # of tensors whose address it may be


def declared(source: str, end: str) -> dict[str, Declared]:
    """What C declares, by name, as in `long N, K; const float *x;`."""
    found = {}
    for declaration in source.replace("const ", "").split(end):
        if declaration.strip():
            kind, variables = declaration.split(maxsplit=1)
            for name in variables.split(","):
                one = Declared(TYPES.get(kind), ())
                if "*" in name:
                    one = Declared(POINTER, DTYPES.get(kind, ()))
                found[name.strip(" *\n")] = one
    return found


class Struct(ctypes.Structure):
    """A struct of C, passed by its address. `declare` gives it the fields that it has in C.

    A pointer is given as what it points to, which the caller must keep alive; None is NULL.
    """

    _as_parameter_ = property(ctypes.addressof)

    def __init__(self, **fields: Any):
        self.set(**fields)

    def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            kind, dtypes = self.declared[name]
            setattr(self, name, address(value, dtypes) if kind is POINTER else value)


def address(
    x: Tensor | Struct | ctypes.Array[Any] | None, dtypes: tuple[torch.dtype, ...]
) -> int | None:
    """Where C finds x; None is NULL. dtypes: those that C declares there for tensors.

    TypeError for another dtype, and for numbers that do not lie side by side in memory.
    """
    if not isinstance(x, Tensor):
        return None if x is None else ctypes.addressof(x)
    if x.dtype not in dtypes or not x.is_contiguous():
        raise TypeError(f"C wants {dtypes}, contiguous: {x.dtype} with strides {x.stride()}")
    return x.data_ptr()


def call(name: str, *arguments: Any) -> Any:
    """Call a function of C. Of tensors it gets the addresses; they live until it returns."""
    function = getattr(load_library().library, name)
    given = zip(arguments, function.dtypes, strict=True)
    plain = [address(x, dtypes) if isinstance(x, Tensor) else x for x, dtypes in given]
    return function(*plain)


def floats(*shape: int) -> Tensor:
    """Uninitialized numbers for C, whatever dtype the caller's program prefers."""
    return torch.empty(shape, dtype=torch.float32)


def shaped(x: Tensor | None, *shape: int) -> Tensor | None:
    """x, side by side in memory. ValueError for another shape: C would read beyond its end."""
    if x is None:
        return None
    if x.shape != shape:
        raise ValueError(f"C wants numbers of shape {[*shape]}: these are {[*x.shape]}")
    return x.contiguous()


# ---- Products ----------------------------------------------------------------------------------


def as_quantized(weight: Tensor | Quantized) -> Quantized:
    """A weight as Quantized; a plain matrix has no scales.

    Where a row has at most one scale, its group is rounded up to whole stretches.
    """
    if isinstance(weight, Tensor):
        K = weight.shape[1]
        weight = Quantized(16, weight, None, zero=None, columns=K, group=K)
    if weight.scale is None or weight.scale.shape[1] == 1:
        num_stretches = -(-weight.columns // STRETCH)
        return weight._replace(group=num_stretches * STRETCH)
    return weight


def kind_of(w: Quantized) -> torch.dtype | Kind:
    """The kind of the stored numbers: an element of `KINDS`."""
    return w.values.dtype if w.bits == 16 else w.bits


def multiplies(weight: Tensor | Quantized, dtype: torch.dtype = torch.float32) -> bool:
    """Whether C multiplies x, of this dtype, by this matrix."""
    w = as_quantized(weight)
    if kind_of(w) not in KINDS or dtype not in (torch.float32, torch.bfloat16):
        return False
    if w.values.device.type != "cpu" or library() is None:
        return False
    stretch = min(w.group, STRETCH)  # columns that are multiplied at a time
    return w.group % stretch == 0 and stretch % unit_of(kind_of(w)) == 0


def unit_of(kind: torch.dtype | Kind) -> int:
    """Columns of a unit. Of INT8 the library tells: two or, where ARM multiplies quads, four."""
    if kind == 8:
        return LONG.in_dll(library(), "int8_columns").value
    return UNITS.get(kind, 1)


class Weight(Struct):
    """W [N, K] as blocks.c reads it. `tensors` keeps alive what the addresses point to."""

    @classmethod
    def of(cls, linear: Linear) -> Weight:
        """From a weight that `multiplies` accepts."""
        q = as_quantized(linear.weight)
        kind = kind_of(q)
        values = q.values.detach()
        scale = q.scale
        if kind in (4, "nf4"):
            values = interleave(values)
        if kind == "fp8":  # C reads 2^-8 of each number, and knows no NaN
            values = values.view(torch.int8)
            has_nan = (values & 127 == 127).any(1, keepdim=True)
            scale = (256 * scale.float()).masked_fill_(has_nan, torch.nan)
        if kind in (8, torch.bfloat16):  # a unit becomes an integer
            unit = unit_of(kind)
            if q.columns % unit:
                values = F.pad(values, (0, -q.columns % unit))
            values = values.contiguous().view(INTEGERS[unit * values.itemsize])
        N = len(values)
        K = q.columns
        values = shaped(values, N, -(-K // unit_of(kind)))
        num_groups = -(-K // q.group)
        scale = shaped(scale, N, num_groups)
        zero = shaped(q.zero, N, num_groups)
        common_zero = 0
        if zero is not None and is_one_whole_number(zero):
            common_zero = int(zero[0, 0])
            zero = None
        tensors = dict(
            w=panels(values),
            scale=None if scale is None else panels(scale),
            zero=None if zero is None else panels(zero),
            bias=None if linear.bias is None else shaped(linear.bias.detach().float(), N),
            order=shaped(q.order, K),
        )
        weight = cls(
            **tensors,
            N=N,
            K=K,
            group=q.group,
            kind=KINDS.index(kind),
            scale_type=0 if scale is None else SCALES.index(scale.dtype),
            float_zeros=zero is not None and zero.dtype == torch.float32,
            input_bits=q.input_bits,
            common_zero=common_zero,
        )
        weight.tensors = tensors
        return weight

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W as numbers: an embedding's look-up. int64[R] -> float32[R, K]."""
        R = len(indices)
        out = floats(R, self.K)
        wrong = call("rows", self, indices.contiguous(), out, R)  # the first one's place + 1, or 0
        if wrong:
            raise IndexError(f"row {indices[wrong - 1]} of a matrix of {self.N}")
        return out


def is_one_whole_number(zero: Tensor) -> bool:
    """Whether all groups have the same whole zero, as in symmetric formats: then C reads none. C's
    sums are exact with zeros up to ±255.
    """
    first = zero[0, 0]
    return zero.dtype == torch.int16 and bool(first.abs() <= 255 and (zero == first).all())


def interleave(packed: Tensor) -> Tensor:
    """Eight columns of 4 bits in an int32: 0, 2, 4 and 6 from its lowest bits on, the odd ones in
    its upper half. uint8[N, ⌈K / 2⌉] -> int32[N, ⌈K / 8⌉].
    """
    padded = F.pad(packed, (0, -packed.shape[1] % 4)).contiguous()
    columns = padded.view(torch.int32)  # 0, 1, 2, … from the lowest bits on
    even = lower_halves(columns)
    odd = lower_halves(columns >> 4)
    return even | odd << 16


def lower_halves(x: Tensor) -> Tensor:
    """The lower halves of the four bytes of each int32, side by side in its lowest 16 bits."""
    x = x & 0x0F0F0F0F
    x = (x | x >> 4) & 0x00FF00FF
    return (x | x >> 8) & 0xFFFF


def panels(x: Tensor) -> Tensor:
    """[N, K] -> [⌈N / WIDE⌉, K, WIDE]: 16 rows side by side, padded with 0."""
    N, K = x.shape
    if N % WIDE:
        x = F.pad(x, (0, 0, 0, -N % WIDE))
    return x.view(-1, WIDE, x.shape[1]).transpose(1, 2).contiguous()


def product(x: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ + bias. x: [T, K], float32 or bfloat16; sums are float32 -> [T, N], as x."""
    T, K = x.shape
    if K != weight.K:
        raise ValueError(
            f"rows of {K} numbers cannot be multiplied by a matrix of {weight.K} columns"
        )
    y = floats(T, weight.N)
    if T:
        call("product", x.float().contiguous(), weight, y, T)
    return y.to(x.dtype)


# ---- Between the products, and sampling --------------------------------------------------------


def serves(*tensors: Tensor | None) -> bool:
    """Whether there is C for these tensors: float32 on a CPU, without gradients."""
    if library() is None:
        return False
    for x in tensors:
        if x is None:
            continue
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
    return True


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm: [T, C] each."""
    T, C = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    call("add_norm", x, shaped(delta, T, C), shaped(weight, C), total, y, T, C, eps)
    return total, y


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up: [T, 2 F] -> [T, F]."""
    T, width = x.shape
    y = floats(T, width // 2)
    call("swiglu", x.contiguous(), y, T, width // 2)
    return y


def setting_rows(settings: dict[str, Setting], B: int) -> Tensor:
    """The settings of B rows, as C's `Settings`: float64[B, 4]."""
    given = {name: value for name, value in settings.items() if value is not None}
    values = [*(SETTINGS | given).values()]
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor([values] * B, dtype=torch.float64)
    rows = floats(B, 0)
    return torch.cat([column(value, rows) for value in values], 1)


def row_probabilities(logits: Tensor, masked: bool = True, **settings: Setting) -> Tensor:
    """What sampling.probabilities returns. logits: float32[B, V], V > 0 -> float32[B, V].

    NotFinite if a row is not finite; masked: it may have −∞.
    """
    B, V = logits.shape
    probs = floats(B, V)
    of_rows = setting_rows(settings, B)
    if call("probabilities_of_rows", logits.contiguous(), probs, of_rows, B, V, masked):
        raise NotFinite
    return probs


def pick_tokens(probs: Tensor, streams: Tensor) -> Tensor:
    """What sampling.pick returns. probs: float32 or float64 [B, V], V > 0; streams: int64[B, 1] ->
    int64[B].
    """
    B, V = probs.shape
    streams = streams.expand(B, 1).contiguous()
    picked = torch.zeros(B, dtype=torch.int64)
    name = "pick_f64" if probs.dtype == torch.float64 else "pick_f32"
    call(name, probs.contiguous(), streams, picked, B, V)
    return picked


def verify_drafts(p: Tensor, q: Tensor, drafted: Tensor, rng: Keyed) -> tuple[Tensor, Tensor]:
    """What speculative.verify_block returns. p, q: float32[B, k + 1, V]; drafted: int64[B, k]."""
    B, k = drafted.shape
    V = p.shape[2]
    accepted_and_token = torch.empty(2, B, dtype=torch.int64)
    room = floats(B, V + k + 1)  # for C
    call(
        "verify_drafts",
        *(shaped(x, B, k + 1, V) for x in (p, q)),
        drafted.contiguous(),
        *(shaped(x, B, 1) for x in (rng.keys, rng.streams)),
        accepted_and_token,
        room,
        *(B, k, V, accept_role(0)),
    )
    return tuple(accepted_and_token)


# ---- Attention ---------------------------------------------------------------------------------


class Vectors(Struct):
    """The keys or the values of a cache: the addresses of numbers, scales and zeros, or of as many
    of these as a store has."""

    @classmethod
    def of(cls, store: Store) -> Vectors:
        numbers = store.parts[0]
        group = 2 * numbers.shape[4]  # D or more: a vector has one scale
        if store.bits == 4 and store.group:
            group = store.group
        heads_first = [part.permute(0, 3, 1, 2, 4) for part in store.parts]  # [L, G, N, S, width]
        parts = dict(zip(("numbers", "scale", "zero"), heads_first))
        return cls(**parts, kind=CACHED.index(numbers.dtype), group=group)


class Step(Struct):
    """AttentionMetadata as native.c reads it: addresses of a cache's and of a step's tensors."""


def reads(*stores: Store) -> bool:
    """Whether `attend` reads these keys and values: a head's tokens must lie side by side."""
    for store in stores:
        numbers = store.parts[0]
        if numbers.dtype not in CACHED or numbers.device.type != "cpu":
            return False
        if numbers.stride(2) != numbers.shape[4]:
            return False
    return True


def cache_layout(cache: Cache) -> Step | None:
    """The part of `Step` that all steps over a cache share; None if C does not read this cache."""
    if library() is None:
        return None
    if "native" not in cache.backend:
        layout = None
        if cache.dtype != torch.float64 and reads(cache.keys, cache.values):
            numbers = cache.keys.parts[0]
            width = numbers.shape[4]
            layer, block, _, head, _ = (n // width for n in numbers.stride())  # vectors between
            layout = Step(
                keys=Vectors.of(cache.keys),
                values=Vectors.of(cache.values),
                block_size=numbers.shape[2],
                block=block,
                head=head,
                layer=layer,
            )
        cache.backend["native"] = layout  # not before it is whole: Ctrl-C may come amid it
    return cache.backend["native"]


def step_of(metadata: AttentionMetadata, T: int, layer: int, G: int, D: int) -> Step:
    """Where T new tokens belong, for C; made once for all layers. ValueError if the step has
    another number of tokens, or if its cache is another model's."""
    spec = metadata.cache.spec
    wanted = len(metadata.positions), spec.kv_heads, spec.head_dim
    if (T, G, D) != wanted or not 0 <= layer < spec.layers:
        raise ValueError(
            f"tokens, heads and head_dim are {(T, G, D)} in layer {layer}: in this step and its "
            f"cache they are {wanted} in {spec.layers} layers"
        )
    if "native" not in metadata.backend:
        step = Step.from_buffer_copy(cache_layout(metadata.cache))
        names = "block_tables", "positions", "slot_mapping", "cu_seqlens"
        step.set(**{name: getattr(metadata, name) for name in names})
        step.max_blocks = metadata.block_tables.shape[1]
        metadata.backend["native"] = step
    return metadata.backend["native"]


def attend(
    qkv: Tensor,
    G: int,
    rope: Rope | None,
    metadata: AttentionMetadata,
    layer: int,
    norm: HeadNorm | None = None,
) -> Tensor:
    """What Ops.attend does. qkv: float32[T, H + 2 G, D] -> [T, H, D]."""
    T, num_heads, D = qkv.shape
    H = num_heads - 2 * G
    out = floats(T, H, D)
    turns = [shaped(angles, T, 1, D // 2) for angles in rope or (None, None)]
    weight, eps = norm or (None, 0.0)
    weight = shaped(weight, 2 * D)
    step = step_of(metadata, T, layer, G, D)
    call("attend", qkv.contiguous(), *turns, weight, eps, out, step, layer, T, H, G, D)
    return out


# ---- All layers in one call --------------------------------------------------------------------


def angles_for(
    model: NativeModel | NativeHead, llama: Llama, metadata: AttentionMetadata
) -> Tensor:
    """cos and sin of the positions from 0 to this step's last, or beyond: float32[positions, 2,
    D / 2]. `model` keeps them; a longer text has them made anew."""
    longest = max(sequence.seq_len for sequence in metadata.sequences)
    angles = model.angles
    if longest > len(angles):
        most = llama.config.max_position_embeddings
        positions = torch.arange(max(longest, min(2 * longest, most)))
        angles = torch.cat(llama.rope(positions), 1)
        model.angles = angles
    return angles


class Draws(NamedTuple):
    """How the next k tokens of a sequence are drawn, from the first V."""

    settings: Tensor  # of `setting_rows`: float64[1, 4]
    streams: Tensor  # int64[k, 1], contiguous
    V: int

    def arguments(self, proposal: Proposal) -> tuple[Any, ...]:
        """What C gets. proposal: float32, to be filled; a token stays −1 if its logits are not
        finite."""
        k = len(self.streams)
        return self.settings, self.streams, proposal.tokens, proposal.q, k, self.V


class LayerWeights(Struct):
    """model.Layer: addresses of tensors and of `Weight`s."""

    @classmethod
    def of(cls, layer: Layer) -> LayerWeights:
        parts = {name: getattr(layer, name) for name, _ in cls._fields_}
        if layer.head_norm is not None:
            parts["head_norm"] = layer.head_norm.weight
        return cls(**parts)


class NativeModel(Struct):
    """A float32 model: its layers and its last norm.

    `llama_parts` keeps alive what the addresses point to.
    """

    @classmethod
    def of(cls, llama: Llama, embed: Weight | Linear | None = None) -> NativeModel | None:
        """None if C cannot do all products, or the model is not float32. embed: the embedding, if
        it is another model's."""
        embed = embed or llama.embed
        linears = [embed, llama.head]
        for layer in llama.layers:
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
        all_in_c = all(isinstance(linear, Weight) for linear in linears)
        if not all_in_c or not llama.layers or not serves(llama.norm):
            return None
        config = llama.config
        L = len(llama.layers)
        layers = (LayerWeights * L)(*(LayerWeights.of(layer) for layer in llama.layers))
        native_model = cls(
            layers=layers,
            norm=llama.norm,
            embed=embed,
            head=llama.head,
            L=L,
            H=config.num_attention_heads,
            G=config.num_key_value_heads,
            D=config.head_dim,
            eps=config.rms_norm_eps,
        )
        native_model.llama_parts = layers, llama.norm, linears, list(llama.layers)
        native_model.angles = floats(0)
        return native_model

    def run_layers(
        self,
        x: Tensor,
        angles: Tensor,
        metadata: AttentionMetadata,
        features: Features | None,
    ) -> Tensor:
        """The rows that the head multiplies, [T, C]. x: [T, C], embeddings; it is overwritten.
        features: to be filled; contiguous."""
        out = torch.empty_like(x)
        layers, values = features or ((), None)
        n = len(layers)
        step = step_of(metadata, len(x), self.L - 1, self.G, self.D)
        inputs = self, x, out, angles, step, len(x)
        call("layers", *inputs, (LONG * n)(*layers), n, values)
        return out

    def draft(
        self,
        x: Tensor,
        angles: Tensor,
        metadata: AttentionMetadata,
        draws: Draws,
        proposal: Proposal,
    ) -> None:
        """Draft the next k tokens of a sequence into `proposal`, and their distributions, if it has
        room for them.

        x: [T, C], the embeddings of the unread tokens; it is overwritten. metadata: of these T and
        of all drafts but the last, T + k − 1 tokens.
        """
        T = len(x) + len(draws.streams) - 1
        step = step_of(metadata, T, self.L - 1, self.G, self.D)
        call("drafts", self, x, angles, step, len(x), *draws.arguments(proposal))


class NativeHead(Struct):
    """A float32 EAGLE head (eagle.py), a model of one layer.

    `parts` keeps alive what the addresses point to.
    """

    @classmethod
    def of(cls, head: EagleHead) -> NativeHead | None:
        """None if C cannot do all products, or the head is not float32."""
        embed = head.embed if head.eagle.has_embedding else head.target.embed
        model = NativeModel.of(head, embed)
        if model is None:
            return None
        tokens = head.tokens
        native_head = cls(
            model=model,
            hidden_norm=head.hidden_norm,
            tokens=tokens,
            layer=head.cache_layer,
            norm_before_residual=head.eagle.norm_before_residual,
            norm_output=head.eagle.norm_output,
        )
        native_head.parts = model, head.hidden_norm, tokens
        native_head.angles = floats(0)
        return native_head

    def forward(
        self, f: Tensor, tokens: Tensor, angles: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """What EagleHead.forward returns. f: [T, C], tokens: int64[T] -> [T, C]."""
        z = torch.empty_like(f)
        inputs = f.contiguous(), tokens.contiguous()
        call("head_rows", self, *inputs, z, angles, self.step_of(metadata, len(f)), len(f))
        return z

    def step_of(self, metadata: AttentionMetadata, T: int) -> Step:
        model = self.parts[0]
        return step_of(metadata, T, self.layer, model.G, model.D)

    def draft(
        self,
        z: Tensor,
        angles: Tensor | None,
        metadata: AttentionMetadata | None,
        draws: Draws,
        proposal: Proposal,
    ) -> None:
        """Draft the next k tokens, as NativeModel.draft does.

        z: [1, C], the last one; it is overwritten. metadata: of all drafts but the last; None, as
        angles are, where there is only one.
        """
        step = self.step_of(metadata, len(draws.streams) - 1) if metadata else None
        call("head_drafts", self, z, angles, step, *draws.arguments(proposal))


# The classes of C's structs, and the types of C's declarations.
STRUCTURES = dict(
    Weight=Weight,
    Vectors=Vectors,
    Step=Step,
    Layer=LayerWeights,
    Model=NativeModel,
    Head=NativeHead,
)
TYPES = dict(long=LONG, int64_t=LONG, float=FLOAT, **STRUCTURES)
DTYPES = dict(  # of what pointers point to; void: numbers of weights and of caches
    float=(torch.float32,),
    double=(torch.float64,),
    int64_t=(torch.int64,),
    int32_t=(torch.int32,),
    int16_t=(torch.int16,),
    uint16_t=(torch.bfloat16,),
    Settings=(torch.float64,),
    void=(*CACHED, *INTEGERS.values(), torch.float16),
)


def main() -> None:
    """The demonstration: whether there is C here; then five texts, made in several ways, and how
    many are as each is alone: their tokens, and ln p of the 20 most probable ones at each place."""
    warnings.simplefilter("ignore")  # it is told below
    reason = why_not()
    if reason:
        print(f"there is no C here: {reason}. Everything runs as PyTorch does it.")
        return
    print("there is C here. Texts that are the same, to the bit, as each alone on one thread:")
    prompts = ["Once upon a time", "Tom had a red ball. " * 5, "Lily", "The sun was", "One day"]
    ways = {
        "in a batch, on two threads": {},
        "with a draft": dict(draft="tiny-draft", gamma=4),
        "with n-grams": dict(draft="ngram", gamma=4),
        "with an EAGLE head": dict(draft="tiny-eagle", gamma=3),
        "with memory for two": dict(kv_memory=1e6),
    }
    drawn = dict(verify="coupled", temperature=0.8, seed=1, max_tokens=40, logprobs=20)
    model = Model.load("tiny")
    torch.set_num_threads(1)
    alone = [generate(prompt, model, **drawn) for prompt in prompts]
    torch.set_num_threads(2)
    for name, way in ways.items():
        num_same = 0
        for text, wanted in zip(generate(prompts, model, **drawn, **way), alone):
            num_same += (text.tokens, text.logprobs) == (wanted.tokens, wanted.logprobs)
        print(f"  {name:30}{num_same} of {len(prompts)}")


if __name__ == "__main__":
    from generate import generate
    from loading import Model

    main()
