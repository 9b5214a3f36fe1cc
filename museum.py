"""A museum of bugs: what other engines have shipped, planted here, and caught.

An engine that is wrong tells nobody. Its words still look like words: a token comes out at 63 %
instead of 60 %, an answer begins with the keys and values of another prompt, a filter is applied
on one side only. Each bug of this page was reported in the public tracker of an engine, and hangs
beside the line of this project in which the same mistake is one edit away.

`python museum.py` plants them, one after the other, in the production code that is loaded:

    who shipped it   what was wrong, and what it did
                     − the line here
                     + the line with the bug
                     the check that sees it, and how fast

A check must hold before each bug is planted, and fail afterwards. A bug that nobody sees ends the
program with status 1.

`planted` is the only mechanism: a piece of a function's source is replaced, its page is compiled
anew, and the function gets the new code, wherever it was imported.

A strong check sees many bugs, so there are few: the distribution by enumeration (proof.py),
frequencies with the random numbers of production, texts in a batch beside texts alone, and some
rows by hand. The models are toys of three tokens that read their text back from the cache, so one
wrong slot makes another text. What is right is made by the code as it is, before the first bug.

Invariant: after each bug the code is what it was.
Not covered: bugs in parts that this project does not have, or that need a GPU (`NOT_HERE`).
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

from batcher import Batcher
from drafters import Chain, ModelDrafter
from grammar import Grammars, GrammarState
from kernels import Ops
from kvcache import AttentionMetadata, KVSpec, SequenceSlice, Store, pack_metadata
from paged import BlockPool, PagedCache
from proof import (
    Distribution,
    Toy,
    distance,
    enumerate_distribution,
    sequential_distribution,
    surprise,
)
from request import OutputStream, Request, StopStrings
from runner import ModelRunner
from sampling import NotFinite, check_finite, keep_top, pick, probabilities, token_logprobs
from settings import Settings
from speculative import Drawing, Round, likelihood_ratio, pick_residual, verify_block
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

END = 2  # the third of a toy's tokens; the others are a and b
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
    """A model for texts of up to 9 tokens, in which each token has some probability."""
    model = Toy(longest=9, seed=seed)
    model.table.clamp_(min=-2)
    return model


@cache
def grammars() -> Grammars:
    return Grammars(Letters(), {END})


def make_runner(num_blocks: int, drawing: Drawing) -> ModelRunner:
    """One toy drafts for the other. num_blocks: of each cache, two tokens a block."""
    spec = KVSpec(1, 1, 1, dtype=torch.float64)
    cache, draft_cache = (PagedCache(spec, num_blocks, block_size=2) for _ in range(2))
    drafter = ModelDrafter(toy(2), draft_cache)
    return ModelRunner(toy(1), cache, drawing, drafter=drafter, grammars=grammars())


def ask(
    prompts: Iterable[Sequence[int]], gamma: int = 2, max_tokens: int = 4, **chosen: Any
) -> list[Request]:
    """Requests with the seeds 0, 1, …"""
    requests = []
    for seed, prompt in enumerate(prompts):
        settings = Settings(seed=seed, gamma=gamma, max_tokens=max_tokens, **FILTERS, **chosen)
        requests.append(Request(prompt, settings, (END,)))
    return requests


def texts(requests: Sequence[Request], make_rng: Callable | None = None) -> list[tuple[int, ...]]:
    """Make texts together -> the new tokens of each."""
    runner = make_runner(5 * len(requests), Drawing(3, make_rng=make_rng))
    list(Batcher(runner, 64).run(requests))
    return [tuple(request.tokens[request.num_prompt_tokens :]) for request in requests]


def distribution(**chosen: Any) -> Distribution:
    """Of four tokens after an a: production runs with every outcome of its draws."""
    return enumerate_distribution(lambda walk, n: texts(ask([[0]] * n, **chosen), walk))


# ---- What is right: made once, by the code as it is, before the first bug ------------------------


@cache
def right_distribution() -> Distribution:
    """The distribution of texts that the target makes alone, token by token."""
    return sequential_distribution(
        toy(1), (0,), 4, (END,), lambda row: probabilities(row, **FILTERS)
    )


@cache
def right_grammar_distribution() -> Distribution:
    """The distribution of texts without drafts."""
    return distribution(gamma=0, regex=REGEX)


def batch(**chosen: Any) -> list[Request]:
    """Requests for sixteen texts, of which some begin alike."""
    prompts = [[0, i % 2, 0, i % 3] for i in range(16)]
    requests = ask(prompts, max_tokens=6, logprobs=0, **chosen)
    for request in requests[::2]:  # their prompts are read, though they are cached
        request.settings = replace(request.settings, prompt_logprobs=0)
    return requests


@cache
def right_batch() -> list[Request]:
    """Each of these texts alone, without drafts."""
    requests = batch(gamma=0)
    for request in requests:
        texts([request])
    return requests


# ---- The checks ----------------------------------------------------------------------------------


def distribution_by_enumeration() -> bool:
    """Texts follow the target's distribution, whatever is drafted."""
    return distance(distribution(), right_distribution()) < 1e-12


