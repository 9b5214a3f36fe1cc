"""What the measurements on a GPU share: models of true shapes with random weights, how much is done, and the clock.

How fast a model runs does not depend on what its weights are; so nothing is downloaded, and weights are made on the device: random numbers,
or random integers with scales that make numbers of their size. Every figure is a share of a roof, which is measured in the same run:

    bytes read a second, by a sum over more than a cache holds      ·      operations a second, by one large product

Invariant: an engine is production's own (engine.py), with a tokenizer's vocabulary and no more of it; what is clocked was waited for.

Not covered: several GPUs.
"""
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from config import Config, Quantization
from engine import Engine
from model import Llama
from request import Request, Settings

Case = dict[str, Any]                                   # title, headers, rows, notes
Roof = tuple[float, float]                              # bytes read a second, operations a second

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
    alone: int = 8                                      # requests that a peer serves one at a time,
    short: int = 96                                     # with answers of at most so many tokens
    batched: int = 64                                   # and those that it serves together


QUICK = Scale((("toy", TOY), ("toy draft", replace(TOY, num_hidden_layers=1, head_dim=128))), "cpu", torch.float32, (32,), 3, 24, 16, 6, (0.7,), (2,), (1, 2),
              4, 4, 12, 48, 1 << 22, 1, 1, 4, 2)


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


def roofs(scale: Scale) -> Roof:
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


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
