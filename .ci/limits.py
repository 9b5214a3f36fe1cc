"""What fewer bits cost a real model, and its texts with drafts: limits of quality.

    python .ci/limits.py SMOLLM2 TEXT STORIES PROMPTS

A row of LIMITS is a figure, and where it must lie. (measure/test_bench.py has limits of the
embedded model's bits.)
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from checks import require

from checkpoint.formats import Quantization
from checkpoint.hub import find_model
from loading import Model, load_draft
from measure.serving import engine_for, serve
from quant import WIDTHS
from request import Request, Settings
from tokenizer import Tokenizer
from train.perplexity import Recipe, Row, table
from train.quantize import pieces

Figures = dict[str, float]
LIMITS = {  # at least, at most
    # Greedy texts, with n-grams as drafts and without.
    "the same with γ = 3": (1, 1),
    "the same with auto": (1, 1),
    "drafts that stood": (20, math.inf),
    # Of what rounding the embedded model to 4 bits loses, on stories that it has not seen.
    "saved by awq": (0.2, 1),
    "saved by gptq": (0.5, 1),
    "saved by awq+gptq": (0.5, 1),
    # Of 16 bits' perplexity, what fewer bits add. SmolLM2's folder was rounded to 4 bits once
    # already: other models lose other amounts.
    "16 bits, 8": (-1, 0.003),
    "16 bits, 8/4": (-1, 0.02),
    "16 bits, 4": (-1, 0.04),
    "INT8 rtn, 16": (-1, 0.002),
    "INT4 rtn, groups of 128, 16": (-1, 0.45),
}


def main(folder: str, text: str, stories: str, prompts: str) -> None:
    with open(prompts, encoding="utf-8") as lines:
        turns = [json.loads(line)["turns"][0] for line in lines][:30]
    found = same_texts(Model.load(folder, "cpu", torch.float32), turns)
    found |= saved(stories) | losses(folder, text)
    for figure, (least, most) in LIMITS.items():
        told = f"{figure} {found[figure]:.3g}, {least:.3g} to {most:.3g}"
        require(least <= found[figure] <= most, told)


def greedy(model: Model, gamma: int | None, prompts: list[str]) -> list[Request]:
    """The texts of all prompts, made together; with n-grams but for γ = 0."""
    settings = Settings(temperature=0.0, seed=0, max_tokens=24, gamma=gamma)
    requests = []
    for prompt in prompts:
        requests.append(Request(model.encode(prompt), settings, model.eos_token_ids))
    draft = None if gamma == 0 else load_draft("ngram", model)
    serve(engine_for(model, draft, requests), requests)
    return requests


def same_texts(model: Model, prompts: list[str]) -> Figures:
    plain = greedy(model, 0, prompts)
    figures = {}
    for gamma, name in ((3, "γ = 3"), (None, "auto")):
        drafted = greedy(model, gamma, prompts)
        same = sum(a.tokens == b.tokens for a, b in zip(plain, drafted))
        figures[f"the same with {name}"] = same / len(prompts)
        if gamma is not None:
            stood = [stats.num_accepted for request in drafted for stats in request.rounds]
            figures["drafts that stood"] = sum(stood)
    return figures


def loss(row: Row, plain: Row) -> float:
    """The share by which perplexity rises."""
    return row.perplexity / plain.perplexity - 1


def saved(stories: str) -> Figures:
    """Of what rounding to 4 bits loses, on stories that the embedded model has not seen."""
    tokenizer = Tokenizer.load(find_model("tiny"))
    measured = pieces(stories, tokenizer, 1024, 4)
    calibration = pieces(stories, tokenizer, 512, 8, calibrate=True)
    methods = ("awq", "gptq", "awq+gptq")
    recipes = [Recipe(None, ["16"]), Recipe(Quantization(4), ["16"])]
    recipes += [Recipe(Quantization(4, method=method), ["16"]) for method in methods]
    plain, rounded, *rows = table("tiny", measured, calibration, recipes, "cpu")
    lost = loss(rounded, plain)
    return {f"saved by {name}": 1 - loss(row, plain) / lost for name, row in zip(methods, rows)}


def losses(folder: str, text: str) -> Figures:
    measured = pieces(text, Tokenizer.load(Path(folder)), 1024, 4)
    recipes = [Recipe(None, list(WIDTHS))]
    recipes += [Recipe(Quantization(bits), ["16"]) for bits in (8, 4)]
    rows = table(folder, measured, [], recipes, "cpu")
    return {f"{row.weights}, {row.kv}": loss(row, rows[0]) for row in rows}


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(*sys.argv[1:])
