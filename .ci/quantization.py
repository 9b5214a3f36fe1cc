"""What the bits cost a real model: limits for the table of `python -m train.quantize NAME --table`.

    python .ci/quantization.py SMOLLM2 TEXT STORIES

SMOLLM2: a folder with a model; TEXT: its beginning is measured; STORIES: those of the embedded
model, of which those that it never saw are measured. Groups have 128 weights.

The goal of 4-bit weights is that calibration saves half of what rounding loses: here on the
embedded model. SmolLM2's folder, whose values were rounded to 4 bits once already, needs AWQ and
GPTQ together, which take minutes: 51 to 54 % of 4,096 tokens, calibrated on 8 pieces.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint.formats import Quantization
from checkpoint.hub import find_model
from quant import WIDTHS
from tokenizer import Tokenizer
from train.perplexity import Recipe, Row, table
from train.quantize import pieces

TOKENS = 4096  # that are measured
PIECES = 8  # of 512 tokens, to calibrate with
KV_LIMITS = {"8": 0.003, "8/4": 0.02, "4": 0.04}  # last bits move the cost by a third
EMBEDDED = {  # the recipes of the embedded model's table, after its 16 bits
    "INT8": Quantization(8),
    "INT4": Quantization(4),
    "FP8": Quantization("fp8"),
    "NF4": Quantization("nf4", 64),
    "W8A8": Quantization(8, activations=8),
    "SmoothQuant": Quantization(8, method="smoothquant", activations=8),
    "AWQ": Quantization(4, method="awq"),
    "GPTQ": Quantization(4, method="gptq"),
    "GPTQ after AWQ": Quantization(4, method="awq+gptq"),
}
SAVED = {"AWQ": 0.2, "GPTQ": 0.5, "GPTQ after AWQ": 0.5}  # at least, of what rounding loses


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


def loss(row: Row, plain: Row) -> float:
    """The share by which perplexity rises."""
    return row.perplexity / plain.perplexity - 1


def embedded(stories: str) -> None:
    """On stories that the model has not seen."""
    tokenizer = Tokenizer.load(find_model("tiny"))
    measured = pieces(stories, tokenizer, 1024, TOKENS // 1024)
    calibration = pieces(stories, tokenizer, 512, PIECES, calibrate=True)
    recipes = [Recipe(None, ["16"])]
    for name, how in EMBEDDED.items():
        recipes.append(Recipe(how, ["16", "8"] if name == "INT8" else ["16"]))
    plain, *rows = table("tiny", measured, calibration, recipes, "cpu")
    kv = rows.pop(1)
    by_name = dict(zip(EMBEDDED, rows))
    cost = {name: loss(row, plain) for name, row in by_name.items()}
    require(cost["INT8"] < 0.002, f"weights in 8 bits cost {cost['INT8']:.2%}, at most 0.2%")
    told = f"weights, keys and values in 8 bits cost {loss(kv, plain):.2%}, at most 0.2%"
    require(loss(kv, plain) < 0.002, told)
    require(cost["FP8"] < 0.003, f"weights in FP8 cost {cost['FP8']:.2%}, at most 0.3%")
    told = f"weights in NF4 cost {cost['NF4']:.2%}, at most what INT4 costs, {cost['INT4']:.2%}"
    require(cost["NF4"] <= cost["INT4"], told)
    no_more = by_name["NF4"].bytes <= by_name["INT4"].bytes
    require(no_more, "NF4 in groups of 64 has no more bytes than INT4")
    told = f"8 bits cost {cost['SmoothQuant']:.2%} with SmoothQuant, {cost['W8A8']:.2%} without"
    require(cost["SmoothQuant"] < 0.01, f"weights and activations in {told}; at most 1%")
    for name, least in SAVED.items():
        share = 1 - cost[name] / cost["INT4"]
        told = f"{name} saves {share:.0%} of what rounding loses, at least {least:.0%}"
        require(share > least, f"weights in 4 bits: {told}")


def main(folder: str, file: str, stories: str) -> int:
    embedded(stories)
    recipes = [
        Recipe(None, list(WIDTHS)),
        Recipe(Quantization(8), ["16"]),
        Recipe(Quantization(4), ["16"]),
    ]
    text = pieces(file, Tokenizer.load(Path(folder)), 1024, TOKENS // 1024)
    plain, *kv, int8, int4 = table(folder, text, [], recipes, "cpu")
    print("(this folder's 16 bits were rounded to 4 once already: other models lose other amounts)")
    for row in kv:
        limit = KV_LIMITS[row.width]
        told = f"cost {loss(row, plain):.2%}, at most {limit:.1%}"
        require(loss(row, plain) < limit, f"keys and values in {row.width} bits {told}")
    told = f"weights in 8 bits cost {loss(int8, plain):.2%}, at most 0.2%"
    require(loss(int8, plain) < 0.002, told)
    told = f"rounded to 4 bits, they cost {loss(int4, plain):.1%}, at most 45%"
    require(loss(int4, plain) < 0.45, told)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
