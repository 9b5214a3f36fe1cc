"""The contiguous KV cache: keys and values of past tokens are stored and never computed again.

Without a cache, token t costs a pass over t tokens. With a cache, it costs a pass over one. The
price is memory, which is reserved for the longest sequence: 2 (K and V) · layers · kv_heads ·
head_dim · bytes per number · tokens. For Llama 3.1 8B in bfloat16, that is 131,072 bytes per token.
8- and 4-bit numbers (quant.py) take less. An error in a key changes an attention weight, while
errors in values average out over all tokens. So "8/4" gives keys 8 bits and values 4.

    seq, num_cached = cache.open(tokens)       a new sequence; num_cached of its tokens are already
                                               stored (always 0 in this page)
    cache.fits([(seq, n), ...])                is there memory for n more tokens of each sequence?
    metadata = cache.extend([(seq, tokens)])   takes memory for these tokens, or refuses before
                                               anything has changed
    cache.commit(seq, text)                    after a step: keeps the text, drops rejected drafts
    cache.truncate(seq, length)                keeps the first `length` tokens; a paged cache does
                                               not cut into a block that `open` may find
    cache.free(seq) · cache.length(seq)

Memory is divided into blocks of `block_size` tokens, and each sequence has a *block table*: its
blocks, in order. Token t of a sequence is in the slot

    block_table[t // block_size] · block_size + t % block_size

In this page, a block is as long as the longest sequence, so each sequence has one block. paged.py
has short blocks, and shares them.

Invariant: between steps, the blocks of `seq` hold exactly the tokens [0, length(seq)); no slot
after them is read.
Not covered: 2 bits; a scale for each channel of the keys (Liu et al. 2024, KIVI, arXiv:2402.02750).

    T new tokens of a step · B sequences · L layers · N blocks · S tokens of a block (block_size)
    M blocks of the longest sequence · G key/value heads · D head size
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from devices import free_memory, send
from errors import UserError
from kernels import Ops, ops_for
from quant import KEY_GROUP, Bits, from_int4, from_int8, int4, int8

if TYPE_CHECKING:
    from checkpoint.config import Config


# ---- Attention metadata --------------------------------------------------------------------------


class SequenceSlice(NamedTuple):
    """One sequence's part of a step: its new tokens are [num_computed_tokens, seq_len)."""

    block_table: Sequence[int]
    num_computed_tokens: int
    seq_len: int

    @property
    def num_new_tokens(self) -> int:
        return self.seq_len - self.num_computed_tokens


