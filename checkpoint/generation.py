"""How a model's makers want text to be drawn from it: generation_config.json.

The file holds sampling settings, the tokens that end a text, and the switch `do_sample`. Without
`do_sample` the makers recommend greedy decoding. A GGUF has the settings in its metadata
(`general.sampling.temp`, …), and no switch: who writes them there wants to sample. A setting that
changes the text and that this project does not have (beams, say) is never dropped in silence:
`unsupported` names it, and the caller says so.

Not covered: lengths (max_new_tokens), which are the user's; a top_k of 50 where the file names
none, which is a default of transformers and no maker's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.config import Config, end_tokens, parse_file
from checkpoint.files import Json
from checkpoint.gguf import GGUF
from checkpoint.hub import is_gguf
from errors import UserError, brief
from settings import PENALTIES, SETTINGS, Settings

if TYPE_CHECKING:
    from tokenizer import Tokenizer

# Settings that are no business of drawing tokens, or that do nothing without another.
HARMLESS = (
    r"_.*|(bos|eos|pad|decoder_start)_token_id|(max|output|return|use)_.*|do_sample|early_stopping"
    r"|num_return_sequences|.*(version|format|remote_code|cache|compile|assistant|lookup).*"
    r"|.*lookbehind.*|prefill_.*|mirostat_.*|.*_(last_n|threshold)"
)
NEUTRAL_AT_1 = r".*(penalty|_p|_scale|beams|groups)"  # others: at 0, false or nothing
MOST_TOLD = 20
GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # others are the same


@dataclass(frozen=True)
class GenerationConfig:
    """The settings in a generation_config.json or a GGUF; without them, none."""

    data: Json = field(default_factory=dict)
    where: str = "generation_config.json"  # they were found, for messages

    def __post_init__(self) -> None:
        do_sample = self.data.get("do_sample", False)
        if not isinstance(do_sample, bool | None):
            raise UserError(f"do_sample is {do_sample!r}; it must be true or false")
        end_tokens(self.data)  # refuses what is no token

    @classmethod
    def load(cls, folder: Path) -> GenerationConfig:
        """The file of this folder, if there is one; or what this GGUF has. UserError names the
        file."""
        if is_gguf(folder):
            return cls(gguf_settings(GGUF.open(folder)), "metadata")
        file = folder / "generation_config.json"
        return parse_file(file, cls) if os.path.lexists(file) else cls()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, says this file."""
        return end_tokens(self.data)

    def all_ends(self, config: Config, tokenizer: Tokenizer) -> set[int]:
        """The tokens that end a text, say three files. One in config.json is stale if it is an
        ordinary token and this file names others. A fine-tune may have changed eos_token in
        tokenizer_config.json alone. An id beyond the vocabulary is never drawn: no harm."""
        ends = {*self.eos_token_ids}
        others = {*config.eos_token_ids}
        if ends:
            others &= {*tokenizer.not_merged.values()}
        return (ends | others | {tokenizer.eos_token_id}) - {None}

    @property
    def samples(self) -> bool:
        """Whether the makers recommend to sample; otherwise the most probable token is taken."""
        return bool(self.data.get("do_sample"))

    def complete(self, asked: Json) -> Json:
        """The settings that a user asked for, by name, and the recommended ones for the rest. Who
        asks for any of them but penalties wants to sample, also without do_sample. Penalties are
        for greedy text, too. UserError for a bad recommendation."""
        samples = self.samples or not asked.keys().isdisjoint(SETTINGS)
        recommended = {}
        for name in SETTINGS | PENALTIES if samples else PENALTIES:
            if self.data.get(name) is not None and name not in asked:
                recommended[name] = self.data[name]
        try:
            Settings(**recommended)
        except UserError as error:
            rule = brief(error)
            raise UserError(
                f"the model's {self.where}: {rule}; or give another value yourself"
            ) from None
        return {"temperature": float(samples)} | recommended | asked

    def unsupported(self) -> list[str]:
        """The settings with an effect that this project lacks: "name value" of each. A setting that
        nobody knows counts as one."""
        unsupported = []
        is_penalized = self.data.get("repetition_penalty", 1) not in (None, 1)
        for name, value in self.data.items():
            is_known = name in SETTINGS | PENALTIES or re.fullmatch(HARMLESS, name)
            is_neutral = not value or (value == 1 and re.fullmatch(NEUTRAL_AT_1, name))
            # A repetition penalty here is over the whole text, which is −1 in a GGUF.
            is_window = name == "penalty_last_n" and value != -1 and is_penalized
            is_foreign = not is_known and not is_neutral
            if is_window or is_foreign:
                unsupported.append(f"{brief(name, 60)} {brief(value, 60)}")
        return unsupported[:MOST_TOLD]


def gguf_settings(gguf: GGUF) -> Json:
    """The settings in the metadata of a GGUF, as a generation_config.json has them."""
    data = {}
    for key, value in gguf.metadata.items():
        if key.startswith(GGUF_PREFIX):
            name = key.removeprefix(GGUF_PREFIX)
            if isinstance(value, float):
                value = float(f"{value:.7g}")  # the decimal of which this is the float32
            data[GGUF_NAMES.get(name, name)] = value
    top_k = data.get("top_k")
    if type(top_k) is int:
        data["top_k"] = max(0, top_k)  # below 0 it keeps all, too
    return data | {"do_sample": not data.keys().isdisjoint(SETTINGS)}
