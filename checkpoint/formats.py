"""Weights in fewer bits: the `quantization_config` of a config.json.

A `Layout` says how a folder stores the matrices of the layers. It checks its settings (`parse`),
makes an `empty` matrix in memory, names the tensors that a folder has of it (`tensors`), and makes
ours of them (`convert`). Its `to_dict` is the `quantization_config` again.

  - `Quantization` is quant.py's: the folder holds the model's own tensors.
  - Other programs' (layouts.py) store a matrix in tensors of other shapes.

Invariant: a number is read as it is stored, never rounded. (A scale of another program may get a
wider type; ours stays a bfloat16.)

    N rows, K columns, M groups of a row that share a scale
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from checkpoint.files import Json
from errors import UserError, brief
from quant import FORMATS, Kind, Quantized

if TYPE_CHECKING:
    from checkpoint.tensors import Checkpoint

OWN_METHOD = "quant.py"  # quant_method of the folders that this project writes
VOCABULARY = ("embed", "head")  # matrices of the model whose rows are tokens

# ---- The header of a stored tensor

FLOATS = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
FLOAT = "float"  # any of FLOATS
EXACT = {  # dtypes of quantized weights
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


class Header(NamedTuple):
    """A tensor in a safetensors file."""

    shape: list[int]
    dtype: str  # as safetensors names it, or FLOAT


Headers = Mapping[str, Header]  # by name
NamedWeights = Mapping[str, Tensor | Quantized]  # of the model


def header_of(tensor: Tensor) -> Header:
    """The header that a stored tensor needs to fill this one."""
    return Header(list(tensor.shape), EXACT.get(tensor.dtype, FLOAT))


def check_setting(name: str, value: Any, *supported: Any) -> None:
    """UserError unless the value is one of those supported. (1 is not True.)"""
    texts = [repr(known) for known in supported]
    if repr(value) not in texts:
        rule = " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]
        raise UserError(f"{name} is {value!r}; it must be {rule}")


def check(how: Any, where: str = "quantization_config", **known: tuple[Any, ...]) -> None:
    """UserError unless `how` is an object, each setting with one of its known values. An absent
    setting is None."""
    if not isinstance(how, dict):
        raise UserError(f"{where} is {how!r}; it must be an object")
    for name, values in known.items():
        check_setting(f"{where}: {name}", how.get(name), *values)


# ---- Layouts

Find = Callable[[str], Header | None]  # what the folder has under this suffix ("qweight")
Tensors = Mapping[str, Tensor]  # by suffix


def empty_matrix(
    N: int,
    K: int,
    bits: Kind,
    group: int,
    device: torch.device | str,
    scale: torch.dtype = torch.bfloat16,
    zero: torch.dtype | None = None,
) -> Quantized:
    """An uninitialized matrix. scale, zero: their types; 4 bits always have zeros."""
    make = partial(torch.empty, device=device)
    form = FORMATS[bits]
    zero = zero or form.zero
    M = math.ceil(K / group)
    return Quantized(
        bits=bits,
        values=make(N, math.ceil(K / form.in_a_byte), dtype=form.dtype),
        scale=make(N, M, dtype=scale),
        zero=make(N, M, dtype=zero) if zero else None,
        columns=K,
        group=group,
    )


@dataclass(frozen=True)
class Layout:
    """How the matrices of the layers are stored; here, as tensors of ours."""

    bits: Kind
    group: int | None = None  # columns that share a scale; None: all of a row
    head_bits: int = 16  # of embedding and head; 16: not quantized
    method: str = "rtn"  # how the numbers were found: loading does not use it
    activations: int = 16  # bits of the layers' inputs; 8: each row is rounded as the weights are
    ordered: bool = False  # whether columns are stored in another order
    zeros: bool = False  # whether 8 bits have zeros, too
    scale: torch.dtype = torch.float32  # of scales in memory
    # The settings in config.json, which `parse` has checked.
    source: Json = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The numbers' name: INT8, INT4, FP8 or NF4."""
        return self.bits.upper() if isinstance(self.bits, str) else f"INT{self.bits}"

    @property
    def shard_multiple(self) -> int:
        """Columns that must stay together where several processes share a row."""
        return self.group or FORMATS[self.bits].in_a_byte

    def to_dict(self) -> Json:
        """The `quantization_config`."""
        return self.source

    # ---- In memory

    def columns_of_scale(self, bits: Kind, K: int) -> int:
        """Columns that share a scale, of K in a row."""
        if K % FORMATS[bits].in_a_byte:
            raise UserError(
                f"quantization_config: 4 bits, but a matrix has {K} columns; another program's "
                "must have an even number: name a folder in 16 bits, with --bits 4"
            )
        return min(self.group or K, K)

    def empty(self, name: str, N: int, K: int, device: torch.device | str) -> Quantized | None:
        """An uninitialized matrix of the model ("embed", "head", "3.qkv"); None: not quantized."""
        is_layer = name not in VOCABULARY
        bits = self.bits if is_layer else self.head_bits
        if bits == 16:
            return None
        zero = torch.int16 if self.zeros else None
        group = self.columns_of_scale(bits, K)
        return empty_matrix(N, K, bits, group, device, self.scale, zero)._replace(
            order=torch.empty(K, dtype=torch.int64, device=device) if self.ordered else None,
            input_bits=self.activations if is_layer else 16,
        )

    # ---- In the folder

    def tensors(self, weight: Quantized, find: Find) -> dict[str, str]:
        """The tensors that the folder must hold for a matrix, by suffix: "M N float" has M rows of
        N floating-point numbers, and in N-words there is room for N numbers."""
        values = f"N K-bytes {EXACT[weight.values.dtype]}"
        tensors = {"weight": values, "weight_scale": "N M float"}
        if weight.zero is not None:
            tensors["weight_zero"] = "N M I16"
        return tensors

    def convert(self, weight: Quantized, tensors: Tensors) -> Quantized:
        """A matrix, from `tensors` of the folder. Its scales and zeros may be of any shape that
        `expand` makes [N, M]; a zero of None is the middle."""
        scale = tensors["weight_scale"]
        zero = tensors.get("weight_zero")
        return weight._replace(values=tensors["weight"], scale=scale, zero=zero)

    def headers(self, name: str, weight: Quantized, stored: Headers) -> Headers:
        """The tensors that the folder must hold for a matrix. stored: all that it holds."""
        module = name.removesuffix("weight")  # with its dot
        N, K = weight.shape
        in_a_word = 4 * FORMATS[weight.bits].in_a_byte
        sizes = {
            "N": N,
            "K": K,
            "M": weight.scale.shape[1],
            "N-words": math.ceil(N / in_a_word),
            "K-words": math.ceil(K / in_a_word),
            "K-bytes": weight.values.shape[1],
        }
        tensors = self.tensors(weight, lambda suffix: stored.get(module + suffix))
        headers = {}
        for suffix, text in tensors.items():
            *dims, dtype = text.split()
            shape = [sizes.get(dim) or int(dim) for dim in dims]
            headers[module + suffix] = Header(shape, dtype)
        return headers

    def read(self, name: str, weights: NamedWeights, checkpoint: Checkpoint) -> Quantized:
        """The folder's numbers of a matrix. weights: the model's, for their shapes."""
        module = name.removesuffix("weight")
        weight = weights[name]
        parts = self.headers(name, weight, checkpoint.headers)
        tensors = {part.removeprefix(module): checkpoint.read(part) for part in parts}
        try:
            matrix = self.convert(weight, tensors)
            if not matrix.scale.isfinite().all():
                raise UserError("its scales must be finite numbers")
            if f"{module}bias" not in weights and "bias" in tensors and tensors["bias"].any():
                raise UserError("its bias is not all 0, and config.json asks for none")
        except UserError as error:
            raise UserError(
                f"{module[:-1]}: {brief(error)}: fetch the model again, or name one in 16 bits"
            ) from None
        zero = weight.zero
        if zero is not None:
            middle = torch.tensor(8 if weight.bits == 4 else 0, dtype=torch.int64)
            zero = (middle if matrix.zero is None else matrix.zero).expand(zero.shape)
        return matrix._replace(scale=matrix.scale.expand(weight.scale.shape), zero=zero)


