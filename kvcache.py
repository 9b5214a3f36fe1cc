"""The contiguous KV cache: keys and values of past tokens are kept, so that no token is read twice.

Without it, token t costs a forward pass over all t tokens before it; with it, a pass over one. What it costs is memory,
reserved in advance for the longest text that may come:

    bytes = 2 (K and V) · layers · kv_heads · head_dim · bytes per number · tokens

Llama 3.1 8B in bf16: 2 · 32 · 8 · 128 · 2 = 131,072 bytes a token, 1.07 GB for 8,192 tokens. Llama 2 70B, with 80 layers and
the same 8 heads, at 4,096 tokens: 1.34 GB (not the "80 GB" or "4 GB" that one reads; with all its 64 heads it would be 10.7).

One cache holds several sequences, each in a row of its own. Its verbs are those of every cache here (paged.py has the same):

    seq, have = cache.open(tokens)       a new sequence; `have` of its tokens are there already (none, in this layout)
    cache.fits([(seq, n), ...])          is there room for n more tokens each? changes nothing
    step = cache.extend([(seq, tokens)]) makes room for these tokens, or refuses before anything has changed; publish=False: nobody else may find them
    cache.truncate(seq, length)          forgets what comes after: a rejected draft, the next turn of a chat
    cache.settle(seq, tokens)            says which tokens those were that `extend` was not told (−1): drafts that only the device knew
    cache.fork(seq) · cache.free(seq) · cache.length(seq)

A `Step` is what the forward pass sees: positions to rotate by, and `attend`, which stores the new keys and values and then
attends to what was *stored*, so that a result does not depend on how a prompt was cut.

Invariant: row `seq` holds exactly the tokens [0, length(seq)); what lies beyond is never read.

    L layers · S sequences · N longest text · G key/value heads · H query heads · D head size · T tokens of a step
"""
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import attention, in_place
from kvquant import GROUP, Bits, KVStore, store, vector_bytes
from nativestep import NativeStep, attends

Places = Sequence[Tensor | KVStore]                             # of one layer after the other
CACHE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CacheFull(RuntimeError):
    """There is no room, and nothing has changed."""


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, bits: Bits = (16, 16)) -> int:
    """Bytes that the keys and values of `tokens` tokens take."""
    one = vector_bytes(head_dim, bits[0], dtype, GROUP) + vector_bytes(head_dim, bits[1], dtype)
    return layers * kv_heads * tokens * one


def free_memory(device: torch.device) -> int:
    """Bytes that are free on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if (told := Path("/proc/meminfo")).exists():
        return 1024 * int(next(line.split()[1] for line in told.read_text().splitlines() if line.startswith("MemAvailable")))
    return sys.maxsize                                                       # this system does not tell; allocation will


def tokens_that_fit(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, share: float = 0.8,
                    bits: Bits = (16, 16)) -> int:
    """How many tokens' keys and values fit into `share` of the memory that is free on `device` now."""
    return int(share * free_memory(device)) // kv_bytes(layers, kv_heads, head_dim, 1, dtype, bits)


