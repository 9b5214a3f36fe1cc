"""The step of both caches on a GPU: all its places in one small buffer, and two kernels a layer.

What a step knows of its texts is a few hundred numbers: the tokens' positions and slots, each text's queries, length and blocks. They are
put together on the CPU when they are first asked for, and copied in one go; nothing is computed for a layer, and no layer waits for the host:

    attend(layer, q, k, v)            store.py: k, v to their slots; flash.py: q looks back
    attend_turned(layer, qkv, cos, sin)         the same of a whole projection [T, H + 2 G, D], rotation included

For CUDA graphs (graphs.py) a step is made for a `Bucket` instead, the largest shape that it will have, and `refill` puts other texts into the
same tensors: what is captured once runs for all of them. Tokens that a refilled step does not have are stored nowhere (slot −1), and
sequences that it does not have are empty. And `following` makes the step of one more token of each text on the device, out of this one.

A contiguous cache is a paged one with a single block of `max_len` tokens a text.

    L layers · N blocks · S tokens of a block · T tokens of a step · B sequences · H, G heads · D head size
"""
from array import array
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flash import Launch, Pool, attend, plan
from kernels import processors
from kvquant import KVStore
from store import store

Span = tuple[Sequence[int], int, int]                   # of a text: its blocks, its length before and with the new tokens


class Bucket(NamedTuple):
    """The largest step that its tensors hold."""
    sequences: int
    each: int                                           # new tokens of a sequence
    blocks: int                                         # of a sequence


class Places(NamedTuple):
    """Views of one buffer."""
    positions: Tensor                                   # int64[T]
    slots: Tensor                                       # int32[T]: block · S + place in it; −1: nowhere
    query_start: Tensor                                 # int32[B + 1]
    lengths: Tensor                                     # int32[B]
    tables: Tensor                                      # int32[B, most]; what a text has no block for is as its last one

    @classmethod
    def of(cls, buffer: Tensor, T: int, B: int, most: int) -> "Places":
        positions, *rest = buffer.split(cls.sizes(T, B, most))
        slots, query_start, lengths, tables = (part.view(torch.int32) for part in rest)
        return cls(positions.view(torch.int64), slots, query_start, lengths, tables.view(B, most))

    @staticmethod
    def sizes(T: int, B: int, most: int) -> list[int]:
        """Bytes of each."""
        return [8 * T, 4 * T, 4 * B + 4, 4 * B, 4 * B * most]


