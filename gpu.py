"""The claims on a GPU: models of 1B and 8B shapes, with random weights that are made on the device.

    python bench.py --gpu kernels          attention and products alone, as shares of what the machine can do
    python bench.py --gpu decode           one stream, 16, 8 and 4 bits
    python bench.py --gpu speculation      1B shapes draft for 8B shapes
    python bench.py --gpu serving          many requests at a time

How fast a model runs does not depend on what its weights are; so nothing is downloaded, and every figure is a share of what this very
machine did a moment before: bytes read a second, and bf16 operations a second. Everything goes through the path that generate.py takes:
the caches' `attend`, the layers' products, `Decoder` and `Batcher`. What is made faster there is measured here, unchanged.

Random weights never agree, so in `speculation` a coin of our own accepts each draft with a fixed probability α, and all else is as it is:
drafting, verification, sampling, both caches. The table says so.

With --quick the same runs with toy shapes, on a CPU if there is no GPU: its figures mean nothing.

Invariant: a case is a title, headers and rows, whatever the machine; a peer that is not installed is named.

Not covered: several GPUs.

    n queries · m keys · H query heads · G key/value heads · D head size
"""
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config, Quantization
from engine import Engine
from gamma import expected_tokens
from kernels import attention
from kvcache import KVCache, kv_bytes
from kvquant import WIDTHS
from matmul import Linear, QuantizedLinear
from measure import Served, at_once, seconds_a_token, serve, spread, weight_bytes
from model import Llama
from paged import PagedCache
from peers import INSTALL, installed, random_transformers
from quant import quantize
from request import Request, Settings
from sampling import Keyed

Case = dict[str, Any]                                   # title, headers, rows, notes

LLAMA_8B = Config(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0)
LLAMA_1B = Config(128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_word_embeddings=True)
TOY = Config(64, 32, 64, 2, 4, 2, 8, 512)


@dataclass(frozen=True)
class Scale:
    """How large everything is."""
    models: tuple[tuple[str, Config], ...] = (("8B", LLAMA_8B), ("1B", LLAMA_1B))
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    prompts: tuple[int, ...] = (4096, 8192, 16384)      # attention's, of one text
    texts: int = 64                                     # attention's, of one query each,
    past: int = 8192                                    # with so many keys
    context: int = 1024
    count: int = 128
    alphas: tuple[float, ...] = (0.5, 0.7, 0.9)
    gammas: tuple[int, ...] = (2, 4)
    streams: tuple[int, ...] = (1, 8, 64)
    requests: int = 256
    shortest: int = 100
    longest: int = 1024
    long: int = 8192
    read: int = 1 << 32                                 # bytes by which the bandwidth is measured
    turns: int = 3


QUICK = Scale((("toy", TOY), ("toy draft", replace(TOY, num_hidden_layers=1))), "cpu", torch.float32, (32,), 3, 24, 16, 6, (0.7,), (2,), (1, 2), 4, 4, 12, 48,
              1 << 22, 1)


# ---- The machine ----------------------------------------------------------------------------------------------------------------

