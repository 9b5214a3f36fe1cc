"""Calibration: choose the integers of a weight by what they do to the layer's output, not by what is nearest.

Rounding W to the nearest grid point minimizes |W − Q|. What matters is the output, for the inputs X [T, K] that text really brings:

    error(Q) = |X (W − Q)ᵀ|² = Σ over rows d of W − Q of d H dᵀ / 2,                  H = 2 XᵀX, the Hessian of each row: [K, K]

  - GPTQ (Frantar et al. 2023) rounds one column after the other, and after each moves the columns that are still free so as to make
    good for it. With U, the upper Cholesky factor of H⁻¹ (UᵀU = H⁻¹), the best move after rounding column k is

        e = (w_k − q_k) / U_kk,      w_j ← w_j − e U_kj   for j > k

    A group's grid is chosen when its first column's turn comes. A row whose error turns out above rounding's keeps rounding.
  - AWQ (Lin et al. 2023) keeps rounding, but scales each input channel up before and down after: W diag(s) is rounded, and 1 / s is folded
    into what comes before it: a norm's weight, v_proj's rows before o_proj, up_proj's before down_proj. s = (mean |x|)^a, with the a of a
    grid from 0 (rounding itself) to 1 that makes the error smallest. Nothing is added to the model.
  - "awq+gptq" is the one after the other: the scaled channels, and then the integers that make good for each other.

All need of the text only H and mean |x| for each product: `Moments`, K² numbers. A model is done layer by layer, each with the inputs
that the quantized layers before it make, so what is in memory is the model and one layer.

Invariant: on the calibration text, no row of a GPTQ product and no AWQ product is worse than rounding.
Cost: two passes over the text, and K³ / 3 + N K² operations for each product.

Not covered: columns ordered by importance (act-order), AWQ's clipping.

Frantar et al. 2023 (arXiv:2210.17323); Lin et al. 2023 (2306.00978); Frantar & Alistarh 2022, OBQ (2208.11580), where the update comes from.

    W: [N, K] · X: [T, K] inputs of T calibration tokens · H: [K, K] · G, R, D key/value heads, query heads a head, head size
"""
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, Quantization
from kvcache import Alone
from matmul import Linear
from model import Layer, Llama, product
from quant import Quantized, check, dequantize, grid4, pack4, quantize
from quantmatmul import QuantizedLinear
from shell import say

DAMP = 0.1                                              # of H's mean diagonal is added to it: 0.01 in the paper, with 16 times the text


# ---- One product ----------------------------------------------------------------------------------------------------------------

class Moments:
    """What calibration keeps of a product's inputs."""

    def __init__(self, columns: int, device: torch.device | str = "cpu"):
        self.hessian = torch.zeros(columns, columns, device=device)                             # Σ 2 xᵀx: [K, K]
        self.total, self.tokens = torch.zeros(columns, device=device), 0                        # Σ |x|: [K]

    def add(self, x: Tensor) -> None:                                                           # [T, K]
        x = x.float()
        self.hessian.addmm_(x.T, x, alpha=2)
        self.total += x.abs().sum(0)
        self.tokens += len(x)

    def divide(self, s: Tensor) -> None:                                                        # [K]
        """As if each channel of all inputs had been divided by its s."""
        self.hessian /= s.outer(s)
        self.total /= s

    @property
    def magnitude(self) -> Tensor:
        """mean |x| of each channel: [K]."""
        return self.total / max(1, self.tokens)


def errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """What each row of W − Q adds to the squared error of the output: [N, K], [K, K] -> [N]."""
    return ((difference @ hessian) * difference).sum(1) / 2


