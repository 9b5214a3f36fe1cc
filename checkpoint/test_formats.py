"""Folders of other programs, written here number by number from each layout's definition."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.cli import main as cli
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.layouts import load_quantization
from conftest import examples
from errors import UserError
from model import Llama
from quant import NF4_CODE, nf4
from testing.folders import change_tensors, write_tokenizer
from testing.models import SMALL
from testing.programs import told

ROUND = dict(
    hidden_size=40,
    head_dim=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=56,
    vocab_size=50,
    num_hidden_layers=1,
)
RAGGED = ROUND | dict(
    hidden_size=22, head_dim=6, intermediate_size=34, attention_bias=True, tie_word_embeddings=False
)
QWEN2 = RAGGED | dict(attention_bias=False, model_type="qwen2")
QWEN3 = ROUND | dict(model_type="qwen3")
Written = tuple[
    dict[str, Tensor], Tensor
]  # a matrix: its tensors by suffix, and the numbers, float64[N, K]


# ---- Writers, a number at a time


def packed(numbers: Sequence[Sequence[int]], bits: int, fields: str = "01234567") -> Tensor:
    """[R][C] -> int64[R, C b/32]: in a word, field 0 in the lowest bits; fields: of its columns."""
    per = 32 // bits
    words = torch.zeros(len(numbers), -(-len(numbers[0]) // per), dtype=torch.int64)
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            words[r, c // per] |= (number & 2**bits - 1) << bits * int(fields[c % per])
    return words


def raised(numbers: list[list[int]], bits: int) -> list[list[int]]:
    """Unsigned."""
    return [[number + 2 ** (bits - 1) for number in row] for row in numbers]


def signed(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def draw(
    draws: random.Random,
    bits: int,
    N: int,
    K: int,
    group: int,
    sym: bool,
    signs: bool,
    dtype: torch.dtype = torch.float16,
    shuffled: list[int] | None = None,
) -> tuple[list[list[int]], list[list[int]], Tensor, list[int], Tensor]:
    """Numbers q, zeros, scales [N, M] and the group of each column -> and what they stand for."""
    groups = [k // group for k in (shuffled or range(K))]
    M, middle = max(groups) + 1, 0 if signs else 2 ** (bits - 1)
    low, high = middle - 2 ** (bits - 1), middle + 2 ** (bits - 1) - 1
    q = [[draws.randint(low, high) for _ in range(K)] for _ in range(N)]
    zero = [[middle if sym else draws.randint(low, high) for _ in range(M)] for _ in range(N)]
    scale = torch.tensor(
        [[draws.uniform(0.5, 1) / 2**bits for _ in range(M)] for _ in range(N)]
    ).to(dtype)
    w = [
        [(q[n][k] - zero[n][groups[k]]) * scale[n, groups[k]].item() for k in range(K)]
        for n in range(N)
    ]
    return q, zero, scale, groups, torch.tensor(w, dtype=torch.float64)


def gptq(draws: random.Random, N: int, K: int, how: dict[str, Any], order: list[int]) -> Written:
    bits, size = how["bits"], how["group_size"] if how["group_size"] > 0 else K
    q, zero, scale, groups, w = draw(
        draws, bits, N, K, size, how["sym"], False, shuffled=order if how["desc_act"] else None
    )
    qzeros = packed([*zip(*zero)], bits)
    if "gptq_v2" not in (
        how.get("checkpoint_format"),
        how.get("format"),
    ):  # a zero of 0 borrows from the next
        qzeros = (qzeros - sum(1 << at for at in range(0, 32, bits))) % 2**32
    return dict(
        qweight=signed(packed(q, bits).T.contiguous()),
        qzeros=signed(qzeros),
        scales=scale.T.contiguous(),
        g_idx=torch.tensor(groups, dtype=torch.int32),
    ), w


def awq(draws: random.Random, N: int, K: int, how: dict[str, Any], order: list[int]) -> Written:
    group = how["group_size"] if how["group_size"] > 0 else K
    q, zero, scale, _, w = draw(draws, 4, N, K, group, not how["zero_point"], False)
    fields = "04152637"  # of columns 0 to 7
    qweight, qzeros = (signed(packed([*zip(*x)], 4, fields)) for x in (q, zero))
    return dict(qweight=qweight, qzeros=qzeros, scales=scale.T.contiguous()), w


def compressed(
    draws: random.Random, N: int, K: int, how: dict[str, Any], order: list[int]
) -> Written:
    weights = how["config_groups"]["group_0"]["weights"]
    bits, strategy, sym = weights["num_bits"], weights["strategy"], weights["symmetric"]
    size = weights["group_size"] if strategy == "group" else K
    if how["format"] == "float-quantized":
        values = (
            torch.randn(N, K, generator=torch.Generator().manual_seed(draws.randint(0, 99))) * 100
        ).to(torch.float8_e4m3fn)
        scale = torch.tensor([[draws.uniform(0.5, 1) / 300] for _ in range(N)]).bfloat16()
        scale = scale[0] if strategy == "tensor" else scale
        return dict(weight=values, weight_scale=scale), values.double() * scale.double()
    shuffled = order if weights["actorder"] == "group" else None
    q, zero, scale, groups, w = draw(draws, bits, N, K, size, sym, True, torch.bfloat16, shuffled)
    written = dict(weight_scale=scale)
    if shuffled:
        written["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    if how["format"] == "int-quantized":
        zeros = {} if sym else dict(weight_zero_point=torch.tensor(zero, dtype=torch.int8))
        return written | zeros | dict(weight=torch.tensor(q, dtype=torch.int8)), w
    weight = signed(packed(raised(q, bits), bits))
    zeros = signed(packed([*zip(*raised(zero, bits))], bits).T.contiguous())
    written |= dict(weight_packed=weight, weight_shape=torch.tensor([N, K]))
    return written | ({} if sym else dict(weight_zero_point=zeros)), w


def bnb(draws: random.Random, N: int, K: int, how: dict[str, Any], order: list[int]) -> Written:
    flat, blocks = [draws.randint(0, 15) for _ in range(N * K)], -(-N * K // 64)
    data = [flat[i] << 4 | flat[i + 1] for i in range(0, N * K, 2)]
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=[N, K])
    written = {
        "": torch.tensor(data, dtype=torch.uint8)[:, None],
        ".quant_map": torch.tensor(NF4_CODE),
    }
    scale = [draws.uniform(0.2, 0.6) for _ in range(blocks)]
    if how["bnb_4bit_use_double_quant"]:
        table, absmax = torch.linspace(-1, 1, 256), [draws.randint(0, 255) for _ in range(blocks)]
        nested = torch.tensor([draws.uniform(0.05, 0.1) for _ in range(-(-blocks // 256))])
        scale = [
            table[number].item() * nested[i // 256].item() + 0.4375
            for i, number in enumerate(absmax)
        ]
        written |= {
            ".absmax": torch.tensor(absmax, dtype=torch.uint8),
            ".nested_absmax": nested,
            ".nested_quant_map": table,
        }
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=0.4375)
    else:
        written[".absmax"] = torch.tensor(scale)
    written[".quant_state.bitsandbytes__nf4"] = torch.tensor(
        [*json.dumps(state).encode()], dtype=torch.uint8
    )
    w = [NF4_CODE[number] * scale[i // 64] for i, number in enumerate(flat)]
    return {f"weight{name}": tensor for name, tensor in written.items()}, torch.tensor(
        w, dtype=torch.float64
    ).view(N, K)


IN8 = dict(
    num_bits=8, type="int", dynamic=True, strategy="token", symmetric=True
)  # inputs, each token
WRITERS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed, "bitsandbytes": bnb}


WRITTEN = {  # as these programs write it
    "gptq": """{"bits": 4, "group_size": 8, "desc_act": false, "sym": false, "damp_percent": 0.1,
        "true_sequential": true}""",
    "awq": """{"bits": 4, "group_size": 8, "zero_point": true, "version": "gemm",
        "modules_to_not_convert": null}""",
    "bitsandbytes": """{"load_in_4bit": true, "_load_in_4bit": true, "load_in_8bit": false,
        "bnb_4bit_quant_type": "nf4", "llm_int8_threshold": 6.0,
        "bnb_4bit_use_double_quant": false, "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": null}""",
    "compressed-tensors": """{"config_groups": {"group_0": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": false, "group_size": 8,
            "strategy": "group", "dynamic": false, "actorder": null, "block_structure": null,
            "observer": "minmax"},
        "input_activations": null, "output_activations": null}},
        "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quantization_status": "compressed", "global_compression_ratio": 1.5}""",
}


def settings_of(
    method: str,
    bits: int = 4,
    group: int = 8,
    sym: bool = False,
    ordered: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A `quantization_config`."""
    how = dict(quant_method=method, **json.loads(WRITTEN.get(method, "{}")))
    match method:
        case "gptq":
            how |= dict(bits=bits, group_size=group, desc_act=ordered, sym=sym)
        case "awq":
            how |= dict(group_size=group, zero_point=not sym)
        case "bitsandbytes":
            how |= dict(bnb_4bit_use_double_quant=sym)
        case "compressed-tensors":
            strategy = more.pop("strategy", "group" if group > 0 else "channel")
            kind = "float" if more.get("format") == "float-quantized" else "int"
            recipe = how["config_groups"]["group_0"]
            recipe["input_activations"] = more.pop("inputs", None)
            recipe["weights"] |= dict(num_bits=bits, type=kind, symmetric=sym, group_size=group)
            actorder = "group" if ordered and strategy == "group" else None
            recipe["weights"] |= dict(strategy=strategy, actorder=actorder)
    return how | more


