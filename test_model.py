"""Logits against those that transformers gave the same models (test_data/, made by .ci/random_models.py), and what loading refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import SMALL, program, write_model
from kernels import Ops
from kvcache import KVCache
from model import Config, Llama, inverse_frequencies

DATA = Path(__file__).parent / "test_data"
EXPECTED = load_file(DATA / "expected.safetensors")
CASES = sorted({name.split(".")[0] for name in EXPECTED})


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(case):
    tokens, logits = EXPECTED[f"{case}.tokens"], EXPECTED[f"{case}.logits"]

    def check(llama: Llama) -> None:
        assert relative(llama(tokens), logits) < 1e-5  # 1e-6 is seen; 1e-4 is promised
        cache = KVCache.of(llama, len(tokens))
        seq, _ = cache.open(())
        parts = [
            llama(chunk, cache.extend([(seq, chunk)]))
            for chunk in tokens.split([1, 27, 3, 1, 1, 5, 22])
        ]
        assert relative(torch.cat(parts), logits) < 1e-5

    check(Llama.load(DATA / case, "cpu", torch.float32))
    assert relative(Llama.load(DATA / case, "cpu", torch.float64)(tokens), logits) < 1e-5
    assert relative(Llama.load(DATA / case, "cpu", torch.bfloat16)(tokens), logits) < 0.1
    check(plain(DATA / case))


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    """The model as plain torch computes it."""
    llama = Llama.load(folder, "cpu", dtype, trainable=True).requires_grad_(False)
    llama.ops = Ops()
    return llama


def test_the_cases_cover_what_they_should():
    configs = [Config.load(DATA / case) for case in CASES]
    assert {c.num_attention_heads // c.num_key_value_heads for c in configs} == {1, 2, 4} and 1 in {
        c.num_key_value_heads for c in configs
    }
    assert (
        {c.tie_word_embeddings for c in configs}
        == {c.attention_bias for c in configs}
        == {c.mlp_bias for c in configs}
        == {True, False}
    )
    assert {(c.rope_scaling or {}).get("rope_type") for c in configs} == {None, "linear", "llama3"}
    assert (
        any(c.head_dim * c.num_attention_heads != c.hidden_size for c in configs)
        and len({c.rope_theta for c in configs}) > 1
    )
    assert all(
        c.rope_scaling["original_max_position_embeddings"] < 60
        for c in configs
        if c.rope_scaling and c.rope_scaling["rope_type"] == "llama3"
    )
    texts = [(DATA / case / "config.json").read_text() for case in CASES]
    assert any('"rope_parameters"' in t for t in texts) and any('"type"' in t for t in texts)
    assert (DATA / "sharded" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("case", ["gqa4-mqa", "llama3-scaling"])
@pytest.mark.parametrize("place", ["top", "rope_scaling", "rope_parameters"])
@torch.inference_mode()
def test_the_rotary_base_is_found_wherever_a_config_keeps_it(tmp_path, case, place):
    shutil.copytree(DATA / case, tmp_path, dirs_exist_ok=True)
    config, ours = json.loads((tmp_path / "config.json").read_text()), Config.load(tmp_path)
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(name, None)
    scaling = ours.rope_scaling or {"rope_type": "default"}
    if place == "top":
        config |= {"rope_theta": ours.rope_theta, "rope_scaling": scaling}
    else:
        config[place] = {**scaling, "rope_theta": ours.rope_theta}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Config.load(tmp_path) == ours
    assert (
        relative(
            Llama.load(tmp_path, "cpu", torch.float32)(EXPECTED[f"{case}.tokens"]),
            EXPECTED[f"{case}.logits"],
        )
        < 1e-5
    )


@torch.inference_mode()
def test_only_the_rows_asked_for():
    llama, tokens = Llama.load(DATA / "gqa4", "cpu", torch.float64), EXPECTED["gqa4.tokens"]
    whole = llama(tokens)
    for rows in (slice(-1, None), slice(3, 9), torch.tensor([5, 0, 59])):
        torch.testing.assert_close(llama(tokens, rows=rows), whole[rows])


def test_gradients_flow_through_a_trainable_model():
    llama, tokens = (
        Llama.load(DATA / "biases", "cpu", torch.float32, trainable=True),
        EXPECTED["biases.tokens"],
    )
    logits = llama(tokens)
    assert relative(logits.detach(), EXPECTED["biases.logits"]) < 1e-5
    torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in llama.parameters())


def test_random_weights_depend_on_the_seed_and_a_folder_gives_them_back(tmp_path):
    config = Config(**SMALL)
    a, b, c = (Llama(config, seed=seed).places() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a) and not torch.equal(
        a["model.embed_tokens.weight"], c["model.embed_tokens.weight"]
    )
    save_file(
        {name: place.contiguous() for name, place in a.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    loaded = Llama.load(tmp_path, "cpu", torch.float32, trainable=True)
    assert loaded.config == config and all(
        torch.equal(a[name], place) for name, place in loaded.places().items()
    )


def test_a_norm_is_computed_in_float32_at_least():
    x = (
        torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half() * 500
    )  # its square is no float16
    wide = x.double()
    _, y = Ops().add_norm(x, None, torch.full((64,), 1.5, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(
        y.double(), wide / wide.square().mean(-1, keepdim=True).sqrt() * 1.5, rtol=2e-3, atol=1e-3
    )


# ---- Rotary embeddings


def test_a_product_of_rotated_vectors_depends_on_their_distance_alone():
    torch.manual_seed(0)
    q, k, frequencies = (
        torch.randn(10),
        torch.randn(10),
        inverse_frequencies(Config(**{**SMALL, "head_dim": 10})).double(),
    )

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * frequencies
        cos, sin = angles.cos().repeat(2), torch.cat((-angles.sin(), angles.sin()))
        return Ops().rotate(x.double()[None, None], cos[None, None], sin[None, None])[0, 0]

    products = {d: [float(turned(q, p + d) @ turned(k, p)) for p in (0, 3, 50)] for d in (0, 1, 7)}
    assert (
        all(max(v) - min(v) < 1e-9 for v in products.values())
        and abs(products[0][0] - float(q.double() @ k.double())) < 1e-6
    )
    assert abs(products[1][0] - products[7][0]) > 1e-3


# ---- What is refused, and how


def test_a_config_far_larger_than_its_weights_is_refused_before_memory_is_asked_for(tmp_path):
    shutil.copytree(DATA / "mha", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(
        json.dumps(
            json.loads((DATA / "mha" / "config.json").read_text())
            | {"hidden_size": 2_000_000_000, "head_dim": 6}
        )
    )
    with pytest.raises(
        ValueError,
        match=r"tensor model.embed_tokens.weight in .* is \[43, 24\]; config.json asks for \[43, 2000000000\]",
    ):
        Llama.load(tmp_path, "cpu")


def test_a_tied_head_that_is_there_twice_must_agree(tmp_path):
    folder = write_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tokens = torch.tensor([1, 2, 3])
    logits = Llama.load(folder, "cpu", torch.float32)(tokens)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    assert torch.equal(Llama.load(folder, "cpu", torch.float32)(tokens), logits)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        folder / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match="lm_head.weight .* differs from model.embed_tokens.weight"
    ):
        Llama.load(folder)


def test_nothing_is_left_uninitialized(tmp_path, monkeypatch):
    """Every parameter is filled: poisoned memory never shows."""
    original = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, **where: original(*args, **where).fill_(math.nan)
    )
    for case in CASES:
        llama = Llama.load(DATA / case, "cpu", torch.float32, trainable=True)
        assert not any(p.isnan().any() for p in llama.parameters())


LOADED = "import sys; from model import Llama; Llama.load('tiny', 'cpu'); print('torch._dynamo' in sys.modules)"


@pytest.mark.meanwhile(program, "-c", LOADED)
def test_to_load_a_model_brings_no_compiler(meanwhile):
    """torch._dynamo, which arithmetic on tensors of the meta device brings, is seconds of a start."""
    done = meanwhile()
    assert done.stdout == "False\n", done.stderr