def damped(hessian: Tensor, damp: float = DAMP) -> Tensor:
    """H that can be inverted: a channel that was always 0 gets a diagonal of 1, and all get a little."""
    diagonal = hessian.diagonal()
    return hessian + torch.diag(damp * diagonal.mean() + (diagonal == 0))


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper U with UᵀU = H⁻¹: row k holds what rounding column k asks of the columns after it."""
    for damp in (DAMP, 10 * DAMP, 100 * DAMP):
        try:
            return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian, damp))), upper=True)
        except torch.linalg.LinAlgError:                                                        # float32 was not enough: more of the diagonal
            continue
    raise ValueError("the Hessian has no Cholesky factor: are the calibration inputs finite?")


@torch.no_grad()
def gptq(w: Tensor, hessian: Tensor, bits: int, group: int = 128, block: int = 128) -> Quantized:
    """W: [N, K] with error feedback for inputs of this H: [K, K]. Computed in w's dtype; columns in blocks, which only saves time."""
    check(bits, group)
    rounded, (N, K) = quantize(w, bits, group), w.shape
    hessian = hessian.to(w.dtype)
    U, free, q = inverse_factor(hessian), w.clone(), torch.empty_like(w)
    scale, zero = rounded.scale.clone(), None if rounded.zero is None else rounded.zero.clone()
    for start in range(0, K, block):
        stop = min(start + block, K)
        e = torch.zeros(N, stop - start, dtype=w.dtype, device=w.device)
        for k in range(start, stop):
            if bits == 4 and k % group == 0:                                                    # all before it has been moved for by now
                ahead = free[:, k:k + group].clone()
                if k + group > stop:
                    ahead[:, stop - k:] -= e @ U[start:stop, stop:k + group]
                scale[:, k // group, None], zero[:, k // group, None] = grid4(ahead, group)
            q[:, k], value = nearest(free[:, k], scale, zero, k // group)
            e[:, k - start] = (free[:, k] - value) / U[k, k]
            free[:, k + 1:stop] -= e[:, k - start, None] * U[k, k + 1:stop]
        free[:, stop:] -= e @ U[start:stop, stop:]
    found = Quantized(q.to(torch.int8) if bits == 8 else pack4(q.to(torch.uint8)), scale, zero, K, rounded.group)
    return better(w, hessian, found, rounded)


def nearest(column: Tensor, scale: Tensor, zero: Tensor | None, g: int) -> tuple[Tensor, Tensor]:
    """The integers nearest to one column of group g, and what they stand for: [N], [N]."""
    if zero is None:
        s = scale[:, 0].to(column.dtype)
        q = (column / s).round().clamp_(-127, 127)
        return q, q * s
    s, z = scale[:, g].to(column.dtype), zero[:, g]
    q = ((column / s).round() + z).clamp_(0, 15)
    return q, (q - z) * s


def better(w: Tensor, hessian: Tensor, found: Quantized, rounded: Quantized) -> Quantized:
    """Row by row, whichever has the smaller error; rounding if they are equal."""
    lost, gained = (errors(w - dequantize(*q, dtype=w.dtype), hessian) for q in (rounded, found))
    keep = ~(gained < lost)[:, None]                                                            # also where it is not a number
    values, scale, zero = (a if a is None else torch.where(keep, a, b) for a, b in zip(rounded[:3], found[:3]))
    return Quantized(values, scale, zero, found.columns, found.group)


@torch.no_grad()
def awq(w: Tensor, hessian: Tensor, magnitude: Tensor, bits: int, group: int = 128, steps: int = 10) -> Tensor:
    """The scale s of each input channel [K] for which rounding W diag(s), divided by s, has the smallest error; all 1 if none helps."""
    def error(s: Tensor) -> float:
        return errors(w - dequantize(*quantize(w * s, bits, group)) / s, hessian).sum().item()

    mean = magnitude.float().clamp(min=1e-4 * magnitude.max().item() + 1e-30)
    candidates = [torch.ones_like(mean)]
    for a in range(1, steps + 1):
        s = mean.pow(a / steps)
        candidates.append(s / (s.max().sqrt() * s.min().sqrt()))                                    # centred on 1
    return min(candidates, key=error)


# ---- One layer ------------------------------------------------------------------------------------------------------------------

def observe(layer: Layer, run: Callable[[], object]) -> dict[str, Moments]:
    """Run, and tell what came into each product of the layer.

    What o_proj and down_proj add to the residual stream is divided by the stream's length in the next norm, so their inputs count
    as divided by it. (Some models have a few tokens, the first among them, a thousand times as long as the others: undivided, the
    integers would be chosen for these alone. SmolLM2's perplexity suffers a third more then.)
    """
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    seen = {name: Moments(getattr(layer, name).in_features, layer.input_norm.weight.device) for name in names}
    inputs: dict[str, Tensor] = {}
    length = lambda x: x.float().square().mean(1, keepdim=True).sqrt().clamp(min=1e-10)         # [T, 1]

    def finish(_: Layer, __: object, out: Tensor) -> None:
        after = {"o_proj": length(inputs["post_norm"]), "down_proj": length(out)}
        for name in names:
            seen[name].add(inputs[name] / after.get(name, 1))

    hooks = [getattr(layer, name).register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]})) for name in (*names, "post_norm")]
    hooks.append(layer.register_forward_hook(finish))
    run()
    for hook in hooks:
        hook.remove()
    return seen