def distribution_with_grammar() -> bool:
    return distance(distribution(regex=REGEX), right_grammar_distribution()) < 1e-12


def frequencies() -> bool:
    """With the random numbers of production, too, texts follow the target."""
    return surprise(texts(ask([[0]] * 1000)), right_distribution()) < 4


def texts_alone_and_together() -> bool:
    """In a batch with drafts and preemption, each text and its logprobs, and those of its prompt,
    are what they are alone. The second time all prompts are cached."""
    batcher = Batcher(make_runner(8, Drawing(3, coupled=True)), 4)
    for _ in range(2):
        requests = batch()
        for _ in islice(batcher.run(requests), 200):  # a bug may run for ever
            batcher.runner.cache.check()
        for request, right in zip(requests, right_batch()):
            if (request.tokens, request.logprobs) != (right.tokens, right.logprobs):
                return False
            if request.prompt_logprobs != right.prompt_logprobs:
                return False
    return any(request.num_preemptions for request in requests)


def stored_is_read() -> bool:
    """Keys in 8 bits, of two heads, in blocks that are not in order."""
    keys = PagedCache(KVSpec(1, 2, 4, bits=(8, 8)), 3, block_size=2).keys
    slots = torch.tensor([5, 0, 3], dtype=torch.int64)
    x = torch.randn(3, 2, 4, dtype=torch.float32)
    keys.write(0, slots, x)
    return torch.allclose(keys.read(0, slots, x.dtype), x, atol=0.1)


def padding_is_stored_nowhere() -> bool:
    """In a step that is larger than its sequences, as a CUDA graph reads it."""
    metadata = pack_metadata([SequenceSlice([1], 0, 2)], 2, T=4, B=2, M=1)
    return metadata[4:8].tolist() == [2, 3, -1, -1]


def nan_is_told() -> bool:
    try:
        Ops().probabilities(torch.tensor([[torch.nan]], dtype=torch.float32))
    except NotFinite:
        return True
    return False


def streamed(*rounds: list[int]) -> tuple[str, int]:
    """The text that a stream shows, which stops at "bba", and the number of its logprobs."""
    (request,) = ask([[1]], stop="bba", logprobs=0)
    stream = OutputStream(Letters(), request, "")
    for new in rounds:
        request.origins += ["plain"] * len(new)
        request.logprobs += new  # stand-ins, which are counted
        stream.feed(new)
    result = stream.finish()
    return result.text, len(result.logprobs)


def streams_by_hand() -> bool:
    """A stop string that begins in one round and ends in the next, and one that never ends."""
    return (streamed([0, 0, 1], [1, 0, 0]), streamed([0, 0, 1])) == (("aa", 5), ("aab", 3))


def cut_is_not_stop() -> bool:
    """A client's own end, a b, comes where the grammar wants an a."""
    (request,) = ask([[1]], regex="ba")
    request.eos_token_ids = (1,)
    texts([request])
    return request.finish_reason == "length"


