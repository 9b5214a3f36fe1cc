"""A GPU's kernels alone: attention and products, as shares of what the machine can do, and beside the plain operations they stand for.

    prefill     one prompt stored and read at once, beside the library's attention: a share of the rate of bf16 products
    decode      one query of each of many texts over 16, 8 and 4 bits: a share of the read bandwidth
    products    gate and up by rows and bits: a share of both
    sampling    from logits to tokens, beside softmax, a sort and torch.multinomial
    greedy      the embedded pair in float32, token by token beside the CPU

An error is the length of the difference to what float32 gives, over the length of that. There are two where numbers were rounded: to the
numbers as they were, which is what rounding costs, and to the rounded ones, which is the kernel's own.

Invariant: greedy texts are the CPU's; where one parts from it the CPU's two best logits are nearly equal, and the row says by how much.

Not covered: what fused.py does.

    n queries · m keys · H query heads · G key/value heads · D head size
"""
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from engine import Engine
from kernels import attention
from kvcache import KVCache, kv_bytes
from kvquant import GROUP, WIDTHS, store
from matmul import Linear
from measure.gpumodels import Case, Roof, Scale, clock, relative
from paged import PagedCache
from pretrained import Model
from quant import dequantize, quantize
from quantmatmul import QuantizedLinear
from request import Request, Settings
from sampling import Keyed, probabilities

PROMPTS = ("Once upon a time", "The little dog", "Lily saw", "One day, Tom", "Mom said", "A big red ball", "In the park", "The sun was")


def kernels(scale: Scale, roof: Roof) -> Case:
    attend = [row for name, config in scale.models for row in prefill(config, scale, roof)] + decode_attention(scale.models[0][1], scale, roof)
    return dict(title="Kernels: shares of the machine's roof, beside the library's and plain operations", notes=[],
                headers=("operation", "ms", "of the read bandwidth", "of the bf16 rate", "times the library's speed", "error"),
                rows=[*attend, *products(scale, roof), *sampling(scale, roof), *greedy_rows(scale)])


# ---- Attention ------------------------------------------------------------------------------------------------------------------

