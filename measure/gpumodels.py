"""Shared by the measurements on a GPU: models of true shapes with random weights, sizes, the clock and the roofs.

Speed does not depend on the values of weights, so nothing is downloaded: random weights are made on the device. Python
takes longer to launch a kernel than many kernels run, so recordings are timed. Figures are shares of the same run's

    bytes read a second, by a sum over more than a cache holds      ·      operations a second, by one large product

Invariant: engines are production's own, with only a vocabulary's size for a tokenizer; timing waits for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.formats import Quantization
from errors import brief
from generate import Engine, Model
from measure.clock import seconds
from model import Llama
from quant import Kind

Rows = Iterator[Any]  # title and headers; then rows, and notes, which are strings
Roof = tuple[float, float]  # bytes read a second, operations a second

LLAMA_8B = Config(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0)
LLAMA_1B = Config(
    128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_word_embeddings=True
)
TOY = Config(4096, 32, 64, 2, 4, 2, 8, 512)


@dataclass(frozen=True)
class Scale:
    """The sizes of all measurements."""

    models: tuple[tuple[str, Config], ...] = (
        ("8B", LLAMA_8B),
        ("1B", LLAMA_1B),
    )  # a target, and its draft
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    prompts: tuple[int, ...] = (
        4096,
        8192,
        16384,
    )  # tokens of the prompts by which attention is timed
    past: int = 8192  # keys of each text where attention has one query each
    context: int = 1024
    count: int = 128
    alphas: tuple[float, ...] = (0.5, 0.7, 0.9)
    gammas: tuple[int, ...] = (2, 4)
    streams: tuple[int, ...] = (1, 8, 64)
    requests: int = 256
    shortest: int = 100
    longest: int = 1024
    long: int = 8192
    read: int = 1 << 32  # bytes that are read to measure the bandwidth
    turns: int = 3


QUICK = Scale(
    (("toy", TOY), ("toy draft", replace(TOY, num_hidden_layers=1, head_dim=128))),
    "cpu",
    torch.float32,
    (32,),
    24,
    16,
    6,
    (0.7,),
    (2,),
    (1, 2),
    4,
    4,
    12,
    48,
    1 << 22,
    1,
)


def tried(run: Callable[[], Any]) -> Any:
    """The result of `run()`, or its error as a line of text."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {brief(error, 200)}"


def device_seconds(run: Callable[[], object], scale: Scale, atleast: float = 0.02) -> float:
    """Median seconds of `run()`, device included; on a GPU of its recording, repeated so that launches do not count."""
    if scale.device == "cuda":
        from gpu.graphs import record

        run()  # compiles its kernels
        run = record(run)

    def repeated(count: int) -> None:
        for _ in range(count):
            run()
        if scale.device == "cuda":
            torch.cuda.synchronize()

    count = max(1, round(atleast / seconds(lambda: repeated(1), 1))) if scale.turns > 1 else 1
    return seconds(lambda: repeated(count), 2 * scale.turns + 1) / count


def roofs(scale: Scale) -> Roof:
    """The roof: (bytes read a second, operations a second in a large product). No measurement can exceed it."""
    data = torch.ones(scale.read // 4, device=scale.device)
    size = 8192 if scale.device == "cuda" else 64
    a, b = (random_numbers(scale, size, size, seed=i) for i in range(2))
    return data.nbytes / device_seconds(data.sum, scale), 2 * size**3 / device_seconds(
        lambda: a @ b, scale
    )


def launches(run: Callable[[], object], scale: Scale) -> int:
    """How many kernels and copies `run()` launches, in recordings too, by the profiler; on a CPU, PyTorch operators."""
    kind = "CUDA" if scale.device == "cuda" else "CPU"
    with torch.profiler.profile(
        activities=[getattr(torch.profiler.ProfilerActivity, kind)]
    ) as seen:
        run()
        if scale.device == "cuda":
            torch.cuda.synchronize()
    return sum(
        event.device_type.name == kind and event.cpu_parent is None for event in seen.events()
    )


@dataclass(frozen=True)
class StepModel:
    """The time that a step should take: to read its bytes, to launch its kernels in a recording, and part of a wait.

    seconds = bytes / bandwidth + launches · launch + wait / tokens that are made before the host looks
    """

    bandwidth: float  # bytes read a second
    launch: float  # seconds of a kernel that does almost nothing
    wait: float  # seconds from a launch by the host to the result on the host

    @classmethod
    def measured(cls, scale: Scale, roof: Roof) -> "StepModel":
        x = torch.ones(32, device=scale.device)
        return cls(
            roof[0],
            device_seconds(lambda: [x.mul_(1) for _ in range(100)], scale) / 100,
            seconds(lambda: x.mul_(1).sum().item()),
        )

    def seconds(self, size: float, launched: int, ahead: int) -> float:
        return size / self.bandwidth + launched * self.launch + self.wait / ahead


def random_numbers(scale: Scale, *shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, by this seed."""
    generator = torch.Generator(scale.device).manual_seed(seed)
    return torch.randn(shape, device=scale.device, dtype=scale.dtype, generator=generator)


def random_model(config: Config, bits: Kind, scale: Scale) -> Llama:
    """A model with random weights, rounded to these bits."""
    plain = Llama(config, scale.device, scale.dtype, seed=0)
    if bits != 16:
        own, plain = (
            plain,
            Llama(config.quantized(Quantization(bits)), scale.device, scale.dtype, seed=None),
        )
        plain.fill(own.places().items())
    return plain.prepare()


def random_engine(
    llama: Llama, draft: Llama | None, tokens: int, longest: int, max_batch: int, **more: Any
) -> Engine:
    """An engine of models without a tokenizer, after the memory of earlier engines is freed."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    tokenizer = SimpleNamespace(vocab_size=llama.config.vocab_size)
    target, small = (one and Model(one, tokenizer, {}) for one in (llama, draft))
    return Engine(target, small, tokens, longest, max_batch, **more)


def relative(got: Tensor, wanted: Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖."""
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
