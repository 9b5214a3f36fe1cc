"""Loading: a target with its tokenizer and recommended settings; and what drafts for it.

`Model.load` takes an alias, a Hub id, a folder or a GGUF. A `Model` turns prompts into requests:
its template lays out a chat, its makers' settings fill in what was not asked for, and limits are
checked before anything runs. `load_draft` makes a `Draft`: a recipe, from which each `Engine`
(generate.py) makes a drafter for its own cache.

Invariant: what a user got wrong about a draft's name or bits is told before weights are loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from automaton import Grammars
from checkpoint.eagle import is_eagle
from checkpoint.generation import GenerationConfig
from checkpoint.hub import find_model
from checkpoint.load import default_bits, draft_config, load_eagle
from devices import free_memory
from drafters import Drafter, ModelDrafter, NgramDrafter, SelfDrafter
from eagle import EagleDrafter, EagleHead
from errors import UserError
from kernels import Ops
from kvcache import Cache
from model import Llama
from quant import Kind, widths
from request import Message, Request, Settings
from settings import PENALTIES, SETTINGS, Options, check_known, refuse_value
from tokenizer import Tokenizer

# ---- Models --------------------------------------------------------------------------------------


class Model:
    """A model: weights, tokenizer, and the settings that its makers recommend."""

    def __init__(
        self,
        llama: Llama,
        tokenizer: Tokenizer,
        recommended: GenerationConfig | None = None,
        folder: Path | None = None,
    ):
        self.llama = llama
        self.tokenizer = tokenizer
        self.recommended = recommended or GenerationConfig()
        self.folder = folder
        self.eos_token_ids = self.recommended.all_ends(llama.config, tokenizer)
        self.grammars = Grammars(tokenizer, self.eos_token_ids)

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bits: Kind = 16,
        plain: bool = False,
    ) -> Model:
        """An alias, a Hub id, a folder or a GGUF. bits: see quant.FORMATS. plain: run the pages as
        they are written, without the faster code of cpu/ and gpu/."""
        folder = find_model(name)
        tokenizer = Tokenizer.load(folder)
        recommended = GenerationConfig.load(folder)
        llama = Llama.load(folder, device, dtype, bits=bits, ops=Ops() if plain else None)
        return cls(llama, tokenizer.of_model(llama.config.vocab_size), recommended, folder)

    def complete(self, settings: Settings) -> Settings:
        """Replace settings of None by those of generation_config.json, and draw a seed if there is
        none."""
        asked = {}
        for name in SETTINGS | PENALTIES:
            value = getattr(settings, name)
            if value is not None:
                asked[name] = value
        seed = settings.seed
        if seed is None:
            drawn = int.from_bytes(os.urandom(4), "little")
            (seed,) = self.llama.group.agree([drawn])  # all processes take the first one's
        return replace(settings, seed=seed, **self.recommended.complete(asked))

    def uses_template(self, chat: bool | None) -> bool:
        """Whether a prompt is laid out as a chat: if there is a template, and chat is not False."""
        return chat is not False and self.tokenizer.chat_template is not None

    def encode(
        self,
        prompt: str | list[Message],
        system: str | None = None,
        chat: bool | None = None,
        special: bool = False,
        thinking: bool | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Tokens of a prompt, by the model's chat template, or as plain text to continue.

        chat None: use the template if there is one. special: control tokens that a plain text
        spells become those tokens; without it they are read as text, and a warning says so.
        thinking: what a template gets as enable_thinking. most: TooManyTokens is raised beyond it.
        """
        if not self.uses_template(chat):
            is_plain = isinstance(prompt, str) and system is None and thinking is None
            if chat or not is_plain:
                raise UserError(
                    "chat messages, a system message and thinking need a chat template: leave "
                    "them out, or use an Instruct model without --raw"
                )
            tokens = self.tokenizer.prompt(prompt, special, most)
            control = self.tokenizer.spelled_control(prompt)
            if control and not special:
                warnings.warn(
                    f"a prompt spells the control token {control}, which is read as text: "
                    "--special, or a field special, makes it that token"
                )
            return tokens
        if special:
            raise UserError(
                "special is about plain prompts, and a chat template lays this one out: leave "
                "special out, or add --raw"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, Sequence) or not messages:
            raise UserError(f"a prompt is {messages!r}: it must be a text, or a list of messages")
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return self.tokenizer.chat(messages, enable_thinking=thinking, most=most)

    def max_total_tokens(self, options: Options) -> int:
        """The most tokens of prompt and answer: options.max_len; without it, what memory allows, up
        to the model's limit."""
        most = self.llama.config.max_position_embeddings
        limit = options.max_len
        if limit is None:
            spec = self.llama.kv_spec(widths(options.kv_bits))
            limit = min(most, spec.tokens_in(0.8 * free_memory(self.llama.device)))
        if not 1 < limit <= most:
            raise UserError(
                f"max_len is {limit}: it must be from 2 to {most}, the model's limit, as memory "
                "allows"
            )
        return limit

    def request(
        self,
        prompt: str | list[Message],
        settings: Settings,
        options: Options = Options(),
        system: str | None = None,
        chat: bool | None = None,
    ) -> Request:
        """A request with complete settings; max_tokens is cut to what the options leave. UserError,
        also for a grammar that no output can follow."""
        tokens = self.encode(prompt, system, chat, settings.special, settings.thinking)
        limit = self.max_total_tokens(options)
        request = self.request_of(tokens, settings, limit, self.uses_template(chat))
        if request.settings.follows is not None:
            request.compiled = self.grammars.compile(request.settings.follows)
        return request

    def request_of(
        self, tokens: list[int], settings: Settings, limit: int, is_reply: bool = False
    ) -> Request:
        """A request for a prompt that is tokens already; its grammar is not compiled yet. limit:
        the most tokens of prompt and answer."""
        if not 0 < len(tokens) < limit:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, and must have from 1 to {limit - 1}: change "
                "it, or raise --max-len (up to the model's limit, and memory must hold it)"
            )
        check_known(tokens, self.tokenizer.vocab_size)  # the tokenizer may have more than the model
        biased = max(settings.logit_bias or (0,))
        if biased >= self.tokenizer.vocab_size:
            words = f"tokens from 0 to {self.tokenizer.vocab_size - 1}"
            refuse_value("logit_bias", settings.logit_bias, f"about {words}")
        max_tokens = min(settings.max_tokens, limit - len(tokens))
        settings = replace(self.complete(settings), max_tokens=max_tokens)
        return Request(tokens, settings, self.eos_token_ids, is_reply=is_reply)