# ---- The exhibits --------------------------------------------------------------------------------


class Exhibit(NamedTuple):
    """A bug: who shipped it, what was wrong, and what it did there; where it is planted; the check
    that sees it."""

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
            "a draft's noise draws its correction, too",
            "a token of 60.0 % came out at 63.0 %",
            Round.keys.func,
            "draft_role(j)",
            "TEXT",
            frequencies,
        ),
        Exhibit(
            "huggingface/transformers#47932",
            "q is told without the filters that the draft was drawn with",
            "do_sample with a draft was not lossless",
            Round.pick_drafts,
            "return q, picked",
            "return logits.softmax(-1), picked",
            distribution_by_enumeration,
        ),
        Exhibit(
            "deepseek-ai/DeepSpec#31",
            "the draft is drawn in bfloat16, and verified in float32",
            "texts were biased by the rounding",
            Round.pick_drafts,
            ".pick(q)",
            ".pick(q.bfloat16().to(q.dtype))",
            distribution_by_enumeration,
        ),
        Exhibit(
            "huggingface/transformers#32867",
            "the draft takes its most probable token, and tells q of a draw",
            "texts did not follow the target",
            Round.pick_drafts,
            "self.draft_rng(j, rows).pick(q)",
            "q.argmax(-1)",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm-ascend#13730",
            "u is 0.0 in the test u < p / q",
            "no draft was ever rejected",
            verify_block,
            "rng.accept(h[:, 1:])",
            "drafted >= 0",
            distribution_by_enumeration,
        ),
        Exhibit(
            "ROCm/ATOM#2318",
            "a draft stands if it is the target's most probable token",
            "texts were greedy where drafts stood, and drawn where they did not",
            verify_block,
            "rng.accept(h[:, 1:])",
            "drafted == p[:, :-1].argmax(-1)",
            distribution_by_enumeration,
        ),
        Exhibit(
            "sgl-project/sglang#31214",
            "verification takes the argmax at any temperature, on one vendor's GPUs",
            "long answers repeated themselves",
            pick_residual,
            "rng.pick(probs)",
            "probs.argmax(-1)",
            distribution_by_enumeration,
        ),
        Exhibit(
            "openvinotoolkit/openvino.genai#4190",
            "a rejection counts one draft late",
            "a word was dropped, and what follows it was kept",
            verify_block,
            "count_to_last(stands)",
            "(count_to_last(stands) + 1).minimum((drafted >= 0).sum(1))",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm-ascend#2881",
            "the n-gram path sets p of the draft to 0, in place",
            "texts were drawn from another distribution",
            likelihood_ratio,
            "p_x = p[:, :-1]",
            "p_x = p[:, :-1].scatter_(-1, index, 0)",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm-ascend#7807",
            "the ratios of a block are capped one by one, not their product",
            "drafts and corrections did not add up to the target's distribution",
            verify_block,
            "weights[-1] * ratio_j",
            "weights[-1] * ratio_j.clamp(max=1)",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm#10198",
            "top-k and top-p filter the draft, not the target",
            "drafts were judged by another distribution than that of the text",
            ModelRunner._probabilities,
            "round.probabilities(logits[: len(owners)], owners)",
            "logits[: len(owners)].softmax(-1)",
            distribution_by_enumeration,
        ),
        Exhibit(
            "NVIDIA/TensorRT-LLM#19390",
            "a temperature that is not set becomes that of greedy texts",
            "top_k=50 alone made the same text every time",
            Round.probabilities,
            "**settings)",
            "**{'temperature': 1e-5, **settings})",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm#41044",
            "q lies in the row of another text, once the batch has another order",
            "p / q compared two texts",
            Chain.one_by_one,
            "proposal.q[rows, j] = q",
            "proposal.q[: len(rows), j] = q",
            distribution_by_enumeration,
        ),
        Exhibit(
            "vllm-project/vllm#16952",
            "the draw divides q by its noise, in place",
            "verification saw numbers that were no probabilities",
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
            "ggml-org/llama.cpp#1953",
            "top-p drops the token that reaches p",
            "of few likely tokens one was missing",
            keep_top,
            "mass_before < top_p * total",
            "mass <= top_p * total",
            distribution_by_enumeration,
        ),
        Exhibit(
            "flashinfer-ai/flashinfer#2455, vllm-project/vllm#45060",
            "a token is drawn from NaN",
            "memory of others was read, and an id was the size of the vocabulary",
            check_finite,
            "if not numbers.isfinite().all()",
            "if False",
            nan_is_told,
        ),
        Exhibit(
            "vllm-project/vllm#50440",
            "all texts of a batch draw with one seed",
            "their tokens were correlated",
            Round.keys.func,
            "request.settings.seed",
            "self.requests[0].settings.seed",
            texts_alone_and_together,
        ),
    ],
    "Blocks, and what they hold": [
        Exhibit(
            "GeeeekExplorer/nano-vllm#144",
            "a prompt is found whole in the prefix cache",
            "no token was left to compute, and attention refused the step",
            PagedCache._find_prefix,
            "(len(tokens) - 1 - self.lookahead)",
            "(len(tokens) - self.lookahead)",
            texts_alone_and_together,
        ),
        Exhibit(
            "GeeeekExplorer/nano-vllm#211",
            "a preempted text is planned whole, and then a prefix of it is found",
            "list index out of range, with many texts",
            ModelRunner.schedule,
            "start = self.cache.length(request.seq)",
            "start = 0 if request.num_preemptions else self.cache.length(request.seq)",
            texts_alone_and_together,
        ),
        Exhibit(
            "GeeeekExplorer/nano-vllm#212",
            "a chunk of a prompt attends to more keys than were stored so far",
            "attention read slots that nobody had written",
            AttentionMetadata.slots.func,
            "slots[b, : sequence.seq_len]",
            "slots[b]",
            texts_alone_and_together,
        ),
        Exhibit(
            "vllm-project/vllm#12621",
            "blocks are found by a hash that anybody can compute (CVE-2025-25183)",
            "one prompt could be answered with the keys and values of another",
            PagedCache._block_key,
            "tuple(tokens[i * S : (i + 1) * S + self.lookahead])",
            "hash(tuple(tokens[i * S : (i + 1) * S + self.lookahead])) % 5",
            texts_alone_and_together,
        ),
        Exhibit(
            "kekzl/imp#1301",
            "a block's hash leaves out its last token",
            "a mutant that no test of the project saw",
            PagedCache._block_key,
            "(i + 1) * S + self.lookahead",
            "(i + 1) * S + self.lookahead - 1",
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
            "ml-explore/mlx#4431",
            "keys and values of a batch are read without the text's own offset",
            "all texts read those of the first",
            AttentionMetadata.slots.func,
            "self.block_tables.long()",
            "self.block_tables[:1].expand_as(self.block_tables).long()",
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
            "vllm-project/vllm#49716",
            "strides are taken from a shape, not from the memory",
            "scales lay in the wrong blocks, once there were many",
            Store.read,
            "part[layer].flatten(0, 1)",
            "part[layer].transpose(0, 1).flatten(0, 1)",
            stored_is_read,
        ),
        Exhibit(
            "m0at/rvllm#32",
            "padding of a recorded step is stored in slot 0",
            "a running text lost its first keys and values",
            pack_metadata,
            "slot_mapping.extend([-1] * padding)",
            "slot_mapping.extend([0] * padding)",
            padding_is_stored_nowhere,
        ),
    ],
    "Grammars": [
        Exhibit(
            "sgl-project/sglang#31978",
            "verification does not apply the grammar's masks",
            "drafts that the grammar forbids were accepted",
            Round.probabilities,
            "logits = self.masks.apply(logits, rows, depth)",
            "self.masks.apply(logits.clone(), rows, depth)",
            distribution_with_grammar,
        ),
        Exhibit(
            "vllm-project/vllm#30916",
            "the grammar still has drafts that are no longer those of the text",
            "the engine crashed after a preemption",
            GrammarState.settle,
            "self.matcher.rollback(self.num_drafts)",
            "self.matcher.rollback(0)",
            distribution_with_grammar,
        ),
        Exhibit(
            "sgl-project/sglang#29102",
            "a text that was taken back gives its grammar the last token again",
            "tokens were refused that were right",
            GrammarState.settle,
            "self._follow(new)",
            "self._follow([*new, *new])",
            distribution_with_grammar,
        ),
        Exhibit(
            "vllm-project/vllm#49227",
            "a client's own end stops a text amid its JSON",
            "finish_reason was stop, and the JSON could not be read",
            Request.finish_reason.fget,
            '"length" if self.is_cut else "stop"',
            '"stop"',
            cut_is_not_stop,
        ),
    ],
    "What the client is told": [
        Exhibit(
            "ggml-org/llama.cpp#27972",
            "logprobs are 0.0 with drafts",
            "every token had the probability 1",
            token_logprobs,
            "rows.double().log_softmax(-1)",
            "torch.zeros_like(rows)",
            texts_alone_and_together,
        ),
        Exhibit(
            "vllm-project/vllm#33391",
            "logprobs are taken from rows of drafts that were rejected",
            "tokens had the logprobs of other places",
            ModelRunner._logprobs,
            "item.logits[: len(new)]",
            "item.logits[-len(new) :]",
            texts_alone_and_together,
        ),
        Exhibit(
            "vllm-project/vllm#42245",
            "a prompt that is cached is not computed again for its logprobs",
            "its tokens had those of another prompt",
            ModelRunner.open,
            "known = known[: len(request.prompt_logprobs) + 1]",
            "pass",
            texts_alone_and_together,
        ),
        Exhibit(
            "vllm-project/vllm#47616",
            "logprobs go on behind a stop string",
            "there were more of them than tokens",
            OutputStream.finish,
            "self.request.logprobs[: len(result.tokens)]",
            "self.request.logprobs",
            streams_by_hand,
        ),
        Exhibit(
            "ggml-org/llama.cpp#9867",
            "what could begin a stop string is never shown",
            "the end of a streamed text was missing",
            OutputStream.finish,
            "rest += self.stops.held",
            "rest += ''",
            streams_by_hand,
        ),
        Exhibit(
            "ggml-org/llama.cpp#10914",
            "what could begin a stop string is shown, and then shown again",
            "streamed text came twice",
            StopStrings.feed,
            "return text[: len(text) - num_held]",
            "return text",
            streams_by_hand,
        ),
    ],
}

