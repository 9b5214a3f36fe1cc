"""A model loads whole or not at all, is rounded where that is asked for, and fits in memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.config import Config
from checkpoint.formats import Quantization, empty_matrix
from checkpoint.load import fill_model, load_eagle
from eagle import EagleHead
from errors import UserError
from kernels import ops_for
from model import Llama
from testing.folders import write_model
from testing.heads import random_head, write_head
from testing.models import LARGE, SMALL
from testing.programs import peak


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


def test_weights_come_from_the_checkpoint_in_the_dtype_asked_for(tmp_path):
    folder = write_model(tmp_path, tie_word_embeddings=False, attention_bias=True)
    stored = load_file(folder / "model.safetensors")
    for dtype in (torch.float32, torch.float64):
        model = Llama.load(folder, "cpu", dtype, trainable=True)
        loaded = model.named_tensors()
        assert loaded.keys() == stored.keys()
        for name, tensor in loaded.items():
            assert tensor.dtype == dtype and torch.equal(tensor.detach(), stored[name].to(dtype))


def test_an_adapter_beside_the_weights_is_told(tmp_path):
    (write_model(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="the adapter beside the weights is not applied"):
        Llama.load(tmp_path, "cpu")


def test_weights_are_rounded_on_the_device_they_go_to(monkeypatch):
    """The host of a GPU would take minutes: here the device has shapes only."""
    config = Config(**SMALL | {"hidden_size": 64})
    llama = Llama(config.quantized(Quantization(4)), "meta", seed=None)
    devices = []

    def rounded(w, bits, group):
        devices.append(w.device.type)
        return empty_matrix(*w.shape, bits, w.shape[1] if bits == 8 else group, "meta")

    monkeypatch.setattr("checkpoint.load.quantize", rounded)
    fill_model(llama, Llama(config).named_tensors().items())
    assert len(devices) == 1 + 7 * config.num_hidden_layers and set(devices) == {"meta"}


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    folder = write_model(tmp_path, tie_word_embeddings=True)
    expected = Llama.load(folder)(torch.arange(9))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(folder, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(Llama.load(folder)(torch.arange(9)), expected)
    add_tensors(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(
        UserError, match="lm_head.weight .* differs .* tie_word_embeddings to false"
    ):
        Llama.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert not torch.allclose(Llama.load(folder)(torch.arange(9)), expected)
    (folder / "config.json").write_text(json.dumps(config))
    add_tensors(folder, **{"lm_head.weight": embedding[1:].clone()})
    with pytest.raises(UserError, match=r"lm_head.weight in .* is \[260, 24\]; the config asks"):
        Llama.load(folder)


def test_weights_larger_than_memory_are_refused_before_any_is_asked_for(tmp_path, monkeypatch):
    folder = write_model(tmp_path)
    needed = sum(tensor.nbytes for tensor in Llama(Config(**SMALL)).named_tensors().values())
    monkeypatch.setattr("checkpoint.load.free_memory", lambda device: needed)
    Llama.load(folder, "cpu", torch.float32)
    monkeypatch.setattr("checkpoint.load.free_memory", lambda device: needed - 1)
    with pytest.raises(UserError, match="needs 0.0 GB for its weights, and cpu has 0.0 GB free"):
        Llama.load(folder, "cpu", torch.float32)
    target = Llama(Config(**SMALL))
    head = write_head(tmp_path / "head", random_head(target))
    monkeypatch.setattr("checkpoint.load.free_memory", lambda device: 0)
    with pytest.raises(UserError, match="head needs 0.0 GB for its weights"):
        load_eagle(EagleHead, head, target, 16)


# ---- Memory


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="read from Linux's /proc")
def test_loading_never_takes_more_than_the_model_and_one_tensor():
    """And brings no torch._dynamo, which arithmetic on meta tensors does: seconds of a start."""
    load = 'llama = Llama.load({}, "cpu", torch.float32)'
    measured = load.format("folder") + "; assert 'torch._dynamo' not in sys.modules"
    shape = json.dumps(LARGE | dict(dtype="bfloat16"))
    taken = peak(shape, load.format("'test_data/mha'"), measured)
    _, weight_dtype = ops_for("cpu").dtypes([torch.bfloat16], torch.float32)
    model = Llama(Config(**SMALL | LARGE), "meta", seed=None, weight_dtype=weight_dtype)
    sizes = [tensor.nbytes for tensor in model.named_tensors().values()]
    assert sum(sizes) > 75e6
    assert taken < sum(sizes) + max(sizes) + 12e6
