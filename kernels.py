"""Attention over a cache: the plain torch reference, which is the specification.

Every query of a sequence looks at all keys up to its own position:

    attention(q, k, v)_i = Σ_j softmax_j(q_i · k_j / √D) v_j,      j ≤ i + (m − n)

for n queries and m ≥ n keys. The n queries are the *last* n of the m tokens, so the causal mask is aligned bottom-right: the
last query sees everything. (A mask aligned top-left, which is what "causal" means to most library calls, is right only for
n = m: with one query and a full cache it would show that query nothing but the first token.)

Grouped-query attention (Ainslie et al. 2023): H query heads share G ≤ H key/value heads, R = H / G of them each. G = H is
multi-head attention, G = 1 multi-query attention; the cache shrinks by R.

Memory is O(n) beside the mask: torch's scaled_dot_product_attention computes the softmax in tiles (FlashAttention, Dao et
al. 2022) and accumulates in float32.

    n queries · m keys · H query heads · G key/value heads · D head size
"""
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 16                                                # up to so many queries, the heads of a group are rows of one product


@cache
def on_gpu(device: torch.device) -> bool:
    """Whether Triton's kernels are for what is there."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def processors(device: torch.device) -> int:
    """Of this GPU; of what is none, as many as an H100 has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a cache of `dtype` there is attended to in place, by Triton's kernels (kernelstep.py), rather than by what is in this file."""
    return on_gpu(device) and dtype != torch.float64


def send(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """These numbers there, without waiting for what a GPU still has to do."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)         # torch keeps pinned memory until it is copied


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's newest tokens. q: [n, H, D]; k, v: [G, m, D], m ≥ n -> [n, H, D]."""
    (n, H, D), (G, m, _) = q.shape, k.shape
    R = H // G
    if n == 1:                                                                      # one query sees every key
        return F.scaled_dot_product_attention(q.view(1, G, R, D), k[None], v[None]).view(1, H, D)
    if n <= FEW and n < m:
        rows = q.view(n, G, R, D).transpose(0, 1).reshape(1, G, n * R, D)
        out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=causal(n, m, R, q.dtype, q.device))
        return out.view(G, n, R, D).transpose(0, 1).reshape(n, H, D)
    mask = None if n == m else causal(n, m, 1, q.dtype, q.device)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=n == m, enable_gqa=True)
    return out[0].transpose(0, 1)


@lru_cache(maxsize=4)                                   # all layers of a step ask for the same
def causal(n: int, m: int, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores of the last n of m tokens, `repeats` rows for each: [n · repeats, m], 0 where a query sees, else −∞."""
    unseen = torch.ones(n, m, dtype=torch.bool, device=device).triu(m - n + 1)
    return torch.zeros(n, m, dtype=dtype, device=device).masked_fill_(unseen, float("-inf")).repeat_interleave(repeats, 0)


def paged_attention(q: Tensor, keys: Any, values: Any, past: Tensor, mask: Tensor, place: Tensor | None = None) -> Tensor:
    """Causal attention of a few queries of each of B sequences, whose keys and values lie anywhere, in one call.

    q: [T, H, D]; keys, values: [G, slots, D], or in fewer bits (kvquant.py); past: int64[B, G, M], where the vectors of each sequence's tokens are
    among the G · slots, head by head, in order, padded with any of its own; mask: [B, 1, n · R, M], 0 or −∞, what each of a sequence's n queries
    sees, R = H / G times over. Where not all sequences have n queries, place: int64[T] says where these are among B · n. -> [T, H, D]
    """
    (_, H, D), (B, G, M) = q.shape, past.shape
    k, v = (kept.flatten(0, 1).index_select(0, past.flatten()).to(q.dtype).view(B, G, M, D) for kept in (keys, values))
    R, n = H // G, mask.shape[2] // (H // G)
    if place is not None:
        q = q.new_zeros(B * n, H, D).index_copy_(0, place, q)
    grouped = q.view(B, n, G, R, D).transpose(1, 2).reshape(B, G, n * R, D)                                 # a group's R heads are rows
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).view(B, G, n, R, D).transpose(1, 2).reshape(B * n, H, D)
    return out if place is None else out[place]


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what a mask aligned top-left makes of a cache, and how memory grows with the text.

@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    n, m, H, G, D = 3, 10, 4, 2, 16
    q, k, v = torch.randn(n, H, D), torch.randn(G, m, D), torch.randn(G, m, D)
    slow = torch.stack([(q[i] @ k[h // (H // G), :m - n + i + 1].T / D**0.5)[h].softmax(-1) @ v[h // (H // G), :m - n + i + 1]
                        for i in range(n) for h in range(H)]).view(n, H, D)
    library = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    print(f"the last {n} of {m} tokens: a query may see the keys marked x\n  bottom-right, as here{'':10}top-left, as the library's is_causal")
    for i in range(n):
        print("  " + "".join("x" if j <= i + m - n else "·" for j in range(m)) + " " * 21 + "".join("x" if j <= i else "·" for j in range(m)))
    print(f"largest difference from the equation, query by query: {(attention(q, k, v) - slow).abs().max():.1e} here, {(library - slow).abs().max():.2f} there")
    print("tokens of a prompt, milliseconds a head, and the megabytes that all its scores together would take")
    for length in (512, 1024, 2048, 4096):
        q, k, v = torch.randn(length, 1, 64), torch.randn(1, length, 64), torch.randn(1, length, 64)
        start = time.perf_counter()
        attention(q, k, v)
        print(f"{length:6}{1e3 * (time.perf_counter() - start):9.1f}{4 * length**2 / 1e6:9.1f}")


if __name__ == "__main__":
    main()
