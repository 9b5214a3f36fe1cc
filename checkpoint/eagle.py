"""An EAGLE-3 head from its folder: config.json and model.safetensors, in either layout.

    the authors' (Li et al.)     a Llama's config.json, with draft_vocab_size; tensors midlayer.*
    speculators (vLLM)           the Llama's config inside, as transformer_layer_config; layers.0.*

`d2t` maps the head's smaller vocabulary: its token i is the target's token i + d2t[i]. A flag that
the code lacks is refused by name. A head is checked against its target before memory is asked for.

Not covered: pickles (pytorch_model.bin); heads of several layers, or of other architectures.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint.config import Config, number, parse_file
from checkpoint.files import Json, read_json
from checkpoint.formats import Layout, check_setting
from checkpoint.tensors import Checkpoint, open_file
from errors import UserError, brief

EMBEDDING = "embed_tokens.weight"
UNUSED = "t2d"  # bool[V]: which of the target's tokens the head has; for training
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Flags that change no number here.
HARMLESS = ("use_cache", "tie_word_embeddings", "embed_requires_grad", "use_aux_hidden_state")
LAYER_FLAGS = ("attention_bias", "mlp_bias")


@dataclass(frozen=True)
class EagleConfig:
    """A head's shape."""

    layer: Config  # of its one layer; vocab_size is the target's
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None  # layers of the target whose inputs it reads; None: the
    #                                         authors' choice
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    norm_before_fc: bool = False  # one norm over all features, before `fc`
    fc_norm: bool = False  # a norm for each feature, before `fc`
    norm_output: bool = False  # the normed output is fed back
    has_embedding: bool = False  # of its own; else the target's
    has_offsets: bool = True  # d2t; else its vocabulary is the target's

    @classmethod
    def load(cls, folder: Path) -> EagleConfig:
        """The config of a folder's config.json. UserError names the file."""
        return parse_file(folder / "config.json", cls.parse)

    @classmethod
    def parse(cls, data: Json) -> EagleConfig:
        """From the object in a config.json."""
        layer = data.get("transformer_layer_config", data)
        more = data.get("eagle_config") or {}
        for part in (layer, more):
            if not isinstance(part, dict):
                raise UserError(f"{brief(part)} is not an object: fetch the head again")
        settings = {**layer, **data, **more}
        check_head_flags(settings)
        check_setting("speculators_model_type", data.get("speculators_model_type"), None, "eagle3")
        check_setting("num_hidden_layers", layer.get("num_hidden_layers"), 1)
        config = Config.parse(layer | {"architectures": None, "tie_word_embeddings": False})
        sizes = {"draft_vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size}
        sizes |= {name: value for name, value in settings.items() if value is not None}
        draft_vocab_size = number(sizes, "draft_vocab_size")
        if draft_vocab_size > config.vocab_size:
            raise UserError(
                f"draft_vocab_size is {draft_vocab_size}; it must be at most vocab_size, "
                f"{config.vocab_size}"
            )
        return cls(
            config,
            draft_vocab_size,
            number(sizes, "target_hidden_size"),
            feature_layers(settings.get("eagle_aux_hidden_state_layer_ids")),
            **{name: bool(settings.get(name)) for name in FLAGS},
        )

    def with_tensors(self, names: Collection[str]) -> EagleConfig:
        """The same, with what only the names of the stored tensors tell."""
        has_offsets = "d2t" in names or self.draft_vocab_size < self.layer.vocab_size
        return replace(self, has_embedding=EMBEDDING in names, has_offsets=has_offsets)

    def quantized(self, layout: Layout) -> EagleConfig:
        """The same head with quantized weights; an embedding of its own stays as it is."""
        return replace(self, layer=self.layer.quantized(layout))

    @property
    def draft_config(self) -> Config:
        """Of the layer, with the head's own vocabulary."""
        return replace(self.layer, vocab_size=self.draft_vocab_size)

    def shard(self, n: int) -> EagleConfig:
        """The head of each of n processes. It has all rows of an embedding of its own."""
        shard = self.draft_config.shard(n)
        layer = replace(shard, vocab_size=self.layer.vocab_size)
        return replace(self, layer=layer, draft_vocab_size=shard.vocab_size)

    def feature_norms(self, n: int) -> dict[str, int]:
        """The norms before `fc` of n features: the size of each, by its name."""
        width = self.target_hidden_size
        if self.norm_before_fc:
            return {"input_norm.weight": n * width}
        return {f"fc_norm.{i}.weight": width for i in range(n)} if self.fc_norm else {}

    def to_dict(self, target: str, architecture: str = "LlamaForCausalLM") -> Json:
        """The config.json of this head in the speculators layout. target, architecture: the name
        and the class of its model."""
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": self.layer.to_dict(),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers or ()) or None,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": target, "architectures": [architecture]},
            },
            **{name: getattr(self, name) for name in FLAGS},
        }

    def check_tokens(self, tokens: Tensor) -> None:
        """UserError unless d2t gives distinct tokens of the target: int64[Vd]."""
        is_known = bool(((tokens >= 0) & (tokens < self.layer.vocab_size)).all())
        if not is_known or len(tokens.unique()) < len(tokens):
            raise UserError(
                "d2t does not give each token of the head another token of the target: fetch the "
                "head again"
            )

    def check_target(self, target: Config, head: Config) -> None:
        """UserError unless the head is for such a target. target, head: of this process."""
        layers = self.layers_of(target)
        c = self.layer
        rules = [
            ("hidden_size of the target", self.target_hidden_size, target.hidden_size),
            ("vocab_size", c.vocab_size, target.vocab_size),
            # its keys and values are one more layer in the target's cache
            ("num_key_value_heads", head.num_key_value_heads, target.num_key_value_heads),
            ("head_dim", c.head_dim, target.head_dim),
        ]
        if not self.has_embedding:
            rules.append(("hidden_size", c.hidden_size, target.hidden_size))
        for name, own, wanted in rules:
            if own != wanted:
                raise UserError(
                    f"the head is for another target: its {name} is {own}, and this target has "
                    f"{wanted}; use the head that was trained for it"
                )
        if max(layers) >= target.num_hidden_layers:
            raise UserError(
                f"the head reads layers {layers}, and this target has {target.num_hidden_layers}; "
                "use the head that was trained for it"
            )

    def layers_of(self, target: Config) -> tuple[int, ...]:
        """The layers of the target whose inputs the head reads. None of them is negative, unless
        another is beyond the last."""
        L = target.num_hidden_layers
        return self.feature_layers or (2, L // 2, L - 3)


def check_head_flags(settings: Json) -> None:
    """UserError for an unknown flag that is on, or a known one that is neither true nor false."""
    for name, value in settings.items():
        if value is True and name not in (*FLAGS, *HARMLESS, *LAYER_FLAGS):
            raise UserError(f"{name} is on: heads with it are not supported; use another head")
    for name in FLAGS:
        check_setting(name, settings.get(name), None, False, True)
    if settings.get("norm_before_fc") and settings.get("fc_norm"):
        raise UserError("norm_before_fc and fc_norm are both on: a head has one of them")
    check_setting("use_aux_hidden_state", settings.get("use_aux_hidden_state"), None, True)


def feature_layers(ids: Any) -> tuple[int, ...] | None:
    """The layers that a config names. UserError if they are none."""
    if ids is None:
        return None
    is_list = isinstance(ids, list) and 0 < len(ids) <= 16 and len(set(map(repr, ids))) == len(ids)
    if not is_list or not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(
            f"eagle_aux_hidden_state_layer_ids is {brief(repr(ids))}; it must be a list of layers, "
            "each once"
        )
    return tuple(ids)


def is_eagle(folder: Path) -> bool:
    """Whether a folder holds a head, by its config.json."""
    file = folder / "config.json"
    if not file.exists():
        return False
    data = read_json(file)
    return "draft_vocab_size" in data or "speculators_model_type" in data


class EagleCheckpoint(Checkpoint):
    """The tensors of a head's folder, by the names of the speculators layout."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.headers.pop(UNUSED, None)
        self.stored = {}  # the name in the file of each tensor
        for name in list(self.headers):
            renamed = name.replace("midlayer.", "layers.0.", 1)
            self.stored[renamed] = name
            self.headers[renamed] = self.headers.pop(name)
            self.files[renamed] = self.files.pop(name)

    def read(self, name: str) -> Tensor:
        with open_file(self.files[name]) as opened:
            return opened.get_tensor(self.stored[name])
