"""A Llama from a model folder, or from a GGUF.

    name → folder → config and headers → checks → an empty model → a tensor at a time → packed

Everything that can be wrong with a folder's names, shapes, dtypes and size is said before memory is
asked for: both `meta` models below have shapes and no numbers. A weight is rounded to fewer bits,
where --bits asks for it, on the device that it goes to.

Cost: the peak of memory is the model and a tensor of each thread (progress.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.eagle import EagleCheckpoint, EagleConfig
from checkpoint.formats import Foreign, Quantization, header_of
from checkpoint.gguf_model import GGUFCheckpoint, read_gguf_config
from checkpoint.hub import find_model, is_gguf
from checkpoint.progress import do_each
from checkpoint.tensors import Checkpoint
from errors import UserError
from kernels import find_device, free_memory, ops_for
from parallel import group_for
from quant import DEFAULT_GROUP, Kind, quantize

if TYPE_CHECKING:
    from eagle import EagleHead
    from model import Llama

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def load_llama(
    cls: type[Llama],
    name: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
    bits: Kind = 16,
) -> Llama:
    """A model from an alias, a Hub id, a folder or a GGUF. FileNotFoundError or UserError: what to
    change.

    device: a GPU if there is one. dtype: float32 on a CPU, on a GPU the checkpoint's. trainable:
    weights are plain; otherwise they are packed. bits: other than 16 rounds the weights of a model
    in 16 or 32 bits.
    """
    config, checkpoint = open_checkpoint(find_model(name))
    tensors = cls(config, "meta", seed=None).named_tensors()
    check_tensors(checkpoint, tensors, config)
    if trainable and (config.quantization or bits != 16):
        raise UserError(
            f"{name}: quantized weights cannot be trained or changed: "
            "use the model in 16 or 32 bits that they were made from"
        )
    if isinstance(config.quantization, Foreign):
        numbers = config.quantization.convert(tensors, checkpoint)
    else:
        numbers = ((name, checkpoint.read(name)) for name in tensors)
    if bits != 16:
        config = config.quantized(Quantization(bits, DEFAULT_GROUP.get(bits, 128)))
    device = torch.device(device) if device else find_device()
    ops = ops_for(device)
    dtype, weight_dtype = ops.dtypes(checkpoint.dtypes, dtype)
    if trainable:
        weight_dtype = dtype
    shard = group_for(device).shard(config)  # what this process will hold
    empty = cls(shard, "meta", dtype, None, weight_dtype=weight_dtype)
    check_fits_in_memory(name, empty.named_tensors().values(), device)
    model = cls(config, device, dtype, None, ops, weight_dtype)
    fill_model(model, numbers)  # numbers: one tensor after the other
    return model if trainable else model.pack_weights()


def load_eagle(cls: type[EagleHead], folder: Path, target: Llama) -> EagleHead:
    """The EAGLE head in a folder, for this target, in its dtype and on its device. UserError: what
    to change."""
    checkpoint = EagleCheckpoint(folder)
    config = EagleConfig.load(folder).with_tensors(checkpoint.headers)
    device = target.device
    ops = ops_for(device)
    dtype, weight_dtype = ops.dtypes(checkpoint.dtypes, target.dtype)
    shard = config.shard(target.group)  # what this process will hold
    config.check_target(target.config, shard.layer)
    empty = cls(shard, target, "meta", dtype, None, weight_dtype=weight_dtype)
    tensors = cls(config, target, "meta", seed=None).named_tensors()  # of the whole head
    checkpoint.check({name: header_of(tensor) for name, tensor in tensors.items()})
    check_fits_in_memory(folder, empty.named_tensors().values(), device)
    head = cls(config, target, device, dtype, None, ops, weight_dtype)
    fill_model(head, ((name, checkpoint.read(name)) for name in tensors))
    config.check_tokens(head.tokens)
    return head.pack_weights()


def open_checkpoint(path: Path) -> tuple[Config, Checkpoint]:
    """Of a model's folder, or of its GGUF."""
    if is_gguf(path):
        checkpoint = GGUFCheckpoint(path)
        return read_gguf_config(checkpoint), checkpoint
    return Config.load(path), Checkpoint(path)


def check_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor], config: Config) -> None:
    """UserError unless the folder holds the model's tensors, and no other with an effect."""
    layout = config.quantization
    if isinstance(layout, Foreign):
        expected = layout.expected(tensors, checkpoint.headers)
    else:
        expected = {name: header_of(tensor) for name, tensor in tensors.items()}
    if config.tie_word_embeddings and HEAD in checkpoint.headers:  # the embedding, stored again
        expected[HEAD] = expected[EMBEDDING]
        checkpoint.check(expected)
        if not torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
            raise UserError(
                f"tensor {HEAD} of {checkpoint.folder} differs from {EMBEDDING}, though "
                "the config ties them"
            )
    checkpoint.check(expected)


def check_fits_in_memory(name: str | Path, tensors: Iterable[Tensor], device: torch.device) -> None:
    """UserError if the device has not enough free memory for these tensors. (One order of columns
    may have several names.)"""
    distinct = {id(tensor): tensor for tensor in tensors}
    needed = sum(tensor.nbytes for tensor in distinct.values())
    free = free_memory(device)
    if needed > free:
        raise UserError(
            f"{name} needs {needed / 1e9:.1f} GB for its weights, and {device} has "
            f"{free / 1e9:.1f} GB free: use fewer --bits, another --device, or a smaller model"
        )


def fill_model(model: Llama, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors of a checkpoint into a model. A plain weight is rounded where the model stores
    it in fewer bits."""
    targets = model.named_tensors()

    @torch.no_grad()  # in its thread
    def fill(named: tuple[str, Tensor]) -> int:
        name, tensor = named
        if f"{name}_scale" in targets and tensor.dtype != targets[name].dtype:
            return fill_quantized(model, targets, name, tensor)
        target = targets[name]
        target.copy_(model.group.cut(tensor, target.shape))
        return target.nbytes

    num_bytes = sum(target.nbytes for target in targets.values())
    do_each("loading", fill, tensors, model.device, num_bytes)


def fill_quantized(model: Llama, targets: dict[str, Tensor], name: str, tensor: Tensor) -> int:
    """Round a weight [N, K] of a checkpoint on the model's device, and copy the parts -> their
    bytes."""
    layout = model.config.quantization
    bits = layout.head_bits if name in (EMBEDDING, HEAD) else layout.bits
    num_rows = len(targets[name])
    rows = model.group.cut(tensor, (num_rows, tensor.shape[1]))  # a scale is of whole rows
    q = quantize(rows.to(model.device), bits, layout.group)
    parts = {"": q.values, "_scale": q.scale, "_zero": q.zero}
    num_bytes = 0
    for suffix, part in parts.items():
        if part is not None:
            target = targets[name + suffix]
            target.copy_(model.group.cut(part, target.shape))
            num_bytes += target.nbytes
    return num_bytes
