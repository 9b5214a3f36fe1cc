"""Grouped-query attention: fewer key/value heads, and how to get there from a model that was trained with more.

H query heads share G key/value heads, H / G query heads each. The cache, and the bytes that a decoding step reads of
it, shrink by the factor H / G; G = 1 is multi-query attention (Shazeer 2019):

    bytes a token = 2 · layers · G · D · bytes per number
    W'_g = mean over h in group g of W_h,          for k_proj and v_proj alike

To set `num_key_value_heads` in config.json does not convert a checkpoint: its heads must be merged, as in the second
line. Invariant: attention stays the same if the heads of a group were equal. They are not, so the model gets worse; a
twentieth of its training, once more, repairs most: `python -m train.distill --from NAME --kv-heads N --data FILE`.

Ainslie et al. 2023 (arXiv:2305.13245).
"""

from dataclasses import replace

import torch

from errors import UserError
from kvcache import kv_bytes
from model import Llama


@torch.no_grad()
def merge_heads(llama: Llama, kv_heads: int) -> Llama:
    """The model with fewer key/value heads, each the mean of a group. ValueError if groups would differ in size."""
    config = llama.config
    G, D = config.num_key_value_heads, config.head_dim
    if kv_heads < 1 or G % kv_heads:
        raise UserError(
            f"--kv-heads {kv_heads}: the model's {G} key/value heads merge only into a divisor of {G}"
        )
    merged = Llama(
        replace(config, num_key_value_heads=kv_heads), llama.device, llama.dtype, seed=None
    )
    sources = llama.places()
    for name, place in merged.places().items():
        source = sources[name]
        if ".k_proj." in name or ".v_proj." in name:  # [G · D, C], or a bias [G · D]
            source = (
                source.view(kv_heads, G // kv_heads, D, *source.shape[1:]).mean(1).flatten(0, 1)
            )
        place.copy_(source)
    return merged


def cache_bytes(llama: Llama, tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens in bfloat16."""
    c = llama.config
    return kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, tokens, torch.bfloat16)


# ---- The demonstration: the embedded model, merged into one head a layer, and trained on for a few seconds -----------

if __name__ == "__main__":
    from train.distill import Hyperparameters, Training, evaluate, sample_corpus

    llama = Llama.load("tiny", dtype=torch.float32, trainable=True)
    end, merged = llama.config.eos_token_ids[0], merge_heads(llama, 1)
    own, held = (sample_corpus(llama, count, 129, end, seed) for seed, count in ((1, 16), (2, 8)))
    recipe = Hyperparameters(steps=10, batch=4, length=128, warmup=1, overlap=0)
    training = Training(merged, None, llama.requires_grad_(False), own, recipe)
    for name, model, steps in (
        ("before", llama, 0),
        ("merged", merged, 0),
        ("after 10 steps", merged, recipe.steps),
    ):
        for _ in range(steps):
            training.step()
        found = evaluate(model, held, llama, length=128, count=8)
        print(
            f"{name:14} {model.config.num_key_value_heads} K/V heads, {cache_bytes(model, 1024):>9,} bytes for 1,024 "
            f"tokens: {found['bits/token']:.2f} bits a token, {found['acceptance']:.0%} of its tokens kept"
        )
