"""The embedded pair: what each technique gains and costs on this machine.

    stack     the techniques one added to the other, served by the production engine
    gammas    speculation with each γ, beside plain decoding and the formula of gamma.py
    bits      bytes and perplexity in fewer bits

A claim of speed is a ratio of two measurements made in one run, in turns; the figure is the median
over the turns. A machine that is slow for a minute is slow for both.

Invariant: within a turn every row serves the same requests, each row with a new engine.
"""

import io
from contextlib import redirect_stdout
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from gamma import speed_up
from generate import Engine, Model, load_draft
from measure.effort import BEGINNING, SENTENCES, Effort
from measure.serving import Served, log_spread, serve_at_once, weight_bytes
from measure.steps import PAST, step_times
from model import Llama
from request import Request, Settings
from train.distill import sample_corpus
from train.perplexity import recipe_label, recipes, table

Row = dict[str, Any]


class StackRow(NamedTuple):
    """A row of the combined table: the technique that it adds, and the settings of all so far."""

    name: str
    engine: dict[str, Any]
    bits: int = 16
    draft: bool = False


ALONE = {"kv": "contiguous"}
ALONE_INT8 = {"kv": "contiguous", "kv_bits": "8"}
BATCH = {"kv_bits": "8", "max_batch": 16}
BATCH_UNSHARED = {**BATCH, "prefix_cache": False}
STACK = (
    StackRow("one at a time, no cache", {"use_cache": False}),
    StackRow("+ KV cache", ALONE),
    StackRow("+ INT8 keys and values", ALONE_INT8),
    StackRow("+ speculation (tiny-draft)", ALONE_INT8, draft=True),
    StackRow("+ paged, continuous batching", BATCH_UNSHARED, draft=True),
    StackRow("+ INT4 weights", BATCH_UNSHARED, bits=4, draft=True),
    StackRow("+ prefix sharing: all", BATCH, bits=4, draft=True),
    StackRow("all, with INT8 weights", BATCH, bits=8, draft=True),
)


def stack(effort: Effort) -> list[Row]:
    """The combined table. All rows serve, in turns, the same requests, at temperature 0."""
    draft = Model.load("tiny-draft", "cpu", torch.float32)
    models = {bits: Model.load("tiny", "cpu", torch.float32, bits) for bits in (16, 8, 4)}
    turns = []
    for _ in range(effort.turns):
        turns.append([serve_row(row, models[row.bits], draft, effort) for row in STACK])
    first = [turn[0] for turn in turns]
    rows: list[Row] = []
    for i, technique in enumerate(STACK):
        measured = [turn[i] for turn in turns]
        gains = [a.tokens_per_second / b.tokens_per_second for a, b in zip(measured, first)]
        total = median(gains)
        same_texts = [a == b for a, b in zip(measured[0].texts, first[0].texts)]
        weights = weight_bytes(models[technique.bits].llama)
        if technique.draft:
            weights += weight_bytes(draft.llama)
        in_flight = min(technique.engine.get("max_batch", 1), effort.num_texts)
        cache_bytes = max(one.cache_bytes for one in measured)
        row = {
            "name": technique.name,
            "tokens_per_second": median(one.tokens_per_second for one in measured),
            "first_token": median(median(one.first_token) for one in measured),
            "cache_bytes": cache_bytes,
            "text_bytes": cache_bytes / in_flight,
            "weight_bytes": weights,
            "speed_up": total,
            "gain": total / rows[-1]["speed_up"] if rows else None,
            "same_texts": sum(same_texts),
            "texts": effort.num_texts,
        }
        rows.append(row)
    return rows


def serve_row(technique: StackRow, model: Model, draft: Model, effort: Effort) -> Served:
    """Serve a row's requests."""
    max_len = model.llama.config.max_position_embeddings
    requests = []
    for sentence, count in zip(SENTENCES, log_spread(effort.num_texts, effort.longest)):
        settings = Settings(temperature=0.0, seed=0, max_tokens=count)
        requests.append(Request(model.encode(BEGINNING + sentence), settings))
    drafts = load_draft(draft, model) if technique.draft else None
    tokens = technique.engine.get("max_batch", 1) * max_len
    engine = Engine(model, drafts, tokens, max_len, **technique.engine)
    return serve_at_once(engine, requests)


