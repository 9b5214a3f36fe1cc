"""The fused kernels against the plain operations of kernels.Ops."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
import gpu
from checkpoint.config import Config
from conftest import examples
from gpu import GPU, fused, products
from kernels import Linear, Ops
from model import Llama
from paged import PagedCache
from quant import quantize
from testing.models import SMALL

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs kernels in the interpreter
# A rounding of each kind; the interpreter cuts 16 bits off where a GPU rounds.
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-6),
    torch.float16: dict(rtol=4e-3, atol=1e-3),
    torch.bfloat16: dict(rtol=3e-2, atol=1e-2),
}
DTYPE = st.sampled_from(list(TOLERANCE))
SEED = st.integers(0, 99)


@examples(4)
@example(T=3, C=600, dtype=torch.bfloat16, first=False, seed=1)
@given(T=st.integers(0, 4), C=st.integers(1, 600), dtype=DTYPE, first=st.booleans(), seed=SEED)
def test_add_norm(T, C, dtype, first, seed):
    torch.manual_seed(seed)
    weight = torch.empty(C, device=DEVICE).normal_(1, 0.2).to(dtype)
    x = torch.randn(2 * T, C, device=DEVICE).to(dtype)[::2] * 3
    delta = torch.randn(2 * T, C, device=DEVICE).to(dtype)[::2] * 3
    before = x.clone()
    total, y = fused.fused_norm(x, None if first else delta, weight, 1e-5)
    assert torch.equal(x, before) and total.dtype == y.dtype == dtype
    torch.testing.assert_close(total, x if first else x + delta, **TOLERANCE[dtype])
    _, wanted = Ops().add_norm(total, None, weight, 1e-5)
    torch.testing.assert_close(y, wanted, **TOLERANCE[dtype])


@examples(3)
@given(T=st.integers(0, 4), width=st.integers(1, 2500), dtype=DTYPE, seed=SEED)
def test_swiglu(T, width, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(T, 2 * width, device=DEVICE).to(dtype) * 5
    y = fused.fused_swiglu(x)
    assert y.dtype == dtype and y.shape == (T, width)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(y, F.silu(gate) * up, **TOLERANCE[dtype])


def test_everything_is_written_and_nothing_outside(monkeypatch):
    """Results lie amid numbers that must stay."""
    buffers = []

    def guarded(*shape, **kinds):
        count = math.prod(shape)
        buffers.append((torch.full((count + 128,), torch.nan, device=DEVICE), count))
        return buffers[-1][0][64 : 64 + count].view(shape)

    def empty_like(x):
        return guarded(*x.shape)

    monkeypatch.setattr(fused, "torch", SimpleNamespace(empty=guarded, empty_like=empty_like))
    x = torch.ones(3, 130, device=DEVICE)
    fused.fused_norm(x, x, x[0], 1e-5)
    fused.fused_swiglu(x)
    assert len(buffers) == 3
    for buffer, count in buffers:
        assert buffer.isnan().sum() == 128 and not buffer[64 : 64 + count].isnan().any()


@torch.inference_mode()
def test_the_weights_after_attention_are_fetched_when_it_comes_again(monkeypatch):
    """Of each layer its own, and of two models over one cache, too; of many tokens none."""
    fetched = []

    def spy(q, *where):
        fetched.append(where[-1])
        return q

    monkeypatch.setattr("gpu.store_vectors", spy)
    monkeypatch.setattr(gpu.flash, "flash_attention", lambda q, *where, arrivals: q)
    monkeypatch.setattr(gpu.tuning, "fetches", lambda device, T: T <= gpu.tuning.FEW)
    shape = Config(**SMALL | dict(num_hidden_layers=2))
    ops = GPU(records=False)
    models = [Llama(shape, seed=seed, ops=ops).pack_weights() for seed in (0, 1)]
    cache = PagedCache(models[0].kv_spec(), 64)
    seq, _ = cache.open(())
    for count in (1, 1, gpu.tuning.FEW + 1):
        metadata = cache.extend([(seq, [1] * count)])
        for llama in models:
            llama(torch.ones(count, dtype=torch.int64), metadata)
    wanted = [layer.o.weight.data_ptr() for llama in models for layer in llama.layers]
    assert [w.data_ptr() for w in fetched[4:8]] == wanted
    assert fetched[:4] == fetched[8:] == [None] * 4


KERNELS = {
    "fused_norm": fused,
    "fused_swiglu": fused,
    "stored_product": products,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, by name."""
    names: list[str] = []

    def spy(name: str, function: Any) -> Any:
        return lambda *args, **more: names.append(name) or function(*args, **more)

    for name, page in KERNELS.items():
        monkeypatch.setattr(page, name, spy(name, getattr(page, name)))
    return names


def test_float64_products_are_plain_ones(launched):
    for dtype, count in ((torch.float64, 0), (torch.float32, 1)):
        weight = Linear(quantize(torch.randn(40, 64), 4, 32), torch.randn(40, dtype=dtype))
        x = torch.randn(3, 64, dtype=dtype)
        y = GPU().linear(x, weight)
        torch.testing.assert_close(y, Ops().linear(x, weight), rtol=1e-4, atol=1e-4)
        assert launched == ["stored_product"] * count


@pytest.mark.parametrize("kind", ["float32", "float64", "gradients", "no_grad"])
def test_gradients_and_float64_take_the_plain_operations(kind, launched):
    dtype = torch.float64 if kind == "float64" else torch.float32
    x = torch.randn(2, 8, dtype=dtype, requires_grad="grad" in kind)
    weight = torch.ones(8, dtype=dtype)

    def outputs(ops: Ops) -> list[torch.Tensor]:
        total, normed = ops.add_norm(x, x, weight, 1e-5)
        gate_up = Linear(torch.ones(6, 8, dtype=dtype))
        return [total, normed, ops.swiglu(x, gate_up)]

    with torch.set_grad_enabled(kind != "no_grad"):
        ours = outputs(GPU())
        plain = outputs(Ops())
    torch.testing.assert_close(ours, plain)
    kernels = ["fused_norm", "fused_swiglu"]
    assert launched == (kernels if kind in ("float32", "no_grad") else [])
    assert all(y.requires_grad == (kind == "gradients") for y in ours)
