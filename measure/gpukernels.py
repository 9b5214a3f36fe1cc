"""A GPU's kernels alone: attention, products and sampling, as shares of the machine's roof, beside plain operations.

An error is ‖difference to float32‖ / ‖float32‖. Of rounded numbers there are two: to the numbers as they were, the cost
of rounding, and to the rounded ones, the kernel's own.

    n queries · m keys · H query heads · G key/value heads · D head size

Invariant: where a greedy text is not the CPU's, a row says how near the CPU's two best logits are.
"""
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from generate import Engine, Model
from kernels import Linear, Ops, Step, attention, ops_for
from kvcache import KVCache, kv_bytes
from measure.gpumodels import Case, Roof, Scale, device_seconds, random_numbers, relative
from measure.pair import OWN, at_once
from paged import PagedCache
from quant import WIDTHS, quantize
from request import Request, Settings
from sampling import Keyed
from weights import Config

Rows = list[list[Any]]
FILTERS: dict[str, dict[str, float]] = {"no filter": {}, "top-p 0.9": dict(top_p=0.9),
                                        "top-k 50, top-p 0.9": dict(top_k=50, top_p=0.9)}


def kernel_case(scale: Scale, roof: Roof) -> Case:
    attend = [row for _, config in scale.models for row in prefill_rows(config, scale, roof)]
    attend += decode_rows(scale.models[0][1], scale, roof)
    return dict(title="Kernels: shares of the machine's roof, beside the library's and plain operations", notes=[],
                headers=("operation", "ms", "of the read bandwidth", "of the bf16 rate", "times the library's speed",
                         "error"),
                rows=[*attend, *product_rows(scale, roof), *sampling_rows(scale, roof), *greedy_rows(scale)])


def random_qkv(config: Config, tokens: int, scale: Scale, seed: int = 0) -> list[Tensor]:
    """q: [T, H, D]; k, v: [T, G, D]."""
    H, G = config.num_attention_heads, config.num_key_value_heads
    qkv = random_numbers(scale, tokens, H + 2 * G, config.head_dim, seed=seed)
    return [x.contiguous() for x in qkv.split((H, G, G), 1)]


def prefill_rows(config: Config, scale: Scale, roof: Roof) -> Rows:
    """A prompt read at once: store and attend. Beside the library's own, of keys and values that need no storing."""
    H, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows, ops, library_attention = [], ops_for(scale.device), F.scaled_dot_product_attention
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    for n in scale.prompts:
        q, k, v = random_qkv(config, n, scale)
        cache = KVCache(1, G, D, n, 1, scale.device, scale.dtype, ops=ops)
        run = partial(ops.look_back, q, k, v, cache.extend([(cache.open(())[0], range(n))]), 0)
        ours, own = device_seconds(run, scale), [x.transpose(0, 1)[None] for x in (q, k, v)]
        error = relative(run()[-64:], attention(q[-64:].float(), *(x.float().transpose(0, 1) for x in (k, v))))
        library = []
        for name, backend in backends.items() if scale.device == "cuda" else [("math", SDPBackend.MATH)]:
            with sdpa_kernel(backend):
                theirs = device_seconds(partial(library_attention, *own, is_causal=True, enable_gqa=True), scale)
            library.append(f"{theirs / ours:.2f} of {name}")
        rows.append([f"attention, {n} queries, d = {D}", 1e3 * ours, "", f"{2 * n * n * H * D / ours / roof[1]:.0%}",
                     ", ".join(library), f"{error:.1e}"])
    return rows


