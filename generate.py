"""Everything together: prompts in, text out.

    python generate.py --draft tiny-draft "Once upon a time"     the model in this repository, a smaller one ahead of it
    python generate.py --target 8B --draft 1B                    chat
    python generate.py --prompts FILE.jsonl                      a request a line, many at a time

`generate` is for Python callers, cli.py is the command line. The loop of an `Engine`: step the batch, hand each
request's new tokens to its writer, and when a writer is done, so is the request. There is one kind of work: read tokens
that the cache lacks, in chunks; then draft and verify, or draw (speculative.py). A single prompt is a batch of one.

The same model, prompt, settings and seed give the same text with and without a cache, in one dtype on one machine, and
with verify="coupled" with and without a draft. Otherwise a draft changes the text, but not its law. (bfloat16 rounds
coarsely: another chunk size or another γ may change a near-tie.)
"""

if __name__ == "__main__":  # imports take their time: a signal ends them in silence
    from app.shell import begin

    begin()

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from batcher import Batcher
from checkpoint.config import Config, end_tokens
from checkpoint.files import read_json
from checkpoint.hub import find_folder
from drafters import ModelDrafter, NgramDrafter, SelfDrafter
from errors import UserError, brief
from kernels import free_memory
from kvcache import KVCache, NoCache, kv_bytes, tokens_that_fit
from model import Llama
from paged import PagedCache, blocks_that_fit
from quant import Kind, widths
from request import Message, Request, Result, Settings, Writer
from sampling import SETTINGS, check_settings
from speculative import Decoder
from tokenizer import Tokenizer

BLOCK = 16  # tokens of a block
CHUNK = 512  # tokens of a step, at most
NEUTRAL = dict(
    repetition_penalty=1.0,
    encoder_repetition_penalty=1.0,
    no_repeat_ngram_size=0,
    num_beams=1,
    min_length=0,
    encoder_no_repeat_ngram_size=0,
    num_beam_groups=1,
    diversity_penalty=0.0,
    length_penalty=1.0,
    typical_p=1.0,
    epsilon_cutoff=0.0,
    eta_cutoff=0.0,
    **dict.fromkeys(
        (
            "penalty_alpha",
            "bad_words_ids",
            "sequence_bias",
            "guidance_scale",
            "min_new_tokens",
            "top_h",
            "suppress_tokens",
            "begin_suppress_tokens",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "stop_strings",
        )
    ),
)