def write(folder: Path, how: dict[str, Any], seed: int = 0, shape: dict[str, Any] = ROUND) -> Llama:
    """A folder, and the plain model of the same numbers in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    config, draws = Config(**{**SMALL, **shape}), random.Random(seed)
    plain = Llama(config, dtype=torch.float64, seed=seed)
    tensors, orders = dict[str, Tensor](), dict[int, list[int]]()
    for name, target in plain.named_tensors().items():
        N, K = target.shape if target.ndim == 2 else (0, 0)
        if "proj.weight" not in name:
            target.copy_((target * (1 if "norm" in name else 12)).half())
            tensors[name] = target.half()
            continue
        key = (
            name.split("self_attn")[0]
            if any(x in name for x in ("q_proj", "k_proj", "v_proj"))
            else name.replace("gate", "up")
        )
        order = orders.setdefault(key, draws.sample(range(K), K))
        written, w = WRITERS[how["quant_method"]](draws, N, K, how, order)
        target.copy_(w)
        tensors |= {
            f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in written.items()
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": how}))
    (folder / "generation_config.json").write_text("{}")
    write_tokenizer(folder)
    return plain


NESTED = settings_of("bitsandbytes", sym=True)
KINDS = (  # methods, groups, what else
    (["gptq", "awq", "bitsandbytes"], [-1, 8, 16, 24, 64], [{}]),
    (["gptq"], [16], [dict(checkpoint_format=name) for name in ("gptq", "gptq_v2")]),
    (
        ["compressed-tensors"],
        [-1, 6, 16, 64],
        [dict(format=name) for name in ("pack-quantized", "int-quantized")],
    ),
)
HOW = st.sampled_from(("channel", "tensor")).map(
    lambda strategy: settings_of(
        "compressed-tensors", 8, -1, True, format="float-quantized", strategy=strategy
    )
)
for kind in KINDS:
    *first, more = map(st.sampled_from, kind)
    HOW |= st.builds(
        lambda method, group, bits, sym, ordered, more: settings_of(
            method, bits, group, sym, ordered, **more
        ),
        *first,
        st.sampled_from([4, 8]),
        st.booleans(),
        st.booleans(),
        more,
    )


@examples(6)
@given(HOW, st.sampled_from([ROUND, RAGGED, QWEN2, QWEN3]), st.integers(0, 99))
@example(settings_of("gptq", 4, 16), QWEN2, 0)
@example(settings_of("awq", 4, 16), QWEN3, 0)
@example(settings_of("gptq", 8, 16, False, True), RAGGED, 0)
@example(settings_of("awq", 4, 16), RAGGED, 0)
@example(settings_of("gptq", 4, 8, True), ROUND, 0)
@example(settings_of("gptq", 4, 16, False, True, checkpoint_format="gptq_v2"), ROUND, 0)
@example(settings_of("compressed-tensors", 4, 16, False, True), RAGGED, 0)
@example(settings_of("compressed-tensors", 8, 16), ROUND, 0)
@example(settings_of("compressed-tensors", 8, 16, True, True, format="int-quantized"), ROUND, 0)
@example(settings_of("bitsandbytes", sym=True), RAGGED, 0)
@torch.inference_mode()
def test_the_logits_are_those_of_the_stored_numbers(tmp_path_factory, how, shape, seed):
    folder, tokens = tmp_path_factory.mktemp("folder"), torch.arange(1, 30)
    plain = write(folder, how, seed, shape)
    llama = Llama.load(folder, "cpu", torch.float64)
    assert llama.config == Config(**{**SMALL, **shape}, quantization=llama.config.quantization)
    torch.testing.assert_close(llama(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
    expected = plain(tokens).float()
    off = Llama.load(folder, "cpu")(tokens) - expected
    assert off.norm() <= 1e-3 * expected.norm()  # 2.6e-4 at most in 400 of such models
    (folder / "config.json").write_text(json.dumps(llama.config.to_dict()))
    assert Config.load(folder) == llama.config


@pytest.mark.parametrize(
    "layout, kind, strategy",
    [
        ("int-quantized", "int", "channel"),
        ("float-quantized", "float", "channel"),
        ("float-quantized", "float", "tensor"),
    ],
)
@torch.inference_mode()
def test_inputs_of_8_bits(tmp_path, layout, kind, strategy):
    """Inputs are rounded, too (test_kernels.py: how): near the plain model's, and not equal."""
    asked = dict(format=layout, inputs=IN8 | dict(type=kind), strategy=strategy)
    plain = write(tmp_path, settings_of("compressed-tensors", 8, -1, True, **asked))
    tokens = torch.arange(1, 30)
    llama, expected = Llama.load(tmp_path, "cpu", torch.float64), plain(tokens)
    assert 1e-5 < (llama(tokens) - expected).abs().max() / expected.abs().max() < 0.25
    weights = [llama.layers[0].gate_up.weight, llama.layers[0].qkv.weight]
    assert [(w.bits, w.input_bits) for w in weights] == [(8 if kind == "int" else "fp8", 8)] * 2