@dataclass(frozen=True)
class Quantization(Layout):
    """quant.py's layout. group: in 4 bits and NF4; None: 128, in NF4 64."""

    head_bits: int = 8
    scale: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        methods = ("rtn", "gptq", "awq", "awq+gptq", "smoothquant")
        check(
            vars(self),
            "quantization",
            bits=(*FORMATS,),
            head_bits=(16, 8, 4),
            activations=(16, 8),
            method=methods,
        )
        if self.group is None:
            object.__setattr__(self, "group", FORMATS[self.bits].group or 128)
        check_setting("quantization: group", self.group, 32, 64, 128)
        if self.method == "smoothquant" and (self.bits, self.activations) != (8, 8):
            raise UserError(
                "quantization: method smoothquant is for weights and activations of 8 bits, "
                f"not {self.bits} and {self.activations}"
            )
        if self.activations == 8 and self.bits not in (8, "fp8"):
            raise UserError(
                f"quantization: activations of 8 bits need weights in 8 or fp8, not {self.bits}"
            )
        if "gptq" in self.method and self.bits not in (8, 4):
            raise UserError(
                f"quantization: method {self.method} needs whole numbers: bits 8 or 4, "
                f"not {self.bits}"
            )

    @classmethod
    def parse(cls, how: Json) -> Quantization:
        """From a `quantization_config`. UserError for a setting that is not honoured."""
        required = {"bits", "group", "head_bits", "method"}
        known = required | {"activations"}
        settings = {name: value for name, value in how.items() if name != "quant_method"}
        if not required <= settings.keys() <= known:
            names = ", ".join(sorted(known))
            raise UserError(
                f"quantization_config is {how!r}, which is not supported; "
                f"{OWN_METHOD}'s has {names}"
            )
        return cls(**settings)

    def to_dict(self) -> Json:
        names = ("bits", "group", "head_bits", "method", "activations")
        return {"quant_method": OWN_METHOD} | {name: getattr(self, name) for name in names}

    @property
    def shard_multiple(self) -> int:
        return self.group if FORMATS[self.bits].group else 1

    def columns_of_scale(self, bits: Kind, K: int) -> int:
        return self.group if FORMATS[bits].group else K