class Model:
    """A model folder: weights, tokenizer, and the settings that its makers recommend."""

    def __init__(
        self,
        llama: Llama,
        tokenizer: Tokenizer,
        recommended: dict[str, Any],
        folder: Path | None = None,
    ):
        if (needed := tokenizer.vocab_size) > (rows := llama.config.vocab_size):
            raise UserError(
                f"the tokenizer has {needed} tokens, the model {rows}: they belong to different models"
            )
        self.llama, self.tokenizer, self.recommended, self.folder = (
            llama,
            tokenizer,
            recommended,
            folder,
        )
        self.ends = {*llama.config.eos_token_ids, *end_tokens(recommended)}

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bits: Kind = 16,
    ) -> "Model":
        """An alias, a Hub id or a folder; bits: see quant.STORED. Raises FileNotFoundError or ValueError."""
        folder = find_folder(name)
        tokenizer, file = Tokenizer.load(folder), folder / "generation_config.json"
        recommended = read_json(file) if os.path.lexists(file) else {}  # checked at use, but for:
        try:
            end_tokens(recommended)
            if not isinstance(sample := recommended.get("do_sample", False), bool | None):
                raise UserError(f"do_sample is {sample!r}; it must be true or false")
        except ValueError as error:
            raise UserError(f"{file}: {brief(error)}") from None
        return cls(Llama.load(folder, device, dtype, bits=bits), tokenizer, recommended, folder)

    def int4_copy(self) -> Llama:
        """The draft of `--draft self`: this model with layers in INT4. ValueError if it has no use, or no folder."""
        how = self.llama.config.quantization
        stored = None if self.folder is None else Config.load(self.folder).quantization
        why = (
            "this model does not come from a folder"
            if self.folder is None
            else f"the target's weights are {how.name} already"
            if how is not None and how.bits in (4, "nf4")
            else f"{self.folder} holds weights in {stored.name}"
            if stored is not None
            else ""
        )
        if why:
            raise UserError(
                f"{why}, and the INT4 copy (--draft self) needs weights in 16 bits: use --bits 16, or "
                "another draft or folder"
            )
        try:
            copy = Llama.load(self.folder, self.llama.device, self.llama.dtype, bits=4)
        except ValueError as error:  # several processes cannot share its groups
            raise UserError(
                f"the INT4 copy (--draft self): {error}; or name another draft"
            ) from None
        copy.embed, copy.head = self.llama.embed, self.llama.head
        return copy

    def complete(self, settings: Settings) -> Settings:
        """Fill settings of None from generation_config.json, as transformers does: no do_sample, temperature 0."""
        asked = {name: value for name in SETTINGS if (value := getattr(settings, name)) is not None}
        own = {} if asked else {"temperature": 0.0}
        if self.recommended.get("do_sample"):
            own = {
                name: self.recommended[name]
                for name in SETTINGS
                if self.recommended.get(name) is not None and name not in asked
            }
        try:
            check_settings(**own)
        except ValueError as error:
            raise UserError(
                f"generation_config.json: {brief(error)}; or ask for another yourself"
            ) from None
        new = int.from_bytes(os.urandom(4), "little")
        seed = self.llama.ops.agree(new) if settings.seed is None else settings.seed
        return replace(settings, seed=seed, **{"temperature": 1.0, **own, **asked})

    def unhonoured(self) -> list[str]:
        """The settings in generation_config.json that this program does not honour."""
        return [
            f"{name} {brief(value, 60)}"
            for name, neutral in NEUTRAL.items()
            if (value := self.recommended.get(name)) is not None and value != neutral
        ]

    def room(
        self, prompt: int, max_tokens: int, max_len: int | None, kv_bits: str | int = 16
    ) -> int:
        """The most tokens of prompt and answer. prompt: its tokens. ValueError if there is no room for an answer."""
        c, most = self.llama.config, self.llama.config.max_position_embeddings
        limit = (
            max_len
            if max_len is not None
            else min(
                most,
                tokens_that_fit(
                    c.num_hidden_layers,
                    c.num_key_value_heads,
                    c.head_dim,
                    self.llama.dtype,
                    self.llama.device,
                    bits=widths(kv_bits),
                ),
            )
        )
        if not 1 < limit <= most:
            raise UserError(
                f"max_len is {limit}: it must be from 2 to {most}, the model's limit, as memory allows"
            )
        if not 0 < prompt < limit:
            raise UserError(
                f"the prompt has {prompt} tokens, and must have from 1 to {limit - 1}: change it, or "
                f"raise --max-len (the model's limit is {most}, and memory must hold it)"
            )
        return min(limit, prompt + max_tokens)

    def encode(
        self, prompt: str | list[Message], system: str | None = None, chat: bool | None = None
    ) -> list[int]:
        """Tokens of a prompt: by the model's chat template (chat None: if it has one), or as plain text to continue."""
        if chat is False or self.tokenizer.chat_template is None:
            if chat or system is not None or not isinstance(prompt, str):
                what = (
                    "--chat"
                    if chat
                    else "a list of messages"
                    if system is None
                    else "a system message"
                )
                raise UserError(
                    f"{what} needs a chat template: leave it out, or use an Instruct model without --raw"
                )
            return self.tokenizer.prompt(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        opening = [{"role": "system", "content": system}] if system is not None else []
        return self.tokenizer.chat([*opening, *messages])

    def request(
        self,
        prompt: str | list[Message],
        settings: Settings,
        system: str | None = None,
        chat: bool | None = None,
        max_len: int | None = None,
        kv_bits: str | int = 16,
    ) -> Request:
        """A request with complete settings, max_tokens cut to the room. ValueError: as `encode` and `room`."""
        settings, tokens = self.complete(settings), self.encode(prompt, system, chat)
        left = self.room(len(tokens), settings.max_tokens, max_len, kv_bits) - len(tokens)
        return Request(tokens, replace(settings, max_tokens=left), self.ends)


Draft = (
    str | Path | Model | Llama | None
)  # a name or a loaded model; "ngram"; "self", or the target's INT4 copy


def load_draft(draft: Draft, model: Model, dtype: torch.dtype | None = None) -> Draft:
    """The draft, its model loaded on the target's device. ValueError if its vocabulary is not the target's."""
    if draft is None or draft == "ngram" or isinstance(draft, Llama):
        return draft
    if draft == "self":
        return model.int4_copy()
    loaded = draft if isinstance(draft, Model) else Model.load(draft, model.llama.device, dtype)
    if difference := model.tokenizer.difference(loaded.tokenizer):
        raise UserError(
            f"the draft's vocabulary is not the target's: {difference}; take its family, or ngram"
        )
    return loaded


class Engine:
    """A target, a draft, their caches and the batch.
    draft: a result of `load_draft`. tokens: the most in all running requests together; more requests wait. max_len:
    tokens of the longest text. kv: "paged" (blocks on demand) or "contiguous" (max_batch rows of max_len). kv_memory:
    bytes for keys and values, or, up to 1, a share of free memory; None: room for `tokens`. kv_bits: 16, 8, 4 or "8/4"
    (keys in 8, values in 4). Raises ValueError or CacheFull."""

    def __init__(
        self,
        model: Model,
        draft: Draft,
        tokens: int,
        max_len: int,
        max_batch: int = 1,
        coupled: bool = False,
        use_cache: bool = True,
        kv: str = "paged",
        kv_memory: float | None = None,
        prefix_cache: bool = True,
        kv_bits: str | int = 16,
    ):
        bits, device = widths(kv_bits), model.llama.device
        llamas = [part.llama for part in (model, draft) if isinstance(part, Model)]
        block = sum(
            kv_bytes(
                c.num_hidden_layers, c.num_key_value_heads, c.head_dim, BLOCK, llama.dtype, bits
            )
            for llama in llamas
            for c in [llama.config]
        )  # bytes of a block in all caches together
        rows, free = max_batch * -(-max_len // BLOCK) * block, free_memory(device)
        size = rows if kv == "contiguous" else kv_memory or 0  # up to 1: a share
        for wrong, rule in (
            (kv not in ("paged", "contiguous"), f"kv is {kv!r}: it must be paged or contiguous"),
            (
                not use_cache and (draft is not None or max_batch > 1 or bits != (16, 16)),
                "without a cache there "
                "are no drafts, batches or bits of it: leave out --draft, --prompts and --kv-bits, or --no-cache",
            ),
            (
                kv == "contiguous" and kv_memory is not None,
                "kv_memory is for the paged cache: a contiguous one has max_batch rows of max_len",
            ),
            (
                use_cache and size > max(1, free),
                f"the memory for keys and values is {size:.4g} bytes, and {free:,} "
                "are free: a smaller --kv-memory (up to 1: a share), or a smaller --max-batch or --max-len",
            ),
        ):
            if wrong:
                raise UserError(rule)
        if not use_cache:
            self.caches: list[Any] = [NoCache(device)]
        elif kv == "contiguous":
            self.caches = [
                KVCache.of(
                    llama, min(max_len, llama.config.max_position_embeddings), max_batch, bits=bits
                )
                for llama in llamas
            ]
        else:
            blocks = blocks_that_fit(0.8 if kv_memory is None else kv_memory, block, device)
            blocks = min(blocks, -(-tokens // BLOCK) + max_batch) if kv_memory is None else blocks
            self.caches = [
                PagedCache.of(llama, blocks, BLOCK, max_len, prefix_cache, bits) for llama in llamas
            ]
        drafter = (
            ModelDrafter(draft.llama, self.caches[1])
            if isinstance(draft, Model)
            else SelfDrafter(draft, self.caches[0])
            if isinstance(draft, Llama)
            else NgramDrafter()
            if draft == "ngram"
            else None
        )
        self.decoder = Decoder(
            model.llama,
            self.caches[0],
            model.tokenizer.vocab_size,
            drafter,
            coupled,
            budget=CHUNK if use_cache else max_len,
            ahead=model.llama.ops.ahead if use_cache else 1,
        )
        self.batch = Batcher(self.decoder, max_batch)

    def describe(self) -> str:
        """The memory for keys and values, in a line."""
        size, cache = sum(cache.bytes for cache in self.caches) / 1e6, self.caches[0]
        blocks = (
            f"{cache.pool.total:,} blocks of {cache.block_size} tokens"
            if isinstance(cache, PagedCache)
            else f"rows of {cache.max_len:,} tokens"
        )
        return f"keys and values: {blocks}, {size:,.1f} MB"

    def serve(self, writers: Iterable[Writer]) -> Generator[Result, None, None]:
        """Yield each text's result when the text is finished, and forget both. Ctrl-C ends all texts as they are: their
        results are yielded, then KeyboardInterrupt is raised."""
        waiting = {writer.request: writer for writer in writers}
        del writers
        for request in waiting:
            self.batch.add(request)

        def finish(request: Request, reason: str = "") -> Result:
            self.batch.cancel(request)
            result = waiting.pop(request).finish(reason)
            result.speculation = self.decoder.report(request)
            return result

        try:
            while waiting:
                grown = self.batch.step()
                for request, new in grown.items():
                    waiting[request].feed(new)
                for request in grown:
                    if waiting[request].done:
                        yield finish(request)
                if self.batch.running:
                    self.decoder.measure_plain(self.batch.running[0])
        except KeyboardInterrupt:
            for request in [*waiting]:
                yield finish(request, "interrupted")
            raise


def generate(
    prompt: str | list[Message],
    target: str | Path | Model = "tiny",
    *,
    system: str | None = None,
    chat: bool | None = None,
    max_len: int | None = None,
    use_cache: bool = True,
    kv: str = "paged",
    kv_memory: float | None = None,
    kv_bits: str | int = 16,
    draft: Draft = None,
    verify: str = "exact",
    bits: Kind = 16,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    show: Callable[[str], None] = lambda piece: None,
    **settings: Any,
) -> dict[str, Any]:
    """Continue or answer `prompt` (a text, or chat messages) -> the result as `--json` prints it.
    target: an alias, a Hub id, a folder, or a loaded `Model`, which saves loading it again; draft: the same, "ngram" or
    "self". settings: those of `Settings`, by name. chat: use the model's template; None: if it has one. verify: exact,
    or coupled: the text then depends on target and seed alone. bits: as for `Model.load`. kv, kv_memory, kv_bits: see
    `Engine`. show: called with each new piece. Several processes that torch.distributed has joined (torchrun,
    dist.init_process_group) all make the same call. Raises ValueError, FileNotFoundError or CacheFull."""
    if verify not in ("exact", "coupled"):
        raise UserError(f"verify is {verify!r}: it must be exact or coupled")
    asked = Settings(**settings)
    model = target if isinstance(target, Model) else Model.load(target, device, dtype, bits)
    request = model.request(prompt, asked, system, chat, max_len, kv_bits)
    length = request.prompt + request.left
    engine = Engine(
        model,
        load_draft(draft, model, dtype),
        length,
        length,
        1,
        verify == "coupled",
        use_cache,
        kv,
        kv_memory,
        kv_bits=kv_bits,
    )
    writer = Writer(model.tokenizer, request, prompt, lambda piece, origin: show(piece))
    return next(engine.serve([writer])).to_dict()


if __name__ == "__main__":
    import sys

    from app.cli import main

    def profiled(*args: Any) -> Any:
        from measure import profiler  # only for --profile: a slow import

        return profiler.profiled(*args)

    sys.exit(main(profiled=profiled if Path(__file__).with_name("measure").is_dir() else None))