def heads(config: Config, tokens: int, scale: Scale, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(scale.device).manual_seed(seed)
    make = partial(torch.randn, device=scale.device, dtype=scale.dtype, generator=generator)
    return (make(tokens, config.num_attention_heads, config.head_dim),                                      # [T, H, D]
            *(make(tokens, config.num_key_value_heads, config.head_dim) for _ in range(2)))                 # [T, G, D]


def prefill(config: Config, scale: Scale, roof: Roof) -> list[list[Any]]:
    """A prompt read at once: store and attend. Beside the library's own, on keys and values that need no storing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    rows = []
    backends = [("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)] if scale.device == "cuda" else [("math", SDPBackend.MATH)]
    for n in scale.prompts:
        q, k, v = heads(config, n, scale)
        cache = KVCache(1, config.num_key_value_heads, config.head_dim, n, 1, scale.device, scale.dtype)
        step = cache.extend([(cache.open(())[0], range(n))])
        ours = clock(lambda: step.attend(0, q, k, v), scale)
        error = relative(step.attend(0, q, k, v)[-64:], attention(q[-64:].float(), k.float().transpose(0, 1), v.float().transpose(0, 1)))
        library = []
        for name, backend in backends:
            with sdpa_kernel(backend):
                time_ = clock(lambda: F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True), scale)
            library.append(f"{time_ / ours:.2f} of {name}")
        rate = 2 * n * n * config.num_attention_heads * config.head_dim / ours
        rows.append([f"attention, {n} queries, d = {config.head_dim}", 1e3 * ours, "", f"{rate / roof[1]:.0%}", ", ".join(library), f"{error:.1e}"])
    return rows


def cache_of(config: Config, kv: str, layout: str, scale: Scale) -> KVCache | PagedCache:
    """Room for `scale.texts` texts of `scale.past` tokens, in one layer."""
    G, D, past, bits = config.num_key_value_heads, config.head_dim, scale.past, WIDTHS[kv]
    if layout == "rows":
        return KVCache(1, G, D, past, scale.texts, scale.device, scale.dtype, bits)
    blocks = scale.texts * -(-past // 16)
    return PagedCache(1, G, D, blocks, 16, past, scale.device, scale.dtype, prefix_sharing=False, bits=bits)


def decode_attention(config: Config, scale: Scale, roof: Roof) -> list[list[Any]]:
    """One query of each of many texts, rows and blocks, 16 bits and fewer. Times the speed of the first."""
    rows, first, past = [], 0.0, scale.past
    for kv, layout in (("16", "rows"), ("16", "blocks"), ("8", "blocks"), ("8/4", "blocks"), ("4", "blocks")):
        cache = cache_of(config, kv, layout, scale)
        seqs = [cache.open(())[0] for _ in range(scale.texts)]
        for i, seq in enumerate(seqs):
            cache.extend([(seq, range(past - 1))]).attend(0, *heads(config, past - 1, scale, i))
        new = heads(config, scale.texts, scale)
        step = cache.extend([(seq, [0]) for seq in seqs])
        spent = clock(lambda: step.attend(0, *new), scale)
        share = kv_bytes(1, config.num_key_value_heads, config.head_dim, scale.texts * past, scale.dtype, WIDTHS[kv]) / spent / roof[0]
        first = first or spent
        rows.append([f"attention, {scale.texts} x 1 query, {past} keys, d = {config.head_dim}, {layout}, KV {kv}", 1e3 * spent, f"{share:.0%}", "",
                     f"{first / spent:.2f} of the first", errors(step.attend(0, *new), new, config, kv, scale)])
        del cache, step
    return rows


def errors(out: Tensor, new: tuple[Tensor, Tensor, Tensor], config: Config, kv: str, scale: Scale, texts: int = 4) -> str:
    """Of the first texts, out: [T, H, D], beside float32's attention over the keys and values as they were; and over those that are stored."""
    found, kinds = out[:texts].float(), dict[str, list[Tensor]](original=[])
    for i in range(min(texts, len(out))):
        q, *own = (x[i:i + 1] for x in new)
        k, v = (torch.cat((x, one)).transpose(0, 1) for x, one in zip(heads(config, scale.past - 1, scale, i)[1:], own))     # [G, m, D]
        kinds["original"].append(attention(q.float(), k.float(), v.float()))
        if kv != "16":
            kept = (stored(*x) for x in zip((k, v), WIDTHS[kv], (GROUP, None)))
            kinds.setdefault("stored", []).append(attention(q.float(), *kept))
    told = {kind: relative(found, torch.cat(wanted)) for kind, wanted in kinds.items()}
    return f"{told['original']:.1e}" + (f", {told['stored']:.1e} beside what is stored" if "stored" in told else "")


def stored(x: Tensor, bits: int, group: int | None) -> Tensor:
    """Vectors as a cache of so many bits has them, in float32."""
    place = store(x.shape, bits, x.device, x.dtype, group)
    place.copy_(x)
    return place.to(torch.float32)


# ---- Products -------------------------------------------------------------------------------------------------------------------

def products(scale: Scale, roof: Roof) -> list[list[Any]]:
    """Gate and up, layer after layer, more of them than a GPU's cache holds. Times the speed of 16 bits."""
    (_, config), rows, first = scale.models[0], [], dict[int, float]()
    K, N = config.hidden_size, 2 * config.intermediate_size
    weight = torch.randn(N, K, device=scale.device, dtype=scale.dtype) / K**0.5
    for bits in (16, 8, 4):
        where = dict(device=scale.device, dtype=scale.dtype)
        layers = [Linear(K, N, **where) if bits == 16 else QuantizedLinear(K, N, bits=bits, **where) for _ in range(scale.turns)]
        rounded = quantize(weight, bits) if bits != 16 else None
        for layer in layers:
            layer.weight.copy_(weight) if rounded is None else layer.put(rounded)
            layer.pack()
        read, numbers = (weight.nbytes, weight.float()) if rounded is None else (layers[0].nbytes, dequantize(*rounded))
        for T in (1, 8, 64):
            x = torch.randn(T, K, device=scale.device, dtype=scale.dtype)
            spent = clock(lambda: [layer(x) for layer in layers], scale) / len(layers)
            first.setdefault(T, spent)
            out, own = layers[0](x), f"{relative(layers[0](x), x.float() @ numbers.T):.1e}"
            rows.append([f"product, {T} rows of {K} to {N}, {bits} bits", 1e3 * spent, f"{read / spent / roof[0]:.0%}",
                         f"{2 * T * N * K / spent / roof[1]:.0%}", f"{first[T] / spent:.2f} of 16 bits",
                         own if rounded is None else f"{relative(out, x.float() @ weight.float().T):.1e}, {own} beside what is stored"])
    return rows


# ---- Sampling -------------------------------------------------------------------------------------------------------------------

FILTERS: dict[str, dict[str, float]] = {"no filter": {}, "top-p 0.9": dict(top_p=0.9), "top-k 50, top-p 0.9": dict(top_k=50, top_p=0.9)}


def logits_of(B: int, V: int, scale: Scale, sharpness: float = 4.0) -> Tensor:
    """[B, V], normally distributed."""
    return sharpness * torch.randn(B, V, device=scale.device, dtype=scale.dtype, generator=torch.Generator(scale.device).manual_seed(B))


def sampling(scale: Scale, roof: Roof) -> list[list[Any]]:
    """Tokens of one row and of many, at temperature 0.6. The share is of reading the logits once."""
    rows, V = [], scale.models[0][1].vocab_size
    for B in (scale.streams[0], scale.streams[-1]):
        logits = logits_of(B, V, scale)
        for name, setting in FILTERS.items():
            coin, beside = (Keyed(torch.arange(B, device=where), torch.arange(B, device=where)) for where in (scale.device, "cpu"))
            ours, theirs = (clock(run, scale) for run in (lambda: coin.pick(probabilities(logits, 0.6, **setting)), lambda: by_sorting(logits, 0.6, **setting)))
            wanted = beside.pick(probabilities(logits.cpu(), 0.6, **setting))
            differ = int((coin.pick(probabilities(logits, 0.6, **setting)).cpu() != wanted).sum())
            rows.append([f"sampling, {B} of {V} candidates, {name}", 1e3 * ours, f"{logits.nbytes / ours / roof[0]:.0%}", "",
                         f"{theirs / ours:.2f} of plain operations", f"{differ} of {B} tokens are not the CPU's"])
    return rows


def by_sorting(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """As one writes it with the library."""
    probs = (logits.float() / temperature).softmax(-1)
    if top_k is not None:
        probs = torch.where(probs >= probs.topk(min(top_k, probs.shape[-1])).values[:, -1:], probs, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    if top_p is not None:
        ordered, places = probs.sort(descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0)
        probs = torch.zeros_like(probs).scatter_(-1, places, ordered)
    return torch.multinomial(probs, 1)[:, 0]


# ---- The same tokens ------------------------------------------------------------------------------------------------------------

def greedy_rows(scale: Scale) -> list[list[Any]]:
    """The embedded pair in float32 on this device: whose greedy tokens are not the CPU's."""
    rows, count = [], 8 if scale.turns == 1 else 64
    for draft, what in ((None, "alone"), ("tiny-draft", "with tiny-draft, 3 drafts a round")):
        gaps = partings(scale.device, draft, count)
        told = f"{len(gaps)} of {len(PROMPTS)} differ" + (f", the CPU's two best logits {max(gaps):.1e} apart" if gaps else "")
        rows.append([f"greedy texts of tiny in float32, {count} tokens, {what}, beside the CPU's", "", "", "", "", told])
    return rows


def partings(device: str, draft: str | None, count: int) -> list[float]:
    """Of each text that is not the CPU's: how far apart the CPU's two best logits are where they part."""
    model = Model.load("tiny", "cpu", torch.float32)
    plain, found = greedy(model, None, count), greedy(Model.load("tiny", device, torch.float32), draft and Model.load(draft, device, torch.float32), count)
    return [gap(model, a, b) for a, b in zip(plain, found) if a != b]


def greedy(model: Model, draft: Model | None, count: int) -> list[list[int]]:
    """The texts with their prompts. TF32, which has 10 bits of 23, is off."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        requests = [Request(model.encode(prompt), Settings(0.0, seed=0, max_tokens=count, gamma=3 if draft else 0), model.ends) for prompt in PROMPTS]
        longest = count + max(len(one.tokens) for one in requests)
        for _ in Engine(model, draft, longest * len(requests), longest, len(requests)).batch.run(requests):
            pass
    finally:
        torch.set_float32_matmul_precision(before)
    return [one.tokens for one in requests]


def gap(model: Model, a: Sequence[int], b: Sequence[int]) -> float:
    same = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    best = model.llama(torch.tensor(a[:same]), rows=slice(-1, None))[0].topk(2).values
    return (best[0] - best[1]).item()