def test_the_table_is_of_quantiles_of_the_normal_distribution():
    """Its authors begin between 1 − 1/30 and 1 − 1/32, the middles of the last of equal parts."""
    above, below = (torch.linspace(0.9677083, 0.5, n).double() for n in (9, 8))
    code = torch.cat((-torch.special.ndtri(below[:-1]), torch.special.ndtri(above).flip(0)))
    assert torch.allclose(nf4().double(), code / code[-1], rtol=0, atol=1e-6)


def test_double_quantization_of_many_blocks():
    stored, w = bnb(random.Random(0), 132, 160, NESTED, [])  # 330 blocks of 64
    layout = load_quantization(NESTED)
    matrix = layout.convert(layout.empty("0.o", 132, 160, "meta"), stored)
    torch.testing.assert_close(matrix.dequantize().double(), w, rtol=1e-6, atol=0)


# ---- What old or odd folders have, and what no folder may have


def configure(folder: Path, setting: str, new: str) -> None:
    """Put `new` in the place of a setting in config.json."""
    config = (folder / "config.json").read_text()
    assert config.count(setting) == 1
    (folder / "config.json").write_text(config.replace(setting, new))


# Modules that no Llama has, or that are in 16 bits in any case.
NOT_OURS = [
    "lm_head",
    "embed_tokens",
    "mlp.shared_gate",
    "o",
    "model.vision.layers.0.mlp.up",
    "x_proj",
]
NOT_OURS += ["re:.*lm_head", "re:visual.*", r"re:.*mlp\.gate$", "norm", "audio.self_attn"]
CT = "compressed-tensors"
ODD: list[tuple[Any, ...]] = [  # settings; what is changed: in config.json, or tensors
    (settings_of("gptq", 4, 16, format="gptq_v2"),),
    (settings_of("gptq", 4, 16), '"sym": false, ', ""),
    (settings_of(CT, 4, 16, True), '"symmetric": true, ', ""),
    (settings_of(CT, 4, 16, True, True), '"actorder": "group"', '"actorder": "dynamic"'),
    (settings_of("gptq", 4, 16), "g_idx", "missing"),
    (settings_of("gptq", 4, -1, ordered=True), "g_idx", "missing"),
    (settings_of("gptq", 4, 10**30),),
    (settings_of("gptq", 4, 16, True), "qzeros", "not lowered, 4"),
    (settings_of("gptq", 8, 16, True), "qzeros", "not lowered, 8"),
    (settings_of("awq", group=16, version="GEMM"),),
    (settings_of("bitsandbytes", llm_int8_skip_modules=NOT_OURS),),
    (settings_of("awq", group=16, modules_to_not_convert=NOT_OURS),),
    (
        settings_of(CT, 8, -1, True, format="float-quantized", strategy="tensor"),
        "weight_scale",
        "a number",
    ),
]