class AttentionMetadata:
    """Where the new tokens of a step, packed end to end, belong: five views of one buffer.

    positions     int32[T]      where a token is in its sequence
    slot_mapping  int32[T]      where its key and value are stored
    cu_seqlens    int32[B + 1]  where each sequence's new tokens begin, followed by T
    seq_lens      int32[B]      tokens of each sequence, including the new ones
    block_tables  int32[B, M]   padded with 0

    They are packed and sent to the device when the first of them is read. A CUDA graph reads others
    instead, which keep their addresses (gpu/graphs.py).

    cache: None means no cache, so a sequence attends only to its own new tokens.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceSlice],
        block_size: int,
        cache: Cache | None = None,
        device: torch.device | str = "cpu",
    ):
        self.sequences = sequences
        self.block_size = block_size
        self.cache = cache
        self.device = torch.device(device)
        self.num_new_tokens = [sequence.num_new_tokens for sequence in sequences]
        self.backend: dict[str, Any] = {}  # values that a backend computes once for all layers

    def __getattr__(self, name: str) -> Tensor:
        """Called for what is not there yet."""
        if name not in ("positions", "slot_mapping", "cu_seqlens", "seq_lens", "block_tables"):
            raise AttributeError(name)
        M = max(len(sequence.block_table) for sequence in self.sequences)
        self._set_parts(pack_metadata(self.sequences, self.block_size, M), M)
        return getattr(self, name)

    @classmethod
    def without_cache(
        cls, num_sequences: int, length: int, device: torch.device | str = "cpu"
    ) -> AttentionMetadata:
        """Metadata for sequences of `length` tokens from their beginning, with one block for
        each."""
        slices = [SequenceSlice([b], 0, length) for b in range(num_sequences)]
        return cls(slices, block_size=length, device=device)

    def _set_parts(self, parts: Sequence[array], M: int) -> None:
        """Send the contents of the five tensors to the device, in one copy."""
        self.buffer = send(joined_parts(parts), self.device)
        views = self.buffer.split_with_sizes([len(part) for part in parts])
        self.positions, self.slot_mapping, self.cu_seqlens, self.seq_lens, tables = views
        self.block_tables = tables.view(len(self.seq_lens), M)

    @cached_property
    def slots(self) -> list[Tensor]:
        """For each sequence, the slots of all its tokens, old and new: int64[seq_len]."""
        longest = max(sequence.seq_len for sequence in self.sequences)
        tokens = torch.arange(longest, device=self.device)
        blocks = self.block_tables.long()[:, tokens // self.block_size]  # [B, longest]
        slots = blocks * self.block_size + tokens % self.block_size
        return [slots[b, : sequence.seq_len] for b, sequence in enumerate(self.sequences)]


def pack_metadata(sequences: Sequence[SequenceSlice], block_size: int, M: int) -> list[array]:
    """The contents of the five tensors of `AttentionMetadata`, in their order."""
    positions = array("i")
    slot_mapping = array("i")
    cu_seqlens = array("i", [0])
    seq_lens = array("i")
    block_tables = array("i")
    for block_table, start, stop in sequences:
        positions.extend(range(start, stop))
        first_block = start // block_size
        for i in range(first_block, math.ceil(stop / block_size)):  # blocks that get new tokens
            # Block i holds the positions from i · S on. The slot of each is position + shift.
            shift = (block_table[i] - i) * block_size
            begin = max(start, i * block_size)
            end = min(stop, (i + 1) * block_size)
            slot_mapping.extend(range(begin + shift, end + shift))
        cu_seqlens.append(len(positions))
        seq_lens.append(stop)
        block_tables.extend(block_table)
        block_tables.extend([0] * (M - len(block_table)))
    return [positions, slot_mapping, cu_seqlens, seq_lens, block_tables]


def joined_parts(parts: Sequence[array]) -> Tensor:
    """The parts end to end, on the host: int32[sum of their lengths]."""
    return torch.frombuffer(sum(parts, array("i")), dtype=torch.int32)


# ---- Storage -------------------------------------------------------------------------------------


def stored_parts(
    D: int, bits: int, dtype: torch.dtype, group: int | None = None
) -> list[tuple[int, torch.dtype]]:
    """The (width, dtype) of each part of a stored vector of D numbers: the numbers, their scales,
    and their zeros (quant.py).

    bits: 16 keeps the numbers as they are, in `dtype`. group: how many 4-bit numbers share a scale
    and a zero; None means all D.
    """
    if bits == 16:
        return [(D, dtype)]
    if bits == 8:
        return [(D, torch.int8), (1, torch.bfloat16)]
    if D % 2:
        raise UserError(
            f"head_dim is {D}: it must be even, because two 4-bit numbers share a byte; use 8 bits"
        )
    num_groups = math.ceil(D / (group or D))
    return [(D // 2, torch.uint8), (num_groups, torch.bfloat16), (num_groups, torch.int16)]


class Store:
    """The keys or values of a cache: parts [L, N, S, G, width]; slot = block · S + offset.

    Each vector has its own scales, so the stored numbers do not depend on which tokens are stored
    together.
    """

    def __init__(self, parts: Sequence[Tensor], bits: int, group: int | None = None):
        self.parts = tuple(parts)
        self.bits = bits
        self.group = group

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
        empty_kv: Callable[..., Tensor],
        group: int | None = None,
    ) -> Store:
        """An uninitialized store of shape [L, N, S, G, D]. empty_kv: `Ops.empty_kv`, which
        allocates each part."""
        *outer, D = shape
        parts = stored_parts(D, bits, dtype, group)
        return cls([empty_kv((*outer, width), kind, device) for width, kind in parts], bits, group)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """float[..., D] -> the parts that are stored."""
        if self.bits == 16:
            return (x,)
        if self.bits == 8:
            return int8(x)
        return int4(x, self.group)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Stored parts -> float[..., D]."""
        if self.bits == 16:
            return parts[0].to(dtype)
        if self.bits == 8:
            return from_int8(*parts, dtype)
        return from_int4(*parts, dtype, self.group)

    def write(self, layer: int, slot_mapping: Tensor, x: Tensor) -> None:
        """Store x: [T, G, D] in its slots: int64[T]."""
        for part, numbers in zip(self.parts, self.encode(x)):
            by_slot = part[layer].flatten(0, 1)  # a view: a row for each slot
            by_slot.index_copy_(0, slot_mapping, numbers.to(part.dtype))

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The vectors in `slots`: int64[m] -> [m, G, D]."""
        by_slot = [part[layer].flatten(0, 1) for part in self.parts]
        return self.decode([part.index_select(0, slots) for part in by_slot], dtype)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class KVSpec:
    """What a cache stores for each token, and where."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    bits: Bits = (16, 16)  # of keys, of values; 16: numbers as they are, in `dtype`
    device: torch.device | str = "cpu"
    # 1 with an EAGLE head: the keys and values of its layer also depend on the next token.
    lookahead: int = 0
    ops: Ops | None = None  # the operations that read the cache; None: the device's fastest

    @classmethod
    def of(
        cls,
        config: Config,
        dtype: torch.dtype,
        bits: Bits = (16, 16),
        device: torch.device | str = "cpu",
        draft_layers: int = 0,
    ) -> KVSpec:
        """The spec for a cache of this model. draft_layers: how many layers an EAGLE head adds to
        it."""
        return cls(
            layers=config.num_hidden_layers + draft_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            bits=bits,
            device=device,
            lookahead=1 if draft_layers else 0,
        )

    def bytes(self, tokens: int) -> int:
        """How many bytes the keys and values of this many tokens take."""
        key_bits, value_bits = self.bits
        parts = stored_parts(self.head_dim, key_bits, self.dtype, KEY_GROUP)
        parts += stored_parts(self.head_dim, value_bits, self.dtype)
        vector_bytes = sum(width * kind.itemsize for width, kind in parts)
        return self.layers * self.kv_heads * tokens * vector_bytes

    def tokens_in(self, num_bytes: float) -> int:
        """For how many tokens the keys and values fit into this many bytes."""
        return int(num_bytes) // self.bytes(1)


