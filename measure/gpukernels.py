"""A GPU's kernels: are they right, and how fast are they?

Right: kernels are compared with plain float32 operations on the same device, by ‖difference‖ / ‖float32 result‖;
attention for three texts in a step, with a token, a round of drafts and a chunk after their prompts. The embedded
model's greedy texts in float32 must equal the CPU's: with and without recordings, with drafts, with quantized caches.

Fast: figures are shares of the machine's roof, compared with PyTorch's kernels and plain operations. Attention over a
prompt is timed in rows or in blocks of 16 tokens, for the whole prompt at once or for its last chunk.

Invariant: a measurement that fails or cannot run has a note in its place, and the others go on.
"""

import time
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkpoint.config import Config
from generate import Engine, Model
from kernels import Linear, Ops, ops_for
from kvcache import KVCache, kv_bytes
from measure.gpumodels import Roof, Rows, Scale, device_seconds, random_numbers, relative, tried
from measure.pair import OWN, at_once
from paged import PagedCache
from quant import WIDTHS, quantize
from request import Request, Settings
from sampling import Keyed

FILTERS: dict[str, dict[str, float]] = {
    "no filter": {},
    "top-p 0.9": dict(top_p=0.9),
    "top-k 50, top-p 0.9": dict(top_k=50, top_p=0.9),
}
KINDS = (("16", "rows"), ("16", "blocks"), ("8", "blocks"), ("8/4", "blocks"), ("4", "blocks"))
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def random_qkv(config: Config, tokens: int, scale: Scale, seed: int = 0) -> list[Tensor]:
    """Random q: [T, H, D]; k, v: [T, G, D]."""
    H, G = config.num_attention_heads, config.num_key_value_heads
    qkv = random_numbers(scale, tokens, H + 2 * G, config.head_dim, seed=seed)
    return [x.contiguous() for x in qkv.split((H, G, G), 1)]


