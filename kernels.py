"""The operations of a forward pass in plain torch: the specification, and the one class that faster versions override.

`Ops` has every operation that touches a model's numbers. The folders cpu/ and gpu/ each offer a subclass that
overrides what its machine does faster, and calls super() for the rest. `find_device` chooses the device, `ops_for` its
operations; no other page asks what the machine is. Without the folders, or with LLAMA_PLAIN=1, this page does all.

    attention(q, k, v)_i = Σ_j softmax_j(q_i · k_j / √D) v_j,      j ≤ i + (m − n)

for n queries and m ≥ n keys. The queries are the *last* n of the m tokens, so the causal mask is aligned bottom-right:
the last query sees everything. (Aligned top-left, as by PyTorch's is_causal, it is right only for n = m.) Grouped-query
attention (Ainslie et al. 2023): H query heads share G ≤ H key/value heads, R = H / G on each: the cache shrinks by R.

A `Step` says where the new tokens of a pass belong, for every cache and device: a contiguous cache is a paged one
with one block of max_len tokens a sequence. Attention reads keys and values as they are *stored*, also those of the
new tokens, so a result does not depend on how a prompt was split into chunks.

`Flash` is attention as a GPU computes it (Dao et al. 2022, arXiv:2205.14135): the scores never leave the chip.

    T tokens of a step · B sequences · H query heads · G key/value heads · D head size · C hidden_size
    F intermediate_size · V vocab_size · N blocks · S tokens of a block · M blocks of the longest sequence
"""

import math
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sampling
from errors import UserError
from parallel import Alone, parallelize
from quant import Quantized, rounded_product
from sampling import Setting

triton = None  # for Linux only; and where nobody needs it, a slow import
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") or "triton" in sys.modules:
    with suppress(ImportError):
        import triton
        import triton.language as tl

Span = tuple[
    Sequence[int], int, int
]  # of a sequence: blocks, length before and with the new tokens
TILE = 1 << 21  # quantized weights that are dequantized at a time


class Linear(NamedTuple):
    """y = x Wᵀ + b."""

    weight: Tensor | Quantized  # [N, K]
    bias: Tensor | None = None  # [N]


# ---- The step --------------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Attention metadata, as views of one buffer."""

    positions: Tensor  # int64[T]: where a token is in its text
    slots: Tensor  # int32[T]: where k and v go, block · S + place; −1: nowhere
    starts: Tensor  # int32[B + 1]: cu_seqlens_q
    lengths: Tensor  # int32[B]: new tokens included
    tables: Tensor  # int32[B, M]: block_tables, padded with the last block

    @staticmethod
    def sizes(T: int, B: int, M: int) -> list[int]:  # in bytes
        return [8 * T, 4 * T, 4 * B + 4, 4 * B, 4 * B * M]

    @classmethod
    def of(cls, buffer: Tensor, T: int, B: int, M: int) -> "Places":
        positions, *rest = buffer.split(cls.sizes(T, B, M))
        slots, starts, lengths, tables = (part.view(torch.int32) for part in rest)
        return cls(positions.view(torch.int64), slots, starts, lengths, tables.view(B, M))


