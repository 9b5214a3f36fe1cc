"""A museum of bugs that other inference engines shipped. Each is planted here and caught.

A wrong engine raises no error, and its output still looks like language: a token comes out at
63 % instead of 60 %, an answer starts from the keys and values of another prompt, a filter is
applied to the draft but not to the target. Each exhibit was reported in the public tracker of an
engine, and is shown beside the line of this project in which one edit makes the same mistake.

`python museum.py` plants the bugs one after the other in the code that runs in production:

    the issue: what was wrong; the effect it had
    − the line here
    + the line with the bug
    the check that catches it, and how long it takes

Each check must pass before its bug is planted, and must fail afterwards. If a bug is not caught,
the program ends with status 1.

`planted` is the only mechanism. It replaces a piece of a function's source, compiles the page
again, and gives the function the new code. Importers hold the same function, so all of them run
the bug.

A few strong checks catch all of the bugs: the enumerated distribution of the outputs (proof.py),
frequencies with production's random numbers, requests in a batch compared with each request run by
itself, and a few cases by hand. The models are toys with three tokens that read the sequence back
from the cache, so a single wrong slot changes the output. The expected results come from the
unchanged code, and are computed before a bug is planted.

Invariant: after each bug the function has its own code again.
Not covered: bugs in parts that this project does not have (trees of drafts), and bugs that need a
GPU. More planted bugs, without a story: test_museum.py, test_distribution.py, test_eagle.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin, status

    begin()

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import torch

from automaton import Grammars
from batcher import Batcher
from drafters import Chain, ModelDrafter
from kernels import Ops
from kvcache import AttentionMetadata, KVSpec, Store
from paged import BlockPool, PagedCache
from proof import (
    Distribution,
    Toy,
    distance,
    enumerate_distribution,
    sequential_distribution,
    surprise,
)
from request import OutputStream, Request
from runner import ModelRunner
from sampling import NotFinite, check_finite, keep_top, pick, probabilities
from settings import Settings
from speculative import Drawing, Round, verify_block
from tokenizer import IncrementalDecoder

# ---- How a bug is planted ------------------------------------------------------------------------


@contextmanager
def planted(function: Callable, right: str, wrong: str) -> Iterator[None]:
    """While this block runs, the function's source has `wrong` in the place of `right`."""
    source = inspect.getsource(function)
    if source.count(right) != 1:
        raise LookupError(f"{function} does not have it once: {right}")
    page = inspect.getsource(inspect.getmodule(function))
    edited = page.replace(source, source.replace(right, wrong))
    code = compile(edited, "a bug", "exec")
    for name in function.__qualname__.split("."):  # from the page to the class to the function
        code = next(part for part in code.co_consts if getattr(part, "co_name", "") == name)
    healthy = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = healthy


# ---- Small worlds --------------------------------------------------------------------------------

END = 2  # the token that ends an output; tokens 0 and 1 are the letters a and b
FILTERS = {"top_k": 2, "top_p": 0.9}
REGEX = "(ba|a)*b?"


class Letters:
    """The tokenizer of the toys."""

    vocab_size = 3

    def token_bytes(self, token: int) -> bytes:
        return b"ab"[token : token + 1]

    def incremental_decoder(self, continues: bool) -> IncrementalDecoder:
        return IncrementalDecoder(self, strips=False)


@cache
def toy(seed: int) -> Toy:
    """A model of sequences of up to 9 tokens. It gives every token some probability."""
    model = Toy(longest=9, seed=seed)
    model.table.clamp_(min=-2)
    return model


@cache
def grammars() -> Grammars:
    return Grammars(Letters(), {END})


def make_runner(num_blocks: int, drawing: Drawing) -> ModelRunner:
    """A toy target and a toy draft model, each with num_blocks blocks of two tokens."""
    spec = KVSpec(1, 1, 1, dtype=torch.float64)
    cache, draft_cache = (PagedCache(spec, num_blocks, block_size=2) for _ in range(2))
    drafter = ModelDrafter(toy(2), draft_cache)
    return ModelRunner(toy(1), cache, drawing, drafter=drafter, grammars=grammars())


def ask(
    prompts: Iterable[Sequence[int]], gamma: int = 2, max_tokens: int = 4, **chosen: Any
) -> list[Request]:
    """Make a request for each prompt. The seeds are 0, 1, …"""
    requests = []
    for seed, prompt in enumerate(prompts):
        settings = Settings(seed=seed, gamma=gamma, max_tokens=max_tokens, **FILTERS, **chosen)
        requests.append(Request(prompt, settings, (END,)))
    return requests


