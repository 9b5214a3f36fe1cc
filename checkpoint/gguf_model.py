"""A Llama from a GGUF (gguf.py): its settings and its weights, as a folder would hold them.

Tensors get the names of a folder's. Two things are stored another way: a Llama's rows of q and k
are in the order of interleaved rotary embeddings (gguf_blocks.py puts them back; a Qwen's are not),
and Llama 3's scaling of these embeddings is a tensor, `rope_freqs`, that divides the frequency of
each pair.

A type is chosen tensor by tensor (Q4_K_M: Q4_K, and Q6_K where it helps most), but q, k and v are
one matrix here, and so are gate and up. So each matrix of the model has a *container* that holds
all of its parts exactly: the most bits, the smallest group, zeros if one has them, or floating
point if one is.

Invariant: a number is as it is stored, up to a rounding of float32.
Not covered, and refused by name: other architectures, experts, a part of a head that turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.files import Json
from checkpoint.formats import (
    Find,
    Header,
    Headers,
    Layout,
    check_setting,
    empty_matrix,
)
from checkpoint.gguf import GGUF, SUPPORTED
from checkpoint.gguf_blocks import BLOCK_FORMATS, unpack, unpermute
from checkpoint.gguf_vocabulary import end_ids
from checkpoint.tensors import Checkpoint
from checkpoint.weights import PARTS
from errors import UserError, brief
from quant import Quantized, pack4

if TYPE_CHECKING:
    from pathlib import Path

MODULES = {  # of a GGUF -> of a folder
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TYPES = {"llama": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}  # of an architecture
GGUF_SETTINGS = {  # of a config.json -> of a GGUF, behind its architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
UNREAD: dict[str, tuple[Any, ...]] = {  # what changes the numbers -> the values that do not
    "pooling_type": (None, 0),  # others are of models that embed or rank texts
    "classifier.output_labels": (None,),
    "expert_count": (None, 0),
    "logit_scale": (None, 0.0, 1.0),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "attention.clamp_kqv": (None, 0.0),
    "attention.max_alibi_bias": (None, 0.0),
    "rope.scaling.attn_factor": (None, 1.0),  # of all scores
    "rope.scaling.yarn_ext_factor": (None, -1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (None, 1.0),
}
ROPE_FACTORS = "rope_freqs.weight"


def folder_name(name: str) -> str:
    """A tensor's name in a folder; one that no Llama has stays as it is."""
    match name.split("."):
        case ["blk", i, module, kind]:
            return f"model.layers.{i}.{MODULES.get(module, module)}.{kind}"
        case [module, kind]:
            return f"{MODULES.get(module, module)}.{kind}"
    return name


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF, by their names in a folder. A header's dtype is a type of GGUF's."""

    floats = SUPPORTED  # blocks are dequantized where the model is in floating point

    def __init__(self, file: Path) -> None:
        self.gguf = GGUF.open(file)
        self.folder = file
        self.names = {}  # in a folder -> in the file
        self.headers = {}
        self.files = {}
        for name, info in self.gguf.tensors.items():
            if name != ROPE_FACTORS:
                ours = folder_name(name)
                self.names[ours] = name
                self.headers[ours] = Header(list(info.shape), info.type)
                self.files[ours] = info.file
        self.heads = {}  # of the matrices whose rows are in another order
        if architecture(self.gguf) == "llama":
            heads = setting(self.gguf, "attention.head_count")
            kv_heads = setting(self.gguf, "attention.head_count_kv", heads)
            self.heads = {"q_proj": heads, "k_proj": kv_heads}

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Quantized weights ask for bfloat16, and numbers beside them for float32."""
        if any(header.dtype in BLOCK_FORMATS for header in self.headers.values()):
            return [torch.bfloat16, torch.float32]
        return super().dtypes

    def read(self, name: str) -> Tensor | Quantized:
        """One tensor; a matrix of whole numbers, if it is quantized. UserError names it."""
        stored = self.gguf.read(self.names[name])
        module = name.split(".")[-2]
        if module in self.heads:
            stored = unpermute(stored, self.heads[module])
        type = self.headers[name].dtype
        if type not in BLOCK_FORMATS:
            return stored
        try:
            return unpack(type, stored)
        except UserError as error:
            raise UserError(f"{self.files[name]}: {self.names[name]}: {brief(error)}") from None


def architecture(gguf: GGUF) -> Any:
    """The family of the model in this file."""
    return gguf.metadata.get("general.architecture")


def setting(gguf: GGUF, name: str, default: Any = None) -> Any:
    """A setting of the model in this file."""
    return gguf.metadata.get(f"{architecture(gguf)}.{name}", default)


# ---- The config


