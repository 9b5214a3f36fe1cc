"""Folders that compressed-tensors and bitsandbytes write themselves, and what we read there.

    python .ci/formats_reference.py         (with compressed-tensors, bitsandbytes and accelerate)

Random models of each family are quantized and saved by the package, whose own dequantization gives
the reference: the logits' difference must be below 1e-5 of their size (root mean square), and below
1e-3 beside INT8 and INT4, where x has 16 bits on a CPU. Where inputs have 8 bits, too, a package
rounds by a scale of its own: the error that rounding adds must be as large as theirs.
"""

import copy
import sys
import tempfile
import warnings
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from checks import require
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle import disable_quantization
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    logging,
)

sys.path.append(str(Path(__file__).parent.parent))

from model import Llama

logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.simplefilter("ignore")
SHAPE = dict(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)


def recipe(
    bits: int,
    kind: str = "int",
    strategy: str = "group",
    symmetric: bool = True,
    inputs: bool = False,
    **more: object,
) -> QuantizationConfig:
    weights = dict(
        num_bits=bits,
        type=kind,
        symmetric=symmetric,
        strategy=strategy,
        group_size=32 if strategy == "group" else None,
        **more,
    )
    tokens = (
        dict(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
        if inputs
        else None
    )
    return QuantizationConfig(
        config_groups=dict(
            group_0=dict(targets=["Linear"], weights=weights, input_activations=tokens)
        ),
        ignore=["lm_head"],
    )


CASES = {
    "INT4": recipe(4),
    "INT4 with zeros": recipe(4, symmetric=False),
    "INT4, rows": recipe(4, strategy="channel"),
    "INT4 with zeros, rows": recipe(4, strategy="channel", symmetric=False),
    "INT4, act-order": recipe(4, actorder="weight"),
    "INT8, groups": recipe(8),
    "INT8": recipe(8, strategy="channel"),
    "W8A8": recipe(8, strategy="channel", inputs=True),
    "FP8": recipe(8, "float", "channel"),
    "FP8, a scale for all": recipe(8, "float", "tensor"),
    "FP8 × FP8": recipe(8, "float", "channel", inputs=True),
}


def compressed(model: PreTrainedModel, how: QuantizationConfig, folder: Path) -> PreTrainedModel:
    apply_quantization_config(model, how)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            args = layer.quantization_scheme.weights
            w = layer.weight.data
            shape = {"group": (len(w), -1, 32), "channel": (len(w), 1, -1)}
            w = w.reshape(shape.get(args.strategy, (1, 1, -1)))
            scale, zero = calculate_qparams(w.amin(-1), w.amax(-1), args)
            layer.weight_scale.data.copy_(scale.view_as(layer.weight_scale))
            layer.weight_zero_point.data.copy_(zero.view_as(layer.weight_zero_point))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)  # for the reference
    return model


def nf4(model: PreTrainedModel, double: bool, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder / "plain")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
    )
    small = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=how, dtype=torch.float32, device_map="cpu"
    )
    small.save_pretrained(folder)
    layers = dict(model.named_modules())
    for name, layer in small.named_modules():
        if hasattr(getattr(layer, "weight", None), "quant_state"):
            layers[name].weight.data.copy_(
                bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            )
    return model


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@torch.inference_mode()
def compare(kind: str) -> None:
    torch.manual_seed(0)
    first = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE))
    tokens = torch.randint(320, (1, 60))
    for name, weight in first.named_parameters():
        if "norm" not in name:
            weight.normal_(std=SHAPE["hidden_size"] ** -0.5)
    writers = {name: (compressed, how) for name, how in CASES.items()}
    writers |= {"NF4": (nf4, False), "NF4, double quantization": (nf4, True)}
    for name, (write, how) in writers.items():
        with tempfile.TemporaryDirectory() as folder:
            model = write(copy.deepcopy(first), how, Path(folder))
            theirs = model(tokens).logits[0]
            ours = Llama.load(folder, "cpu", torch.float32)(tokens[0])
        plain = model.apply(disable_quantization)(tokens).logits[0]  # only the weights are rounded
        if torch.equal(theirs, plain):
            error = rms(ours - theirs) / rms(theirs)
            limit = 1e-3 if name.startswith("INT") else 1e-5
            require(error < limit, f"{kind}, {name}: off by {error:.1e} of the logits' size")
        else:
            ratio = rms(ours - plain) / rms(theirs - plain)
            told = (
                f"{kind}, {name}: rounded inputs add {ratio:.2f} of the error that they add there"
            )
            require(0.7 < ratio < 1.4, told)


if __name__ == "__main__":
    for kind in ("llama", "qwen2", "qwen3"):
        compare(kind)