def fold(layer: Layer, seen: dict[str, Moments], bits: int, group: int) -> None:
    """AWQ: scale the inputs of each product, and undo it in what comes before; the layer's output stays what it was, and `seen` becomes what it sees now."""
    H, G, D, F = layer.heads, layer.kv_heads, layer.head_dim, layer.down_proj.in_features
    v, up = slice((H + G) * D, None), slice(F, None)                                            # rows of qkv_proj, gate_up_proj
    one_for_group = lambda m: m.view(G, H // G, D).mean(1, keepdim=True).expand(G, H // G, D).reshape(-1)    # heads that share v share s
    plan = [("down_proj", lambda m: m, [(layer.gate_up_proj, up)], lambda s: s),
            ("o_proj", one_for_group, [(layer.qkv_proj, v)], lambda s: s.view(G, H // G, D)[:, 0].reshape(-1)),
            ("gate_up_proj", lambda m: m, [(layer.post_norm, slice(None))], lambda s: s),
            ("qkv_proj", lambda m: m, [(layer.input_norm, slice(None))], lambda s: s)]
    for name, share, before, rows in plan:
        linear = getattr(layer, name)
        s = awq(linear.weight.float(), seen[name].hessian, share(seen[name].magnitude), bits, group)
        linear.weight.data = (linear.weight * s).to(linear.weight.dtype)
        seen[name].divide(s)
        for module, part in before:
            for whole in (module.weight, getattr(module, "bias", None)):
                if whole is not None:
                    whole.data[part] = (whole.data[part] / rows(s).view(-1, *[1] * (whole.ndim - 1))).to(whole.dtype)


def quantized_layer(layer: Layer, config: Config, seen: dict[str, Moments] | None) -> Layer:
    """The same layer with the weights that `config` asks for; without GPTQ's Hessians they are rounded."""
    how, where = config.quantization, dict(device=layer.input_norm.weight.device, dtype=layer.input_norm.weight.dtype)
    new = Layer(config, **where)
    for name, old in layer.named_children():
        place = getattr(new, name)
        if isinstance(old, Linear):
            w = old.weight.float()
            place.put(gptq(w, seen[name].hessian, how.bits, how.group) if "gptq" in how.method else quantize(w, how.bits, how.group))
            if old.bias is not None:
                place.bias.copy_(old.bias)
        else:
            place.weight.copy_(old.weight)
    return new


# ---- A model --------------------------------------------------------------------------------------------------------------------

def outputs(layer: Layer, xs: Sequence[Tensor], steps: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """What the layer makes of each text, with its weights for that time in the order that is multiplied fastest."""
    for linear, _ in layer.parts() if xs else ():
        linear.pack(keep=True)
    ys = [layer(x, *step) for x, step in zip(xs, steps)]
    for linear, _ in layer.parts():
        linear.unpack()
    return ys


@torch.no_grad()
def quantize_model(llama: Llama, how: Quantization, texts: Sequence[Tensor] = (), progress: Callable[[str], None] = lambda line: None) -> Llama:
    """The model with quantized weights, not packed. `llama`, which must not be packed either, is used up: its layers go as they are done.

    texts: pieces of tokens, int64[T] each, that GPTQ and AWQ look at.
    """
    if how.method != "rtn" and not texts:
        raise ValueError(f"{how.method} looks at text, and there is none: give some, or use rtn")
    config = llama.config.quantized(how)
    result = Llama(config, "meta", llama.dtype, seed=None)                                      # nothing is in memory yet
    xs = [llama.embed.rows(text.to(llama.device)) for text in texts if how.method != "rtn"]       # [T, C] each
    steps = [(*llama.turns(step.positions), lambda q, k, v, step=step: step.attend(0, q, k, v)) for step in (Alone(x[:, 0]) for x in xs)]
    for i, layer in enumerate(llama.layers):
        progress(f"layer {i + 1} of {len(llama.layers)}")
        seen = observe(layer, lambda layer=layer: outputs(layer, xs, steps)) if xs else None
        if "awq" in how.method:
            fold(layer, seen, how.bits, how.group)
        result.layers[i] = quantized_layer(layer, config, seen)
        llama.layers[i] = nn.Identity()                                                         # lets the layer go
        xs = outputs(result.layers[i], xs, steps)
    result.norm, result.frequencies = llama.norm, llama.frequencies
    quantize_ends(llama, result)
    return result


def quantize_ends(llama: Llama, result: Llama) -> None:
    """Embedding and head, which are one if they are tied, rounded to their own number of bits."""
    make = product(result.config, head=True)
    def smaller(w: Tensor) -> Linear | QuantizedLinear:
        linear = make(w.shape[1], w.shape[0], device=w.device, dtype=w.dtype)
        if isinstance(linear, Linear):
            linear.weight = nn.Parameter(w, requires_grad=False)
        else:
            linear.put(quantize(w, linear.bits, linear.group))
        return linear

    result.embed = smaller(llama.embed.weight)
    result.head = result.embed if result.config.tie_word_embeddings else smaller(llama.head.weight)


def quantized(name: str | Path, how: Quantization | None, texts: Sequence[Tensor] = (), device: str | None = None,
              dtype: torch.dtype | None = None, progress: Callable[[str], None] = say) -> Llama:
    """The model of this name, quantized layer by layer; not packed."""
    llama = Llama.load(name, device, dtype, trainable=True).requires_grad_(False)
    return llama if how is None else quantize_model(llama, how, texts, progress)


def size(llama: Llama) -> int:
    """Bytes of all weights, scales included, what is not quantized in 16 bits; embedding and head once if they are tied."""
    whole = {place.dtype for place in llama.places().values() if not place.is_floating_point()}
    return sum(place.nbytes if place.dtype in whole or name.endswith("_scale") else 2 * place.numel() for name, place in llama.places().items())
