"""Checkpoints that other programs quantized: four layouts, read into ours number for number.

W is [N, K], with M groups of columns in a row, and w = (q − zero) · scale of its group; in NF4 w = table[q] · scale. A
word is an int32 of 32 / b numbers of b bits, the first in the lowest bits. Words pack rows (along) or columns (down).

    gptq                qweight, words down [K b/32, N]; qzeros, words along [M, N b/32]; scales [M, N]; g_idx [K], the
                        group of each column. Zeros are lowered by 1, a word at a time: 0 borrows; not in gptq_v2
    awq, gemm           qweight [K, N/8], qzeros [M, N/8], scales [M, N]; a word holds columns 0 2 4 6 1 3 5 7 of eight
    compressed-tensors  pack-quantized: weight_packed, words along [N, K b/32], of q + 2^(b−1); weight_scale [N, M];
                        weight_shape; weight_zero_point, words down [N b/32, M]; weight_g_idx [K].
                        int-quantized, float-quantized: weight [N, K], int8 or FP8; weight_scale [N, M] or [1]
    bitsandbytes, nf4   weight, two numbers a byte, the first in the upper half [N K/2, 1]; absmax, a scale for each 64
                        numbers of the flat W, itself in 8 bits after double quantization; a state in JSON

  - With act-order a group's columns are scattered. Here columns are sorted by group; `order` names the input of each.
  - Unsigned numbers of 8 bits, and their zeros, become signed: 128 less. NF4's blocks of 64 that end inside a row are
    cut into smaller groups that do not.
  - Settings that change the numbers are checked. Settings that say how the numbers were found are ignored.
  - If a folder wants inputs in INT8 or FP8, with a scale for each token, they are rounded here, too (quant.py).
Not covered: inputs with stored (static) scales; 2 and 3 bits; an odd number of columns in 4 bits; FP8 in blocks of
rows; FP4; bitsandbytes' INT8; Marlin and GEMV; folders in which some layers are not quantized.
GPTQ: Frantar et al. 2023 (arXiv:2210.17323). AWQ: Lin et al. 2024 (2306.00978). NF4: Dettmers et al. 2023 (2305.14314).
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

from checkpoint.formats import OWN, Files, Foreign, Get, Has, Quantization, supported
from errors import UserError, brief
from quant import STORED, nf4, pack4, unpack4

HEADS = (
    "lm_head",
    "re:.*lm_head",
    "embed_tokens",
    "model.embed_tokens",
    "multi_modal_projector",
    "merger",
    "modality_projection",
)  # modules that may stay in 16 bits; a Llama lacks some
STATE = "weight.quant_state.bitsandbytes__nf4"
BLOCK, NESTED = 64, 256  # of bitsandbytes: numbers a scale; scales a scale of scales
LONGEST = 4096  # the most bytes of STATE
INTERLEAVED = [
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
]  # of AWQ: number j of a word lies in its nibble INTERLEAVED[j]


def load_quantization(how: Any) -> Quantization | None:
    """The layout of a `quantization_config`; None for None. ValueError for a setting that is not honoured."""
    if how is None:
        return None
    layouts = {
        OWN: Quantization,
        "gptq": GPTQ,
        "awq": AWQ,
        "compressed-tensors": CompressedTensors,
        "bitsandbytes": NF4,
    }
    try:
        check(how, quant_method=(*layouts,))
        return layouts[how["quant_method"]].parse(how)
    except ValueError as error:
        raise UserError(
            f"{brief(error, 300)}: name another folder, or one in 16 bits with --bits 8 or 4"
        ) from None


# ---- What the layouts share


def check(how: Any, where: str = "quantization_config", **known: tuple[Any, ...]) -> None:
    """ValueError unless `how` is an object, each setting with one of its known values. An absent setting is None."""
    if not isinstance(how, dict):
        raise UserError(f"{where} is {how!r}; it must be an object")
    for name, values in known.items():
        supported(f"{where}: {name}", how.get(name), *values)


def group_size(how: dict[str, Any]) -> int:
    """The group_size in these settings; 0 for a whole row. ValueError if it is no size."""
    size = how.get("group_size")
    if type(size) is not int or size == 0 or size < -1:
        raise UserError(
            f"quantization_config: group_size is {size!r}; it must be a whole number above 0, or -1"
        )
    return max(size, 0)


def check_skipped(how: dict[str, Any], name: str) -> None:
    """ValueError if how[name], the list of modules left in 16 bits, names layers."""
    skipped = how.get(name) or []
    if not isinstance(skipped, list) or any(module not in HEADS for module in skipped):
        raise UserError(
            f"quantization_config: {name} is {skipped!r}; all layers must be quantized alike, and only "
            "lm_head be left out"
        )


def words(count: int, bits: int) -> int:
    """The number of words that hold `count` numbers."""
    return -(-count * bits // 32)


def octets(packed: Tensor) -> Tensor:
    """Rows of words, int32[R, J] -> their bytes, uint8[R, 4 J]."""
    return packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def numbers(packed: Tensor, bits: int) -> Tensor:
    """Rows of words, int32[R, J] -> the numbers in them, uint8[R, 32 J / bits]."""
    return unpack4(octets(packed)) if bits == 4 else octets(packed)


def values(packed: Tensor, bits: int, K: int, order: Tensor | None) -> Tensor:
    """Rows of words, int32[N, J] -> Quantized.values, uint8[N, K / 2] or int8[N, K], with columns in `order`."""
    data = octets(packed)[:, : K * bits // 8]
    if order is not None:
        data = pack4(unpack4(data)[:, order]) if bits == 4 else data[:, order]
    return data if bits == 4 else (data ^ 128).view(torch.int8)


def sort_columns(groups: Tensor | None, K: int, group: int, ordered: bool) -> Tensor | None:
    """The group of each column, int32[K] -> the columns sorted by group, int64[K]; None if they are stored so."""
    order = torch.arange(K) if groups is None or not ordered else groups.argsort(stable=True)
    if groups is not None and not torch.equal(groups[order].long(), torch.arange(K) // group):
        raise UserError(
            f"its g_idx must put {group} columns in each group"
            + ("" if ordered else ", one after the other, as config.json says")
        )
    return order if ordered else None


# ---- The layouts


class GPTQ(Foreign):
    """AutoGPTQ and GPTQModel. Where `sym` is true, all zeros are 2^(b−1), and some folders have not lowered them."""

    @classmethod
    def parse(cls, how: dict[str, Any]) -> "GPTQ":
        names = (kind,) if (kind := how.get("checkpoint_format")) else ("gptq", "gptq_v2")
        check(
            how,
            bits=(4, 8),
            checkpoint_format=(None, "gptq", "gptq_v2"),
            format=(None, *names),
            dynamic=(None, {}),
            sym=(None, False, True),
            desc_act=(None, False, True),
            lm_head=(None, False),
            rotation=(None, ""),
            is_marlin_format=(None, False),
            pack_dtype=(None, "int32"),
            adapter=(None, {}),
        )
        ordered = bool(group := group_size(how)) and bool(how.get("desc_act"))
        return cls(
            how["bits"], group, method="gptq", zeros=not how.get("sym"), ordered=ordered, source=how
        )

    def files(self, N: int, K: int, M: int, has: Has) -> Files:
        files = dict(
            qweight=(torch.int32, [words(K, self.bits), N]),
            qzeros=(torch.int32, [M, words(N, self.bits)]),
            scales=(torch.float32, [M, N]),
        )
        if self.ordered or has("g_idx"):  # without act-order some folders lack it
            files["g_idx"] = torch.int32, [K]
        return files | (
            dict(bias=(torch.float32, [N])) if has("bias") else {}
        )  # old folders: all 0

    def parts(self, get: Get, N: int, K: int, group: int) -> tuple[Tensor | None, ...]:
        order = sort_columns(get("g_idx"), K, group, self.ordered)
        lower = "gptq_v2" not in (self.source.get("checkpoint_format"), self.source.get("format"))
        ones, middle = 0x11111111 if self.bits == 4 else 0x01010101, 2 ** (self.bits - 1)
        zero = numbers(get("qzeros") + lower * ones, self.bits)[:, :N].T.short() - middle
        if not self.zeros and zero.unique().tolist() not in ([0], [lower]):
            raise UserError(
                f"its zeros are not all {middle}, and config.json says that sym is true"
            )
        return (
            values(get("qweight").T, self.bits, K, order),
            get("scales").T,
            zero if self.zeros else None,
            order,
        )


class AWQ(Foreign):
    """AutoAWQ's layout for matrix products. The zeros are stored even where zero_point is false."""

    @classmethod
    def parse(cls, how: dict[str, Any]) -> "AWQ":
        check(
            how,
            bits=(4,),
            version=(None, "gemm", "GEMM"),
            format=(None, "gemm"),
            zero_point=(None, False, True),
            dynamic=(None, {}),
            lm_head=(None, False),
            pack_dtype=(None, "int32"),
        )
        check_skipped(how, "modules_to_not_convert")
        return cls(4, group_size(how), method="awq", source=how)

    def files(self, N: int, K: int, M: int, has: Has) -> Files:
        return dict(
            qweight=(torch.int32, [K, words(N, 4)]),
            qzeros=(torch.int32, [M, words(N, 4)]),
            scales=(torch.float32, [M, N]),
        )

    def parts(self, get: Get, N: int, K: int, group: int) -> tuple[Tensor | None, ...]:
        q, zero = (
            numbers(get(name), 4).unflatten(1, (-1, 8))[..., INTERLEAVED].flatten(1)[:, :N].T
            for name in ("qweight", "qzeros")
        )
        return pack4(q), get("scales").T, zero.short() - 8, None


