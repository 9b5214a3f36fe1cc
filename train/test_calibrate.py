"""GPTQ is the paper's algorithm, AWQ changes nothing but the rounding, and neither is ever worse than rounding on what it saw."""
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config, Quantization
from conftest import SMALL, program
from kvcache import Alone
from model import Llama
from quant import Quantized, dequantize, quantize, unpack4
from train import calibrate
from train.calibrate import DAMP, Moments, awq, errors, fold, gptq, observe, quantize_model
from train.distill import tell
from train.perplexity import perplexity


def inputs(T: int, K: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    """Channels that depend on each other, and are of different size: what rounding does not see."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator, dtype=dtype) * torch.rand(K, generator=generator, dtype=dtype) ** 3
    return torch.randn(T, K, generator=generator, dtype=dtype) @ mix


def weight(N: int, K: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed + 1000), dtype=dtype)


def slow_gptq(w: torch.Tensor, hessian: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The paper's algorithm word for word, in float64: one column after the other is rounded and removed from the inverse Hessian."""
    w, (N, K) = w.clone(), w.shape
    inverse = torch.linalg.inv(hessian + DAMP * hessian.diagonal().mean() * torch.eye(K, dtype=w.dtype))
    integers = torch.empty(N, K)
    for k in range(K):
        if bits == 8:
            scale, zero = quantize(w, 8).scale[:, 0] if k == 0 else scale, torch.zeros(N)
        elif k % group == 0:
            of_group = quantize(w[:, k:k + group], 4, group)
            scale, zero = of_group.scale[:, 0], of_group.zero[:, 0]
        for row in range(N):
            s, z = scale[row].item(), zero[row].item()
            q = min(max(round(w[row, k].item() / s) + z, -127 if bits == 8 else 0), 127 if bits == 8 else 15)
            integers[row, k] = q
            error = (w[row, k].item() - (q - z) * s) / inverse[k, k].item()
            w[row, k + 1:] -= error * inverse[k, k + 1:]
        inverse = inverse - inverse[:, k:k + 1] @ inverse[k:k + 1] / inverse[k, k]               # column and row k are 0 from now on
    return integers


def integers(q: Quantized) -> torch.Tensor:
    return (q.values if q.zero is None else unpack4(q.values)[:, :q.columns]).float()


@pytest.mark.parametrize("bits, K, group, block", [(4, 40, 32, 128), (4, 33, 8, 5), (4, 70, 32, 16), (4, 24, 24, 7), (4, 37, 128, 8), (8, 40, 32, 16), (8, 25, 1, 128)])
@pytest.mark.parametrize("seed", range(3))
def test_gptq_gives_the_integers_of_the_plain_algorithm(monkeypatch, bits, K, group, block, seed):
    monkeypatch.setattr(calibrate, "better", lambda w, hessian, found, rounded: found)
    w, x = weight(6, K, seed), inputs(3 * K, K, seed)
    h = 2 * x.T @ x
    q = gptq(w, h, bits, group, block)
    assert torch.equal(integers(q), slow_gptq(w, h, bits, group)) and not torch.equal(q.values, quantize(w, bits, group).values)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([8, 4]), st.sampled_from([1, 5, 32]), st.integers(1, 60), st.integers(0, 99),
       st.sampled_from(["plain", "same", "dead", "zero", "tiny", "large"]))
def test_no_row_is_worse_than_rounding(N, K, bits, group, T, seed, kind):
    w, x = weight(N, K, seed, torch.float32), inputs(T, K, seed, torch.float32)
    if kind == "same":
        x[:] = x[:1]                                                             # H of rank 1
    x = x * {"zero": 0.0, "tiny": 1e-15, "large": 1e8}.get(kind, 1.0)
    if kind == "dead":
        x[:, ::2] = 0
    h = 2 * x.T @ x
    found, rounded = (w - dequantize(*q) for q in (gptq(w, h, bits, group, 16), quantize(w, bits, group)))
    assert found.isfinite().all() and (errors(found, h) <= errors(rounded, h)).all()


