"""The contiguous KV cache: keys and values of past tokens are kept, so that no token is read twice.

Without a cache, token t costs a pass over t tokens; with a cache, a pass over one. The price is memory, reserved for
the longest text: 2 (K and V) · layers · kv_heads · head_dim · bytes per number · tokens, for Llama 3.1 8B in bf16
131,072 bytes a token. Numbers of 8 and 4 bits (quant.py) take less. An error in a key changes an attention weight, but
errors in values average out over all tokens: so "8/4" gives keys 8 bits and values 4.

    seq, have = cache.open(tokens)       a new sequence; its first `have` tokens are stored already (here always 0)
    cache.fits([(seq, n), ...])          is there room for n more tokens each? changes nothing
    step = cache.extend([(seq, tokens)]) makes room for these tokens, or refuses before anything has changed
    cache.truncate(seq, length)          keeps the first `length` tokens, for example after a rejected draft
    cache.settle(seq, tokens)            replaces tokens that `extend` got as −1 (drafts still on the device)
    cache.fork(seq) · cache.free(seq) · cache.length(seq)

Invariant: the blocks of `seq` hold exactly the tokens [0, length(seq)); later places are never read.
Not covered: 2 bits; a scale for each channel of the keys (Liu et al. 2024, KIVI, arXiv:2402.02750).
    L layers · N blocks (here: rows) · S tokens of a block (here: max_len) · G key/value heads · D head size
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from errors import UserError
from kernels import Ops, Step, free_memory, ops_for
from quant import GROUP, Bits, from_int4, from_int8, int4, int8


def layout(
    D: int, bits: int, dtype: torch.dtype, group: int | None = None
) -> list[tuple[int, torch.dtype]]:
    """The parts of one stored vector of D numbers, as (width, dtype): numbers, scales, zeros. bits 16: in `dtype`.
    group: GROUP for a key, None for a value. ValueError for an odd D in 4 bits."""
    if bits == 4 and D % 2:
        raise UserError(
            f"head_dim is {D}: two numbers of 4 bits share a byte, so it must be even; use 8 bits"
        )
    M = -(-D // (group or D))
    return {
        16: [(D, dtype)],
        8: [(D, torch.int8), (1, torch.bfloat16)],
        4: [(D // 2, torch.uint8), (M, torch.bfloat16), (M, torch.int16)],
    }[bits]


class Store:
    """The keys or values of a cache: parts [L, N, S, G, width] (`layout`); slot = block · S + place.
    Each vector has scales of its own, so what is stored does not depend on which tokens were stored together."""

    def __init__(self, parts: Sequence[Tensor], bits: int, group: int | None = None):
        self.parts, self.bits, self.group = tuple(parts), bits, group

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
        room: Callable[..., Tensor],
        group: int | None = None,
    ) -> "Store":
        """An uninitialized store of shape [L, N, S, G, D]. room: `Ops.room`, which allocates a part."""
        kinds = layout(shape[-1], bits, dtype, group)
        return cls([room((*shape[:-1], width), kind, device) for width, kind in kinds], bits, group)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """float[..., D] -> the parts that are stored."""
        return (x,) if self.bits == 16 else int8(x) if self.bits == 8 else int4(x, self.group)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Stored parts -> float[..., D]."""
        return (
            parts[0].to(dtype)
            if self.bits == 16
            else from_int8(*parts, dtype)
            if self.bits == 8
            else from_int4(*parts, dtype, self.group)
        )

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """Store x: [T, G, D] at slots: int64[T]."""
        for part, numbers in zip(self.parts, self.encode(x)):
            part[layer].flatten(0, 1).index_copy_(0, slots, numbers.to(part.dtype))

    def read(self, layer: int, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """The vectors at `slots`, int64[m] or a slice of m slots -> [m, G, D]."""
        every = (part[layer].flatten(0, 1) for part in self.parts)
        ranged = isinstance(slots, slice)
        return self.decode(
            [part[slots] if ranged else part.index_select(0, slots) for part in every], dtype
        )

    def copy(self, source: int, target: int, count: int | None = None) -> None:
        """Copy the first `count` tokens (None: all) of a block to another, in all layers."""
        for part in self.parts:
            part[:, target, :count] = part[:, source, :count]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class CacheFull(RuntimeError):
    """There is no room, and nothing has changed."""


def kv_bytes(
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    dtype: torch.dtype,
    bits: Bits = (16, 16),
) -> int:
    """Bytes that the keys and values of `tokens` tokens take."""
    parts = layout(head_dim, bits[0], dtype, GROUP) + layout(head_dim, bits[1], dtype)
    return layers * kv_heads * tokens * sum(width * kind.itemsize for width, kind in parts)


def tokens_that_fit(
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    share: float = 0.8,
    bits: Bits = (16, 16),
) -> int:
    """How many tokens' keys and values fit into `share` of the memory that is free on `device` now."""
    return int(share * free_memory(device)) // kv_bytes(layers, kv_heads, head_dim, 1, dtype, bits)


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # where the tokens are stored, in order
    chain: list[int] = field(default_factory=list)  # identities of the full blocks (paged.py)


class Cache:
    """The base of both caches: the storage, the sequences, and methods that refuse before anything has changed.
    sizes: L, N, S, G, D in this order, under the names that errors use."""

    def __init__(
        self,
        sizes: dict[str, int],
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: Bits,
        ops: Ops | None,
    ):
        for name, size in (sizes | {"max_len": max_len}).items():
            if size < 1:
                raise UserError(f"{name} is {size}: a cache needs at least 1")
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"a cache of {dtype} is not supported; use one of float64, float32, bfloat16, float16"
            )
        L, N, S, G, D = sizes.values()
        self.device, self.dtype, self.block_size, self.max_len = (
            torch.device(device),
            dtype,
            S,
            max_len,
        )
        self._texts: dict[int, Text] = {}  # by sequence
        try:
            room = (ops or ops_for(device)).room
            self.keys, self.values = (
                Store.empty((L, N, S, G, D), width, dtype, self.device, room, group)
                for width, group in zip(bits, (GROUP, None))
            )
        except RuntimeError:  # out of memory, whatever the device calls it
            raise CacheFull(
                f"a cache of {N} x {S} tokens needs {kv_bytes(L, G, D, N * S, dtype, bits) / 1e9:.1f} GB, "
                f"which {device} does not have: ask for less"
            ) from None

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _text(self, seq: int) -> Text:
        if seq not in self._texts:
            raise KeyError(f"sequence {seq} is not open; open ones: {sorted(self._texts)}")
        return self._texts[seq]

    def length(self, seq: int) -> int:
        return len(self._text(seq).tokens)

    def fits(self, requests: Sequence[tuple[int, int]]) -> bool:
        return all(self.length(seq) + n <= self.max_len for seq, n in requests)

    def extend(self, requests: Sequence[tuple[int, Sequence[int]]], publish: bool = True) -> Step:
        """Make room for the tokens of each (seq, tokens): `Ops.attend` fills it. −1: a draft still on the device.
        publish: share full blocks first (paged.py). CacheFull, ValueError, KeyError before anything has changed."""
        if not requests or any(len(tokens) == 0 for _, tokens in requests):
            raise UserError("a step needs at least one new token of every sequence in it")
        if len({seq for seq, _ in requests}) < len(requests):
            raise UserError(f"a sequence occurs twice in one step: {[seq for seq, _ in requests]}")
        for seq, tokens in requests:
            if (have := self.length(seq)) + len(tokens) > self.max_len:
                raise CacheFull(
                    f"sequence {seq} has {have} tokens and cannot take {len(tokens)} more: the limit is "
                    f"{self.max_len}; ask for fewer, or make a cache of a larger max_len"
                )
        self._add_blocks(requests, publish)
        spans = [
            (self._texts[seq].blocks, self.length(seq), self.length(seq) + len(new))
            for seq, new in requests
        ]
        for seq, tokens in requests:
            self._texts[seq].tokens += map(int, tokens)
        return Step(spans, self.block_size, self, self.device)

    def _add_blocks(self, requests: Sequence[tuple[int, Sequence[int]]], publish: bool) -> None: ...

    def truncate(self, seq: int, length: int) -> None:
        if not 0 <= length <= self.length(seq):
            raise UserError(
                f"sequence {seq} has {self.length(seq)} tokens: it cannot be truncated to {length}"
            )
        del self._texts[seq].tokens[length:]

    def settle(self, seq: int, tokens: Sequence[int]) -> None:
        """Replace the −1 at a sequence's end (drafts that were on the device only). tokens: its whole text."""
        kept = self._text(seq).tokens
        at = next((i for i in range(len(kept), 0, -1) if kept[i - 1] >= 0), 0)
        kept[at:] = tokens[at : len(kept)]


