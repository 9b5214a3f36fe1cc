"""A Llama from a model folder, or from a GGUF.

    name → folder → config and headers → checks → an empty model → a tensor at a time → packed

Everything that can be wrong with a folder's names, shapes, dtypes and size is said before memory is
asked for: both `meta` models below have shapes and no numbers. A weight is rounded to fewer bits,
where --bits asks for it, on the device that it goes to.

Cost: the peak of memory is the model and a tensor of each thread (progress.py); of a GGUF, what
unpacking it takes, too (gguf_blocks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.eagle import EagleCheckpoint, EagleConfig, is_eagle
from checkpoint.formats import (
    FLOATS,
    Quantization,
    check_setting,
    header_of,
)
from checkpoint.gguf_model import GGUFCheckpoint, read_gguf_config
from checkpoint.hub import find_model, is_gguf
from checkpoint.progress import do_each
from checkpoint.tensors import Checkpoint
from devices import find_device, free_memory
from errors import UserError
from kernels import Ops, ops_for
from parallel import num_processes
from quant import Kind, Quantized, named_tensors, quantize

if TYPE_CHECKING:
    from checkpoint.weights import Weights
    from eagle import EagleHead
    from model import Llama

Shape = TypeVar("Shape", Config, EagleConfig)
Model = TypeVar("Model", bound="Weights")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def load_llama(
    cls: type[Llama],
    name: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
    bits: Kind = 16,
    ops: Ops | None = None,
) -> Llama:
    """A model from an alias, a Hub id, a folder or a GGUF. FileNotFoundError or UserError: what to
    change.

    device None: a GPU if there is one. dtype None: float32 on a CPU, on a GPU the checkpoint's.
    trainable: weights are plain; otherwise they are packed. bits: other than 16 rounds the weights
    of a model in 16 or 32 bits. ops None: the fastest operations for the device.
    """
    check_setting("dtype", dtype, None, *FLOATS.values())
    device = find_device(device)
    config, checkpoint = open_checkpoint(find_model(name))
    if trainable and (config.quantization or bits != 16):
        raise UserError(
            f"{name}: quantized weights cannot be trained or changed: "
            "use the model in 16 or 32 bits that they were made from"
        )
    ops = ops or ops_for(device)
    dtype, weight_dtype = ops.dtypes(checkpoint.dtypes, dtype)
    if trainable:
        weight_dtype = dtype
    make = partial(cls, dtype=dtype, seed=None, ops=ops, weight_dtype=weight_dtype)
    llama = load_weights(make, config, bits, checkpoint, device)
    return llama if trainable else llama.pack_weights()


def load_eagle(cls: type[EagleHead], folder: Path, target: Llama, bits: Kind) -> EagleHead:
    """The EAGLE head in a folder, for this target, in its dtype and on its device. UserError: what
    to change. bits: as of `load_llama`."""
    checkpoint = EagleCheckpoint(folder)
    config = EagleConfig.load(folder).with_tensors(checkpoint.headers)
    config.check_target(target.config, config.shard(target.group.n).layer)
    ops = target.ops
    dtype, weight_dtype = ops.dtypes(checkpoint.dtypes, target.dtype)
    make = partial(cls, target=target, dtype=dtype, seed=None, ops=ops, weight_dtype=weight_dtype)
    head = load_weights(make, config, bits, checkpoint, target.device)
    config.check_tokens(head.tokens)
    return head.pack_weights()


def load_weights(
    make: Callable[..., Model],
    config: Shape,
    bits: Kind,
    checkpoint: Checkpoint,
    device: torch.device,
) -> Model:
    """A model or a head with the numbers of a checkpoint, on this device. make: it, from a config;
    on the device meta it has shapes and no numbers."""
    whole = make(config, device="meta")
    check_tensors(checkpoint, whole)
    numbers = read_weights(checkpoint, whole)
    config = in_bits(config, bits)
    shard = config.shard(num_processes())  # what this process will hold
    check_fits_in_memory(checkpoint.folder, make(shard, device="meta"), device)
    model = make(config, device=device)
    fill_model(model, numbers)
    return model


def in_bits(config: Shape, bits: Kind | None) -> Shape:
    """As `bits` rounds the weights of a model while loading them; 16, None: not at all. UserError
    if they are rounded already."""
    return config if bits in (16, None) else config.quantized(Quantization(bits))


def draft_config(folder: Path, bits: Kind | None = None) -> Config:
    """The draft in a folder, a model or an EAGLE head, as this process would load it: its weights
    are not read. UserError if it cannot be loaded so."""
    if is_eagle(folder):
        draft = EagleConfig.load(folder).draft_config
    else:
        draft, _ = open_checkpoint(folder)
    return in_bits(draft, bits).shard(num_processes())


def default_bits(folder: Path, target: Config) -> Kind:
    """The bits to which a folder's draft is rounded where none are asked for: those of the target's
    layers, whichever program rounded them. A draft that is stored in few bits stays as it is: 16.
    """
    if draft_config(folder).quantization is not None or target.quantization is None:
        return 16
    return target.quantization.bits


def open_checkpoint(path: Path) -> tuple[Config, Checkpoint]:
    """Of a model's folder, or of its GGUF."""
    if is_gguf(path):
        checkpoint = GGUFCheckpoint(path)
        return read_gguf_config(checkpoint), checkpoint
    if (path / "adapter_config.json").exists():
        warnings.warn(f"{path}: the adapter beside the weights is not applied: merge it into them")
    return Config.load(path), Checkpoint(path)


