"""Calibration: choose a weight's integers by their effect on the layer's output.

What counts is not |W − Q| but the error of the output, for the inputs X [T, K] of a text:

    error(Q) = |X (W − Q)ᵀ|² = Σ over rows d of W − Q of d H dᵀ / 2,    H = 2 XᵀX: [K, K]

H is the Hessian of each row. Heads that look for nothing attend to the first token of a text, an
attention sink: an error of its key or value reaches every token, which a mean over tokens does not
see. So in H a text's first token counts for SINK times as many tokens as the text has, beside
itself.

  - GPTQ rounds one column after the other, and after each moves the columns that are not rounded
    yet, to compensate its error. With the upper Cholesky factor U of H⁻¹ (UᵀU = H⁻¹), the best move
    after rounding column k is

        e = (w_k − q_k) / U_kk,      w_j ← w_j − e U_kj   for j > k

    Columns are rounded in descending order of H_kk, their inputs' energy, so that the errors that
    count most have the most columns left to compensate them. The grids are those of W, chosen
    before (static groups): columns stay in their places, and a folder needs no order. A row that
    GPTQ makes worse is rounded to nearest.
  - AWQ rounds to nearest, but multiplies each input channel by a scale s first: W diag(s) is
    rounded, and 1 / s is folded into the weight before: a norm's, v_proj's rows before o_proj,
    up_proj's before down_proj. s = (mean |x|)^a, with the a from 0 (no scale) to 1, of a few
    candidates, that makes the error smallest.
  - SmoothQuant is for inputs that are rounded, too, to 8 bits with a scale for each token. A few
    channels can be a hundred times larger than the others, which would round to 0. It folds as AWQ
    does, s = max|x|^a / max|w|^(1 − a): outliers move from x to W. Of a few candidates it takes the
    a that is best on some of the tokens, or no scale.

The methods need H, mean |x| and max |x| of each product's inputs, and some inputs (`Moments`). A
model is quantized layer by layer, with the inputs that the quantized layers before make: memory
holds the model and one layer more.

Invariant: by this H of the calibration text, no row of a GPTQ product and no AWQ product is worse
than by rounding to nearest. Cost: two passes over the text, and some (K + N) K² operations a
product. Not covered: AWQ's clipping.

GPTQ: Frantar et al. 2023 (arXiv:2210.17323), with the update of OBQ (2208.11580). AWQ: Lin et al.
2023 (2306.00978). SmoothQuant: Xiao et al. 2022 (2211.10438); there all products have one a.
Attention sinks: Xiao et al. 2023 (2309.17453).

    W: [N, K] · X: [T, K] inputs of T calibration tokens · H: [K, K]
    G key/value heads · D head size · F intermediate size · C model width
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.progress import progress_bar
from checkpoint.weights import Layer
from kernels import Linear
from kvcache import AttentionMetadata
from model import Llama, Rope
from quant import FORMATS, Kind, Quantized, quantize, rounded_product, spread

DAMP = 0.1  # share of its mean added to H's diagonal; the paper: 0.01, 16 times the text
SINK = 0.5  # weight of a text's first token over that of all its tokens
LIMITS = {8: (-127, 127), 4: (0, 15)}  # the least and the largest integer of these bits
BLOCK = 128  # columns that GPTQ rounds before it moves the columns right of them
CANDIDATES = 10  # values of a that AWQ and SmoothQuant try
PRODUCTS = ("qkv", "o", "gate_up", "down")


# ---- GPTQ ----------------------------------------------------------------------------------------


def errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """What each row of W − Q adds to the squared error of the output: [N, K], [K, K] -> [N]."""
    products = (difference @ hessian) * difference
    return products.sum(1) / 2


@torch.no_grad()
def gptq(
    w: Tensor,
    hessian: Tensor,
    bits: int,
    group: int = 128,
) -> Quantized:
    """W: [N, K], quantized by GPTQ for inputs with this H: [K, K], in w's dtype.

    A column moves the rest of its block of columns at once, and the columns right of the block only
    together with the others of the block: that is the same, in fewer and larger products.
    """
    rounded = quantize(w, bits, group)
    hessian = hessian.to(w.dtype)
    order = hessian.diagonal().argsort(descending=True, stable=True)  # [K]
    U = inverse_factor(hessian[order][:, order])
    scale, zero = column_grids(rounded, w)
    moved = w[:, order]
    q = torch.empty_like(w)
    for start in range(0, w.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        later = slice(start + BLOCK, None)
        places = order[columns]
        q[:, places], e = round_block(
            moved[:, columns], scale[:, places], zero[:, places], bits, U[columns, columns]
        )
        moved[:, later] -= e @ U[columns, later]
    compensated = rounded._replace(values=FORMATS[bits].encode(q))
    return better_rows(w, hessian, compensated, rounded)


def column_grids(rounded: Quantized, w: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the zero of each number of W: [N, K] each, in w's dtype."""
    scale = spread(rounded.scale, rounded.group, w).to(w.dtype)
    zero = torch.zeros_like(w)
    if rounded.zero is not None:
        zero += spread(rounded.zero, rounded.group, w)
    return scale.expand_as(w), zero


