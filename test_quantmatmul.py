"""A quantized product is that of the numbers it stands for, whichever way it is made."""
import pytest
import torch

import quantmatmul
from matmul import Linear
from quant import dequantize, quantize
from quantmatmul import QuantizedLinear

ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-5, torch.bfloat16: 2.0**-7}                    # of Σ|x||w|


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bits", [16, 8, 4])
@torch.inference_mode()
def test_the_error_of_a_product_has_one_bound(bits, dtype, compiler):
    """Plain or packed, of any width, with C and without, of a few rows and of many; numbers alike, of one sign, or far apart add up worst."""
    torch.manual_seed(bits)
    kinds = [lambda *shape: torch.randn(*shape), lambda *shape: torch.full(shape, 1.1), lambda *shape: torch.rand(*shape).exp2() * 1.7,
             lambda *shape: torch.randn(*shape) * 10.0 ** torch.randint(-6, 3, shape[-1:]), lambda *shape: torch.randn(*shape).sign() * (torch.rand(*shape) < 0.02)]
    for K, N in ((1, 5), (33, 17), (160, 16), (576, 40), (4096, 33)):
        for number in kinds:
            w, bias = number(N, K), torch.randn(N).to(dtype)
            linear = Linear(K, N, True, dtype=dtype) if bits == 16 else QuantizedLinear(K, N, True, dtype=dtype, bits=bits, group=64)
            q = linear.weight.copy_(w) if bits == 16 else quantize(w, bits, 64)
            W, _ = (q if bits == 16 else dequantize(*q, dtype=torch.float64)).double(), linear.bias.copy_(bias)
            bits == 16 or linear.put(q)
            for ready in (None, linear.pack):
                if ready:
                    ready()
                for T in (0, 1, 2, 3, 5, 7, 16, 33, 70):
                    x = number(T, 2 * K).to(dtype)[:, ::2]
                    y, most = linear(x), x.double().abs() @ W.abs().T + bias.double().abs()
                    assert y.dtype == dtype and y.shape == (T, N)
                    assert ((y.double() - x.double() @ W.T - bias.double()).abs() <= ROUNDING[dtype] * most + 1e-30).all(), (K, N, T, linear.path(T))


@pytest.mark.parametrize("bits, K, N", [(8, 64, 40), (8, 33, 17), (8, 1, 5), (4, 64, 48), (4, 33, 17), (4, 160, 16)])
@torch.inference_mode()
def test_the_weights_are_in_memory_once(bits, K, N, compiler):
    q, linear = quantize(torch.randn(N, K), bits, 64), QuantizedLinear(K, N, bits=bits, group=64)
    linear.put(q)
    W, plain = dequantize(*q), linear.nbytes
    assert plain == sum(part.nbytes for part in q[:3] if part is not None)
    for _ in range(2):                                                                                # twice is once
        linear.pack()
        assert torch.equal(linear.rows(torch.arange(N)), W)                                           # an embedding's look-up
        assert (linear.own is not None) == compiler == (linear.values is None)
        assert plain <= linear.nbytes <= plain * (1 if not compiler else -(-N // 16) * 16 / N) + 16   # of panels the last is filled up


def test_which_product_a_quantized_step_takes(compiler):
    def path(bits: int = 8, group: int = 64, dtype: torch.dtype = torch.float32) -> str:
        linear = QuantizedLinear(64, 16, bits=bits, group=group, dtype=dtype)
        linear.put(quantize(torch.randn(16, 64), bits, group))
        linear.pack()
        return linear.path(1)

    own = "native" if compiler else "tiles"
    assert path() == path(dtype=torch.bfloat16) == path(4) == path(4, 32, torch.bfloat16) == own
    assert path(dtype=torch.float64) == path(4, dtype=torch.float64) == path(4, 48) == path(dtype=torch.float16) == "tiles"


@torch.inference_mode()
def test_a_wide_quantized_product_is_made_in_tiles(monkeypatch):
    monkeypatch.setattr(quantmatmul, "TILE", {8: 1 << 9, 4: 1 << 9})
    for bits in (8, 4):
        linear = QuantizedLinear(32, 70, bits=bits)                                                # 70 rows, 16 at a time
        linear.put(quantize(torch.randn(70, 32), bits))
        x = torch.randn(3, 32)
        torch.testing.assert_close(linear(x), x @ linear.rows(slice(None)).T)
