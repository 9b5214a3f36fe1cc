"""Many texts in the same memory: how many fit, in rows or in blocks, and how much of it is empty.

The production batcher serves them, with a model that does nothing: only its cache matters.

Invariant: every layout gets the same requests in the same order.
"""

import random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from batcher import Batcher
from kernels import Ops
from kvcache import AttentionMetadata, KVCache, KVSpec
from measure.effort import Effort
from measure.serving import random_request
from paged import PagedCache
from parallel import Group
from request import Request
from runner import ModelRunner
from speculative import Drawing

Row = dict[str, Any]


def mixed_requests(count: int) -> list[Request]:
    """Requests of log-normal lengths with mean 300, prompt and answer together; a third is the
    prompt."""
    generator = random.Random(1)
    requests = []
    for seed in range(count):
        length = round(generator.lognormvariate(5.52, 0.6))
        length = min(1000, max(8, length))
        requests.append(random_request(length // 3, length - length // 3, seed))
    return requests


class BlankModel:
    """Stands in for a model where only its cache matters: all tokens are equally probable."""

    device = torch.device("cpu")
    dtype = torch.float32
    ops = Ops()
    group = Group()

    def price(self, context: int) -> int:
        return 1

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | None = None,
        features: None = None,
    ) -> Tensor:
        wanted = tokens if logits_indices is None else logits_indices
        return torch.zeros(len(wanted), 2)


def waste(effort: Effort) -> list[Row]:
    """With memory for 8 texts of 1024 tokens: the texts in flight, and the wasted share."""
    layouts: dict[str, KVCache | PagedCache] = {"rows of 1024": KVCache(KVSpec(1, 1, 1), 1024, 8)}
    for size in (256, 64, 16, 1):
        layouts[f"blocks of {size}"] = PagedCache(
            KVSpec(1, 1, 1), 8192 // size, size, max_len=1024, prefix_caching=False
        )
    rows = []
    for name, cache in layouts.items():
        requests = mixed_requests(effort.num_mixed)
        rows.append({"layout": name} | memory_use(cache, requests))
    return rows


def memory_use(cache: KVCache | PagedCache, requests: list[Request]) -> dict[str, float]:
    """The mean number of running texts while others wait, and the mean share of their memory that
    holds no token."""
    batcher = Batcher(ModelRunner(BlankModel(), cache, Drawing(4000)), len(requests))
    for request in requests:
        batcher.add(request)
    num_running = []
    wasted = []
    while batcher.waiting or batcher.running:
        batcher.step()
        if batcher.running:
            wasted.append(wasted_share(cache, batcher.running))
        if batcher.waiting:
            num_running.append(len(batcher.running))
    return {"texts_in_flight": fmean(num_running or [len(requests)]), "waste": fmean(wasted)}


def wasted_share(cache: KVCache | PagedCache, running: list[Request]) -> float:
    """Of texts that share no block."""
    num_tokens = sum(cache.length(request.seq) for request in running)
    num_blocks = len(running)
    if isinstance(cache, PagedCache):
        num_blocks = cache.pool.total - cache.pool.available
    return 1 - num_tokens / (num_blocks * cache.block_size)
