"""EAGLE-3: a head that drafts from the target's own hidden states.

A draft model reads a sequence anew. But the target has read it already, and its residual stream
holds what it found. A head is one layer. At position i it reads the target's *features* of token i,
the residual stream at the input of three layers, and the token that follows:

    f_i = fc([h_low, h_mid, h_high])               the features of token i
    a_i = [norm(embed[token i + 1]), norm(f_i)]    [2 C]: the input of attention is twice as wide
    y_i = f_i + o(attend(qkv(a)))_i
    z_i = y_i + down(swiglu(norm(y_i)))            the head's state
    the logits of token i + 2 = head(norm(z_i))    [Vd], for the commonest tokens only

A drafted token has no features yet. The last z takes their place, and so one draft leads to the
next. If the sequence is t0 t1 t2 t3, and the target has read all but t3:

    position    0     1     2        3         4
    features    f_0   f_1   f_2      z_2       z_3
    token       t1    t2    t3       draft 1   draft 2
    predicts    t2    t3    draft 1  draft 2   draft 3
                learn, after a       propose: k − 1 positions for k drafts,
                pass of the target   which are truncated again

The keys and values of position i lie in the slot of token i, in a layer that is added to the
target's cache. So shared prefixes, preemption and quantized caches work as they are, except that
position i depends on the next token, too (`lookahead` in paged.py). Verification is exact for any
distribution of drafts.

Invariant: between steps the cache has the head's keys and values for the same tokens as the
target's, all computed from features of the target.
Not covered: trees of drafts; several layers.

Li et al. 2025, EAGLE-3 (arXiv:2503.01840), section 3. Training: train/eagle.py.

    T tokens of a pass · R requests that draft · n features of a token · C hidden_size of the head
    Vd, V sizes of the head's vocabulary and of the target's
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.weights import Weights
from devices import send
from drafters import Chain, SelfDrafter, pack_tokens
from kernels import Linear, Ops
from kvcache import AttentionMetadata, Cache
from model import Features, Llama
from quant import Quantized
from request import Request
from speculative import Round

if TYPE_CHECKING:
    from checkpoint.eagle import EagleConfig
    from runner import ScheduledRequest

# ---- The head ------------------------------------------------------------------------------------


class EagleHead(Weights):
    """One layer, with an input of its own, and a smaller vocabulary."""

    rope = Llama.rope  # with the head's own frequencies

    def __init__(
        self,
        config: EagleConfig,
        target: Llama,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
        ops: Ops | None = None,
        weight_dtype: torch.dtype | None = None,
    ):
        """Make random weights from `seed`; None: leave them uninitialized, to be filled."""
        self.eagle = config  # self.config is that of a Llama with the head's one layer
        self.target = target
        self.feature_layers = config.layers_of(target.config)
        self.cache_layer = target.config.num_hidden_layers  # after the target's own
        super().__init__(
            config.draft_config, device, dtype, seed=None, ops=ops, weight_dtype=weight_dtype
        )
        # What a head has, and that Llama has not. (`self.linear` makes a matrix.)
        c = self.config
        C = c.hidden_size
        n = len(self.feature_layers)
        self.fc = self.linear("fc", C, n * config.target_hidden_size)
        (layer,) = self.layers
        layer.qkv = self.linear("qkv", c.query_size + 2 * c.kv_size, 2 * C, c.qkv_bias)
        self.hidden_norm = self.empty(C)  # of f in a
        self.feature_norms = {}  # of the features, before `fc`; most heads have none
        for name, size in config.feature_norms(n).items():
            self.feature_norms[name] = self.empty(size)
        # The head's token i is the target's token i + offsets[i].
        self.offsets = torch.zeros(c.vocab_size, dtype=torch.int64, device=device)
        self.outside = ["fc", "head"]
        self.embed = Linear(self.empty(0, C))  # none: the target's embedding is read
        if config.has_embedding:  # never quantized, and whole in every process
            self.outside.append("embed")
            self.embed = Linear(self.empty(target.config.vocab_size, C))
        if seed is not None:
            self.randomize(seed)

    def named_weights(self) -> dict[str, Tensor | Quantized]:
        """The weights, by their names in a folder (checkpoint/eagle.py)."""
        of_llama = super().named_weights().items()
        weights = {name.removeprefix("model."): weight for name, weight in of_llama}
        weights["layers.0.hidden_norm.weight"] = self.hidden_norm
        weights |= self.feature_norms
        if self.eagle.has_offsets:
            weights["d2t"] = self.offsets
        return weights

    def combine(self, features: Tensor) -> Tensor:
        """f: the features [T, n, hidden_size of the target] -> [T, C]."""
        x = features.flatten(1)
        norms = self.feature_norms.values()  # none, one for all features, or one for each
        if norms:
            parts = x.chunk(len(norms), dim=1)
            normed = [self._rms_norm(x.contiguous(), weight) for x, weight in zip(parts, norms)]
            x = torch.cat(normed, dim=1)
        return self.ops.linear(x, self.fc)

    def __call__(self, f: Tensor, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        """z at the positions of `metadata`: [T, C]. f: [T, C], made of features by `combine`, or z
        of the positions before; tokens: int64[T], those that follow."""
        return self.ops.forward_head(self, f, tokens, metadata)  # `forward`, or a backend's own

    def forward(self, f: Tensor, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        ops = self.ops
        layer = self.layers[0]
        G = self.config.num_key_value_heads
        D = self.config.head_dim
        rope = self.rope(metadata.positions)
        token = self._rms_norm(self.token_embedding(tokens), layer.input_norm)
        normed = self._rms_norm(f, self.hidden_norm)
        qkv = ops.linear(torch.cat((token, normed), dim=1), layer.qkv)
        qkv = qkv.unflatten(1, (-1, D))
        heads = ops.attend(qkv, G, rope, metadata, self.cache_layer, layer.head_norm)
        attn_out = self.group.sum(ops.linear(heads.flatten(1), layer.o))
        if self.eagle.norm_before_residual:
            f = normed
        y, normed = ops.add_norm(f, attn_out, layer.post_norm, self.config.rms_norm_eps)
        hidden = ops.swiglu(normed, layer.gate_up)
        z = y + self.group.sum(ops.linear(hidden, layer.down))
        return self._rms_norm(z, self.norm) if self.eagle.norm_output else z

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_norm(x, None, weight, self.config.rms_norm_eps)[1]

    def draft_logits(self, z: Tensor) -> Tensor:
        """The logits of the head's own vocabulary: [R, C] -> [R, Vd]."""
        if not self.eagle.norm_output:
            z = self._rms_norm(z, self.norm)
        return self.group.gather(self.ops.linear(z, self.head), self.config.vocab_size)

    def logits(self, z: Tensor) -> Tensor:
        """The logits of the target's vocabulary: [R, C] -> [R, V].

        A token outside the head's vocabulary gets the lowest number, so its probability is 0. It is
        not −∞, because a grammar may allow no other token.
        """
        drafted = self.draft_logits(z)
        lowest = torch.finfo(drafted.dtype).min
        logits = drafted.new_full((len(z), self.target.config.vocab_size), lowest)
        return logits.index_copy_(1, self.tokens, drafted)

    @cached_property
    def tokens(self) -> Tensor:
        """The target's token for each token of the head: int64[Vd]."""
        return self.offsets + torch.arange(len(self.offsets), device=self.device)

    def token_embedding(self, tokens: Tensor) -> Tensor:
        """int64[T] -> [T, C], from the head's own embedding, which every process holds whole, or
        from the target's."""
        if self.eagle.has_embedding:
            return self.ops.embed(tokens, self.embed, self.dtype)
        return self.target.embedding(tokens)


