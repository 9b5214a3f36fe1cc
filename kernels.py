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
import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's newest tokens. q: [n, H, D]; k, v: [G, m, D], m ≥ n -> [n, H, D]."""
    (n, H, D), (G, m, _) = q.shape, k.shape
    if n == 1:  # One query sees every key: the R query heads of a group are R rows of one unmasked product.
        return F.scaled_dot_product_attention(q.view(1, G, H // G, D), k[None], v[None]).view(1, H, D)
    mask = None if n == m else torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=n == m, enable_gqa=True)
    return out[0].transpose(0, 1)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, past: Tensor, rows: Tensor, place: Tensor, last: Tensor) -> Tensor:
    """Causal attention of a few queries of each of B sequences, whose keys and values lie anywhere, in one call.

    q: [T, H, D]; keys, values: [slots, G, D]; past: int64[B, M], the slots of each sequence's tokens, in order (padding repeats one of them:
    nothing is read that is not its own); rows: int64[T'], the queries meant; place: int64[T'], where they go among B · n places; last:
    int64[B, n], the last key that each place sees. -> [T', H, D].
    """
    (_, G, D), (B, n), H = keys.shape, last.shape, q.shape[1]
    k, v = (store[past].transpose(1, 2).to(q.dtype) for store in (keys, values))                            # [B, G, M, D]
    seen = torch.arange(past.shape[1], device=q.device) <= last[:, :, None]                                 # [B, n, M]
    padded = q.new_zeros(B * n, H, D)
    padded[place] = q[rows]
    grouped = padded.view(B, n, G, H // G, D).permute(0, 2, 1, 3, 4).reshape(B, G, n * (H // G), D)         # a group's heads are rows
    mask = seen[:, None].repeat_interleave(H // G, dim=2)                                                   # [B, 1, n · R, M]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return out.view(B, G, n, H // G, D).permute(0, 2, 1, 3, 4).reshape(B * n, H, D)[place]
