"""FlashAttention: attention in tiles that stay on the chip.

Plain attention writes a score for each pair of query and key to memory, and reads it again for the
softmax. Here each program of a GPU takes some queries of one sequence and walks over the keys, one
tile at a time, so scores never leave the chip and memory is O(n). The weights of a softmax depend
on the largest score and on the sum over all keys. So both are kept for the keys so far, and the
sums are scaled down when a larger score comes (*online softmax*). Each query keeps

    top = max_j s_j                      s_j = q · k_j / √D
    l   = Σ_j e^(s_j − top)
    o   = Σ_j e^(s_j − top) v_j

and updates them with each further tile of keys:

    higher = max(top, max_j s_j)         p_j = e^(s_j − higher)       fade = e^(top − higher)
    l = fade · l + Σ_j p_j
    o = fade · o + Σ_j p_j · v_j

At the end the result is o / l, exact up to rounding. The R = H / G query heads of a key/value head
share its keys, so they are rows of one tile. The block table says where the keys are (paged.py).

A GPU runs this page if the folder gpu/ is missing. gpu/flash.py is a faster version of the same
kernel. Without a GPU, the kernel runs in Triton's interpreter (TRITON_INTERPRET=1).

Invariant: the result is that of kernels.attention on the stored keys and values.
Cost: for n new tokens and m keys, 4 · n · m · H · D operations. Each tile of queries reads all its
keys.
Not covered: quantized caches and float64, which run in plain torch.

Dao et al. 2022 (arXiv:2205.14135); Milakov & Gimelshein 2018, online softmax (arXiv:1805.02867).

    H query heads · G key/value heads · R = H / G · D head size · S tokens of a block of the cache
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edits import put_back
from kernels import HeadNorm, Ops, rotated

triton = None
with suppress(ImportError):  # Triton exists only for Linux
    import triton
    import triton.language as tl

if TYPE_CHECKING:
    from kvcache import AttentionMetadata
    from model import Rope

if triton is not None:
    # Triton would compile another variant of the kernel whenever a number becomes 1 or a multiple
    # of 16, or an address a multiple of 16. These arguments change from step to step, so they get
    # no variants.
    @triton.jit(
        do_not_specialize=["max_blocks"],
        do_not_specialize_on_alignment=["block_tables", "cu_seqlens", "seq_lens"],
    )
    def _flash(
        q,
        k,
        v,
        out,
        block_tables,
        cu_seqlens,
        seq_lens,
        scale,
        max_blocks,
        S,
        G: tl.constexpr,
        R: tl.constexpr,
        D: tl.constexpr,
        WIDE: tl.constexpr,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
    ):
        """Attention for ROWS rows of one sequence. A row is one new token and one of the R heads
        that share a key/value head.

        Scores are multiplied by scale = 1 / (√D ln 2), because a GPU computes e^x = 2^(x / ln 2).
        """
        b = tl.program_id(0) // G
        g = tl.program_id(0) % G
        first = tl.load(cu_seqlens + b)
        seq_len = tl.load(seq_lens + b)
        n = tl.load(cu_seqlens + b + 1) - first  # new tokens: the last n of the sequence
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        d = tl.arange(0, WIDE)
        token = first + row // R  # [ROWS], in the step
        position = seq_len - n + row // R  # [ROWS], in the sequence
        head = g * R + row % R
        is_row = (row < n * R)[:, None] & (d < D)[None, :]
        offset = (token * G * R + head).to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(q + offset, is_row, 0)  # [ROWS, WIDE]
        o = tl.zeros((ROWS, WIDE), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        last = tl.max(position, axis=0)
        for start in range(0, tl.minimum(seq_len, last + 1), KEYS):  # unused rows lie past seq_len
            j = start + tl.arange(0, KEYS)  # a tile of keys, which may span several blocks
            block = tl.load(block_tables + b * max_blocks + j // S, j < seq_len, 0).to(tl.int64)
            slot = block * S + j % S
            kv_offset = (slot * G + g)[:, None] * D + d[None, :]
            is_key = (j < seq_len)[:, None] & (d < D)[None, :]
            keys = tl.load(k + kv_offset, is_key, 0)
            values = tl.load(v + kv_offset, is_key, 0)
            s = tl.dot(x, tl.trans(keys), input_precision="tf32x3")  # nearly float32 precision
            s = s * scale
            s = tl.where(j[None, :] <= position[:, None], s, float("-inf"))  # causal, bottom-right
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            weights = p.to(v.dtype.element_ty)
            o = tl.dot(weights, values, o * fade[:, None], input_precision="tf32x3")
            l = l * fade + tl.sum(p, 1)
            top = higher
        tl.store(out + offset, (o / l[:, None]).to(out.dtype.element_ty), is_row)


class Flash(Ops):
    """The plain operations, except for attention over caches in 16 and 32 bits."""

    language = "Triton attention, else plain PyTorch"

    def dtypes(
        self, stored: list[torch.dtype], asked: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        return super().dtypes(stored, asked or stored[0])

    def attend(
        self,
        qkv: Tensor,
        G: int,
        rope: Rope | None,
        metadata: AttentionMetadata,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        cache = metadata.cache
        is_plain = cache is not None and cache.keys.bits == cache.values.bits == 16
        if not is_plain or cache.dtype != qkv.dtype or qkv.dtype == torch.float64:
            return super().attend(qkv, G, rope, metadata, layer, norm)
        q, k, v = rotated(qkv, G, rope, norm)
        cache.write(layer, metadata.slot_mapping.long(), k, v)
        _, H, D = q.shape
        R = H // G
        longest = max(metadata.num_new_tokens)
        rows = 16 if longest * R <= 16 else 64
        grid = len(metadata.sequences) * G, triton.cdiv(longest * R, rows)
        q = q.contiguous()
        out = torch.empty_like(q)
        _flash[grid](
            q,
            cache.keys.parts[0][layer],
            cache.values.parts[0][layer],
            out,
            metadata.block_tables,
            metadata.cu_seqlens,
            metadata.seq_lens,
            scale=D**-0.5 / math.log(2),
            max_blocks=metadata.block_tables.shape[1],
            S=metadata.block_size,
            G=G,
            R=R,
            D=D,
            WIDE=max(16, triton.next_power_of_2(D)),  # a size that `tl.dot` supports
            ROWS=rows,
            KEYS=32,
        )
        return out


def ops() -> Ops | None:
    """This page's backend, or None without Triton."""
    if triton is None:
        return None
    flash = Flash()
    put_back(flash)
    return flash


def main() -> None:
    """Demonstration: one query and tiles of 4 keys, in plain torch."""
    torch.manual_seed(0)
    q = torch.randn(16, dtype=torch.float64)
    k = torch.randn(16, 16, dtype=torch.float64)
    v = torch.randn(16, 16, dtype=torch.float64)
    top = torch.tensor(-math.inf)
    l = torch.zeros(())
    o = torch.zeros(16)
    print("keys    top      l   error of o / l")
    for start in range(0, 16, 4):
        stop = start + 4
        s = k[start:stop] @ q / 4
        higher = torch.maximum(top, s.max())
        p = (s - higher).exp()
        fade = (top - higher).exp()
        l = fade * l + p.sum()
        o = fade * o + p @ v[start:stop]
        top = higher
        weights = (k[:stop] @ q / 4).softmax(0)
        wanted = weights @ v[:stop]
        error = (o / l - wanted).abs().max()
        print(f"{stop:4} {top:6.2f} {l:6.2f}   {error:.1e}")


if __name__ == "__main__":
    main()
