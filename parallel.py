"""Tensor parallelism: one model over several processes, each with a shard of every matrix.

    torchrun --nproc-per-node 2 generate.py --target 8B "…"
    python generate.py --tensor-parallel 2 --target 8B "…"

Two successive products need one sum over processes. The first matrix is *column-parallel*: it is
cut by outputs, so that a head's attention, or SwiGLU, between the two products stays in one
process. The second matrix is *row-parallel*: it is cut by inputs.

    x W₁ᵀ = [x W₁,₀ᵀ | x W₁,₁ᵀ | …]       y W₂ᵀ = Σ_r y_r W₂,ᵣᵀ          r: the n processes

    column-parallel        qkv, gate_up     qkv in whole heads
    row-parallel           o, down          one all-reduce each; the bias is added once
    vocabulary-parallel    embed, head      tokens of other processes embed as 0, and an all-reduce
                                            adds their rows; the head's logits are gathered

`Group` has these sums and gathers; in a single process they do nothing. With fewer key/value heads
than processes, several processes hold a replica of the same head. To its process a shard is just a
smaller Llama, so caches, blocks and quantized keys need no change. All processes run the same
scheduler, because their logits are equal, bit for bit. At the end of a step every process takes the
drawn tokens and the times of the first one (`agree`).

Invariant: after each step all processes hold the same tokens.
Cost of a token in each process: (2 L + 1) C numbers all-reduced, ⌈V / n⌉ logits sent.
Not covered: training; machines of different kinds; expert, sequence and pipeline parallelism. With
8-bit inputs (W8A8), logits differ a little from those of one process, because each shard of a row
has its own scale.

Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053).
    L layers · C hidden_size · V vocab_size · T tokens of a step · n processes
    W [N, K] a matrix, N outputs and K inputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROW_PARALLEL = ("o", "down")


def num_processes() -> int:
    """How many processes share each model."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


# ---- Shards --------------------------------------------------------------------------------------


def shard_tensor(tensor: Tensor, shape: Sequence[int], rank: int, n: int) -> Tensor:
    """The shard of process `rank`, of this shape. A view, unless the vocabulary is padded."""
    for dim, size in enumerate(shape):
        # A dimension that is cut has one part per process, or per key/value head if there are fewer
        # heads than processes. With 4 processes and 2 heads, the processes hold parts 0 0 1 1.
        parts = tensor.split(size, dim)
        replicas = n // len(parts)  # neighbouring processes that hold the same part
        tensor = parts[rank // replicas]
    missing = shape[0] - len(tensor)
    if missing:  # the end of the vocabulary
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor


# ---- The processes -------------------------------------------------------------------------------


class Group:
    """The processes that share a model, seen from one of them. In a single process every method
    returns its input unchanged."""

    rank = 0
    n = 1

    def cut(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """This process's part of a checkpoint's tensor, which has this shape."""
        return tensor

    def memory(self, free: int, device: torch.device) -> int:
        """The bytes that each process may take. free: the bytes free on this process's device."""
        return free

    def sum(self, y: Tensor) -> Tensor:
        """The sum of y over processes. Each has the product with its own columns of W."""
        return y

    def embed(self, tokens: Tensor, vocab_size: int, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """embed(tokens): int64[T] -> [T, C]. Each process holds ⌈V / n⌉ rows of the embedding."""
        return embed(tokens)

    def gather(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[R, ⌈V / n⌉] of each process -> [R, V]."""
        return logits

    def agree(self, numbers: Any) -> Any:
        """The first process's whole numbers, copied to the host side of every process."""
        return numbers


class Processes(Group):
    """Several processes, connected by torch.distributed."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.n = dist.get_world_size()

    def cut(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return shard_tensor(tensor, shape, self.rank, self.n)

    def memory(self, free: int, device: torch.device) -> int:
        if device.type == "cpu":  # the processes share its memory
            free //= self.n
        smallest = torch.tensor(free, dtype=torch.int64)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def sum(self, y: Tensor) -> Tensor:
        dist.all_reduce(y)
        return y

    def embed(self, tokens: Tensor, vocab_size: int, embed: Callable[[Tensor], Tensor]) -> Tensor:
        num_rows = math.ceil(vocab_size / self.n)
        row = tokens - self.rank * num_rows
        elsewhere = (row < 0) | (row >= num_rows)  # bool[T]: in another process
        x = embed(row.masked_fill(elsewhere, 0))
        return self.sum(x.masked_fill(elsewhere[:, None], 0))

    def gather(self, logits: Tensor, vocab_size: int) -> Tensor:
        shards = [torch.empty_like(logits) for _ in range(self.n)]
        dist.all_gather(shards, logits)
        return torch.cat(shards, dim=-1)[:, :vocab_size]  # without the last shard's padding

    def agree(self, numbers: Any) -> Any:
        agreed = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(agreed, src=0)
        return agreed.tolist()


def group_for(device: torch.device) -> Group:
    """The processes that share models on this device. (A model on "meta" represents the whole
    checkpoint: checkpoint/load.py uses it to check shapes.)"""
    return Processes() if num_processes() > 1 and device.type != "meta" else Group()
