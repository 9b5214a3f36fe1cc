"""Calibration: choose a weight's integers by their effect on the layer's output, not by the nearest grid point.

What counts is not |W − Q| but the error of the output, for the inputs X [T, K] of a text:

    error(Q) = |X (W − Q)ᵀ|² = Σ over rows d of W − Q of d H dᵀ / 2,         H = 2 XᵀX, the Hessian of each row: [K, K]

  - GPTQ rounds one column after the other, and after each moves the columns that are not rounded yet, to compensate its
    error. With the upper Cholesky factor U of H⁻¹ (UᵀU = H⁻¹), the best move after rounding column k is

        e = (w_k − q_k) / U_kk,      w_j ← w_j − e U_kj   for j > k

    A group's grid is chosen just before its first column is rounded. A row that GPTQ makes worse is rounded to nearest.
  - AWQ rounds to nearest, but multiplies each input channel by a scale s first: W diag(s) is rounded, and 1 / s is
    folded into the weight before: a norm's, v_proj's rows before o_proj, up_proj's before down_proj. s = (mean |x|)^a,
    with the a from 0 (no scale) to 1, of a few candidates, that makes the error smallest.
  - SmoothQuant is for inputs that are rounded, too, to 8 bits with a scale for each token. A few channels can be a
    hundred times larger than the others, which would round to 0. It folds as AWQ does, s = max|x|^a / max|w|^(1 − a):
    outliers move from x to W. Of a few candidates it takes the a that is best on some of the tokens, or no scale.

The methods need H, mean |x| and max |x| of each product's inputs, and some inputs (`Moments`). A model is quantized
layer by layer, with the inputs that the quantized layers before make: memory holds the model and one layer more.

Invariant: on the calibration text, no row of a GPTQ product and no AWQ product is worse than by rounding to nearest.
Cost: two passes over the text, and some (K + N) K² operations a product. Not covered: act-order, AWQ's clipping.

GPTQ: Frantar et al. 2023 (arXiv:2210.17323), with the update of OBQ (2208.11580). AWQ: Lin et al. 2023 (2306.00978).
SmoothQuant: Xiao et al. 2022 (2211.10438), with one a for all products.

    W: [N, K] · X: [T, K] inputs of T calibration tokens · H: [K, K] · G K/V heads · R query heads of each · D head size
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.shell import say
from checkpoint.config import Config
from checkpoint.formats import Quantization
from errors import UserError
from kernels import Linear, Ops, Step
from model import Layer, Llama
from quant import Kind, Quantized, dequantize, affine_grid, pack4, quantize, rounded_product

DAMP = 0.1  # share of its mean added to H's diagonal; the paper: 0.01, 16 times the text
PRODUCTS = ("qkv", "o", "gate_up", "down")
LayerInput = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], Step]  # x, delta, rope, step


class Moments:
    """The statistics of a product's inputs that calibration needs."""

    def __init__(self, columns: int, device: torch.device | str = "cpu"):
        self.hessian = torch.zeros(columns, columns, device=device)  # Σ 2 xᵀx: [K, K]
        self.total, self.tokens = torch.zeros(columns, device=device), 0  # Σ |x|: [K]
        self.largest = torch.zeros(columns, device=device)  # max |x|: [K]
        self.some = torch.zeros(0, columns, device=device)  # every eighth token's: [., K]

    def add(self, x: Tensor) -> None:  # [T, K]
        x = x.float()
        self.hessian.addmm_(x.T, x, alpha=2)
        self.total, self.tokens = self.total + x.abs().sum(0), self.tokens + len(x)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.some = torch.cat((self.some, x[::8]))

    def divide(self, s: Tensor) -> None:
        """Divide each channel of all inputs by its s: [K]."""
        self.hessian /= s.outer(s)
        self.total /= s
        self.largest /= s
        self.some /= s

    @property
    def magnitude(self) -> Tensor:
        """mean |x| of each channel: [K]."""
        return self.total / max(1, self.tokens)


def errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """What each row of W − Q adds to the squared error of the output: [N, K], [K, K] -> [N]."""
    return ((difference @ hessian) * difference).sum(1) / 2


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper U with UᵀU = H⁻¹. H is damped: its diagonal grows a little, by 1 for a channel that was always 0; more if
    float32 fails. ValueError if there is no factor."""
    diagonal = hessian.diagonal()
    for damp in (DAMP, 10 * DAMP, 100 * DAMP):
        damped = hessian + torch.diag(damp * diagonal.mean() + (diagonal == 0))
        with suppress(torch.linalg.LinAlgError):
            return torch.linalg.cholesky(
                torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True
            )
    raise UserError("the Hessian has no Cholesky factor: are the calibration inputs finite?")


@torch.no_grad()
def gptq(w: Tensor, hessian: Tensor, bits: int, group: int = 128, block: int = 128) -> Quantized:
    """W: [N, K], quantized by GPTQ for inputs with this H: [K, K], in w's dtype. Blocks of columns only save time."""
    rounded, hessian, (N, K) = quantize(w, bits, group), hessian.to(w.dtype), w.shape
    group, (low, high) = rounded.group, (-127, 127) if bits == 8 else (0, 15)
    U, free, q = inverse_factor(hessian), w.clone(), torch.empty_like(w)
    scale, zero = rounded.scale.clone(), None if bits == 8 else rounded.zero.clone()
    for start in range(0, K, block):
        stop = min(start + block, K)
        e = torch.zeros(N, stop - start, dtype=w.dtype, device=w.device)
        for k in range(start, stop):
            g = k // group
            if bits == 4 and k % group == 0:  # from `stop` on, `free` lacks moves
                ahead = free[:, k : k + group].clone()
                if k + group > stop:
                    ahead[:, stop - k :] -= e @ U[start:stop, stop : k + group]
                scale[:, g, None], zero[:, g, None] = affine_grid(ahead, group)
            s, z = scale[:, g].to(w.dtype), 0 if zero is None else zero[:, g]
            q[:, k] = ((free[:, k] / s).round() + z).clamp_(low, high)
            e[:, k - start] = (free[:, k] - (q[:, k] - z) * s) / U[k, k]
            free[:, k + 1 : stop] -= e[:, k - start, None] * U[k, k + 1 : stop]
        free[:, stop:] -= e @ U[start:stop, stop:]
    found = rounded._replace(
        values=q.to(torch.int8) if bits == 8 else pack4(q.to(torch.uint8)), scale=scale, zero=zero
    )
    return better(w, hessian, found, rounded)


def better(w: Tensor, hessian: Tensor, found: Quantized, rounded: Quantized) -> Quantized:
    """Row by row, `found` where its error is smaller, else `rounded` (also where an error is NaN)."""
    left, lost = (errors(w - dequantize(*q, dtype=w.dtype), hessian) for q in (found, rounded))
    parts = (
        a if a is None else torch.where((left < lost)[:, None], a, b)
        for a, b in zip(found[:3], rounded[:3])
    )
    return Quantized(*parts, found.columns, found.group)


@torch.no_grad()
def awq(
    w: Tensor, hessian: Tensor, magnitude: Tensor, bits: Kind, group: int = 128, steps: int = 10
) -> Tensor:
    """AWQ's scale s of each input channel: [K], with the smallest error of rounding W diag(s); all 1 if none helps."""
    mean = magnitude.float().clamp(min=1e-4 * magnitude.max().item() + 1e-30)
    powers = (mean.pow(a / steps) for a in range(1, steps + 1))
    centred = [s / (s.max().sqrt() * s.min().sqrt()) for s in powers]  # around 1
    cost = lambda s: errors(w - dequantize(*quantize(w * s, bits, group)) / s, hessian).sum().item()
    return min([torch.ones_like(mean), *centred], key=cost)


@torch.no_grad()
def smooth(
    w: Tensor, largest: Tensor, x: Tensor, share: Callable[[Tensor], Tensor], steps: int = 10
) -> Tensor:
    """SmoothQuant's scale s of each input channel: [K], with the smallest error of an INT8 x Wᵀ; 1s if none helps."""
    most_x, most_w = (
        most.float().clamp(min=1e-4 * most.max().item() + 1e-30)
        for most in (largest, w.abs().amax(0))
    )
    scales = (share(most_x.pow(a / steps) / most_w.pow(1 - a / steps)) for a in range(1, steps + 1))
    cost = lambda s: (rounded_product(x / s, quantize(w * s, 8)) - x @ w.T).square().sum().item()
    return min([torch.ones_like(most_x), *scales], key=cost)


class Observed:
    """The operations `ops`, with the last input of each product and each norm kept, by the id of its weight."""

    forward, draft = Ops.forward, Ops.draft  # layer by layer

    def __init__(self, ops: Ops):
        self.ops, self.inputs = ops, dict[int, Tensor]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        self.inputs[id(weight)] = x
        return self.ops.linear(x, weight)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.inputs[id(weight)], y = self.ops.add_norm(x, delta, weight, eps)
        return self.inputs[id(weight)], y


def prepared(llama: Llama, layer: Layer) -> Layer:
    """The layer with its products in the format that this machine multiplies fastest."""
    return replace(
        layer,
        **{name: llama.ops.prepare(getattr(layer, name), llama.dtype, name) for name in PRODUCTS},
    )


