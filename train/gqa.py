"""Grouped-query attention: fewer key/value heads, and how to get there from a model that was trained with more.

H query heads look at G key/value heads, H / G of them at each. What the cache holds, and what a decoding step reads of it, shrinks by
the same factor; multi-head attention is G = H, multi-query attention (Shazeer 2019) is G = 1:

    bytes a token = 2 · layers · G · D · bytes per number

Writing another `num_key_value_heads` into config.json does not convert a checkpoint: its K and V projections have the old shape. They
are merged, each new head the mean of the heads of its group,

    W'_g = mean over h in group g of W_h,          for k_proj and v_proj alike

which leaves attention what it was only if those heads were equal. They were not, so the model is worse than before, but it is near:
training on for a twentieth of what it was trained brings most of it back (`python -m train.distill --from NAME --kv-heads N --data FILE`
shows the loss before, right after the merge, and in the end). The mean beats taking the first head, or new ones.

Invariant: the merge of equal heads changes no logit.

Ainslie et al. 2023 (arXiv:2305.13245).

    G key/value heads · D head size · C model width
"""
import time
from dataclasses import replace

import torch

from kvcache import kv_bytes
from model import Llama


@torch.no_grad()
def merge_heads(llama: Llama, kv_heads: int) -> Llama:
    """The same model with fewer key/value heads, each the mean of the group that it stands for. ValueError if they cannot be grouped evenly."""
    config = llama.config
    G, D = config.num_key_value_heads, config.head_dim
    if kv_heads < 1 or G % kv_heads:
        raise ValueError(f"--kv-heads {kv_heads}: the model's {G} key/value heads can only be merged into a divisor of {G}")
    merged = Llama(replace(config, num_key_value_heads=kv_heads), llama.device, llama.dtype, seed=None)
    sources = llama.places()
    for name, place in merged.places().items():
        source = sources[name]
        if ".k_proj." in name or ".v_proj." in name:                                        # [G · D, C], or a bias [G · D]
            source = source.view(kv_heads, G // kv_heads, D, *source.shape[1:]).mean(1).flatten(0, 1)
        place.copy_(source)
    return merged


def cache_bytes(llama: Llama, tokens: int) -> int:
    """Of the keys and values of so many tokens in bfloat16."""
    c = llama.config
    return kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, tokens, torch.bfloat16)


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the embedded model, merged into one head a layer, and what a few seconds of training on bring back.

def main() -> None:
    from train.distill import Recipe, Training, measure, tell

    llama = Llama.load("tiny", dtype=torch.float32, trainable=True)
    told = tell(llama, 16, 129, llama.config.eos_token_ids[0], seed=1)                      # what it says itself is what it must go on saying
    held = tell(llama, 8, 129, llama.config.eos_token_ids[0], seed=2)
    merged = merge_heads(llama, 1)

    def show(when: str, model: Llama) -> None:
        found = measure(model, held, llama, length=128, count=8)
        print(f"{when:34} {model.config.num_key_value_heads} K/V heads, {cache_bytes(model, 1024):>9,} bytes for 1,024 tokens: "
              f"{found['bits/token']:.2f} bits a token, {found['acceptance']:.0%} of its tokens kept")

    show("before", llama)
    show("right after the merge", merged)
    training = Training(merged, None, llama.requires_grad_(False), told, Recipe(steps=10, batch=4, length=128, warmup=1, overlap=0))
    start = time.perf_counter()
    while training.steps < training.recipe.steps:
        training.step()
    show(f"after {training.steps} steps, {time.perf_counter() - start:.0f} seconds", merged)


if __name__ == "__main__":
    main()
