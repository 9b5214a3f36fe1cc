"""A model of decoding on a GPU, by what a token must do: read bytes, and launch kernels.

    seconds of a token = bytes read / bytes read a second + launches · seconds of a launch

The bytes are those of the weights, and of the text's keys and values. Launches are counted, not
assumed: of Triton kernels, and of PyTorch's operations that compute. Tokens are made as serving
makes them, several by one recording, with the choice of each.

    python bench.py --gpu decode         the model beside what is measured
    python bench.py --gpu prediction     the model alone, of 8B on an H200: it needs no GPU

Not covered: kernels that read more slowly than the GPU can. So the model is a bound.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters import ModelChain, Unread, fastest_draft
from errors import UserError
from kernels import ops_for
from measure.gpu_parts import SHAPES, WAYS, Scale, device_seconds, random_numbers
from measure.report import Section
from measure.serving import random_request
from model import Llama, weight_bytes
from paged import PagedCache
from sampling import Keyed
from speculative import Round

H200_BANDWIDTH = 4.3e12  # bytes a second: 90 % of the data sheet's, as is usual
H200_LAUNCH = 1.5e-6  # seconds, in a recording: half of what is usual, as kernels start early
HEADERS = (
    "weights",
    "launches a layer",
    "launches a token",
    "GB read a token",
    "ms",
    "tokens/s",
    "times 16 bits",
)
CONTEXT = 1024  # tokens before
LAYERS = SHAPES["8B"].num_hidden_layers
MANY = 1000  # launches of a recording that is timed
ALLOCATIONS = ("empty", "new_empty", "detach")
Launch = Callable[..., Any]  # `run` of a Triton kernel
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


# ---- Counting ------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the launches on a device: no views, no allocations. On "meta" nothing is launched."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose() and has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        done = func(*args, **kwargs)
        if not func.is_view and not func.overloadpacket.__name__.startswith(ALLOCATIONS):
            tensors = [x for x in tree_leaves(done) if isinstance(x, Tensor)]
            self.count += any(x.device == self.device for x in tensors)
        return done

    def counted(self, run: Launch) -> Launch:
        """A kernel's launch, counted."""

        def launch(*args: Any, **options: Any) -> Any:
            self.count += 1
            return None if self.device.type == "meta" else run(*args, **options)

        return launch


@contextmanager
def launching_by(wrap: Callable[[Launch], Launch]) -> Iterator[None]:
    """Within this context Triton's kernels are launched by wrap(their own launch), and a recording
    launches again what it recorded."""
    with ExitStack() as changed:
        if find_spec("triton"):
            from triton.runtime import JITFunction
            from triton.runtime.interpreter import InterpretedFunction

            for kind in (JITFunction, InterpretedFunction):
                changed.enter_context(mock.patch.object(kind, "run", wrap(kind.run)))
            changed.enter_context(mock.patch("gpu.graphs.record", lambda run: run))
        yield


@torch.inference_mode()
def launches_a_token(llama: Llama, context: int = CONTEXT) -> float:
    """Of a text of `context` tokens, without filters."""
    ops = llama.ops
    count = ops.multi_step
    cache = PagedCache(llama.kv_spec(), context // 16 + 2)
    seq, _ = cache.open(())
    cache.extend([(seq, [0] * context)])
    for part in (*cache.keys.parts, *cache.values.parts):
        part.zero_()  # else the logits may not be finite
    round = Round(
        [random_request(context, count, 0)],
        [count],
        llama.config.vocab_size,
        llama.device,
        llama.dtype,
        partial(Keyed, draw=ops.pick),
        True,
        ops,
    )
    unread = {0: Unread(seq, [0])}
    launches = Launches(llama.device)
    with launching_by(launches.counted):
        fastest_draft(ModelChain(llama, cache, round, unread), round)  # makes the recording
        cache.truncate(seq, context)
        launches.count = 0
        with launches:
            fastest_draft(ModelChain(llama, cache, round, unread), round)
    return launches.count / count


# ---- The model -----------------------------------------------------------------------------------


@functools.cache
def launch_seconds(scale: Scale) -> float:
    """Of a launch in a recording of many that do almost nothing: a norm of one row."""
    ops = ops_for(scale.device)
    x = random_numbers(scale, 1, SHAPES[scale.target].hidden_size)

    def run() -> None:
        for _ in range(MANY):
            ops.add_norm(x, x, x[0], 1e-5)

    return device_seconds(run, scale) / MANY


def token_bytes(llama: Llama, context: int = CONTEXT) -> int:
    """What a token reads: weights, and keys and values in the model's dtype."""
    return weight_bytes(llama, read=True) + llama.kv_spec().bytes(context)


def model_on_meta(way: str, layers: int) -> Llama:
    """8B without numbers, with so many layers."""
    from gpu import GPU

    config = replace(SHAPES["8B"], num_hidden_layers=layers, quantization=WAYS[way])
    return Llama(config, "meta", torch.bfloat16, seed=None, ops=GPU()).pack_weights()


def launches_of_8b(way: str) -> tuple[float, float]:
    """Launches a layer, launches a token: two layers and three are counted."""
    two, three = (launches_a_token(model_on_meta(way, layers)) for layers in (2, 3))
    layer = three - two
    return layer, two + layer * (LAYERS - 2)


def prediction() -> Section:
    """For 8B, with weights in each way."""
    if not find_spec("triton"):
        raise UserError("--gpu prediction counts Triton's kernels: install triton, on Linux")
    rows = []
    for way in WAYS:
        layer, launches = launches_of_8b(way)
        read = token_bytes(model_on_meta(way, LAYERS))
        seconds = read / H200_BANDWIDTH + launches * H200_LAUNCH
        rows.append([seconds, layer, launches, read / 1e9, 1e3 * seconds, 1 / seconds])
    plain = rows[0][0]
    formats = ("{:.0f}", "{:.0f}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.2f}")
    cells = []
    for way, (seconds, *numbers) in zip(WAYS, rows):
        numbers.append(plain / seconds)
        cells.append([way, *map(str.format, formats, numbers)])
    title = (
        f"8B on an H200 by the model, assuming that it reads {H200_BANDWIDTH / 1e12:.1f} TB/s and "
        f"that a launch takes {1e6 * H200_LAUNCH:.1f} µs; nothing is measured"
    )
    return Section(title, HEADERS, cells)