@torch.inference_mode()
def test_old_and_odd_folders(tmp_path):
    for how, *changed in ODD:
        plain = write(tmp_path, how)
        match changed:
            case setting, new if '"' in setting:
                configure(tmp_path, setting, new)
            case names, change:
                change_tensors(tmp_path, names, change)
        check_logits(tmp_path, plain)


def check_logits(folder: Path, plain: Llama) -> None:
    tokens = torch.arange(9)
    logits = Llama.load(folder, "cpu", torch.float64)(tokens)
    torch.testing.assert_close(logits, plain(tokens), rtol=1e-6, atol=1e-6)


def recipe(**more: Any) -> dict[str, Any]:
    """compressed-tensors with other settings of its weights."""
    how = settings_of("compressed-tensors", 4, 8)
    how["config_groups"]["group_0"]["weights"] |= more
    return how


def inputs_of(sym: bool = True, **more: Any) -> dict[str, Any]:
    """compressed-tensors in INT8, with other settings of its inputs."""
    inputs = IN8 | more
    return settings_of("compressed-tensors", 8, -1, sym, format="int-quantized", inputs=inputs)


GPTQ4 = settings_of("gptq")
AWQ4 = settings_of("awq")
CT4 = settings_of("compressed-tensors")
BNB = settings_of("bitsandbytes")


