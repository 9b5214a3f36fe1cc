"""What each technique gains and costs on this machine.

    stack     the techniques one added to the other, served by the production engine
    bits      bytes and perplexity of the embedded model in fewer bits

A claim of speed is a ratio of two measurements made in one run, in turns; the figure is the median
over the turns. A machine that is slow for a minute is slow for both.

Invariant: within a turn the rows that are compared serve the same requests, each with a new engine.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from checkpoint.weights import weight_bytes
from generate import Engine
from loading import Model, load_draft
from lookup import History
from measure.clock import in_turns, ratio
from measure.serving import Served, log_spread, serve
from measure.sizes import BEGINNING, SENTENCES, Sizes
from measure.steps import Rows, label
from model import Llama
from quant import widths
from request import Request, Settings
from settings import Options
from train.distill import sample_corpus
from train.perplexity import recipes, table

Row = dict[str, Any]


class Technique(NamedTuple):
    """What a row of the combined table adds, and the settings of all so far."""

    name: str
    engine: dict[str, Any]
    bits: int = 16
    draft: bool = False
    max_batch: int = 1


RESERVED = {"kv": "contiguous"}
UNSHARED = {"prefix_caching": False}
NUM_RESERVED = 2  # of MAX_LEN tokens each: what batches have as memory for keys and values
MAX_LEN = 1024
ONE = (
    Technique("one request, no cache", {"use_cache": False}),
    Technique("+ KV cache", RESERVED),
    Technique("+ INT8 weights", RESERVED, 8),
    Technique("+ INT4 weights", RESERVED, 4),
    Technique("+ drafts, by look-ups", RESERVED, 4, True),
)
MANY = (
    Technique("many requests, one at a time", RESERVED, 4),
    Technique("+ batching", RESERVED, 4, max_batch=NUM_RESERVED),
    Technique("+ paging", UNSHARED, 4, max_batch=16),
    Technique("+ prefix sharing", {}, 4, max_batch=16),
    Technique("+ INT8 keys and values", {"kv_bits": "8"}, 4, max_batch=16),
)


def stack(sizes: Sizes, target: str = "tiny") -> Rows:
    """The combined table, at temperature 0: one request, then many that arrive at once and begin
    alike. Each row is compared with the one before it, which serves the same requests."""
    models = {bits: Model.load(target, "cpu", torch.float32, bits) for bits in (16, 8, 4)}
    rows: Rows = {}
    for count, techniques in ((1, ONE), (sizes.num_requests, MANY)):
        lengths = log_spread(sizes.num_requests, sizes.longest)[:count]
        runs = [partial(serve_row, row, models[row.bits], lengths) for row in techniques]
        columns = in_turns(runs, sizes.turns)
        before = columns[0]
        for technique, served in zip(techniques, columns):
            speeds = [one.tokens_per_second for one in served]
            rows[f"{label(target)}, {technique.name}"] = {
                "target": label(target),
                "name": technique.name,
                "tokens_per_second": median(speeds),
                "first_token": median(median(one.first_token) for one in served),
                "cache_bytes": max(one.cache_bytes for one in served),
                "weight_bytes": weight_bytes(models[technique.bits].llama),
                "speed_up": ratio(speeds, [one.tokens_per_second for one in columns[0]]),
                "gain": ratio(speeds, [one.tokens_per_second for one in before]),
                "same_texts": sum(a == b for a, b in zip(served[0].texts, before[0].texts)),
                "texts": count,
            }
            before = served
    return rows


def serve_row(technique: Technique, model: Model, lengths: Sequence[int]) -> Served:
    """Serve a row's requests. lengths: how many tokens each is to get."""
    requests = []
    for sentence, count in zip(SENTENCES, lengths):
        settings = Settings(temperature=0.0, seed=0, max_tokens=count)
        prompt = f"Correct the mistakes: {BEGINNING}{sentence}"
        requests.append(Request(model.encode(prompt), settings))
    llama = model.llama
    max_len = min(MAX_LEN, llama.config.max_position_embeddings)
    options = Options(max_len=max_len, max_batch=technique.max_batch, **technique.engine)
    memory = llama.kv_spec().bytes(NUM_RESERVED * max_len)
    tokens = llama.kv_spec(widths(options.kv_bits)).tokens_in(memory)
    model.history = History()
    draft = load_draft("ngram", model) if technique.draft else None
    return serve(Engine(model, draft, options, tokens), requests)


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
