"""Calibration: choose the integers of a weight by what they do to the layer's output, not by what is nearest.

What matters is not |W − Q| but the output, for the inputs X [T, K] of a text:

    error(Q) = |X (W − Q)ᵀ|² = Σ over rows d of W − Q of d H dᵀ / 2,         H = 2 XᵀX, the Hessian of each row: [K, K]

  - GPTQ rounds one column after the other, and after each moves the columns that are still free to make good for it.
    With U, the upper Cholesky factor of H⁻¹ (UᵀU = H⁻¹), the best move after rounding column k is

        e = (w_k − q_k) / U_kk,      w_j ← w_j − e U_kj   for j > k

    A group's grid is chosen when its first column's turn comes. A row that GPTQ makes worse keeps rounding.
  - AWQ keeps rounding, but scales each input channel up before: W diag(s) is rounded, and 1 / s folded into what comes
    before: a norm's weight, v_proj's rows before o_proj, up_proj's before down_proj. s = (mean |x|)^a, with the a of a
    grid from 0 (rounding itself) to 1 that makes the error smallest.

Both need of the text only H and mean |x| for each product (`Moments`). A model is done layer by layer, each with the
inputs that the quantized layers before it make, so memory holds the model and one layer more.

Invariant: on the calibration text, no row of a GPTQ product and no AWQ product is worse than rounding.
Cost: two passes over the text, and some (K + N) K² operations a product. Not covered: act-order, AWQ's clipping.

GPTQ: Frantar et al. 2023 (arXiv:2210.17323), with the update of OBQ (2208.11580). AWQ: Lin et al. 2023 (2306.00978).

    W: [N, K] · X: [T, K] inputs of T calibration tokens · H: [K, K] · G K/V heads · R query heads of each · D head size
"""
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels import Linear, Ops, Step
from model import Layer, Llama
from quant import Quantized, dequantize, grid4, pack4, quantize
from shell import say
from weights import Config, Quantization

DAMP = 0.1                              # of H's mean diagonal is added to it; 0.01 in the paper, with 16 times the text
PRODUCTS = ("qkv", "o", "gate_up", "down")
LayerInput = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], Step]                  # x, delta, rope, step


class Moments:
    """What calibration keeps of a product's inputs."""

    def __init__(self, columns: int, device: torch.device | str = "cpu"):
        self.hessian = torch.zeros(columns, columns, device=device)                     # Σ 2 xᵀx: [K, K]
        self.total, self.tokens = torch.zeros(columns, device=device), 0                # Σ |x|: [K]

    def add(self, x: Tensor) -> None:                                                   # [T, K]
        x = x.float()
        self.hessian.addmm_(x.T, x, alpha=2)
        self.total, self.tokens = self.total + x.abs().sum(0), self.tokens + len(x)

    def divide(self, s: Tensor) -> None:
        """As if each channel of all inputs had been divided by its s: [K]."""
        self.hessian /= s.outer(s)
        self.total /= s

    @property
    def magnitude(self) -> Tensor:
        """mean |x| of each channel: [K]."""
        return self.total / max(1, self.tokens)


def errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """What each row of W − Q adds to the squared error of the output: [N, K], [K, K] -> [N]."""
    return ((difference @ hessian) * difference).sum(1) / 2


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper U with UᵀU = H⁻¹. A channel that was always 0 gets a diagonal of 1, and all get a little; more, where
    float32 was not enough."""
    diagonal = hessian.diagonal()
    for damp in (DAMP, 10 * DAMP, 100 * DAMP):
        damped = hessian + torch.diag(damp * diagonal.mean() + (diagonal == 0))
        with suppress(torch.linalg.LinAlgError):
            return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    raise ValueError("the Hessian has no Cholesky factor: are the calibration inputs finite?")


@torch.no_grad()
def gptq(w: Tensor, hessian: Tensor, bits: int, group: int = 128, block: int = 128) -> Quantized:
    """W: [N, K] with error feedback for inputs of this H: [K, K], in w's dtype. Blocks of columns only save time."""
    rounded, hessian, (N, K) = quantize(w, bits, group), hessian.to(w.dtype), w.shape
    group, (low, high) = rounded.group, (-127, 127) if bits == 8 else (0, 15)
    U, free, q = inverse_factor(hessian), w.clone(), torch.empty_like(w)
    scale, zero = rounded.scale.clone(), None if bits == 8 else rounded.zero.clone()
    for start in range(0, K, block):
        stop = min(start + block, K)
        e = torch.zeros(N, stop - start, dtype=w.dtype, device=w.device)
        for k in range(start, stop):
            g = k // group
            if bits == 4 and k % group == 0:                                # columns before the block have moved it
                ahead = free[:, k:k + group].clone()
                if k + group > stop:
                    ahead[:, stop - k:] -= e @ U[start:stop, stop:k + group]
                scale[:, g, None], zero[:, g, None] = grid4(ahead, group)
            s, z = scale[:, g].to(w.dtype), 0 if zero is None else zero[:, g]
            q[:, k] = ((free[:, k] / s).round() + z).clamp_(low, high)
            e[:, k - start] = (free[:, k] - (q[:, k] - z) * s) / U[k, k]
            free[:, k + 1:stop] -= e[:, k - start, None] * U[k, k + 1:stop]
        free[:, stop:] -= e @ U[start:stop, stop:]
    found = rounded._replace(values=q.to(torch.int8) if bits == 8 else pack4(q.to(torch.uint8)), scale=scale, zero=zero)
    return better(w, hessian, found, rounded)


def better(w: Tensor, hessian: Tensor, found: Quantized, rounded: Quantized) -> Quantized:
    """Row by row, the one with the smaller error; rounding if they are equal, or no numbers."""
    left, lost = (errors(w - dequantize(*q, dtype=w.dtype), hessian) for q in (found, rounded))
    parts = (a if a is None else torch.where((left < lost)[:, None], a, b) for a, b in zip(found[:3], rounded[:3]))
    return Quantized(*parts, found.columns, found.group)


@torch.no_grad()
def awq(w: Tensor, hessian: Tensor, magnitude: Tensor, bits: int, group: int = 128, steps: int = 10) -> Tensor:
    """The scale s of each input channel: [K], for which rounding W diag(s) costs least; all 1 if none helps."""
    mean = magnitude.float().clamp(min=1e-4 * magnitude.max().item() + 1e-30)
    powers = (mean.pow(a / steps) for a in range(1, steps + 1))
    centred = [s / (s.max().sqrt() * s.min().sqrt()) for s in powers]                   # on 1
    cost = lambda s: errors(w - dequantize(*quantize(w * s, bits, group)) / s, hessian).sum().item()
    return min([torch.ones_like(mean), *centred], key=cost)


class Observed(Ops):
    """Other operations, and the last input of each product and each norm, by the id of its weight."""

    def __init__(self, ops: Ops):
        self.ops, self.inputs = ops, dict[int, Tensor]()
        own = {"linear", "add_norm", "forward", "draft"}                                # whole passes are plain
        vars(self).update({name: getattr(ops, name) for name in dir(Ops) if name[0] != "_" and name not in own})

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        self.inputs[id(weight)] = x
        return self.ops.linear(x, weight)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.inputs[id(weight)], y = self.ops.add_norm(x, delta, weight, eps)
        return self.inputs[id(weight)], y


def prepared(llama: Llama, layer: Layer) -> Layer:
    """The layer as this machine multiplies it fastest."""
    return replace(layer, **{name: llama.ops.prepare(getattr(layer, name), llama.dtype) for name in PRODUCTS})