NOT_HONOURED = told(
    """
    nothing [] → quantization_config is []; it must be an object
    nothing {"bits": 4} → quant_method is None; it must be 'quant.py', 'gptq'
    nothing {"quant_method": ["gptq"]} → quant_method is ['gptq']
    nothing {"quant_method": "fp8"} → quant_method is 'fp8'
    gptq {"bits": 3} → bits is 3; it must be 4 or 8
    gptq {"bits": true} → bits is True
    gptq {"group_size": 0} → group_size is 0; it must be a whole number above 0, or -1
    gptq {"group_size": "128"} → group_size is '128'
    gptq {"group_size": null} → group_size is None
    gptq {"checkpoint_format": "marlin"} → checkpoint_format is 'marlin'; it must be None, 'gptq' or
    gptq {"checkpoint_format": "gptq", "format": "gptq_v2"} → checkpoint_format and format differ
    gptq {"dynamic": {"-:.*down": {}}} → dynamic is
    gptq {"lm_head": true} → lm_head is True
    gptq {"desc_act": "yes"} → desc_act is 'yes'
    gptq {"sym": "yes"} → sym is 'yes'
    gptq {"rotation": "hadamard"} → rotation is 'hadamard'
    awq {"version": "gemv"} → version is 'gemv'
    awq {"bits": 8} → bits is 8; it must be 4
    awq {"modules_to_not_convert": ["lm_head", "model.layers.0"]} → modules_to_not_convert has ['mod
    awq {"modules_to_not_convert": "lm_head"} → modules_to_not_convert has 'lm_head'
    bnb {"bnb_4bit_quant_type": "fp4"} → bnb_4bit_quant_type is 'fp4'; it must be 'nf4'
    bnb {"load_in_4bit": false, "load_in_8bit": true} → load_in_4bit is False
    bnb {"bnb_4bit_quant_storage": "bfloat16"} → bnb_4bit_quant_storage is 'bfloat16'
    bnb {"llm_int8_skip_modules": ["model.layers.3.mlp"]} → llm_int8_skip_modules has ['model
    bnb {"llm_int8_skip_modules": ["router", "k_proj"]} → llm_int8_skip_modules has ['k_proj']
    bnb {"llm_int8_skip_modules": ["self_attn.q_proj", "x"]} → has ['self_attn.q_proj']
    bnb {"llm_int8_skip_modules": ["layers.17", "model"]} → has ['layers.17', 'model']
    bnb {"llm_int8_skip_modules": [["x"]]} → llm_int8_skip_modules has [['x']]
    ct {"format": "marlin-24"} → format is 'marlin-24'
    ct {"format": ["x"]} → format is ['x']
    ct {"ignore": ["lm_head", "re:.*mlp.*"]} → ignore has ['re:.*mlp.*']
    ct {"ignore": ["re:("]} → ignore has ['re:(']
    ct {"ignore": ["re:(.|..|...)*[0-9]$"]} → ignore has ['re:(.|..|...)*[0-9]$']
    ct {"kv_cache_scheme": {"num_bits": 8}} → kv_cache_scheme is
    ct {"transform_config": {"a": 1}} → transform_config
    ct {"config_groups": {}} → config_groups is {}; it must be one recipe
    ct {"config_groups": [1]} → config_groups is [1]
    ct {"config_groups": {"a": {}, "b": {}}} → it must be one recipe for all layers
    ct {"config_groups": {"a": {"targets": ["re:.*q_proj"]}}} → targets is ['re:.*q_proj']
    ct {"config_groups": {"W4A16": ["Linear"]}} → config_groups is ['Linear']; it must be an object
    linear {"format": "int-quantized"} → format is 'int-quantized'; it must be None or
    linear {"weights": 4} → weights is 4; it must be an object
    linear {"output_activations": {"num_bits": 8}} → output_activations is
    recipe {"num_bits": 3} → num_bits is 3
    recipe {"type": "float"} → type is 'float'; it must be 'int'
    recipe {"strategy": "block"} → strategy is 'block'
    recipe {"group_size": 0} → group_size is 0
    recipe {"actorder": "other"} → actorder is 'other'
    recipe {"dynamic": true} → dynamic is True
    inputs {"dynamic": false} → dynamic is False
    inputs {"symmetric": false} → symmetric is False
    inputs {"num_bits": 4} → num_bits is 4
    inputs {"strategy": "tensor"} → strategy is 'tensor'
    inputs {"sym": false} → need weights of 8 bits that are symmetric and not packed
    fp8 {} → type is 'int'; it must be 'float'
    fp8 {"type": "float", "dynamic": false, "strategy": "tensor"} → dynamic is False
    """
)