def round_block(
    w: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: int,
    U: Tensor,
) -> tuple[Tensor, Tensor]:
    """GPTQ on a block of S columns -> its integers, and the e of each column: [N, S] each.

    w, scale, zero: [N, S]; w is overwritten. U: [S, S], the block's.
    """
    low, high = LIMITS[bits]
    q = torch.empty_like(w)
    e = torch.empty_like(w)
    for k in range(w.shape[1]):
        q[:, k] = ((w[:, k] / scale[:, k]).round() + zero[:, k]).clamp(low, high)
        rounded = (q[:, k] - zero[:, k]) * scale[:, k]  # [N]
        e[:, k] = (w[:, k] - rounded) / U[k, k]
        w[:, k + 1 :] -= e[:, k].outer(U[k, k + 1 :])
    return q, e


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper U with UᵀU = H⁻¹: [K, K]. H is damped: its diagonal grows a little.

    By 1 for a channel that was always 0.
    """
    diagonal = hessian.diagonal()
    added = DAMP * diagonal.mean() + (diagonal == 0)
    damped = hessian + torch.diag(added)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def better_rows(
    w: Tensor,
    hessian: Tensor,
    new: Quantized,
    rounded: Quantized,
) -> Quantized:
    """Row by row, `new` where its error is smaller, else `rounded` (also where an error is NaN).

    Both have the same grids.
    """
    new_errors = errors(w - new.dequantize(w.dtype), hessian)
    rounded_errors = errors(w - rounded.dequantize(w.dtype), hessian)
    better = (new_errors < rounded_errors)[:, None]  # [N, 1]
    return rounded._replace(values=torch.where(better, new.values, rounded.values))


# ---- AWQ and SmoothQuant -------------------------------------------------------------------------


class Moments:
    """The statistics of a product's inputs that calibration needs."""

    def __init__(self, columns: int, device: torch.device | str = "cpu"):
        self.hessian = torch.zeros(columns, columns, device=device)  # H: [K, K]
        self.magnitude = torch.zeros(columns, device=device)  # Σ |x|: [K]
        self.largest = torch.zeros(columns, device=device)  # max |x|: [K]
        self.sample = torch.zeros(0, columns, device=device)  # every eighth token's: [., K]

    def add(self, x: Tensor) -> None:  # [T, K], of a text
        x = x.float()
        self.hessian.addmm_(x.T, x, alpha=2)
        self.hessian.addr_(x[0], x[0], alpha=2 * SINK * len(x))
        self.magnitude += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.sample = torch.cat((self.sample, x[::8]))

    def divide(self, s: Tensor) -> None:
        """Divide each channel of all inputs by its s: [K]."""
        self.hessian /= s.outer(s)
        self.magnitude /= s
        self.largest /= s
        self.sample /= s


@torch.no_grad()
def awq(
    w: Tensor,
    hessian: Tensor,
    magnitude: Tensor,
    bits: Kind,
    group: int = 128,
) -> Tensor:
    """AWQ's scale s of each input channel: [K], with the smallest error of rounding W diag(s).

    All 1 if no scale helps. magnitude: mean |x| of each channel, [K], or a multiple of it.
    """

    def cost(s: Tensor) -> float:
        rounded = quantize(w * s, bits, group).dequantize() / s
        return errors(w - rounded, hessian).sum().item()

    def scale(a: float) -> Tensor:
        s = mean.pow(a)
        return s / (s.max().sqrt() * s.min().sqrt())  # around 1

    mean = at_least_little(magnitude)
    return best(cost, scale, mean)