# ---- The drafter ---------------------------------------------------------------------------------


class HeadChain(Chain):
    """A head drafts: a draft and the z that gave it are the input of the next position."""

    def __init__(self, head: EagleHead, cache: Cache, round: Round, z: Tensor):
        """z: the last state of each request that wants drafts, [R, C]."""
        self.model = head
        self.cache = cache
        self.z = z
        self.owners = round.drafting()  # the request that each z belongs to
        self.drafts: Tensor | None = None  # int64[R], drawn from z's logits; None: not yet
        self.seqs = [request.seq for request in round.requests]
        self.next_positions = [cache.length(seq) for seq in self.seqs]
        # Take memory for all positions at once, as ModelChain does. The last draft needs none. The
        # host does not know the drafts, and writes 0 for each.
        wanted = [(self.seqs[b], [0] * (round.num_drafts[b] - 1)) for b in round.drafting(1)]
        self.reserved = cache.extend(wanted) if wanted else None

    def logits(self, rows: list[int]) -> Tensor:
        if self.drafts is not None:
            self._advance(rows)
        return self.model.logits(self.z)

    def feed(self, rows: list[int], picked: Tensor) -> None:
        self.drafts = picked  # `logits` reads them if one of the requests wants another draft

    def _advance(self, rows: list[int]) -> None:
        """Compute z at the next position of these requests."""
        going_on = [self.owners.index(b) for b in rows]
        tokens = self.drafts[going_on].clamp(min=0)  # −1: not finite, and the runner will raise
        spans = []
        for b in rows:
            position = self.next_positions[b]
            spans.append((self.seqs[b], position, position + 1))
            self.next_positions[b] += 1
        self.z = self.model(self.z[going_on], tokens, self.cache.metadata(spans))
        self.owners = rows