def texts(requests: Sequence[Request], make_rng: Callable | None = None) -> list[tuple[int, ...]]:
    """Run the requests in one batch -> the new tokens of each."""
    runner = make_runner(5 * len(requests), Drawing(3, make_rng=make_rng))
    list(Batcher(runner, 64).run(requests))
    return [tuple(request.tokens[request.num_prompt_tokens :]) for request in requests]


def distribution(**chosen: Any) -> Distribution:
    """The distribution of four tokens after an a: every outcome of production's draws is run."""
    return enumerate_distribution(lambda walk, n: texts(ask([[0]] * n, **chosen), walk))


# ---- The expected results: computed once, by the unchanged code, before a bug is planted ---------


@cache
def right_distribution() -> Distribution:
    """The distribution of the target's own outputs, computed token by token without a draft."""
    return sequential_distribution(
        toy(1), (0,), 4, (END,), lambda row: probabilities(row, **FILTERS)
    )


@cache
def right_grammar_distribution() -> Distribution:
    """The distribution under the grammar, without drafts."""
    return distribution(gamma=0, regex=REGEX)


def batch(**chosen: Any) -> list[Request]:
    """Sixteen requests. Some of their prompts share a prefix."""
    prompts = [[0, i % 2, 0, i % 3] for i in range(16)]
    requests = ask(prompts, max_tokens=6, logprobs=0, **chosen)
    for request in requests[::2]:  # their prompts are computed even if they are cached
        request.settings = replace(request.settings, prompt_logprobs=0)
    return requests


@cache
def right_batch() -> list[Request]:
    """The same requests, each run by itself without drafts."""
    requests = batch(gamma=0)
    for request in requests:
        texts([request])
    return requests


# ---- The checks ----------------------------------------------------------------------------------


def distribution_by_enumeration() -> bool:
    """Outputs follow the target's distribution, whatever the draft model proposes."""
    return distance(distribution(), right_distribution()) < 1e-12


def distribution_with_grammar() -> bool:
    """With a grammar, drafts do not change the distribution of the outputs."""
    return distance(distribution(regex=REGEX), right_grammar_distribution()) < 1e-12


def frequencies() -> bool:
    """With production's random numbers, 1000 outputs follow the target's distribution (χ²)."""
    return surprise(texts(ask([[0]] * 1000)), right_distribution()) < 4


def texts_alone_and_together() -> bool:
    """In a batch with drafts and preemption, each output, its logprobs and those of its prompt are
    equal to those of the request run by itself. In the second pass all prompts are cached."""
    batcher = Batcher(make_runner(8, Drawing(3, coupled=True)), 4)
    for _ in range(2):
        requests = batch()
        for _ in islice(batcher.run(requests), 200):  # a bug may never finish
            batcher.runner.cache.check()
        for request, right in zip(requests, right_batch()):
            if (request.tokens, request.logprobs) != (right.tokens, right.logprobs):
                return False
            if request.prompt_logprobs != right.prompt_logprobs:
                return False
    return any(request.num_preemptions for request in requests)


def stored_is_read() -> bool:
    """Keys of two heads, stored as INT8 in slots that are not in order, are read back."""
    keys = PagedCache(KVSpec(1, 2, 4, bits=(8, 8)), 3, block_size=2).keys
    slots = torch.tensor([5, 0, 3], dtype=torch.int64)
    x = torch.randn(3, 2, 4, dtype=torch.float32)
    keys.write(0, slots, x)
    return torch.allclose(keys.read(0, slots, x.dtype), x, atol=0.1)


def nan_is_told() -> bool:
    """Logits that are not finite raise an error."""
    try:
        Ops().probabilities(torch.tensor([[torch.nan]], dtype=torch.float32))
    except NotFinite:
        return True
    return False


def streamed(*rounds: list[int]) -> tuple[str, int]:
    """A stream with the stop string "bba" -> its text, and the number of its logprobs."""
    (request,) = ask([[1]], stop="bba", logprobs=0)
    stream = OutputStream(Letters(), request, "")
    for new in rounds:
        request.origins += ["plain"] * len(new)
        request.logprobs += new  # placeholders: only their number matters
        stream.feed(new)
    result = stream.finish()
    return result.text, len(result.logprobs)


def streams_by_hand() -> bool:
    """A stop string that is split over two rounds, and one that is never completed."""
    return (streamed([0, 0, 1], [1, 0, 0]), streamed([0, 0, 1])) == (("aa", 5), ("aab", 3))


