"""Tensor parallelism: one model over several processes, each with a shard of every matrix.

    torchrun --nproc-per-node 2 generate.py --target 8B "…"
    python generate.py --tensor-parallel 2 --target 8B "…"

Two products in a row need one sum over processes. The first matrix is *column-parallel*, cut by
outputs, so that a head's attention, or SwiGLU, between the two products stays in one process. The
second matrix is *row-parallel*, cut by inputs:

    x W₁ᵀ = [x W₁,₀ᵀ | x W₁,₁ᵀ | …]       y W₂ᵀ = Σ_r y_r W₂,ᵣᵀ          r: the n processes

    column-parallel        qkv, gate_up     qkv in whole heads
    row-parallel           o, down          one all-reduce each; the bias is added once
    vocabulary-parallel    embed, head      tokens of other processes embed as 0, and an all-reduce
                                            fills them in; the head's logits are gathered

With fewer key/value heads than processes, several processes hold a replica of one head. A process
has a smaller Llama, so caches, blocks and quantized keys need no change. All processes run the same
scheduler: their logits are equal to the bit. At the end of a step the host takes drawn tokens and
times from the first process (`agree`), and with them comes the order to stop.

Invariant: all processes stop after the same step.
Cost of a token in each process (`traffic`): (2 L + 1) C numbers all-reduced, ⌈V / n⌉ logits sent.
Not covered: training; machines of different kinds; expert, sequence and pipeline parallelism. Where
inputs are rounded to 8 bits, too (W8A8), logits differ a little from one process's: each shard of a
row has a scale of its own.

Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053).
    L layers · C hidden_size · V vocab_size · T tokens of a step · n processes
    W [N, K] a matrix, N outputs and K inputs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError

if TYPE_CHECKING:
    from kernels import Linear, Ops
    from model import Config

ROW_PARALLEL = ("o", "down")
VOCABULARY_PARALLEL = ("embed", "head")  # a tied head has the role "embed"


def num_processes() -> int:
    """How many processes share each model."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


class StopFlag:
    """The order to stop, set in the first process when a signal comes (app/launch.py)."""

    error: KeyboardInterrupt | None = None  # the next `agree` raises it, in all processes


stop_flag = StopFlag()


# ---- Shards --------------------------------------------------------------------------------------


def shard_config(config: Config, n: int) -> Config:
    """The model of each of n processes. UserError if n processes cannot share it."""
    check_divisible(config, n)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // n,
        num_key_value_heads=max(1, config.num_key_value_heads // n),
        intermediate_size=config.intermediate_size // n,
        vocab_size=math.ceil(config.vocab_size / n),  # the last shard is padded
    )


