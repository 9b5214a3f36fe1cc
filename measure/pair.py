"""The embedded pair: what each technique gains and costs on this machine.

    stack     the techniques one added to the other, served by the production engine
    bits      bytes and perplexity in fewer bits

A claim of speed is a ratio of two measurements made in one run, in turns; the figure is the median
over the turns. A machine that is slow for a minute is slow for both.

Invariant: within a turn every row serves the same requests, each row with a new engine.
"""

import io
from contextlib import redirect_stdout
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from checkpoint.weights import weight_bytes
from generate import Engine
from loading import Draft, Model, load_draft
from measure.clock import in_turns, ratio
from measure.serving import Served, log_spread, serve
from measure.sizes import BEGINNING, SENTENCES, Sizes
from model import Llama
from request import Request, Settings
from settings import Options
from train.distill import sample_corpus
from train.perplexity import recipes, table

Row = dict[str, Any]


class StackRow(NamedTuple):
    """A row of the combined table: the technique that it adds, and the settings of all so far."""

    name: str
    engine: dict[str, Any]
    max_batch: int = 1
    bits: int = 16
    draft: bool = False


ALONE = {"kv": "contiguous"}
ALONE_INT8 = {"kv": "contiguous", "kv_bits": "8"}
BATCH = {"kv_bits": "8"}
BATCH_UNSHARED = {**BATCH, "prefix_caching": False}
STACK = (
    StackRow("one at a time, no cache", {"use_cache": False}),
    StackRow("+ KV cache", ALONE),
    StackRow("+ INT8 keys and values", ALONE_INT8),
    StackRow("+ speculation (tiny-draft)", ALONE_INT8, draft=True),
    StackRow("+ paged, continuous batching", BATCH_UNSHARED, 16, draft=True),
    StackRow("+ INT4 weights", BATCH_UNSHARED, 16, bits=4, draft=True),
    StackRow("+ prefix sharing: all", BATCH, 16, bits=4, draft=True),
    StackRow("all, with INT8 weights", BATCH, 16, bits=8, draft=True),
)


def stack(sizes: Sizes) -> list[Row]:
    """The combined table. All rows serve, in turns, the same requests, at temperature 0."""
    models = {bits: Model.load("tiny", "cpu", torch.float32, bits) for bits in (16, 8, 4)}
    drafts = {bits: load_draft("tiny-draft", model) for bits, model in models.items()}
    runs = []
    for row in STACK:
        runs.append(partial(serve_row, row, models[row.bits], drafts[row.bits], sizes))
    columns = in_turns(runs, sizes.turns)
    first = columns[0]
    rows: list[Row] = []
    for technique, served in zip(STACK, columns):
        speeds = [one.tokens_per_second for one in served]
        speed_up = ratio(speeds, [one.tokens_per_second for one in first])
        weights = weight_bytes(models[technique.bits].llama)
        if technique.draft:
            weights += weight_bytes(drafts[technique.bits].models[0])
        in_flight = min(technique.max_batch, sizes.num_requests)
        cache_bytes = max(one.cache_bytes for one in served)
        row = {
            "name": technique.name,
            "tokens_per_second": median(speeds),
            "first_token": median(median(one.first_token) for one in served),
            "cache_bytes": cache_bytes,
            "text_bytes": cache_bytes / in_flight,
            "weight_bytes": weights,
            "speed_up": speed_up,
            "gain": speed_up / rows[-1]["speed_up"] if rows else None,
            "same_texts": sum(a == b for a, b in zip(served[0].texts, first[0].texts)),
            "texts": sizes.num_requests,
        }
        rows.append(row)
    return rows


def serve_row(technique: StackRow, model: Model, draft: Draft, sizes: Sizes) -> Served:
    """Serve a row's requests."""
    max_len = model.llama.config.max_position_embeddings
    requests = []
    for sentence, count in zip(SENTENCES, log_spread(sizes.num_requests, sizes.longest)):
        settings = Settings(temperature=0.0, seed=0, max_tokens=count)
        requests.append(Request(model.encode(BEGINNING + sentence), settings))
    batch = technique.max_batch
    engine = Engine(
        model,
        draft if technique.draft else None,
        Options(max_len=max_len, max_batch=batch, **technique.engine),
    )
    return serve(engine, requests)


# ---- Fewer bits ----------------------------------------------------------------------------------


def bits(sizes: Sizes) -> list[Row]:
    """Bytes and perplexity of the embedded model on stories that it made, which need no file."""
    llama = Llama.load("tiny", "cpu", torch.float32, trainable=True)
    count = sizes.num_stories  # to calibrate with
    end = llama.config.eos_token_ids[0]
    corpus = sample_corpus(llama, 4 * count, 72, end, seed=1)
    stories = corpus.tokens.roll(1).split(73)  # each begins with an end of text, as it was made
    texts = stories[count:]
    wanted = recipes(sizes.methods, (32, 128))
    with redirect_stdout(io.StringIO()):
        measured = table("tiny", texts, stories[:count], wanted, "cpu", llama)
    return [
        row._asdict()
        | {
            "loss": row.perplexity / measured[0].perplexity - 1,
            "tokens": sum(map(len, texts)),
        }
        for row in measured
    ]