class KVCache(Cache):
    """Room for `sequences` texts of up to `max_len` tokens, reserved at once: sequence `seq` lies in block `seq`."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_len: int,
        sequences: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        bits: Bits = (16, 16),
        ops: Ops | None = None,
    ):
        sizes = dict(
            layers=layers,
            sequences=sequences,
            max_len=max_len,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        super().__init__(sizes, max_len, dtype, device, bits, ops)
        self._rows = list(reversed(range(sequences)))  # the free ones

    @classmethod
    def of(
        cls,
        llama: Any,
        max_len: int | None = None,
        sequences: int = 1,
        dtype: torch.dtype | None = None,
        bits: Bits = (16, 16),
    ) -> "KVCache":
        """A cache of this model's shape. max_len None: the model's own limit."""
        c = llama.config
        longest = c.max_position_embeddings if max_len is None else max_len
        return cls(
            c.num_hidden_layers,
            c.num_key_value_heads,
            c.head_dim,
            longest,
            sequences,
            llama.device,
            dtype or llama.dtype,
            bits,
            llama.ops,
        )

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A new, empty sequence for the text `tokens` -> (seq, 0): this layout shares nothing between sequences."""
        if not self._rows:
            raise CacheFull(
                f"all {len(self._texts)} rows are taken: free a sequence, or make a cache of more"
            )
        seq = self._rows.pop()
        self._texts[seq] = Text(blocks=[seq])
        return seq, 0

    def fork(self, seq: int) -> int:
        """A second sequence with the same past: a copy, in this layout."""
        past = self._text(seq).tokens
        new, _ = self.open(past)
        self._texts[new].tokens += past
        for kept in (self.keys, self.values):
            kept.copy(seq, new, len(past))
        return new

    def free(self, seq: int) -> None:
        self._rows += self._text(seq).blocks
        del self._texts[seq]


class NoCache(Cache):
    """A cache that keeps nothing: every step reads one whole text again. For comparison."""

    def __init__(self, device: torch.device):
        self.device, self.max_len, self._texts = device, sys.maxsize, {0: Text()}

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        return 0, 0

    def extend(self, requests: Sequence[tuple[int, Sequence[int]]], publish: bool = True) -> Step:
        return Step.alone(1, len(requests[0][1]), self.device)

    def free(self, seq: int) -> None: ...


if __name__ == "__main__":  # 50 tokens after 200, without a cache and with one
    from time import perf_counter

    from model import Llama

    llama = Llama.load("tiny")
    for cache in (NoCache(llama.device), KVCache.of(llama, 250)):
        tokens, times, (seq, _) = [1] * 200, [], cache.open(())
        for _ in range(51):  # the first pass reads the prompt
            new = torch.tensor(tokens[cache.length(seq) :], device=llama.device)
            tokens.append(
                int(llama(new, cache.extend([(seq, new.tolist())]), rows=slice(-1, None)).argmax())
            )
            times.append(perf_counter())
        print(f"{type(cache).__name__}: {times[-1] - times[0]:.2f} s")
