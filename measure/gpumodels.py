"""Shared by the measurements on a GPU: models of true shapes with random weights, sizes, the clock and the roofs.

Speed does not depend on the values of weights, so nothing is downloaded: random numbers are made on the device. Python
needs longer to launch a kernel than many kernels take, so a recording is clocked. Figures are shares of the same run's

    bytes read a second, by a sum over more than a cache holds      ·      operations a second, by one large product

Invariant: engines are production's own, with the size of a vocabulary as tokenizer; a clocked run is waited for.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from generate import Engine, Model
from measure.clock import seconds
from model import Llama
from shell import brief
from weights import Config, Quantization

Rows = Iterator[Any]                                    # title and headers; then rows, and notes, which are texts
Roof = tuple[float, float]                              # bytes read a second, operations a second

LLAMA_8B = Config(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0)
LLAMA_1B = Config(128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_word_embeddings=True)
TOY = Config(4096, 32, 64, 2, 4, 2, 8, 512)


@dataclass(frozen=True)
class Scale:
    """How large everything is."""
    models: tuple[tuple[str, Config], ...] = (("8B", LLAMA_8B), ("1B", LLAMA_1B))       # a target, and its draft
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    prompts: tuple[int, ...] = (4096, 8192, 16384)      # attention's, of one text
    past: int = 8192                                    # keys of each text in attention of one query each
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


QUICK = Scale((("toy", TOY), ("toy draft", replace(TOY, num_hidden_layers=1, head_dim=128))), "cpu", torch.float32,
              (32,), 24, 16, 6, (0.7,), (2,), (1, 2), 4, 4, 12, 48, 1 << 22, 1)


def tried(run: Callable[[], Any]) -> Any:
    """Its result, or in a line how it failed."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {brief(error, 200)}"


def device_seconds(run: Callable[[], object], scale: Scale, atleast: float = 0.02) -> float:
    """Median seconds of `run()`, the device waited for; on a GPU of its recording, so often that no launch counts."""
    if scale.device == "cuda":
        from gpu.graphs import record
        run()                                           # builds its kernels
        run = record(run)

    def repeated(count: int) -> None:
        for _ in range(count):
            run()
        if scale.device == "cuda":
            torch.cuda.synchronize()
    count = max(1, round(atleast / seconds(lambda: repeated(1), 1))) if scale.turns > 1 else 1
    return seconds(lambda: repeated(count), 2 * scale.turns + 1) / count


def roofs(scale: Scale) -> Roof:
    """(bytes read a second, operations a second of a large product): nothing here can be faster."""
    data = torch.ones(scale.read // 4, device=scale.device)
    size = 8192 if scale.device == "cuda" else 64
    a, b = (random_numbers(scale, size, size, seed=i) for i in range(2))
    return data.nbytes / device_seconds(data.sum, scale), 2 * size**3 / device_seconds(lambda: a @ b, scale)


def random_numbers(scale: Scale, *shape: int, seed: int = 0) -> Tensor:
    """Normally distributed."""
    generator = torch.Generator(scale.device).manual_seed(seed)
    return torch.randn(shape, device=scale.device, dtype=scale.dtype, generator=generator)


def random_model(config: Config, bits: int, scale: Scale) -> Llama:
    """Random weights, rounded to so many bits."""
    plain = Llama(config, scale.device, scale.dtype, seed=0)
    if bits < 16:
        own, plain = plain, Llama(config.quantized(Quantization(bits)), scale.device, scale.dtype, seed=None)
        plain.fill(own.places().items())
    return plain.prepare()


def random_engine(llama: Llama, draft: Llama | None, tokens: int, longest: int, max_batch: int, **more: Any) -> Engine:
    """An engine of models without a tokenizer, in the memory that was an earlier one's."""
    torch.cuda.empty_cache()                            # does nothing without a GPU
    tokenizer = SimpleNamespace(vocab_size=llama.config.vocab_size)
    target, small = (one and Model(one, tokenizer, {}) for one in (llama, draft))
    return Engine(target, small, tokens, longest, max_batch, **more)


def relative(got: Tensor, wanted: Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖."""
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
