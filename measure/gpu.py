"""The claims on a GPU: models of 1B and 8B shapes, with random weights that are made on the device.

    python bench.py --gpu kernels          attention and products alone, as shares of what the machine can do (gpukernels.py)
    python bench.py --gpu decode           one stream, 16, 8 and 4 bits
    python bench.py --gpu speculation      1B shapes draft for 8B shapes
    python bench.py --gpu serving          many requests at a time, beside transformers (gpuserving.py)

How fast a model runs does not depend on what its weights are; so nothing is downloaded, and every figure is a share of what this very
machine did a moment before: bytes read a second, and bf16 operations a second. Everything goes through the path that generate.py takes:
the caches' `attend`, the layers' products, `Decoder` and `Batcher`. What is made faster there is measured here, unchanged.

Random weights never agree, so in `speculation` a coin of our own accepts each draft with a fixed probability α, and all else is as it is:
drafting, verification, sampling, both caches. The table says so.

With --quick the same runs with toy shapes, on a CPU if there is no GPU: its figures mean nothing.

Invariant: a case is a title, headers and rows, whatever the machine; a peer that is not installed is named.

Not covered: several GPUs.
"""
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from gamma import expected_tokens
from kvcache import kv_bytes
from measure.gpukernels import kernels, logits_of
from measure.gpumodels import QUICK, Case, Roof, Scale, clock, engine, random_model, request, roofs
from measure.gpuserving import serving
from measure.pair import at_once, seconds_a_token, weight_bytes
from measure.peers import INSTALL, RandomTransformers, installed
from model import Llama
from sampling import Keyed, probabilities

# ---- Decoding -------------------------------------------------------------------------------------------------------------------

def decode(scale: Scale, roof: Roof) -> Case:
    """One stream."""
    rows = []
    for name, config in scale.models:
        first, logits, coin = 0.0, logits_of(1, config.vocab_size, scale), Keyed(*torch.zeros(2, 1, dtype=torch.int64, device=scale.device))
        filtered = clock(lambda: coin.pick(probabilities(logits, 0.6, top_p=0.9)), scale)
        for bits in (16, 8, 4):
            llama = random_model(config, bits, scale)
            one = median(plain_seconds(llama, scale) for _ in range(scale.turns))
            c, first = config, first or one
            read = weight_bytes(llama) + kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, scale.context, scale.dtype)
            rows.append([f"{name}, {bits} bits", 1 / one, 1e3 * one, f"{read / one / roof[0]:.0%}", f"{first / one:.2f}", f"{filtered / one:.1%}", ""])
            del llama
            if bits == 16 and installed("transformers"):
                rows[-1][-1] = ", ".join(f"{seconds / one:.2f} of {kind}" for kind, seconds in
                                         RandomTransformers(config, scale.device, scale.dtype).seconds_a_token(scale.context, scale.count, scale.turns).items())
    notes = [] if installed("transformers") else [f"transformers is not installed here, so nothing is compared with it: {INSTALL['transformers']}"]
    return dict(title=f"One stream after a prompt of {scale.context} tokens, random weights",
                headers=("shapes", "tokens/s", "ms a token", "of the read bandwidth", "times 16 bits", "sampling with top-p, of that", "times transformers"), rows=rows, notes=notes)


def plain_seconds(llama: Llama, scale: Scale) -> float:
    """Between tokens, by the wall clock."""
    longest = scale.context + scale.count
    return median(at_once(engine(llama, None, longest, longest, 1), [request(llama, scale.context, scale.count, 0)]).gaps)


# ---- Speculation ----------------------------------------------------------------------------------------------------------------

class Biased(Keyed):
    """Accepts every draft with one probability, whatever the models say of it; a place without a draft never. It picks as `Keyed` does."""
    alpha = 1.0

    def accept(self, prob: Tensor) -> Tensor:
        return super().accept(torch.where(prob > 0, self.alpha, 0.0))

    @classmethod
    def of(cls, alpha: float) -> Callable[[Tensor, Tensor, int], "Biased"]:
        return type("Biased", (cls,), dict(alpha=alpha))


def speculation(scale: Scale, roof: Roof) -> Case:
    """The second model drafts for the first, in 16 bits and in 4; γ fixed, then by the clock for several streams."""
    (_, large), (_, small) = scale.models
    target, rows = random_model(large, 16, scale), []
    for bits in (16, 4):
        draft = random_model(small, bits, scale)
        for alpha in scale.alphas:
            rows += [speculate(target, draft, bits, alpha, gamma, 1, scale) for gamma in scale.gammas]
        rows += [speculate(target, draft, bits, alpha, None, streams, scale) for alpha in (scale.alphas[0], scale.alphas[-1]) for streams in scale.streams]
    return dict(title="Speculation with random weights: a coin accepts with probability α, all else is the production path",
                headers=("draft", "α", "γ", "streams", "times plain decoding", "by the formula", "share of it"), rows=rows, notes=[])


def speculate(target: Llama, draft: Llama, bits: int, alpha: float, gamma: int | None, streams: int, scale: Scale) -> list[Any]:
    """Plain decoding and drafting in turns, over as many tokens. By the clock, the formula is that of the γ that was taken on average."""
    gains, formulas, taken, count = [], [], [], scale.count if gamma is not None else 4 * scale.count
    longest = scale.context + count
    for turn in range(scale.turns):
        seconds = []
        for drafts in (False, True):
            maker = engine(target, draft if drafts else None, streams * longest, longest, streams)
            maker.maker.coin = Biased.of(alpha)
            requests = [request(target, scale.context, count, 100 * turn + i, gamma if drafts else 0) for i in range(streams)]
            at_once(maker, requests)
            seconds.append(median(map(seconds_a_token, requests)))
        gains.append(seconds[0] / seconds[1])
        taken.append(mean(done.drafted for one in requests for done in one.rounds[1:]) if gamma is None else gamma)
        c, w = maker.maker.costs.drafting() / seconds[0], maker.maker.costs.verifying(round(streams * (taken[-1] + 1))) / seconds[0]
        formulas.append(expected_tokens(alpha, taken[-1]) / (w + taken[-1] * c))
    gain, formula = median(gains), median(formulas)
    return [f"{bits} bits", f"{alpha}", str(gamma) if gamma is not None else f"by the clock: {median(taken):.1f}", str(streams), f"{gain:.2f}", f"{formula:.2f}",
            f"{gain / formula:.2f}"]


CASES: dict[str, Callable[[Scale, Roof], Case]] = dict(kernels=kernels, decode=decode, speculation=speculation, serving=serving)


@torch.inference_mode()
def run(name: str, quick: bool = False) -> dict[str, Case]:
    """One case. ValueError where there is no GPU."""
    if not torch.cuda.is_available() and not quick:
        raise ValueError(f"--gpu {name} needs a GPU, and PyTorch finds none here: --quick runs it with toy shapes on the CPU")
    scale = Scale() if not quick else replace(QUICK, device="cuda" if torch.cuda.is_available() else "cpu")
    roof = roofs(scale)
    case = CASES[name](scale, roof)
    told = f"roof: {roof[0] / 1e9:,.0f} GB/s read, {roof[1] / 1e12:,.3g} TFLOP/s in {str(scale.dtype)[6:]} products"
    return {name: case | dict(notes=[told, *case["notes"]], read_bandwidth=roof[0], operations=roof[1])}