def check_tensors(checkpoint: Checkpoint, model: Weights) -> None:
    """UserError unless the folder holds the model's tensors, and no other with an effect."""
    expected = {}
    for name, weight in model.named_weights().items():
        if isinstance(weight, Tensor):
            expected[name] = header_of(weight)
        else:
            expected |= model.config.quantization.headers(name, weight, checkpoint.headers)
    is_stored_twice = model.config.tie_word_embeddings and HEAD in checkpoint.headers
    if is_stored_twice:
        expected[HEAD] = expected[EMBEDDING]
    checkpoint.check(expected)
    if is_stored_twice and not torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        raise UserError(
            f"tensor {HEAD} of {checkpoint.folder} differs from {EMBEDDING}, though config.json "
            "ties them: set its tie_word_embeddings to false, so that the head is used, or remove "
            "the head from the file"
        )


def read_weights(
    checkpoint: Checkpoint, model: Weights
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """(name, numbers) of one weight after the other. UserError for numbers that make no sense."""
    weights = model.named_weights()
    orders = dict[int, Tensor]()  # of each product's columns: q, k and v share one
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            yield name, checkpoint.read(name)
            continue
        numbers = model.config.quantization.read(name, weights, checkpoint)
        if weight.order is not None:
            first = orders.setdefault(id(weight.order), numbers.order)
            if not torch.equal(numbers.order, first):
                raise UserError(
                    f"{name.removesuffix('.weight')}: its g_idx differs from that of another part "
                    "of a product: fetch the model again, or name one in 16 bits"
                )
        yield name, numbers


def check_fits_in_memory(name: Path, model: Weights, device: torch.device) -> None:
    """UserError if the device has not enough free memory for this model. (One order of columns may
    have several names.)"""
    distinct = {id(tensor): tensor for tensor in model.named_tensors().values()}
    needed = sum(tensor.nbytes for tensor in distinct.values())
    free = free_memory(device)
    if needed > free:
        raise UserError(
            f"{name} needs {needed / 1e9:.1f} GB for its weights, and {device} has "
            f"{free / 1e9:.1f} GB free: use fewer --bits, another --device, or a smaller model"
        )


def fill_model(model: Weights, numbers: Iterable[tuple[str, Tensor | Quantized]]) -> None:
    """Copy the weights of a checkpoint into a model. Where it stores one in fewer bits, a plain
    weight is rounded, on the model's device; a quantized one is dequantized where it does not."""
    weights = model.named_weights()
    cut = model.group.cut

    @torch.no_grad()  # in its thread
    def fill(named: tuple[str, Tensor | Quantized]) -> int:
        name, source = named
        target = weights[name]
        if isinstance(target, Quantized) and isinstance(source, Tensor):
            rows = cut(source, (target.shape[0], source.shape[1]))  # a scale is of whole rows
            source = quantize(rows.to(model.device), target.bits, target.group)
        if isinstance(target, Tensor) and isinstance(source, Quantized):
            source = source.dequantize()
        parts = named_tensors(name, source)
        for part, place in named_tensors(name, target).items():
            place.copy_(cut(parts[part], place.shape))
        return target.nbytes

    num_bytes = sum(tensor.nbytes for tensor in model.named_tensors().values())
    do_each("loading", fill, numbers, model.device, num_bytes)