# ---- Speculation by γ ----------------------------------------------------------------------------


def gammas(effort: Effort) -> list[Row]:
    """Acceptance and speed-up for each γ (None: auto) at temperature 1: medians over texts."""
    model = Model.load("tiny", "cpu")
    draft = Model.load("tiny-draft", "cpu")
    plain = []  # seconds of a token, of each text
    runs: dict[int | None, list[tuple[Request, float]]] = {g: [] for g in (*effort.gammas, None)}
    for seed, opening in enumerate(effort.openings):
        plain.append(timed_text(model, None, 0, opening, seed, effort.num_tokens)[1])
        for gamma, texts in runs.items():
            texts.append(timed_text(model, draft, gamma, opening, seed, effort.num_tokens))
    rows = []
    for gamma, texts in runs.items():
        gain = median(before / seconds for before, (_, seconds) in zip(plain, texts))
        alpha = median(request.acceptance or 0.0 for request, _ in texts)
        rounds = [stats.num_drafts for request, _ in texts for stats in request.rounds[1:]]
        label = f"auto: {fmean(rounds):.1f}" if gamma is None else str(gamma)
        row: Row = {"gamma": gamma, "label": label, "acceptance": alpha, "speed_up": gain}
        row["dtype"] = str(model.llama.dtype).removeprefix("torch.")
        if gamma is not None:
            c, w = pass_costs(model.llama, draft.llama, gamma, 3 * effort.turns)
            row |= {"draft_cost": c, "pass_cost": w, "formula": speed_up(alpha, gamma, c, w)}
        rows.append(row)
    return rows


def timed_text(
    model: Model, draft: Model | None, gamma: int | None, opening: str, seed: int, count: int
) -> tuple[Request, float]:
    """Make a text of `count` tokens -> its request, and seconds a token after the first step."""
    settings = Settings(temperature=1.0, seed=seed, max_tokens=count, gamma=gamma)
    request = Request(model.encode(opening), settings)
    length = request.num_prompt_tokens + count
    engine = Engine(model, load_draft(draft, model), length, length)
    return request, serve_at_once(engine, [request]).seconds_per_token


def pass_costs(target: Llama, draft: Llama, gamma: int, turns: int) -> tuple[float, float]:
    """Seconds of the draft's step (c), and of the target's over γ + 1 tokens (w), over those of
    the target's over one token: medians, in turns."""
    c = []
    w = []
    for _ in range(turns):
        _, plain = step_times(target, PAST, 1, 2)  # the first one warms up
        _, draft_seconds = step_times(draft, PAST, 1, 2)
        _, wide = step_times(target, PAST, gamma + 1, 2)
        c.append(draft_seconds / plain)
        w.append(wide / plain)
    return median(c), median(w)


# ---- Fewer bits ----------------------------------------------------------------------------------


def bits(effort: Effort) -> list[Row]:
    """Bytes and perplexity of the embedded model on stories that it made, which need no file."""
    llama = Llama.load("tiny", "cpu", torch.float32, trainable=True).requires_grad_(False)
    count = 8 * effort.turns if effort.turns > 1 else 2  # stories to calibrate with
    end = llama.config.eos_token_ids[0]
    corpus = sample_corpus(llama, 4 * count, 72, end, seed=1)
    stories = corpus.tokens.roll(1).split(73)  # each begins with an end of text, as it was made
    texts = stories[count:]
    wanted = recipes(effort.methods, (32, 128))
    with redirect_stdout(io.StringIO()):
        measured = table("tiny", texts, stories[:count], wanted, author=llama)
    rows = []
    for row in measured:
        rows.append(
            {
                "weights": recipe_label(row.how),
                "kv": row.width,
                "bytes": row.bytes,
                "kv_bytes": row.token,
                "perplexity": row.perplexity,
                "loss": row.perplexity / measured[0].perplexity - 1,
                "tokens": sum(map(len, texts)),
            }
        )
    return rows
