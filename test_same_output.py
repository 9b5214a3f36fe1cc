"""A request's output is the same whatever runs beside it, and however it is served."""

from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.testing import assert_close

from automaton import Grammars
from batcher import Batcher
from conftest import examples
from kvcache import Cache, KVCache
from model import Llama
from paged import PagedCache
from quant import Bits
from request import Request
from runner import ModelRunner, ScheduledRequest
from settings import Settings
from speculative import Drawing
from testing.folders import write_tokenizer
from testing.toys import new_tokens, several_tokens
from testing.worlds import (
    LLAMA,
    RULES,
    V,
    drafter_of,
    made_alone,
    numbers,
    random_tokens,
    spec_of,
)
from tokenizer import Tokenizer

needs_llguidance = pytest.mark.skipif(not find_spec("llguidance"), reason="needs llguidance")
DRAFTERS = "none model self eagle ngram ngram,model ngram,self ngram,eagle".split()
PREFIX = torch.randint(256, (200,), generator=torch.Generator().manual_seed(5)).tolist()


@st.composite
def workloads(draw) -> dict:
    text = st.fixed_dictionaries(
        dict(
            own=st.integers(0, 40),
            shared=st.sampled_from([0, 0, 10, 33, 80]),
            count=st.integers(0, 10),
            copies=st.sampled_from([1, 1, 2, 3]),
            told=st.sampled_from([None, 0, 3]),  # of the prompt's log-probabilities
            temperature=st.sampled_from([0.0, 1.0, 0.7]),
            gamma=st.integers(0, 4),
            arrives=st.integers(0, 8),
            top_k=st.sampled_from([None, 5]),
            penalty=st.sampled_from([None, None, 1.3]),
            cancelled=st.sampled_from([None, None, None, 3]),
            rule=st.integers(0, len(RULES) - 1),
        )
    )
    return dict(
        texts=draw(st.lists(text, min_size=1, max_size=4)),
        size=draw(st.integers(1, 32)),
        spare=draw(st.integers(0, 6)),
        budget=draw(st.integers(5, 64)),
        batch=draw(st.integers(1, 4)),
        drafter=draw(st.sampled_from(DRAFTERS)),
        coupled=draw(st.booleans()),
        contiguous=draw(st.sampled_from([False, False, True])),
        sharing=draw(st.booleans()),
        bits=draw(st.sampled_from([(16, 16), (16, 16), (8, 8), (8, 4), (4, 4)])),
        multi_step=draw(st.integers(1, 5)),
    )


