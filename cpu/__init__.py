"""A CPU's operations: C where there is a compiler (native.py), else PyTorch.

  - A weight is put in the order that C multiplies fastest, once, when a model is loaded.
  - Attention is C's, over keys and values of 32, 16, 8 and 4 bits. Where there is no cache, it
    makes one for the pass.
  - If C does both products and attention, one call runs all layers of a short step, and one call
    makes all drafts of a lone sequence, with no Python between the operations; so for EAGLE heads.
  - Before C is used, each operation is compared with its plain definition (selftest.py).
  - Where other programs interrupt the threads of products, fewer threads run for a while, PyTorch's
    too (products.c): the others would wait for the one that was interrupted.

Invariant: results are those of kernels.Ops up to the order of sums.

Not covered: one call for x in bfloat16, for drafts of several sequences, or for drafts with a
grammar.

    T tokens of a step · B sequences · H, G query and key/value heads · D head size
    C hidden_size · V vocab_size
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cpu import native, selftest
from drafters import Chain, ModelChain
from eagle import EagleHead, HeadChain
from edits import put_back
from kernels import HeadNorm, Linear, Ops, rotated
from kvcache import AttentionMetadata, KVCache, KVSpec
from quant import Quantized
from sampling import Keyed, Setting, check_tokens
from settings import SETTINGS

if TYPE_CHECKING:
    from model import Features, Llama, Rope
    from speculative import Proposal, Rng, Round, Verify

ONE_CALL = 64  # tokens of a step that is one call: Ctrl-C waits for its end
warnings.filterwarnings(  # python -m cpu.native
    "ignore", "'cpu.native' found in sys.modules", RuntimeWarning
)


class CPU(Ops):
    """`kernels.Ops`, faster."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[Llama, Any] = WeakKeyDictionary()

    def dtypes(
        self, stored: list[torch.dtype], asked: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        """For float32 x, bfloat16 weights stay bfloat16: half the bytes, the same products to the
        bit."""
        dtype, of_weights = super().dtypes(stored, asked)
        has_c = native.library() is not None  # before a model is loaded: it may tell why not
        packs = self.pack_weight.__func__ is CPU.pack_weight  # the page was not put back
        if has_c and packs and dtype == torch.float32 and {*stored} == {torch.bfloat16}:
            of_weights = torch.bfloat16
        return dtype, of_weights

    # ---- Weights

    def pack_weight(self, weight: Linear, dtype: torch.dtype) -> native.Weight | Linear:
        if native.multiplies(weight.weight, dtype):
            return native.Weight.of(weight)
        return weight

    def embed(self, tokens: Tensor, weight: native.Weight | Linear, dtype: torch.dtype) -> Tensor:
        if isinstance(weight, native.Weight):
            return weight.rows(tokens).to(dtype)
        return super().embed(tokens, weight, dtype)

    def linear(self, x: Tensor, weight: native.Weight | Linear) -> Tensor:
        if isinstance(weight, native.Weight):
            return native.product(x, weight)
        if isinstance(weight.weight, Quantized) and x.dtype.itemsize == 2:
            # PyTorch's products of 16 bits may be very slow
            return super().linear(x.float(), weight).to(x.dtype)
        return super().linear(x, weight)

    # ---- Between the products

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if native.serves(x, delta, weight):
            return native.add_norm(x, delta, weight, eps)
        return super().add_norm(x, delta, weight, eps)

    def swiglu(self, x: Tensor, gate_up: native.Weight | Linear) -> Tensor:
        if isinstance(gate_up, native.Weight) and native.serves(x):
            return native.swiglu(native.product(x, gate_up))
        return super().swiglu(x, gate_up)

    # ---- Sampling

    def probabilities(self, logits: Tensor, masked: bool = True, **settings: Setting) -> Tensor:
        if logits.dtype in (torch.bfloat16, torch.float16):  # what float32 holds exactly
            logits = logits.float()
        all_known = settings.keys() <= SETTINGS.keys()
        if all_known and logits.numel() and native.serves(logits):
            return native.row_probabilities(logits, masked, **settings)
        return super().probabilities(logits, masked, **settings)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        if probs.shape[1] and native.library():
            return native.pick_tokens(probs, streams)
        return super().pick(probs, streams)

    def verify_block(
        self, verify_block: Verify, p: Tensor, q: Tensor, drafted: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor]:
        if type(rng) is not Keyed or not native.serves(p, q):
            return super().verify_block(verify_block, p, q, drafted, rng)
        return native.verify_drafts(p, q, drafted, rng)

    # ---- Attention

    def empty_kv(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Heads outermost: the tokens of a head, which are read together, lie together."""
        L, N, S, G, D = shape
        heads_first = torch.empty((L, G, N, S, D), dtype=dtype, device=device)
        return heads_first.permute(0, 2, 3, 1, 4)

    def attend(
        self,
        qkv: Tensor,
        G: int,
        rope: Rope | None,
        metadata: AttentionMetadata,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        stored = metadata
        if metadata.cache is None and not (qkv.requires_grad and torch.is_grad_enabled()):
            stored = with_cache(metadata, KVSpec(1, G, qkv.shape[2], dtype=qkv.dtype))
            layer = 0
        if not attends_in_c(stored):
            return super().attend(qkv, G, rope, metadata, layer, norm)
        if not native.serves(qkv, *rope or ()):  # rounded as plain torch rounds
            qkv = torch.cat(rotated(qkv, G, rope, norm), dim=1)
            rope = None
            norm = None
        return native.attend(qkv.float(), G, rope, stored, layer, norm).to(qkv.dtype)

    # ---- Many operations in one call

    def forward(
        self,
        llama: Llama,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None = None,
        features: Features | None = None,
    ) -> Tensor:
        model = self.native_model(llama)
        if model is None or not is_one_call(metadata):
            return super().forward(llama, tokens, metadata, logits_indices, features)
        angles = native.angles_for(model, llama, metadata)
        x = llama.embed.rows(tokens)  # [T, C]
        x = model.run_layers(x, angles, metadata, features)
        if logits_indices is not None:
            x = x[logits_indices]
        return native.product(x, llama.head)

    def forward_head(
        self, head: EagleHead, f: Tensor, tokens: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        model = self.native_model(head)
        if model is None or not is_one_call(metadata):
            return super().forward_head(head, f, tokens, metadata)
        return model.forward(f, tokens, native.angles_for(model, head, metadata), metadata)

    def chain(self, chain: Chain, round: Round) -> Proposal:
        """The drafts of a lone sequence."""
        model = self.native_model(chain.model) if drafts_in_c(chain, round) else None
        if model is None:
            return super().chain(chain, round)
        if isinstance(chain, HeadChain):
            x = chain.z
        else:
            x = chain.model.embed.rows(torch.tensor(chain.new[0], dtype=torch.int64))  # [T, C]
        angles = None
        if chain.reserved is not None:
            angles = native.angles_for(model, chain.model, chain.reserved)
        proposal = round.no_drafts()
        model.draft(x, angles, chain.reserved, draws(round), proposal)
        check_tokens(proposal.tokens[0].tolist())
        return proposal

    def native_model(self, llama: Llama) -> Any:
        """The model or head, for calls of all layers; None if C does not do all of them."""
        if not isinstance(llama.head, native.Weight):
            return None
        if llama.group.n > 1:  # layer by layer, with sums in between
            return None
        if llama not in self._models:
            kind = native.NativeHead if isinstance(llama, EagleHead) else native.NativeModel
            self._models[llama] = kind.of(llama)
        return self._models[llama]


def with_cache(metadata: AttentionMetadata, spec: KVSpec) -> AttentionMetadata:
    """The same tokens over a cache of one layer, which each layer of the pass overwrites."""
    if "with_cache" not in metadata.backend:
        sequences = metadata.sequences  # all as long as the first, and each in a block of its own
        cache = KVCache(spec, sequences[0].seq_len, len(sequences))
        stored = AttentionMetadata(sequences, cache.block_size, cache)
        metadata.backend["with_cache"] = stored
    return metadata.backend["with_cache"]


def attends_in_c(metadata: AttentionMetadata) -> bool:
    """Whether C computes attention of this step."""
    return metadata.cache is not None and native.cache_layout(metadata.cache) is not None


def is_one_call(metadata: AttentionMetadata) -> bool:
    """Whether a pass is one call: of a short step whose attention C computes."""
    return len(metadata.positions) <= ONE_CALL and attends_in_c(metadata)


def drafts_in_c(chain: Chain, round: Round) -> bool:
    """Whether drafts are one call: of a lone sequence with few unread tokens, rngs that C can
    compute, distributions in float32, no grammar or penalties."""
    if type(chain) not in (ModelChain, HeadChain) or len(round.num_drafts) != 1:
        return False
    if isinstance(chain, ModelChain) and len(chain.new[0]) > ONE_CALL:
        return False
    if round.edits_logits or round.dtype != torch.float32:
        return False
    return native.cache_layout(chain.cache) is not None and isinstance(round.rngs, Keyed)


def draws(round: Round) -> native.Draws:
    """How the drafts of a lone sequence are drawn."""
    settings = native.setting_rows({name: round.setting(name)[0] for name in SETTINGS}, 1)
    first = round.first_draft_rng
    rngs = round.rngs[first : first + round.num_drafts[0]]
    return native.Draws(settings, rngs.streams, round.vocab_size)


@cache
def ops() -> CPU:
    """One for all models. If C is wrong, plain torch computes from now on."""
    cpu = CPU()
    if native.library() is not None:
        cpu.language = native.language()
        edited = put_back(cpu)
        threads = torch.get_num_threads()
        wrong = selftest.first_wrong(cpu, edited)
        torch.set_num_threads(threads)  # a loop of C that was disturbed has halved them
        if wrong:
            native.distrust(wrong)
    return cpu
