"""Everything together: a target, a draft, their caches and the batch; prompts in, text out.

    Engine(model, draft, …)         what `generate.py` and `generate(...)` compose, from one prompt to a file of them
    Writer                          one request's text as it grows: whole characters, cut before a stop string, and its times

The loop is: step the batch, hand each request's new tokens to its writer, and when a writer is done, so is the request. A stop string
is found in the text, not among the tokens, so it is the writer that finds it; the batch then lets the request go at once.

The caches hold what is asked for, up to what memory allows: with blocks (paged.py), as many as all requests in flight can need, or as
`kv_memory` holds; with rows (kvcache.py), one of the longest length for each.

Invariant: what writers have shown, put together, is the text of the result.
"""
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from batcher import Batcher
from drafters import Drafter, ModelDrafter, NgramDrafter, SelfDrafter
from kvcache import NoCache, free_memory, kv_bytes
from kvquant import Bits, widths
from model import Llama
from paged import PagedCache, blocks_that_fit
from pretrained import Model
from request import Message, Request, Result, StopStrings
from speculative import Decoder

BLOCK = 16                                              # tokens of a block
CHUNK = 512                                             # tokens of a step, at most
Draft = str | Path | Model | Llama | None               # a model, by name or loaded; "ngram"; "self", or the target's INT4 copy
Show = Callable[[str, str], None]                       # gets a piece of text, and whose it is


def silent(piece: str, whose: str) -> None:
    """Show nothing."""


def check_device(name: str | None) -> str | None:
    """The device, if there is such a thing on this machine."""
    if name is None:
        return None
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {name!r} is not on this machine: use cpu" + (" or cuda" if torch.cuda.is_available() else "")) from None
    if torch.device(name).type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use cpu or cuda")
    return name


def load_draft(draft: Draft, model: Model, dtype: torch.dtype | None = None) -> Draft:
    """The draft's model, if it is one, on the target's device. ValueError if its vocabulary is not the target's, or there is no copy to be made."""
    if draft is None or draft == "ngram" or isinstance(draft, Llama):
        return draft
    if draft == "self":
        return model.int4_copy()
    loaded = draft if isinstance(draft, Model) else Model.load(draft, model.llama.device, dtype)
    if difference := model.tokenizer.difference(loaded.tokenizer):
        raise ValueError(f"the draft's vocabulary is not the target's: {difference}; a draft must be of the target's family, or ngram")
    return loaded


class Writer:
    """Makes text of a request's tokens as they come."""

    def __init__(self, model: Model, request: Request, prompt: str | list[Message], show: Show = silent, index: int = 0):
        self.request, self.show = request, show
        self.result = Result(prompt, list(request.tokens), request.settings.seed, index)
        self.stream, self.stops, self.pieces = model.tokenizer.stream(), StopStrings(request.settings.stop), list[str]()

    @property
    def done(self) -> bool:
        return self.stops.found or bool(self.request.finish_reason)

    def feed(self, new: Sequence[int]) -> None:
        """The tokens that the request has just grown by. What comes after a stop string is dropped."""
        request, result = self.request, self.result
        result.total = time.perf_counter() - request.arrived
        for token, whose in zip(new, request.whose[len(request.whose) - len(new):]):
            result.tokens.append(token)
            result.first = result.first or result.total
            if token not in request.ends:
                self._emit(self.stops.feed(self.stream.feed(token)), whose)
            if self.stops.found:
                break

    def _emit(self, piece: str, whose: str = "plain") -> None:
        if piece:
            self.pieces.append(piece)
            self.show(piece, whose)

    def finish(self, reason: str = "") -> Result:
        """The whole result; `reason`, where something else than the request ended it."""
        self._emit(self.stops.feed(self.stream.finish()))
        self._emit(self.stops.finish())
        self.result.text, self.result.queued = "".join(self.pieces), max(0.0, self.request.started - self.request.arrived)
        self.result.finish_reason = "stop" if self.stops.found else reason or self.request.finish_reason
        return self.result