def read_gguf_config(checkpoint: GGUFCheckpoint) -> Config:
    """The config of a GGUF's model. UserError names the file and what is not honoured."""
    gguf = checkpoint.gguf
    kind = architecture(gguf)
    try:
        check_setting("general.architecture", kind, *MODEL_TYPES)
        for name, values in UNREAD.items():
            check_setting(f"{kind}.{name}", setting(gguf, name), *values)
        config = Config.parse(config_json(gguf))
        for name in ("rope.dimension_count", "attention.value_length"):
            check_setting(name, setting(gguf, name, config.head_dim), config.head_dim)
        if ROPE_FACTORS in gguf.tensors:
            config = replace(config, rope_scaling=rope_factors(gguf, config))
    except UserError as error:
        raise UserError(f"{gguf.file}: {brief(error)}") from None
    return replace(config, quantization=BlockLayout.of(checkpoint.headers))


def config_json(gguf: GGUF) -> Json:
    """The metadata as a config.json has them: a Llama's is a Mistral's, which may have a sliding
    window."""
    data = {name: setting(gguf, theirs) for name, theirs in GGUF_SETTINGS.items()}
    factor = setting(gguf, "rope.scaling.factor", setting(gguf, "rope.scale_linear"))
    kind = setting(gguf, "rope.scaling.type", "linear")
    is_scaled = kind != "none" and (factor or kind != "linear")
    rope = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": setting(gguf, "rope.scaling.original_context_length"),
        "beta_fast": setting(gguf, "rope.scaling.yarn_beta_fast"),
        "beta_slow": setting(gguf, "rope.scaling.yarn_beta_slow"),
    }
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{gguf.file} has no token_embd.weight: it is not a complete model")
    model_type = MODEL_TYPES[architecture(gguf)]
    window = setting(gguf, "attention.sliding_window") or None  # 0: none
    return data | {
        "model_type": model_type,
        "sliding_window": window,
        "use_sliding_window": window is not None and model_type != "mistral",
        "max_window_layers": 0,
        "is_causal": setting(gguf, "attention.causal"),
        "vocab_size": embedding.shape[0],
        "rope_scaling": rope if is_scaled else None,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "eos_token_id": end_ids(gguf),
    }


def rope_factors(gguf: GGUF, config: Config) -> Json:
    """What divides the frequency of each pair of dimensions, linear scaling included."""
    scaling = config.rope_scaling or {"rope_type": "linear", "factor": 1}
    check_setting(f"rope_type beside {ROPE_FACTORS}", scaling["rope_type"], "linear")
    factors = (gguf.read(ROPE_FACTORS).flatten().float() * scaling["factor"]).tolist()
    if len(factors) != config.head_dim // 2 or not all(0.1 < factor < 1e6 for factor in factors):
        raise UserError(
            f"{ROPE_FACTORS} must hold {config.head_dim // 2} numbers between 0.1 and 1e6"
        )
    return {"rope_type": "factors", "factors": factors}


# ---- The weights


@dataclass(frozen=True)
class BlockLayout(Layout):
    """A layout for each matrix. types: of the file's tensors, by their names in a folder."""

    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, headers: Headers) -> BlockLayout | None:
        """The layout of a file with these tensors; None: nothing is quantized."""
        layout = cls(8, 32, types={name: header.dtype for name, header in headers.items()})
        ranked = layout.ranked
        return replace(layout, bits=BLOCK_FORMATS[ranked[0]].bits) if ranked else None

    @property
    def ranked(self) -> list[str]:
        """Types of blocks, the most frequent first."""
        blocks = [type for type in self.types.values() if type in BLOCK_FORMATS]
        return sorted(set(blocks), key=blocks.count, reverse=True)

    @property
    def name(self) -> str:
        return ", ".join(self.ranked)

    def empty(self, name: str, N: int, K: int, device: torch.device | str) -> Quantized | None:
        """A container that holds the numbers of all parts exactly, side by side."""
        *layer, role = name.split(".")
        prefix = f"model.layers.{layer[0]}." if layer else ""
        parts = [f"{prefix}{module}.weight" for module in PARTS[role]]
        types = {self.types[part] for part in parts if part in self.types}
        if not types or not types <= BLOCK_FORMATS.keys():
            return None
        forms = [BLOCK_FORMATS[type] for type in types]
        has_products = any(type.endswith("_K") for type in types)  # of scales
        zero = None
        if any(form.zeros for form in forms):
            # Q4_0's are 8, or −1 where a scale is 0.
            zero = torch.int16 if types == {"Q4_0"} else torch.float32
        return empty_matrix(
            N,
            K,
            bits=max(form.bits for form in forms),
            group=min(form.group for form in forms),
            device=device,
            scale=torch.float32 if has_products else torch.float16,
            zero=zero,
        )

    def tensors(self, weight: Quantized, find: Find) -> dict[str, str]:
        return {"weight": "N K float"}

    def convert(self, weight: Quantized, tensors: Mapping[str, Quantized]) -> Quantized:
        """The same numbers with smaller groups, and two in a byte, where its container asks."""
        q = tensors["weight"]
        repeats = q.group // weight.group
        return weight._replace(
            values=pack4(q.values) if weight.bits == 4 else q.values,
            scale=q.scale.repeat_interleave(repeats, 1),
            zero=None if q.zero is None else q.zero.repeat_interleave(repeats, 1),
        )