def observe(llama: Llama, layer: Layer, texts: Sequence[LayerInput]) -> dict[str, Moments]:
    """The moments of each product's inputs when all texts go through the layer.

    Inputs of o_proj and down_proj are divided by the length of the residual stream, as the next norm will do: in some
    models a few tokens are a thousand times as long as the others, and integers would be chosen for these alone."""
    seen = {name: Moments(getattr(layer, name).weight.shape[1], llama.device) for name in PRODUCTS}
    observed, fast = copy(llama), prepared(llama, layer)
    observed.ops = ops = Observed(llama.ops)
    for text in texts:
        x, delta = observed.through(fast, *text, 0)
        for name, stream in zip(PRODUCTS, (None, ops.inputs[id(layer.post_norm)], None, x + delta)):
            length = (
                1
                if stream is None
                else stream.float().square().mean(1, keepdim=True).sqrt().clamp(min=1e-10)
            )
            seen[name].add(ops.inputs[id(getattr(fast, name))] / length)
    return seen


def fold(layer: Layer, config: Config, seen: dict[str, Moments]) -> None:
    """AWQ, SmoothQuant: multiply each product's weight by its s, and divide the weight before it. The layer's output
    stays the same; `seen` follows. config: the model's, with the quantization to come."""
    how, G, D, F = (
        config.quantization,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    )
    R, v, up = (
        config.num_attention_heads // G,
        slice(-G * D, None),
        slice(F, None),
    )  # v: rows of qkv; up: of gate_up
    shared = lambda x: (
        x.view(G, R, D).mean(1, keepdim=True).expand(G, R, D).reshape(-1)
    )  # by heads that share a v
    for name, before, rows in (
        ("down", layer.gate_up, up),
        ("o", layer.qkv, v),
        ("gate_up", [layer.post_norm], slice(None)),
        ("qkv", [layer.input_norm], slice(None)),
    ):
        weight, now, share = (
            getattr(layer, name).weight,
            seen[name],
            shared if name == "o" else lambda x: x,
        )
        s = (
            smooth(weight.float(), now.largest, now.some, share)
            if how.method == "smoothquant"
            else awq(weight.float(), now.hessian, share(now.magnitude), how.bits, how.group)
        )
        weight.mul_(s)
        seen[name].divide(s)
        s = s.view(G, R, D)[:, 0].reshape(-1) if name == "o" else s
        for whole in (part for part in before if part is not None):  # there may be no bias
            whole[rows].div_(s.view(-1, *[1] * (whole.ndim - 1)))


def smaller(
    linear: Linear, bits: Kind, group: int, hessian: Tensor | None = None, inputs: int = 16
) -> Linear:
    """`linear` with a quantized weight, by GPTQ if there is a Hessian. 16 bits: unchanged."""
    if bits == 16:
        return linear
    w = linear.weight.float()
    q = quantize(w, bits, group) if hessian is None else gptq(w, hessian, bits, group)
    return linear._replace(weight=q._replace(inputs=inputs))


@torch.no_grad()
def quantize_model(
    llama: Llama,
    how: Quantization,
    texts: Sequence[Tensor] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Llama:
    """The model with quantized weights. `llama` loses its layers, one after the other. Neither model is prepared.
    texts: pieces of the calibration text, int64[T] each. ValueError if the method needs texts, and there are none."""
    if how.method != "rtn" and not texts:
        raise UserError(f"{how.method} looks at text, and there is none: give some, or use rtn")
    result = copy(llama)
    result.config, result.layers = llama.config.quantized(how), []
    read: list[LayerInput] = []
    for text in texts if how.method != "rtn" else ():
        step = Step.alone(1, len(text), llama.device)
        x = llama.ops.embed(text.to(llama.device), llama.embed, llama.dtype)
        read.append((x, None, llama.rope(step.places.positions), step))
    for i in range(count := len(llama.layers)):
        progress(f"layer {i + 1} of {count}")
        layer = llama.layers.pop(0)
        seen = observe(llama, layer, read) if read else {}
        if "awq" in how.method or how.method == "smoothquant":
            fold(layer, result.config, seen)
        hessians = {name: moments.hessian for name, moments in seen.items() if "gptq" in how.method}
        weights = {
            name: smaller(
                getattr(layer, name), how.bits, how.group, hessians.get(name), how.activations
            )
            for name in PRODUCTS
        }
        result.layers.append(replace(layer, **weights))
        if read:
            fast = prepared(llama, result.layers[i])
            read = [(*llama.through(fast, *text, i), *text[2:]) for text in read]
    result.embed = smaller(llama.embed, how.head_bits, how.group)
    result.head = (
        result.embed if llama.head is llama.embed else smaller(llama.head, how.head_bits, how.group)
    )
    return result


def quantized(
    name: str | Path,
    how: Quantization | None,
    texts: Sequence[Tensor] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], None] = say,
) -> Llama:
    """The model of this name, quantized layer by layer, not prepared. how None: as it is."""
    llama = Llama.load(name, device, dtype, trainable=True).requires_grad_(False)
    return llama if how is None else quantize_model(llama, how, texts, progress)


def size(llama: Llama) -> int:
    """Bytes of all weights, scales included, unquantized ones in 16 bits; tied embedding and head count once."""
    return sum(min(2, place.itemsize) * place.numel() for place in llama.places().values())