class Engine:
    """What makes texts of one model. tokens: that all requests in flight may have together; more wait for their turn.

    draft: what `load_draft` makes: a `Model`, "ngram", or an INT4 copy of the target, which needs no cache. max_len: the longest text. kv:
    "paged" or "contiguous". kv_memory: bytes for keys and values, or, up to 1, a share of what is free; None: as much as `tokens` need.
    kv_bits: 16, 8, 4 or "8/4" for keys and values. Raises ValueError or CacheFull.
    """

    def __init__(self, model: Model, draft: Draft, tokens: int, max_len: int, max_batch: int = 1, coupled: bool = False, use_cache: bool = True,
                 kv: str = "paged", kv_memory: float | None = None, prefix_cache: bool = True, kv_bits: str | int = 16):
        if kv not in ("paged", "contiguous"):
            raise ValueError(f"kv is {kv!r}: it must be paged or contiguous")
        if kv == "contiguous" and kv_memory is not None:
            raise ValueError("kv_memory is for the paged cache: a contiguous one reserves max_batch rows of max_len tokens")
        bits = widths(kv_bits)
        self.model, models = model, [model.llama] + ([draft.llama] if isinstance(draft, Model) else [])
        drafter: Drafter | None = None
        if not use_cache:
            if draft is not None or max_batch > 1 or bits != (16, 16):
                raise ValueError("without a cache there are no drafts, no batches and no bits of it: leave out --draft, --prompts and --kv-bits, or --no-cache")
            caches: list[Any] = [NoCache(model.llama.device)]
        elif kv == "contiguous":
            size, free = max_batch * -(-max_len // BLOCK) * self._block_bytes(models, bits), free_memory(models[0].device)
            if size > free:
                raise ValueError(f"{max_batch} rows of {max_len} tokens take {size:,} bytes, and {free:,} are free: "
                                 "fewer rows (--max-batch), a smaller --max-len, or --kv paged")
            caches = [llama.cache(min(max_len, llama.config.max_position_embeddings), max_batch, bits=bits) for llama in models]
        else:
            blocks = self._blocks(models, tokens, max_batch, kv_memory, bits)
            caches = [paged(llama, blocks, max_len, prefix_cache, bits) for llama in models]
        if isinstance(draft, Model):
            drafter = ModelDrafter(draft.llama, caches[1])
        elif isinstance(draft, Llama):
            drafter = SelfDrafter(draft, caches[0])
        elif draft == "ngram":
            drafter = NgramDrafter()
        target: Any = model.llama
        if caches[0].in_place:
            from graphs import Replayed
            target = Replayed(model.llama)
        self.caches = caches
        self.maker = Decoder(target, caches[0], model.tokenizer.vocab_size, drafter, coupled, budget=CHUNK if use_cache else max_len)
        if isinstance(drafter, SelfDrafter) and target is model.llama:                   # where its few bits cost more than they save,
            self.maker.costs.draft.seconds = drafter.estimate()                          # no draft is needed to see that
        self.batch = Batcher(self.maker, max_batch)

    @staticmethod
    def _block_bytes(models: Sequence[Llama], bits: Bits) -> int:
        """Bytes of a block's keys and values in all caches together."""
        return sum(kv_bytes(llama.config.num_hidden_layers, llama.config.num_key_value_heads, llama.config.head_dim,
                            BLOCK, llama.dtype, bits) for llama in models)

    @classmethod
    def _blocks(cls, models: Sequence[Llama], tokens: int, max_batch: int, kv_memory: float | None, bits: Bits) -> int:
        """Blocks of each cache: as many as are needed, where memory has them, or as many as `kv_memory` holds of all caches together."""
        one, free = cls._block_bytes(models, bits), free_memory(models[0].device)
        if kv_memory is not None and kv_memory > max(1, free):
            raise ValueError(f"the memory for keys and values is {kv_memory:.4g} bytes, and {free:,} are free: give less, "
                             "or, up to 1, a share of them")
        fit = blocks_that_fit(0.8 if kv_memory is None else kv_memory, one, models[0].device)
        return fit if kv_memory is not None else min(fit, -(-tokens // BLOCK) + max_batch)

    def describe(self) -> str:
        """How much is held for keys and values."""
        size = sum(cache.bytes for cache in self.caches) / 1e6
        cache = self.caches[0]
        blocks = f"{cache.pool.total:,} blocks of {cache.block_size} tokens" if isinstance(cache, PagedCache) else f"rows of {cache.max_len:,} tokens"
        return f"keys and values: {blocks}, {size:,.1f} MB"

    def serve(self, writers: Iterable[Writer]) -> Generator[Result, None, None]:
        """Make all these texts; each result as it is finished, and nothing of it is kept here.

        Ctrl-C ends them with what there is: their results come, and then it goes on its way.
        """
        waiting = {writer.request: writer for writer in writers}
        del writers
        for request in waiting:
            self.batch.add(request)
        try:
            while waiting:
                grown = self.batch.step()
                for request, new in grown.items():
                    waiting[request].feed(new)
                for request in grown:
                    if waiting[request].done:
                        self.batch.cancel(request)
                        yield self._finish(waiting.pop(request))
                if self.batch.running:
                    self.maker.measure_plain(self.batch.running[0])
        except KeyboardInterrupt:
            for request, writer in waiting.items():
                self.batch.cancel(request)
                yield self._finish(writer, "interrupted")
            raise

    def _finish(self, writer: Writer, reason: str = "") -> Result:
        result = writer.finish(reason)
        result.speculation = self.maker.report(writer.request)
        return result


def paged(llama: Llama, blocks: int, max_len: int, prefix_cache: bool = True, bits: Bits = (16, 16)) -> PagedCache:
    """A paged cache of this model's shape."""
    c = llama.config
    return PagedCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, blocks, BLOCK,
                      min(max_len, c.max_position_embeddings), llama.device, llama.dtype, prefix_cache, bits)
