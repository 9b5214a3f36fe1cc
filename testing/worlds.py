"""Models that serve the same requests in several ways, with drafters and caches."""

from collections.abc import Callable

import torch

from drafters import Drafter, ModelDrafter, NgramDrafter, SelfDrafter
from kvcache import Cache
from model import Llama
from paged import PagedCache
from quant import Bits
from testing.models import add_noise, random_llama

LLAMA = random_llama(1, max_position_embeddings=300)
SMALLER = random_llama(1, max_position_embeddings=300, num_hidden_layers=1)
# As if its weights were rounded.
ROUNDED = add_noise(random_llama(1, max_position_embeddings=300))


def paged(llama: Llama, blocks: int, size: int, sharing=True, bits: Bits = (16, 16)) -> PagedCache:
    return PagedCache(llama.kv_spec(bits=bits), blocks, size, prefix_caching=sharing)


def drafter_of(name: str, cache: Cache, make_cache: Callable[[Llama], Cache]) -> Drafter | None:
    """cache: the target's; make_cache: makes another."""
    if name == "model":
        return ModelDrafter(SMALLER, make_cache(SMALLER))
    if name == "self":
        return SelfDrafter(ROUNDED, cache)
    return NgramDrafter() if name == "ngram" else None


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