def workload(drafter: str, size: int, bits: Bits, **more) -> dict:
    """Four texts, two with the same beginning, in a pool of little more than one: some are
    preempted."""
    common = dict(temperature=1.0, gamma=3, top_k=None, cancelled=None, copies=1, told=1)
    common |= dict(penalty=1.3)
    texts = []
    for i, (own, shared, count) in enumerate([(3, 0, 14), (0, 4, 14), (1, 4, 12), (2, 0, 10)]):
        texts.append(dict(common, own=own, shared=shared, count=count, arrives=i // 3, rule=i))
    rest = dict(coupled=False, contiguous=False, sharing=True, multi_step=4)
    sizes = dict(size=size, spare=6, budget=20, batch=4)
    return {**rest, **sizes, "texts": texts, "drafter": drafter, "bits": bits, **more}


def make_requests(texts: list[dict], ruled: bool) -> list[tuple[Request, dict]]:
    """The requests, with what is asked for them; those after the first of several are siblings."""
    found = []
    for i, text in enumerate(texts):
        prompt = PREFIX[: text["shared"]] + random_tokens(text["own"] + 1, i)
        chosen = Settings(
            text["temperature"],
            top_k=text["top_k"],
            repetition_penalty=text["penalty"],
            frequency_penalty=text["penalty"],
            seed=i,
            max_tokens=text["count"],
            gamma=text["gamma"],
            prompt_logprobs=text["told"],
            **(RULES[text["rule"]] if ruled else {}),
        )
        first = Request(prompt, chosen, (256, 257) if ruled else range(12))
        found.append((first, text))
        for n in range(1, text["copies"]):
            found.append((first.sibling_text(n), text | dict(cancelled=None)))
    return found


def make_batcher(w: dict, longest: int, grammars: Grammars | None) -> Batcher:
    blocks = -(-longest // w["size"]) + w["spare"] // w["size"]  # down to one request

    def make_cache(llama: Llama) -> Cache:
        spec = spec_of(llama, w["drafter"], w["bits"])
        if w["contiguous"]:
            return KVCache(spec, longest, w["batch"])
        return PagedCache(spec, blocks, w["size"], prefix_caching=w["sharing"])

    cache = make_cache(LLAMA)
    drafter = drafter_of(w["drafter"], cache, make_cache)
    options = dict(budget=w["budget"], grammars=grammars)
    runner = ModelRunner(LLAMA, cache, Drawing(V, w["coupled"]), drafter=drafter, **options)
    step_of = runner.step

    def step_within_budget(scheduled: list[ScheduledRequest]) -> dict[Request, list[int]]:
        assert sum(map(runner.work, scheduled)) <= runner.budget
        assert all(item.num_tokens for item in scheduled)
        return step_of(scheduled)

    runner.step = step_within_budget
    return Batcher(runner, w["batch"])


def serve(batcher: Batcher, asked: list[tuple[Request, dict]]) -> set[Request]:
    """To the ends of all -> those that were cancelled."""
    cancelled = set()
    caches = [batcher.runner.cache, getattr(batcher.runner.drafter, "cache", None)]
    for step in range(2000):
        for request, text in asked:
            if step == text["arrives"]:
                batcher.add(request)
            is_over = text["cancelled"] and step == text["arrives"] + text["cancelled"]
            if is_over and not request.finish_reason:
                batcher.cancel(request)
                cancelled.add(request)
        if batcher.waiting or batcher.running:
            batcher.step()
        elif step > 8:
            break
        assert not any(request.finish_reason for request in batcher.running)
        assert len(batcher.running) <= batcher.max_batch
        for cache in caches:
            if isinstance(cache, PagedCache):
                cache.check()
    assert not batcher.waiting and not batcher.running, "the requests do not end"
    return cancelled


@pytest.fixture(scope="module")
def byte_grammars(tmp_path_factory) -> Grammars:
    """A token is a byte; control tokens follow."""
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    return Grammars(Tokenizer.load(folder), {256, 257})


@pytest.mark.parametrize("ruled", [False, pytest.param(True, marks=needs_llguidance)])
@patch.object(Llama, "price", lambda self, context: 1 + context // 9)
@examples(3)
@given(w=workloads())
@example(w=workload("model", 4, (16, 16)))
@example(w=workload("self", 8, (8, 4)))
@example(w=workload("model", 3, (8, 8), coupled=True, sharing=False))
@example(w=workload("ngram", 4, (4, 4), batch=2, contiguous=True))
@example(w=workload("none", 4, (16, 16)))
@example(w=workload("eagle", 4, (16, 16)))
@example(w=workload("eagle", 2, (16, 16), coupled=True))
def test_a_requests_output_is_the_same_whatever_runs_beside_it(ruled, byte_grammars, w):
    """w: requests, and a way to serve them: a drafter, a cache, its precision, steps. Some requests
    follow a grammar, arrive late, are cancelled or preempted."""
    grammars = byte_grammars if ruled else None
    asked = make_requests(w["texts"], ruled)
    longest = max(len(request.tokens) + request.num_remaining for request, _ in asked)
    batcher = make_batcher(w, longest, grammars)
    with several_tokens(LLAMA, w["multi_step"]):
        cancelled = serve(batcher, asked)
    for request, _ in asked:
        # As without a draft; whatever other requests leave in the history.
        is_plain = w["coupled"] or "ngram" in w["drafter"] or request.settings.temperature == 0
        drafter_alone = "none" if is_plain else w["drafter"]
        alone = made_alone(request, drafter_alone, w["coupled"], w["bits"], grammars)
        made = new_tokens(request)
        told = numbers(request.prompt_logprobs)
        assert_close(told, numbers(alone.prompt_logprobs[: len(told)]), rtol=0, atol=1e-9)
        if request in cancelled:
            assert made == new_tokens(alone)[: len(made)]
        else:
            assert made == new_tokens(alone) and request.finish_reason == alone.finish_reason
            asks = request.settings.prompt_logprobs is not None
            assert len(told) == asks * (request.num_prompt_tokens - 1)
        assert request.grammar_state is None and len(request.origins) == len(made)
        assert w["drafter"] != "none" or {*request.origins} <= {"plain"}
    if not w["contiguous"]:
        assert batcher.runner.cache.check()[2] == 0  # no live block
