"""Random EAGLE heads, in memory and in folders, and their formulas, plainly."""

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.eagle import EagleConfig
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from eagle import EagleHead
from kvcache import AttentionMetadata
from model import Llama

LAYERS = (1, 0)  # whose inputs the head reads: not in their order
FLAGS = (
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"has_embedding": True, "norm_output": True},
    {"has_offsets": False},
)


@torch.no_grad()
def random_head(
    target: Llama, drafted=range(0, 261, 2), seed: int = 5, dtype=torch.float64, bits=16, **flags
) -> EagleHead:
    """Random weights, so large that drafts differ; drafted: the tokens of its vocabulary."""
    layer = replace(
        target.config,
        num_hidden_layers=1,
        intermediate_size=28,
        tie_word_embeddings=False,
        quantization=None,
    )
    C = target.config.hidden_size
    config = EagleConfig(layer, len(drafted), C, feature_layers=LAYERS, **flags)
    head = EagleHead(config, target, dtype=dtype, seed=seed)
    for name, tensor in head.named_tensors().items():
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(len(name))
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.copy_(1 + noise / 4 if "norm" in name else noise / 3)
    head.offsets.copy_(torch.tensor(drafted) - torch.arange(len(drafted)))
    if bits == 16:
        return head
    small = EagleHead(config.quantized(Quantization(bits)), target, dtype=dtype, seed=None)
    fill_model(small, head.named_tensors().items())
    return small


def write_head(folder, head: EagleHead, layout: str = "speculators"):
    """A folder of the head, in either layout; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = head.eagle.to_dict("target")
    tensors = {name: tensor.contiguous() for name, tensor in head.named_tensors().items()}
    if layout == "authors":
        layer = config.pop("transformer_layer_config")
        del config["speculators_config"], config["speculators_model_type"]
        config = layer | config | {"architectures": ["LlamaForCausalLMEagle3"]}
        tensors = {name.replace("layers.0", "midlayer"): x for name, x in tensors.items()}
        tensors["t2d"] = torch.zeros(head.eagle.layer.vocab_size, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embeddings of rows 0, 1, …: [m, heads, D]."""
    m, _, D = x.shape
    angles = torch.arange(m)[:, None] * theta ** -(torch.arange(0, D, 2) / D)
    angles = angles.to(x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def plain_rows(head: EagleHead, f: Tensor, e: Tensor) -> Tensor:
    """z of all rows: f, e: [m, C]."""
    w = head.named_tensors()
    c = head.eagle.layer
    flags = head.eagle
    m = len(f)
    name = "layers.0."
    token = norm(e, w[name + "input_layernorm.weight"], c.rms_norm_eps)
    feature = norm(f, w[name + "hidden_norm.weight"], c.rms_norm_eps)
    x = torch.cat((token, feature), -1)
    q, k, v = (
        (x @ w[f"{name}self_attn.{part}_proj.weight"].T).view(m, -1, c.head_dim) for part in "qkv"
    )
    if c.model_type == "qwen3":
        q = norm(q, w[name + "self_attn.q_norm.weight"], c.rms_norm_eps)
        k = norm(k, w[name + "self_attn.k_norm.weight"], c.rms_norm_eps)
    q = turned(q, c.rope_theta)
    k = turned(k, c.rope_theta)
    heads = []
    for h in range(c.num_attention_heads):
        g = h // (c.num_attention_heads // c.num_key_value_heads)
        scores = q[:, h] @ k[:, g].T / c.head_dim**0.5
        scores = scores.masked_fill(torch.ones(m, m).triu(1) > 0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, g])
    attn_out = torch.cat(heads, -1) @ w[name + "self_attn.o_proj.weight"].T
    y = (feature if flags.norm_before_residual else f) + attn_out
    normed = norm(y, w[name + "post_attention_layernorm.weight"], c.rms_norm_eps)
    gate = normed @ w[name + "mlp.gate_proj.weight"].T
    up = normed @ w[name + "mlp.up_proj.weight"].T
    z = y + (gate * gate.sigmoid() * up) @ w[name + "mlp.down_proj.weight"].T
    return norm(z, w["norm.weight"], c.rms_norm_eps) if flags.norm_output else z


def plain_features(target: Llama, text: list[int]) -> Tensor:
    """x at the inputs of LAYERS, side by side: [m, n C]."""
    metadata = AttentionMetadata.without_cache(1, len(text))
    rope = target.rope(metadata.positions)
    x = target.ops.embed(torch.tensor(text), target.embed, target.dtype)
    inputs = []
    for i, layer in enumerate(target.layers):
        inputs.append(x)
        y, mlp_out = target.decoder_layer(layer, x, None, rope, metadata, i)
        x = y + mlp_out
    return torch.cat([inputs[i] for i in LAYERS], -1)


def combined(head: EagleHead, features: Tensor) -> Tensor:
    """f: [m, n C] -> [m, C]."""
    w = head.named_tensors()
    eps = head.eagle.layer.rms_norm_eps
    if head.eagle.norm_before_fc:
        features = norm(features, w["input_norm.weight"], eps)
    if head.eagle.fc_norm:
        parts = enumerate(features.chunk(len(LAYERS), -1))
        features = torch.cat([norm(x, w[f"fc_norm.{i}.weight"], eps) for i, x in parts], -1)
    return features @ w["fc.weight"].T


def plain_chain(head: EagleHead, target: Llama, text: list[int], drafts: list[int]) -> Tensor:
    """The logits of each draft, given the drafts before it: [k, V]. All rows anew for each."""
    w = head.named_tensors()
    embedding = w.get("embed_tokens.weight", target.embed.weight)
    f = combined(head, plain_features(target, text[:-1]))
    e = embedding[torch.tensor(text[1:])]
    logits = []
    for draft in drafts:
        z = plain_rows(head, f, e)[-1:]
        out = (
            z
            if head.eagle.norm_output
            else norm(z, w["norm.weight"], head.eagle.layer.rms_norm_eps)
        )
        lowest = torch.finfo(torch.float64).min
        row = torch.full((target.config.vocab_size,), lowest, dtype=torch.float64)
        ids = torch.arange(len(w["lm_head.weight"]))
        if "d2t" in w:
            ids = ids + w["d2t"]
        row[ids] = (out @ w["lm_head.weight"].T)[0]
        logits.append(row)
        f = torch.cat((f, z))
        e = torch.cat((e, embedding[draft][None]))
    return torch.stack(logits)
