"""A model's folder, written: the weights in safetensors, config.json, and a tokenizer's files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.files import Json, new_file, write_json
from checkpoint.tensors import write_tensors
from quant import named_tensors

if TYPE_CHECKING:
    from model import Llama

TOKENIZER_FILES = (  # of a tokenizer, byte-level or SentencePiece's, and its chat templates
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)


def save_model(llama: Llama, folder: Path) -> None:
    """Write a model folder, in bfloat16."""
    save_folder(llama, folder, llama.config.to_dict() | {"torch_dtype": "bfloat16"})


def save_folder(
    llama: Llama,
    folder: Path,
    config: Json,
    dtype: torch.dtype = torch.bfloat16,
    **more: Tensor,
) -> None:
    """Write the weights of a model or a head, plain ones in this dtype; more tensors; and, last,
    config.json, without which a folder is no model."""
    tensors = dict(more)
    for name, weight in llama.named_weights().items():
        is_plain = isinstance(weight, Tensor) and weight.is_floating_point()
        for part, tensor in named_tensors(name, weight).items():
            stored = tensor.detach().to("cpu", dtype if is_plain else None, copy=True)
            tensors[part] = stored.contiguous()
    with new_file(folder / "model.safetensors") as new:
        write_tensors(tensors, new)
    write_json(folder / "config.json", config)


def copy_files(source: Path, folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> None:
    """Copy the files of these names that exist."""
    for name in names:
        if (source / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(source / name, folder / name)
