"""What grammars cost: sixteen texts with a JSON schema each, beside as many without.

    python bench.py --target NAME

Invariant: both have the same prompts and lengths, and each takes a step in turn.
"""

from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from batcher import Batcher
from loading import Model
from measure.clock import seconds_of
from measure.effort import SENTENCES, Effort
from measure.serving import engine_for
from measure.steps import Rows, label
from request import Settings


def list_schema(i: int) -> dict[str, Any]:
    """A schema of its own for each i. No text of it ends soon."""
    fields = {
        f"name{i}": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    }
    item = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "array", "items": item, "minItems": 200}


def add_texts(model: Model, count: int, has_grammar: bool) -> Batcher:
    """A batch of texts of `count` tokens, after the step that reads the prompts."""
    requests = []
    for i, prompt in enumerate(SENTENCES):
        schema = list_schema(i) if has_grammar else None
        chosen = Settings(1.0, seed=i, max_tokens=count, schema=schema)
        request = model.request(prompt, chosen, chat=False)
        request.eos_token_ids = ()  # without a grammar, too, a text is to have this length
        requests.append(request)
    batcher = engine_for(model, None, requests).batcher
    for request in requests:
        batcher.add(request)
    batcher.step()
    return batcher


def grammar_costs(effort: Effort, target: str = "tiny") -> Rows:
    """A row for this model; none without llguidance. A model's first grammar also reads its
    vocabulary, once, which is not counted."""
    if find_spec("llguidance") is None:
        return {}
    model = Model.load(target, "cpu", torch.float32)
    vocabulary = model.grammars.vocabulary
    asked = Settings(schema=list_schema(99)).follows
    first_mask = seconds_of(lambda: model.grammars.compile(asked))
    masked = add_texts(model, effort.longest, has_grammar=True)
    free = add_texts(model, effort.longest, has_grammar=False)
    shares = []
    while masked.running:
        seconds = seconds_of(masked.step)
        shares.append(1 - seconds_of(free.step) / seconds)
    row = {
        "target": label(target),
        "vocab_size": vocabulary.vocab_size,
        "first_mask": first_mask,
        "share": median(shares),
    }
    return {label(target): row}
