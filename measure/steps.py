"""Seconds of a model's steps and prompts in float32, INT8 and INT4, and the speed-up over float32.
And what grammars cost it: the share of masks in a token's time.

    python bench.py --target NAME

Invariant: all widths run the same step, in turns; a ratio is the median over turns.
"""

import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvcache import KVCache
from loading import Model
from measure.clock import in_turns, ratio, seconds_of
from measure.serving import engine_for, serve
from measure.sizes import SENTENCES, Sizes
from model import Llama
from request import Settings

Rows = dict[str, dict[str, Any]]
WIDTHS = {"float32": 16, "INT8": 8, "INT4": 4}
ROWS = (1, 5, 16, 64, 256)  # of a step
PROMPTS = (128, 512, 1500)  # tokens
PAST = 100  # tokens before a step
SIZES = {f"rows{n}": (PAST, n) for n in ROWS}  # -> tokens before, new tokens
SIZES |= {f"prompt{n}": (0, n) for n in PROMPTS}


@torch.inference_mode()
def step_seconds(llama: Llama, past: int, new: int) -> float:
    """Seconds of a step of `new` tokens after `past` others, with all logits.

    past 0: of a prompt, with its last logits.
    """
    cache = KVCache(llama.kv_spec(), past + new)
    seq, _ = cache.open([])
    tokens = torch.arange(past + new, device=llama.device) % 1000
    old_tokens, new_tokens = tokens.split((past, new))
    last = slice(-1, None)
    wanted = None if past else last
    if past:
        metadata = cache.extend([(seq, old_tokens.tolist())])
        llama(old_tokens, metadata, last)
    metadata = cache.extend([(seq, new_tokens.tolist())])
    start = time.perf_counter()
    logits = llama(new_tokens, metadata, wanted)
    logits[-1].argmax().item()  # waits for a GPU
    return time.perf_counter() - start


def compare(
    models: dict[str, Llama], past: int, new: int, turns: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each model, and its speed-up over the first. One turn more warms up."""
    runs = [partial(step_seconds, llama, past, new) for llama in models.values()]
    columns = in_turns(runs, turns + 1)
    first = columns[0][1:]
    result = {}
    for name, (_, *seconds) in zip(models, columns):
        result[name] = (median(seconds), ratio(first, seconds))
    return result


def load_widths(target: str) -> dict[str, Llama]:
    models = {}
    for name, bits in WIDTHS.items():
        models[name] = Llama.load(target, "cpu", torch.float32, bits=bits)
    return models


def label(target: str) -> str:
    """A model's name, without the folder that holds it on this machine."""
    return Path(target).absolute().name if Path(target).is_dir() else target


def steps(sizes: Sizes, target: str = "tiny") -> Rows:
    """A row for each width."""
    models = load_widths(target)
    max_len = models["float32"].config.max_position_embeddings
    rows: Rows = {}
    for name in WIDTHS:
        rows[name] = {"target": label(target), "width": name}
    for size, (past, new) in SIZES.items():
        if past + new > max_len:
            continue
        turns = sizes.turns * (3 if past else 1)
        for name, (seconds, gain) in compare(models, past, new, turns).items():
            rows[name][size] = gain
            rows[name][f"{size}_seconds"] = seconds
    return {f"{label(target)}, {name}": row for name, row in rows.items()}


# ---- Grammars ------------------------------------------------------------------------------------


def list_schema(i: int) -> dict[str, Any]:
    """A schema of its own for each i. No text of it ends soon."""
    fields = {
        f"name{i}": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    }
    item = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "array", "items": item, "minItems": 200}


def token_seconds(model: Model, count: int, has_grammar: bool) -> float:
    """Of texts of `count` tokens, made together."""
    requests = []
    for i, prompt in enumerate(SENTENCES):
        schema = list_schema(i) if has_grammar else None
        settings = Settings(1.0, seed=i, max_tokens=count, schema=schema)
        request = model.request(prompt, settings, chat=False)
        request.eos_token_ids = ()  # without a grammar, too, a text is to have this length
        requests.append(request)
    return serve(engine_for(model, None, requests), requests).seconds_per_token


def grammar_costs(sizes: Sizes, target: str = "tiny") -> Rows:
    """A row for this model; none without llguidance. A model's first grammar also reads its
    vocabulary, once, which is not counted."""
    if find_spec("llguidance") is None:
        return {}
    model = Model.load(target, "cpu", torch.float32)
    vocabulary = model.grammars.vocabulary
    asked = Settings(schema=list_schema(99)).follows
    first_mask = seconds_of(lambda: model.grammars.compile(asked))
    runs = [partial(token_seconds, model, sizes.longest, masks) for masks in (False, True)]
    row = {
        "target": label(target),
        "vocab_size": vocabulary.vocab_size,
        "first_mask": first_mask,
        "share": 1 - ratio(*in_turns(runs, sizes.turns)),
    }
    return {label(target): row}