def test_a_row_that_gptq_makes_worse_keeps_rounding_to_the_bit():
    """Seven rows in a hundred or so, and only they."""
    w, x = weight(400, 12, 0, torch.float32), inputs(30, 12, 0, torch.float32)
    h = 2 * x.T @ x
    q, rounded = gptq(w, h, 4, 12), quantize(w, 4, 12)
    same = (q.values == rounded.values).all(1)
    assert 3 < same.sum() < 200
    assert torch.equal(q.scale[same], rounded.scale[same]) and torch.equal(q.zero[same], rounded.zero[same])


@pytest.mark.parametrize("bits", [8, 4])
def test_gptq_is_better_where_channels_depend_on_each_other(bits):
    w, x = weight(50, 64, 0, torch.float32), inputs(1000, 64, 0, torch.float32)
    h = 2 * x.T @ x
    found, rounded = (errors(w - dequantize(*q), h).sum() for q in (gptq(w, h, bits, 32), quantize(w, bits, 32)))
    assert found < 0.75 * rounded


def test_errors_are_those_of_the_output():
    x, w, q = inputs(50, 7, 0), weight(3, 7, 0), weight(3, 7, 1)
    torch.testing.assert_close(errors(w - q, 2 * x.T @ x), (x @ (w - q).T).square().sum(0))


def test_moments_add_up():
    x, m = inputs(50, 7, 0, torch.float32), Moments(7)
    for part in x.split(13):
        m.add(part.bfloat16().float())
    x = x.bfloat16().float()
    torch.testing.assert_close(m.hessian, 2 * x.T @ x)
    torch.testing.assert_close(m.magnitude, x.abs().mean(0))


def test_inputs_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="are the calibration inputs finite"):
        gptq(weight(2, 3, 0), torch.full((3, 3), torch.nan), 4, 32)
    with pytest.raises(ValueError, match="bits is 3"):
        gptq(weight(2, 3, 0), torch.eye(3), 3, 32)


def test_a_hessian_too_singular_for_float32_gets_more_of_its_diagonal(monkeypatch):
    tried, factor = [], torch.linalg.cholesky

    def fussy(x, **how):
        tried.append(x)
        if len(tried) == 1:
            raise torch.linalg.LinAlgError("not positive-definite")
        return factor(x, **how)
    monkeypatch.setattr(torch.linalg, "cholesky", fussy)
    u = calibrate.inverse_factor(torch.eye(3) * 2)
    torch.testing.assert_close(u.T @ u, torch.eye(3) / (2 + 2 * 10 * DAMP))


# ---- AWQ

@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([8, 4]), st.integers(0, 99), st.sampled_from(["plain", "dead", "zero"]))
def test_awq_is_never_worse_than_rounding(N, K, bits, seed, kind):
    w, x = weight(N, K, seed, torch.float32), inputs(50, K, seed, torch.float32)
    x *= 0 if kind == "zero" else 1
    x[:, ::2] *= 0 if kind == "dead" else 1
    h = 2 * x.T @ x
    s = awq(w, h, x.abs().mean(0), bits, 32)
    assert s.shape == (K,) and s.isfinite().all() and (s > 0).all()
    assert errors(w - dequantize(*quantize(w * s, bits, 32)) / s, h).sum() <= errors(w - dequantize(*quantize(w, bits, 32)), h).sum()


def test_awq_spares_the_channels_that_are_large():
    w, x = weight(64, 64, 0, torch.float32), torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    x[:, [3, 40]] *= 50
    h = 2 * x.T @ x
    s = awq(w, h, x.abs().mean(0), 4, 64)
    assert s[3] > 2 * s[4] and s[40] > 2 * s[41]
    scaled, rounded = (errors(w - d, h).sum() for d in (dequantize(*quantize(w * s, 4, 64)) / s, dequantize(*quantize(w, 4, 64))))
    assert scaled < 0.5 * rounded


