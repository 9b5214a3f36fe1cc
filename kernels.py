"""The operations of a forward pass in plain torch: the specification, which backends override.

`Ops` has every operation that touches a model's numbers. The folders cpu/ and gpu/ each offer a
subclass that overrides what its machine does faster, and calls super() for the rest. `find_device`
chooses the device, `ops_for` its operations: the other pages of a forward pass do not ask what the
machine is. Without the folders, or with LLAMA_PLAIN=1, this page does all.

    attention(q, k, v)_i = Σ_j softmax_j(q_i · k_j / √D) v_j,      j ≤ i + (m − n)

for n queries and m ≥ n keys. The queries are the *last* n of the m tokens, so the causal mask is
aligned bottom-right: the last query sees everything. (Aligned top-left, as by PyTorch's is_causal,
it is right only for n = m.) Grouped-query attention (Ainslie et al. 2023): H query heads share G ≤
H key/value heads, H / G on each: the cache shrinks by that.

`AttentionMetadata` (kvcache.py) says where the new tokens of a step belong. Attention reads keys
and values as they are *stored*, also those of the new tokens, so a result does not depend on how a
prompt was split into chunks, but for rounding.

`Flash` is attention as a GPU computes it (Dao et al. 2022, arXiv:2205.14135): the scores never
leave the chip.

    T tokens of a step · B sequences · H query heads · G key/value heads · D head size
    C hidden_size · F intermediate_size · V vocab_size · L layers · S tokens of a block of the cache
    W [N, K] a matrix, N outputs and K inputs · R logits asked for; in `_flash` R = H / G
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

import sampling
from errors import UserError
from parallel import Parallel, num_processes
from quant import Quantized, rounded_product
from sampling import Setting, check_finite, check_tokens

if TYPE_CHECKING:
    from checkpoint.config import Config
    from eagle import EagleHead
    from kvcache import AttentionMetadata, Cache
    from model import Features, Llama
    from speculative import Proposal, Round

# Triton exists for Linux only, and its import is slow: only for a GPU, for its interpreter, or if a
# caller has imported it, to compile for a GPU that is not here.
triton = None
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") or "triton" in sys.modules:
    with suppress(ImportError):
        import triton
        import triton.language as tl

DEQUANTIZED_TILE = 1 << 21  # weights that `linear` dequantizes at a time
recordings: WeakSet[Any] = WeakSet()  # CUDA graphs of a backend (app/launch.py drops them)


class Linear(NamedTuple):
    """y = x Wᵀ + b."""

    weight: Tensor | Quantized  # [N, K]
    bias: Tensor | None = None  # [N]


# ---- The device ----------------------------------------------------------------------------------


def send(
    numbers: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """These numbers on the device, without waiting for its work."""
    x = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # PyTorch keeps it until it is copied
    return x.to(device)


def pack_tokens(pieces: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The pieces end to end: int64[T]; and the index of each piece's last token."""
    ends = accumulate(len(piece) for piece in pieces)
    last = [end - 1 for end in ends]
    return send([*chain(*pieces)], device), send(last, device)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now, for each process that shares the model."""
    memory_info = Path("/proc/meminfo")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    elif memory_info.exists():
        _, available = memory_info.read_text().split("MemAvailable:")
        free = 1024 * int(available.split()[0])
    else:
        free = sys.maxsize  # unknown: an allocation that fails will say so
    return ops_for(device).shard_memory(free, device)


def find_device(name: torch.device | str | None = None) -> torch.device:
    """The device of this name; None: a GPU, if there is one. UserError if it is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = "cpu or cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {str(name)!r} is unknown: use {usable}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {str(name)!r} is not supported: use {usable}")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"device {str(name)!r} is not on this machine: use {usable}") from None
    return device


