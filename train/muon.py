"""Muon and Adam, the optimizers: how the weights move.

A matrix's gradient is dominated by a few directions: some singular values are hundreds of times the others. Muon takes
the momentum M = U S Vᵀ and moves the matrix by U Vᵀ, which is the same distance in every direction.

    M ← 0.95 M + gradient        W ← (1 − 0.01 f) W − f · rate · √max(1, rows / columns) · U Vᵀ of (gradient + 0.95 M)
    f: the share of the full rate at this step

Newton and Schulz's iteration x ← a x + (b x xᵀ + c (x xᵀ)²) x maps each singular value s to a s + b s³ + c s⁵, and five
iterations bring all but the smallest near 1, between 0.7 and 1.2. These are products only, so bfloat16 is enough.

Adam moves embeddings, norms and biases. Matrices that share a parameter (q, k and v; gate and up) move separately.
Cost: 15 products for each matrix and step, three an iteration.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Kingma & Ba 2015, Adam (arXiv:1412.6980).
"""

import torch
from torch import Tensor

from model import Llama


def has_bfloat16(device: torch.device) -> bool:
    """Whether the machine has instructions for products in bfloat16."""
    return device.type == "cuda" or getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, all singular values near 1, by five iterations of Newton and Schulz."""
    x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).to(dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


class Optimizer:
    """Muon for the layers' matrices, Adam for embeddings, norms and biases. Its state has the checkpoint's names."""

    def __init__(self, llama: Llama, matrix_rate: float = 0.02, rate: float = 0.004):
        self.llama, self.matrix_rate, self.rate = llama, matrix_rate, rate
        with torch.no_grad():
            self.places = llama.places()  # views: q, k and v share a parameter
        self.state = {
            f"{kind}.{name}": torch.zeros_like(place)
            for name, place in self.places.items()
            for kind in (("momentum",) if self._by_muon(name) else ("mean", "square"))
        }

    def _by_muon(self, name: str) -> bool:
        return self.places[name].dim() == 2 and name not in (
            "model.embed_tokens.weight",
            "lm_head.weight",
        )

    @torch.no_grad()
    def step(self, factor: float, steps: int) -> None:
        """Apply the gradients, at `factor` times the full rates, and clear them. steps: how many came before."""
        dtype = torch.bfloat16 if has_bfloat16(self.llama.device) else torch.float32
        for name, place in self.places.items():
            whole = place if place._base is None else place._base
            grad = whole.grad.as_strided(place.size(), place.stride(), place.storage_offset())
            if self._by_muon(name):
                momentum = self.state[f"momentum.{name}"].mul_(0.95).add_(grad)
                tall = max(1, place.shape[0] / place.shape[1]) ** 0.5
                place.mul_(1 - 0.01 * factor)
                place.sub_(
                    orthogonal(grad + 0.95 * momentum, dtype),
                    alpha=self.matrix_rate * factor * tall,
                )
            else:
                mean = self.state[f"mean.{name}"].lerp_(grad, 0.1)
                square = self.state[f"square.{name}"].lerp_(grad * grad, 0.05)
                size = (square / (1 - 0.95 ** (steps + 1))).sqrt() + 1e-8
                place.addcdiv_(mean / (1 - 0.9 ** (steps + 1)), size, value=-self.rate * factor)
        for parameter in self.llama.parameters():
            parameter.grad = None
