"""Grouped-query attention: fewer key/value heads, for a model that was trained with more.

H query heads share G key/value heads, H / G query heads each. The cache, and the bytes that a
decoding step reads of it, shrink by the factor H / G; G = 1 is multi-query attention (Shazeer
2019):

    bytes a token = 2 · layers · G · D · bytes per number
    W'_g = mean over h in group g of W_h,          for k_proj and v_proj alike

To set `num_key_value_heads` in config.json does not convert a checkpoint: its heads must be merged,
as in the second line. Invariant: attention stays the same if the heads of a group were equal. They
are not, so the model gets worse; a twentieth of its training, once more, repairs most:
`python -m train.distill --from NAME --kv-heads N --data FILE`.

Ainslie et al. 2023 (arXiv:2305.13245).
"""

from dataclasses import replace

import torch

from errors import UserError
from kvcache import KVSpec
from model import Llama
from quant import Bits


@torch.no_grad()
def merge_heads(llama: Llama, kv_heads: int) -> Llama:
    """The model with fewer key/value heads, each the mean of a group of equal size."""
    G = llama.config.num_key_value_heads
    D = llama.config.head_dim
    if kv_heads < 1 or G % kv_heads:
        raise UserError(
            f"--kv-heads {kv_heads}: the model's {G} key/value heads merge only into "
            f"a divisor of {G}"
        )
    config = replace(llama.config, num_key_value_heads=kv_heads)
    merged = Llama(config, llama.device, llama.dtype, seed=None)
    heads = llama.named_tensors()
    for name, tensor in merged.named_tensors().items():
        weight = heads[name]
        if ".k_proj." in name or ".v_proj." in name:  # [G D, C], or a bias [G D]
            groups = weight.view(kv_heads, -1, D, *weight.shape[1:])
            weight = groups.mean(1).flatten(0, 1)
        tensor.copy_(weight)
    return merged


def cache_bytes(llama: Llama, bits: Bits = (16, 16)) -> int:
    """Bytes of a token's keys and values, in bfloat16 or in these bits."""
    return KVSpec.of(llama.config, torch.bfloat16, bits).bytes(1)


def main() -> None:
    """The demonstration: the embedded model with one K/V head a layer, trained for 10 steps."""
    llama = Llama.load("tiny", dtype=torch.float32, trainable=True)
    end = llama.config.eos_token_ids[0]
    held_out = sample_corpus(llama, 8, 129, end, seed=2)
    merged = merge_heads(llama, 1)
    print(f"cache: {cache_bytes(llama):,} bytes a token, merged {cache_bytes(merged):,}")
    print(shown("before", evaluate(llama, held_out, llama, 128, 8)))
    print(shown("merged", evaluate(merged, held_out, llama, 128, 8)))
    recipe = Hyperparameters(steps=10, batch=4, length=128, warmup=1, overlap=0)
    training = Training(
        merged, None, llama, sampled=sample_corpus(llama, 16, 129, end, seed=1), recipe=recipe
    )
    for _ in range(recipe.steps):
        training.step()
    print(shown("after 10 steps", evaluate(merged, held_out, llama, 128, 8)))


if __name__ == "__main__":
    from train.distill import Training, evaluate, sample_corpus, shown
    from train.run import Hyperparameters

    main()
