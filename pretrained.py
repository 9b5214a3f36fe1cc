"""A model folder, whole: weights, tokenizer, and the settings its makers recommend.

What stands in a folder belongs together, and much goes wrong where it does not: a tokenizer of another model, an end-of-text token
that only generation_config.json names, a sampling setting that nobody honours. `Model` loads all of it and refuses, or tells, what
does not fit; and it turns prompts into tokens, through the model's own chat template where it has one.

    settings of a request = what the user asked for, else generation_config.json as transformers reads it, else neutral

Invariant: a completed `Settings` leaves no choice open, the seed included.
"""
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from config import Config, end_tokens
from kvquant import widths
from model import Llama
from request import Message, Settings
from sampling import check_settings
from tokenizer import Tokenizer
from vocabulary import brief, read_json
from weights import find


def recommendations(file: Path) -> dict[str, Any]:
    """A generation_config.json, if there is one. Its sampling settings are checked when they are used: who asks for
    others need not mind them."""
    data = read_json(file) if os.path.lexists(file) else {}
    try:
        end_tokens(data)
        if not isinstance(sample := data.get("do_sample", False), bool | None):
            raise ValueError(f"do_sample is {sample!r}; it must be true or false")
    except ValueError as error:
        raise ValueError(f"{file}: {brief(error)}") from None
    return data


class Model:
    """What a folder holds: weights, tokenizer, and the settings its makers recommend."""

    def __init__(self, llama: Llama, tokenizer: Tokenizer, recommended: dict[str, Any], folder: Path | None = None):
        if tokenizer.vocab_size > llama.config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {llama.config.vocab_size}: "
                             "config.json and the tokenizer belong to different models")
        self.llama, self.tokenizer, self.recommended, self.folder = llama, tokenizer, recommended, folder
        self.ends = {*llama.config.eos_token_ids, *end_tokens(recommended)}

    @classmethod
    def load(cls, name: str | Path, device: str | None = None, dtype: torch.dtype | None = None, bits: int = 16) -> "Model":
        """An alias, a Hub id or a folder; bits: 8 or 4 rounds its weights. Raises FileNotFoundError or ValueError, each with the way out."""
        folder = find(name)
        tokenizer, recommended = Tokenizer.load(folder), recommendations(folder / "generation_config.json")
        return cls(Llama.load(folder, device, dtype, bits=bits), tokenizer, recommended, folder)

    def int4_copy(self) -> Llama:
        """What `--draft self` drafts with: the layers rounded to 4 bits. ValueError where there are no numbers to round, or nothing would be gained."""
        if self.folder is None:
            raise ValueError("this model does not come from a folder, where its INT4 copy (--draft self) would be made from: name another draft")
        if (how := self.llama.config.quantization) is not None and how.bits == 4:
            raise ValueError("the target's weights have 4 bits, so its INT4 copy (--draft self) would be no faster: leave --draft out, or name another")
        if Config.load(self.folder).quantization is not None:
            raise ValueError(f"{self.folder} holds weights of 8 bits, and the INT4 copy (--draft self) is made from 16: use the folder that they were "
                             "made from as --target, with --bits 8, or name another --draft")
        return self.llama.rounded(self.folder)

    def complete(self, settings: Settings) -> Settings:
        """Fill what is None from generation_config.json, as transformers reads it: without do_sample, temperature 0."""
        names = ("temperature", "top_k", "top_p", "min_p")
        asked = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
        if self.recommended.get("do_sample"):
            own = {name: self.recommended[name] for name in names
                   if self.recommended.get(name) is not None and name not in asked}
        else:
            own = {} if asked else {"temperature": 0.0}
        try:
            check_settings(**own)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {brief(error)}; or ask for another yourself") from None
        seed = int.from_bytes(os.urandom(4), "little") if settings.seed is None else settings.seed
        return replace(settings, seed=seed, **{"temperature": 1.0, **own, **asked})

    def unhonoured(self) -> list[str]:
        """What generation_config.json asks for and this program does not do."""
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0,
                   "eta_cutoff": 0.0, "penalty_alpha": None, "bad_words_ids": None, "sequence_bias": None, "guidance_scale": None,
                   "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "min_length": 0,
                   "min_new_tokens": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
                   "forced_eos_token_id": None, "diversity_penalty": 0.0, "num_beam_groups": 1, "top_h": None, "stop_strings": None}
        given = self.recommended
        return [f"{name} {brief(given[name], 60)}" for name, value in neutral.items()
                if given.get(name) is not None and given[name] != value]

    def room(self, prompt: int, max_tokens: int, max_len: int | None, kv_bits: str | int = 16) -> int:
        """How many tokens a text can have that begins with `prompt` tokens. ValueError if that leaves no room for an answer."""
        limit = self.llama.max_len(widths(kv_bits)) if max_len is None else max_len
        if prompt == 0:
            raise ValueError("the prompt is empty: there is nothing to continue")
        if limit > self.llama.config.max_position_embeddings:
            raise ValueError(f"max_len is {limit}: this model was made for at most {self.llama.config.max_position_embeddings} tokens")
        if prompt >= limit:
            raise ValueError(f"the prompt has {prompt} tokens and max_len is {limit}: shorten it, or raise --max-len "
                             f"(the model's limit is {self.llama.config.max_position_embeddings}, and memory must hold it)")
        return min(limit, prompt + max_tokens)

    def encode(self, prompt: str | list[Message], system: str | None = None, chat: bool | None = None) -> list[int]:
        """Tokens of a prompt: through the model's chat template (chat None: where it has one), or as plain text to continue."""
        template = self.tokenizer.chat_template is not None
        if chat and not template:
            raise ValueError("this model has no chat template: use --raw, or an instruction-tuned model")
        chat = template if chat is None else chat
        if system is not None and not chat:
            raise ValueError("a system message needs a chat template: leave --system out, or use an instruction-tuned model without --raw")
        if not chat:
            if not isinstance(prompt, str):
                raise ValueError("a list of messages needs a chat template: give a text, or use an instruction-tuned model")
            return self.tokenizer.prompt(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.tokenizer.chat(([{"role": "system", "content": system}] if system is not None else []) + messages)