@torch.no_grad()
def smooth(
    w: Tensor,
    largest: Tensor,
    x: Tensor,
    share: Callable[[Tensor], Tensor],
) -> Tensor:
    """SmoothQuant's scale s of each input channel: [K], with the smallest error of an INT8 x Wᵀ.

    All 1 if no scale helps. largest: max |x| of each channel, [K]; x: some inputs, [T, K]; share:
    makes a scale equal where channels must share one.
    """
    exact = x @ w.T

    def cost(s: Tensor) -> float:
        product = rounded_product(x / s, quantize(w * s, 8))
        return (product - exact).square().sum().item()

    def scale(a: float) -> Tensor:
        return share(largest_x.pow(a) / largest_w.pow(1 - a))

    largest_x = at_least_little(largest)
    largest_w = at_least_little(w.abs().amax(0))
    return best(cost, scale, largest_x)


def best(
    cost: Callable[[Tensor], float],
    scale: Callable[[float], Tensor],
    like: Tensor,
) -> Tensor:
    """The scale(a) that costs least, with a from 1 / CANDIDATES to 1, or a scale of 1."""
    steps = range(1, CANDIDATES + 1)
    candidates = [torch.ones_like(like), *(scale(step / CANDIDATES) for step in steps)]
    return min(candidates, key=cost)


def at_least_little(x: Tensor) -> Tensor:
    """x ≥ 0 with numbers near 0 raised, so that powers of it are finite and not 0."""
    least = 1e-4 * x.max().item() + 1e-30
    return x.float().clamp(min=least)


def fold(layer: Layer, config: Config, moments: dict[str, Moments]) -> None:
    """AWQ, SmoothQuant: multiply each product's weight by its s, and divide the weight before it.

    The layer's output stays the same; `moments` follow. config: the model's, with the quantization
    to come.
    """
    how = config.quantization
    G = config.num_key_value_heads
    D = config.head_dim

    def share(x: Tensor) -> Tensor:  # [H D] -> [H D]
        """Each channel's mean over the query heads that share a value head."""
        heads = x.view(G, -1, D)
        means = heads.mean(1, keepdim=True)
        return means.expand_as(heads).reshape(-1)

    s = scale_inputs(layer.down, how, moments["down"])  # [F]
    divide_rows(layer.gate_up, s)  # up_proj is the last F rows
    s = scale_inputs(layer.o, how, moments["o"], share)
    divide_rows(layer.qkv, s.view(G, -1, D)[:, 0].flatten())  # v_proj is the last G D rows
    s = scale_inputs(layer.gate_up, how, moments["gate_up"])  # [C]
    layer.post_norm.div_(s)
    s = scale_inputs(layer.qkv, how, moments["qkv"])  # [C]
    layer.input_norm.div_(s)


def unshared(s: Tensor) -> Tensor:
    """Every channel has its own scale."""
    return s


def scale_inputs(
    linear: Linear,
    how: Quantization,
    moments: Moments,
    share: Callable[[Tensor], Tensor] = unshared,
) -> Tensor:
    """Multiply the weight's columns by the s of its method -> s: [K]."""
    w = linear.weight.float()
    if how.method == "smoothquant":
        s = smooth(w, moments.largest, moments.sample, share)
    else:
        s = awq(w, moments.hessian, share(moments.magnitude), how.bits, how.group)
    linear.weight.mul_(s)
    moments.divide(s)
    return s


def divide_rows(linear: Linear, s: Tensor) -> None:
    """Divide the last rows of a matrix, and their biases, by s."""
    rows = slice(-len(s), None)
    linear.weight[rows] /= s[:, None]
    if linear.bias is not None:
        linear.bias[rows] /= s


# ---- The inputs of each product ------------------------------------------------------------------


class LayerInput(NamedTuple):
    """What a layer reads of one text of T tokens; its residual stream is x + delta."""

    x: Tensor  # [T, C]
    delta: Tensor | None  # [T, C]
    rope: Rope
    metadata: AttentionMetadata


def first_input(llama: Llama, text: Tensor) -> LayerInput:
    """What the first layer reads of a text: int64[T]."""
    metadata = AttentionMetadata.without_cache(1, len(text), llama.device)
    x = llama.ops.embed(text.to(llama.device), llama.embed, llama.dtype)
    return LayerInput(x, None, llama.rope(metadata.positions), metadata=metadata)


def next_input(llama: Llama, layer: Layer, text: LayerInput) -> LayerInput:
    """What the layer after this one reads."""
    x, delta = llama.decoder_layer(layer, *text, 0)
    return text._replace(x=x, delta=delta)


def packed(llama: Llama, layer: Layer) -> Layer:
    """The layer with its products in the format that this machine multiplies fastest."""
    weights = {}
    for name in PRODUCTS:
        weights[name] = llama.ops.pack_weight(getattr(layer, name), llama.dtype)
    return replace(layer, **weights)