class CacheFull(UserError):
    """There is not enough memory for these tokens. Nothing has changed."""


# ---- Caches --------------------------------------------------------------------------------------


@dataclass
class CachedSequence:
    tokens: list[int] = field(default_factory=list)
    num_committed: int = 0  # how many of them are final; the tokens after them may be drafts (0)
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)  # of the full blocks (paged.py)


NewTokens = Sequence[tuple[int, Sequence[int]]]  # (sequence, its new tokens), ...


class Cache:
    """What the contiguous and the paged cache have in common: the storage, the sequences, and
    checks before anything changes. Each adds `open` and `free`, and the paged cache also takes and
    caches blocks."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, max_len: int):
        dtype = spec.dtype
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"a cache of {dtype} is not supported: use float64, float32, bfloat16 or float16"
            )
        self.spec = spec
        self.device = torch.device(spec.device)
        self.dtype = dtype
        self.block_size = block_size
        self.max_len = max_len
        self.backend: dict[str, Any] = {}  # what a backend stores with this cache: CUDA graphs
        self._sequences: dict[int, CachedSequence] = {}
        shape = (spec.layers, num_blocks, block_size, spec.kv_heads, spec.head_dim)
        empty_kv = (spec.ops or ops_for(spec.device)).empty_kv
        key_bits, value_bits = spec.bits
        try:
            # Errors in keys do the most harm, so 4-bit keys have a scale for each group of numbers.
            self.keys = Store.empty(shape, key_bits, dtype, self.device, empty_kv, KEY_GROUP)
            self.values = Store.empty(shape, value_bits, dtype, self.device, empty_kv)
        except RuntimeError:  # out of memory, whatever the device calls it
            needed = spec.bytes(num_blocks * block_size)
            raise CacheFull(
                f"a cache of {num_blocks} x {block_size} tokens needs {needed / 1e9:.1f} GB, "
                f"and {spec.device} does not have that much memory: ask for less"
            ) from None

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def sequence(self, seq: int) -> CachedSequence:
        """What is stored of a sequence. KeyError if it is not open."""
        if seq not in self._sequences:
            raise KeyError(f"sequence {seq} is not open; open ones: {sorted(self._sequences)}")
        return self._sequences[seq]

    def length(self, seq: int) -> int:
        return len(self.sequence(seq).tokens)

    def fits(self, counts: Sequence[tuple[int, int]]) -> bool:
        """Whether there is memory for n more tokens of each (seq, n). Changes nothing."""
        return all(self.length(seq) + n <= self.max_len for seq, n in counts)

    def extend(self, new_tokens: NewTokens) -> AttentionMetadata:
        """Take memory for the tokens of each (seq, tokens). `Ops.attend` then fills it.

        CacheFull, ValueError and KeyError are raised before anything has changed.
        """
        self._check_new(new_tokens)
        self._add_blocks(new_tokens)
        spans = []
        for seq, tokens in new_tokens:
            sequence = self._sequences[seq]
            start = len(sequence.tokens)
            sequence.tokens += map(int, tokens)
            spans.append((seq, start, len(sequence.tokens)))
        return self.metadata(spans)

    def metadata(self, spans: Sequence[tuple[int, int, int]]) -> AttentionMetadata:
        """The metadata of a pass over the tokens [start, stop) of each (seq, start, stop). `extend`
        has already taken memory for them."""
        slices = []
        for seq, start, stop in spans:
            slices.append(SequenceSlice(self.sequence(seq).block_table, start, stop))
        return AttentionMetadata(slices, self.block_size, self, self.device)

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v: [T, G, D] in their slots: int64[T]."""
        self.keys.write(layer, slot_mapping, k)
        self.values.write(layer, slot_mapping, v)

    def _add_blocks(self, new_tokens: NewTokens) -> None:
        """Give each sequence the blocks that its new tokens need. A contiguous cache has nothing to
        do: `open` has given each sequence its one block."""

    def _check_new(self, new_tokens: NewTokens) -> None:
        """CacheFull, ValueError or KeyError for new tokens that this cache can never take."""
        if not new_tokens or any(len(tokens) == 0 for _, tokens in new_tokens):
            raise ValueError("a step needs at least one new token of every sequence in it")
        if len({seq for seq, _ in new_tokens}) < len(new_tokens):
            raise ValueError(f"a sequence occurs twice in a step: {[seq for seq, _ in new_tokens]}")
        for seq, tokens in new_tokens:
            length = self.length(seq)
            if length + len(tokens) > self.max_len:
                raise CacheFull(
                    f"sequence {seq} has {length} tokens and cannot take {len(tokens)} more: the "
                    f"limit is {self.max_len}; ask for fewer, or make a cache of a larger max_len"
                )

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        if not 0 <= length <= self.length(seq):
            raise ValueError(
                f"sequence {seq} has {self.length(seq)} tokens: it cannot be cut to {length}"
            )
        sequence = self._sequences[seq]
        del sequence.tokens[length:]
        sequence.num_committed = min(sequence.num_committed, length)

    def commit(self, seq: int, text: Sequence[int]) -> None:
        """After a step, drop the keys and values of rejected drafts and keep those of the text.

        text: all tokens of the prompt and the output. No model has read the last one, and a draft
        model may not have read some others.
        """
        sequence = self.sequence(seq)
        length = min(len(sequence.tokens), len(text) - 1)
        self.truncate(seq, length)
        # Only the device had the drafts, so `extend` was given a 0 for each: enter the accepted
        # ones.
        start = sequence.num_committed
        sequence.tokens[start:] = text[start:length]
        sequence.num_committed = length


