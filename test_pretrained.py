"""Model folders: whose settings count, and every way a folder can be broken."""
import json
import math
import os
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from conftest import CHATML, peak, write_model
from generate import generate
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
    (lambda f: spoil(f, "generation_config.json", do_sample="false"), "generation_config.json: do_sample is 'false'"),
    (lambda f: spoil(f, "generation_config.json", eos_token_id=["x" * 9999]), "_config.json: eos_token_id is ['xxx"),
    (lambda f: spoil(f, "config.json", num_hidden_layers=512), "model.layers.2.input_layernorm.weight"),
    (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    (truncate, "not a whole safetensors file"), (drop_tensor, "tensor model.layers.1.mlp.up_proj.weight"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "not a whole safetensors file"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"), (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json")])
def test_bad_folders(tmp_path, capsys, damage, says):
    damage(write_model(tmp_path))
    status, out, err = run(capsys, PROMPT, "--target", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and says in err


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
ODD = {"folder": Path.mkdir, "pipe": lambda file: os.mkfifo(file), "device": lambda file: file.symlink_to("/dev/zero"),
       "nothing": lambda file: file.symlink_to("gone"), "itself": lambda file: file.symlink_to(file.name),
       "hole": lambda file: (file.touch(), os.truncate(file, 2**40)), "empty": Path.touch,
       "latin-1": lambda file: file.write_bytes(b'"\xe9')}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("kind", ODD)
def test_what_stands_for_a_file_and_is_none(tmp_path, capsys, kind):
    write_model(tmp_path)
    for name in FILES:
        file = (tmp_path / name).rename(tmp_path / "aside").parent / name
        ODD[kind](file)
        status, out, err = run(capsys, PROMPT, "--draft" if name == "config.json" else "--target", tmp_path)
        assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and name in err, err
        file.rmdir() if kind == "folder" else file.unlink()
        (tmp_path / "aside").rename(file)


STRANGE = [None, True, 0, -1, 3, 2**31 - 1, 2**64, 10**400, 0.5, 1e-300, 1e300, math.nan, "", "x", "\ud800",
           "x\n" * 9999, [], [[]], {}, {"x": 1}, [1] * 999, [None]]
BYTES = [b"", b"\x00", b"\xff", b"[[[[" * 999, b"9" * 30, b"{}", b"-", b"e999", b'"']


def damaged(data: bytes, random: Random) -> bytes:
    """JSON with a few entries replaced, left out or added; or any bytes with some changed, cut off or put in."""
    if random.random() < 0.6:
        whole = json.loads(data)
        for _ in range(random.randint(1, 3)):
            at = whole
            while isinstance(at, (dict, list)) and at:
                above, key = at, random.choice([*at] if isinstance(at, dict) else range(len(at)))
                at = at[key]
                if random.random() < 0.4:
                    break
            above[key] = random.choice(STRANGE)
            if random.random() < 0.2:
                del above[key]
            if not whole:
                break
        return json.dumps(whole).encode()
    at, cut = random.randrange(len(data)), random.choice([0, 1, len(data)])
    return data[:at] + random.choice(BYTES) + data[at + cut:]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_folder_makes_text_or_one_line(tmp_path, name):
    write_model(tmp_path, CHATML, generation=dict(do_sample=True, temperature=0.7, eos_token_id=[256, 258]))
    file, random = tmp_path / name, Random(name)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if file.suffix == ".safetensors" else 0
    for _ in range(12):
        spoilt = damaged(whole[8:header], random) if header else damaged(whole, random)
        file.write_bytes(len(spoilt).to_bytes(8, "little") + spoilt + whole[header:] if header else spoilt)
        try:
            generate(PROMPT, tmp_path, max_tokens=2, seed=1, device="cpu")
        except (ValueError, OSError) as error:
            assert len(str(error)) < 1000 and "\n" not in str(error)


def test_a_setting_that_is_none_and_who_asks_for_another(tmp_path, capsys):
    write_model(tmp_path, generation=dict(do_sample=True, top_k=-1))
    status, _, err = run(capsys, PROMPT, "--target", tmp_path)
    assert status == 2 and "generation_config.json: top_k is -1" in err and err.count("\n") == 1
    assert run(capsys, PROMPT, "--target", tmp_path, "--top-k", 3, "--max-tokens", 2)[0] == 0


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