# ---- The operations ------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's newest tokens. q: [n, H, D]; k, v: [m, G, D], m ≥ n -> [n,
    H, D]."""
    n = len(q)
    m = len(k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    if n == m:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)
    elif n == 1:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    else:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class Ops:
    """The plain operations, differentiable, in every dtype."""

    multi_step = 1  # tokens, without drafts, that are drawn before the host looks at them

    # ---- Weights and storage

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype to compute in by default. stored: the dtype of the checkpoint."""
        return torch.float32 if stored.itemsize == 2 else stored

    def weight_dtype(self, stored: list[torch.dtype], dtype: torch.dtype) -> torch.dtype:
        """The dtype of matrices in memory, for x in `dtype`. stored: the dtypes of the checkpoint's
        matrices; a backend may keep a narrower one, if no bit is lost."""
        return dtype

    def pack_weight(self, weight: Linear, dtype: torch.dtype, role: str) -> Any:
        """The weight as `linear` or `embed` reads it fastest. dtype: of x; role: embed, head, or a
        field of Layer."""
        return weight

    def empty_kv(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized keys or values [L, blocks, S, G, D], in the order in memory that `attend`
        reads fastest."""
        return torch.empty(shape, dtype=dtype, device=device)

    # ---- The operations of a layer

    def embed(self, tokens: Tensor, weight: Any, dtype: torch.dtype) -> Tensor:
        """Rows of W: int64[T] -> [T, C]."""
        w = weight.weight
        if isinstance(w, Tensor):
            return F.embedding(tokens, w)
        return w.rows(tokens, dtype)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x Wᵀ + b: [T, K] -> [T, N]. Quantized weights are dequantized some rows of W at a
        time."""
        w, bias = weight
        if isinstance(w, Tensor):
            return F.linear(x, w, bias)
        if w.input_bits == 8:  # x is rounded, too
            y = rounded_product(x, w)
        else:
            tile = max(16, DEQUANTIZED_TILE // w.columns)
            tiles = [slice(start, start + tile) for start in range(0, len(w.values), tile)]
            y = torch.cat([F.linear(x, w.rows(rows, x.dtype)) for rows in tiles], dim=-1)
        return y if bias is None else y + bias

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and its RMSNorm, normalized in at least float32: [T, C] each. delta None adds
        nothing."""
        if delta is not None:
            x = x + delta
        wide = x.float() if x.dtype.itemsize == 2 else x
        mean_square = wide.square().mean(-1, keepdim=True)
        mean_square = mean_square.nan_to_num(math.nan, math.nan)  # ∞, too, whose rsqrt is 0
        normed = wide * torch.rsqrt(mean_square + eps)
        return x, normed.to(x.dtype) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of x: [T, heads, D]. cos, sin: [T, 1, D], the first half of
        sin negated."""
        half = x.shape[-1] // 2
        return torch.addcmul(x * cos, x.roll(half, -1), sin)

    def swiglu(self, x: Tensor, gate_up: Any) -> Tensor:
        """silu(gate) · up, the two halves of gate_up's product: [T, C] -> [T, F]."""
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def attend(
        self, qkv: Tensor, G: int, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Rotate q and k, store k and v, and attend within each sequence. qkv: [T, H + 2 G, D] ->
        [T, H, D]."""
        H = qkv.shape[1] - 2 * G
        qk, v = qkv.split((H + G, G), dim=1)
        q, k = self.rotate(qk, cos, sin).split((H, G), dim=1)
        out = self.store_and_attend(q, k, v, metadata, layer)
        return out + (0 * qkv).sum()  # NaN or ∞, which PyTorch's attention may make 0

    def store_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Store k and v: [T, G, D]; then attention of q: [T, H, D] -> [T, H, D]."""
        cache = metadata.cache
        if cache is None:  # sequences of one length: one call for all
            B = len(metadata.sequences)
            q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        slot_mapping = metadata.slot_mapping.long()
        cache.keys.write(layer, slot_mapping, k)
        cache.values.write(layer, slot_mapping, v)
        outputs = []
        for queries, slots in zip(q.split(metadata.num_new_tokens), metadata.slots):
            keys = cache.keys.read(layer, slots, q.dtype)
            values = cache.values.read(layer, slots, q.dtype)
            outputs.append(attention(queries, keys, values))
        return torch.cat(outputs)

    # ---- Sampling

    def forbid(self, logits: Tensor, rows: Sequence[int], masks: Tensor) -> Tensor:
        """sampling.forbid, in place. masks: int32[n, ⌈V / 32⌉], the host's, for n rows."""
        numbers = torch.tensor(rows, dtype=torch.int32)[:, None]
        packed = torch.cat((numbers, masks), 1)  # [n, 1 + W]: one copy to a GPU
        packed = send(packed, logits.device)
        return sampling.forbid(logits, packed[:, 0], packed[:, 1:])

    def check_logits(self, logits: Tensor) -> None:
        """NotFinite unless all logits of the target are finite. Later they may be masked by −∞."""
        check_finite(logits, masked=False)

    def probabilities(self, logits: Tensor, **settings: Setting) -> Tensor:
        """sampling.probabilities. logits: [B, V]. A backend that does not know a setting calls this
        one."""
        return sampling.probabilities(check_finite(logits), **settings)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        """sampling.pick. probs: [B, V]; streams: int64[B, 1], from which each row's random numbers
        come -> int64[B]."""
        return sampling.pick(probs, streams)

    def verify(
        self, round: Round, p: Tensor, q: Tensor | None, drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many drafts of each request are accepted, and the token after them (speculative.py):
        int64[B] each."""
        return round.verify(p, q, drafted)

    # ---- Whole passes, which a backend may do in one call

    def forward(
        self,
        llama: Llama,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None,
        features: Features | None = None,
    ) -> Tensor:
        """A forward pass -> logits [R, V]. features: to be filled."""
        return llama.forward(tokens, metadata, logits_indices, features)

    def draft(
        self,
        llama: Llama,
        cache: Cache,
        seqs: Sequence[int],
        unread: Sequence[Sequence[int]],
        round: Round,
        cache_blocks: bool = True,
    ) -> Proposal:
        """All drafts of a round: each pass drafts one token of every request that wants one more.

        -> the drafted tokens int64[B, k], and the distributions q that they were drawn from,
        float[B, k + 1, V]; in coupled mode None (speculative.py). unread: each request's tokens
        that the cache lacks. cache_blocks: as for `Cache.extend`.
        """
        drafted, q = round.empty_drafts()
        new_tokens = list(unread)
        for j in range(drafted.shape[1]):
            rows = [b for b, num_drafts in enumerate(round.num_drafts) if num_drafts > j]
            metadata = cache.extend([(seqs[b], new_tokens[b]) for b in rows], cache_blocks)
            tokens, last = pack_tokens([new_tokens[b] for b in rows], round.device)
            wanted = None if len(tokens) == len(rows) else last  # None: all, with a token each
            logits = llama(tokens, metadata, wanted)
            probs, picked = round.draft(j, logits, rows)  # [len(rows), V], [len(rows)]
            drafted[rows, j] = picked
            if q is not None:
                q[rows, j] = probs
            for b, token in zip(rows, check_tokens(picked.tolist())):
                new_tokens[b] = [token]
        return drafted, q

    def head_rows(
        self, head: EagleHead, f: Tensor, tokens: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Rows of an EAGLE head (eagle.py): [T, C] -> [T, C]."""
        return head.plain_rows(f, tokens, metadata)

    def head_drafts(
        self, head: EagleHead, cache: Cache, seqs: Sequence[int], z: Tensor, round: Round
    ) -> Proposal:
        """All drafts of a round by an EAGLE head. z: [R, C], of the requests that want drafts."""
        return head.plain_drafts(cache, seqs, z, round)

    def warm_up(self, llama: Llama, cache: Cache, vocab_size: int) -> None:
        """Compile whatever steps of many texts launch, before they do. vocab_size: candidates that
        tokens are drawn from."""

    # ---- Other processes: here there are none (parallel.py)

    def shard_config(self, config: Config) -> Config:
        """The model that this process computes."""
        return config

    def shard_tensor(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The part of a checkpoint's tensor that fills a tensor of this shape."""
        return tensor

    def shard_memory(self, free: int, device: torch.device) -> int:
        """The bytes that each process may take, where `free` are free on the device of this one."""
        return free

    def agree(self, numbers: Any) -> Any:
        """Numbers of the first process, for every process, on the host."""
        return numbers


# ---- Flash attention -----------------------------------------------------------------------------

if triton is not None:
    # Triton compiles a further variant where a number is 1 or a multiple of 16, or an address a
    # multiple of 16. From step to step max_blocks changes, and so do the addresses of the three
    # tables, views in one buffer: no variants for these.
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
        """Attention of ROWS rows of one sequence: new tokens times the R heads of a key/value head.

        It walks over the keys in tiles and keeps for each row the largest score `top`, the sum l
        of the weights, and the weighted sum o of the values; at the end the result is o / l. With
        the scores s = q · k · scale, where scale = 1 / (√D ln 2), since 2^(x / ln 2) = e^x:

            higher = max(top, max_j s_j)      p_j = 2^(s_j − higher)      fade = 2^(top − higher)
            l = fade · l + Σ_j p_j
            o = fade · o + Σ_j p_j · v_j
        """
        b = tl.program_id(0) // G
        g = tl.program_id(0) % G
        first = tl.load(cu_seqlens + b)
        seq_len = tl.load(seq_lens + b)
        n = tl.load(cu_seqlens + b + 1) - first  # new tokens, the last n of seq_len
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
        for start in range(0, tl.minimum(seq_len, last + 1), KEYS):  # rows of padding lie beyond
            j = start + tl.arange(0, KEYS)  # a tile of keys, of any blocks
            block = tl.load(block_tables + b * max_blocks + j // S, j < seq_len, 0).to(tl.int64)
            slot = block * S + j % S
            kv_offset = (slot * G + g)[:, None] * D + d[None, :]
            is_key = (j < seq_len)[:, None] & (d < D)[None, :]
            keys = tl.load(k + kv_offset, is_key, 0)
            values = tl.load(v + kv_offset, is_key, 0)
            s = tl.dot(x, tl.trans(keys), input_precision="tf32x3")  # float32's precision, nearly
            s = s * scale
            s = tl.where(j[None, :] <= position[:, None], s, float("-inf"))  # bottom-right
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            weights = p.to(v.dtype.element_ty)
            o = tl.dot(weights, values, o * fade[:, None], input_precision="tf32x3")
            l = l * fade + tl.sum(p, 1)
            top = higher
        tl.store(out + offset, (o / l[:, None]).to(out.dtype.element_ty), is_row)


class Flash(Ops):
    """What a GPU runs without the folder gpu/: attention reads 16- and 32-bit keys and values where
    they are stored."""

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        return stored

    def store_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        cache = metadata.cache
        if cache is None or cache.dtype != q.dtype or q.dtype == torch.float64:
            return super().store_and_attend(q, k, v, metadata, layer)
        if cache.keys.bits < 16 or cache.values.bits < 16:  # 16: as they are, in any dtype
            return super().store_and_attend(q, k, v, metadata, layer)
        slot_mapping = metadata.slot_mapping.long()
        cache.keys.write(layer, slot_mapping, k)
        cache.values.write(layer, slot_mapping, v)
        _, H, D = q.shape
        G = k.shape[1]
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
            WIDE=max(16, triton.next_power_of_2(D)),  # what `tl.dot` can multiply
            ROWS=rows,
            KEYS=32,
        )
        return out


# ---- The choice ----------------------------------------------------------------------------------


def ops_for(device: torch.device | str) -> Ops:
    """The fastest operations for this device: from cpu/ or gpu/, or plain; and for this process's
    shard."""
    device = torch.device(device)
    ops = fastest_ops(device)
    # A model on "meta" stands for the whole checkpoint, to check its shapes (checkpoint/load.py).
    if num_processes() > 1 and device.type != "meta":
        return Parallel(ops)
    return ops


def make_current(device: torch.device) -> None:
    """Let this thread launch kernels and graphs there."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def fastest_ops(device: torch.device) -> Ops:
    """The operations of one process."""
    make_current(device)
    if device.type not in ("cpu", "cuda") or os.environ.get("LLAMA_PLAIN") == "1":
        return Ops()
    folder = "gpu" if device.type == "cuda" else "cpu"
    if find_spec(folder):
        ops = import_module(folder).ops()
        if ops is not None:
            return ops
    return Flash() if device.type == "cuda" and triton else Ops()


def main() -> None:
    """The demonstration: what a mask aligned top-left makes of a cache."""
    n = 3
    m = 10
    q = torch.randn(n, 1, 16)
    k = torch.randn(m, 1, 16)
    v = torch.randn(m, 1, 16)
    top_left = torch.ones(n, m, dtype=torch.bool).tril()
    heads = [x.transpose(0, 1) for x in (q, k, v)]  # [1, tokens, 16]
    outputs = {
        "bottom-right": attention(q, k, v)[:, 0],
        "top-left": F.scaled_dot_product_attention(*heads, attn_mask=top_left)[0],
    }
    print(f"the last {n} of {m} tokens: x marks the keys that a query sees, and its error")
    for i in range(n):
        last = m - n + 1 + i  # keys that it should see
        scores = q[i] @ k[:last, 0].T / 4
        wanted = scores.softmax(-1) @ v[:last, 0]
        for name, num_keys in (("bottom-right", last), ("top-left", i + 1)):
            error = (outputs[name][i] - wanted).abs().max()
            print(f"  {name:14}{'x' * num_keys:·<{m}}{error:10.1e}")


if __name__ == "__main__":
    main()
