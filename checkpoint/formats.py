"""How a folder's weights are stored in fewer bits: `quantization_config` of its config.json.

A place is a tensor of the model, to be filled. `Quantization` is the layout of quant.py: a folder holds a tensor for
each place. `Foreign` is the base of other programs' layouts (layouts.py): `files` names the tensors that a folder holds
for a matrix, `parts` converts them. Names, dtypes and shapes are audited before a number is read.

Invariant: a number is read as it is stored, never rounded.

    N rows, K columns, M groups of a row
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from errors import UserError, brief
from quant import STORED, Kind, Quantized

OWN = "quant.py"  # quant_method of the folders that quant.py writes
PARTS = ("weight", "weight_scale", "weight_zero", "weight_order")  # of a quantized matrix here

Headers = Mapping[
    str, tuple[Any, list[int], str]
]  # of a folder's tensors: name -> file, shape, dtype
Has = Callable[
    [str], tuple[Any, ...]
]  # a tensor's suffix -> its shape and dtype in the folder; or ()
Get = Callable[[str], Tensor | None]  # a tensor's suffix -> the tensor
Files = dict[
    str, tuple[torch.dtype, list[int]]
]  # a tensor's suffix -> dtype (float32: any float) and shape


def supported(name: str, value: Any, *known: Any) -> None:
    """ValueError unless `value` is one of the known ones."""
    *first, last = map(repr, known)
    if repr(value) not in (*first, last):
        raise UserError(
            f"{name} is {value!r}; it must be {', '.join(first)}{' or ' if first else ''}{last}"
        )


@dataclass(frozen=True)
class Quantization:
    """How quant.py stored the weights. Loading does not use `method`."""

    bits: Kind  # of the layers
    group: int = 128  # numbers that share a scale in 4 bits
    head_bits: int = 8  # of embedding and head; 16: not quantized
    method: str = "rtn"  # how the integers were found
    activations: int = 16  # bits of the layers' inputs; 8: rounded as the weights are

    def __post_init__(self) -> None:
        for name, known in dict(
            bits=STORED,
            group=(32, 64, 128),
            head_bits=(16, 8, 4),
            activations=(16, 8),
            method=("rtn", "gptq", "awq", "awq+gptq", "smoothquant"),
        ).items():
            supported(f"quantization: {name}", getattr(self, name), *known)
        for wrong, rule in (
            (
                self.method == "smoothquant" and (self.bits, self.activations) != (8, 8),
                "method smoothquant is for "
                f"weights and activations of 8 bits, not {self.bits} and {self.activations}",
            ),
            (
                self.activations == 8 and self.bits not in (8, "fp8"),
                f"activations of 8 bits need weights in 8 or fp8, not {self.bits}",
            ),
            (
                "gptq" in self.method and self.bits not in (8, 4),
                f"method {self.method} needs whole numbers: bits 8 or 4, not {self.bits}",
            ),
        ):
            if wrong:
                raise UserError(f"quantization: {rule}")

    ordered = False  # whether columns are stored in another order

    @property
    def together(self) -> int:
        """Columns that share a scale, where a row has several scales; else 1."""
        return self.group if STORED[self.bits] == torch.uint8 else 1

    @property
    def name(self) -> str:
        """The numbers' name: INT8, INT4, FP8 or NF4."""
        return self.bits.upper() if isinstance(self.bits, str) else f"INT{self.bits}"

    @classmethod
    def parse(cls, how: dict[str, Any]) -> "Quantization":
        """From a `quantization_config` of this layout. ValueError for a setting that is not honoured."""
        names = [*cls.__dataclass_fields__]
        if not {*names[:4]} <= how.keys() - {"quant_method"} <= {*names}:
            raise UserError(
                f"quantization_config is {how!r}, which is not supported; {OWN}'s has {', '.join(names)}"
            )
        return cls(**{name: how[name] for name in names if name in how})

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` that `parse` reads."""
        return dict(quant_method=OWN, **vars(self))

    def empty(self, N: int, K: int, device: torch.device | str, head: bool = False) -> Quantized:
        """An uninitialized matrix. head: whether it is the embedding or the head."""
        bits = self.head_bits if head else self.bits
        group = self.group if STORED[bits] == torch.uint8 else K
        return Quantized.empty(N, K, bits, group, device)._replace(
            inputs=16 if head else self.activations
        )

    def stored(self, places: Mapping[str, Tensor], headers: Headers) -> Mapping[str, Tensor]:
        """The tensors that the folder must hold for these places: name -> dtype and shape, on the meta device."""
        return places

    def tensors(
        self, places: Mapping[str, Tensor], names: Iterable[str], read: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(place, tensor for it), one after the other. names: the folder's tensors, all of which `stored` asked for."""
        return ((name, read(name)) for name in places)


@dataclass(frozen=True)
class Foreign(Quantization):
    """Another program's layout. Embedding and head are not quantized. Scales become float32, which loses nothing."""

    head_bits: int = 16
    zeros: bool = False  # whether 8 bits have zeros, too
    ordered: bool = False  # whether columns must be sorted by group
    source: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # `quantization_config`, as it is

    def __post_init__(self) -> None:  # `parse` has checked all; group 0: the whole row
        pass

    def to_dict(self) -> dict[str, Any]:
        return self.source

    def files(self, N: int, K: int, M: int, has: Has) -> Files:
        """The tensors that the folder must hold for a matrix [N, K]."""
        raise NotImplementedError

    def parts(self, get: Get, N: int, K: int, group: int) -> tuple[Tensor | None, ...]:
        """The PARTS of a matrix, up to broadcasting, from its tensors; zeros of 4 bits less 8, None if all are 0."""
        raise NotImplementedError

    @property
    def together(self) -> int:
        return self.group or (2 if STORED[self.bits] == torch.uint8 else 1)

    def width(self, K: int) -> int:
        """Columns that share a scale."""
        return min(self.group or K, K)

    def empty(self, N: int, K: int, device: torch.device | str, head: bool = False) -> Quantized:
        if K % 2 and STORED[self.bits] == torch.uint8:
            raise UserError(
                f"quantization_config: 4 bits, but a matrix has {K} columns; another program's must have "
                "an even number: name a folder in 16 bits, with --bits 4"
            )
        found = Quantized.empty(
            N, K, self.bits, self.width(K), device, torch.float32, self.zeros, self.ordered
        )
        return found._replace(inputs=self.activations)

    def _matrices(self, places: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int, int]]:
        """Of each quantized matrix: name, N, K and M."""
        for name, scale in places.items():
            if name.endswith(".weight_scale"):
                weight = places[name.removesuffix("_scale")]
                yield (
                    name.removesuffix(".weight_scale"),
                    len(weight),
                    weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1),
                    scale.shape[1],
                )

    def stored(self, places: Mapping[str, Tensor], headers: Headers) -> Mapping[str, Tensor]:
        found = dict(places)
        for module, N, K, M in self._matrices(places):
            for part in PARTS:
                found.pop(f"{module}.{part}", None)
            files = self.files(N, K, M, lambda suffix: headers.get(f"{module}.{suffix}", ())[1:])
            for suffix, (dtype, shape) in files.items():
                found.setdefault(
                    f"{module}.{suffix}", torch.empty(shape, dtype=dtype, device="meta")
                )
        return found

    def tensors(
        self, places: Mapping[str, Tensor], names: Iterable[str], read: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        matrices, orders = [*self._matrices(places)], dict[int, tuple[str, Tensor]]()
        quantized = {f"{module}.{part}" for module, *_ in matrices for part in PARTS}
        yield from ((name, read(name)) for name in places if name not in quantized)
        for module, N, K, _ in matrices:
            get = lambda suffix: read(name) if (name := f"{module}.{suffix}") in names else None
            try:
                weight, scale, zero, order = self.parts(get, N, K, self.width(K))
                if self.bits == 4:
                    zero = torch.tensor(8) if zero is None else zero + 8
                if (
                    f"{module}.bias" not in places
                    and (bias := get("bias")) is not None
                    and bias.any()
                ):
                    raise UserError("its bias is not all 0, and config.json asks for none")
                if not (wide := scale.float()).isfinite().all() or (wide != scale).any():
                    raise UserError(
                        "its scales must be finite numbers, and no more precise than float32"
                    )
                if order is not None:
                    first, known = orders.setdefault(
                        id(places[f"{module}.weight_order"]), (module, order)
                    )
                    if not torch.equal(order, known):
                        raise UserError(
                            f"its g_idx differs from that of {first}, and both are one product here"
                        )
            except ValueError as error:
                raise UserError(
                    f"{module}: {brief(error)}: fetch the model again, or name one in 16 bits"
                ) from None
            parts = zip(PARTS, (weight, scale, zero, order))
            yield from ((f"{module}.{part}", found) for part, found in parts if found is not None)