class EagleDrafter(SelfDrafter):
    """A head in the target's cache. Between steps it keeps each request's last z."""

    def __init__(self, head: EagleHead, cache: Cache):
        super().__init__(head, cache)
        self.feature_layers = head.feature_layers
        self.last_z: dict[Request, Tensor] = {}  # [C] each

    def most(self, request: Request, wanted: int) -> int:
        """No drafts without a last z. After a preemption there is none, but the target then reads
        all tokens except the last one before the round, and so makes one."""
        num_unread = len(request.tokens) - self.cache.length(request.seq)
        will_have_z = request in self.last_z or num_unread > 1
        return super().most(request, wanted) if will_have_z else 0

    def chain(self, round: Round) -> Chain:
        last_z = [self.last_z[round.requests[b]] for b in round.drafting()]
        return HeadChain(self.model, self.cache, round, z=torch.stack(last_z))

    @torch.inference_mode()
    def learn(self, scheduled: Sequence[ScheduledRequest], features: Features) -> None:
        """Compute z at the positions whose features the target has just made, except for those of
        rejected drafts."""
        requests = []
        spans = []  # of each request: its sequence, its first position, and the end
        next_tokens = []  # of each request, those that follow its positions
        rows: list[int] = []  # of `features`
        for item in scheduled:
            text = item.request.tokens
            stop = min(item.start + item.num_new_tokens, len(text) - 1)  # no token follows the last
            if stop > item.start:
                requests.append(item.request)
                spans.append((item.request.seq, item.start, stop))
                next_tokens.append(text[item.start + 1 : stop + 1])
                rows += item.tokens[: stop - item.start]
        if not requests:
            return
        device = self.model.device
        tokens, last = pack_tokens(next_tokens, device)
        f = self.model.combine(features.values[send(rows, device)])
        z = self.model(f, tokens, self.cache.metadata(spans))
        self.last_z.update(zip(requests, z[last]))

    def close(self, request: Request) -> None:
        self.last_z.pop(request, None)


@torch.inference_mode()
def main() -> None:
    """The demonstration: what tiny's head reads at each position, and what it drafts there."""
    model = Model.load("tiny")
    llama = model.llama
    (head,) = load_draft("tiny-eagle", model).models
    tokens = model.encode("Once upon a time, there was a little girl named Lily.")
    n = len(tokens) - 1
    cache = KVCache(llama.kv_spec(draft_layers=1), n)
    seq, _ = cache.open(())
    features = llama.empty_features(head.feature_layers, n)
    packed = torch.tensor(tokens, device=llama.device)
    llama(packed[:-1], cache.extend([(seq, tokens[:-1])]), None, features)
    z = head(head.combine(features.values), packed[1:], cache.metadata([(seq, 0, n)]))
    drafts = head.logits(z).argmax(-1).tolist()
    print("position   features of   next token   draft of the token after it")
    for i, draft in enumerate(drafts):
        here, following, drafted = (
            repr(model.tokenizer.decode([token])) for token in (tokens[i], tokens[i + 1], draft)
        )
        print(f"{i:8}   {here:11}   {following:10}   {drafted}")


if __name__ == "__main__":
    from kvcache import KVCache
    from loading import Model, load_draft

    main()