def layer_cache(
    config: Config, layout: str, texts: int, longest: int, scale: Scale, kv: str, ops: Ops
) -> Any:
    """A cache of one layer; layout: rows or blocks, kv: bits of keys and values."""
    G, D, *where = config.num_key_value_heads, config.head_dim, scale.device, scale.dtype
    return (
        KVCache(1, G, D, longest, texts, *where, WIDTHS[kv], ops)
        if layout == "rows"
        else PagedCache(
            1, G, D, texts * -(-longest // 16), 16, longest, *where, False, WIDTHS[kv], ops
        )
    )


def draw_tokens(ops: Ops, logits: Tensor, **filters: float) -> Tensor:
    """Tokens at temperature 0.6: [B, V] -> int64[B]."""
    rows = torch.arange(len(logits), device=logits.device)
    return Keyed(rows, rows, picks=ops.pick).pick(ops.probabilities(logits, 0.6, **filters))


# ---- Are they right? -------------------------------------------------------------------------------------------------


def smoke_rows(scale: Scale, roof: Roof) -> Rows:
    yield "Is everything right?", ("", "off by", "at most", "", "seconds")
    wrong = 0
    for name, most, run in checks(scale):
        start, off = time.perf_counter(), tried(run)
        wrong += (bad := isinstance(off, str) or not off <= most)
        yield [name, off, most, "WRONG" if bad else "ok", f"{time.perf_counter() - start:.1f}"]
    yield f"{wrong} are WRONG" if wrong else "all is as it should be"


def checks(scale: Scale) -> Rows:
    """(what is compared, the largest error allowed, a function that measures the error; call it before the next)."""
    ops, plain, exact = ops_for(scale.device), Ops(), 1e-4 if scale.dtype == torch.float32 else 1e-2
    for (name, config), kinds in zip(scale.models, (KINDS, KINDS[1::2])):
        C, q, cos, sin = (
            config.hidden_size,
            *random_qkv(config, 100, scale)[:1],
            *random_numbers(scale, 2, 100, 1, config.head_dim),
        )
        (x, delta), weight = random_numbers(scale, 2, 100, C), random_numbers(scale, C, C) / C**0.5
        for what, run, given in (
            ("norm", lambda ops, *x: ops.add_norm(*x, 1e-5)[1], (x, delta, weight[0])),
            ("rotation", lambda ops, *x: ops.rotate(*x), (q, cos, sin)),
            ("SwiGLU", lambda ops, x: ops.swiglu(x), (x,)),
        ):
            yield (
                f"{name}, {what}",
                exact,
                lambda: relative(run(ops, *given), run(plain, *(x.float() for x in given))),
            )
        layouts = (8, 16), (4, 16), ("fp8", 16), ("nf4", 16), (8, 8), ("fp8", 8)  # bits of W, of x
        for (bits, inputs), T in product(
            layouts, (1, 16, 100)
        ):  # rows: one, some, and more than the kernel takes
            kept = Linear(quantize(weight, bits)._replace(inputs=inputs))
            yield (
                f"{name}, {T} rows{' of 8 bits' * (inputs == 8)} by {bits} bits",
                exact,
                lambda: relative(
                    ops.linear(x[:T], ops.prepare(kept, scale.dtype, "o")),
                    plain.linear(x[:T].float(), kept),
                ),
            )
        for kv, layout in kinds:
            both = cache(partial(three_texts, config, kv, layout, scale))
            yield (
                f"{name}, stored, KV {kv} in {layout}",
                1e-3,
                lambda: relative(*(stored for stored, _ in both())),
            )
            yield (
                f"{name}, attention, KV {kv} in {layout}",
                exact,
                lambda: relative(*(out for _, out in both())),
            )
    logits = 4 * random_numbers(scale, 16, config.vocab_size)
    for name, filters in FILTERS.items():
        drawn = partial(draw_tokens, logits=logits, **filters)
        yield f"tokens drawn, {name}", 0, lambda: (drawn(ops) != drawn(plain)).sum().item()
    ways = dict.fromkeys(("recorded", "not recorded")) | {"with drafts": "tiny-draft"}
    for kv, (how, draft) in product(("16", "8", "8/4", "4"), ways.items()):
        yield (
            f"texts of tiny, KV {kv}, {how}",
            0,
            lambda: sum(
                a != b
                for a, b in zip(
                    texts(scale, scale.device, kv, draft, "not" not in how), texts(scale, "cpu", kv)
                )
            ),
        )
    if scale.device == "cuda":
        yield (
            "kernels compiled after a warm-up",
            0,
            lambda: compiled_after_warm_up(Model.load("tiny", scale.device, torch.float32)),
        )


def compiled_after_warm_up(model: Model) -> int:
    """How many kernels Triton compiles for texts of several lengths and settings, once `gpu.warm_up` has run."""
    from triton import knobs

    from gpu import warm_up

    compiled, engine = list[Any](), Engine(model, None, 400, 100, 4)
    requests = [
        Request(
            [1] * n, Settings(0.7 * (n % 2), top_k=n % 3 or None, seed=n, max_tokens=6), model.ends
        )
        for n in (1, 7, 20, 70)
    ]
    warm_up(model.llama, engine.caches[0])
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *_, **how: compiled.append(how)
    try:
        at_once(engine, requests)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    return len(compiled)


def three_texts(config: Config, kv: str, layout: str, scale: Scale) -> list[tuple[Tensor, Tensor]]:
    """(all stored keys and values, attention of the newest tokens): by this GPU's operations, and plain in float32."""
    found, n = [], min(700, scale.past)
    for ops, cast in ((ops_for(scale.device), Tensor.contiguous), (Ops(), Tensor.float)):
        kept = layer_cache(config, layout, 3, 2 * n, scale, kv, ops)
        seqs = [kept.open(())[0] for _ in range(3)]
        for counts in ((n, n // 8, n // 16), (1, 4, n // 5)):
            step = kept.extend([(seq, range(count)) for seq, count in zip(seqs, counts)])
            out = ops.look_back(
                *map(cast, random_qkv(config, sum(counts), scale, counts[0])), step, 0
            )
        stored = [
            store.read(0, torch.cat(step.seen), torch.float32) for store in (kept.keys, kept.values)
        ]
        found.append((torch.cat(stored), out))
    return found


@cache
def texts(
    scale: Scale, device: str, kv: str, draft: str | None = None, records: bool = True
) -> list[list[int]]:
    """Greedy texts of tiny, prompts included."""
    model, small = (name and Model.load(name, device, torch.float32) for name in ("tiny", draft))
    for one in filter(None, (model, small)):
        one.llama.ops.records = records  # gpu/__init__.py: whether passes are recorded
    settings = Settings(
        0.0, seed=0, max_tokens=(count := min(32, scale.count)), gamma=3 if draft else 0
    )
    requests = [Request(model.encode(prompt), settings, model.ends) for prompt in OWN[:2]]
    longest = count + max(len(one.tokens) for one in requests)
    at_once(Engine(model, small, 2 * longest, longest, 2, kv_bits=kv), requests)
    return [one.tokens for one in requests]


# ---- How fast are they? ----------------------------------------------------------------------------------------------


def kernel_rows(scale: Scale, roof: Roof) -> Rows:
    yield (
        "Kernels alone",
        ("", "ms", "of the read bandwidth", "of the rate of products", "times the speed"),
    )
    for _, config in scale.models:
        yield from prefill_rows(config, scale, roof)
    for rows in (query_rows, product_rows, sampling_rows):
        yield from rows(scale.models[0][1], scale, roof)


def prefill_rows(config: Config, scale: Scale, roof: Roof) -> Rows:
    """Store and attend; for whole prompts compared with PyTorch's attention, which need not store keys and values."""
    H, D, ops = config.num_attention_heads, config.head_dim, ops_for(scale.device)
    for n in scale.prompts:
        qkv, first = random_qkv(config, n, scale), 0.0
        for layout, new in (
            ("rows", n),
            ("blocks", n),
            ("rows", min(512, n // 2)),
            ("blocks", min(512, n // 2)),
        ):
            cache, past = layer_cache(config, layout, 1, n, scale, "16", ops), n - new
            seq, _ = cache.open(())
            if past:
                ops.look_back(*(x[:past] for x in qkv), cache.extend([(seq, range(past))]), 0)
            step = cache.extend([(seq, range(past, n))])
            ours = device_seconds(partial(ops.look_back, *(x[past:] for x in qkv), step, 0), scale)
            rate = 2 * (n * n - past * past) * H * D / ours
            first, beside = first or rate, [f"{rate / first:.2f} of the first"] if first else []
            for name, backend in [] if past else BACKENDS.items():
                theirs = tried(
                    partial(library_seconds, backend, [x.transpose(0, 1)[None] for x in qkv], scale)
                )
                beside += [
                    f"no {name}: {theirs[:60]}"
                    if isinstance(theirs, str)
                    else f"{theirs / ours:.2f} of {name}"
                ]
            yield [
                f"attention, {new} queries, {n} keys, d = {D}, {layout}",
                1e3 * ours,
                "",
                f"{rate / roof[1]:.0%}",
                ", ".join(beside),
            ]


def library_seconds(backend: SDPBackend, qkv: list[Tensor], scale: Scale) -> float:
    with sdpa_kernel(backend):
        return device_seconds(
            partial(F.scaled_dot_product_attention, *qkv, is_causal=True, enable_gqa=True), scale
        )


def query_rows(config: Config, scale: Scale, roof: Roof) -> Rows:
    """Attention of one query in each of many texts, in rows and blocks, 16 bits and fewer; speed-ups over the first."""
    first, past, texts, ops = 0.0, scale.past, scale.streams[-1], ops_for(scale.device)
    for kv, layout in KINDS:
        cache = layer_cache(config, layout, texts, past, scale, kv, ops)
        seqs = [cache.open(())[0] for _ in range(texts)]
        for i, seq in enumerate(seqs):
            ops.look_back(
                *random_qkv(config, past - 1, scale, i), cache.extend([(seq, range(past - 1))]), 0
            )
        new, step = random_qkv(config, texts, scale), cache.extend([(seq, [0]) for seq in seqs])
        spent, G = (
            device_seconds(partial(ops.look_back, *new, step, 0), scale),
            config.num_key_value_heads,
        )
        first, read = (
            first or spent,
            kv_bytes(1, G, config.head_dim, texts * past, scale.dtype, WIDTHS[kv]),
        )
        yield [
            f"attention, {texts} x 1 query, {past} keys, d = {config.head_dim}, {layout}, KV {kv}",
            1e3 * spent,
            f"{read / spent / roof[0]:.0%}",
            "",
            f"{first / spent:.2f} of the first",
        ]


def product_rows(config: Config, scale: Scale, roof: Roof) -> Rows:
    """The gate and up product, over more layers than a GPU's cache holds; speed-ups over 16 bits."""
    first, ops, K, N = (
        dict[int, float](),
        ops_for(scale.device),
        config.hidden_size,
        2 * config.intermediate_size,
    )
    weight = random_numbers(scale, N, K) / K**0.5
    for bits in (16, 8, "fp8", 4):
        kept = [
            weight.clone() if bits == 16 else quantize(weight, bits) for _ in range(scale.turns)
        ]
        layers, size = [ops.prepare(Linear(one), scale.dtype, "o") for one in kept], kept[0].nbytes
        for T in (1, 8, 64):
            x = random_numbers(scale, T, K, seed=T)
            spent = device_seconds(lambda: [ops.linear(x, layer) for layer in layers], scale) / len(
                layers
            )
            yield [
                f"product, {T} rows of {K} to {N}, {bits} bits",
                1e3 * spent,
                f"{size / spent / roof[0]:.0%}",
                f"{2 * T * N * K / spent / roof[1]:.0%}",
                f"{first.setdefault(T, spent) / spent:.2f} of 16 bits",
            ]


def sampling_rows(config: Config, scale: Scale, roof: Roof) -> Rows:
    """Sampling from one row of logits and from many; the share is that of reading the logits once."""
    V, ops = config.vocab_size, ops_for(scale.device)
    for B in (scale.streams[0], scale.streams[-1]):
        logits = 4 * random_numbers(scale, B, V)
        for name, filters in FILTERS.items():
            ours, theirs = (
                device_seconds(partial(run, logits, **filters), scale)
                for run in (partial(draw_tokens, ops), by_sorting)
            )
            yield [
                f"sampling, {B} of {V} candidates, {name}",
                1e3 * ours,
                f"{logits.nbytes / ours / roof[0]:.0%}",
                "",
                f"{theirs / ours:.2f} of plain operations",
            ]


def by_sorting(logits: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Sampling by softmax, sort and exponential noise (torch.multinomial would wait for the device)."""
    probs = (logits.float() / 0.6).softmax(-1)
    if top_k is None and top_p == 1:
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    probs, tokens = probs.sort(descending=True)
    probs = probs[:, :top_k] / probs[:, :top_k].sum(-1, keepdim=True)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0)
    return tokens.gather(
        1, (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
    )[:, 0]
