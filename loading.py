"""Loading: a target with its tokenizer and recommended settings, and a draft for it.

`Model.load` takes an alias, a Hub id, a folder or a GGUF. A `Model` turns prompts into requests: it
formats a chat with its template, replaces settings that were not given with those its makers
recommend, and checks limits before anything runs. `load_draft` makes a `Draft`, from which each
`Engine` (generate.py) makes a drafter for its own cache.

Invariant: a mistake in a draft's name or bits is reported before any weights are loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from automaton import Grammars
from checkpoint.eagle import is_eagle
from checkpoint.generation import GenerationConfig
from checkpoint.hub import find_model
from checkpoint.load import default_bits, draft_config, load_eagle
from devices import free_memory
from drafters import Drafter, ModelDrafter, SelfDrafter
from eagle import EagleDrafter, EagleHead
from errors import TooManyTokens, UserError
from kernels import Ops
from kvcache import Cache
from lookup import FirstLookUp, History, LookupDrafter
from model import Llama
from quant import Kind, widths
from request import Message, Request, Settings
from settings import PENALTIES, SETTINGS, Options, check_in_vocabulary
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
        self.history = History()  # of all its requests, for drafts that are looked up

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
        return cls(llama, tokenizer.limited_to(llama.config.vocab_size), recommended, folder)

    def complete(self, settings: Settings) -> Settings:
        """Replace settings that are None with those of generation_config.json, and draw a seed if
        there is none."""
        asked = {}
        for name in SETTINGS | PENALTIES:
            value = getattr(settings, name)
            if value is not None:
                asked[name] = value
        seed = settings.seed
        if seed is None:
            drawn = int.from_bytes(os.urandom(4), "little")
            (seed,) = self.llama.group.agree([drawn])  # all processes use that of the first
        return replace(settings, seed=seed, **self.recommended.complete(asked))

    def uses_template(self, chat: bool | None) -> bool:
        """Whether prompts are formatted as a chat: if there is a template, and chat is not
        False."""
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
        """The tokens of a prompt, formatted with the model's chat template or as plain text to
        continue.

        chat: None means that the template is used if there is one. special: whether control tokens
        spelled out in a plain prompt become those tokens; if not, they are read as text, and a
        warning says so. thinking: the template's variable enable_thinking. most: the most tokens;
        TooManyTokens is raised beyond it.
        """
        if self.uses_template(chat):
            if special:
                raise UserError(
                    "special is for plain prompts, and this one is formatted with a chat template: "
                    "leave special out, or add --raw"
                )
            if thinking is not None and "enable_thinking" not in self.tokenizer.chat_template:
                raise UserError(
                    "the chat template knows no enable_thinking, so thinking cannot be chosen: "
                    "leave it out"
                )
            return self.tokenizer.chat(
                as_messages(prompt, system), most=most, how={"enable_thinking": thinking}
            )
        is_plain = isinstance(prompt, str) and system is None and thinking is None
        if chat or not is_plain:
            raise UserError(
                "chat messages, a system message and thinking need a chat template: leave "
                "them out, or use an Instruct model and no --raw"
            )
        tokens = self.tokenizer.prompt(prompt, special, most)
        control = self.tokenizer.spelled_control(prompt)
        if control and not special:
            warnings.warn(
                f"a prompt contains the control token {control}, which is read as text: use "
                "--special, or the field special, to read it as that token"
            )
        return tokens

    def max_total_tokens(self, options: Options) -> int:
        """The most tokens that prompt and output may have together: options.max_len or, if it is
        None, as many as memory allows, up to the model's limit."""
        most = self.llama.config.max_position_embeddings
        limit = options.max_len
        if limit is None:
            spec = self.llama.kv_spec(widths(options.kv_bits))
            limit = min(most, spec.tokens_in(0.8 * free_memory(self.llama.device)))
        if not 1 < limit <= most:
            raise UserError(
                f"max_len is {limit}: it must be from 2 to {most}, the model's limit, and memory "
                "must hold it"
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
        """A request with complete settings. max_tokens is reduced to what the options leave room
        for. UserError, including for a grammar that no output can follow."""
        tokens = self.encode(prompt, system, chat, settings.special, settings.thinking)
        limit = self.max_total_tokens(options)
        request = self.request_of(tokens, settings, limit, self.uses_template(chat))
        if request.settings.follows is not None:
            request.compiled = self.grammars.compile(request.settings.follows)
        return request

    def request_of(
        self, tokens: list[int], settings: Settings, limit: int, is_reply: bool = False
    ) -> Request:
        """A request for a prompt that is already tokenized. Its grammar is not compiled yet. limit:
        the most tokens of prompt and output together."""
        if not 0 < len(tokens) < limit:
            mistake = TooManyTokens if tokens else UserError
            raise mistake(
                f"the prompt has {len(tokens)} tokens: it must have from 1 to {limit - 1}; change "
                "it, or raise --max-len (up to the model's limit, and memory must hold it)"
            )
        # The tokenizer knows at most as many tokens as the model.
        check_in_vocabulary([*tokens, *(settings.logit_bias or ())], self.tokenizer.vocab_size)
        max_tokens = min(settings.max_tokens, limit - len(tokens))
        settings = replace(self.complete(settings), max_tokens=max_tokens)
        return Request(tokens, settings, self.eos_token_ids, is_reply=is_reply)


def as_messages(prompt: str | list[Message], system: str | None) -> list[Message]:
    """A conversation: the prompt, after a system message if there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, Sequence) or not messages:
        raise UserError(f"a prompt is {messages!r}: it must be a text, or a list of messages")
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return messages


# ---- Drafts --------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """What `Engine` needs to make a drafter."""

    # Called with the draft's own cache, or with the target's.
    make: Callable[[Cache], Drafter | None]
    models: tuple[Llama, ...] = ()  # the model or EAGLE head that drafts, if there is one
    has_own_cache: bool = False
    draft_layers: int = 0  # how many layers it adds to the target's cache


NO_DRAFT = Draft(lambda cache: None)

# What a caller may give as a draft: a kind of `DRAFTS`, the name of a model (an alias, a Hub id, a
# folder or a GGUF), one of these after "ngram,", what is loaded already, or None.
DraftName = str | Path | Model | Draft | None


def ngram_draft(model: Model) -> Draft:
    """`--draft ngram`: drafts are looked up in all requests."""
    return Draft(lambda cache: LookupDrafter(model.history))


def look_up_first(model: Model, draft: Draft) -> Draft:
    """`--draft ngram,NAME`: look up first, and let NAME draft if its drafts are more likely."""

    def make(cache: Cache) -> Drafter:
        return FirstLookUp(LookupDrafter(model.history), draft.make(cache))

    return draft._replace(make=make)


def int4_draft(model: Model) -> Draft:
    """`--draft self`: the target with its layers in INT4. The embedding and the head are shared."""
    target = model.llama
    if model.folder is None:
        raise UserError(
            "the INT4 copy (--draft self) is loaded from the model's folder, and this model has "
            "none: name another draft"
        )
    quantization = target.config.quantization
    if quantization is not None and quantization.bits in (4, "nf4"):
        raise UserError(
            f"the target's weights are already {quantization.name}, so an INT4 copy (--draft "
            "self) would not be faster: use --bits 16, or another draft or folder"
        )
    try:
        copy = Llama.load(model.folder, target.device, target.dtype, bits=4, ops=target.ops)
    except UserError as error:
        raise UserError(f"the INT4 copy (--draft self): {error}; or name another draft") from None
    copy.embed = target.embed
    copy.head = target.head
    # It drafts in the target's cache, and truncates what it has stored there.
    return Draft(lambda cache: SelfDrafter(copy, cache), (copy,))


def model_draft(draft: Model, model: Model) -> Draft:
    """`--draft NAME`: a model with the target's vocabulary, on the target's device."""
    difference = model.tokenizer.difference(draft.tokenizer)
    if difference:
        raise UserError(
            f"the draft's vocabulary is not the target's: {difference}; use a draft of the same "
            "model family, or ngram"
        )
    llama = draft.llama
    device = model.llama.device
    if llama.device != device:
        raise UserError(
            f"the draft is on {llama.device}, and the target is on {device}: load both on one"
        )
    return Draft(lambda cache: ModelDrafter(llama, cache), (llama,), has_own_cache=True)


DRAFTS: dict[str, Callable[[Model], Draft]] = {"ngram": ngram_draft, "self": int4_draft}
LOOK_UP = "ngram,"  # and the name of another draft


def looks_up_first(draft: DraftName) -> bool:
    """Whether this names a draft to combine with look-ups."""
    return isinstance(draft, str) and draft.startswith(LOOK_UP)


def names_model(draft: DraftName) -> bool:
    """Whether this, without LOOK_UP, names a draft model that is still to be loaded."""
    is_kind = isinstance(draft, str) and draft in DRAFTS
    return not is_kind and not isinstance(draft, Model | Draft | None)


def check_draft(draft: DraftName, bits: Kind | None) -> None:
    """UserError or FileNotFoundError if a draft's name or bits are wrong, before any weights are
    loaded. bits: as for `load_draft`."""
    if looks_up_first(draft):
        other = draft.removeprefix(LOOK_UP)
        if other.split(",")[0] == "ngram":
            raise UserError(f"draft is {draft}: after the comma, name a draft other than ngram")
        check_draft(other, bits)
    elif names_model(draft):
        draft_config(find_model(draft, DRAFTS), bits)
    elif bits is not None and (draft, bits) != ("self", 4):  # self always has 4 bits
        raise UserError(
            f"draft_bits is {bits}, and there is no draft to round: self is always INT4, ngram "
            "has no weights, and a loaded draft is not changed; leave draft_bits out"
        )


def load_draft(
    draft: DraftName,
    model: Model,
    dtype: torch.dtype | None = None,
    bits: Kind | None = None,
) -> Draft | None:
    """Load a draft for this model; None if `draft` is None. dtype: of a draft model (a head has the
    target's). bits: of its weights; None: the target's, or those that it is stored in
    (`default_bits`)."""
    check_draft(draft, bits)
    if looks_up_first(draft):
        return look_up_first(model, load_draft(draft.removeprefix(LOOK_UP), model, dtype, bits))
    if draft is None or isinstance(draft, Draft):
        return draft
    if isinstance(draft, Model):
        return model_draft(draft, model)
    if not names_model(draft):
        return DRAFTS[draft](model)
    target = model.llama
    folder = find_model(draft, DRAFTS)
    if bits is None:
        bits = default_bits(folder, target.config)
    if is_eagle(folder):
        head = load_eagle(EagleHead, folder, target, bits)
        return Draft(lambda cache: EagleDrafter(head, cache), (head,), draft_layers=1)
    is_plain = type(target.ops) is Ops
    return model_draft(Model.load(folder, target.device, dtype, bits, is_plain), model)


def main() -> None:
    """Demonstration: what each draft adds to the model in this repository."""
    model = Model.load("tiny")
    for name in ("ngram", "self", "tiny-draft", "tiny-eagle"):
        draft = load_draft(name, model)
        num_layers = sum(llama.config.num_hidden_layers for llama in draft.models)
        where = "a cache of its own" if draft.has_own_cache else "the target's cache, or none"
        print(f"{name:10} {num_layers} layers, keys and values in {where}")


if __name__ == "__main__":
    main()
