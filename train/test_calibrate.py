"""GPTQ is the paper's algorithm, AWQ changes only the rounding; neither is worse than rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.weights import Layer
from errors import UserError
from kernels import Linear
from model import Llama
from quant import Quantized, quantize, rounded_product, unpack4
from testing.models import SMALL
from testing.pages import ROOT
from tokenizer import Tokenizer
from train import calibrate
from train.calibrate import (
    DAMP,
    PRODUCTS,
    SINK,
    Moments,
    awq,
    errors,
    first_input,
    fold,
    gptq,
    next_input,
    observe,
    packed,
    quantize_model,
    relative_loss,
    smooth,
    unshared,
)


def inputs(T: int, K: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    """Channels that depend on each other, and are of different size: what rounding does not see."""
    generator = torch.Generator().manual_seed(seed)
    mix = (
        torch.randn(K, K, generator=generator, dtype=dtype)
        * torch.rand(K, generator=generator, dtype=dtype) ** 3
    )
    return torch.randn(T, K, generator=generator, dtype=dtype) @ mix


def weight(N: int, K: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed + 1000), dtype=dtype)


def slow_gptq(w: torch.Tensor, hessian: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The paper's algorithm in float64, in descending order of H's diagonal, on the grids of W.

    Each column is rounded, then leaves the inverse Hessian.
    """
    plain = quantize(w, bits, group)
    w, (N, K) = w.clone(), w.shape
    inverse = torch.linalg.inv(
        hessian + DAMP * hessian.diagonal().mean() * torch.eye(K, dtype=w.dtype)
    )
    integers = torch.empty(N, K)
    low, high = (-127, 127) if bits == 8 else (0, 15)
    for k in sorted(range(K), key=lambda k: -hessian[k, k].item()):
        for row in range(N):
            s = plain.scale[row, k // plain.group].item()
            z = 0 if plain.zero is None else plain.zero[row, k // plain.group].item()
            q = min(max(round(w[row, k].item() / s) + z, low), high)
            integers[row, k] = q
            error = (w[row, k].item() - (q - z) * s) / inverse[k, k].item()
            w[row] -= error * inverse[k]  # 0 for columns that have left
        inverse = (
            inverse - inverse[:, k : k + 1] @ inverse[k : k + 1] / inverse[k, k]
        )  # column and row k are 0 now
    return integers


def integers(q: Quantized) -> torch.Tensor:
    return (q.values if q.zero is None else unpack4(q.values)[:, : q.columns]).float()


def test_gptq_gives_the_integers_of_the_plain_algorithm(monkeypatch):
    monkeypatch.setattr(calibrate, "better_rows", lambda w, hessian, new, rounded: new)
    cases = [(4, 40, 32, 16), (4, 33, 8, 5), (4, 24, 24, 128), (4, 37, 128, 1)]
    cases += [(8, 40, 32, 16), (8, 25, 1, 128), (8, 26, 1, 1)]
    for seed, (bits, K, group, block) in enumerate(cases):
        monkeypatch.setattr(calibrate, "BLOCK", block)
        w = weight(6, K, seed)
        x = inputs(3 * K, K, seed)
        hessian = 2 * x.T @ x
        q = gptq(w, hessian, bits, group)
        assert torch.equal(integers(q), slow_gptq(w, hessian, bits, group))
        assert not torch.equal(q.values, quantize(w, bits, group).values)
        assert torch.equal(q.scale, quantize(w, bits, group).scale)


@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from([8, 4]),
    st.sampled_from([1, 5, 32]),
    st.integers(1, 60),
    st.integers(0, 99),
    st.sampled_from(["plain", "same", "dead", "zero", "tiny", "large"]),
)
def test_no_row_is_worse_than_rounding(N, K, bits, group, T, seed, kind):
    w, x = weight(N, K, seed, torch.float32), inputs(T, K, seed, torch.float32)
    if kind == "same":
        x[:] = x[:1]  # H of rank 1
    x = x * {"zero": 0.0, "tiny": 1e-15, "large": 1e8}.get(kind, 1.0)
    if kind == "dead":
        x[:, ::2] = 0
    h = 2 * x.T @ x
    found, rounded = (
        w - q.dequantize() for q in (gptq(w, h, bits, group), quantize(w, bits, group))
    )
    assert found.isfinite().all() and (errors(found, h) <= errors(rounded, h)).all()


def test_a_row_that_gptq_makes_worse_keeps_rounding_to_the_bit():
    """Seven rows in a hundred or so, and only they."""
    w, x = weight(400, 12, 0, torch.float32), inputs(30, 12, 0, torch.float32)
    h = 2 * x.T @ x
    q, rounded = gptq(w, h, 4, 12), quantize(w, 4, 12)
    same = (q.values == rounded.values).all(1)
    assert 3 < same.sum() < 200


def layer_of_tiny(layer: int, tokens: int) -> tuple[Layer, dict[str, Moments]]:
    """A layer of tiny, and the moments of its inputs for so many tokens of tiny's stories."""
    stories = (
        (ROOT / "models/tiny/README.md").read_text(encoding="utf-8").split("## Ten samples")[1]
    )
    llama = Llama.load("tiny", "cpu", torch.float32, trainable=True)
    text = Tokenizer.load(ROOT / "models/tiny").prompt(stories)[:tokens]
    read = first_input(llama, torch.tensor(text))
    for before in llama.layers[:layer]:
        read = next_input(llama, packed(llama, before), read)
    return llama.layers[layer], observe(llama, llama.layers[layer], [read])


def remaining_error(
    w: torch.Tensor, calibrated: torch.Tensor, hessian: torch.Tensor, bits: int = 4
) -> float:
    """GPTQ's error over that of rounding, for the inputs with `hessian`."""
    new = errors(w - gptq(w, calibrated, bits).dequantize(), hessian).sum()
    return (new / errors(w - quantize(w, bits).dequantize(), hessian).sum()).item()


@pytest.mark.parametrize("bits", [8, 4])
def test_gptq_is_better_where_channels_depend_on_each_other(bits):
    x = inputs(1000, 64, 0, torch.float32)
    assert remaining_error(weight(50, 64, 0, torch.float32), x.T @ x, x.T @ x, bits) < 0.75


@torch.inference_mode()
def test_columns_of_most_energy_come_first():
    """On tiny; in another order nearly twice as much of the error stays."""
    layer, seen = layer_of_tiny(0, 512)
    for name, most in (("qkv", 0.12), ("down", 0.06)):
        hessian = seen[name].hessian
        assert remaining_error(getattr(layer, name).weight, hessian, hessian) < most


@torch.inference_mode()
def test_first_token_is_better_than_by_rounding():
    """On tiny; if it counts as the others do, it is worse."""
    layer, seen = layer_of_tiny(1, 512)
    _, first = layer_of_tiny(1, 1)
    assert remaining_error(layer.down.weight, seen["down"].hessian, first["down"].hessian) < 0.2


def test_errors_are_those_of_the_output():
    x, w, q = inputs(50, 7, 0), weight(3, 7, 0), weight(3, 7, 1)
    torch.testing.assert_close(errors(w - q, 2 * x.T @ x), (x @ (w - q).T).square().sum(0))


def test_a_loss_that_is_told_is_that_of_the_weights_or_of_the_output():
    x, w = inputs(50, 8, 0, torch.float32), weight(3, 8, 0, torch.float32)
    small = Linear(quantize(w, 4, 8))
    off = w - small.weight.dequantize()
    for hessian, told in (
        (None, off.norm() / w.norm()),
        (2 * x.T @ x, (x @ off.T).norm() / (x @ w.T).norm()),
    ):
        assert relative_loss(Linear(w), small, hessian) == pytest.approx(told.item(), rel=1e-4)


def test_moments_add_up():
    """Of texts; the first token of each counts more."""
    x, m = inputs(50, 7, 0, torch.float32).bfloat16(), Moments(7)
    texts = x.split(13)
    for text in texts:
        m.add(text)
    x = x.float()
    more = sum(SINK * len(text) * text[0].float().outer(text[0].float()) for text in texts)
    torch.testing.assert_close(m.hessian, 2 * (x.T @ x + more))
    torch.testing.assert_close(m.magnitude, x.abs().sum(0))
    assert torch.equal(m.largest, x.abs().amax(0))  # of all texts, not of the last
    assert torch.equal(m.sample, torch.cat([text[::8] for text in x.split(13)]))


def test_only_4_and_8_bits():
    with pytest.raises(UserError, match="bits is 3"):
        gptq(weight(2, 3, 0), torch.eye(3), 3, 32)


# ---- AWQ


def awq_errors(w, x, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AWQ's scale, and the error of the outputs with it and without it."""
    h = 2 * x.T @ x
    s = awq(w, h, x.abs().mean(0), bits, group)
    scaled = quantize(w * s, bits, group).dequantize() / s
    rounded = quantize(w, bits, group).dequantize()
    return s, errors(w - scaled, h).sum(), errors(w - rounded, h).sum()


@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from([8, 4]),
    st.integers(0, 99),
    st.sampled_from(["plain", "dead", "zero"]),
)
def test_awq_is_never_worse_than_rounding(N, K, bits, seed, kind):
    w, x = weight(N, K, seed, torch.float32), inputs(50, K, seed, torch.float32)
    x *= 0 if kind == "zero" else 1
    x[:, ::2] *= 0 if kind == "dead" else 1
    s, scaled, rounded = awq_errors(w, x, bits, 32)
    assert s.shape == (K,) and s.isfinite().all() and (s > 0).all()
    assert scaled <= rounded


def test_awq_spares_the_channels_that_are_large():
    w, x = (
        weight(64, 64, 0, torch.float32),
        torch.randn(500, 64, generator=torch.Generator().manual_seed(0)),
    )
    x[:, [3, 40]] *= 50
    s, scaled, rounded = awq_errors(w, x, 4, 64)
    assert s[3] > 2 * s[4] and s[40] > 2 * s[41]
    assert scaled < 0.5 * rounded


def model(seed: int = 0, dtype=torch.float64, **config) -> Llama:
    llama, generator = (
        Llama(Config(**{**SMALL, **config}), dtype=dtype, seed=seed),
        torch.Generator().manual_seed(seed),
    )
    for place in llama.named_tensors().values():
        if place.ndim == 1:
            place.add_(0.3 * torch.randn(place.shape, dtype=dtype, generator=generator))
        else:
            place.mul_(12)
    return llama


SHAPES = [
    dict(),
    dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4, tie_word_embeddings=False),
    dict(num_key_value_heads=1, intermediate_size=33, model_type="qwen2"),
    dict(model_type="qwen3"),
]


