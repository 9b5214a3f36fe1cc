"""The peers on a GPU, in turns with ours: PyTorch's own kernels, and transformers.

    python bench.py --gpu peers

    FLASH_ATTENTION, …        attention by SDPA's back ends: of a prompt, and of a query of each of
                              many texts. Ours stores, too
    cuBLAS                    a product of 1 and 8 rows in 16 bits; of more, ours is cuBLAS's
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
from measure.contestants import transformers_text
from measure.gpu_parts import (
    SHAPES,
    Row,
    attention_call,
    product_call,
    random_engine,
    random_model,
    random_numbers,
    stopwatch,
    text_seconds,
)
from measure.sizes import Sizes

Seconds = Callable[[], float]


def peer_keys(sizes: Sizes) -> Iterator[tuple[Any, ...]]:
    backends = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    yield from product(backends, (1,), (sizes.prompt,))
    yield from product(backends, (sizes.num_texts,), (1,))
    yield from product(("cuBLAS",), (1, 8))
    yield ("transformers",)
    yield ("transformers, recorded",)


def peer_row(sizes: Sizes, name: str, *key: Any) -> Row:
    rival = RIVALS.get(name, partial(sdpa, name))
    try:
        theirs = rival(sizes, *key)
        theirs()
    except Exception as error:
        return ["", "", f"none: {type(error).__name__} {str(error)[:80]}"]
    ours = our_seconds(sizes, name, *key)
    columns = in_turns((theirs, ours), sizes.turns)
    cells = [f"{1e3 * median(seconds):.4g}" for seconds in columns]
    return [*cells, f"{ratio(*columns):.2f}"]


def our_seconds(sizes: Sizes, name: str, *key: Any) -> Seconds:
    if not key:  # a text
        llama = random_model(sizes.target, "16 bits", sizes)
        engine = random_engine(llama, None, 2 * sizes.context, 1)
        turns = count()
        text_seconds(engine, sizes, next(turns))  # compiles and records
        return lambda: text_seconds(engine, sizes, next(turns))
    if name == "cuBLAS":
        call, _ = product_call(sizes, "16 bits", *key)
    else:
        call, _ = attention_call(sizes, *key, "16")
    return stopwatch(call, sizes)


# ---- Their kernels -------------------------------------------------------------------------------


def sdpa(backend: str, sizes: Sizes, num_texts: int, num_new: int) -> Seconds:
    """Attention of each text's newest tokens, of `sizes.prompt`, over as few key/value heads as
    ours: a back end without GQA refuses."""
    c = SHAPES[sizes.target]
    q = random_numbers(sizes, num_texts, c.num_attention_heads, num_new, c.head_dim)
    k = random_numbers(sizes, num_texts, c.num_key_value_heads, sizes.prompt, c.head_dim)

    def run() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            F.scaled_dot_product_attention(q, k, k, is_causal=num_new > 1, enable_gqa=True)

    return stopwatch(run, sizes)


def cublas(sizes: Sizes, rows: int) -> Seconds:
    call, _ = product_call(sizes, "16 bits", rows, Ops())
    return stopwatch(call, sizes)


# ---- transformers --------------------------------------------------------------------------------


def random_transformers(sizes: Sizes) -> Any:
    """Its Llama of the target's shape, with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[sizes.target].to_dict())
    with torch.device(sizes.device):
        model = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype).eval()
    model.generation_config.eos_token_id = None  # no text stops early
    return model


def eager(sizes: Sizes) -> Seconds:
    model = random_transformers(sizes)
    prompts = [[300] * sizes.context]
    return lambda: 1 / transformers_text(model, prompts, sizes.count).tokens_per_second


def recorded(sizes: Sizes) -> Seconds:
    """The step after the prompt, again and again."""
    from transformers import StaticCache

    model = random_transformers(sizes)
    cache = StaticCache(config=model.config, max_cache_len=2 * sizes.context)
    options = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    places = torch.arange(sizes.context + 1, device=sizes.device)[None]
    tokens = torch.full_like(places, 300)
    model(tokens[:, :-1], position_ids=places[:, :-1], **options)
    token = tokens[:, -1:]
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> None:
        logits = model(token, position_ids=places[:, -1:], **options).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        torch._foreach_sub_(lengths, 1)  # the next step is the same

    return stopwatch(step, sizes)


RIVALS = {"cuBLAS": cublas, "transformers": eager, "transformers, recorded": recorded}
