"""Weights in fewer bits: the `quantization_config` of a config.json.

A `Layout` says how a folder stores the matrices of the layers. There are two kinds:

  - `Quantization` is quant.py's: the folder holds the model's own tensors.
  - `Foreign` is the base of other programs' layouts (layouts.py), which store a matrix in tensors
    of other shapes. A layout checks its settings (`parse`), names the tensors of a matrix
    (`headers`), and makes ours of them (`parts`).

Both make an `empty` matrix in memory, and their `to_dict` is the `quantization_config` again.

Invariant: a number is read as it is stored, never rounded. (A scale becomes a float32.)

    N rows, K columns, M groups of a row that share a scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from checkpoint.files import Json
from errors import UserError, brief
from quant import STORED, Kind, Quantized

if TYPE_CHECKING:
    from checkpoint.tensors import Checkpoint

OWN_METHOD = "quant.py"  # quant_method of the folders that this project writes
VOCABULARY = ("embed", "head")  # matrices of the model whose rows are tokens
PARTS = ("weight", "weight_scale", "weight_zero", "weight_order")  # of a quantized matrix

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


def header_of(tensor: Tensor) -> Header:
    """The header that a stored tensor needs to fill this one."""
    return Header(list(tensor.shape), EXACT.get(tensor.dtype, FLOAT))


def check_setting(name: str, value: Any, *supported: Any) -> None:
    """UserError unless the value is one of those supported. (1 is not True.)"""
    texts = [repr(known) for known in supported]
    if repr(value) not in texts:
        rule = " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]
        raise UserError(f"{name} is {value!r}; it must be {rule}")


# ---- Layouts


@dataclass(frozen=True)
class Layout:
    """How the matrices of the layers are stored."""

    bits: Kind
    group: int = 128  # columns that share a scale in 4 bits; of a Foreign layout 0: the whole row
    head_bits: int = 16  # of embedding and head; 16: not quantized
    method: str = "rtn"  # how the numbers were found: loading does not use it
    activations: int = 16  # bits of the layers' inputs; 8: each row is rounded as the weights are
    ordered: bool = False  # whether columns are stored in another order

    @property
    def name(self) -> str:
        """The numbers' name: INT8, INT4, FP8 or NF4."""
        return self.bits.upper() if isinstance(self.bits, str) else f"INT{self.bits}"

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two numbers."""
        return STORED[self.bits] == torch.uint8

    def empty(self, name: str, N: int, K: int, device: torch.device | str) -> Quantized | None:
        """An uninitialized matrix of the model ("embed", "head", "3.qkv"); None: not quantized."""
        raise NotImplementedError


@dataclass(frozen=True)
class Quantization(Layout):
    """quant.py's layout."""

    head_bits: int = 8

    def __post_init__(self) -> None:
        methods = ("rtn", "gptq", "awq", "awq+gptq", "smoothquant")
        check_setting("quantization: bits", self.bits, *STORED)
        check_setting("quantization: group", self.group, 32, 64, 128)
        check_setting("quantization: head_bits", self.head_bits, 16, 8, 4)
        check_setting("quantization: activations", self.activations, 16, 8)
        check_setting("quantization: method", self.method, *methods)
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
        return dict(
            quant_method=OWN_METHOD,
            bits=self.bits,
            group=self.group,
            head_bits=self.head_bits,
            method=self.method,
            activations=self.activations,
        )

    @property
    def shard_multiple(self) -> int:
        """Columns that must stay together where several processes share a row."""
        return self.group if self.is_packed else 1

    def empty(self, name: str, N: int, K: int, device: torch.device | str) -> Quantized | None:
        bits = self.head_bits if name in VOCABULARY else self.bits
        if bits == 16:
            return None
        group = self.group if STORED[bits] == torch.uint8 else K
        inputs = 16 if name in VOCABULARY else self.activations
        return Quantized.empty(N, K, bits, group, device)._replace(input_bits=inputs)


class Matrix(NamedTuple):
    """A quantized matrix of the model."""

    name: str  # without ".weight"
    N: int
    K: int
    M: int

    def key(self, suffix: str) -> str:
        """The name of one of its tensors."""
        return f"{self.name}.{suffix}"


class Parts(NamedTuple):
    """The tensors of a quantized matrix, up to broadcasting."""

    weight: Tensor  # [N, K], or two numbers a byte
    scale: Tensor  # [N, M]
    zero: Tensor | None = None  # [N, M], less the middle of the range; None: all are in the middle
    order: Tensor | None = None  # [K]