def cut_is_not_stop() -> bool:
    """The client ends outputs at a b, but the grammar needs an a after it."""
    (request,) = ask([[1]], regex="ba")
    request.eos_token_ids = (1,)
    texts([request])
    return request.finish_reason == "length"


# ---- The exhibits --------------------------------------------------------------------------------


class Exhibit(NamedTuple):
    """A bug: the issue that reported it, what was wrong, and its effect there; the function, the
    piece of its source and the replacement that plants it here; the check that catches it."""

    source: str
    bug: str
    effect: str
    function: Callable
    right: str
    wrong: str
    seen_by: Callable[[], bool]


ROOMS: dict[str, list[Exhibit]] = {
    "Speculation": [
        Exhibit(
            "vllm-project/vllm#47386",
            "a draft and its correction are drawn with the same noise",
            "a token of 60.0 % came out at 63.0 %",
            Round.keys.func,
            "draft_role(j)",
            "TEXT",
            frequencies,
        ),
        Exhibit(
            "huggingface/transformers#47932",
            "verification gets q without the filters that the draft was drawn with",
            "do_sample with a draft was not lossless",
            Round.pick_drafts,
            "return q, picked",
            "return logits.softmax(-1), picked",
            distribution_by_enumeration,
        ),
        Exhibit(
            "deepseek-ai/DeepSpec#31",
            "the draft is drawn from q in bfloat16, but verified with q in float32",
            "the rounding biased the outputs",
            Round.pick_drafts,
            ".pick(q)",
            ".pick(q.bfloat16().to(q.dtype))",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm-ascend#13730",
            "u is always 0.0 in the test u < p / q",
            "no draft was ever rejected",
            verify_block,
            "rng.accept(h[:, 1:])",
            "drafted >= 0",
            distribution_by_enumeration,
        ),
        Exhibit(
            "openvinotoolkit/openvino.genai#4190",
            "a rejected draft is kept, because the count is off by one",
            "a word was dropped, and the words after it were kept",
            verify_block,
            "count_to_last(passed)",
            "(count_to_last(passed) + 1).minimum((drafted >= 0).sum(1))",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm#41044",
            "q is stored in the row of another request when the order of the batch changes",
            "p / q mixed two requests",
            Chain.one_by_one,
            "proposal.q[rows, j] = q",
            "proposal.q[: len(rows), j] = q",
            distribution_by_enumeration,
        ),
        Exhibit(
            "ggml-org/llama.cpp#22506",
            "a drawn draft is dropped because its own q was low",
            "none there, where each draft is q's argmax; with draws from q the outputs are biased",
            Round.verify,
            "drafted, q = proposal",
            "drafted, q = proposal; "
            "low = q[:, :-1].gather(-1, drafted.clamp(min=0)[..., None]) < 0.35; "
            "q[:, :-1] *= 1 - low.long().cummax(1)[0]",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm#16952",
            "the draw divides q by its noise in place",
            "verification read numbers that were not probabilities",
            pick,
            "(probs / E)",
            "probs.div_(E)",
            frequencies,
        ),
    ],
    "Sampling": [
        Exhibit(
            "flashinfer-ai/flashinfer#3774",
            "top-k keeps all tokens that tie with the last one",
            "[0.4, 0.3, 0.3] with k = 2 kept three",
            keep_top,
            "(rank < top_k)",
            "(ordered >= ordered.gather(-1, top_k.long().clamp(min=1) - 1))",
            distribution_by_enumeration,
        ),
        Exhibit(
            "flashinfer-ai/flashinfer#2455, vllm-project/vllm#45060",
            "a token is drawn from NaN",
            "other memory was read, and a token id was the size of the vocabulary",
            check_finite,
            "if not numbers.isfinite().all()",
            "if False",
            nan_is_told,
        ),
        Exhibit(
            "vllm-project/vllm#50440",
            "all requests of a batch draw with one seed",
            "their outputs were correlated",
            Round.keys.func,
            "request.settings.seed",
            "self.requests[0].settings.seed",
            texts_alone_and_together,
        ),
    ],
    "The cache": [
        Exhibit(
            "GeeeekExplorer/nano-vllm#144",
            "a whole prompt is taken from the prefix cache",
            "no token was left to compute, and attention refused the step",
            PagedCache._find_prefix,
            "(len(tokens) - 1 - self.lookahead)",
            "(len(tokens) - self.lookahead)",
            texts_alone_and_together,
        ),
        Exhibit(
            "vllm-project/vllm#12621",
            "collisions of the hash that finds blocks can be computed (CVE-2025-25183)",
            "a prompt could be answered with the keys and values of another",
            PagedCache._block_key,
            "tuple(tokens[i * S : (i + 1) * S + self.lookahead])",
            "hash(tuple(tokens[i * S : (i + 1) * S + self.lookahead])) % 5",
            texts_alone_and_together,
        ),
        Exhibit(
            "ovg-project/kvcached#362",
            "an evicted block keeps its hash",
            "the block and the index of prefixes disagreed",
            BlockPool.evict,
            "del self.cached[self.key_of.pop(block)]",
            "self.key_of.pop(block)",
            texts_alone_and_together,
        ),
        Exhibit(
            "sgl-project/sglang#24198",
            "a cached prefix in 8 bits is read without its scales",
            "the first answer was right, later ones were not",
            Store.decode,
            "from_int8(*parts, dtype)",
            "parts[0].to(dtype)",
            stored_is_read,
        ),
        Exhibit(
            "GeeeekExplorer/nano-vllm#212",
            "a chunk of a prompt attends to slots that are not written yet",
            "attention read more keys than had been stored",
            AttentionMetadata.slots.func,
            "slots[b, : sequence.seq_len]",
            "slots[b]",
            texts_alone_and_together,
        ),
    ],
    "Grammars": [
        Exhibit(
            "sgl-project/sglang#31978",
            "verification does not apply the grammar's masks",
            "drafts that the grammar forbids were accepted",
            Round.probabilities,
            "logits = self.masks.apply(logits, owners, depths)",
            "self.masks.apply(logits.clone(), owners, depths)",
            distribution_with_grammar,
        ),
        Exhibit(
            "vllm-project/vllm#49227",
            "a client's own end token cuts the output in the middle of its JSON",
            "finish_reason was stop, but the JSON was incomplete",
            Request.finish_reason.fget,
            '"length" if self.is_cut else "stop"',
            '"stop"',
            cut_is_not_stop,
        ),
    ],
    "What the client is told": [
        Exhibit(
            "vllm-project/vllm#33391",
            "logprobs are taken from rows of drafts that were rejected",
            "tokens had the logprobs of other positions",
            ModelRunner._drawn,
            "item.logit_rows[: len(tokens)]",
            "item.logit_rows[-len(tokens) :]",
            texts_alone_and_together,
        ),
        Exhibit(
            "vllm-project/vllm#42245",
            "a cached prompt is not computed again when its logprobs are asked for",
            "its tokens had the logprobs of another prompt",
            ModelRunner.open,
            "may_find = may_find[: len(request.prompt_logprobs) + 1]",
            "pass",
            texts_alone_and_together,
        ),
        Exhibit(
            "ggml-org/llama.cpp#9867",
            "text that could begin a stop string is held back and never shown",
            "the end of a streamed output was missing",
            OutputStream.finish,
            "rest += self.stops.held",
            "rest += ''",
            streams_by_hand,
        ),
    ],
}