class KernelStep:
    """The new tokens of one forward pass, packed end to end, on a GPU; elsewhere for tests, in Triton's interpreter."""

    def __init__(self, keys: "Tensor | KVStore", values: "Tensor | KVStore", spans: Sequence[Span], S: int, rows: bool = False,
                 bucket: Bucket | None = None):
        """keys, values: [L, N, S, G, D], or views that look so. rows: every text has one block. bucket: refilled later; else as large as needed."""
        self.keys, self.values, self.spans, self.S, self.rows, self.bucket = keys, values, spans, S, rows, bucket
        first = keys if isinstance(keys, Tensor) else keys.parts[0]
        self.device, self.kv_heads = first.device, first.shape[-2]
        self.longest = bucket.blocks * S if bucket else max(stop for _, _, stop in spans)
        self.counts = [bucket.each] * bucket.sequences if bucket else [stop - start for _, start, stop in spans]
        self._shape = sum(self.counts), len(self.counts), bucket.blocks if bucket else max(len(blocks) for blocks, _, _ in spans)
        self._launches: list[Launch] | None = None

    @property
    def where(self) -> int:
        """Which cache it is."""
        return (self.keys if isinstance(self.keys, Tensor) else self.keys.parts[0]).data_ptr()

    def of(self, bucket: Bucket) -> "KernelStep":
        """A step of the same cache, to be refilled."""
        return KernelStep(self.keys, self.values, (), self.S, self.rows, bucket)

    @cached_property
    def places(self) -> Places:
        self._buffer = torch.empty(sum(Places.sizes(*self._shape)), dtype=torch.uint8, device=self.device)
        self._fill(self.spans)
        return Places.of(self._buffer, *self._shape)

    @property
    def positions(self) -> Tensor:                      # int64[T]
        return self.places.positions

    def refill(self, spans: Sequence[Span]) -> None:
        """Other texts in the same tensors. ValueError, and nothing has changed, if they are more or longer than the bucket."""
        _, B, most = self._shape
        if self.bucket and (len(spans) > B or any(stop - start > self.bucket.each or len(blocks) > most for blocks, start, stop in spans)):
            worst = max((stop - start for _, start, stop in spans), default=0), max((len(blocks) for blocks, _, _ in spans), default=0)
            raise ValueError(f"{len(spans)} texts with up to {worst[0]} new tokens and {worst[1]} blocks do not fit {self.bucket}: take a larger bucket")
        self.spans = spans
        if "places" in vars(self):
            self._fill(spans)

    def _fill(self, spans: Sequence[Span]) -> None:
        host = torch.frombuffer(filled(*self._shape, spans, self.S), dtype=torch.uint8)
        self._buffer.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)     # torch keeps pinned memory until it is copied

    def following(self, stop: Tensor) -> "KernelStep":
        """The step of one more token of each text, by nothing but tensors on the device. stop: int32[B]; a text that has so many tokens
        stores no more. -> its tokens are a row for each sequence of this step's."""
        step, B = copy(self), len(stop)
        _, _, _, lengths, tables = self.places
        place = torch.minimum(lengths, stop - 1).clamp(min=0)
        slots = tables.gather(1, (place // self.S)[:, None].long())[:, 0] * self.S + place % self.S
        slots = torch.where(lengths < stop, slots, -1)
        query_start = torch.arange(B + 1, dtype=torch.int32, device=self.device)
        step.places = Places(lengths.long(), slots, query_start, torch.minimum(lengths + 1, stop), tables)
        step.counts, step._launches = [1] * B, None
        return step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [T, G, D]; then let q: [T, H, D] look back, each token within its own sequence -> [T, H, D]."""
        keys, values = Pool.of(self.keys[layer]), Pool.of(self.values[layer])
        if q.dtype == torch.float64:                                             # a quantized cache of a model that computes in it
            store(k.float(), v.float(), keys, values, self.places.slots, self.S)
            return self._look_back(q.float(), keys, values).double()
        store(k, v, keys, values, self.places.slots, self.S)
        return self._look_back(q, keys, values)

    def attend_turned(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """qkv: [T, H + 2 G, D], q and k not yet rotated; cos, sin: [T, 1, D] -> [T, H, D]."""
        G = self.kv_heads
        keys, values = Pool.of(self.keys[layer]), Pool.of(self.values[layer])
        q, k, v = qkv.split((qkv.shape[1] - 2 * G, G, G), dim=1)
        return self._look_back(store(k, v, keys, values, self.places.slots, self.S, q, cos, sin), keys, values)

    def _look_back(self, q: Tensor, keys: Pool, values: Pool) -> Tensor:
        if self._launches is None:                                               # the same in all layers
            self._launches = plan(self.counts, self.longest, q.shape[1], self.kv_heads, processors(self.device))
        _, _, query_start, lengths, tables = self.places
        return attend(q, keys, values, tables, query_start, lengths, self._launches, 0 if self.rows else self.S)


def filled(T: int, B: int, most: int, spans: Sequence[Span], S: int) -> bytearray:
    """What Places of this shape hold of these texts, as one buffer. Nothing is done token by token."""
    positions, slots, starts, lengths, tables = array("q"), array("i"), array("i", [0]), array("i"), array("i")
    for blocks, start, stop in spans:
        positions.extend(range(start, stop))
        for at in range(start - start % S, stop, S):                             # block by block
            first = blocks[at // S] * S - at
            slots.extend(range(first + max(start, at), first + min(stop, at + S)))
        starts.append(len(positions))
        lengths.append(stop)
        tables.extend(blocks)
        tables.extend([blocks[-1] if blocks else 0] * (most - len(blocks)))      # the last, for what reads ahead
    slots.extend([-1] * (T - len(slots)))
    starts.extend(starts[-1:] * (B + 1 - len(starts)))
    return bytearray().join(part.tobytes().ljust(size, b"\0") for part, size in zip((positions, slots, starts, lengths, tables), Places.sizes(T, B, most)))


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: a step that reads, verifies and decodes, as its buffer has it, and what putting one together takes.

def main() -> None:
    import time

    def places(spans: Sequence[Span], S: int) -> Places:
        shape = sum(stop - start for _, start, stop in spans), len(spans), max(len(blocks) for blocks, _, _ in spans)
        return Places.of(torch.frombuffer(filled(*shape, spans, S), dtype=torch.uint8), *shape)

    print("blocks of 4 tokens: one text reads its first 6 tokens, one verifies 3, one decodes")
    for name, numbers in places([([7, 2], 0, 6), ([5, 0, 3], 7, 10), ([9, 4], 4, 5)], 4)._asdict().items():
        print(f"  {name:12}{numbers.tolist()}")
    for tokens in (1024, 8192):
        spans = [(list(range(b, b + tokens // 16)), tokens - 1, tokens) for b in range(64)]
        start = time.perf_counter()
        for _ in range(20):
            places(spans, 16)
        print(f"64 texts of {tokens:,} tokens that decode: {(time.perf_counter() - start) / 20 * 1e6:.0f} microseconds on the CPU")


if __name__ == "__main__":
    main()