class CompressedTensors(Foreign):
    """llm-compressor's layouts: `config_groups` must hold one recipe for all Linear modules."""

    @staticmethod
    def _recipe(how: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any] | None, str]:
        """The layout, the settings of weights, the settings of inputs, and the strategy: what shares a scale."""
        check(
            how,
            format=("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
            kv_cache_scheme=(None,),
            transform_config=(None, {}),
        )
        check(how.get("sparsity_config") or {}, "sparsity_config", format=(None, "dense"))
        recipes = how.get("config_groups")
        if not isinstance(recipes, dict) or len(recipes) != 1:
            raise UserError(
                f"quantization_config: config_groups is {recipes!r}; it must be one recipe for all layers"
            )
        (recipe,) = recipes.values()
        check(
            recipe,
            "config_groups",
            targets=(["Linear"],),
            output_activations=(None,),
            format=(None, how["format"]),
        )
        check(
            weights := recipe.get("weights"),
            "weights",
            type=("int", "float"),
            dynamic=(None, False),
            block_structure=(None,),
            actorder=(None, False, "weight", "static", "group", "dynamic"),
        )
        layout = how["format"].replace("naive", weights["type"])
        integers = layout != "float-quantized"
        check(
            weights,
            "weights",
            type=("int" if integers else "float",),
            num_bits=(4, 8) if integers else (8,),
            symmetric=(None, True, False) if integers else (None, True),
        )
        size = weights.get("group_size")
        strategy = weights.get("strategy") or (
            "tensor" if size is None else "channel" if size == -1 else "group"
        )
        supported("weights: strategy", strategy, "channel", "tensor", "group")
        return layout, weights, recipe.get("input_activations"), strategy

    @classmethod
    def parse(cls, how: dict[str, Any]) -> "CompressedTensors":
        check_skipped(how, "ignore")
        layout, weights, inputs, strategy = cls._recipe(how)
        bits = {"float-quantized": "fp8", "int-quantized": 8}.get(layout, weights["num_bits"])
        group, zeros = (
            group_size(weights) if strategy == "group" else 0,
            weights.get("symmetric") is False,
        )
        ordered = bool(group) and weights.get("actorder") in ("group", "dynamic")
        if inputs is not None:
            check(
                inputs,
                "input_activations",
                num_bits=(8,),
                type=("float" if bits == "fp8" else "int",),
                dynamic=(True,),
                strategy=("token",),
                symmetric=(None, True),
            )
            if layout == "pack-quantized" or zeros or group:
                raise UserError(
                    "quantization_config: input_activations of 8 bits need weights of 8 bits that are "
                    "symmetric and not packed, with a scale for each row"
                )
        return cls(
            bits,
            group,
            activations=8 if inputs is not None else 16,
            zeros=zeros,
            ordered=ordered,
            source=how,
        )

    def files(self, N: int, K: int, M: int, has: Has) -> Files:
        layout, _, _, strategy = self._recipe(self.source)
        one = lambda name: [] if has(name) and has(name)[0] == [] else [1]
        shape = one("weight_scale") if strategy == "tensor" else [N, M]
        files: Files = dict(weight_scale=(torch.float32, shape))
        if layout == "pack-quantized":
            files |= dict(
                weight_packed=(torch.int32, [N, words(K, self.bits)]),
                weight_shape=(torch.int64, [2]),
            )
        else:
            files |= dict(weight=(STORED[self.bits], [N, K]))
        if self.ordered:
            files |= dict(weight_g_idx=(torch.int32, [K]))
        if self.zeros:  # words; int8 in old folders and in int-quantized
            plain = (
                has("weight_zero_point")
                and has("weight_zero_point")[1] == "I8"
                or layout == "int-quantized"
            )
            files |= dict(
                weight_zero_point=(torch.int8, shape)
                if plain
                else (torch.int32, [words(N, self.bits), M])
            )
        return files

    def parts(self, get: Get, N: int, K: int, group: int) -> tuple[Tensor | None, ...]:
        zero, order = (
            get("weight_zero_point"),
            sort_columns(get("weight_g_idx"), K, group, self.ordered),
        )
        if zero is not None and zero.dtype == torch.int32:
            zero = numbers(zero.T, self.bits)[:, :N].T.short() - 2 ** (self.bits - 1)
        if (packed := get("weight_packed")) is None:
            weight = get("weight")
            return weight if order is None else weight[:, order], get("weight_scale"), zero, order
        if (shape := get("weight_shape").tolist()) != [N, K]:
            raise UserError(f"its weight_shape is {shape}; config.json asks for {[N, K]}")
        return values(packed, self.bits, K, order), get("weight_scale"), zero, order


class NF4(Foreign):
    """bitsandbytes in 4 bits, with or without double quantization."""

    @classmethod
    def parse(cls, how: dict[str, Any]) -> "NF4":
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

    def width(self, K: int) -> int:
        return math.gcd(K, BLOCK)

    def files(self, N: int, K: int, M: int, has: Has) -> Files:
        count, nested = -(-N * K // BLOCK), self.source.get("bnb_4bit_use_double_quant")
        length = (has(STATE) or ([LONGEST],))[0]
        files = {
            "weight": (torch.uint8, [N * K // 2, 1]),
            "weight.quant_map": (torch.float32, [16]),
            "weight.absmax": (torch.uint8 if nested else torch.float32, [count]),
            STATE: (
                torch.uint8,
                length if len(length) == 1 and length[0] <= LONGEST else [LONGEST],
            ),
        }
        return files | (
            {
                "weight.nested_absmax": (torch.float32, [-(-count // NESTED)]),
                "weight.nested_quant_map": (torch.float32, [256]),
            }
            if nested
            else {}
        )

    def parts(self, get: Get, N: int, K: int, group: int) -> tuple[Tensor | None, ...]:
        try:
            state = json.loads(bytes(get(STATE).tolist()))
        except (ValueError, RecursionError):
            raise UserError(f"its {STATE} is not JSON") from None
        check(state, "its quant_state", quant_type=("nf4",), blocksize=(BLOCK,), shape=([N, K],))
        if not (get("weight.quant_map").float() - nf4()).abs().max() < 1e-6:
            raise UserError("its quant_map is not NF4's")
        scale, table = get("weight.absmax"), get("weight.nested_quant_map")
        if table is not None:
            check(state, "its quant_state", nested_blocksize=(NESTED,))
            if not isinstance(offset := state.get("nested_offset"), float):
                raise UserError(f"its nested_offset is {offset!r}; it must be a number")
            nested = get("weight.nested_absmax").repeat_interleave(NESTED)[: len(scale)]
            scale = table[scale.long()] * nested + offset
        scale = scale.repeat_interleave(BLOCK // group)[: N * K // group].view(N, -1)
        pairs = get("weight").view(N, -1)
        return pairs >> 4 | pairs << 4, scale, None, None
