"""Limits of what is measured: speed, memory and quality that were gained are not lost.

    python .ci/limits.py results                     the sections that `python bench.py` has written
    python .ci/limits.py quality SMOLLM2 TEXT STORIES PROMPTS    a real model's bits and texts
    python .ci/limits.py speed                       serving and speculation, of the embedded models
    python .ci/limits.py steps SMOLLM2               steps in fewer bits, in turns with float32

A row of LIMITS is a figure, and where it must lie. Speeds are ratios between runs in turns. The
machine is shared: while one is below `again`, all of its kind are measured again, up to four times,
and the best of each counts. LLAMA_MARCH, ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY hold the
machine down to an older CPU; without C, no speed of fewer bits is required.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from checks import require

from checkpoint.formats import Quantization
from checkpoint.hub import find_model
from cpu import native
from generate import Engine
from loading import Model, load_draft
from measure.effort import OPENINGS
from measure.machine import instruction_set, results_file
from measure.serving import random_request, serve_at_once
from measure.steps import PAST, compare, load_widths
from model import Llama
from quant import WIDTHS
from request import Request, Settings
from settings import Options
from tokenizer import Tokenizer
from train.perplexity import Recipe, Row, table
from train.quantize import pieces

Figures = dict[str, float]
GAMMAS = (1, 2, 3, 4, 6, 8)
WIDTHS_OF_STEPS = ("INT8", "INT4")
STEPS = {  # tokens before, new tokens -> how many times as fast as float32 these are at least
    (PAST, 1): (1.7, 2.0),
    (PAST, 5): (1.2, 1.1),
    (PAST, 16): (1.0, 0.9),
    (PAST, 64): (0.8, 0.75),
    (0, 20): (0.8, 0.75),
    (0, 128): (0.8, 0.75),
}


class Limit(NamedTuple):
    kind: str
    figure: str
    least: float
    most: float = math.inf
    again: float = -math.inf


LIMITS = [
    # Of 16 bits' perplexity, what fewer bits add.
    Limit("bits", "INT8 rtn, 16", 0, most=0.0005),
    Limit("bits", "INT8 gptq, 8", -1, most=0.002),
    Limit("bits", "FP8 rtn, 16", 0, most=0.003),
    Limit("bits", "W8A8 rtn, 16", -1, most=0.001),
    Limit("bits", "SmoothQuant over W8A8", -1, most=1.0),
    Limit("bits", "NF4 over INT4", -1, most=1.0),
    Limit("bits", "bytes of NF4 over INT4", 0, most=1.0),
    Limit("bits", "saved by gptq", 0.5),  # of what rounding to 4 bits loses
    Limit("bits", "16 bits, 8", -1, most=0.00006),
    Limit("bits", "16 bits, 8/4", -1, most=0.003),
    Limit("bits", "16 bits, 4", -1, most=0.005),
    Limit("calibrated", "saved by awq", 0.2),
    Limit("calibrated", "saved by gptq", 0.5),
    Limit("calibrated", "saved by awq+gptq", 0.5),
    # SmolLM2's folder was rounded to 4 bits once already: other models lose other amounts.
    Limit("a real model's bits", "16 bits, 8", -1, most=0.003),
    Limit("a real model's bits", "16 bits, 8/4", -1, most=0.02),
    Limit("a real model's bits", "16 bits, 4", -1, most=0.04),
    Limit("a real model's bits", "INT8 rtn, 16", -1, most=0.002),
    Limit("a real model's bits", "INT4 rtn, groups of 128, 16", -1, most=0.45),
    # In the same memory.
    Limit("memory", "waste in blocks", 0, most=0.04),
    Limit("memory", "texts in flight, blocks over rows", 3),
    # Greedy texts of a real model, with n-grams as drafts and without.
    Limit("texts", "the same with γ = 3", 1),
    Limit("texts", "the same with auto", 1),
    Limit("texts", "drafts that stood", 20),
    # Times as fast.
    Limit("a shared prefix", "the first token", 3, again=3.3),
    Limit("batching", "over static batches", 1.5, again=1.65),
    Limit("batching", "over one at a time", 1.8, again=2),
    Limit("chunks of prompts", "the longest pause", 1.1, again=1.2),
    Limit("speculation", "auto over the best γ", 0.85, again=0.88),
    Limit("speculation", "auto with useless drafts", 0.9, again=0.92),
    Limit("speculation", "auto with an INT4 copy", 0.9, again=0.92),
    Limit("speculation", "acceptance of an INT4 copy", 0.9),
]
LIMITS += [
    Limit(f"{new} after {past}", width, least, again=1.05 * least)
    for (past, new), gains in STEPS.items()
    for width, least in zip(WIDTHS_OF_STEPS, gains)
]


def check(kind: str, measure: Callable[[], Figures], label: str = "") -> None:
    limits = [limit for limit in LIMITS if limit.kind == kind]
    found = measure()
    for _ in range(3):
        if all(found[limit.figure] >= limit.again for limit in limits):
            break
        again = measure()
        found = {figure: max(value, again[figure]) for figure, value in found.items()}
    for limit in limits:
        value = found[limit.figure]
        bounds = f"at least {limit.least:.3g}"
        if limit.most < math.inf:
            bounds = f"at most {limit.most:.3g}"
        told = f"{label or kind}: {limit.figure} {value:.3g}, {bounds}"
        require(limit.least <= value <= limit.most, told)


# ---- What bench.py has written


def results() -> None:
    sections = json.loads(results_file().read_text(encoding="utf-8"))
    rows = {f"{row['weights']}, {row['kv']}": row for row in sections["bits"]}
    loss = {name: row["loss"] for name, row in rows.items()}
    rounded, nf4 = "INT4 rtn, groups of 128, 16", "NF4 rtn, groups of 64, 16"
    loss["NF4 over INT4"] = loss[nf4] / loss[rounded]
    loss["SmoothQuant over W8A8"] = loss["W8A8 smoothquant, 16"] / loss["W8A8 rtn, 16"]
    loss["bytes of NF4 over INT4"] = rows[nf4]["bytes"] / rows[rounded]["bytes"]
    loss["saved by gptq"] = 1 - loss["INT4 gptq, groups of 128, 16"] / loss[rounded]
    check("bits", lambda: loss)
    layouts = {row["layout"]: row for row in sections["waste"]}
    blocks = layouts["blocks of 16"]
    ratio = blocks["texts_in_flight"] / layouts["rows of 1024"]["texts_in_flight"]
    memory = {"waste in blocks": blocks["waste"], "texts in flight, blocks over rows": ratio}
    check("memory", lambda: memory)


# ---- Quality


def quality(folder: str, text: str, stories: str, prompts: str) -> None:
    with open(prompts, encoding="utf-8") as lines:
        turns = [json.loads(line)["turns"][0] for line in lines][:30]
    check("texts", lambda: same_texts(Model.load(folder, "cpu", torch.float32), turns))
    check("calibrated", lambda: saved(stories))
    check("a real model's bits", lambda: losses(folder, text))


def greedy(model: Model, gamma: int | None, prompts: list[str]) -> list[Request]:
    """The texts of all prompts, made together; with n-grams but for γ = 0."""
    settings = Settings(temperature=0.0, seed=0, max_tokens=24, gamma=gamma)
    requests = []
    for prompt in prompts:
        requests.append(Request(model.encode(prompt), settings, model.eos_token_ids))
    longest = max(len(request.tokens) for request in requests) + 24
    draft = None if gamma == 0 else load_draft("ngram", model)
    serve_at_once(
        Engine(
            model,
            draft,
            Options(max_len=longest, max_batch=len(requests)),
            tokens=longest * len(requests),
        ),
        requests,
    )
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


# ---- Speed


@torch.inference_mode()
def speed() -> None:
    model = Model.load("tiny", "cpu")
    check("a shared prefix", lambda: shared_prefix(model))
    check("batching", lambda: batching(model))
    check("chunks of prompts", lambda: pauses(model))
    check("speculation", lambda: speculation(model))


def shared_prefix(model: Model) -> Figures:
    """The first token of 500, cold, over that where the first 90 % were read before: seconds."""
    ratios = []
    for trial in range(5):
        engine = Engine(model, None, Options(max_len=600, max_batch=2), tokens=4000)
        prompt = random_request(500, 1, trial)
        other = random_request(50, 1, 100 + trial)
        other = Request(prompt.tokens[:450] + other.tokens, other.settings)
        cold = serve_at_once(engine, [prompt]).seconds
        ratios.append(cold / serve_at_once(engine, [other]).seconds)
    return {"the first token": median(ratios)}


def batching(model: Model) -> Figures:
    """128 texts of 10 to 400 tokens, 16 in flight: beside batches that end with their longest text,
    and one text at a time."""

    def serve(lengths: list[int], max_batch: int) -> float:
        """Tokens a second."""
        requests = [random_request(16, length, seed) for seed, length in enumerate(lengths)]
        engine = Engine(
            model,
            None,
            Options(max_len=512, max_batch=max_batch, prefix_caching=False),
            tokens=max_batch * 512,
        )
        return serve_at_once(engine, requests).tokens_per_second

    generator = random.Random(0)
    lengths = [generator.randint(10, 400) for _ in range(128)]
    static = 0.0  # seconds
    for start in range(0, 128, 16):
        longest = max(lengths[start : start + 16])
        static += 16 * longest / serve([longest] * 16, 16)
    together = serve(lengths, 16)
    return {
        "over static batches": static * together / sum(lengths),
        "over one at a time": together / serve(lengths[::8], 1),
    }


def pauses(model: Model) -> Figures:
    """The longest step of texts that are being written while prompts of 900 tokens arrive: whole
    prompts over chunks of 128."""
    longest = {}
    for budget in (1024, 128):
        engine = Engine(
            model, None, Options(max_len=1024, max_batch=16, prefix_caching=False), tokens=16 * 1024
        )
        engine.runner.budget = budget
        for seed in range(4):
            engine.batcher.add(random_request(24, 300, seed))
        seconds = []
        for step in range(100):
            if step in (10, 30, 50):
                engine.batcher.add(random_request(900, 2, step))
            start = time.perf_counter()
            engine.batcher.step()
            seconds.append(time.perf_counter() - start)
        longest[budget] = max(seconds)
    return {"the longest pause": longest[1024] / longest[128]}


def speculation(model: Model) -> Figures:
    """Texts of 128 tokens in turns with plain decoding. An engine for each draft and γ makes all
    texts, so that auto tries its γ in the first one."""
    draft = Model.load("tiny-draft", "cpu")
    noise = Llama(draft.llama.config, dtype=draft.llama.dtype, seed=1).pack_weights()
    drafts = {"useless": Model(noise, draft.tokenizer), "copy": "self", "tiny-draft": draft}
    wanted = [("tiny-draft", gamma) for gamma in (*GAMMAS, None)]
    wanted += [("useless", None), ("copy", None), ("copy", 2)]
    plain = Engine(model, None, Options(max_len=200, max_batch=1), tokens=200)
    engines = {}
    for name, gamma in wanted:
        engines[name, gamma] = Engine(
            model, load_draft(drafts[name], model), Options(max_len=200, max_batch=1), tokens=200
        )
    gains = {key: [] for key in wanted}
    acceptance = []

    def told(engine: Engine, opening: str, seed: int, gamma: int | None) -> tuple[float, Request]:
        """Seconds a token after the first step."""
        settings = Settings(temperature=1.0, seed=seed, max_tokens=128, gamma=gamma)
        request = Request(model.encode(opening), settings)
        return serve_at_once(engine, [request]).seconds_per_token, request

    for seed, opening in enumerate(OPENINGS):
        alone, _ = told(plain, opening, seed, None)
        for key, engine in engines.items():
            seconds, request = told(engine, opening, seed, key[1])
            gains[key].append(alone / seconds)
            if key == ("copy", 2):
                acceptance.append(request.acceptance)
    gain = {key: median(ratios) for key, ratios in gains.items()}
    fixed = [gain["tiny-draft", gamma] for gamma in GAMMAS]
    print("tiny with tiny-draft, γ 1, 2, …, times plain decoding:", *(f"{x:.2f}" for x in fixed))
    return {
        "auto over the best γ": gain["tiny-draft", None] / max(1.0, *fixed),
        "auto with useless drafts": gain["useless", None],
        "auto with an INT4 copy": gain["copy", None],
        "acceptance of an INT4 copy": median(acceptance),
    }


def steps(folder: str) -> None:
    if native.library() is None:
        print("without C no speed of fewer bits is required")
        return
    models = load_widths(folder)

    def gains(past: int, new: int) -> Figures:
        found = compare(models, past, new, 7 if new < 64 else 3)
        return {name: gain for name, (_, gain) in found.items()}

    for past, new in STEPS:
        kind = f"{new} after {past}"
        where = f"{Path(folder).name}, {instruction_set()}, {kind}"
        check(kind, lambda: gains(past, new), where)


PROGRAMS = {"results": results, "quality": quality, "speed": speed, "steps": steps}

if __name__ == "__main__":
    torch.set_num_threads(2)
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
