"""A random model with every kind of draft, in any cache; what a request gets there by itself."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from automaton import Grammars
from batcher import Batcher
from drafters import Drafter, ModelDrafter, SelfDrafter
from eagle import EagleDrafter
from kvcache import Cache, KVCache, KVSpec
from lookup import FirstLookUp, LookupDrafter
from model import Llama
from quant import Bits
from request import Request
from runner import ModelRunner
from sampling import TokenLogprob
from speculative import Drawing
from testing.heads import random_head
from testing.models import add_noise, random_llama
from testing.toys import new_tokens

LLAMA = random_llama(1, max_position_embeddings=300)
SMALLER = random_llama(1, max_position_embeddings=300, num_hidden_layers=1)
# As if its weights were rounded.
ROUNDED = add_noise(random_llama(1, max_position_embeddings=300))


HEAD = random_head(LLAMA).pack_weights()
V = 259


RULES = (
    dict(regex="[a-f]{3,9}( [0-9]+)*"),
    dict(schema={"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9}),
    {},
    dict(choice=["ein Hund", "eine Katze", "e"]),
    dict(grammar='start: "<[" WORD ("," WORD)* "]"\nWORD: /[xyz]+/'),
)


def spec_of(llama: Llama, drafter: str, bits: Bits) -> KVSpec:
    """An EAGLE head has a layer in its target's cache."""
    return llama.kv_spec(bits=bits, draft_layers=int("eagle" in drafter and llama is LLAMA))


def drafter_of(name: str, cache: Cache, make_cache: Callable[[Llama], Cache]) -> Drafter | None:
    """cache: the target's; make_cache: makes another."""
    if name == "model":
        return ModelDrafter(SMALLER, make_cache(SMALLER))
    if name == "eagle":
        return EagleDrafter(HEAD, cache)
    if name == "self":
        return SelfDrafter(ROUNDED, cache)
    if name.startswith("ngram,"):
        other = drafter_of(name.removeprefix("ngram,"), cache, make_cache)
        return FirstLookUp(LookupDrafter(), other)
    return LookupDrafter() if name == "ngram" else None


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def made_alone(
    request: Request,
    drafter: str = "none",
    coupled: bool = False,
    bits: Bits = (16, 16),
    grammars: Grammars | None = None,
) -> Request:
    """This request by itself, with the contiguous cache."""

    def make_cache(llama: Llama) -> KVCache:
        return KVCache(spec_of(llama, drafter, bits), 300)

    prompt = request.tokens[: request.num_prompt_tokens]
    copy = Request(prompt, request.settings, request.eos_token_ids)
    cache = make_cache(LLAMA)
    drafts = drafter_of(drafter, cache, make_cache)
    runner = ModelRunner(LLAMA, cache, Drawing(V, coupled), drafter=drafts, grammars=grammars)
    list(Batcher(runner, 1).run([copy]))
    return copy


def alone(request: Request, *how) -> list[int]:
    """The text of this request by itself."""
    return list(new_tokens(made_alone(request, *how)))


def numbers(entries: Sequence[TokenLogprob]) -> Tensor:
    """All of these records: [tokens, 2 + 2 top]."""
    rows = [[entry.token, entry.logprob, *chain(*entry.top)] for entry in entries]
    return torch.tensor(rows, dtype=torch.float64)