class KVCache:
    """Keys and values of up to `sequences` texts of up to `max_len` tokens each, all reserved at once."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, max_len: int, sequences: int = 1,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, bits: Bits = (16, 16)):
        for name, value in dict(layers=layers, kv_heads=kv_heads, head_dim=head_dim, max_len=max_len, sequences=sequences).items():
            if value < 1:
                raise ValueError(f"{name} is {value}: a cache needs at least 1")
        if dtype not in CACHE_DTYPES:
            raise ValueError(f"a cache of {dtype} is not supported; use one of {', '.join(str(d)[6:] for d in CACHE_DTYPES)}")
        shape = (layers, sequences, kv_heads, max_len, head_dim)
        try:
            self.keys = store(shape, bits[0], device, dtype, GROUP)          # [L, S, G, N, D]
            self.values = store(shape, bits[1], device, dtype)
        except RuntimeError:                                                 # out of memory, whatever the device calls it
            size = sequences * kv_bytes(layers, kv_heads, head_dim, max_len, dtype, bits)
            raise CacheFull(f"a cache of {sequences} x {max_len} tokens needs {size / 1e9:.1f} GB, which {device} does not have: "
                            "ask for a smaller max_len") from None
        self.max_len, self.device, self.dtype = max_len, torch.device(device), dtype
        self._lengths: dict[int, int] = {}                               # of the open sequences
        self._rows = list(reversed(range(sequences)))                    # rows that nobody has

    @property
    def bytes(self) -> int:
        """What is allocated."""
        return self.keys.nbytes + self.values.nbytes

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A new, empty sequence for the text `tokens` -> (seq, 0): this layout shares nothing between sequences."""
        if not self._rows:
            raise CacheFull(f"all {len(self._lengths)} rows of the cache are taken: free a sequence, or make a cache of more")
        seq = self._rows.pop()
        self._lengths[seq] = 0
        return seq, 0

    def length(self, seq: int) -> int:
        """How many tokens of this sequence are stored."""
        if seq not in self._lengths:
            raise KeyError(f"sequence {seq} is not open; open ones: {sorted(self._lengths)}")
        return self._lengths[seq]

    def fits(self, requests: Sequence[tuple[int, int]]) -> bool:
        """Is there room for n more tokens of each (seq, n)? Changes nothing."""
        return all(self.length(seq) + n <= self.max_len for seq, n in requests)

    def extend(self, requests: Sequence[tuple[int, Sequence[int]]], publish: bool = True) -> "Step":
        """Make room for these tokens of each (seq, tokens); they are stored when the step's `attend` runs in each layer. Nothing is ever published.

        Raises CacheFull, ValueError or KeyError before anything has changed.
        """
        if not requests or any(len(tokens) == 0 for _, tokens in requests):
            raise ValueError("a step needs at least one new token of every sequence in it")
        if len({seq for seq, _ in requests}) < len(requests):
            raise ValueError(f"a sequence occurs twice in one step: {[seq for seq, _ in requests]}")
        for seq, tokens in requests:
            if not self.fits([(seq, len(tokens))]):
                raise CacheFull(f"sequence {seq} has {self.length(seq)} tokens and cannot take {len(tokens)} more: "
                                f"a row holds {self.max_len}; ask for fewer, or make a cache of a larger max_len")
        starts = [(seq, self._lengths[seq]) for seq, _ in requests]
        for seq, tokens in requests:
            self._lengths[seq] += len(tokens)
        return self._step(starts)

    @property
    def in_place(self) -> bool:
        """Whether its steps are KernelSteps, which can be recorded (graphs.py)."""
        return in_place(self.device, self.keys.dtype)

    def _step(self, starts: Sequence[tuple[int, int]]) -> "Step":
        """The step of these sequences, which were so long before."""
        spans, places = [([seq], start, self._lengths[seq]) for seq, start in starts], (self.keys.transpose(2, 3), self.values.transpose(2, 3))
        if self.in_place:
            from kernelstep import KernelStep
            return KernelStep(*places, spans, self.max_len, rows=True)
        if self.dtype != torch.float64 and attends(*places, spans):
            return NativeStep(*places, spans, self.max_len)
        return Step([(start, self._lengths[seq], self.keys[:, seq], self.values[:, seq]) for seq, start in starts], self.device)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= self.length(seq):
            raise ValueError(f"sequence {seq} has {self.length(seq)} tokens: it cannot be truncated to {length}")
        self._lengths[seq] = length

    def settle(self, seq: int, tokens: Sequence[int]) -> None:
        """This layout has no use for tokens: it shares nothing."""

    def fork(self, seq: int) -> int:
        """A second sequence with the same past. In this layout that is a copy."""
        length = self.length(seq)
        new, _ = self.open(())
        for kept in (self.keys, self.values):
            kept[:, new, :, :length] = kept[:, seq, :, :length]
        self._lengths[new] = length
        return new

    def free(self, seq: int) -> None:
        """Give the row back."""
        self.length(seq)
        del self._lengths[seq]
        self._rows.append(seq)


