"""Kernels are compiled for the kinds of their arguments, by Triton's own rule.

All kinds that a server needs are few, and a warm-up can launch them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
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
from checkpoint.load import fill_model
from drafters import ModelDrafter, SelfDrafter
from flash import Flash
from generate import Engine
from gpu import GPU, graphs
from gpu.test_layer import PASTS, STEPS
from kernels import Ops
from kvcache import KVCache
from loading import Draft, Model
from measure.gpu_parts import open_texts
from model import Llama
from paged import PagedCache
from quant import Kind, widths
from request import Request, Settings
from runner import ModelRunner
from settings import Options
from speculative import Drawing
from testing.models import SMALL
from tokenizer import Tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted, not made"),
]
CONFIG = SMALL | dict(
    vocab_size=70,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=1,
    max_position_embeddings=1024,
)

CASES = [  # bits of the target's weights, the draft's, and the cache's
    (16, None, 16),
    (4, None, "8/4"),
    (16, 8, 8),
    (16, 4, 16),
]


def random_llama(
    bits: Kind,
    ops: Ops,
    activations: int = 16,
    dtype: torch.dtype = torch.float32,
    **config: int,
) -> Llama:
    """Without numbers, where they are quantized."""
    shape = Config(**CONFIG | config)
    if bits == 16:
        return Llama(shape, dtype=dtype, seed=1, ops=ops).pack_weights()
    quantization = Quantization(bits, group=32, activations=activations)
    llama = Llama(shape.quantized(quantization), dtype=dtype, seed=None, ops=ops)
    fill_model(llama, Llama(shape, seed=1).named_tensors().items())
    return llama.pack_weights()


@cache
def binder(kernel: InterpretedFunction) -> Any:
    """Triton's own: arguments -> their kinds."""
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(compiled.signature, compiled.params, backend)


