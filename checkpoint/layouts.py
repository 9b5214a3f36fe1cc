"""Checkpoints that other programs quantized: four layouts, read into ours number for number.

W is [N, K], with M groups of columns in a row, and w = (q − zero) · scale of its group; in NF4
w = table[q] · scale. A word is an int32 of 32 / b numbers of b bits, the first in the lowest bits.
A word holds neighbours of a row of its tensor (along) or of a column (down).

    gptq                qweight, words down [K b/32, N]; qzeros, words along [M, N b/32];
                        scales [M, N]; g_idx [K], the group of each column. Zeros are lowered by 1,
                        a word at a time: 0 borrows; not in gptq_v2
    awq, gemm           qweight [K, N/8], qzeros [M, N/8], scales [M, N];
                        a word holds columns 0 2 4 6 1 3 5 7 of eight
    compressed-tensors  pack-quantized: weight_packed, words along [N, K b/32], of q + 2^(b−1);
                        weight_scale [N, M]; weight_shape; weight_zero_point, words down
                        [N b/32, M]; weight_g_idx [K].
                        int-quantized, float-quantized, naive-quantized: weight [N, K], int8 or FP8;
                        weight_scale [N, M] or [1]
    bitsandbytes, nf4   weight, two numbers a byte, the first in the upper half [N K/2, 1]; absmax,
                        a scale for each 64 numbers of the flat W, itself in 8 bits after double
                        quantization; a state in JSON

  - With act-order a group's columns are scattered. Here columns are sorted by group; `order` names
    the input of each.
  - Unsigned numbers of 8 bits, and their zeros, become signed: 128 less. NF4's blocks of 64 that
    end inside a row are cut into smaller groups that do not.
  - Settings that change the numbers are checked. Settings that say how the numbers were found are
    ignored.
  - If a folder wants inputs in INT8 or FP8, with a scale for each token, they are rounded here, too
    (quant.py).

Not covered: inputs with stored (static) scales; 2 and 3 bits; an odd number of columns in 4 bits;
FP8 in blocks of rows; FP4; bitsandbytes' INT8; Marlin and GEMV; folders in which some layers are
not quantized. A new layout is a class with `parse`, `tensors` and `convert`, and a line in
`load_quantization`.
GPTQ: Frantar et al. 2023 (arXiv:2210.17323). AWQ: Lin et al. 2023 (2306.00978). NF4: Dettmers et
al. 2023 (2305.14314).
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import regex  # tiktoken brings it
import torch
from torch import Tensor

from checkpoint.files import Json
from checkpoint.formats import (
    EXACT,
    OWN_METHOD,
    Find,
    Header,
    Layout,
    Quantization,
    Tensors,
    check,
)
from checkpoint.weights import OF_A_LAYER, PARTS
from errors import UserError, brief
from quant import Kind, Quantized, nf4, pack4, unpack4

LAYER = "model.layers.0"
MODULES = [f"{LAYER}.{part}" for role in OF_A_LAYER for part in PARTS[role]]


def load_quantization(how: Any) -> Layout | None:
    """The layout of a `quantization_config`; None for None. UserError for a setting that is not
    honoured."""
    if how is None:
        return None
    layouts = {
        OWN_METHOD: Quantization,
        "gptq": GPTQ,
        "awq": AWQ,
        "compressed-tensors": CompressedTensors,
        "bitsandbytes": NF4,
    }
    try:
        check(how, quant_method=(*layouts,))
        return layouts[how["quant_method"]].parse(how)
    except UserError as error:
        problem = brief(error, 300)
        raise UserError(
            f"{problem}: name another folder, or one in 16 bits with --bits 8 or 4"
        ) from None


# ---- What the layouts share


def group_size(how: Json) -> int | None:
    """The group_size in these settings; None for a whole row (-1 in the file)."""
    size = how.get("group_size")
    if size == -1:
        return None
    if type(size) is not int or size < 1:
        raise UserError(
            f"quantization_config: group_size is {size!r}; it must be a whole number above 0, or -1"
        )
    return size


def check_skipped(how: Json, name: str) -> None:
    """UserError if how[name], the list of modules left in 16 bits, names one of a layer. Other
    names do not count: programs list what models of every kind have."""
    layers = how.get(name) or []
    if isinstance(layers, list):
        with suppress(AttributeError, TimeoutError, regex.error):
            layers = [module for module in layers if is_of_layer(module)]
    if layers:
        raise UserError(
            f"quantization_config: {name} has {layers!r}; all layers must be quantized the same "
            "way, and only lm_head may be left out"
        )


def is_of_layer(name: str) -> bool:
    """Whether a name is that of a layer, of one of its modules, or of a part of both; or, after
    re:, a pattern of one. The layer's number does not count."""
    if name.startswith("re:"):
        return any(regex.match(name[3:], module, timeout=0.1) for module in MODULES)
    name = re.sub(r"\d+", "0", name)
    return any(f".{name}." in f".{module}." for module in MODULES)