class Step:
    """The new tokens of one forward pass, packed end to end.

    `places` are built on the host at first use, and sent to the device in one copy. shape: T, B and M of `places`, if
    larger than these tokens need, because `fill` reuses the tensors for other tokens (CUDA graphs).
    """

    def __init__(
        self,
        spans: Sequence[Span],
        block_size: int,
        cache: Any = None,
        device: torch.device | str = "cpu",
        shape: tuple[int, int, int] | None = None,
    ):
        self.spans, self.block_size, self.cache, self.device = (
            spans,
            block_size,
            cache,
            torch.device(device),
        )
        self.counts = [stop - start for _, start, stop in spans]
        self.shape = shape or (
            sum(self.counts),
            len(spans),
            max(len(blocks) for blocks, _, _ in spans),
        )

    @classmethod
    def alone(cls, count: int, length: int, device: torch.device | str = "cpu") -> "Step":
        """Without a cache: `count` texts of `length` tokens, each from its beginning."""
        return cls([([i], 0, length) for i in range(count)], length, None, device)

    @cached_property
    def places(self) -> Places:
        self._buffer = send(packed(self.spans, self.block_size, *self.shape), self.device)
        return Places.of(self._buffer, *self.shape)

    def fill(self, spans: Sequence[Span]) -> None:
        """Reuse the tensors of `places` for other sequences. The k and v of padding are stored nowhere (slot −1)."""
        self.spans, _ = spans, self.places  # self.places makes the buffer
        self._buffer.copy_(
            send(packed(spans, self.block_size, *self.shape), self.device), non_blocking=True
        )

    @cached_property
    def seen(self) -> list[Tensor]:
        """The slots of all tokens of each sequence, in order: int64[m] each."""
        S, most = self.block_size, max(stop for _, _, stop in self.spans)
        every = torch.arange(most, device=self.device)
        slots = self.places.tables.long()[:, every // S] * S + every % S  # [B, most]
        return [own[:stop] for own, (_, _, stop) in zip(slots, self.spans)]


def packed(spans: Sequence[Span], S: int, T: int, B: int, M: int) -> Tensor:
    """`Places` of this shape as one buffer on the host, uint8, without a Python loop over tokens."""
    positions, slots, starts, lengths, tables = (
        array("q"),
        array("i"),
        array("i", [0]),
        array("i"),
        array("i"),
    )
    for blocks, start, stop in spans:
        positions.extend(range(start, stop))
        for at in range(start - start % S, stop, S):  # block by block
            first = blocks[at // S] * S - at
            slots.extend(range(first + max(start, at), first + min(stop, at + S)))
        starts.append(len(positions))
        lengths.append(stop)
        tables.extend(blocks)
        tables.extend([blocks[-1] if blocks else 0] * (M - len(blocks)))
    slots.extend([-1] * (T - len(slots)))
    starts.extend(starts[-1:] * (B + 1 - len(starts)))
    parts = zip((positions, slots, starts, lengths, tables), Places.sizes(T, B, M))
    whole = bytearray().join(part.tobytes().ljust(size, b"\0") for part, size in parts)
    return torch.frombuffer(whole, dtype=torch.uint8)


# ---- The device ------------------------------------------------------------------------------------------------------


def send(
    numbers: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """These numbers on the device, without waiting for its work. (PyTorch keeps pinned memory until it is copied.)"""
    x = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now, for each process that shares the model."""
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else 1024 * int(told.read_text().split("MemAvailable:")[1].split()[0])
        if (told := Path("/proc/meminfo")).exists()
        else sys.maxsize
    )  # unknown: allocation will say
    return ops_for(device).share_memory(free, device)


def find_device(name: torch.device | str | None = None) -> torch.device:
    """The device of this name; None: a GPU, if there is one. ValueError for one that this machine does not have."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        also = " or cuda" if torch.cuda.is_available() else ""
        raise UserError(f"device {str(name)!r} is not on this machine: use cpu{also}") from None
    if (device := torch.device(name)).type not in ("cpu", "cuda"):
        raise UserError(f"device {str(name)!r} is not supported: use cpu or cuda")
    return device


# ---- The operations --------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's newest tokens. q: [n, H, D]; k, v: [G, m, D], m ≥ n -> [n, H, D]."""
    n, m = len(q), k.shape[1]
    mask = None if n in (1, m) else torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    q, causal = q.transpose(0, 1)[None], n == m > 1
    out = F.scaled_dot_product_attention(
        q, k[None], v[None], attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return out[0].transpose(0, 1)


class Ops(Alone):
    """The plain operations, differentiable, in every dtype."""

    ahead = 1  # plain tokens that are made before the host looks at them

    def dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype to compute in by default. stored: the dtype of the checkpoint."""
        return torch.float32 if stored.itemsize == 2 else stored

    def weight_dtype(self, stored: list[torch.dtype], dtype: torch.dtype) -> torch.dtype:
        """The dtype of matrices in memory, for x in `dtype`. Where it loses no bit, `stored` may be kept."""
        return dtype

    def prepare(self, weight: Linear, dtype: torch.dtype, role: str) -> Any:
        """The weight as `linear` or `embed` reads it fastest. dtype: of x; role: embed, head, or a field of Layer."""
        return weight

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized keys or values [L, N, S, G, D], in the order in memory that `attend` reads fastest."""
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x Wᵀ + b: [T, K] -> [T, N]. Quantized weights are dequantized some rows of W at a time."""
        w, bias = weight
        if isinstance(w, Tensor):
            return F.linear(x, w, bias)
        tile = max(16, TILE // w.columns)
        y = (
            [rounded_product(x, w)]
            if w.inputs == 8
            else [
                F.linear(x, w.rows(slice(at, at + tile), x.dtype))
                for at in range(0, len(w.values), tile)
            ]
        )
        y = y[0] if len(y) == 1 else torch.cat(y, -1)
        return y if bias is None else y + bias

    def embed(self, tokens: Tensor, weight: Any, dtype: torch.dtype) -> Tensor:
        """Rows of W: int64[T] -> [T, C]."""
        w = weight.weight
        return F.embedding(tokens, w) if isinstance(w, Tensor) else w.rows(tokens, dtype)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and its RMSNorm, computed in at least float32: [T, C] each. delta None adds nothing."""
        x = x if delta is None else x + delta
        wide = x.float() if x.dtype.itemsize == 2 else x
        return x, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(
            x.dtype
        ) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of x: [T, heads, D]. cos, sin: [T, 1, D], the first half of sin negated."""
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) · up: [T, 2 F] -> [T, F]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attend(
        self, qkv: Tensor, G: int, cos: Tensor, sin: Tensor, step: Step, layer: int
    ) -> Tensor:
        """Rotate q and k, store k and v, and attend within each text. qkv: [T, H + 2 G, D] -> [T, H, D]."""
        qk, v = qkv.split((qkv.shape[1] - G, G), dim=1)
        q, k = self.rotate(qk, cos, sin).split((qk.shape[1] - G, G), dim=1)
        return self.look_back(q, k, v, step, layer)

    def look_back(self, q: Tensor, k: Tensor, v: Tensor, step: Step, layer: int) -> Tensor:
        """Store k and v: [T, G, D]; then attention of q: [T, H, D] -> [T, H, D]."""
        if step.cache is None:  # texts of one length: one call for all
            q, k, v = (x.unflatten(0, (len(step.counts), -1)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        keys, values, slots = step.cache.keys, step.cache.values, step.places.slots.long()
        keys.write(layer, slots, k)
        values.write(layer, slots, v)
        past = [
            [kept.read(layer, seen, q.dtype).transpose(0, 1) for kept in (keys, values)]
            for seen in step.seen
        ]
        return torch.cat([attention(new, *own) for new, own in zip(q.split(step.counts), past)])

    def probabilities(self, logits: Tensor, *settings: Setting, **named: Setting) -> Tensor:
        """sampling.probabilities. logits: [B, V]. ValueError for logits that are not finite."""
        return sampling.probabilities(sampling.finite(logits), *settings, **named)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        """sampling.pick. probs: [B, V]; streams: int64[B, 1] -> int64[B]."""
        return sampling.pick(probs, streams)

    def forward(
        self, plain: Callable[..., Tensor], llama: Any, tokens: Tensor, step: Step, rows: Any
    ) -> Tensor:
        """A whole forward pass: here plain(tokens, step, rows); a backend may do it in one call."""
        return plain(tokens, step, rows)

    def agree(self, numbers: Any) -> Any:
        """Numbers of the first process, for every process, on the host; here there is one process."""
        return numbers

    def draft(self, plain: Callable[..., Any], llama: Any, *round: Any) -> tuple[Tensor, Tensor]:
        """All drafts of a round: here plain(llama, *round), drafters.write_drafts; a backend may use one call."""
        return plain(llama, *round)


# ---- Flash attention -------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit(
        do_not_specialize=["most"], do_not_specialize_on_alignment=["tables", "starts", "lengths"]
    )
    def _flash(
        q,
        k,
        v,
        out,
        tables,
        starts,
        lengths,
        scale,
        most,
        S,
        G: tl.constexpr,
        R: tl.constexpr,
        D: tl.constexpr,
        WIDE: tl.constexpr,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
    ):
        """A program has ROWS rows of one sequence: its newest tokens times the R query heads of a key/value head. It
        walks over the keys in tiles and keeps for each row the largest score s (in `scale`: 1 / ln 2, for exp2), the
        sum l of the weights, and the weighted sum o of the values:

            top' = max(top, max_j s_j)    p_j = 2^(s_j − top')    l, o = 2^(top − top') · (l, o) + Σ_j p_j · (1, v_j)
        """
        b, g = tl.program_id(0) // G, tl.program_id(0) % G
        first, length = tl.load(starts + b), tl.load(lengths + b)
        n = tl.load(starts + b + 1) - first  # new tokens, the last n of length
        row, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
        token, position = (
            first + row // R,
            length - n + row // R,
        )  # [ROWS]: in the step, in its text
        inside = (row < n * R)[:, None] & (d < D)[None, :]
        place = (token * G * R + g * R + row % R).to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(q + place, inside, 0)  # [ROWS, WIDE]
        o, l = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), -1e30, tl.float32)
        for start in range(0, tl.minimum(length, tl.max(position, 0) + 1), KEYS):
            j = start + tl.arange(0, KEYS)  # a tile of keys, of any blocks
            block = tl.load(tables + b * most + j // S, j < length, 0).to(tl.int64)
            at = ((block * S + j % S) * G + g)[:, None] * D + d[None, :]
            there = (j < length)[:, None] & (d < D)[None, :]
            s = tl.dot(x, tl.trans(tl.load(k + at, there, 0)), input_precision="tf32x3") * scale
            s = tl.where(
                j[None, :] <= position[:, None], s, float("-inf")
            )  # causal, aligned bottom-right
            higher = tl.maximum(top, tl.max(s, 1))
            p, fade = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
            o = tl.dot(
                p.to(v.dtype.element_ty),
                tl.load(v + at, there, 0),
                o * fade[:, None],
                input_precision="tf32x3",
            )
            l, top = l * fade + tl.sum(p, 1), higher
        tl.store(out + place, (o / l[:, None]).to(out.dtype.element_ty), inside)


class Flash(Ops):
    """What a GPU runs without the folder gpu/: attention reads 16- and 32-bit keys and values where they are stored."""

    def dtype(self, stored: torch.dtype) -> torch.dtype:
        return stored

    def look_back(self, q: Tensor, k: Tensor, v: Tensor, step: Step, layer: int) -> Tensor:
        cache = step.cache
        if (
            cache is None
            or cache.dtype == torch.float64
            or (cache.keys.bits, cache.values.bits) != (16, 16)
        ):
            return super().look_back(q, k, v, step, layer)
        for kept, new in ((cache.keys, k), (cache.values, v)):
            kept.write(layer, step.places.slots.long(), new)
        (_, H, D), G, q, out = q.shape, k.shape[1], q.contiguous(), torch.empty_like(q)
        _, _, starts, lengths, tables = step.places
        rows = 16 if max(step.counts) * (H // G) <= 16 else 64
        grid = len(step.counts) * G, triton.cdiv(max(step.counts) * (H // G), rows)
        _flash[grid](
            q,
            cache.keys.parts[0][layer],
            cache.values.parts[0][layer],
            out,
            tables,
            starts,
            lengths,
            D**-0.5 / math.log(2),
            tables.shape[1],
            step.block_size,
            G,
            H // G,
            D,
            max(16, triton.next_power_of_2(D)),
            rows,
            32,
        )
        return out


def ops_for(device: torch.device | str) -> Ops:
    """The fastest operations for this device: from cpu/ or gpu/, or plain; and for this process's share."""
    kind, index = torch.device(device).type, torch.device(device).index
    if kind == "cuda" and index is not None:  # kernels and graphs are launched on the current one
        torch.cuda.set_device(index)
    if kind not in ("cpu", "cuda"):
        return Ops()
    folder, own = ("gpu", Flash() if triton else Ops()) if kind == "cuda" else ("cpu", Ops())
    plain = os.environ.get("LLAMA_PLAIN") == "1"
    return parallelize(
        Ops() if plain else (import_module(folder).ops() if find_spec(folder) else None) or own
    )


def main() -> None:
    """The demonstration: what a mask aligned top-left makes of a cache."""
    n, m, q, k, v = 3, 10, torch.randn(3, 1, 16), torch.randn(1, 10, 16), torch.randn(1, 10, 16)
    library = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True
    )[0, 0]
    print(
        f"the last {n} of {m} tokens: x marks the keys that a query sees, and the error beside the equation"
    )
    for i, last in enumerate(range(m - n + 1, m + 1)):
        wanted = (q[i] @ k[0, :last].T / 4).softmax(-1) @ v[0, :last]
        for name, out, seen in (
            ("bottom-right", attention(q, k, v)[i], last),
            ("top-left", library[i], i + 1),
        ):
            print(f"  {name:14}{'x' * seen:·<{m}}{(out - wanted).abs().max():10.1e}")


if __name__ == "__main__":
    main()