class KVCache(Cache):
    """Memory for `sequences` sequences of up to `max_len` tokens, reserved in advance. Sequence
    `seq` has block `seq`."""

    def __init__(self, spec: KVSpec, max_len: int, sequences: int = 1):
        if max_len < 1 or sequences < 1:
            raise UserError(f"a cache of {sequences} x {max_len} tokens: both must be at least 1")
        block_size = 8 * math.ceil(max_len / 8)  # so that each layer's scales are aligned, for GPUs
        super().__init__(spec, sequences, block_size, max_len)
        self._free_rows = list(reversed(range(sequences)))  # a row is a sequence's one block

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A new, empty sequence for `tokens` -> (seq, 0): this cache shares nothing between
        sequences."""
        if not self._free_rows:
            raise CacheFull(
                f"all {len(self._sequences)} rows are in use: free a sequence, or make more rows"
            )
        seq = self._free_rows.pop()
        self._sequences[seq] = CachedSequence(block_table=[seq])
        return seq, 0

    def free(self, seq: int) -> None:
        self.sequence(seq)  # KeyError if it is not open
        self._free_rows.append(seq)
        del self._sequences[seq]


def contiguous_caches(
    specs: Sequence[KVSpec], limits: Sequence[int], sequences: int
) -> list[Cache]:
    """A cache for each model, whose rows have as many tokens as its limit. UserError if there is
    too little memory."""
    needed = 0
    for spec, limit in zip(specs, limits):
        needed += spec.bytes(sequences * limit)
    check_free(needed, specs[0].device)
    return [KVCache(spec, limit, sequences) for spec, limit in zip(specs, limits)]


def check_free(num_bytes: float, device: torch.device) -> None:
    """UserError if there is too little free memory for the keys and values."""
    free = free_memory(device)
    if num_bytes > free:
        raise UserError(
            f"keys and values need {num_bytes:.4g} bytes of memory, and {free:,} are free: choose "
            "a smaller --max-batch or --max-len, or --kv-memory if it was given (up to 1: a share)"
        )


def main() -> None:
    """Demonstration: 50 tokens after 200, without a cache and with one."""
    llama = Llama.load("tiny")
    for use_cache in (False, True):
        cache = KVCache(llama.kv_spec(), 250)
        seq, _ = cache.open(())
        tokens = [1] * 200
        times = []
        for _ in range(51):  # the first pass reads the prompt
            new = tokens[cache.length(seq) :]  # without a cache, its length stays 0: all tokens
            metadata = cache.extend([(seq, new)]) if use_cache else None
            logits = llama(torch.tensor(new, device=llama.device), metadata, slice(-1, None))
            tokens.append(int(logits.argmax()))
            times.append(perf_counter())
        print(f"{'with' if use_cache else 'without'} a cache: {times[-1] - times[0]:.2f} s")


if __name__ == "__main__":  # model.py imports this page, so it is imported only here
    from time import perf_counter

    from model import Llama

    main()
