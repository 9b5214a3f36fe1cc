"""The fused kernels against the plain operations of kernels.Ops."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from conftest import SMALL
from gpu import GPU, fused, products
from kernels import Linear, Ops
from kvcache import KVCache
from model import Llama
from quant import quantize

pytestmark = pytest.mark.gpu_interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs kernels in the interpreter
# A rounding of each kind; the interpreter cuts 16 bits off where a GPU rounds.
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-6),
    torch.float16: dict(rtol=4e-3, atol=1e-3),
    torch.bfloat16: dict(rtol=3e-2, atol=1e-2),
}
DTYPE = st.sampled_from(list(TOLERANCE))
SEED = st.integers(0, 99)


@settings(deadline=None, max_examples=4)
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


@settings(deadline=None, max_examples=3)
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


@pytest.mark.parametrize("bits", [16, 4])
@torch.inference_mode()
def test_all_kernels_of_a_model_run(bits, launched):
    """The same logits, and SwiGLU in the product where it is a kernel of this folder."""
    shape = dict(vocab_size=32, hidden_size=32, intermediate_size=32, head_dim=8)
    config = Config(**SMALL | shape | dict(num_hidden_layers=1))
    llama = Llama(config, seed=1, device=DEVICE, ops=Ops())
    if bits < 16:
        tensors = llama.named_tensors().items()
        quantized = config.quantized(Quantization(bits, group=32))
        llama = Llama(quantized, seed=None, device=DEVICE, ops=Ops())
        fill_model(llama, tensors)
    tokens = torch.arange(3, device=DEVICE)
    rows = torch.tensor([0, 2], device=DEVICE)
    wanted = llama(tokens, logits_indices=rows)
    assert launched == []
    llama.ops = GPU(records=False)
    logits = llama.pack_weights()(tokens, logits_indices=rows)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    between = [name for name in launched if name in dir(fused)]
    if bits == 16:  # float32 is multiplied by torch
        assert launched == ["fused_norm", "fused_norm", "fused_swiglu", "fused_norm"]
    else:
        assert between == ["fused_norm"] * 3 and launched.count("stored_product") == 5


def test_float64_products_are_plain_ones(launched):
    for dtype, count in ((torch.float64, 0), (torch.float32, 1)):
        weight = Linear(quantize(torch.randn(40, 64), 4, 32), torch.randn(40, dtype=dtype))
        x = torch.randn(3, 64, dtype=dtype)
        y = GPU().linear(x, weight)
        torch.testing.assert_close(y, Ops().linear(x, weight), rtol=1e-4, atol=1e-4)
        assert launched == ["stored_product"] * count


@torch.inference_mode()
def test_a_step_with_a_cache_rotates_where_it_stores(launched):
    config = Config(**SMALL | dict(head_dim=16, num_hidden_layers=1))
    llama = Llama(config, DEVICE, seed=1, ops=Ops())
    tokens = torch.arange(3, device=DEVICE)
    wanted = llama(tokens)
    llama.ops = GPU(records=False)
    cache = KVCache.of(llama, 8)
    seq, _ = cache.open(())
    logits = llama(tokens, cache.extend([(seq, range(3))]))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert launched == ["fused_norm", "fused_norm", "fused_swiglu", "fused_norm"]


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
