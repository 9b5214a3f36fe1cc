"""What the bits cost: bytes and perplexity of a model whose weights, keys and values have fewer of them, in one table.

    perplexity = exp(mean of −log p(token | those before it in its piece))

It is measured through the real cache: a piece is read in chunks, what is stored is rounded, and attention looks back at what was
stored. So a row is what somebody gets who decodes with these bits. All compute in float32: only the bits differ.

Rounding loses something; a calibrated method (calibrate.py) gets some of it back with the same bytes:

    saved = (rounding − method) / (rounding − 16 bits)        of perplexities; 1: nothing is lost any more

    python quant.py NAME --table TEXT --data FILE             the table of a model, calibrated on FILE
    python -m train.perplexity                                a short one of the embedded model, on what it tells itself

Invariant: a row does not depend on the rows before it.
Cost: a pass over the text for each row, and what quantizing costs for each recipe.

Not covered: tasks and benchmarks. A perplexity of few tokens tells methods apart on these tokens; other text has another one.

    T tokens of a piece · V vocabulary
"""
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Quantization
from kvcache import kv_bytes
from kvquant import WIDTHS, Bits
from model import Llama
from shell import say
from train.calibrate import quantized, size
from train.distill import tell

CHUNK = 256                                             # tokens that are read at a time: the logits of more would take much memory


@torch.inference_mode()
def perplexity(llama: Llama, texts: Sequence[Tensor], bits: Bits = (16, 16)) -> float:
    """Of all tokens but each piece's first, through a cache of these bits. texts: int64[T] each."""
    cache, losses = llama.cache(max(map(len, texts)), bits=bits), []
    for text in texts:
        seq, _ = cache.open(())
        for new, wanted in zip(text[:-1].split(CHUNK), text[1:].split(CHUNK)):
            logits = llama(new.to(llama.device), cache.extend([(seq, new.tolist())])).float()              # [chunk, V]
            losses.append(F.cross_entropy(logits, wanted.to(llama.device), reduction="none"))
        cache.free(seq)
    return torch.cat(losses).double().mean().exp().item()


class Recipe(NamedTuple):
    """Weights, None for those of the checkpoint, and the widths of keys and values to measure them with."""
    how: Quantization | None
    widths: Sequence[str]

    @property
    def label(self) -> str:
        if self.how is None:
            return "16 bits"
        return f"INT{self.how.bits} {self.how.method}" + f", groups of {self.how.group}" * (self.how.bits == 4)


class Row(NamedTuple):
    """A line of the table."""
    how: Quantization | None
    width: str                                          # of keys and values
    bytes: int                                          # of the weights, scales included
    token: float                                        # bytes of a token's keys and values
    perplexity: float


def recipes(methods: Sequence[str], groups: Sequence[int] = (32, 64, 128), head_bits: int = 8) -> list[Recipe]:
    """All that is offered. The checkpoint's weights, INT8 by the last method, and INT4 by the last method and group meet keys and values of every width."""
    every, plain, best = list(WIDTHS), ["16"], methods[-1]
    eights = [Recipe(Quantization(8, 128, head_bits, method), every if method == best else plain) for method in dict.fromkeys(("rtn", best))]
    fours = [Recipe(Quantization(4, group, head_bits, method), plain) for group in groups for method in methods]
    return [Recipe(None, every), *eights, *fours[:-1], fours[-1]._replace(widths=every)]


def saved(row: Row, rows: Sequence[Row]) -> float | None:
    """The share of rounding's loss that a calibrated row does not have. None where there is nothing to compare, or nothing was lost."""
    if row.how is None or row.how.method == "rtn":
        return None
    same = lambda other: other.how and other.how.method == "rtn" and (other.how.bits, other.how.group) == (row.how.bits, row.how.group)
    rounded = next((other.perplexity for other in rows if same(other) and other.width == row.width == "16"), None)
    if rounded is None or rounded <= rows[0].perplexity:
        return None
    return (rounded - row.perplexity) / (rounded - rows[0].perplexity)


def table(name: str, texts: Sequence[Tensor], calibration: Sequence[Tensor], wanted: Sequence[Recipe], device: str | None = None,
          progress: Callable[[str], None] = say) -> list[Row]:
    """A line for each recipe and width, printed when it is known. The first recipe is what the others are compared with."""
    print(f"{name}: bytes of the weights, scales included, and of a token's keys and values; perplexity of {sum(map(len, texts)):,} tokens, "
          "and how much of what rounding loses a method saves")
    print(f"{'weights':30}{'KV':>5}{'bytes':>14}{'of 16 bits':>12}{'KV bytes':>10}{'perplexity':>12}{'':10}{'saved':>7}")
    rows: list[Row] = []
    for recipe in wanted:
        llama = quantized(name, recipe.how, calibration, device, torch.float32, progress)
        c, weights = llama.config, size(llama)
        llama.pack()
        for width in recipe.widths:
            token = kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 1024, torch.bfloat16, WIDTHS[width]) / 1024
            rows.append(Row(recipe.how, width, weights, token, perplexity(llama, texts, WIDTHS[width])))
            print(line(recipe.label, rows), flush=True)
    return rows


def line(label: str, rows: Sequence[Row]) -> str:
    """The last row, in print."""
    first, row, share = rows[0], rows[-1], saved(rows[-1], rows)
    return (f"{label:30}{row.width:>5}{row.bytes:14,}{row.bytes / first.bytes:12.3f}{row.token:10,.0f}{row.perplexity:12.3f}"
            f"{100 * (row.perplexity / first.perplexity - 1):+8.2f} %" + (f"{share:7.0%}" if share is not None else "")).rstrip()


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the embedded model, on texts of its own: some to calibrate with, others to measure.

def main() -> None:
    target = Llama.load("tiny", "cpu", torch.float32, trainable=True).requires_grad_(False)
    told = tell(target, 32, 72, target.config.eos_token_ids[0], seed=1).tokens.view(32, -1)
    table("tiny", list(told[:8]), list(told[8:]), recipes(("rtn", "gptq"), (128,)), progress=lambda line: None)


if __name__ == "__main__":
    main()