# ---- The visit -----------------------------------------------------------------------------------


def verdict(check: Callable[[], bool]) -> str:
    """How the check catches a bug; empty if it passes. An error in production counts as caught."""
    try:
        return "" if check() else "caught"
    except (LookupError, RuntimeError, ValueError) as error:
        return f"caught as {error!r}"


def visit(exhibit: Exhibit) -> bool:
    """Plant the bug and print the result of its check -> whether it is caught."""
    source, bug, effect, function, right, wrong, check = exhibit
    if not check():
        sys.exit(f"{check.__name__} fails without a bug")
    with planted(function, right, wrong):
        start = perf_counter()
        told = verdict(check)
        milliseconds = 1000 * (perf_counter() - start)
    print(f"  {source}: {bug};", effect, f"− {right}", f"+ {wrong}", sep="\n      ")
    print(f"      {told or 'NOT CAUGHT'} by {check.__name__}, in {milliseconds:.0f} ms")
    return bool(told)


def main() -> None:
    """Show all rooms. The exit status is 1 if a bug is not caught."""
    torch.set_num_threads(1)
    caught = []
    for room, exhibits in ROOMS.items():
        print(f"\n{room}")
        if room == "Grammars" and find_spec("llguidance") is None:
            print("  closed: llguidance is not installed (the extra server)")
        else:
            caught += map(visit, exhibits)
    print(f"\n{sum(caught)} of {len(caught)} bugs are caught")
    if not all(caught):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(status(main))