# ---- Drafts --------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """What `Engine` needs to make a drafter."""

    make: Callable[[Cache], Drafter]  # called with the draft's own cache, or with the target's
    models: tuple[Llama, ...] = ()  # the model or EAGLE head that drafts, if there is one
    has_own_cache: bool = False
    draft_layers: int = 0  # how many layers it adds to the target's cache


# What a caller may give as a draft: a name, or what is loaded already.
DraftName = str | Path | Model | Draft | None


def ngram_draft(model: Model) -> Draft:
    """`--draft ngram`: look back in the text."""
    return Draft(lambda cache: NgramDrafter())


def int4_draft(model: Model) -> Draft:
    """`--draft self`: the target with its layers in INT4; embedding and head are shared."""
    target = model.llama
    if model.folder is None:
        raise UserError(
            "the INT4 copy (--draft self) is read from the model's folder, and this model has "
            "none: name another draft"
        )
    quantization = target.config.quantization
    if quantization is not None and quantization.bits in (4, "nf4"):
        raise UserError(
            f"the target's weights are {quantization.name} already, and an INT4 copy (--draft "
            "self) would not be faster: use --bits 16, or another draft or folder"
        )
    try:
        copy = Llama.load(model.folder, target.device, target.dtype, bits=4, ops=target.ops)
    except UserError as error:
        raise UserError(f"the INT4 copy (--draft self): {error}; or name another draft") from None
    copy.embed = target.embed
    copy.head = target.head
    return Draft(lambda cache: SelfDrafter(copy, cache), (copy,))


DRAFTS: dict[str, Callable[[Model], Draft]] = {"ngram": ngram_draft, "self": int4_draft}


def names_model(draft: Any) -> bool:
    """Whether this is the name of a model that drafts, not loaded yet."""
    return not isinstance(draft, Model | Draft | None) and draft not in [*DRAFTS]


def check_draft(name: DraftName, bits: Kind | None) -> None:
    """What is wrong with a draft's name or bits, told before any weights are loaded: UserError, or
    FileNotFoundError. bits: as of `load_draft`."""
    if names_model(name):
        draft_config(find_model(name, DRAFTS), bits)
    elif bits is not None and (name, bits) != ("self", 4):  # it has 4 bits anyway
        raise UserError(
            f"draft_bits is {bits}, and there is no draft to round: self is INT4 as it is, ngram "
            "has no weights, and a loaded draft stays as it is; leave draft_bits out"
        )


def load_draft(
    name: DraftName,
    model: Model,
    dtype: torch.dtype | None = None,
    bits: Kind | None = None,
) -> Draft | None:
    """The draft of this name: an entry of `DRAFTS`, an EAGLE head for this target, or a model with
    the target's vocabulary, which is loaded on the target's device. dtype: of a model (a head has
    the target's). bits: of its weights; None: the target's, or those that it is stored in
    (`default_bits`)."""
    check_draft(name, bits)
    target = model.llama
    if names_model(name):
        folder = find_model(name, DRAFTS)
        if bits is None:
            bits = default_bits(folder, target.config)
        if is_eagle(folder):
            head = load_eagle(EagleHead, folder, target, bits)
            return Draft(lambda cache: EagleDrafter(head, cache), (head,), draft_layers=1)
        is_plain = type(target.ops) is Ops
        # From here on, as if the caller had loaded it.
        name = Model.load(folder, target.device, dtype, bits, is_plain)
    if name is None or isinstance(name, Draft):
        return name
    if name in DRAFTS:
        return DRAFTS[name](model)
    difference = model.tokenizer.difference(name.tokenizer)
    if difference:
        raise UserError(
            f"the draft's vocabulary is not the target's: {difference}; take its family, or ngram"
        )
    llama = name.llama
    if llama.device != target.device:
        raise UserError(
            f"the draft is on {llama.device}, and the target on {target.device}: load both on one"
        )
    return Draft(lambda cache: ModelDrafter(llama, cache), (llama,), has_own_cache=True)


def main() -> None:
    """The demonstration: what each draft adds to the model in this repository."""
    model = Model.load("tiny")
    for name in ("ngram", "self", "tiny-draft", "tiny-eagle"):
        draft = load_draft(name, model)
        num_layers = sum(llama.config.num_hidden_layers for llama in draft.models)
        where = "a cache of its own" if draft.has_own_cache else "the target's cache, or none"
        print(f"{name:10} {num_layers} layers, keys and values in {where}")


if __name__ == "__main__":
    main()
