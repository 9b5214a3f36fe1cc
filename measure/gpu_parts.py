"""What the GPU cases share: sizes, models of true shapes with random weights, and a stopwatch for
launches.

Invariant: a model has the same random numbers in every dtype; where they are stored in fewer bits,
they are rounded from the numbers of `Sizes.dtype`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from drafters import ModelDrafter
from generate import Engine
from kernels import Linear, Ops, ops_for
from kvcache import AttentionMetadata, KVSpec
from loading import Draft, Model
from measure.clock import median_seconds
from measure.serving import random_request, serve
from measure.sizes import Sizes
from model import Llama
from paged import PagedCache
from quant import WIDTHS, quantize
from settings import Options

Row = list[str]
Run = Callable[[], object]
Kernel = tuple[Run, int]  # a call, and the bytes that it must read
SPREAD = 2.0  # of old keys and values, so that some count much more than others
SHAPES = {
    "8B": Config(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0),
    "1B": Config(
        128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_word_embeddings=True
    ),
    "tiny": Config(4096, 64, 96, 1, 4, 2, 16, 1024, tie_word_embeddings=True),
}
WAYS = {  # to store weights
    "16 bits": None,
    "INT8": Quantization(8),
    "INT4": Quantization(4),
    "NF4": Quantization("nf4", 64),
    "FP8": Quantization("fp8"),
    "W8A8": Quantization(8, activations=8),
    "FP8 W8A8": Quantization("fp8", activations=8),
}
HEAD_NORMS = "head norms"  # 16 bits, too, and a norm of each head, as Qwen 3 has


def stopwatch(run: Run, sizes: Sizes) -> Callable[[], float]:
    """-> a function that measures seconds of `run()`, a median; on a GPU of its recording, so that
    launches do not count."""
    run()  # this compiles kernels
    replay = run
    if sizes.on_gpu:
        from gpu import graphs

        replay = graphs.record(run)

    def repeat() -> None:
        for _ in range(sizes.repeats):
            replay()
        if sizes.on_gpu:
            torch.cuda.synchronize()

    return lambda: median_seconds(repeat) / sizes.repeats


def random_numbers(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(shape, device=sizes.device, dtype=sizes.dtype)


def random_model(
    name: str, way: str, sizes: Sizes, dtype: torch.dtype | None = None, ops: Ops | None = None
) -> Llama:
    """A model with random weights, stored this way; few tensors at a time have more bits. dtype: to
    compute in, if not that of `sizes`."""
    config = replace(SHAPES[name], quantization=WAYS.get(way))
    if way == HEAD_NORMS:
        config = replace(config, model_type="qwen3")
    ops = ops or ops_for(sizes.device)
    dtype, weight_dtype = ops.dtypes([sizes.dtype], dtype)
    llama = Llama(config, sizes.device, dtype, seed=None, ops=ops, weight_dtype=weight_dtype)
    fill_model(llama, random_weights(llama, sizes))
    return llama.pack_weights()


def random_weights(llama: Llama, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """A plain weight in the place of each of the model's, made when it is asked for."""
    torch.manual_seed(0)
    for name, weight in llama.named_weights().items():
        if name.endswith("norm.weight"):
            spread = 0.5 if "_norm." in name else 0.0  # of q, of k
            numbers = torch.linspace(1 - spread, 1 + spread, len(weight), device=sizes.device)
            yield name, numbers.to(sizes.dtype)
        else:
            yield name, 0.02 * random_numbers(sizes, *weight.shape)


def random_engine(
    llama: Llama, draft: Llama | None, max_len: int, max_batch: int, kv_bits: str = "16"
) -> Engine:
    """An engine of models without a tokenizer."""
    tokenizer = SimpleNamespace(vocab_size=llama.config.vocab_size, eos_token_id=None)
    model = Model(llama, tokenizer)
    drafts = Draft(partial(ModelDrafter, draft), (draft,), True) if draft else None
    return Engine(
        model,
        drafts,
        Options(max_len=max_len, max_batch=max_batch, kv_bits=kv_bits),
        tokens=max_len * max_batch,
    )


def text_seconds(engine: Engine, sizes: Sizes, turn: int, gamma: int | None = 0) -> float:
    """Seconds a token of one text. turn: other turns have other texts."""
    request = random_request(sizes.context, sizes.count, turn, gamma)
    return serve(engine, [request]).seconds_per_token


def stream_seconds(engine: Engine, sizes: Sizes, gamma: int | None = 0) -> float:
    """A median over turns. One turn more warms up."""
    turns = range(sizes.turns + 1)
    return median([text_seconds(engine, sizes, turn, gamma) for turn in turns][1:])


def open_texts(spec: KVSpec, counts: Sequence[int], past: int, fewer: int = 5) -> AttentionMetadata:
    """Texts with random keys and values in the first layer -> a step of so many more tokens of
    each. past: tokens of the first text; each next one has so many fewer."""
    num_blocks = len(counts) * ((past + max(counts)) // 16 + 1)
    cache = PagedCache(spec, num_blocks)
    seqs = [cache.open(())[0] for _ in counts]
    if past:
        old = []
        for i, seq in enumerate(seqs):
            length = max(1, past - fewer * i)
            old.append((seq, [0] * length))
        slot_mapping = cache.extend(old).slot_mapping.long()
        shape = len(slot_mapping), spec.kv_heads, spec.head_dim
        for store in (cache.keys, cache.values):
            numbers = torch.randn(shape, device=spec.device)
            store.write(0, slot_mapping, SPREAD * numbers)
    return cache.extend([(seq, [0] * n) for seq, n in zip(seqs, counts)])


# ---- Kernels alone -------------------------------------------------------------------------------


def attention_call(sizes: Sizes, num_texts: int, count: int, kv_bits: str) -> Kernel:
    """Attention of each text's newest `count` tokens, of `sizes.prompt`, as the peers' is."""
    c = SHAPES[sizes.target]
    G = c.num_key_value_heads
    spec = KVSpec(1, G, c.head_dim, dtype=sizes.dtype, bits=WIDTHS[kv_bits], device=sizes.device)
    metadata = open_texts(spec, [count] * num_texts, sizes.prompt - count, fewer=0)
    num_heads = c.num_attention_heads + 2 * G
    qkv = random_numbers(sizes, num_texts * count, num_heads, c.head_dim)
    read = spec.bytes(sum(sequence.seq_len for sequence in metadata.sequences))
    return partial(ops_for(sizes.device).attend, qkv, G, None, metadata, 0), read


def product_call(sizes: Sizes, way: str, rows: int, ops: Ops | None = None) -> Kernel:
    """The gate and up product. ops: whose, if not the device's."""
    K = SHAPES[sizes.target].hidden_size
    N = 2 * SHAPES[sizes.target].intermediate_size
    weight = random_numbers(sizes, N, K)
    layout = WAYS[way]
    if layout is not None:
        weight = quantize(weight, layout.bits, layout.group)
        weight = weight._replace(input_bits=layout.activations)
    ops = ops or ops_for(sizes.device)
    packed = ops.pack_weight(Linear(weight), sizes.dtype)
    x = random_numbers(sizes, rows, K)
    return partial(ops.linear, x, packed), weight.nbytes
