"""A quantized product is that of the numbers it stands for, whichever way it is made."""
import pytest
import torch

import matmul
import quantmatmul
from quant import dequantize, quantize
from quantmatmul import QuantizedLinear, digit_bits

ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-4, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bits, K, N", [(8, 64, 40), (8, 33, 17), (8, 1, 5), (8, 16, 1), (4, 64, 48), (4, 33, 17), (4, 160, 16)])
@pytest.mark.parametrize("keep", [False, True])
@torch.inference_mode()
def test_a_quantized_product_is_that_of_the_numbers_it_stands_for(bits, K, N, keep, dtype, compiler):
    torch.manual_seed(K + N)
    q, bias = quantize(torch.randn(N, K), bits, 64), torch.randn(N).to(dtype)             # of 160 columns, the last group is short
    linear = QuantizedLinear(K, N, True, dtype=dtype, bits=bits, group=64)
    linear.put(q), linear.bias.copy_(bias)
    W = dequantize(*q, dtype=torch.float64)
    for ready in (None, linear.pack, linear.pack, linear.reorder, linear.reorder):
        if ready:
            ready(keep=keep)
        for T in (*range(20), 130):
            x = torch.randn(T, 2 * K).to(dtype)[:, ::2]
            y, most = linear(x), x.double().abs() @ W.abs().T + bias.double().abs()
            assert y.dtype == dtype and ((y.double() - x.double() @ W.T - bias.double()).abs() <= ROUNDING[dtype] * most).all(), (T, linear.path(T))
    if linear.values is not None:
        assert torch.equal(linear.rows(slice(None)).double(), W.to(dtype).double())
    assert linear.values is not None or not keep
    least = N * K * bits // 8 + q.scale.nbytes
    assert least <= linear.nbytes <= least + 3 * q.scale.nbytes                            # the weights are there once


@pytest.mark.skipif(digit_bits() != 8, reason="this CPU adds digits of 8 bits inexactly, or has no such product")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_large_weights_lie_in_the_librarys_order(dtype, monkeypatch):
    """One row and two are filled up to five digits, and what is added is not in the result."""
    monkeypatch.setattr(matmul, "FIVE", True)
    K, N = 33, 17
    q, rows = quantize(torch.randn(N, K), 8), []
    product = quantmatmul.packed_product
    monkeypatch.setattr(quantmatmul, "packed_product", lambda x, *more: rows.append(len(x)) or product(x, *more))
    for large, padded in ((N * K, False), (N * K // 4, True)):
        for page in (matmul, quantmatmul):
            monkeypatch.setattr(page, "LARGE", large)
        linear = QuantizedLinear(K, N, dtype=dtype, bits=8)
        linear.put(q)
        linear.pack()
        linear.reorder()
        assert (linear.path(1) == "packed") == (padded or dtype == torch.float32) and (linear.values is None) == (linear.path(1) == "packed")
        for T in (0, 1, 2, 3, 130):
            x = torch.randn(T, K).to(dtype)
            most = x.double().abs() @ dequantize(*q, dtype=torch.float64).abs().T
            assert ((linear(x).double() - x.double() @ dequantize(*q, dtype=torch.float64).T).abs() <= ROUNDING[dtype] * most).all()
        assert rows == ([5, 5, 5, 6, 260] if padded else [0, 2, 4, 6, 260] if dtype == torch.float32 else [])
        rows.clear()


@torch.inference_mode()
def test_which_product_a_quantized_step_takes(compiler):
    def paths(K: int, N: int = 16, bits: int = 8, group: int = 64, **where) -> list[str]:
        linear = QuantizedLinear(K, N, bits=bits, group=group, **where)
        linear.put(quantize(torch.randn(N, K), bits, group))
        linear.pack()
        lone = [linear.path(T) for T in (0, 8, 9, 128, 129)]
        if compiler and bits == 8 and linear.dtype != torch.float64:
            assert lone == ["native"] * 2 + ([whole] * 3 if linear.dtype == torch.float32 and K > 1 else ["tiles"] * 3 if K == 1 else [whole] * 2 + ["tiles"])
            linear.reorder()
        return [linear.path(T) for T in (0, 1, 4, 5, 128, 129)]

    whole = "integers" if digit_bits() else "tiles"
    assert paths(32, dtype=torch.bfloat16) == [whole, "fused", "fused", whole, whole, "tiles"]
    assert paths(33, dtype=torch.bfloat16) == [whole] * 5 + ["tiles"]                             # of 33 columns the library would read on
    assert paths(32, dtype=torch.float64) == paths(1, dtype=torch.float32) == ["tiles"] * 6
    assert paths(32) == paths(33) == ["packed" if digit_bits() else "tiles"] * 6
    quick = "fused" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "tiles"
    assert paths(64, bits=4, dtype=torch.bfloat16) == paths(96, bits=4, dtype=torch.bfloat16) == [quick] * 6
    for other in (dict(K=80), dict(K=64, N=17), dict(K=64, group=48), dict(K=64, dtype=torch.float32)):
        assert paths(**dict(bits=4, dtype=torch.bfloat16) | other) == ["tiles"] * 6


@torch.inference_mode()
def test_a_wide_quantized_product_is_made_in_tiles(monkeypatch):
    monkeypatch.setattr(quantmatmul, "TILE", {8: 1 << 9, 4: 1 << 9})
    for bits in (8, 4):
        linear = QuantizedLinear(32, 70, bits=bits)                                                # 70 rows, 16 at a time
        linear.put(quantize(torch.randn(70, 32), bits))
        x = torch.randn(3, 32)
        torch.testing.assert_close(linear(x), x @ linear.rows(slice(None)).T)