def changed(name: str, more: Any) -> Any:
    """Settings of a kind, with others; linear, recipe, inputs: of compressed-tensors' recipe."""
    match name:
        case "nothing":
            return more
        case "linear":
            return CT4 | dict(config_groups=dict(a=dict(targets=["Linear"]) | more))
        case "recipe":
            return recipe(**more)
        case "inputs":
            return inputs_of(**more)
        case "fp8":
            how = dict(format="float-quantized", inputs=IN8 | more)
            return settings_of("compressed-tensors", 8, -1, True, **how)
    return dict(gptq=GPTQ4, awq=AWQ4, bnb=BNB, ct=CT4)[name] | more


def test_settings_that_are_not_honoured():
    cases = []
    for line, says in NOT_HONOURED:
        name, more = line.split(" ", 1)
        cases.append((changed(name, json.loads(more)), says))
    for bits, form in ((4, "pack-quantized"), (8, "int-quantized")):
        how = settings_of("compressed-tensors", bits, 8, True, format=form, inputs=IN8)
        cases.append((how, "need weights of 8 bits"))
    for how, says in cases:
        with pytest.raises(UserError) as error:
            load_quantization(how)
        assert says in str(error.value), says


def test_the_project_s_own_settings_are_checked_and_written_as_they_were_read():
    for layout in (
        Quantization(8),
        Quantization("fp8", activations=8),
        Quantization(4, 64, 16, "awq"),
    ):
        assert load_quantization(layout.to_dict()) == layout
    settings = Quantization(8).to_dict()
    del settings["activations"]  # older folders
    assert load_quantization(settings) == Quantization(8)
    for change, says in (
        (dict(bits=3), "bits is 3; it must be 8, 4, 'fp8' or 'nf4'"),
        (dict(group=5), "group is 5; it must be 32, 64 or 128"),
        (dict(head_bits=True), "head_bits is True"),
        (dict(method="magic"), "method is 'magic'"),
        (dict(activations=4), "activations is 4"),
        (dict(bits=4, activations=8), "activations of 8 bits need weights in 8 or fp8, not 4"),
        (dict(method="smoothquant"), "smoothquant is for weights and activations of 8 bits"),
        (dict(bits="nf4", method="gptq"), "method gptq needs whole numbers: bits 8 or 4, not nf4"),
        (dict(other=1), "which is not supported"),
    ):
        with pytest.raises(UserError) as error:
            load_quantization(settings | change)
        assert says in str(error.value) and "name another folder" in str(error.value)