class Step:
    """The new tokens of one forward pass, packed end to end: where they belong, and attention for them."""

    def __init__(self, spans: Sequence[tuple[int, int, Tensor | KVStore, Tensor | KVStore]], device: torch.device):
        """spans: of each sequence its length before and with its new tokens, and its row of keys and of values: [L, G, N, D]."""
        positions = [torch.arange(start, stop, device=device) for start, stop, _, _ in spans]
        self.positions = positions[0] if len(spans) == 1 else torch.cat(positions)                          # [T]
        self.spans, at = [], 0
        for start, stop, *row in spans:                                  # layer by layer, the places of what is new, and of all there is by then
            new = [kept[:, :, start:stop].transpose(1, 2).unbind() for kept in row]                       # [n, G, D]
            self.spans.append((slice(at, at + stop - start), *new, *(kept[:, :, :stop].unbind() for kept in row)))     # [G, stop, D]
            at += stop - start

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [T, G, D]; then let q: [T, H, D] look back, each token within its own sequence -> [T, H, D]."""
        if len(self.spans) == 1:
            return self._attend(layer, q, k, v, *self.spans[0][1:])
        return torch.cat([self._attend(layer, q[own], k[own], v[own], *places) for own, *places in self.spans])

    @staticmethod
    def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor, new_k: Places, new_v: Places, all_k: Places, all_v: Places) -> Tensor:
        new_k[layer].copy_(k)
        new_v[layer].copy_(v)
        return attention(q, all_k[layer].to(q.dtype), all_v[layer].to(q.dtype))


class Alone:
    """The step of one whole text without a cache."""

    def __init__(self, tokens: Tensor):
        self.positions = torch.arange(len(tokens), device=tokens.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.transpose(0, 1), v.transpose(0, 1))


class NoCache:
    """The verbs of a cache that keeps nothing: every step reads its whole text again. To feel the difference."""

    max_len, in_place = sys.maxsize, False

    def __init__(self, device: torch.device):
        self.device = device

    def open(self, tokens: Any) -> tuple[int, int]:
        return 0, 0

    def length(self, seq: int) -> int:
        return 0

    def fits(self, requests: Any) -> bool:
        return True

    def extend(self, requests: Any) -> Alone:
        (_, tokens), = requests
        return Alone(torch.tensor(tokens, device=self.device))

    def truncate(self, seq: int, length: int) -> None:
        pass

    def free(self, seq: int) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the same 50 tokens with and without a cache, and the bytes by formula beside those allocated.

@torch.inference_mode()
def main() -> None:
    import time

    from model import Llama
    llama = Llama.load("tiny")
    config, text = llama.config, torch.arange(1, 201, device=llama.device)                   # any 200 tokens will do
    cache = llama.cache(max_len=len(text) + 50)
    formula = kv_bytes(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, cache.max_len, llama.dtype)
    print(f"2 · {config.num_hidden_layers} layers · {config.num_key_value_heads} heads · {config.head_dim} · {llama.dtype.itemsize} bytes"
          f" · {cache.max_len} tokens = {formula:,} bytes; allocated: {cache.bytes:,}")

    def decode(cached: bool) -> float:
        """Seconds for 50 greedy tokens after a prompt of 200."""
        tokens, seq = text, cache.open(())[0]
        logits = llama(tokens, cache.extend([(seq, tokens)]), rows=slice(-1, None))
        start = time.perf_counter()
        for _ in range(50):
            new = logits.argmax(-1)
            tokens = torch.cat((tokens, new))
            step = cache.extend([(seq, new)]) if cached else None
            logits = llama(new if cached else tokens, step, rows=slice(-1, None))
        cache.free(seq)
        return time.perf_counter() - start

    without, with_cache = decode(False), decode(True)
    print(f"50 tokens after 200: {without:.2f} s without a cache, {with_cache:.2f} s with it: {without / with_cache:.1f} times as fast")


if __name__ == "__main__":
    main()
