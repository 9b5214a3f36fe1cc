"""EAGLE-3: a head that drafts from the target's own hidden states.

A draft model reads a sequence anew. But the target has read it already, and its residual stream
holds what it found. A head is one layer. At position i it reads the target's *features* of token i,
the residual stream at the input of three layers, and the token that follows:

    f_i = fc([h_low, h_mid, h_high])               the features of token i
    a_i = [norm(embed[token i + 1]), norm(f_i)]    [2 C]: the input of q, k and v is twice as wide
    y_i = f_i + o(attend(qkv(a)))_i
    z_i = y_i + down(swiglu(norm(y_i)))            the head's state
    the logits of token i + 2 = head(norm(z_i))    [Vd], for the commonest tokens only

A drafted token has no features yet. The last z takes their place, and so one draft leads to the
next. If the sequence is t0 t1 t2 t3, and the target has read all but t3:

    position    0     1     2        3         4
    features    f_0   f_1   f_2      z_2       z_3
    token       t1    t2    t3       draft 1   draft 2
    predicts    t2    t3    draft 1  draft 2   draft 3
                learn, after a       propose: k − 1 positions for k drafts, which are
                pass of the target   truncated again; draft 1 comes from learn's last z

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

from checkpoint.weights import HeadWeights
from devices import send
from drafters import Chain, SelfDrafter, pack_tokens
from kvcache import AttentionMetadata, Cache
from model import Features, Llama
from request import Request
from speculative import Round

if TYPE_CHECKING:
    from runner import ScheduledRequest

# ---- The head ------------------------------------------------------------------------------------


class EagleHead(HeadWeights):
    """`head(f, tokens, metadata)` -> z. `HeadWeights` (checkpoint/weights.py) makes the attributes:
    fc, hidden_norm, feature_norms, one layer, norm and head; feature_layers, whose inputs are the
    features; cache_layer, its own number in the target's cache; offsets, from its vocabulary to
    the target's; target; and `eagle`, the options in which published heads differ."""

    rope = Llama.rope  # which reads self.frequencies, here the head's own

    def combine(self, features: Tensor) -> Tensor:
        """f: the features [T, n, hidden_size of the target] -> [T, C]."""
        x = features.flatten(1)
        norms = self.feature_norms.values()  # none, one for all features, or one for each
        if norms:
            normed = []
            for part, weight in zip(x.chunk(len(norms), dim=1), norms):
                normed.append(self._rms_norm(part.contiguous(), weight))
            x = torch.cat(normed, dim=1)
        return self.ops.linear(x, self.fc)

    def __call__(self, f: Tensor, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        """z at the positions of `metadata`: [T, C]. f: [T, C], made of features by `combine`, or z
        of the positions before; tokens: int64[T], those that follow."""
        # This calls `forward`, unless the backend has a faster version of it.
        return self.ops.forward_head(self, f, tokens, metadata)

    def forward(self, f: Tensor, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The equations above."""
        ops = self.ops
        layer = self.layers[0]
        G = self.config.num_key_value_heads
        D = self.config.head_dim
        rope = self.rope(metadata.positions)
        token = self._rms_norm(self.token_embedding(tokens), layer.input_norm)
        normed = self._rms_norm(f, self.hidden_norm)
        a = torch.cat((token, normed), dim=1)  # [T, 2 C]
        qkv = ops.linear(a, layer.qkv)
        qkv = qkv.unflatten(1, (-1, D))  # [T, H + 2 G, D]
        heads = ops.attend(qkv, G, rope, metadata, self.cache_layer, layer.head_norm)
        attn_out = self.group.sum(ops.linear(heads.flatten(1), layer.o))
        if self.eagle.norm_before_residual:  # some published heads have norms in other places
            f = normed
        y, normed = ops.add_norm(f, attn_out, layer.post_norm, self.config.rms_norm_eps)
        hidden = ops.swiglu(normed, layer.gate_up)
        mlp_out = self.group.sum(ops.linear(hidden, layer.down))
        z = y + mlp_out
        return self._rms_norm(z, self.norm) if self.eagle.norm_output else z

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        _, normed = self.ops.add_norm(x, None, weight, self.config.rms_norm_eps)
        return normed

    def draft_logits(self, z: Tensor) -> Tensor:
        """The logits of the head's own vocabulary: [R, C] -> [R, Vd]."""
        if not self.eagle.norm_output:
            z = self._rms_norm(z, self.norm)
        logits = self.ops.linear(z, self.head)
        return self.group.gather(logits, self.config.vocab_size)

    def logits(self, z: Tensor) -> Tensor:
        """The logits of the target's vocabulary: [R, C] -> [R, V].

        A token outside the head's vocabulary gets the lowest number, so its probability is 0. It is
        not −∞: a grammar may allow no other token, and a row of −∞ alone would give NaN.
        """
        drafted = self.draft_logits(z)
        lowest = torch.finfo(drafted.dtype).min
        logits = drafted.new_full((len(z), self.target.config.vocab_size), lowest)
        return logits.index_copy_(1, self.tokens, drafted)

    @cached_property
    def tokens(self) -> Tensor:
        """The target's token for each token i of the head, i + offsets[i]: int64[Vd]."""
        return self.offsets + torch.arange(len(self.offsets), device=self.device)

    def token_embedding(self, tokens: Tensor) -> Tensor:
        """int64[T] -> [T, C], from the head's own embedding, which every process holds whole, or
        from the target's."""
        if self.eagle.has_embedding:
            return self.ops.embed(tokens, self.embed, self.dtype)
        return self.target.embedding(tokens)


# ---- The drafter ---------------------------------------------------------------------------------


class HeadChain(Chain):
    """A head drafts: a draft and the z that gave it are the input of the next position. For each
    draft, `Chain.one_by_one` calls `logits` and then `feed`."""

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
        wanted = []
        for b in round.drafting(1):  # the requests with at least two drafts
            num_positions = round.num_drafts[b] - 1
            wanted.append((self.seqs[b], [0] * num_positions))
        # The metadata of all positions: a backend that makes all drafts in one call reads it.
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

    sees_each_token = True  # its features

    def __init__(self, head: EagleHead, cache: Cache):
        super().__init__(head, cache)
        self.feature_layers = head.feature_layers
        self.last_z: dict[Request, Tensor] = {}  # [C] each

    def most(self, request: Request, wanted: int) -> int:
        """No drafts without a last z. After a preemption there is none. If more than one token is
        unread, the target reads all but the last as a chunk first, and `learn` makes a z."""
        num_unread = len(request.tokens) - self.cache.length(request.seq)
        will_have_z = request in self.last_z or num_unread > 1
        return super().most(request, wanted) if will_have_z else 0

    def chain(self, round: Round) -> Chain:
        last_z = []
        for b in round.drafting():
            last_z.append(self.last_z[round.requests[b]])
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
            tokens = item.request.tokens
            # The sequence has grown by the accepted drafts and one token, which nothing follows.
            stop = min(item.stop + item.num_drafts, len(tokens) - 1)
            if stop > item.start:
                requests.append(item.request)
                spans.append((item.request.seq, item.start, stop))
                next_tokens.append(tokens[item.start + 1 : stop + 1])
                rows += item.token_rows[: stop - item.start]
        if not requests:
            return
        device = self.model.device
        following, last = pack_tokens(next_tokens, device)
        f = self.model.combine(features.values[send(rows, device)])
        z = self.model(f, following, self.cache.metadata(spans))
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
    read = tokens[:-1]  # by the target
    following = torch.tensor(tokens[1:], device=llama.device)
    cache = KVCache(llama.kv_spec(draft_layers=1), len(read))
    seq, _ = cache.open(())
    metadata = cache.extend([(seq, read)])
    features = llama.empty_features(head.feature_layers, len(read))
    llama(torch.tensor(read, device=llama.device), metadata, None, features)
    f = head.combine(features.values)
    z = head(f, following, metadata)
    drafts = head.logits(z).argmax(-1)
    print("position   features of   next token   draft of the one after")
    for i, draft in enumerate(drafts.tolist()):
        columns = [repr(model.tokenizer.decode([token])) for token in (*tokens[i : i + 2], draft)]
        print(f"{i:8}   {columns[0]:11}   {columns[1]:10}   {columns[2]}")


if __name__ == "__main__":
    from kvcache import KVCache
    from loading import Model, load_draft

    main()
