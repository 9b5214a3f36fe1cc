"""The peers on a GPU, in turns with ours: PyTorch's own kernels, and transformers.

    python bench.py --gpu peers

    FLASH_ATTENTION, …        attention by SDPA's back ends: of a prompt, and of a query of each of
                              many texts. Ours stores, too
    cuBLAS                    a product of 1, 8 and 64 rows in 16 bits
    transformers              a stream of 8B in 16 bits, by its `generate`
    transformers, recorded    its step as a CUDA graph over a static cache

Invariant: a turn measures both; times and the ratio are medians over turns. A peer that is not
there, or refuses, is named.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import Ops
from measure.clock import in_turns, ratio
from measure.gpu_parts import (
    SHAPES,
    Row,
    Scale,
    attention_call,
    product_call,
    random_engine,
    random_model,
    random_numbers,
    stopwatch,
    text_seconds,
)
from measure.peers import transformers_text

Seconds = Callable[[], float]


def peer_keys(scale: Scale) -> Iterator[tuple[Any, ...]]:
    backends = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    yield from product(backends, (1,), (scale.prompt,))
    yield from product(backends, (scale.num_texts,), (1,))
    yield from product(("cuBLAS",), (1, 8, 64))
    yield ("transformers",)
    yield ("transformers, recorded",)


def peer_row(scale: Scale, name: str, *key: Any) -> Row:
    rival = RIVALS.get(name, partial(sdpa, name))
    try:
        theirs = rival(scale, *key)
        theirs()
    except Exception as error:
        return ["", "", f"none: {type(error).__name__} {str(error)[:80]}"]
    ours = our_seconds(scale, name, *key)
    columns = in_turns((theirs, ours), scale.turns)
    cells = [f"{1e3 * median(seconds):.4g}" for seconds in columns]
    return [*cells, f"{ratio(*columns):.2f}"]


def our_seconds(scale: Scale, name: str, *key: Any) -> Seconds:
    if not key:  # a text
        llama = random_model(scale.target, "16 bits", scale)
        engine = random_engine(llama, None, 2 * scale.context, 1)
        turns = count()
        text_seconds(engine, scale, next(turns))  # compiles and records
        return lambda: text_seconds(engine, scale, next(turns))
    if name == "cuBLAS":
        call, _ = product_call(scale, "16 bits", *key)
    else:
        call, _ = attention_call(scale, *key, "16")
    return stopwatch(call, scale)


# ---- Their kernels -------------------------------------------------------------------------------


def sdpa(backend: str, scale: Scale, num_texts: int, num_new: int) -> Seconds:
    """Attention of each text's newest tokens, of `scale.prompt`."""
    c = SHAPES[scale.target]
    q = random_numbers(scale, num_texts, c.num_attention_heads, num_new, c.head_dim)
    k = random_numbers(scale, num_texts, c.num_key_value_heads, scale.prompt, c.head_dim)
    if backend != "FLASH_ATTENTION":  # the others may have no groups of heads
        k = k.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 1)
    options = dict(is_causal=num_new > 1, enable_gqa=backend == "FLASH_ATTENTION")

    def run() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            F.scaled_dot_product_attention(q, k, k, **options)

    return stopwatch(run, scale)


def cublas(scale: Scale, rows: int) -> Seconds:
    call, _ = product_call(scale, "16 bits", rows, Ops())
    return stopwatch(call, scale)


# ---- transformers --------------------------------------------------------------------------------


def random_transformers(scale: Scale) -> Any:
    """Its Llama of the target's shape, with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[scale.target].to_dict())
    with torch.device(scale.device):
        model = AutoModelForCausalLM.from_config(config, dtype=scale.dtype).eval()
    model.generation_config.eos_token_id = None  # no text stops early
    return model


def eager(scale: Scale) -> Seconds:
    model = random_transformers(scale)
    prompts = [[300] * scale.context]
    return lambda: 1 / transformers_text(model, prompts, scale.count).tokens_per_second


def recorded(scale: Scale) -> Seconds:
    """The step after the prompt, again and again."""
    from transformers import StaticCache

    model = random_transformers(scale)
    cache = StaticCache(config=model.config, max_cache_len=2 * scale.context)
    options = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    places = torch.arange(scale.context + 1, device=scale.device)[None]
    tokens = torch.full_like(places, 300)
    model(tokens[:, :-1], position_ids=places[:, :-1], **options)
    token = tokens[:, -1:]
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> None:
        logits = model(token, position_ids=places[:, -1:], **options).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        torch._foreach_sub_(lengths, 1)  # the next step is the same

    return stopwatch(step, scale)


RIVALS = {"cuBLAS": cublas, "transformers": eager, "transformers, recorded": recorded}