def word_bytes(words: Tensor) -> Tensor:
    """Rows of words, int32[R, J] -> their bytes, uint8[R, 4 J]."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def numbers(words: Tensor, bits: int) -> Tensor:
    """Rows of words, int32[R, J] -> the numbers in them: uint8[R, 32 J / bits]; those of 8 bits
    become signed, 128 less: int8."""
    packed = word_bytes(words)
    return unpack4(packed) if bits == 4 else (packed ^ 128).view(torch.int8)


def values(words: Tensor, weight: Quantized) -> Tensor:
    """Rows of words, int32[N, J] -> Quantized.values. Those of 4 bits are packed as ours."""
    q = word_bytes(words) if weight.bits == 4 else numbers(words, 8)
    return q[:, : weight.values.shape[1]]


def sort_columns(weight: Quantized, groups: Tensor) -> Quantized:
    """The same matrix with its columns sorted by their groups, int32[K]."""
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), torch.arange(weight.columns) // weight.group):
        raise UserError(f"its g_idx must put {weight.group} columns in each group")
    if weight.bits == 4:
        q = pack4(unpack4(weight.values)[:, order])
    else:
        q = weight.values[:, order]
    return weight._replace(values=q, order=order)


# ---- The layouts


class GPTQ(Layout):
    """AutoGPTQ and GPTQModel. Where `sym` is true, all zeros are 2^(b−1): those of the folder,
    which some programs have not lowered, are not read."""

    @classmethod
    def parse(cls, how: Json) -> GPTQ:
        check(
            how,
            bits=(4, 8),
            checkpoint_format=(None, "gptq", "gptq_v2"),
            format=(None, "gptq", "gptq_v2"),
            dynamic=(None, {}),
            sym=(None, False, True),
            desc_act=(None, False, True),
            lm_head=(None, False),
            rotation=(None, ""),
        )
        names = {how.get("checkpoint_format"), how.get("format")} - {None}
        if len(names) > 1:
            raise UserError("quantization_config: checkpoint_format and format differ")
        group = group_size(how)
        return cls(
            how["bits"],
            group,
            method="gptq",
            ordered=bool(group and how.get("desc_act")),
            zeros=not how.get("sym"),
            source=how,
        )

    def tensors(self, weight: Quantized, find: Find) -> dict[str, str]:
        tensors = {"qweight": "K-words N I32", "qzeros": "M N-words I32", "scales": "M N float"}
        if self.ordered or find("g_idx"):  # without act-order some folders lack it
            tensors["g_idx"] = "K I32"
        if find("bias"):  # old folders have one, all 0
            tensors["bias"] = "N float"
        return tensors

    def convert(self, weight: Quantized, tensors: Tensors) -> Quantized:
        q = values(tensors["qweight"].T, weight)
        zero = tensors["qzeros"]
        if "gptq_v2" not in (self.source.get("checkpoint_format"), self.source.get("format")):
            zero = zero + (0x11111111 if self.bits == 4 else 0x01010101)  # 1 to each number
        zero = numbers(zero, self.bits)[:, : len(q)].T if self.zeros else None
        matrix = weight._replace(values=q, scale=tensors["scales"].T, zero=zero)
        groups = tensors.get("g_idx")
        if self.ordered:
            return sort_columns(matrix, groups)
        in_order = torch.arange(weight.columns) // weight.group
        if groups is not None and not torch.equal(groups.long(), in_order):
            raise UserError(
                "its g_idx must put columns in one group after the other, as config.json says"
            )
        return matrix


class AWQ(Layout):
    """AutoAWQ's layout for matrix products. The zeros are stored even where zero_point is false."""

    @classmethod
    def parse(cls, how: Json) -> AWQ:
        check(
            how,
            bits=(4,),
            version=(None, "gemm", "GEMM"),
            format=(None, "gemm"),
            zero_point=(None, False, True),
            dynamic=(None, {}),
            lm_head=(None, False),
        )
        check_skipped(how, "modules_to_not_convert")
        return cls(4, group_size(how), method="awq", source=how)

    def tensors(self, weight: Quantized, find: Find) -> dict[str, str]:
        return {"qweight": "K N-words I32", "qzeros": "M N-words I32", "scales": "M N float"}

    def convert(self, weight: Quantized, tensors: Tensors) -> Quantized:
        N, _ = weight.shape
        q = self._unpacked(tensors["qweight"], N)  # [N, K]
        zero = self._unpacked(tensors["qzeros"], N)  # [N, M]
        return weight._replace(values=pack4(q), scale=tensors["scales"].T, zero=zero)

    def _unpacked(self, words: Tensor, N: int) -> Tensor:
        """Words along, int32[R, J] -> uint8[N, R]: number 1 of a word is in field 4, and so on."""
        fields = numbers(words, 4).unflatten(1, (-1, 8))
        in_order = fields[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
        return in_order[:, :N].T


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """llm-compressor's layouts: `config_groups` must hold one recipe for all Linear modules."""

    in_words: bool = False  # pack-quantized
    scale_of_tensor: bool = False  # one scale for the whole matrix

    @classmethod
    def parse(cls, how: Json) -> CompressedTensors:
        types = {  # of weights, by format
            "pack-quantized": ("int",),
            "int-quantized": ("int",),
            "float-quantized": ("float",),
            "naive-quantized": ("int", "float"),
        }
        check(how, format=(*types,), kv_cache_scheme=(None,), transform_config=(None, {}))
        check_skipped(how, "ignore")
        form = how["format"]
        recipe = cls._recipe(how)
        weights = recipe.get("weights")
        check(
            weights,
            "weights",
            type=types[form],
            strategy=("channel", "tensor", "group"),
            dynamic=(None, False),
            actorder=(None, False, "weight", "static", "group", "dynamic"),
        )
        kind = weights["type"]
        is_float = kind == "float"
        check(
            weights,
            "weights",
            num_bits=(8,) if is_float else (4, 8),
            symmetric=(None, True) if is_float else (None, True, False),
        )
        in_words = form == "pack-quantized"
        group = group_size(weights) if weights["strategy"] == "group" else None
        has_zeros = weights.get("symmetric") is False
        inputs = recipe.get("input_activations")
        if inputs is not None:
            check(
                inputs,
                "input_activations",
                num_bits=(8,),
                type=(kind,),
                dynamic=(True,),
                strategy=("token",),
                symmetric=(None, True),
            )
            if in_words or has_zeros or group:
                raise UserError(
                    "quantization_config: input_activations of 8 bits need weights of 8 bits that "
                    "are symmetric and not packed, with a scale for each row"
                )
        bits = weights["num_bits"] if in_words else 8
        return cls(
            bits="fp8" if is_float else bits,
            group=group,
            activations=16 if inputs is None else 8,
            ordered=bool(group) and weights.get("actorder") in ("group", "dynamic"),
            zeros=has_zeros,
            source=how,
            in_words=in_words,
            scale_of_tensor=weights["strategy"] == "tensor",
        )

    @staticmethod
    def _recipe(how: Json) -> Json:
        """The settings of all Linear modules."""
        recipes = how.get("config_groups")
        if not isinstance(recipes, dict) or len(recipes) != 1:
            raise UserError(
                f"quantization_config: config_groups is {recipes!r}; it must be one recipe for all "
                "layers"
            )
        (recipe,) = recipes.values()
        formats = (None, how["format"])
        targets = (["Linear"],)
        check(recipe, "config_groups", targets=targets, output_activations=(None,), format=formats)
        return recipe

    def tensors(self, weight: Quantized, find: Find) -> dict[str, str]:
        scale = "N M float"
        if self.scale_of_tensor:
            stored = find("weight_scale")
            scale = "float" if stored and not stored.shape else "1 float"
        tensors = {"weight_scale": scale}
        if self.in_words:
            tensors |= {"weight_packed": "N K-words I32", "weight_shape": "2 I64"}
        else:
            tensors["weight"] = f"N K {EXACT[weight.values.dtype]}"
        if self.ordered:
            tensors["weight_g_idx"] = "K I32"
        if self.zeros:
            zero = "N-words M I32" if self.in_words else scale.replace("float", "I8")
            tensors["weight_zero_point"] = zero
        return tensors

    def convert(self, weight: Quantized, tensors: Tensors) -> Quantized:
        zero = tensors.get("weight_zero_point")
        if self.in_words:
            shape = tensors["weight_shape"].tolist()
            if shape != list(weight.shape):
                raise UserError(
                    f"its weight_shape is {shape}; config.json asks for {list(weight.shape)}"
                )
            q = values(tensors["weight_packed"], weight)
            if zero is not None:
                zero = numbers(zero.T, self.bits)[:, : len(q)].T
        else:
            q = tensors["weight"]
        matrix = weight._replace(values=q, scale=tensors["weight_scale"], zero=zero)
        return sort_columns(matrix, tensors["weight_g_idx"]) if self.ordered else matrix


STATE = "weight.quant_state.bitsandbytes__nf4"
BLOCK = 64  # numbers that share a scale
NESTED_BLOCK = 256  # scales that share a scale, after double quantization


class NF4(Layout):
    """bitsandbytes in 4 bits, with or without double quantization."""

    @classmethod
    def parse(cls, how: Json) -> NF4:
        check(
            how,
            load_in_4bit=(True,),
            load_in_8bit=(None, False),
            bnb_4bit_quant_type=("nf4",),
            bnb_4bit_quant_storage=(None, "uint8"),
            bnb_4bit_use_double_quant=(None, False, True),
        )
        check_skipped(how, "llm_int8_skip_modules")
        return cls("nf4", BLOCK, source=how)

    def columns_of_scale(self, bits: Kind, K: int) -> int:
        super().columns_of_scale(bits, K)
        return math.gcd(K, BLOCK)

    def tensors(self, weight: Quantized, find: Find) -> dict[str, str]:
        is_nested = self.source.get("bnb_4bit_use_double_quant")
        state = find(STATE) or Header([1], "U8")  # of any shape
        count = math.prod(weight.shape)
        blocks = math.ceil(count / BLOCK)
        tensors = {
            "weight": f"{count // 2} 1 U8",
            "weight.quant_map": "16 float",
            "weight.absmax": f"{blocks} U8" if is_nested else f"{blocks} float",
            STATE: " ".join([*map(str, state.shape), "U8"]),
        }
        if is_nested:
            tensors["weight.nested_absmax"] = f"{math.ceil(blocks / NESTED_BLOCK)} float"
            tensors["weight.nested_quant_map"] = "256 float"
        return tensors

    def convert(self, weight: Quantized, tensors: Tensors) -> Quantized:
        N, K = weight.shape
        try:
            state = json.loads(bytes(tensors[STATE].flatten().tolist()))
        except (ValueError, RecursionError):
            raise UserError(f"its {STATE} is not JSON") from None
        check(state, "its quant_state", quant_type=("nf4",), blocksize=(BLOCK,), shape=([N, K],))
        if not (tensors["weight.quant_map"].float() - nf4()).abs().max() < 1e-6:  # NaN, too
            raise UserError("its quant_map is not NF4's")
        scale = tensors["weight.absmax"]
        if scale.dtype == torch.uint8:
            scale = self._nested_scale(scale, state, tensors)
        M = K // weight.group
        scale = scale.repeat_interleave(BLOCK // weight.group)[: N * M].view(N, M)
        pairs = tensors["weight"].view(N, -1)
        return weight._replace(values=pairs >> 4 | pairs << 4, scale=scale)

    def _nested_scale(self, codes: Tensor, state: Json, tensors: Tensors) -> Tensor:
        """Double quantization: the scale of each block, float32[blocks]."""
        check(state, "its quant_state", nested_blocksize=(NESTED_BLOCK,))
        offset = state.get("nested_offset")
        if not isinstance(offset, float):
            raise UserError(f"its nested_offset is {offset!r}; it must be a number")
        table = tensors["weight.nested_quant_map"]
        absmax = tensors["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(codes)]
        return table[codes.long()] * absmax + offset
