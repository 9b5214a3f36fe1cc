"""Weights in fewer bits: the `quantization_config` of a config.json.

A `Layout` says how a folder stores the matrices of the layers. It answers four questions:

    empty       a matrix in memory, to be filled (quant.py's `Quantized`)
    expected    the tensors that the folder must hold for the model's tensors: names, shapes, dtypes
    convert     the folder's tensors -> the model's, one after the other
    to_dict     the `quantization_config` again

`Quantization` is the layout of quant.py: the folder holds the model's own tensors. `Foreign` is the
base of other programs' layouts (layouts.py), which store a matrix in tensors of other shapes.

Invariant: a number is read as it is stored, never rounded. (A scale becomes a float32.)

    N rows, K columns, M groups of a row that share a scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from errors import UserError, brief
from quant import STORED, Kind, Quantized

if TYPE_CHECKING:
    from checkpoint.tensors import Checkpoint

OWN_METHOD = "quant.py"  # quant_method of the folders that this project writes
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

    @property
    def together(self) -> int:
        """Columns that must stay together where several processes share a row."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        raise NotImplementedError

    def empty(self, N: int, K: int, device: torch.device | str, head: bool = False) -> Quantized:
        """An uninitialized matrix. head: whether it is the embedding or the head."""
        raise NotImplementedError

    def expected(
        self, tensors: Mapping[str, Tensor], stored: Mapping[str, Header]
    ) -> dict[str, Header]:
        """The tensors that the folder must hold. tensors: the model's. stored: the folder's."""
        raise NotImplementedError

    def convert(
        self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, numbers) for each of the model's tensors, one after the other."""
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
    def parse(cls, how: dict[str, Any]) -> Quantization:
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

    def to_dict(self) -> dict[str, Any]:
        return dict(
            quant_method=OWN_METHOD,
            bits=self.bits,
            group=self.group,
            head_bits=self.head_bits,
            method=self.method,
            activations=self.activations,
        )

    @property
    def together(self) -> int:
        return self.group if self.is_packed else 1

    def empty(self, N: int, K: int, device: torch.device | str, head: bool = False) -> Quantized:
        bits = self.head_bits if head else self.bits
        group = self.group if STORED[bits] == torch.uint8 else K
        inputs = 16 if head else self.activations
        return Quantized.empty(N, K, bits, group, device)._replace(inputs=inputs)

    def expected(
        self, tensors: Mapping[str, Tensor], stored: Mapping[str, Header]
    ) -> dict[str, Header]:
        return {name: header_of(tensor) for name, tensor in tensors.items()}

    def convert(
        self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
    ) -> Iterator[tuple[str, Tensor]]:
        for name in tensors:
            yield name, checkpoint.read(name)


class Matrix(NamedTuple):
    """A quantized matrix of the model."""

    name: str  # without ".weight"
    N: int
    K: int
    M: int


class Parts(NamedTuple):
    """The tensors of a quantized matrix, up to broadcasting."""

    weight: Tensor  # [N, K], or two numbers a byte
    scale: Tensor  # [N, M]
    zero: Tensor | None = None  # [N, M], less the middle of the range; None: all are in the middle
    order: Tensor | None = None  # [K]


