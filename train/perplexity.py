"""The cost of fewer bits: bytes and perplexity of a model with small weights, keys and values.

    perplexity = exp(mean of −log p(token | the tokens before it in its piece of text))

It is measured in float32, through the production cache: rows differ only in bits. On texts that a
model made, their `author`, the mean is over the author's probabilities of every token, not over the
one that it sampled: the same on average, without the noise. A calibrated method (calibrate.py)
recovers some of the loss of rounding, with the same bytes.

    python -m train.quantize NAME --table TEXT --data FILE    a model, calibrated on FILE

Cost: a pass over the text for each row, and quantizing the model for each recipe. Not covered:
benchmarks.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.formats import Quantization
from kvcache import KVCache
from model import Llama
from quant import FORMATS, WIDTHS, Bits
from train.calibrate import quantize_model, size
from train.gqa import cache_bytes

CHUNK = 256  # tokens of a pass: the logits of more take much memory


@torch.inference_mode()
def perplexity(
    llama: Llama, texts: Sequence[Tensor], bits: Bits = (16, 16), author: Llama | None = None
) -> float:
    """The perplexity of all tokens but each text's first, through a cache of these bits.

    texts: int64[T] each.
    """
    cache = KVCache(llama.kv_spec(bits=bits), max(len(text) for text in texts))
    losses = []
    for text in texts:
        context = text[:-1]
        targets = text[1:]  # [T − 1], or their probabilities, [T − 1, V]
        if author is not None:
            targets = author(context.to(author.device)).softmax(-1)
        seq, _ = cache.open(())
        for tokens, target in zip(context.split(CHUNK), targets.split(CHUNK)):
            metadata = cache.extend([(seq, tokens.tolist())])
            logits = llama(tokens.to(llama.device), metadata).float()  # [chunk, V]
            losses.append(F.cross_entropy(logits, target.to(llama.device), reduction="none"))
        cache.free(seq)
    return torch.cat(losses).double().mean().exp().item()


class Recipe(NamedTuple):
    """How weights are quantized (None: they are not), and the widths of keys and values."""

    how: Quantization | None
    widths: Sequence[str]


class Row(NamedTuple):
    weights: str  # how they are quantized
    kv: str  # bits of keys and values
    bytes: int  # of the weights, scales included
    kv_bytes: int  # of a token's keys and values
    perplexity: float


def recipes(methods: Sequence[str], groups: Sequence[int] = (32, 64, 128)) -> list[Recipe]:
    """All recipes; SmoothQuant is one if `methods` has a calibrated one.

    Keys and values of every width: with the weights of the checkpoint, and with INT8 and INT4 by
    the last method and group.
    """
    best = methods[-1]
    hows = [None, Quantization(8, method=best)]
    if best != "rtn":
        hows.insert(1, Quantization(8))
    hows += [Quantization("fp8"), Quantization("nf4", 64), Quantization(8, activations=8)]
    if best != "rtn":
        hows.append(Quantization(8, method="smoothquant", activations=8))
    hows += [Quantization(4, group, method=method) for group, method in product(groups, methods)]
    in_all_widths = (None, Quantization(8, method=best), hows[-1])
    return [Recipe(how, list(WIDTHS) if how in in_all_widths else ["16"]) for how in hows]


def table(
    name: str | Path,
    texts: Sequence[Tensor],
    calibration: Sequence[Tensor],
    recipes: Sequence[Recipe],
    device: torch.device | str | None = None,
    author: Llama | None = None,
) -> list[Row]:
    """A row for each recipe and width, printed as soon as it is measured."""
    num_tokens = sum(len(text) for text in texts)
    print(
        f"{name}: bytes of the weights, scales included, and of a token's keys and values; "
        f"perplexity of {num_tokens:,} tokens"
    )
    print(f"{'weights':30}   KV         bytes  of 16 bits  KV bytes  perplexity")
    rows = []
    for how, widths in recipes:
        llama = Llama.load(name, device, torch.float32, trainable=True)
        if how is not None:
            llama = quantize_model(llama, how, calibration)
        weight_bytes = size(llama)
        llama.pack_weights()
        for width in widths:
            bits = WIDTHS[width]
            row = Row(
                recipe_label(how),
                width,
                weight_bytes,
                kv_bytes=cache_bytes(llama, bits),
                perplexity=perplexity(llama, texts, bits, author),
            )
            rows.append(row)
            print(row_text(row, rows[0]), flush=True)
    return rows


def recipe_label(how: Quantization | None) -> str:
    """The name of a way to quantize weights."""
    if how is None:
        return "16 bits"
    label = f"{how.name} {how.method}"
    if how.activations == 8:
        label = f"W8A8 {how.method}"
    if FORMATS[how.bits].group:
        label += f", groups of {how.group}"
    return label


def row_text(row: Row, first: Row) -> str:
    """A line of the table, beside the first row of it."""
    size = row.bytes / first.bytes
    loss = row.perplexity / first.perplexity - 1
    weights = f"{row.weights:30}{row.kv:>5}{row.bytes:14,}{size:12.3f}"
    return f"{weights}{row.kv_bytes:10,}{row.perplexity:12.3f}{loss:+8.2%}"