SORTED, SHUFFLED = settings_of("gptq", 4, 8), settings_of("gptq", 4, 8, ordered=True)
FOLDERS = {
    "sorted": SORTED,
    "shuffled": SHUFFLED,
    "eight": settings_of("gptq", 8, 8),
    "awq": AWQ4,
    "ct": CT4,
    "symmetric": settings_of(CT, 4, 8, True),
    "bnb": BNB,
    "nested": NESTED,
}
MISFITS = told(  # a folder, tensors and their change → what is said
    r"""
    sorted mlp.up_proj.qweight missing → tensor model.layers.0.mlp.up_proj.qweight \[5, 56\] is mis
    sorted qweight short → qweight in .* is \[\d, \d+\]; the config asks for \[\d, \d+\]
    sorted qweight int64 → qweight in .* is I64; weights must be I32
    sorted scales int32 → scales in .* is I32; weights must be one of
    sorted q_proj.g_idx float32 → q_proj.g_idx in .* is F32; weights must be I32
    shuffled q_proj.g_idx missing → q_proj.g_idx \[40\] is missing
    eight model.norm.weight missing → model.norm.weight .* is missing
    awq qzeros one → qzeros in .* is \[1, \d\]; the config asks for
    ct weight_shape missing → weight_shape \[2\] is missing
    ct weight_zero_point missing → weight_zero_point .* is missing
    symmetric weight_packed uint8 → weight_packed in .* is U8; weights must be I32
    bnb absmax uint8 → absmax in .* is U8; weights must be one of
    nested nested_absmax missing → nested_absmax .* is missing
    """
)
NONSENSE = told(
    r"""
    ct up_proj.weight_shape reversed → its weight_shape is \[40, 56\]; config
    shuffled o_proj.g_idx plus_one → o_proj: its g_idx must put 8 columns in each group
    shuffled o_proj.g_idx zeros → o_proj: its g_idx must put 8 columns in each group
    shuffled o_proj.g_idx negative → o_proj: its g_idx must put 8 columns
    shuffled k_proj.g_idx reversed → k_proj: its g_idx differs from that of another part
    sorted q_proj.g_idx reversed → q_proj: its g_idx must put columns in one group after the other
    sorted down_proj.scales NaN → down_proj: its scales must be finite
    bnb quant_map reversed → its quant_map is not NF4's
    bnb quant_map NaN → its quant_map is not NF4's
    bnb STATE plus_one → weight.quant_state.bitsandbytes__nf4 is not JSON
    bnb STATE brackets → is not JSON
    bnb STATE 1 → its quant_state is 1; it must be an object
    bnb STATE {"blocksize": 128} → blocksize is 128; it must be 64
    bnb STATE {"shape": [2, 2]} → shape is \[2, 2\]; it must be \[\d+, \d+\]
    nested STATE {"nested_blocksize": 64} → nested_blocksize is 64; it must be 256
    nested STATE {"nested_offset": "x"} → nested_offset is 'x'
    nested STATE {"nested_offset": NaN} → its scales must be finite
    """
)
STATE = "quant_state.bitsandbytes__nf4"