def decode_rows(config: Config, scale: Scale, roof: Roof) -> Rows:
    """One query of each of many texts, rows and blocks, 16 bits and fewer. Times the speed of the first."""
    rows, first, past, ops = [], 0.0, scale.past, ops_for(scale.device)
    G, D, where = config.num_key_value_heads, config.head_dim, (scale.device, scale.dtype)
    for kv, layout in (("16", "rows"), ("16", "blocks"), ("8", "blocks"), ("8/4", "blocks"), ("4", "blocks")):
        cache = (KVCache(1, G, D, past, scale.texts, *where, WIDTHS[kv], ops) if layout == "rows" else
                 PagedCache(1, G, D, scale.texts * -(-past // 16), 16, past, *where, False, WIDTHS[kv], ops))
        seqs = [cache.open(())[0] for _ in range(scale.texts)]
        for i, seq in enumerate(seqs):
            ops.look_back(*random_qkv(config, past - 1, scale, i), cache.extend([(seq, range(past - 1))]), 0)
        new = random_qkv(config, scale.texts, scale)
        step = cache.extend([(seq, [0]) for seq in seqs])
        run = partial(ops.look_back, *new, step, 0)
        spent = device_seconds(run, scale)
        first, read = first or spent, kv_bytes(1, G, D, scale.texts * past, scale.dtype, WIDTHS[kv])
        rows.append([f"attention, {scale.texts} x 1 query, {past} keys, d = {D}, {layout}, KV {kv}", 1e3 * spent,
                     f"{read / spent / roof[0]:.0%}", "", f"{first / spent:.2f} of the first",
                     attention_errors(run(), new, step, config, kv, scale)])
        del cache, step, run
    return rows


def attention_errors(out: Tensor, new: list[Tensor], step: Step, config: Config, kv: str, scale: Scale) -> str:
    """out: [T, H, D], beside float32's attention over keys and values as made, of four texts, and as stored."""
    q, wanted = new[0].float(), []
    for i, one in enumerate(q[:4]):
        made = (torch.cat((x, x_[i:i + 1])).float().transpose(0, 1)                         # [G, m, D]
                for x, x_ in zip(random_qkv(config, scale.past - 1, scale, i)[1:], new[1:]))
        wanted.append(attention(one[None], *made))
    told, stored = f"{relative(out[:4], torch.cat(wanted)):.1e}", Ops().look_back(q, *new[1:], step, 0)
    return told if kv == "16" else f"{told}, {relative(out, stored):.1e} beside what is stored"


def product_rows(scale: Scale, roof: Roof) -> Rows:
    """Gate and up, layer after layer, more of them than a GPU's cache holds. Times the speed of 16 bits."""
    (_, config), rows, first, ops = scale.models[0], [], dict[int, float](), ops_for(scale.device)
    K, N = config.hidden_size, 2 * config.intermediate_size
    weight = random_numbers(scale, N, K) / K**0.5
    for bits in (16, 8, 4):
        kept = weight if bits == 16 else quantize(weight, bits)
        numbers = weight.float() if bits == 16 else kept.rows(slice(None))
        layers = [ops.prepare(Linear(deepcopy(kept)), scale.dtype) for _ in range(scale.turns)]
        for T in (1, 8, 64):
            x = random_numbers(scale, T, K, seed=T)
            spent = device_seconds(lambda: [ops.linear(x, layer) for layer in layers], scale) / len(layers)
            out, wide = ops.linear(x, layers[0]), x.float()
            error, own = (f"{relative(out, wide @ w.float().T):.1e}" for w in (weight, numbers))
            read, rate = kept.nbytes / spent / roof[0], 2 * T * N * K / spent / roof[1]
            rows.append([f"product, {T} rows of {K} to {N}, {bits} bits", 1e3 * spent, f"{read:.0%}", f"{rate:.0%}",
                         f"{first.setdefault(T, spent) / spent:.2f} of 16 bits",
                         error + f", {own} beside what is stored" * (bits < 16)])
    return rows


def draw_tokens(ops: Ops, logits: Tensor, **filters: float) -> Tensor:
    """Tokens at temperature 0.6: [B, V] -> int64[B]."""
    rows = torch.arange(len(logits), device=logits.device)
    return Keyed(rows, rows, picks=ops.pick).pick(ops.probabilities(logits, 0.6, **filters))


def sampling_rows(scale: Scale, roof: Roof) -> Rows:
    """Tokens of one row and of many. The share is of reading the logits once."""
    rows, V, ops = [], scale.models[0][1].vocab_size, ops_for(scale.device)
    for B in (scale.streams[0], scale.streams[-1]):
        logits = 4 * random_numbers(scale, B, V)
        for name, filters in FILTERS.items():
            ours, theirs = (device_seconds(partial(run, logits, **filters), scale)
                            for run in (partial(draw_tokens, ops), by_sorting))
            wanted = draw_tokens(Ops(), logits.cpu(), **filters)
            differ = int((draw_tokens(ops, logits, **filters).cpu() != wanted).sum())
            rows.append([f"sampling, {B} of {V} candidates, {name}", 1e3 * ours,
                         f"{logits.nbytes / ours / roof[0]:.0%}", "", f"{theirs / ours:.2f} of plain operations",
                         f"{differ} of {B} tokens are not the CPU's"])
    return rows


def by_sorting(logits: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The same by softmax, sort and torch.multinomial."""
    probs = (logits.float() / 0.6).softmax(-1)
    if top_k is None and top_p == 1:
        return torch.multinomial(probs, 1)[:, 0]
    probs, tokens = probs.sort(descending=True)
    probs = probs[:, :top_k] / probs[:, :top_k].sum(-1, keepdim=True)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0)
    return tokens.gather(1, torch.multinomial(probs, 1))[:, 0]


def greedy_rows(scale: Scale) -> Rows:
    """The embedded pair in float32 on this device: how many greedy texts are not the CPU's."""
    rows, count = [], 8 if scale.turns == 1 else 64
    for draft, what in ((None, "alone"), ("tiny-draft", "with tiny-draft, 3 drafts a round")):
        gaps = partings(scale.device, draft, count)
        told = f"{len(gaps)} of {len(OWN)} differ" + (f", two logits {max(gaps):.1e} apart" if gaps else "")
        rows.append([f"greedy texts of tiny in float32, {count} tokens, {what}, beside the CPU's", *[""] * 4, told])
    return rows


def partings(device: str, draft: str | None, count: int) -> list[float]:
    """Of each text that is not the CPU's: how far apart the CPU's two best logits are at the first difference."""
    own, model, small = (name and Model.load(name, where, torch.float32)
                         for name, where in (("tiny", "cpu"), ("tiny", device), (draft, device)))
    gaps = []
    for a, b in zip(greedy(own, None, count), greedy(model, small, count)):
        if a != b:
            same = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
            best, second = own.llama(torch.tensor(a[:same]), rows=slice(-1, None))[0].topk(2).values.tolist()
            gaps.append(best - second)
    return gaps


def greedy(model: Model, draft: Model | None, count: int) -> list[list[int]]:
    """The texts with their prompts."""
    settings = Settings(0.0, seed=0, max_tokens=count, gamma=3 if draft else 0)
    requests = [Request(model.encode(prompt), settings, model.ends) for prompt in OWN]
    longest = count + max(len(one.tokens) for one in requests)
    at_once(Engine(model, draft, longest * len(requests), longest, len(requests)), requests)
    return [one.tokens for one in requests]