NOT_HERE = {
    "vllm-project/vllm#40149": "no wrong distribution: a draft without q may be taken for certain",
    "NVIDIA/TensorRT-LLM#15098": "there are no trees of drafts",
    "ggml-org/llama.cpp#23970": "a cache has no checkpoints: a prefix is found by its tokens",
    "vllm-project/vllm#48245": "a step is over before the next one is planned",
    "vllm-project/vllm#36138": "a grammar holds from the first token on, without reasoning before",
    "ml-explore/mlx-lm#1423": "rounding of passes of several tokens: cpu/test_native.py",
    "NVIDIA/TensorRT-LLM#17110": "values frozen in CUDA graphs: gpu/test_graphs.py, with stand-ins",
}


# ---- The visit -----------------------------------------------------------------------------------


def verdict(check: Callable[[], bool]) -> str:
    """How a check sees a bug; empty if it holds. Production code that falls apart is seen, too."""
    try:
        return "" if check() else "caught"
    except (LookupError, RuntimeError, ValueError) as error:
        return f"caught as {error!r}"


def visit(exhibit: Exhibit) -> bool:
    """Plant a bug, and print what its check says -> whether it is caught."""
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
            print("  closed: llguidance is not installed (requirements-extra.txt)")
        else:
            caught += map(visit, exhibits)
    print("\nNot here", *map(": ".join, NOT_HERE.items()), sep="\n  ")
    print(f"\n{sum(caught)} of {len(caught)} bugs are caught")
    if not all(caught):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(status(main))
