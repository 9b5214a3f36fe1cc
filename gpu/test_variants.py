"""Kernels are compiled for the kinds of their arguments, by Triton's own rule: all that a server needs are few, and a
warm-up can launch them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from batcher import Batcher
from checkpoint.config import Config
from checkpoint.formats import Quantization
from conftest import SMALL
from drafters import ModelDrafter
from gpu import GPU, graphs, warm_up
from kernels import Flash
from model import Llama
from paged import PagedCache
from request import Request, Settings
from speculative import Decoder

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches are counted in place of the interpreter's"
)
SHAPE = dict(
    vocab_size=70,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=1,
    max_position_embeddings=1024,
)


@cache
def binder(kernel: InterpretedFunction) -> Any:
    """Triton's own: arguments -> their kinds."""
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(
        compiled.signature, compiled.params, make_backend(GPUTarget("cuda", 90, 32))
    )


@contextmanager
def counted() -> Iterator[dict[str, set[str]]]:
    """Nothing is launched -> the variants that would be compiled, of each kernel."""
    found: dict[str, set[str]] = {}

    def launch(
        kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        _, kinds, options = binder(kernel)(*args, **options)
        found.setdefault(kernel.fn.__name__, set()).add(f"{kinds} {options}")

    with (
        mock.patch.object(InterpretedFunction, "run", launch),
        mock.patch.object(graphs, "record", lambda run: run),
        mock.patch("torch.empty", torch.zeros),
        mock.patch("torch.empty_like", torch.zeros_like),
    ):
        yield found


def serve(llama: Llama, cache: PagedCache, drafter: Any, count: int) -> None:
    """Requests of all lengths and settings, many at a time: prompts, chunks, single tokens and drafts in one step."""
    random = torch.Generator().manual_seed(0)
    draw = lambda most: int(torch.randint(1, most, (), generator=random))
    batch = Batcher(Decoder(llama, cache, 67, drafter, budget=100), 70)
    for i in range(count):
        prompt = [draw(3)] * draw(400 if i % 16 == 0 else 30)
        batch.add(
            Request(
                prompt,
                Settings(
                    [1.0, 0.0][i % 2],
                    top_p=[None, 0.9][i // 128],
                    seed=i,
                    max_tokens=draw(12),
                    gamma=i % 4,
                ),
            )
        )
    while batch.waiting or batch.running:
        batch.step()


@pytest.mark.parametrize("bits, kv", [(16, (16, 16)), (4, (8, 4))])
@torch.inference_mode()
def test_what_a_warm_up_launches_is_all_that_is_compiled(bits, kv):
    plain, config = Llama(Config(**SMALL | SHAPE), seed=1), Config(**SMALL | SHAPE)
    llama = Llama(
        config.quantized(Quantization(bits, group=32)) if bits < 16 else config,
        seed=None,
        ops=GPU(),
    )
    llama.fill(plain.places().items())
    cache = PagedCache.of(llama.prepare(), 400, 4, bits=kv)
    with counted() as first:
        warm_up(llama, cache)
    with counted() as later:
        serve(
            llama,
            cache,
            ModelDrafter(llama, PagedCache.of(llama, 400, 4, bits=kv)) if bits == 16 else None,
            256,
        )
    assert {"_attend", "_merge", "_store", "_edge"} <= later.keys() <= first.keys()
    for name in later.keys():
        assert later[name] <= first[name], name
    assert len(first["_attend"]) == 4 * 2 and len(first["_merge"]) == len(first["_store"]) == 1


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("tokens, length, launched", [(1, 40, 9), (1, 4096, 10), (40, 40, 9)])
@torch.inference_mode()
def test_a_layer_is_nine_launches(bits, tokens, length, launched):
    """Two norms, SwiGLU, a store that rotates, attention, and four products. A long text adds a merge, many rows by
    integers a sum of the shares for each product. Counted as what a third layer adds to two."""
    found = []
    for count in (2, 3):
        config = Config(
            **SMALL | SHAPE | dict(num_hidden_layers=count, max_position_embeddings=8192)
        )
        llama = Llama(
            config.quantized(Quantization(bits, group=32)) if bits < 16 else config,
            seed=None,
            ops=GPU(records=False),
        )
        cache = PagedCache.of(llama.prepare(), 600, 16)
        seq, _ = cache.open(())
        cache.extend([(seq, [1] * (length - tokens))]) if length > tokens else None
        step, launch = cache.extend([(seq, [1] * tokens)]), Mock()
        with (
            mock.patch.object(InterpretedFunction, "run", launch),
            mock.patch("torch.empty", torch.zeros),
            mock.patch("torch.empty_like", torch.zeros_like),
            mock.patch(
                "torch.nn.functional.linear",
                lambda x, w, b=None: (launch(), x.new_zeros(len(x), len(w)))[1],
            ),
        ):
            llama(torch.ones(tokens, dtype=torch.int64), step)
        found.append(launch.call_count)
    assert found[1] - found[0] == launched + 4 * (bits < 16 and tokens > 8)


@torch.inference_mode()
def test_the_kernel_of_the_core_has_two_variants():
    llama = Llama(Config(**SMALL | SHAPE), seed=1, ops=Flash())
    with counted() as found:
        serve(llama, PagedCache.of(llama, 400, 4), None, 64)
    assert len(found.pop("_flash")) == 2 and not found  # of 16 and of 64 rows