@pytest.mark.slow
@pytest.mark.parametrize("table", [MISFITS, NONSENSE], ids=["misfits", "nonsense"])
def test_damaged_tensors_are_refused(table, tmp_path, monkeypatch):
    """Those that do not fit, before memory is asked for."""
    if table is MISFITS:
        too_late = lambda device: pytest.fail("the check is over")  # noqa: E731
        monkeypatch.setattr("checkpoint.load.free_memory", too_late)
    for damage, says in table:
        name, tensors, change = damage.split(" ", 2)
        write(tmp_path, FOLDERS[name])
        change_tensors(tmp_path, tensors.replace("STATE", STATE), change)
        with pytest.raises(UserError, match=says) as error:
            Llama.load(tmp_path, "cpu")
        if table is NONSENSE:
            assert re.search("model.layers.0.*fetch the model again", str(error.value))


def test_a_bias_that_config_json_does_not_have(tmp_path):
    """Of zeros it is none."""
    plain = write(tmp_path, SORTED)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = {f"model.layers.0.self_attn.{name}_proj.bias": torch.zeros(40) for name in "qo"}
    bias["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    save_file(tensors | bias, tmp_path / "model.safetensors")
    check_logits(tmp_path, plain)
    change_tensors(tmp_path, "o_proj.bias", "plus_one")
    with pytest.raises(UserError, match="o_proj: its bias is not all 0"):
        Llama.load(tmp_path, "cpu")


def test_memory_is_counted_with_scales_and_each_order_once(tmp_path, monkeypatch):
    write(tmp_path, SHUFFLED)
    llama = Llama(Config.load(tmp_path), seed=None)
    weights = [
        linear.weight
        for layer in llama.layers
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    needs = sum(w.nbytes for w in weights) + 4 * (50 * 40 + 3 * 40)
    monkeypatch.setattr("checkpoint.load.free_memory", lambda device: needs)
    Llama.load(tmp_path, "cpu", torch.float32)
    monkeypatch.setattr("checkpoint.load.free_memory", lambda device: needs - 1)
    with pytest.raises(UserError, match="for its weights"):
        Llama.load(tmp_path, "cpu", torch.float32)


def test_the_command_line(tmp_path, capsys):
    write(tmp_path, AWQ4 | dict(group_size=16), shape=ROUND | dict(vocab_size=261))
    assert cli(["--target", str(tmp_path), "--max-tokens", "5", "--temperature", "0", "Once"]) == 0
    for how, says in (
        (AWQ4 | dict(version="gemv"), "version is 'gemv'; it must be"),
        (AWQ4, "qzeros"),
        (GPTQ4, "the config asks for"),
    ):
        config = json.loads((tmp_path / "config.json").read_text()) | dict(quantization_config=how)
        (tmp_path / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        assert cli(["--target", str(tmp_path), "Once"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and says in said, said


def test_naive_layout_is_that_of_its_type():
    how = settings_of("compressed-tensors", 8, -1, True, format="naive-quantized")
    assert load_quantization(how).bits == 8
    (recipe,) = how["config_groups"].values()
    recipe["weights"]["type"] = "float"
    assert load_quantization(how).bits == "fp8"
