"""EAGLE-3: a head that drafts from the target's own hidden states.

A draft model reads the text anew. But the target has read it already, and its residual stream holds
its findings. A head is one layer that reads this stream and the last token:

    f_i = fc([h_low, h_mid, h_high])               h: token i's features, x at the input of 3 layers
    a_i = [norm(embed[token i + 1]), norm(f_i)]    [2 C]: the input of attention is twice as wide
    y_i = f_i + o(attend(qkv(a)))_i
    z_i = y_i + down(swiglu(norm(y_i)))
    the logits of token i + 2 = head(norm(z_i))    [Vd], for the commonest tokens alone

So row i pairs f_i with the token after token i. The newest row's z gives the first draft. The next
row has no features yet: it takes z_i in place of f, with the token just drafted, and so on, in a
chain. Published heads differ in where they have norms: the flags of `EagleConfig`.

    after each pass of the target     a row for each token that stays in the text
    to draft k tokens                 k − 1 rows more, made of fed-back z, and forgotten again

The keys and values of these rows are one more layer of the target's cache: row i is in the slot of
token i. So shared prefixes, preemption and caches in fewer bits need one thing more: a row
depends on the next token, too (`lookahead` in paged.py). A token outside the head's vocabulary is
drafted only where a grammar allows no other: verification is exact for any distribution of drafts.

Invariant: between steps each stored token of a text has its row, made of true features.
Not covered: trees of drafts; several layers.

Li et al. 2025, EAGLE-3 (arXiv:2503.01840), section 3. Training: train/eagle.py.

    T rows · R texts that draft · n features of a token · C hidden_size of the head · Vd, V sizes of
    the head's vocabulary and of the target's
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
        self.eagle = config  # and self.config is that of its layer, with Vd tokens
        self.target = target
        self.feature_layers = config.layers_of(target.config)
        self.cache_layer = target.config.num_hidden_layers  # the cache's last layer
        super().__init__(
            config.draft_config, device, dtype, seed=None, ops=ops, weight_dtype=weight_dtype
        )
        c = self.config
        C = c.hidden_size
        n = len(self.feature_layers)
        # `self.linear` makes a matrix; `ops.linear` multiplies by one.
        self.fc = self.linear("fc", C, n * config.target_hidden_size)
        (layer,) = self.layers
        layer.qkv = self.linear("qkv", c.query_size + 2 * c.kv_size, 2 * C, c.qkv_bias)
        self.outside = ["fc", "head"]  # matrices outside the layer (checkpoint/weights.py)
        num_rows = 0  # of an embedding of its own: the target's vocabulary, whole, never quantized
        if config.has_embedding:
            self.outside.append("embed")
            num_rows = target.config.vocab_size
        self.embed = Linear(self.empty(num_rows, C))
        self.hidden_norm = self.empty(C)
        self.feature_norms = {}  # before `fc`
        for name, size in config.feature_norms(n).items():
            self.feature_norms[name] = self.empty(size)
        # The head's token i is the target's token i + offsets[i].
        self.offsets = torch.zeros(self.config.vocab_size, dtype=torch.int64, device=device)
        if seed is not None:
            self.randomize(seed)

    def named_weights(self) -> dict[str, Tensor | Quantized]:
        """The weights, by their names in a folder (checkpoint/eagle.py)."""
        of_all = super().named_weights().items()
        weights = {name.removeprefix("model."): weight for name, weight in of_all}
        weights["layers.0.hidden_norm.weight"] = self.hidden_norm
        weights |= self.feature_norms
        if self.eagle.has_offsets:
            weights["d2t"] = self.offsets
        return weights

    def combine(self, features: Tensor) -> Tensor:
        """f, made of the features: [T, n, hidden_size of the target] -> [T, C]."""
        x = features.flatten(1)
        norms = self.feature_norms.values()
        if norms:  # one for all features, or one for each
            parts = x.chunk(len(norms), dim=1)
            normed = [self._rms_norm(x.contiguous(), weight) for x, weight in zip(parts, norms)]
            x = torch.cat(normed, dim=1)
        return self.ops.linear(x, self.fc)

    def rows(self, f: Tensor, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        """z for rows that pair f (or z), [T, C], with tokens, int64[T] -> [T, C]."""
        # A backend may compute them in one call; the plain one calls `forward`, below.
        return self.ops.forward(self, (f, tokens), metadata)

    def forward(
        self,
        inputs: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        *unused: None,
    ) -> Tensor:
        """The operations of `rows`. unused: what only a Llama is asked for."""
        f, tokens = inputs
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
    """A head drafts. `rows` here are the rows of the round: one for each request."""

    def __init__(self, head: EagleHead, cache: Cache, round: Round, newest: Tensor):
        """newest: z of the requests that want drafts, [R, C]."""
        self.model = head
        self.cache = cache
        self.z = newest
        self.rows = round.drafting()  # of z
        self.picked: Tensor | None = None  # the drafts that z gave, int64[R]
        # Of each request of the round: its sequence, and how many of its tokens have a z stored.
        self.seqs = [request.seq for request in round.requests]
        self.lengths = [cache.length(seq) for seq in self.seqs]
        # Reserve memory for all at once, as ModelChain does; `SelfDrafter.propose` truncates
        # it again. The last draft is never fed. 0 stands for a token that only the device has.
        wanted = [(self.seqs[b], [0] * (round.num_drafts[b] - 1)) for b in round.drafting(1)]
        self.reserved = cache.extend(wanted) if wanted else None

    def logits(self, rows: list[int]) -> Tensor:
        if self.picked is not None:
            self._feed_back(rows)
        return self.model.logits(self.z)

    def feed(self, rows: list[int], picked: Tensor) -> None:
        self.picked = picked  # `logits` feeds them back, if there is a next draft

    def _feed_back(self, rows: list[int]) -> None:
        """Pair the newest z of these requests with the tokens that they have just drafted."""
        going_on = [self.rows.index(b) for b in rows]
        tokens = self.picked[going_on].clamp(min=0)  # −1: not finite, which the runner will raise
        spans = []
        for b in rows:
            spans.append((self.seqs[b], self.lengths[b], self.lengths[b] + 1))
            self.lengths[b] += 1
        self.z = self.model.rows(self.z[going_on], tokens, self.cache.metadata(spans))
        self.rows = rows


class EagleDrafter(SelfDrafter):
    """A head in the target's cache. It keeps the newest row of each text, to draft from."""

    def __init__(self, head: EagleHead, cache: Cache):
        super().__init__(head, cache)
        self.feature_layers = head.feature_layers
        self.newest: dict[Request, Tensor] = {}  # z of the newest row, [C]

    def most(self, request: Request, wanted: int) -> int:
        """No drafts without the newest row. Where the target lacks more than the last token, after
        a preemption, it reads all but that one first, which makes the row."""
        num_unread = len(request.tokens) - self.cache.length(request.seq)
        will_have_row = request in self.newest or num_unread > 1
        return super().most(request, wanted) if will_have_row else 0

    def chain(self, round: Round) -> Chain:
        newest = [self.newest[round.requests[b]] for b in round.drafting()]
        return HeadChain(self.model, self.cache, round, newest=torch.stack(newest))

    @torch.inference_mode()
    def learn(self, scheduled: Sequence[ScheduledRequest], features: Features) -> None:
        """Make the rows for the tokens that the target has read, and that stay in the texts."""
        requests = []
        # Of each request, for the tokens from start to stop that were read:
        pieces = []  # the tokens that follow each of them
        spans = []  # where their z are stored
        kept: list[int] = []  # their rows of the pass
        for item in scheduled:
            text = item.request.tokens
            stop = min(item.start + item.num_new_tokens, len(text) - 1)
            if stop > item.start:  # else no token follows: a prompt of one token, with max_tokens 0
                requests.append(item.request)
                pieces.append(text[item.start + 1 : stop + 1])
                spans.append((item.request.seq, item.start, stop))
                kept += item.tokens[: stop - item.start]
        if not requests:
            return
        device = self.model.device
        tokens, last = pack_tokens(pieces, device)
        f = self.model.combine(features.values[send(kept, device)])
        z = self.model.rows(f, tokens, self.cache.metadata(spans))
        self.newest.update(zip(requests, z[last]))

    def close(self, request: Request) -> None:
        self.newest.pop(request, None)
