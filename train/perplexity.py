"""The cost of fewer bits: bytes and perplexity of a model with fewer bits for weights, keys and values, in one table.

    perplexity = exp(mean of −log p(token | the tokens before it in its piece of text))

It is measured in float32, through the production cache: rows differ only in bits. With the model that told the texts,
their `author`, the mean is over its probabilities of every token, not over the one that it drew: the same on average,
without the noise. A calibrated method (calibrate.py) recovers some of the loss of rounding, with the same bytes:

    saved = (rounding − method) / (rounding − 16 bits)        all are perplexities; 1: the method loses nothing

    python quant.py NAME --table TEXT --data FILE             the table of a model, calibrated on FILE
    python -m train.perplexity                                a short one of the embedded model, on its own texts

Cost: a pass over the text for each row, and quantizing the model for each recipe. Not covered: benchmarks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.formats import Quantization
from kvcache import KVCache, kv_bytes
from model import Llama
from quant import GROUPS, WIDTHS, Bits
from train.calibrate import quantized, size
from train.distill import sample_corpus

CHUNK = 256  # tokens of a pass: the logits of more take much memory


@torch.inference_mode()
def perplexity(
    llama: Llama, texts: Sequence[Tensor], bits: Bits = (16, 16), author: Llama | None = None
) -> float:
    """The perplexity of all tokens but each text's first, through a cache of these bits. texts: int64[T] each."""
    cache, losses = KVCache.of(llama, max(map(len, texts)), bits=bits), []
    for text in texts:
        seq, _ = cache.open(())
        wanted = text[1:] if author is None else author(text[:-1].to(author.device)).softmax(-1)
        for new, after in zip(text[:-1].split(CHUNK), wanted.split(CHUNK)):
            logits = llama(
                new.to(llama.device), cache.extend([(seq, new.tolist())])
            ).float()  # [chunk, V]
            losses.append(F.cross_entropy(logits, after.to(llama.device), reduction="none"))
        cache.free(seq)
    return torch.cat(losses).double().mean().exp().item()


class Recipe(NamedTuple):
    """How weights are quantized (None: as in the checkpoint), and the widths of keys and values to measure with."""

    how: Quantization | None
    widths: Sequence[str]


class Row(NamedTuple):
    how: Quantization | None
    width: str  # bits of keys and values
    bytes: int  # of the weights, scales included
    token: float  # bytes of a token's keys and values
    perplexity: float


def recipes(
    methods: Sequence[str], groups: Sequence[int] = (32, 64, 128), head_bits: int = 8
) -> list[Recipe]:
    """All recipes. The checkpoint's weights, and INT8 and INT4 by the last method and group, with K/V of every width.
    SmoothQuant is a recipe if `methods` has a calibrated one."""
    every, plain, best = list(WIDTHS), ["16"], methods[-1]
    eights = [
        Recipe(Quantization(8, 128, head_bits, method), every if method == best else plain)
        for method in dict.fromkeys(("rtn", best))
    ]
    others = [
        Recipe(Quantization("fp8", 128, head_bits), plain),
        Recipe(Quantization("nf4", 64, head_bits), plain),
        *(
            Recipe(Quantization(8, 128, head_bits, method, 8), plain)
            for method in dict.fromkeys(("rtn", "rtn" if best == "rtn" else "smoothquant"))
        ),
    ]
    fours = [
        Recipe(Quantization(4, group, head_bits, method), plain)
        for group in groups
        for method in methods
    ]
    return [Recipe(None, every), *eights, *others, *fours[:-1], fours[-1]._replace(widths=every)]


def saved(row: Row, rows: Sequence[Row]) -> float | None:
    """The share of rounding's loss that a calibrated row saves. None for other rows, and if rounding loses nothing."""
    if row.how is None or row.how.method == "rtn" or row.width != "16":
        return None
    plain, rounding = rows[0].perplexity, replace(row.how, method="rtn")
    rounded = next(
        (other.perplexity for other in rows if (other.how, other.width) == (rounding, "16")), plain
    )
    return (rounded - row.perplexity) / (rounded - plain) if rounded > plain else None


def table(
    name: str,
    texts: Sequence[Tensor],
    calibration: Sequence[Tensor],
    wanted: Sequence[Recipe],
    device: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
    author: Llama | None = None,
) -> list[Row]:
    """A row for each recipe and width, printed as soon as it is measured, and compared with the first row."""
    print(
        f"{name}: bytes of the weights, scales included, and of a token's keys and values; perplexity of "
        f"{sum(map(len, texts)):,} tokens, and how much of what rounding loses a method saves"
    )
    print(f"{'weights':30}   KV         bytes  of 16 bits  KV bytes  perplexity{'saved':>17}")
    rows: list[Row] = []
    for recipe in wanted:
        llama = quantized(name, recipe.how, calibration, device, torch.float32, progress)
        c, weights = llama.config, size(llama)
        llama.prepare()
        for width in recipe.widths:
            kv = kv_bytes(
                c.num_hidden_layers,
                c.num_key_value_heads,
                c.head_dim,
                1024,
                torch.bfloat16,
                WIDTHS[width],
            )
            rows.append(
                Row(
                    recipe.how,
                    width,
                    weights,
                    kv / 1024,
                    perplexity(llama, texts, WIDTHS[width], author),
                )
            )
            print(printed(rows), flush=True)
    return rows


def recipe_label(how: Quantization | None) -> str:
    """The name of a way to quantize weights."""
    if how is None:
        return "16 bits"
    kind = "W8A8" if how.activations == 8 else how.name
    return f"{kind} {how.method}" + (f", groups of {how.group}" if how.bits in GROUPS else "")


def printed(rows: Sequence[Row]) -> str:
    """The line of the last row."""
    first, row, share = rows[0], rows[-1], saved(rows[-1], rows)
    return (
        f"{recipe_label(row.how):30}{row.width:>5}{row.bytes:14,}{row.bytes / first.bytes:12.3f}{row.token:10,.0f}"
        f"{row.perplexity:12.3f}{100 * (row.perplexity / first.perplexity - 1):+8.2f} %"
        + (f"{share:7.0%}" if share is not None else "")
    ).rstrip()


# ---- The demonstration: the embedded model, on texts that it made: some to calibrate with, others to measure ---------


def main() -> None:
    target = Llama.load("tiny", "cpu", torch.float32, trainable=True).requires_grad_(False)
    told = (
        sample_corpus(target, 64, 72, target.config.eos_token_ids[0], seed=1)
        .tokens.roll(1)
        .view(64, -1)
    )
    table("tiny", list(told[:40]), list(told[40:]), recipes(("rtn", "gptq"), (128,)), author=target)


if __name__ == "__main__":
    main()
