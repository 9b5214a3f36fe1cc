"""What does not need a GPU: the coin, random models, and the clock's arithmetic on toy shapes."""
import pytest
import torch

import gpu
from measure import weight_bytes


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_the_coin_accepts_with_its_probability_whatever_the_models_say(alpha):
    coin = gpu.Biased.of(alpha)(torch.arange(4000), torch.zeros(4000, dtype=torch.int64))
    stands = coin.accept(torch.tensor([[0.001, 1.0, 0.0]]).expand(4000, 3))
    assert abs(stands[:, :2].float().mean() - alpha) < 0.02 and not stands[:, 2].any()
    assert coin[:10].alpha == alpha and isinstance(coin[[1, 2]], gpu.Biased)
    other = gpu.Biased.of(0.1)(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    assert (other.alpha, coin.alpha) == (0.1, alpha)


def test_acceptance_in_the_production_loop_is_the_coins():
    target, draft = (gpu.random_model(config, 16, gpu.QUICK) for _, config in gpu.QUICK.models)
    made = gpu.engine(target, draft, 400, 400, 1)
    made.maker.coin = gpu.Biased.of(0.8)
    one = gpu.request(target, 8, 300, 1, gamma=3)
    list(made.batch.run([one]))
    assert len(one.tokens) == 308 and abs(one.acceptance - 0.8) < 0.08


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_random_models_are_finite_and_of_the_size_of_their_bits(bits):
    llama = gpu.random_model(gpu.TOY, bits, gpu.QUICK)
    logits = llama(torch.arange(5))
    assert logits.isfinite().all() and logits.std() > 1e-3
    share = weight_bytes(llama) / weight_bytes(gpu.random_model(gpu.TOY, 16, gpu.QUICK))
    assert share == 1 if bits == 16 else share < {8: 0.4, 4: 0.4}[bits]


def test_the_shapes_are_those_of_the_models():
    from model import Llama
    for config, billions in ((gpu.LLAMA_8B, 8.03), (gpu.LLAMA_1B, 1.236)):
        count = sum(place.numel() for place in Llama(config, "meta", seed=None).places().values())
        assert abs(count / 1e9 - billions) < 0.005