def observe(llama: Llama, layer: Layer, texts: Sequence[LayerInput]) -> dict[str, Moments]:
    """The moments of each product's inputs when all texts go through the layer.

    Inputs of o_proj and down_proj are divided by the length of the residual stream, as the next
    norm will do: in some models a few tokens are a thousand times as long as the others, and
    integers would be chosen for these alone.
    """
    moments = {}
    for name in PRODUCTS:
        moments[name] = Moments(getattr(layer, name).weight.shape[1], llama.device)
    ops = llama.ops
    config = llama.config
    eps = config.rms_norm_eps
    fast = packed(llama, layer)
    for x, delta, rope, metadata in texts:  # Llama.decoder_layer
        x, normed = ops.add_norm(x, delta, layer.input_norm, eps)
        moments["qkv"].add(normed)
        qkv = ops.linear(normed, fast.qkv).unflatten(1, (-1, config.head_dim))
        G = config.num_key_value_heads
        heads = ops.attend(qkv, G, rope, metadata, 0, layer.head_norm).flatten(1)
        x, normed = ops.add_norm(x, ops.linear(heads, fast.o), layer.post_norm, eps)
        moments["o"].add(heads / length(x))
        moments["gate_up"].add(normed)
        hidden = ops.swiglu(normed, fast.gate_up)
        moments["down"].add(hidden / length(x + ops.linear(hidden, fast.down)))
    return moments


def length(stream: Tensor) -> Tensor:
    """The root of each token's mean square: [T, C] -> [T, 1]."""
    squares = stream.float().square()
    return squares.mean(1, keepdim=True).sqrt().clamp(min=1e-10)


# ---- Models --------------------------------------------------------------------------------------


def quantize_linear(
    linear: Linear, bits: Kind, group: int, hessian: Tensor | None = None, inputs: int = 16
) -> Linear:
    """`linear` with a quantized weight, by GPTQ if there is a Hessian. 16 bits: unchanged."""
    if bits == 16:
        return linear
    w = linear.weight.float()
    q = quantize(w, bits, group) if hessian is None else gptq(w, hessian, bits, group)
    return linear._replace(weight=q._replace(input_bits=inputs))


def relative_loss(before: Linear, after: Linear, hessian: Tensor | None) -> float:
    """|W − Q| / |W|; with the H of a text |X (W − Q)ᵀ| / |X Wᵀ|, of the product's output."""
    w = before.weight.float()
    difference = w - after.weight.dequantize()
    if hessian is None:
        return (difference.norm() / w.norm()).item()
    share = errors(difference, hessian).sum() / errors(w, hessian).sum()
    return share.sqrt().item()


@torch.no_grad()
def quantize_model(
    llama: Llama,
    how: Quantization,
    texts: Sequence[Tensor] = (),
    losses: dict[str, float] | None = None,
) -> Llama:
    """The model with quantized weights, not packed yet. `llama` loses its layers, one by one.

    texts: pieces of the calibration text, int64[T] each, for all methods but rtn. losses: is filled
    with each matrix's `relative_loss`.
    """
    calibrated = how.method != "rtn"
    result = copy(llama)
    result.config = llama.config.quantized(how)
    result.layers = []
    inputs = [first_input(llama, text) for text in texts] if calibrated else []
    for i in progress_bar(range(len(llama.layers)), "quantizing", unit="layer"):
        layer = llama.layers.pop(0)
        moments = observe(llama, layer, inputs) if calibrated else {}
        if "awq" in how.method or how.method == "smoothquant":
            fold(layer, result.config, moments)
        weights = {}
        for name in PRODUCTS:
            hessian = moments[name].hessian if calibrated else None
            linear = getattr(layer, name)
            chosen = hessian if "gptq" in how.method else None
            weights[name] = quantize_linear(linear, how.bits, how.group, chosen, how.activations)
            if losses is not None:
                loss = relative_loss(linear, weights[name], hessian)
                losses[f"layer {i + 1} {name}"] = loss
        result.layers.append(replace(layer, **weights))
        if calibrated:
            fast = packed(llama, result.layers[i])
            inputs = [next_input(llama, fast, text) for text in inputs]
    result.embed = quantize_linear(llama.embed, how.head_bits, how.group)
    result.head = result.embed
    if llama.head is not llama.embed:
        result.head = quantize_linear(llama.head, how.head_bits, how.group)
    return result


def size(llama: Llama) -> int:
    """Bytes of all weights, scales included; unquantized ones in 16 bits, a tied head once."""
    tensors = llama.named_tensors().values()
    return sum(min(2, tensor.itemsize) * tensor.numel() for tensor in tensors)