Find = Callable[[str], Header | None]  # by a tensor's name after the matrix's: "qweight"
Get = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Foreign(Layout):
    """Another program's layout. source: its `quantization_config`, which `parse` has checked."""

    zeros: bool = False  # whether 8 bits have zeros, too
    source: dict[str, Any] = field(default_factory=dict, repr=False)

    def headers(self, matrix: Matrix, find: Find) -> dict[str, Header]:
        """The tensors that the folder must hold for a matrix. find: what it holds."""
        raise NotImplementedError

    def parts(self, matrix: Matrix, get: Get) -> Parts:
        """A matrix, from the folder's tensors."""
        raise NotImplementedError

    def columns_of_scale(self, K: int) -> int:
        """Columns that share a scale, of K in a row."""
        return min(self.group or K, K)

    @property
    def together(self) -> int:
        if self.group:
            return self.group
        return 2 if self.is_packed else 1

    def to_dict(self) -> dict[str, Any]:
        return self.source

    def empty(self, N: int, K: int, device: torch.device | str, head: bool = False) -> Quantized:
        if K % 2 and self.is_packed:
            raise UserError(
                f"quantization_config: 4 bits, but a matrix has {K} columns; another program's "
                "must have an even number: name a folder in 16 bits, with --bits 4"
            )
        group = self.columns_of_scale(K)
        weight = Quantized.empty(
            N, K, self.bits, group, device, torch.float32, self.zeros, self.ordered
        )
        return weight._replace(inputs=self.activations)

    def expected(
        self, tensors: Mapping[str, Tensor], stored: Mapping[str, Header]
    ) -> dict[str, Header]:
        expected = {name: header_of(tensor) for name, tensor in plain_tensors(tensors).items()}
        for matrix in matrices(tensors):
            find = finder(matrix, stored)
            for suffix, header in self.headers(matrix, find).items():
                expected[f"{matrix.name}.{suffix}"] = header
        return expected

    def convert(
        self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
    ) -> Iterator[tuple[str, Tensor]]:
        for name in plain_tensors(tensors):
            yield name, checkpoint.read(name)
        first_orders = dict[int, tuple[str, Tensor]]()  # of each product, with its matrix
        for matrix in matrices(tensors):
            try:
                parts = self._checked_parts(matrix, tensors, checkpoint)
                if parts.order is not None:
                    product = id(tensors[f"{matrix.name}.weight_order"])
                    first = first_orders.setdefault(product, (matrix.name, parts.order))
                    check_order(parts.order, *first)
            except UserError as error:
                raise UserError(
                    f"{matrix.name}: {brief(error)}: fetch the model again, or name one in 16 bits"
                ) from None
            for name, part in zip(PARTS, parts):
                if part is not None:
                    yield f"{matrix.name}.{name}", part

    def _checked_parts(
        self, matrix: Matrix, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
    ) -> Parts:
        """A matrix, its zeros as quant.py stores them."""

        def get(suffix: str) -> Tensor | None:
            name = f"{matrix.name}.{suffix}"
            return checkpoint.read(name) if name in checkpoint.headers else None

        parts = self.parts(matrix, get)
        if not parts.scale.isfinite().all():
            raise UserError("its scales must be finite numbers")
        bias = get("bias")
        if bias is not None and f"{matrix.name}.bias" not in tensors and bias.any():
            raise UserError("its bias is not all 0, and config.json asks for none")
        if self.bits != 4:
            return parts
        zero = torch.tensor(8) if parts.zero is None else parts.zero + 8
        return parts._replace(zero=zero)


def matrices(tensors: Mapping[str, Tensor]) -> list[Matrix]:
    """The quantized matrices among the model's tensors."""
    found = []
    for name, scale in tensors.items():
        if name.endswith(".weight_scale"):
            weight = tensors[name.removesuffix("_scale")]
            numbers_a_byte = 2 if weight.dtype == torch.uint8 else 1
            K = weight.shape[1] * numbers_a_byte
            found.append(Matrix(name.removesuffix(".weight_scale"), len(weight), K, scale.shape[1]))
    return found


def plain_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors that are no part of a quantized matrix."""
    quantized = {f"{matrix.name}.{part}" for matrix in matrices(tensors) for part in PARTS}
    return {name: tensor for name, tensor in tensors.items() if name not in quantized}


def finder(matrix: Matrix, stored: Mapping[str, Header]) -> Find:
    """A function that finds the headers of a matrix."""
    return lambda suffix: stored.get(f"{matrix.name}.{suffix}")


def check_order(order: Tensor, first_name: str, first_order: Tensor) -> None:
    """UserError unless a matrix has the order of the first one of its product (q, k and v, say)."""
    if not torch.equal(order, first_order):
        raise UserError(
            f"its g_idx differs from that of {first_name}, and both are one product here"
        )
