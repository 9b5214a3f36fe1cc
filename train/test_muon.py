"""The orthogonal step, and Adam's, each against what defines it."""

import pytest
import torch

from checkpoint.config import Config
from conftest import SMALL
from model import Llama
from train.muon import Optimizer, orthogonal


def test_orthogonal_evens_out_the_singular_values() -> None:
    for shape in ((12, 30), (30, 12), (16, 16)):
        values = torch.linalg.svdvals(
            orthogonal(
                torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.float32
            )
        )
        assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_orthogonal_keeps_the_directions(shape: tuple[int, int]) -> None:
    u, s, v = torch.linalg.svd(
        torch.randn(shape, generator=torch.Generator().manual_seed(2)), full_matrices=False
    )
    turned = u.T @ orthogonal(u * s @ v, torch.float32) @ v.T
    torch.testing.assert_close(turned, turned.diag().diag(), atol=1e-4, rtol=0)


def test_each_weight_moves_by_its_own_rule() -> None:
    llama = Llama(Config(**SMALL), seed=1).requires_grad_()
    optimizer = Optimizer(llama)
    before = {name: place.detach().clone() for name, place in optimizer.places.items()}
    llama(torch.arange(20)).square().mean().backward()
    grads = {
        name: (place if place._base is None else place._base).grad.clone()
        for name, place in optimizer.places.items()
    }
    optimizer.step(0.5, 0)
    moved = {name: place.detach() - before[name] for name, place in optimizer.places.items()}
    k = "model.layers.1.self_attn.k_proj.weight"  # rows 24 to 36 of the fused parameter
    alone = orthogonal(1.95 * grads[k][24:36], torch.float32)
    tolerance = (
        dict(atol=2e-4, rtol=0)
        if not torch.cpu._is_avx512_bf16_supported()
        else dict(atol=2e-3, rtol=0)
    )
    torch.testing.assert_close(
        moved[k], -0.01 * alone - 0.005 * before[k] * 0.01 / 0.01, **tolerance
    )
    norm = "model.norm.weight"  # Adam's first step: the rate, by sign
    torch.testing.assert_close(moved[norm], -0.002 * grads[norm].sign(), atol=2e-5, rtol=1e-2)
    assert all(parameter.grad is None for parameter in llama.parameters())
