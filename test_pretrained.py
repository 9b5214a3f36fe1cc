"""Model folders: whose settings count, and every way a folder can be broken."""
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from conftest import peak, write_model
from pretrained import Model
from request import Settings
from test_generate import PROMPT, run


def test_the_models_own_settings_are_the_default(tmp_path):
    choose = lambda **recommended: Model.load(write_model(tmp_path, generation=recommended), "cpu").complete
    sampled = choose(do_sample=True, temperature=0.6, top_p=0.9)
    assert (sampled(Settings()).temperature, sampled(Settings()).top_p, sampled(Settings()).top_k) == (0.6, 0.9, None)
    assert sampled(Settings(temperature=0.1)).temperature == 0.1 and sampled(Settings(temperature=0.1)).top_p == 0.9
    greedy = choose(temperature=0.6)                               # transformers reads this as greedy, too
    assert greedy(Settings()).temperature == 0
    assert greedy(Settings(top_p=0.5)).temperature == 1            # who asks for top-p wants to sample
    seeds = {sampled(Settings()).seed for _ in range(4)}
    assert len(seeds) > 1 and sampled(Settings(seed=5)).seed == 5


def spoil(folder: Path, file: str, **changes) -> None:
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({k: v for k, v in (data | changes).items() if v is not ...}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("damage, says", [
    (lambda f: spoil(f, "config.json", model_type="mistral"), "model_type is 'mistral'"),
    (lambda f: spoil(f, "config.json", hidden_act="gelu"), "hidden_act is 'gelu'"),
    (lambda f: spoil(f, "config.json", rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type is 'yarn'"),
    (lambda f: spoil(f, "config.json", hidden_size=...), "hidden_size is missing"),
    (lambda f: spoil(f, "config.json", num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
    (lambda f: write_model(f, vocab_size=200), "belong to different models"),
    (lambda f: spoil(f, "config.json", hidden_size=30), "config.json asks for"),
    (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    (lambda f: (f / "config.json").write_text("{not json"), "config.json is not valid JSON"),
    (lambda f: (f / "config.json").write_text("[1]"), "not an object"),
    (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json is not valid JSON"),
    (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    (truncate, "not a whole safetensors file"), (drop_tensor, "tensor model.layers.1.mlp.up_proj.weight"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "not a whole safetensors file"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"), (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json")])
def test_bad_folders(tmp_path, capsys, damage, says):
    damage(write_model(tmp_path))
    status, out, err = run(capsys, PROMPT, "--target", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and says in err


LARGE = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, head_dim=64)
BEFORE = """
Model.load("models/tiny", "cpu", torch.float32).int4_copy()
model = Model.load(folder, "cpu", torch.float32)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.meanwhile(peak, json.dumps(LARGE), BEFORE, "copy = model.int4_copy()")
def test_the_int4_copy_takes_its_layers_bytes_and_a_tensor_on_the_way(meanwhile):
    layers = 6 * (512 * (8 + 2 * 2) * 64 + 512 * 512 + 3 * 512 * 2048)
    assert layers * 2 > 40e6 and meanwhile() < layers * 0.55 + 27e6, f"{meanwhile() >> 20} MiB at the peak for {layers / 1e6:.0f} million numbers"