def model(seed: int = 0, dtype=torch.float64, **config) -> Llama:
    llama, generator = Llama(Config(**{**SMALL, **config}), dtype=dtype, seed=seed), torch.Generator().manual_seed(seed)
    for place in llama.places().values():
        place.mul_(12 if place.ndim > 1 else 1).add_(0.3 * torch.randn(place.shape, dtype=dtype, generator=generator) if place.ndim == 1 else 0)
    return llama


SHAPES = [dict(), dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4, tie_word_embeddings=False), dict(num_key_value_heads=1, intermediate_size=33)]


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_folding_leaves_a_layer_what_it_was(monkeypatch, shape):
    """With any scales, in float64, and grouped heads, and biases. The scale of o_proj's inputs is the same for heads that share values."""
    monkeypatch.setattr(calibrate, "awq", lambda w, hessian, magnitude, bits, group: (magnitude + 0.1).double())
    llama, text = model(**shape), torch.arange(30)
    before, weights, layer = llama(text), {n: p.clone() for n, p in llama.places().items()}, llama.layers[1]
    step = Alone(text)
    arrived = llama.layers[0](llama.embed.rows(text), *llama.turns(text), lambda q, k, v: step.attend(0, q, k, v))
    seen = observe(layer, lambda: layer(arrived, *llama.turns(text), lambda q, k, v: step.attend(1, q, k, v)))
    fold(layer, seen, 4, 32)
    torch.testing.assert_close(llama(text), before, rtol=1e-9, atol=1e-9)
    changed = {name for name, place in llama.places().items() if not torch.equal(place, weights[name])}
    where = "model.layers.1."
    assert changed >= {where + n for n in ("input_layernorm.weight", "post_attention_layernorm.weight", *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
                                           *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")))} and all(n.startswith(where) for n in changed)


@torch.inference_mode()
def test_what_goes_to_the_residual_stream_counts_as_divided_by_its_length():
    llama, text = model(), torch.arange(30)
    layer, step, x = llama.layers[0], Alone(text), llama.embed.rows(text)
    inside: dict[str, torch.Tensor] = {}
    for name in ("qkv_proj", "o_proj", "post_norm", "gate_up_proj", "down_proj"):
        getattr(layer, name).register_forward_pre_hook(lambda _, x, name=name: inside.update({name: x[0]}))
    outs = []
    seen = observe(layer, lambda: outs.append(layer(x, *llama.turns(text), lambda q, k, v: step.attend(0, q, k, v))))
    length = lambda x: x.square().mean(1, keepdim=True).sqrt()
    expected = dict(qkv_proj=inside["qkv_proj"], gate_up_proj=inside["gate_up_proj"], o_proj=inside["o_proj"] / length(inside["post_norm"]),
                    down_proj=inside["down_proj"] / length(outs[0]))
    for name, x in expected.items():
        torch.testing.assert_close(seen[name].hessian.double(), 2 * x.T @ x, rtol=1e-4, atol=1e-4)
    assert not layer._forward_hooks and len(layer.down_proj._forward_pre_hooks) == 1             # observe leaves no hook behind


# ---- Models

def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", [Quantization(8), Quantization(4, 32), Quantization(4, 64, 16, "gptq"), Quantization(8, 32, 8, "gptq"), Quantization(4, 32, 4, "awq"), Quantization(4, 32, 16, "awq+gptq")])
@torch.inference_mode()
def test_a_model_of_any_shape_is_quantized_by_every_method(shape, how):
    texts, lines = [torch.arange(40), torch.arange(100, 160)], []
    expected, used = model(**shape)(torch.arange(60)), model(**shape)
    small = quantize_model(used, how, texts, lines.append)
    assert lines == ["layer 1 of 2", "layer 2 of 2"] and not any(isinstance(layer, type(small.layers[0])) for layer in used.layers)
    assert small.config.quantization == how and all(not place.is_meta for place in (*small.places().values(), small.frequencies))
    assert divergence(expected, small(torch.arange(60))) < (0.01 if how.bits == 8 and how.head_bits > 4 else 0.7)


@torch.inference_mode()
def test_each_layer_sees_what_the_quantized_layers_before_it_make():
    how, texts = Quantization(4, 32, 16, "gptq"), [torch.arange(40), torch.arange(100, 160)]
    small, plain = quantize_model(model(), how, texts), model()
    xs = [plain.embed.rows(text) for text in texts]
    for i, layer in enumerate(plain.layers):
        steps = [(*plain.turns(torch.arange(len(text))), lambda q, k, v, step=Alone(text): step.attend(0, q, k, v)) for text in texts]
        seen = observe(layer, lambda: [layer(x, *step) for x, step in zip(xs, steps)])
        q = gptq(layer.down_proj.weight.float(), seen["down_proj"].hessian, 4, 32)
        assert torch.equal(small.layers[i].down_proj.values, q.values)
        xs = [small.layers[i](x, *step) for x, step in zip(xs, steps)]


@torch.inference_mode()
def test_both_methods_together_round_what_was_folded_for_the_inputs_that_it_then_has():
    how, texts = Quantization(4, 32, 16, "awq+gptq"), [torch.arange(40), torch.arange(100, 160)]
    small, layer = quantize_model(model(), how, texts), model().layers[0]
    plain, first = model(), {name: place.weight.clone() for name, place in layer.named_children()}
    xs, steps = zip(*((plain.embed.rows(text), (*plain.turns(torch.arange(len(text))), lambda q, k, v, step=Alone(text): step.attend(0, q, k, v)))
                      for text in texts))
    look = lambda: observe(layer, lambda: [layer(x, *step) for x, step in zip(xs, steps)])
    seen = look()
    fold(layer, seen, 4, 32)
    for name, now in look().items():
        torch.testing.assert_close(seen[name].hessian, now.hessian, rtol=1e-4, atol=1e-4 * now.hessian.abs().max().item())
        torch.testing.assert_close(seen[name].magnitude, now.magnitude, rtol=1e-4, atol=1e-6)
        q = gptq(getattr(layer, name).weight.float(), seen[name].hessian, 4, 32)
        assert torch.equal(getattr(small.layers[0], name).values, q.values) and not torch.equal(getattr(layer, name).weight, first[name])
    assert torch.equal(small.layers[0].input_norm.weight, layer.input_norm.weight)


def test_calibration_needs_text():
    for method in ("gptq", "awq", "awq+gptq"):
        with pytest.raises(ValueError, match=rf"{re.escape(method)} looks at text, and there is none"):
            quantize_model(model(), Quantization(4, 32, 8, method))


@torch.inference_mode()
def losses() -> list[float]:
    """On texts that the embedded model told itself: how much further from the truth INT8 is; and how far from its logits INT8, INT4 and GPTQ are."""
    target = Llama.load("tiny", "cpu", torch.float32, trainable=True).requires_grad_(False)
    told = tell(target, 32, 72, target.config.eos_token_ids[0], seed=1).tokens.view(32, -1)
    held, heard, found = list(told[:8]), list(told[8:]), list[float]()
    before = [target(text) for text in held]
    for how in (Quantization(8), Quantization(4), Quantization(4, method="gptq")):                     # groups of 128
        small = calibrate.quantized("tiny", how, heard, "cpu", torch.float32, progress=lambda line: None).pack()
        if how.bits == 8:
            found.append(perplexity(small, held) / perplexity(target, held))
        found.append(sum(divergence(a, small(text)) for a, text in zip(before, held)) / 8)
    return found


@pytest.mark.meanwhile(program, "-c", "from train.test_calibrate import losses; print(*losses())")
def test_on_the_embedded_model_int8_is_free_and_gptq_recovers_half_of_what_rounding_loses(meanwhile):
    done = meanwhile()
    assert done.returncode == 0, done.stderr
    ratio, int8, int4, gptq = map(float, done.stdout.split())
    assert ratio == pytest.approx(1, rel=0.002) and int8 < 0.002 and gptq < 0.5 * int4