def wait(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def clock(run: Callable[[], object], scale: Scale, atleast: float = 0.02) -> float:
    """Median seconds of `run()`, the device waited for, so often at a time that launching it does not count."""
    def once(repeats: int) -> float:
        wait(scale.device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        wait(scale.device)
        return (time.perf_counter() - start) / repeats
    once(2)
    repeats = max(1, round(atleast / once(1))) if scale.turns > 1 else 1
    return median(once(repeats) for _ in range(2 * scale.turns + 1))


def roofs(scale: Scale) -> tuple[float, float]:
    """(bytes read a second, operations a second of a large product): what nothing here can be faster than."""
    data = torch.ones(scale.read // 4, device=scale.device)
    size = 8192 if scale.device == "cuda" else 64
    a, b = (torch.randn(size, size, device=scale.device, dtype=scale.dtype) for _ in range(2))
    return data.nbytes / clock(data.sum, scale), 2 * size**3 / clock(lambda: a @ b, scale)


def random_model(config: Config, bits: int, scale: Scale) -> Llama:
    """Random weights, or random integers with scales that make numbers of their size."""
    if bits == 16:
        return Llama(config, scale.device, scale.dtype, seed=0).pack()
    llama = Llama(config.quantized(Quantization(bits)), scale.device, scale.dtype, seed=None)
    for name, place in llama.places().items():
        if place.dtype in (torch.int8, torch.uint8):
            place.random_(-127 if place.dtype == torch.int8 else 0, 128 if place.dtype == torch.int8 else 256)
        elif name.endswith("_scale"):
            place.fill_(0.02 / (73 if bits == 8 or "embed" in name or "head" in name else 4.6))         # an even spread has this deviation
        else:
            place.fill_(8 if place.dtype == torch.int16 else 1) if place.dtype == torch.int16 or name.endswith("norm.weight") else place.normal_(0, 0.02)
    return llama.pack()


def engine(llama: Llama, draft: Llama | None, tokens: int, longest: int, max_batch: int, **more: Any) -> Engine:
    """An engine needs a vocabulary's size of a tokenizer, and nothing else."""
    model = SimpleNamespace(llama=llama, tokenizer=SimpleNamespace(vocab_size=llama.config.vocab_size))
    made = Engine(model, None, tokens, longest, max_batch, **more)
    if draft is not None:
        from drafters import ModelDrafter
        from engine import paged
        made.maker.drafter = ModelDrafter(draft, paged(draft, made.caches[0].pool.total, longest))
    return made


def request(llama: Llama, prompt: int, count: int, seed: int, gamma: int | None = 0) -> Request:
    generator = torch.Generator().manual_seed(seed)
    return Request(torch.randint(llama.config.vocab_size, (prompt,), generator=generator).tolist(), Settings(1.0, seed=seed, max_tokens=count, gamma=gamma))


# ---- Kernels --------------------------------------------------------------------------------------------------------------------

def kernels(scale: Scale, roof: tuple[float, float]) -> Case:
    return dict(title="Kernels: shares of the machine's roof, and beside the library's", notes=[],
                headers=("operation", "ms", "of the read bandwidth", "of the bf16 rate", "times the library's speed", "error"),
                rows=[*prefill(scale, roof), *decode_attention(scale, roof), *products(scale, roof)])


def heads(config: Config, tokens: int, scale: Scale, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(scale.device).manual_seed(seed)
    make = partial(torch.randn, device=scale.device, dtype=scale.dtype, generator=generator)
    return (make(tokens, config.num_attention_heads, config.head_dim),                                      # [T, H, D]
            *(make(tokens, config.num_key_value_heads, config.head_dim) for _ in range(2)))                 # [T, G, D]


def prefill(scale: Scale, roof: tuple[float, float]) -> list[list[Any]]:
    """A prompt read at once: store and attend. Beside the library's own, on keys and values that need no storing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    (_, config), rows = scale.models[0], []
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
        rows.append([f"attention, {n} queries", 1e3 * ours, "", f"{rate / roof[1]:.0%}", ", ".join(library), f"{error:.1e}"])
    return rows


def decode_attention(scale: Scale, roof: tuple[float, float]) -> list[list[Any]]:
    """One query of each of many texts, rows and blocks, 16 bits and fewer. Times the speed of the first."""
    (_, config), rows, first = scale.models[0], [], 0.0
    G, D, past = config.num_key_value_heads, config.head_dim, scale.past
    for kv, layout in (("16", "rows"), ("16", "blocks"), ("8", "blocks"), ("8/4", "blocks")):
        bits = WIDTHS[kv]
        cache = (KVCache(1, G, D, past, scale.texts, scale.device, scale.dtype, bits) if layout == "rows" else
                 PagedCache(1, G, D, scale.texts * -(-past // 16), 16, past, torch.device(scale.device), scale.dtype, False, bits))
        seqs = [cache.open(())[0] for _ in range(scale.texts)]
        for i, seq in enumerate(seqs):
            cache.extend([(seq, range(past - 1))]).attend(0, *heads(config, past - 1, scale, i))
        q, k, v = heads(config, scale.texts, scale)
        step = cache.extend([(seq, [0]) for seq in seqs])
        spent = clock(lambda: step.attend(0, q, k, v), scale)
        share = kv_bytes(1, G, D, scale.texts * past, scale.dtype, bits) / spent / roof[0]
        first = first or spent
        rows.append([f"attention, {scale.texts} x 1 query, {past} keys, {layout}, KV {kv}", 1e3 * spent, f"{share:.0%}", "",
                     f"{first / spent:.2f} of the first", ""])
    return rows


def products(scale: Scale, roof: tuple[float, float]) -> list[list[Any]]:
    """Gate and up, layer after layer, more of them than a GPU's cache holds. Times the speed of 16 bits."""
    (_, config), rows, first = scale.models[0], [], dict[int, float]()
    K, N = config.hidden_size, 2 * config.intermediate_size
    weight = torch.randn(N, K, device=scale.device, dtype=scale.dtype) / K**0.5
    for bits in (16, 8, 4):
        where = dict(device=scale.device, dtype=scale.dtype)
        layers = [Linear(K, N, **where) if bits == 16 else QuantizedLinear(K, N, bits=bits, **where) for _ in range(scale.turns)]
        for layer in layers:
            layer.weight.copy_(weight) if bits == 16 else layer.put(quantize(weight, bits))
            layer.pack()
        read = (weight if bits == 16 else layers[0]).nbytes
        for T in (1, 8, 64):
            x = torch.randn(T, K, device=scale.device, dtype=scale.dtype)
            spent = clock(lambda: [layer(x) for layer in layers], scale) / len(layers)
            first.setdefault(T, spent)
            error = relative(layers[0](x), x.float() @ weight.float().T)
            rows.append([f"product, {T} rows of {K} to {N}, {bits} bits", 1e3 * spent, f"{read / spent / roof[0]:.0%}",
                         f"{2 * T * N * K / spent / roof[1]:.0%}", f"{first[T] / spent:.2f} of 16 bits", f"{error:.1e}"])
    return rows


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


# ---- Decoding -------------------------------------------------------------------------------------------------------------------

def decode(scale: Scale, roof: tuple[float, float]) -> Case:
    """One stream."""
    rows = []
    for name, config in scale.models:
        first = 0.0
        for bits in (16, 8, 4):
            llama = random_model(config, bits, scale)
            one = median(plain_seconds(llama, scale) for _ in range(scale.turns))
            c, first = config, first or one
            read = weight_bytes(llama) + kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, scale.context, scale.dtype)
            rows.append([f"{name}, {bits} bits", 1 / one, 1e3 * one, f"{read / one / roof[0]:.0%}", f"{first / one:.2f}", ""])
            del llama
            if bits == 16 and installed("transformers"):
                rows[-1][-1] = ", ".join(f"{seconds / one:.2f} of {kind}" for kind, seconds in
                                         random_transformers(config, scale.device, scale.dtype, scale.context, scale.count, scale.turns).items())
    notes = [] if installed("transformers") else [f"transformers is not installed here, so nothing is compared with it: {INSTALL['transformers']}"]
    return dict(title=f"One stream after a prompt of {scale.context} tokens, random weights",
                headers=("shapes", "tokens/s", "ms a token", "of the read bandwidth", "times 16 bits", "times transformers"), rows=rows, notes=notes)


def plain_seconds(llama: Llama, scale: Scale) -> float:
    longest = scale.context + scale.count
    one = request(llama, scale.context, scale.count, 0)
    for _ in engine(llama, None, longest, longest, 1).batch.run([one]):
        pass
    return median(taken.seconds for taken in one.rounds[1:])


# ---- Speculation ----------------------------------------------------------------------------------------------------------------

class Biased(Keyed):
    """Accepts every draft with one probability, whatever the models say of it; a place without a draft never. It picks as `Keyed` does."""
    alpha = 1.0

    def accept(self, prob: Tensor) -> Tensor:
        return super().accept(torch.where(prob > 0, self.alpha, 0.0))

    @classmethod
    def of(cls, alpha: float) -> Callable[[Tensor, Tensor, int], "Biased"]:
        return type("Biased", (cls,), dict(alpha=alpha))


def speculation(scale: Scale, roof: tuple[float, float]) -> Case:
    """The second model drafts for the first, in 16 bits and in 4; γ fixed, then by the clock for several streams."""
    (_, large), (_, small) = scale.models
    target, rows = random_model(large, 16, scale), []
    for bits in (16, 4):
        draft = random_model(small, bits, scale)
        for alpha in scale.alphas:
            rows += [speculate(target, draft, bits, alpha, gamma, 1, scale) for gamma in scale.gammas]
        rows += [speculate(target, draft, bits, alpha, None, streams, scale) for alpha in (scale.alphas[0], scale.alphas[-1]) for streams in scale.streams]
    return dict(title="Speculation with random weights: a coin accepts with probability α, all else is the production path",
                headers=("draft", "α", "γ", "streams", "times plain decoding", "by the formula", "share of it"), rows=rows, notes=[])


def speculate(target: Llama, draft: Llama, bits: int, alpha: float, gamma: int | None, streams: int, scale: Scale) -> list[Any]:
    """Plain decoding and drafting in turns, over as many tokens."""
    gains, formulas, count = [], [], scale.count if gamma is not None else 4 * scale.count
    longest = scale.context + count
    for turn in range(scale.turns):
        seconds = []
        for drafts in (False, True):
            maker = engine(target, draft if drafts else None, streams * longest, longest, streams)
            maker.maker.coin = Biased.of(alpha)
            requests = [request(target, scale.context, count, 100 * turn + i, gamma if drafts else 0) for i in range(streams)]
            at_once(maker, requests)
            seconds.append(median(map(seconds_a_token, requests)))
        gains.append(seconds[0] / seconds[1])
        c, w = (maker.maker.costs.drafting() / seconds[0], maker.maker.costs.verifying((gamma or 0) + 1) / seconds[0])
        formulas.append(expected_tokens(alpha, gamma) / (w + gamma * c) if gamma is not None else 0.0)
    gain, formula = median(gains), median(formulas)
    return [f"{bits} bits", f"{alpha}", "by the clock" if gamma is None else str(gamma), str(streams), f"{gain:.2f}", f"{formula:.2f}" if formula else "",
            f"{gain / formula:.2f}" if formula else ""]


# ---- Serving --------------------------------------------------------------------------------------------------------------------

def serving(scale: Scale, roof: tuple[float, float]) -> Case:
    """Many requests at once; the first token of a prompt alone; and what a long prompt does to those who write."""
    llama, rows = random_model(scale.models[0][1], 16, scale), []
    weights, lengths = weight_bytes(llama), spread(scale.requests, scale.longest, scale.longest / scale.shortest)
    pairs = list(zip(lengths, reversed(lengths)))
    served = at_once(engine(llama, None, scale.requests * 2 * scale.longest, 2 * scale.longest, scale.requests, prefix_cache=False),
                     [request(llama, prompt, count, i) for i, (prompt, count) in enumerate(pairs)])
    floor = (served.steps * weights + served.read) / roof[0]
    rows.append([f"{scale.requests} requests, prompts and answers of {scale.shortest} to {scale.longest}", f"{served.rate:.0f} tokens/s",
                 f"{floor / served.seconds:.0%}"])
    first = [at_once(engine(llama, None, 600, 600, 1), [request(llama, min(512, scale.longest), 1, i)]).first[0] for i in range(scale.turns + 1)][1:]
    rows.append([f"first token of a prompt of {min(512, scale.longest)}", f"{1e3 * median(first):.1f} ms", ""])
    for name, budget in (("at once", scale.long + 64), ("in chunks of 512", 512 if scale.long > 512 else 16)):
        gaps = sorted(long_arrives(llama, budget, scale).gaps)
        rows.append([f"99th percentile between tokens while a prompt of {scale.long} is read {name}", f"{1e3 * gaps[int(0.99 * (len(gaps) - 1))]:.1f} ms", ""])
    return dict(title="Serving, 8B shapes, random weights", headers=("", "measured", "of the bandwidth's limit"), rows=rows, notes=[])


def long_arrives(llama: Llama, budget: int, scale: Scale) -> Served:
    """Eight texts are being written, and a long prompt arrives."""
    maker = engine(llama, None, 8 * (scale.shortest + scale.count) + scale.long + 16, scale.long + 16 + scale.count, 9, prefix_cache=False)
    maker.maker.budget = budget
    writers = [(0.0, request(llama, scale.shortest, scale.count, i)) for i in range(8)]
    return serve(maker.batch, maker.caches, [*writers, (0.2 if scale.device == "cuda" else 0.0, request(llama, scale.long, 2, 99))])


CASES: dict[str, Callable[[Scale, tuple[float, float]], Case]] = dict(kernels=kernels, decode=decode, speculation=speculation, serving=serving)


@torch.inference_mode()
def run(name: str, quick: bool = False) -> dict[str, Case]:
    """One case. ValueError where there is no GPU."""
    if not torch.cuda.is_available() and not quick:
        raise ValueError(f"--gpu {name} needs a GPU, and PyTorch finds none here: --quick runs it with toy shapes on the CPU")
    scale = Scale() if not quick else replace(QUICK, device="cuda" if torch.cuda.is_available() else "cpu")
    roof = roofs(scale)
    case = CASES[name](scale, roof)
    told = f"roof: {roof[0] / 1e9:,.0f} GB/s read, {roof[1] / 1e12:,.3g} TFLOP/s in {str(scale.dtype)[6:]} products"
    return {name: case | dict(notes=[told, *case["notes"]], read_bandwidth=roof[0], operations=roof[1])}