Tensors = Mapping[str, Tensor]  # of the model, by name
Headers = Mapping[str, Header]  # of the folder's tensors, by name
Get = Callable[[str], Tensor | None]  # the folder's tensor of this suffix ("qweight"), if any


@dataclass(frozen=True)
class Foreign(Layout):
    """Another program's layout. source: its `quantization_config`, which `parse` has checked."""

    zeros: bool = False  # whether 8 bits have zeros, too
    source: Json = field(default_factory=dict, repr=False)

    def headers(self, matrix: Matrix, stored: Headers) -> dict[str, Header]:
        """The tensors that the folder must hold for a matrix, by suffix. stored: what it holds."""
        raise NotImplementedError

    def parts(self, matrix: Matrix, get: Get) -> Parts:
        """A matrix, from the folder's tensors."""
        raise NotImplementedError

    def columns_of_scale(self, K: int) -> int:
        """Columns that share a scale, of K in a row."""
        return min(self.group or K, K)

    @property
    def shard_multiple(self) -> int:
        """Columns that must stay together where several processes share a row."""
        if self.group:
            return self.group
        return 2 if self.is_packed else 1

    def to_dict(self) -> Json:
        return self.source

    def empty(self, name: str, N: int, K: int, device: torch.device | str) -> Quantized | None:
        if name in VOCABULARY:
            return None
        if K % 2 and self.is_packed:
            raise UserError(
                f"quantization_config: 4 bits, but a matrix has {K} columns; another program's "
                "must have an even number: name a folder in 16 bits, with --bits 4"
            )
        weight = Quantized.empty(
            N,
            K,
            self.bits,
            self.columns_of_scale(K),
            device,
            torch.float32,
            self.zeros,
            self.ordered,
        )
        return weight._replace(input_bits=self.activations)

    def expected(self, tensors: Tensors, stored: Headers) -> dict[str, Header]:
        """The tensors that the folder must hold for the model's. stored: what it holds."""
        expected = {name: header_of(tensors[name]) for name in plain_names(tensors)}
        for matrix in matrices(tensors):
            for suffix, header in self.headers(matrix, stored).items():
                expected[matrix.key(suffix)] = header
        return expected

    def convert(self, tensors: Tensors, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """(name, numbers) for each of the model's tensors, one after the other."""
        for name in plain_names(tensors):
            yield name, checkpoint.read(name)
        first_orders = dict[int, Tensor]()  # of each product: q, k and v share one
        for matrix in matrices(tensors):
            try:
                parts = self._checked_parts(matrix, tensors, checkpoint)
                if parts.order is not None:
                    product = id(tensors[matrix.key("weight_order")])
                    first = first_orders.setdefault(product, parts.order)
                    if not torch.equal(parts.order, first):
                        raise UserError("its g_idx differs from that of another part of a product")
            except UserError as error:
                raise UserError(
                    f"{matrix.name}: {brief(error)}: fetch the model again, or name one in 16 bits"
                ) from None
            for suffix, part in zip(PARTS, parts):
                if part is not None:
                    yield matrix.key(suffix), part

    def _checked_parts(self, matrix: Matrix, tensors: Tensors, checkpoint: Checkpoint) -> Parts:
        """A matrix, its zeros as quant.py stores them."""

        def get(suffix: str) -> Tensor | None:
            name = matrix.key(suffix)
            return checkpoint.read(name) if name in checkpoint.headers else None

        parts = self.parts(matrix, get)
        if not parts.scale.isfinite().all():
            raise UserError("its scales must be finite numbers")
        bias = get("bias")
        if bias is not None and matrix.key("bias") not in tensors and bias.any():
            raise UserError("its bias is not all 0, and config.json asks for none")
        if self.bits != 4:
            return parts
        zero = torch.tensor(8) if parts.zero is None else parts.zero + 8
        return parts._replace(zero=zero)


def matrices(tensors: Tensors) -> list[Matrix]:
    """The quantized matrices among the model's tensors."""
    result = []
    for name, scale in tensors.items():
        if name.endswith(".weight_scale"):
            weight = tensors[name.removesuffix("_scale")]
            N, K = weight.shape
            if weight.dtype == torch.uint8:
                K = 2 * K  # two numbers a byte
            result.append(Matrix(name.removesuffix(".weight_scale"), N, K, scale.shape[1]))
    return result


def plain_names(tensors: Tensors) -> list[str]:
    """The model's tensors that are no part of a quantized matrix."""
    quantized = {matrix.key(suffix) for matrix in matrices(tensors) for suffix in PARTS}
    return [name for name in tensors if name not in quantized]