def observe(llama: Llama, layer: Layer, texts: Sequence[LayerInput]) -> dict[str, Moments]:
    """What comes into each product of the layer when all texts go through it.

    Inputs of o_proj and down_proj count as divided by the residual stream's length, as the next norm divides: in some
    models a few tokens are a thousand times as long as the others, and the integers would be chosen for these alone."""
    seen = {name: Moments(getattr(layer, name).weight.shape[1], llama.device) for name in PRODUCTS}
    observed, fast = copy(llama), prepared(llama, layer)
    observed.ops = ops = Observed(llama.ops)
    for text in texts:
        x, delta = observed.through(fast, *text, 0)
        for name, stream in zip(PRODUCTS, (None, ops.inputs[id(layer.post_norm)], None, x + delta)):
            length = 1 if stream is None else stream.float().square().mean(1, keepdim=True).sqrt().clamp(min=1e-10)
            seen[name].add(ops.inputs[id(getattr(fast, name))] / length)
    return seen


def fold(layer: Layer, config: Config, seen: dict[str, Moments]) -> None:
    """AWQ: scale the inputs of each product, and undo it in what comes before. The layer's output stays what it was;
    `seen` becomes what its products see now. config: with the number of bits to come."""
    how, G, D, F = config.quantization, config.num_key_value_heads, config.head_dim, config.intermediate_size
    R, v, up = config.num_attention_heads // G, slice(-G * D, None), slice(F, None)     # v: rows of qkv; up: of gate_up
    for name, before, rows in (("down", layer.gate_up, up), ("o", layer.qkv, v),
                               ("gate_up", [layer.post_norm], slice(None)), ("qkv", [layer.input_norm], slice(None))):
        weight, magnitude = getattr(layer, name).weight, seen[name].magnitude
        if name == "o":                                                                 # heads that share v share s
            magnitude = magnitude.view(G, R, D).mean(1, keepdim=True).expand(G, R, D).reshape(-1)
        s = awq(weight.float(), seen[name].hessian, magnitude, how.bits, how.group)
        weight.mul_(s)
        seen[name].divide(s)
        s = s.view(G, R, D)[:, 0].reshape(-1) if name == "o" else s
        for whole in (part for part in before if part is not None):                     # there may be no bias
            whole[rows].div_(s.view(-1, *[1] * (whole.ndim - 1)))


def smaller(linear: Linear, bits: int, group: int, hessian: Tensor | None = None) -> Linear:
    """With a weight of fewer bits, by GPTQ if there is a Hessian; 16 bits stay what they are."""
    if bits == 16:
        return linear
    w = linear.weight.float()
    return linear._replace(weight=quantize(w, bits, group) if hessian is None else gptq(w, hessian, bits, group))


@torch.no_grad()
def quantize_model(llama: Llama, how: Quantization, texts: Sequence[Tensor] = (),
                   progress: Callable[[str], None] = lambda line: None) -> Llama:
    """The model with quantized weights; `llama` is used up, a layer at a time. Neither is prepared. texts: pieces of
    tokens, int64[T] each, that GPTQ and AWQ look at."""
    if how.method != "rtn" and not texts:
        raise ValueError(f"{how.method} looks at text, and there is none: give some, or use rtn")
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
        if "awq" in how.method:
            fold(layer, result.config, seen)
        hessians = {name: moments.hessian for name, moments in seen.items() if "gptq" in how.method}
        weights = {name: smaller(getattr(layer, name), how.bits, how.group, hessians.get(name)) for name in PRODUCTS}
        result.layers.append(replace(layer, **weights))
        if read:
            fast = prepared(llama, result.layers[i])
            read = [(*llama.through(fast, *text, i), *text[2:]) for text in read]
    result.embed = smaller(llama.embed, how.head_bits, how.group)
    result.head = result.embed if llama.head is llama.embed else smaller(llama.head, how.head_bits, how.group)
    return result


def quantized(name: str | Path, how: Quantization | None, texts: Sequence[Tensor] = (),
              device: torch.device | str | None = None, dtype: torch.dtype | None = None,
              progress: Callable[[str], None] = say) -> Llama:
    """The model of this name, quantized layer by layer; not prepared."""
    llama = Llama.load(name, device, dtype, trainable=True).requires_grad_(False)
    return llama if how is None else quantize_model(llama, how, texts, progress)


def size(llama: Llama) -> int:
    """Bytes of all weights, scales included, others in 16 bits; embedding and head once if they are tied."""
    return sum(min(2, place.itemsize) * place.numel() for place in llama.places().values())