@pytest.mark.parametrize(
    "how", [Quantization(4, 32), Quantization(8, method="smoothquant", activations=8)]
)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_folding_leaves_a_layer_what_it_was(monkeypatch, shape, how):
    """With any scales, grouped heads, biases. Heads that share values share a scale of o_proj."""
    monkeypatch.setattr(
        calibrate, "awq", lambda w, hessian, magnitude, bits, group: (magnitude + 0.1).double()
    )
    llama = model(**shape)
    text = torch.arange(30)
    before = llama(text)
    weights = {name: tensor.clone() for name, tensor in llama.named_tensors().items()}
    layer = llama.layers[1]
    seen = observe(llama, layer, [next_input(llama, llama.layers[0], first_input(llama, text))])
    fold(layer, llama.config.quantized(how), seen)
    torch.testing.assert_close(llama(text), before, rtol=1e-9, atol=1e-9)
    changed = {
        name
        for name, place in llama.named_tensors().items()
        if not torch.equal(place, weights[name])
    }
    products = [
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    ]
    every = ["input_layernorm", "post_attention_layernorm", *products]
    assert changed >= {f"model.layers.1.{name}.weight" for name in every}
    assert all(name.startswith("model.layers.1.") for name in changed)


@torch.inference_mode()
def test_inputs_are_those_of_the_model_to_the_bit(monkeypatch):
    """Those that go to the residual stream count as divided by its length."""
    llama = model(dtype=torch.float32, model_type="qwen3")
    layer = llama.layers[0]
    ops = llama.ops
    text = first_input(llama, torch.arange(30))
    moments = observe(llama, layer, [text])
    inputs = []
    streams = []
    for name in ("linear", "swiglu"):
        run = getattr(ops, name)

        def seen(x, weight, run=run):
            if not inputs or inputs[-1] is not x:  # plain swiglu calls linear
                inputs.append(x)
            return run(x, weight)

        monkeypatch.setattr(ops, name, seen)
    add_norm = ops.add_norm
    monkeypatch.setattr(ops, "add_norm", lambda *x: streams.append(add_norm(*x)) or streams[-1])
    after = next_input(llama, packed(llama, layer), text)

    def length(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(1, keepdim=True).sqrt()

    inputs[1] = inputs[1] / length(streams[1][0])
    inputs[3] = inputs[3] / length(after.x + after.delta)
    for name, x in zip(PRODUCTS, inputs, strict=True):
        expected = Moments(x.shape[1])
        expected.add(x)
        assert torch.equal(moments[name].hessian, expected.hessian), name


# ---- SmoothQuant


def test_smoothing_spares_inputs_of_8_bits_the_channels_that_are_large():
    """The error of a product of integers, beside that without folding."""
    w, x = (
        weight(64, 96, 0, torch.float32),
        torch.randn(500, 96, generator=torch.Generator().manual_seed(0)),
    )
    x[:, [3, 40]] *= 100
    s = smooth(w, x.abs().amax(0), x, unshared)
    lost = [
        (rounded_product(x / s, quantize(w * s, 8)) - x @ w.T).norm() for s in (torch.ones(96), s)
    ]
    assert lost[1] < 0.25 * lost[0]


def test_smooth_takes_the_best_of_the_papers_scales(monkeypatch):
    """s = max|x|^a / max|w|^(1 − a), with a = 1/n, 2/n, …, 1."""
    w = weight(64, 96, 0, torch.float32) * torch.linspace(0.1, 2, 96)
    x = torch.randn(100, 96, generator=torch.Generator().manual_seed(0))
    x[:, 40] *= 100
    largest_x = x.abs().amax(0)
    largest_w = w.abs().amax(0)
    for n in (1, 2, 10):
        monkeypatch.setattr(calibrate, "CANDIDATES", n)
        candidates = [largest_x ** (i / n) / largest_w ** (1 - i / n) for i in range(1, n + 1)]
        costs = []
        for s in candidates:
            product = rounded_product(x / s, quantize(w * s, 8))
            costs.append((product - x @ w.T).square().sum())
        best = candidates[torch.stack(costs).argmin()]
        torch.testing.assert_close(smooth(w, largest_x, x, unshared), best)


# ---- Models


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


RECIPES = [
    Quantization(8),
    Quantization(4, 32),
    Quantization(4, 64, 16, "gptq"),
    Quantization(8, 32, 8, "gptq"),
    Quantization(4, 32, 4, "awq"),
    Quantization(4, 32, 16, "awq+gptq"),
    Quantization("fp8"),
    Quantization("nf4", 32),
    Quantization("nf4", 64, 8, "awq"),
    Quantization(8, activations=8),
    Quantization("fp8", activations=8),
    Quantization(8, method="smoothquant", activations=8),
]


@torch.inference_mode()
def test_model_is_quantized_by_every_method():
    """Every method with one shape, every shape with three methods."""
    texts = [torch.arange(40), torch.arange(100, 160)]
    text = torch.arange(60)
    methods = [RECIPES[5], RECIPES[8], RECIPES[-1]]
    cases = [({}, how) for how in RECIPES] + [(s, how) for s in SHAPES[1:] for how in methods]
    for shape, how in cases:
        llama = model(**shape)
        expected = llama(text)
        small = quantize_model(llama, how, texts)
        assert not llama.layers
        assert small.config.quantization == how
        for layer in small.layers:
            for name in PRODUCTS:
                assert isinstance(getattr(layer, name).weight, Quantized)
            assert layer.down.weight.input_bits == how.activations
        most = 0.01 if how.bits == 8 and how.head_bits > 4 else 0.7
        assert divergence(expected, small(text)) < most, how


@torch.inference_mode()
def test_each_layer_sees_what_the_quantized_layers_before_it_make():
    how, texts = Quantization(4, 32, 16, "gptq"), [torch.arange(40), torch.arange(100, 160)]
    small, plain = quantize_model(model(), how, texts), model()
    read = [first_input(plain, text) for text in texts]
    for layer, new in zip(plain.layers, small.layers):
        q = gptq(layer.down.weight.float(), observe(plain, layer, read)["down"].hessian, 4, 32)
        assert torch.equal(new.down.weight.values, q.values)
        read = [next_input(small, new, text) for text in read]


@torch.inference_mode()
def test_both_methods_together_round_what_was_folded_for_the_inputs_that_it_then_has():
    how, texts = Quantization(4, 32, 16, "awq+gptq"), [torch.arange(40), torch.arange(100, 160)]
    small, plain = quantize_model(model(), how, texts), model()
    layer, first = plain.layers[0], model().layers[0]
    read = [first_input(plain, text) for text in texts]
    seen = observe(plain, layer, read)
    fold(layer, small.config, seen)
    for name, now in observe(plain, layer, read).items():
        tolerance = 1e-4 * now.hessian.abs().max().item()
        torch.testing.assert_close(seen[name].hessian, now.hessian, rtol=1e-4, atol=tolerance)
        torch.testing.assert_close(seen[name].magnitude, now.magnitude, rtol=1e-4, atol=1e-4)
        q = gptq(getattr(layer, name).weight.float(), seen[name].hessian, 4, 32)
        assert torch.equal(getattr(small.layers[0], name).weight.values, q.values)
        assert not torch.equal(getattr(layer, name).weight, getattr(first, name).weight)
    assert torch.equal(small.layers[0].input_norm, layer.input_norm)
