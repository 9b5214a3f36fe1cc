"""Everything together: prompts in, text out.

    python generate.py --draft tiny-draft "Once upon a time"     the model in this repository
    python generate.py --target 8B --draft 1B                    chat
    python generate.py --prompts FILE.jsonl                      one request per line, in batches

`plain_loop` is the loop that the rest of this project makes faster. `generate` and `stream` are for
Python callers; app/cli.py is the command line.

An `Engine` does the same for many requests. It runs the batch step by step, and hands each
request's new tokens to its output stream. When the stream is done, so is the request. A single
prompt is a batch of one.

Invariant: on one machine and in one dtype, the same model, prompt, settings and seed give the same
output with and without a cache. A draft (speculative.py) does not change the output at temperature
0, or in *coupled* mode, where the target and the draft model use the same random numbers.
Otherwise, it does not change the distribution of outputs. (Without the C code of cpu/native.py,
rounding depends on which tokens share a pass, so of two tokens with nearly equal logits, the other
one may be drawn.)
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports, so that --help or a signal ends it at once
    from app.shell import begin

    begin()
    from app.flags import generate_flags, tell_early

    tell_early(generate_flags)

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from batcher import Batcher
from devices import send
from errors import UserError, check_names
from kvcache import Cache, KVCache, contiguous_caches
from loading import NO_DRAFT, Draft, DraftName, Model, check_draft, load_draft
from model import Llama
from paged import PagedCache, paged_caches
from quant import Kind, widths
from request import Message, OutputStream, Request, Result, RoundStats, Settings
from runner import ModelRunner
from sampling import Keyed, check_finite, probabilities
from settings import Options, refuse_value
from speculative import Drawing

OPTIONS = tuple(Options.__dataclass_fields__)
LOADING = ("device", "dtype", "bits", "plain")  # parameters of `Model.load`


@torch.inference_mode()
def plain_loop(model: Model, request: Request, use_cache: bool = True) -> Iterator[int]:
    """Read the prompt, and then yield up to max_tokens new tokens, one after the other; one of
    request.eos_token_ids is the last. The caller appends them to the request.

    Each is drawn with the random numbers of the seed and of its own position. Logits beyond the
    tokenizer's vocabulary are padding; NotFinite if one of the others is not finite.
    """
    llama = model.llama
    settings = request.settings
    filters = settings.temperature, settings.top_k, settings.top_p, settings.min_p
    tokens = list(request.tokens)
    cache = KVCache(llama.kv_spec(), len(tokens) + settings.max_tokens)
    seq, _ = cache.open(tokens)  # stores nothing; _: how many were found in the cache, here 0
    new = tokens  # what the cache lacks: first the prompt, then the last token
    for _ in range(settings.max_tokens):
        metadata = cache.extend([(seq, new)]) if use_cache else None
        logits = llama(send(new, llama.device), metadata, slice(-1, None))  # [1, V]
        known = logits[:, : model.tokenizer.vocab_size]  # the output layer may have padding rows
        probs = probabilities(check_finite(known), *filters)
        # The random numbers of this seed and position (sampling.py).
        rng = Keyed(send([settings.seed], llama.device), send([len(tokens)], llama.device))
        (token,) = rng.pick(probs).tolist()
        yield token
        if token in request.eos_token_ids:
            break
        tokens.append(token)
        new = [token] if use_cache else tokens


# ---- The engine ----------------------------------------------------------------------------------


class PlainLoop:
    """What `--no-cache` runs: `plain_loop`, for one request after the other. It has the methods of
    `Batcher` that `Engine` calls."""

    def __init__(self, model: Model):
        self.model = model
        self.waiting: list[Request] = []
        self.running: dict[Request, Iterator[int]] = {}

    def check(self, request: Request) -> None:
        settings = request.settings
        logprobs = settings.logprobs, settings.prompt_logprobs
        if settings.follows is not None or logprobs != (None, None):
            raise UserError(
                "grammars and logprobs need a cache: leave out --no-cache, or "
                "--schema, --regex, --choice, --grammar, --logprobs and --prompt-logprobs"
            )
        if settings.penalties:
            asked = ", ".join(settings.penalties)
            raise UserError(f"{asked} needs a cache: leave out --no-cache, or set it to no effect")

    def add(self, request: Request) -> None:
        self.check(request)
        request.arrived = time.perf_counter()
        self.waiting.append(request)

    def step(self) -> dict[Request, list[int]]:
        if not self.running:
            request = self.waiting.pop(0)
            request.started = time.perf_counter()
            self.running[request] = plain_loop(self.model, request, use_cache=False)
        ((request, loop),) = self.running.items()
        new = list(islice(loop, 1))  # [] if max_tokens is 0
        request.tokens += new
        request.origins += ["plain"] * len(new)
        request.rounds.append(RoundStats(num_drafts=0, num_accepted=0))
        if request.finish_reason:
            self.cancel(request)
        return {request: new}

    def cancel(self, request: Request) -> None:
        self.running.pop(request, None)
        if request in self.waiting:
            self.waiting.remove(request)


def check_without_cache(draft: Draft | None, options: Options) -> None:
    """UserError for what `PlainLoop` does not support."""
    cache_options = (widths(options.kv_bits), options.kv, options.kv_memory)
    is_plain = cache_options == ((16, 16), "paged", None)
    if draft is not None or options.max_batch > 1 or not is_plain:
        raise UserError(
            "drafts, batches and cache options need a cache: leave out --draft, --prompts, --kv, "
            "--kv-bits and --kv-memory, or --no-cache"
        )


class Engine:
    """A target, a draft, their caches and the batch. draft: makes the drafter (loading.py).

    tokens: how many tokens, of all requests together, the paged cache should hold, using at most 80
    % of free memory; None means max_batch sequences of max_len tokens. If options.kv_memory is
    given, it decides instead. A request waits until the cache has room for it. UserError if there
    is too little memory.
    """

    def __init__(
        self, model: Model, draft: Draft | None, options: Options, tokens: int | None = None
    ):
        self.max_len = model.max_total_tokens(options)
        self.caches: list[Cache] = []  # the target's, and the draft's own if it has one
        self.runner: ModelRunner | None = None
        if options.use_cache:
            self._start(model, draft or NO_DRAFT, options, tokens)
        else:
            check_without_cache(draft, options)
            self.batcher = PlainLoop(model)
        for setting in model.recommended.unsupported():
            where = model.recommended.where
            warnings.warn(f"this model's {where} asks for {setting}, which is not supported")

    def _start(self, model: Model, draft: Draft, options: Options, tokens: int | None) -> None:
        """Make the caches, the runner and the batch."""
        llama = model.llama
        vocab_size = model.tokenizer.vocab_size
        self.caches = make_caches(llama, draft, options, self.max_len, tokens)
        cache = self.caches[0]
        draft_cache = self.caches[-1]  # the target's, if the draft has none of its own
        self.max_len = min(self.max_len, cache.max_len)  # a small cache holds shorter sequences
        is_coupled = options.verify == "coupled"
        drawing = Drawing(vocab_size, is_coupled, by_token=options.verify == "token")
        drafter = draft.make(draft_cache)
        budget = llama.ops.step_budget
        self.runner = ModelRunner(llama, cache, drawing, drafter, budget, model.grammars)
        self.batcher = Batcher(self.runner, options.max_batch)
        if options.max_batch > 1:  # compile, now, the kernels that only large batches use
            llama.ops.warm_up(llama, cache, vocab_size)
            for draft_model in draft.models:
                draft_model.ops.warm_up(draft_model, draft_cache, vocab_size)

    def describe(self) -> str:
        """One line about the memory for keys and values."""
        if not self.caches:
            return "keys and values: not stored"
        cache = self.caches[0]
        megabytes = sum(cache.bytes for cache in self.caches) / 1e6
        if isinstance(cache, PagedCache):
            size = f"{cache.pool.total:,} blocks of {cache.block_size} tokens"
        else:
            size = f"rows of {cache.max_len:,} tokens"
        return f"keys and values: {size}, {megabytes:,.1f} MB"

    def step(self, streams: dict[Request, OutputStream]) -> dict[Request, Result]:
        """Run a step and feed the streams -> the results of the requests that are finished."""
        new_tokens = self.batcher.step()
        for request, tokens in new_tokens.items():
            streams[request].feed(tokens)
        done = [request for request in new_tokens if streams[request].is_done]
        return {request: self.finish(streams[request]) for request in done}

    def serve(self, streams: Iterable[OutputStream]) -> Generator[Result, None, None]:
        """Yield each request's result when the request is finished.

        Ctrl-C, raised here or thrown in by the caller, ends all requests: the results so far are
        yielded, and then KeyboardInterrupt is raised.
        """
        waiting = {stream.request: stream for stream in streams}
        try:
            for request in waiting:
                self.batcher.add(request)
            while waiting:
                for request, result in self.step(waiting).items():
                    del waiting[request]
                    yield result
        except KeyboardInterrupt:
            for request in list(waiting):
                yield self.finish(waiting.pop(request), "interrupted")
            raise
        finally:  # after an error, or if the caller stops iterating
            for request in waiting:
                self.batcher.cancel(request)

    def finish(self, stream: OutputStream, reason: str = "") -> Result:
        """Take a request out of the batch -> its result. reason: why it is cancelled, if it is."""
        self.batcher.cancel(stream.request)
        result = stream.finish(reason)
        if self.runner is not None:
            result.speculation = self.runner.report(stream.request)
        return result


def make_caches(
    target: Llama, draft: Draft, options: Options, max_len: int, tokens: int | None
) -> list[Cache]:
    """The target's cache, and the draft's own cache if it has one."""
    bits = widths(options.kv_bits)
    specs = [target.kv_spec(bits, draft.draft_layers)]
    limits = [max_len]
    if draft.has_own_cache:
        for llama in draft.models:
            specs.append(llama.kv_spec(bits))
            limits.append(min(max_len, llama.config.max_position_embeddings))
    if options.kv == "contiguous":
        return contiguous_caches(specs, limits, options.max_batch)
    return paged_caches(specs, limits, tokens or options.max_batch * max_len, options)


# ---- For Python callers --------------------------------------------------------------------------


def stream(
    prompt: str | None = None, *, messages: list[Message] | None = None, **options: Any
) -> Iterator[str]:
    """`for piece in stream("…")` yields the text as it is generated. Options: see `prepare`."""
    engine, (output,) = prepare([either(prompt, messages)], **options)
    engine.batcher.add(output.request)
    length = 0  # of the text so far
    is_done = False
    while not is_done:
        is_done = bool(engine.step({output.request: output}))
        piece = output.result.text[length:]
        length += len(piece)
        if piece:
            yield piece


def either(prompt: Any, messages: Any) -> Any:
    """Whichever of the two is not None. UserError if both are given, or neither."""
    if (prompt is None) == (messages is None):
        raise UserError("give either a prompt or messages")
    return prompt if messages is None else messages


def generate(
    prompt: str | Sequence[str] | None = None,
    target: str | Path | Model = "tiny",
    *,
    messages: list[Message] | None = None,
    **options: Any,
) -> Result | list[Result]:
    """Continue or answer one prompt, or several in one batch. Returns a Result, or a list of them.

    generate("Once upon a time", max_tokens=40).text
    generate(["Tom", "Lily"], draft="tiny-draft", verify="coupled", seed=1)
    generate(messages=[{"role": "user", "content": "Hi"}], target="1B")

    target: an alias, a Hub id, a folder, a GGUF, or a loaded `Model`, which saves loading it again.
    Options: those of `prepare`, and the fields of `Settings` by name. If torch.distributed has
    joined several processes, all of them must make the same call. Raises UserError,
    FileNotFoundError or CacheFull.
    """
    asked = either(prompt, messages)
    # A dict is a mistake, which `as_messages` reports.
    is_batch = isinstance(prompt, Iterable) and not isinstance(prompt, str | dict)
    prompts = list(asked) if is_batch else [asked]
    engine, streams = prepare(prompts, target, **options)
    results = sorted(engine.serve(streams), key=lambda result: result.index)
    return results if is_batch else results[0]


def prepare(
    prompts: Sequence[str | list[Message]],
    target: str | Path | Model = "tiny",
    *,
    draft: DraftName = None,
    draft_bits: Kind | None = None,
    system: str | None = None,
    chat: bool | None = None,
    show: Callable[[str, str], None] | None = None,
    **named: Any,
) -> tuple[Engine, list[OutputStream]]:
    """An engine for these prompts, and a stream for each.

    draft: a model, "ngram", "self" or "ngram,NAME". draft_bits: see `load_draft`. system, chat: see
    `Model.encode`. show: called with each new piece of text and the origin of its last token
    (request.py). named: device, dtype, bits and plain of `Model.load`, and fields of `Options` and
    `Settings`. Unless the temperature is 0 or `verify` is "coupled", an output also depends on the
    draft and on how many tokens it drafts, and that number depends on measured times unless `gamma`
    is given.
    """
    check_names(named, [*Settings.__dataclass_fields__, *OPTIONS, *LOADING], "setting or option")
    loading = {name: named.pop(name) for name in LOADING if name in named}
    options = Options(**{name: named.pop(name) for name in OPTIONS if name in named})
    settings = Settings(**named)
    if isinstance(target, Model) and loading:
        raise UserError(
            f"{loading} cannot be used because the target is already loaded: leave out device, "
            "dtype, bits and plain, or name the target's folder"
        )
    if not isinstance(chat, bool | None):
        refuse_value("chat", chat, "true or false")
    check_draft(draft, draft_bits)
    if draft is None and settings.gamma is not None:
        raise UserError("gamma needs drafted tokens: name a draft, or leave gamma out")
    model = target if isinstance(target, Model) else Model.load(target, **loading)
    streams = []
    lengths = []
    for index, prompt in enumerate(prompts):
        request = model.request(prompt, settings, options, system, chat)
        lengths.append(request.num_prompt_tokens + request.num_remaining)
        streams.append(OutputStream(model.tokenizer, request, prompt, show=show, index=index))
    max_batch = min(options.max_batch, max(1, len(prompts)))
    # The caches are sized for these requests: rows for the longest, and memory for all of them.
    options = replace(options, max_len=max([2, *lengths]), max_batch=max_batch)  # at least 2
    loaded = load_draft(draft, model, loading.get("dtype"), draft_bits)
    return Engine(model, loaded, options, sum(lengths)), streams


if __name__ == "__main__":
    import sys

    from app.cli import main

    sys.exit(main())
