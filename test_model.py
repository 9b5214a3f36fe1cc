"""Logits against those that transformers gave the same models; gradients, norms, rotations.

The models and logits are in test_data/, made by .ci/random_models.py.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.config import Config
from errors import UserError
from kernels import Ops
from kvcache import KVCache
from model import Llama
from testing.models import SMALL, random_llama

DATA = Path(__file__).parent / "test_data"
EXPECTED = load_file(DATA / "expected.safetensors")
CASES = sorted({name.split(".")[0] for name in EXPECTED})


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def load_plain(folder: Path) -> Llama:
    """The model as plain torch computes it."""
    llama = Llama.load(folder, "cpu", torch.float32, trainable=True)
    llama.ops = Ops()
    return llama


@torch.inference_mode()
def test_logits_equal_those_of_transformers():
    for case in CASES:
        tokens = EXPECTED[f"{case}.tokens"]
        logits = EXPECTED[f"{case}.logits"]
        for llama in (Llama.load(DATA / case, "cpu", torch.float32), load_plain(DATA / case)):
            assert relative(llama(tokens), logits) < 1e-5, case  # 1e-6 is seen; 1e-4 is promised
            cache = KVCache(llama.kv_spec(), len(tokens))
            seq, _ = cache.open(())
            parts = []
            for chunk in tokens.split([1, 27, 3, 1, 1, 5, 22]):
                parts.append(llama(chunk, cache.extend([(seq, chunk)])))
            assert relative(torch.cat(parts), logits) < 1e-5, case
        for dtype, most in ((torch.float64, 1e-5), (torch.bfloat16, 0.1)):
            assert relative(Llama.load(DATA / case, "cpu", dtype)(tokens), logits) < most, case


def test_the_price_of_a_token_counts_operations():
    for case in CASES:
        llama = load_plain(DATA / case)
        c = llama.config
        tensors = llama.named_tensors().items()
        weights = sum(x.numel() for name, x in tensors if "layers" in name and x.dim() == 2)
        even = 2 * weights // (4 * c.num_hidden_layers * c.query_size)
        contexts = (0, even - 1, even, 2 * even - 1, 2 * even, 99 * even)
        assert [llama.price(context) for context in contexts] == [1, 1, 2, 2, 3, 8]


def test_the_cases_cover_what_they_should():
    configs = [Config.load(DATA / case) for case in CASES]
    assert {c.num_attention_heads // c.num_key_value_heads for c in configs} == {1, 2, 4}
    assert 1 in {c.num_key_value_heads for c in configs}
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert {getattr(c, name) for c in configs} == {True, False}
    assert {c.model_type for c in configs} == {"llama", "qwen2", "qwen3"}
    scalings = [c.rope_scaling or {} for c in configs]
    assert {scaling.get("rope_type") for scaling in scalings} == {None, "linear", "llama3"}
    for scaling in scalings:
        assert scaling.get("original_max_position_embeddings", 0) < 60  # shorter than the texts
    assert any(c.head_dim * c.num_attention_heads != c.hidden_size for c in configs)
    assert len({c.rope_theta for c in configs}) > 1
    texts = [(DATA / case / "config.json").read_text() for case in CASES]
    assert any('"rope_parameters"' in t for t in texts) and any('"type"' in t for t in texts)
    assert (DATA / "sharded" / "model.safetensors.index.json").exists()


@torch.inference_mode()
def test_tokens_are_those_of_one_text(compiler):
    """Nothing else is read, or read as other tokens."""
    llama = Llama.load("tiny", "cpu", torch.float32)
    text = torch.tensor([5, 0, 6, 0])
    assert torch.equal(llama(text.int()), llama(text))
    most = llama.config.max_position_embeddings
    for wrong, says in (
        (text.view(2, 2), r"torch.int64 of shape \[2, 2\]"),
        (text[0], r"shape \[\]"),
        (text[:0], r"shape \[0\]"),
        (text.new_zeros(most + 1), f"from 1 to {most}"),
        (text.float(), "tokens are torch.float32"),
        (text - 1, "has token -1, and the model has tokens 0 to 4095"),
        (text + 4090, "has token 4096"),
    ):
        with pytest.raises(UserError, match=says):
            llama(wrong)


def test_logits_are_those_asked_for():
    llama = random_llama(1)
    tokens = torch.arange(60)
    logits = llama(tokens)
    for indices in (slice(-1, None), slice(3, 9), torch.tensor([5, 0, 59])):
        torch.testing.assert_close(llama(tokens, logits_indices=indices), logits[indices])


def test_gradients_flow_through_a_trainable_model():
    llama = Llama.load(DATA / "biases", "cpu", torch.float32, trainable=True)
    tensors = llama.named_tensors().values()
    weights = [part if part._base is None else part._base for part in tensors]
    for weight in weights:
        weight.requires_grad_()
    tokens = EXPECTED["biases.tokens"]
    logits = llama(tokens)
    assert relative(logits.detach(), EXPECTED["biases.logits"]) < 1e-5
    torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in weights)


def test_random_weights_depend_on_the_seed():
    config = Config(**SMALL)
    a, same, other = (Llama(config, seed=seed).named_tensors() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], same[name]) for name in a)
    name = "model.embed_tokens.weight"
    assert not torch.equal(a[name], other[name])


def test_norm_is_computed_in_float32_at_least():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half() * 500
    wide = x.double()  # the square of x is no float16
    _, y = Ops().add_norm(x, None, torch.full((64,), 1.5, dtype=torch.float16), 1e-5)
    expected = wide / wide.square().mean(-1, keepdim=True).sqrt() * 1.5
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=1e-3)


# ---- Loading


def test_nothing_is_left_uninitialized(tmp_path, monkeypatch):
    """Every parameter is filled: poisoned memory never shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kw: empty(*args, **kw).fill_(math.nan))
    for case in CASES:
        llama = Llama.load(DATA / case, "cpu", torch.float32, trainable=True)
        assert not any(p.isnan().any() for p in llama.named_tensors().values())
