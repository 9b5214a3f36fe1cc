"""Heads merged: equal ones without a trace, others into their mean."""

from dataclasses import replace

import pytest
import torch

from checkpoint.config import Config
from kvcache import KVCache
from testing.models import SMALL
from train.distill import new_model
from train.gqa import cache_bytes, merge_heads

CONFIG = Config(**SMALL)


@pytest.mark.parametrize("kv_heads, kind", [(1, "llama"), (2, "qwen2"), (2, "qwen3"), (4, "llama")])
def test_merging_equal_heads_changes_nothing_and_the_rest_is_the_mean(
    kv_heads: int, kind: str
) -> None:
    config = replace(CONFIG, num_key_value_heads=4, attention_bias=True, model_type=kind)
    llama, D, C = new_model(config, 8), config.head_dim, config.hidden_size
    merged = merge_heads(llama, kv_heads)
    source, place = (
        m.named_tensors()["model.layers.1.self_attn.k_proj.weight"] for m in (llama, merged)
    )
    n = 4 // kv_heads  # heads of a group
    expected = torch.stack(
        [sum(source[(g * n + i) * D :][:D] for i in range(n)) / n for g in range(kv_heads)]
    )
    torch.testing.assert_close(place.view(kv_heads, D, C), expected)
    with torch.no_grad():
        for name, place in llama.named_tensors().items():
            if ".k_proj." in name or ".v_proj." in name:
                heads = place.view(kv_heads, 4 // kv_heads, D, -1)
                heads.copy_(heads[:, :1].expand_as(heads))
    tokens = torch.arange(30)
    torch.testing.assert_close(
        merge_heads(llama, kv_heads)(tokens), llama(tokens), atol=1e-6, rtol=1e-6
    )


def test_the_cache_shrinks_by_the_same_factor() -> None:
    llama = new_model(replace(CONFIG, num_key_value_heads=4), 8)
    two, one = (merge_heads(llama, heads) for heads in (2, 1))
    assert cache_bytes(llama) == 2 * cache_bytes(two) == 4 * cache_bytes(one)
    spec = replace(llama.kv_spec(), dtype=torch.bfloat16)
    assert 16 * cache_bytes(llama) == KVCache(spec, 16).bytes


@pytest.mark.parametrize("kv_heads", [0, 3, 8])
def test_heads_merge_only_into_a_divisor(kv_heads: int) -> None:
    with pytest.raises(ValueError, match="divisor of 4"):
        merge_heads(new_model(replace(CONFIG, num_key_value_heads=4), 1), kv_heads)
