"""A Llama from a model folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.hub import find_folder
from checkpoint.tensors import Checkpoint
from errors import UserError
from kernels import find_device, free_memory, ops_for
from quant import GROUPS, Kind, quantize, stored_bits

if TYPE_CHECKING:
    from model import Llama

OLD = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # tensors of old checkpoints


def load_llama(
    cls: type[Llama],
    name: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
    bits: Kind = 16,
) -> Llama:
    """A model from an alias, a Hub id or a folder. FileNotFoundError or UserError names the way out.

    device: a GPU if there is one. dtype: float32 on a CPU, on a GPU the checkpoint's. trainable:
    plain weights with gradients; otherwise weights are packed. bits: other than 16 rounds the
    weights of a model in 16 or 32 bits.
    """
    folder = find_folder(name)
    config = Config.load(folder)
    checkpoint = Checkpoint(folder)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    rules = dict(ignore=OLD, twice=tied, how=config.quantization)
    sources = cls(config, "meta", seed=None).named_tensors()
    checkpoint.audit(sources, **rules)  # before any memory is asked for
    if trainable and (config.quantization or bits != 16):
        raise UserError(
            f"{name}: quantized weights cannot be trained or changed: "
            "use the model in 16 or 32 bits that they were made from"
        )
    if bits != 16:
        config = config.quantized(Quantization(bits, GROUPS.get(bits, 128)))
    device = torch.device(device) if device else find_device()
    ops = ops_for(device)
    dtype = dtype or ops.compute_dtype(checkpoint.dtypes[0])
    matrices = dtype if trainable else ops.weight_dtype(checkpoint.dtypes, dtype)
    tensors = cls(config, "meta", dtype, None, ops, matrices).named_tensors().values()
    needs = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    if needs > (free := free_memory(device)):
        raise UserError(
            f"{name} needs {needs / 1e9:.1f} GB for its weights, and {device} has {free / 1e9:.1f} "
            "GB free: use fewer --bits, another --device, or a smaller model"
        )
    model = cls(config, device, dtype, None, ops, matrices)
    fill(model, checkpoint.tensors(sources, **rules))
    return model.requires_grad_() if trainable else model.pack_weights()


@torch.no_grad()
def fill(model: Llama, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each tensor of a checkpoint to its place. Plain ones are rounded for a quantized place."""
    places = model.named_tensors()
    share = model.ops.shard_tensor
    for name, tensor in tensors:
        if tensor.dtype != places[name].dtype and f"{name}_scale" in places:
            bits = stored_bits(places[name].dtype, f"{name}_zero" in places)
            rows = share(tensor, (len(places[name]), tensor.shape[1]))  # a scale is of whole rows
            q = quantize(rows, bits, model.config.quantization.group)
            for part, numbers in zip(("", "_scale", "_zero"), q):
                if numbers is not None:
                    places[name + part].copy_(share(numbers, places[name + part].shape))
        else:
            places[name].copy_(share(tensor, places[name].shape))
