"""Tensor parallelism: one model over several processes, each with a share of every matrix (Megatron-LM).

    torchrun --nproc-per-node 2 generate.py --target 8B "…"        or        python generate.py --tensor-parallel 2 …

Two products in a row need one sum over processes. The first matrix is cut by outputs, so that a head's attention, or
SwiGLU, between the two products stays in one process; the second matrix is cut by inputs:

    x W₁ᵀ = [x W₁,₀ᵀ | x W₁,₁ᵀ | …]       y W₂ᵀ = Σ_r y_r W₂,ᵣᵀ          r: the n processes

So qkv and gate_up are cut by outputs, in whole heads; o and down by inputs, with one all-reduce each. Embedding and
head are cut by vocabulary: tokens of other processes embed as 0, which an all-reduce fills in, and the head's logits
are gathered. Where K/V heads are fewer than processes, several processes hold the same head. A process has a
smaller Llama, so caches, blocks and quantized keys need no change. All processes run the same scheduler: logits are
equal to the bit; drawn tokens, measured times and input come from the first process.

Invariants: when a process ends, all end; Ctrl-C stops all after the same step.
Cost of a token in each process (`traffic`): (2 L + 1) C numbers all-reduced, ⌈V / n⌉ logits sent.
Not covered: training; machines of different kinds; inputs of 8 bits rounded as in one process (each share has its own
scale); expert, sequence and pipeline parallelism.

Shoeybi et al. 2019 (arXiv:1909.08053).
    L layers · H query heads · G key/value heads · D head size · C hidden_size · F intermediate_size · V vocab_size
"""

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from app.processes import asked_to_stop, several, stop_together
from errors import UserError

SUMMED, GATHERED = (
    ("o", "down"),
    ("embed", "head"),
)  # roles of weights; a tied head is the embedding


def shard_config(config: Any, n: int) -> Any:
    """The model of each of n processes; its vocab_size is the largest share. ValueError if it cannot be cut so."""
    c, how, G = config, config.quantization, config.num_key_value_heads
    group = how.together if how is not None else 1
    if how is not None and how.ordered:
        raise UserError(
            f"the columns of each matrix are stored in another order (act-order), which {n} processes "
            "cannot share: use one process, or another checkpoint"
        )
    for name, size, divides in (
        ("num_attention_heads", c.num_attention_heads, c.num_attention_heads % n == 0),
        ("num_key_value_heads", G, max(G, n) % min(G, n) == 0),
        ("intermediate_size", c.intermediate_size, c.intermediate_size % n == 0),
        ("vocab_size", c.vocab_size, c.vocab_size >= n),
    ):
        if not divides:
            raise UserError(
                f"{name} is {size}, which {n} processes cannot share: start another number of them"
            )
    for name, size in (
        ("intermediate_size", c.intermediate_size),
        ("num_attention_heads · head_dim", c.query_size),
    ):
        if size % (n * group):
            raise UserError(
                f"{name} is {size}, and weights of {how.bits} bits have groups of {group}, which {n} "
                f"processes cannot share: start another number of them, or use 16 or 8 bits"
            )
    return replace(
        c,
        num_attention_heads=c.num_attention_heads // n,
        num_key_value_heads=max(1, G // n),
        intermediate_size=c.intermediate_size // n,
        vocab_size=-(-c.vocab_size // n),
    )


def shard_tensor(tensor: Tensor, shape: Sequence[int], rank: int, n: int) -> Tensor:
    """The share of process `rank`, of this shape: a view, but for the last share of the vocabulary, padded with 0.

    Along a dimension n · own // size processes hold the same part: n if it is not cut, else 1; n / G for a K/V head.
    """
    for dim, (size, own) in enumerate(zip(tensor.shape, shape)):
        start = min(size, own * (rank // (n * own // size)))
        tensor = tensor.narrow(dim, start, min(own, size - start))
    missing = shape[0] - len(tensor)
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing)) if missing else tensor


def traffic(config: Any, n: int, itemsize: int) -> int:
    """Bytes that one token adds to all-reduces and all-gather in each of n processes. config: the whole model's."""
    return itemsize * (
        (2 * config.num_hidden_layers + 1) * config.hidden_size + -(-config.vocab_size // n)
    )


class Alone:
    """What operations need to know about the other processes: here there are none."""

    def shard_config(self, config: Any) -> Any:
        """The model that this process computes."""
        return config

    def shard_tensor(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The part of a checkpoint's tensor that fills a place of this shape."""
        return tensor

    def shard_memory(self, free: int, device: torch.device) -> int:
        """The bytes that each process may take, where `free` are free on the device of this one."""
        return free


class Shard(NamedTuple):
    """A process's share of a prepared weight."""

    weight: Any
    role: str


class Split(Alone):
    """The operations of one process of several. `parallelize` puts this class before the machine's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.n = dist.get_rank(), dist.get_world_size()

    def shard_config(self, config: Any) -> Any:
        self.vocab = config.vocab_size
        return shard_config(config, self.n)

    def shard_tensor(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return shard_tensor(tensor, shape, self.rank, self.n)

    def shard_memory(self, free: int, device: torch.device) -> int:
        told: list[Any] = [None] * self.n
        dist.all_gather_object(told, ((platform.node(), str(device)), free))
        places = [place for place, _ in told]
        return min(free // places.count(place) for place, free in told)

    def agree(self, numbers: Any) -> Any:
        own = torch.tensor(numbers)
        told = torch.cat((own.flatten(), own.new_full((1,), asked_to_stop())))
        dist.broadcast(told, 0)
        stop_together(int(told[-1]))
        return told[:-1].view(own.shape).tolist()

    def pack_weight(self, weight: Any, dtype: torch.dtype, role: str) -> Shard:
        if role in SUMMED and self.rank:
            weight = weight._replace(bias=None)  # the sum has it once
        return Shard(super().pack_weight(weight, dtype, role), role)

    def linear(self, x: Tensor, shard: Shard) -> Tensor:
        y = super().linear(x, shard.weight)
        if shard.role in SUMMED:
            dist.all_reduce(y)
        if shard.role not in GATHERED:
            return y
        every = [torch.empty_like(y) for _ in range(self.n)]  # [T, ⌈V / n⌉] each
        dist.all_gather(every, y)
        return torch.cat(every, -1)[:, : self.vocab]

    def embed(self, tokens: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
        rows = -(-self.vocab // self.n)
        at = tokens - self.rank * rows
        others = (at < 0) | (at >= rows)
        x = (
            super()
            .embed(at.masked_fill(others, 0), shard.weight, dtype)
            .masked_fill(others[:, None], 0)
        )
        dist.all_reduce(x)
        return x


def num_processes() -> int:
    """Processes that share each model."""
    return dist.get_world_size() if several() else 1


def Parallel(ops: Any) -> Any:
    """These operations, for this process's share."""
    return type("Parallel", (Split, type(ops)), {})()