def check_divisible(config: Config, n: int) -> None:
    """UserError if n processes cannot share this model."""
    stored = config.quantization
    if stored is not None and stored.ordered:
        raise UserError(
            "the columns of each matrix are stored in another order (act-order), which "
            f"{n} processes cannot share: use one process, or another checkpoint"
        )
    # Inputs of o and down are cut in whole groups, which share a scale or a byte.
    group = 1 if stored is None else stored.shard_multiple
    columns = f"a multiple of {n * group}"
    if group > 1:
        columns += f" ({n} processes · {group} columns that stay together: see --bits)"
    kv_heads = config.num_key_value_heads
    rules = {
        "num_attention_heads": (config.num_attention_heads % n == 0, f"a multiple of {n}"),
        "num_key_value_heads": (
            kv_heads % n == 0 or n % kv_heads == 0,
            f"a multiple or a divisor of {n}",
        ),
        "intermediate_size": (config.intermediate_size % (n * group) == 0, columns),
        "query_size": (config.query_size % (n * group) == 0, columns),
        # No shard is empty: with V ≥ n², n − 1 shards of ⌈V / n⌉ hold fewer than V.
        "vocab_size": (config.vocab_size >= n * n, f"at least {n * n}"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise UserError(
                f"{name} is {getattr(config, name)}, which {n} processes cannot share: it must be "
                f"{rule}; start another number of processes"
            )


def shard_tensor(tensor: Tensor, shape: Sequence[int], rank: int, n: int) -> Tensor:
    """The shard of process `rank`, of this shape: a view, but for a padded vocabulary."""
    for dim, size in enumerate(shape):
        # As many parts as processes; as key/value heads, if these are fewer; or one: not cut.
        parts = tensor.split(size, dim)
        replicas = n // len(parts)  # neighbours that hold the same part
        tensor = parts[rank // replicas]
    missing = shape[0] - len(tensor)
    if missing:  # the end of the vocabulary
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor


def traffic(config: Config, n: int, itemsize: int) -> tuple[int, int]:
    """Bytes that one token adds to all-reduces, and to all-gathers of logits, in each of n
    processes."""
    reduced = (2 * config.num_hidden_layers + 1) * config.hidden_size
    gathered = math.ceil(config.vocab_size / n)
    return itemsize * reduced, itemsize * gathered


# ---- Operations ----------------------------------------------------------------------------------


class Shard(NamedTuple):
    """A process's part of a packed weight."""

    weight: Any
    role: str


class Parallel:
    """The operations `ops` of one process of several, and sums and gathers over processes."""

    def __init__(self, ops: Ops):
        self.ops = ops
        self.rank = dist.get_rank()
        self.n = dist.get_world_size()
        self.vocab_size = 0  # of the whole model, and
        self.vocab_rows = 0  # of a shard: `shard_config` sets both

    def __getattr__(self, name: str) -> Any:
        """Attention, norms, sampling: as in one process, on this process's heads."""
        return getattr(self.ops, name)

    def pack_weight(self, weight: Linear, dtype: torch.dtype, role: str) -> Shard:
        """The process's shard. Only the first process adds a bias that is summed over processes."""
        if role in ROW_PARALLEL and self.rank > 0:
            weight = weight._replace(bias=None)
        return Shard(self.ops.pack_weight(weight, dtype, role), role)

    def linear(self, x: Tensor, shard: Shard) -> Tensor:
        """x Wᵀ + b: [T, K] -> [T, N]; x is a shard of the columns where W is row-parallel."""
        y = self.ops.linear(x, shard.weight)
        if shard.role in ROW_PARALLEL:
            dist.all_reduce(y)
        if shard.role in VOCABULARY_PARALLEL:
            shards = [torch.empty_like(y) for _ in range(self.n)]  # [T, ⌈V / n⌉] each
            dist.all_gather(shards, y)
            y = torch.cat(shards, dim=-1)[:, : self.vocab_size]
        return y

    def swiglu(self, x: Tensor, shard: Shard) -> Tensor:
        """silu(gate) · up: [T, C] -> [T, F / n]."""
        return self.ops.swiglu(x, shard.weight)

    def embed(self, tokens: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
        """Rows of W: int64[T] -> [T, C]."""
        row = tokens - self.rank * self.vocab_rows
        elsewhere = (row < 0) | (row >= self.vocab_rows)  # bool[T]: in another process
        x = self.ops.embed(row.masked_fill(elsewhere, 0), shard.weight, dtype)
        x = x.masked_fill(elsewhere[:, None], 0)
        dist.all_reduce(x)
        return x

    # ---- What the processes know of each other

    def shard_config(self, config: Config) -> Config:
        """The model that this process computes."""
        shard = shard_config(config, self.n)
        self.vocab_size = config.vocab_size
        self.vocab_rows = shard.vocab_size
        return shard

    def shard_tensor(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The part of a checkpoint's tensor that fills a tensor of this shape."""
        return shard_tensor(tensor, shape, self.rank, self.n)

    def shard_memory(self, free: int, device: torch.device) -> int:
        """The bytes that each process may take, where `free` are free on the device of this one."""
        if device.type == "cpu":  # which all processes share
            free //= self.n
        smallest = torch.tensor(free)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def agree(self, numbers: Any) -> Any:
        """The first process's numbers, in every process. If its stop flag is set, all stop."""
        mine = torch.tensor(numbers)
        error = stop_flag.error
        stop = mine.new_tensor([error is not None])
        packed = torch.cat((mine.flatten(), stop))
        dist.broadcast(packed, src=0)
        if packed[-1]:
            stop_flag.error = None
            raise error or KeyboardInterrupt
        return packed[:-1].view(mine.shape).tolist()