@contextmanager
def counted() -> Iterator[dict[str, set[str]]]:
    """Nothing is launched -> the variants that would be compiled, of each kernel."""
    variants: dict[str, set[str]] = {}

    def launch(
        kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        _, kinds, options = binder(kernel)(*args, **options)
        variants.setdefault(kernel.fn.__name__, set()).add(f"{kinds} {options}")

    with (
        mock.patch.object(InterpretedFunction, "run", launch),
        mock.patch.object(graphs, "record", lambda run: run),
        mock.patch("torch.empty", torch.zeros),
        mock.patch("torch.empty_like", torch.zeros_like),
        mock.patch("gpu.tuning.has_sm_90", lambda device: True),
    ):
        yield variants


def serve(batcher: Batcher, count: int) -> None:
    """Requests of all lengths and settings: prompts, chunks, tokens and drafts in one step. Then as
    many at once as run together."""
    generator = torch.Generator().manual_seed(0)

    def draw(most: int) -> int:
        return int(torch.randint(1, most, (), generator=generator))

    for i in range(count):
        prompt = [draw(3)] * draw(400 if i % 16 == 0 else 30)
        settings = Settings(
            [1.0, 0.0][i % 2],
            top_p=[None, 0.9][i // 128],
            seed=i,
            max_tokens=draw(12),
            gamma=i % 4,
        )
        batcher.add(Request(prompt, settings))
    for _ in batcher.run():
        pass
    for _ in batcher.run(Request([1], Settings(seed=i, max_tokens=9)) for i in range(70)):
        pass


def engine(
    folder: Path, ops: Ops, bits: int, draft_bits: int | None, max_batch: int, kv_bits: Any = 16
) -> Engine:
    """draft_bits: of a draft with a cache of its own, or, if these are 4, in the target's."""
    model = Model(random_llama(bits, ops, vocab_size=272), Tokenizer.load(folder))
    draft = None
    if draft_bits is not None:
        llama = random_llama(draft_bits, ops, vocab_size=272)
        kind = SelfDrafter if draft_bits == 4 else ModelDrafter
        draft = Draft(partial(kind, llama), (llama,), kind is ModelDrafter)
    return Engine(
        model, draft, Options(max_len=640, max_batch=max_batch, kv_bits=kv_bits), tokens=6400
    )


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("bits, draft_bits, kv_bits", CASES)
def test_an_engine_of_many_texts_compiles_nothing_in_the_middle_of_serving(
    bits, draft_bits, kv_bits, records, base
):
    """As many variants as are needed: of attention, with and without a split, 16 to 128 rows; of
    storing, for many tokens, and for few, which start early and then fetch weights, too (of
    each precision)."""
    with counted() as first:
        batcher = engine(base, GPU(records), bits, draft_bits, 70, kv_bits).batcher
    with counted() as later:
        serve(batcher, 256)
    assert {"_attend", "_store", "_edge"} <= later.keys() <= first.keys()
    for name in later:
        assert later[name] <= first[name], name
    for name, wanted in ("_attend", 4 * 2), ("_store", 3 + (draft_bits is not None)):
        assert len(first[name]) == wanted


@torch.inference_mode()
@pytest.mark.parametrize("bits, draft_bits, kv_bits", CASES)
def test_the_steps_that_test_layer_checks_are_all_variants_of_a_warm_up(
    bits, draft_bits, kv_bits, base
):
    """But for sampling, which the contract checks with a vocabulary of Llama 3."""
    llama = random_llama(bits, GPU(), vocab_size=272)
    with counted() as checked:
        for past, step in product(PASTS, STEPS):
            metadata = open_texts(llama.kv_spec(widths(kv_bits)), step, past)
            for _ in range(2):  # as there: the second one fetches weights
                llama(torch.ones(sum(step), dtype=torch.int64), metadata)
    with counted() as first:
        engine(base, GPU(), bits, None, 70, kv_bits)
    assert {"_attend", "_store"} <= checked.keys()
    for name in checked:
        assert first[name] <= checked[name], name


def test_an_engine_of_one_text_launches_nothing_before_its_text(base):
    """It would wait for variants that it never uses."""
    ops = GPU()
    with counted() as variants:
        runner = engine(base, ops, 16, 16, max_batch=1).runner
    assert not variants and runner.budget == ops.step_budget


@torch.inference_mode()
def launches(layers: int, width: tuple[Kind, int], tokens: int, length: int) -> int:
    """Of a step of so many tokens, the last of a sequence of this length, in bfloat16."""
    ops = GPU(records=False)
    shape = dict(num_hidden_layers=layers, max_position_embeddings=8192)
    llama = random_llama(width[0], ops, width[1], torch.bfloat16, **shape)
    cache = PagedCache(llama.kv_spec(), 600, 16)
    seq, _ = cache.open(())
    if length > tokens:
        cache.extend([(seq, [1] * (length - tokens))])
    metadata = cache.extend([(seq, [1] * tokens)])
    launch = Mock()

    def linear(x: torch.Tensor, w: torch.Tensor, bias: Any = None) -> torch.Tensor:
        launch()
        return x.new_zeros(len(x), len(w))

    with (
        mock.patch.object(InterpretedFunction, "run", launch),
        mock.patch("torch.empty", torch.zeros),
        mock.patch("torch.empty_like", torch.zeros_like),
        mock.patch("torch.nn.functional.linear", linear),
    ):
        llama(torch.ones(tokens, dtype=torch.int64), metadata)
    return launch.call_count


WIDTHS = [(bits, 16) for bits in (16, 8, 4, "nf4", "fp8")] + [(8, 8), ("fp8", 8)]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_layer_is_eight_launches(width):
    """Two norms, a store that rotates, attention, and four products, one of them with SwiGLU.

    Of more rows, torch multiplies in 16 bits, and SwiGLU is alone. Inputs of 8 bits are rounded by
    a kernel before each product.
    """
    bits, activations = width
    for tokens, length in ((1, 40), (1, 4096), (8, 4096), (40, 40)):
        layer = launches(3, width, tokens, length) - launches(2, width, tokens, length)
        assert layer == 8 + 4 * (activations == 8) + (bits == 16 and tokens > 8)


@torch.inference_mode()
def test_all_layers_of_a_contiguous_cache_are_aligned_alike():
    llama = random_llama(16, GPU(records=False), num_hidden_layers=2, num_key_value_heads=1)
    cache = KVCache(llama.kv_spec((8, 4)), 33)
    seq, _ = cache.open(())
    with counted() as variants:
        llama(torch.ones(3, dtype=torch.int64), cache.extend([(seq, [1] * 3)]))
    assert len(variants["_attend"]) == len(variants["_store"]) == 1


@torch.inference_mode()
def test_the_core_kernel_has_two_variants():
    llama = random_llama(16, Flash())
    with counted() as variants:
        runner = ModelRunner(llama, PagedCache(llama.kv_spec(), 400, 4), Drawing(67), budget=100)
        serve(Batcher(runner, 70), 64)
    assert len(variants.pop("_flash")) == 2 and not variants  # of 16 and of 64 rows
