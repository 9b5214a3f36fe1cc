"""The fused kernels against the plain operations of model.py."""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
import fused
import model
import quantmatmul
import weightonly
from config import Config, Quantization
from conftest import SMALL
from crosscompile import apart
from model import Llama, RMSNorm, rotate
from test_flash import in_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"                                        # a CPU runs the kernels in the interpreter
# A rounding of each kind; the interpreter cuts 16 bits off where a GPU rounds.
TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-6), torch.float16: dict(rtol=4e-3, atol=1e-3), torch.bfloat16: dict(rtol=3e-2, atol=1e-2)}
DTYPE = st.sampled_from(list(TOLERANCE))


@settings(deadline=None, max_examples=10)
@given(T=st.integers(0, 4), C=st.integers(1, 600), dtype=DTYPE, first=st.booleans(), seed=st.integers(0, 99))
def test_add_norm(T, C, dtype, first, seed):
    torch.manual_seed(seed)
    norm = RMSNorm(C, 1e-5, device=DEVICE, dtype=dtype)
    norm.weight.data.normal_(1, 0.2)
    x, delta = (torch.randn(2 * T, C, device=DEVICE).to(dtype)[::2] * 3 for _ in range(2))
    kept = x.clone()
    total, y = fused.add_norm(x, None if first else delta, norm.weight, norm.eps)
    expected = x if first else x + delta
    assert torch.equal(x, kept) and total.dtype == y.dtype == dtype
    torch.testing.assert_close(total, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(y, norm(total), **TOLERANCE[dtype])


@settings(deadline=None, max_examples=10)
@given(T=st.integers(0, 4), heads=st.integers(1, 20), D=st.sampled_from([2, 6, 64, 80, 128]), dtype=DTYPE, seed=st.integers(0, 99))
def test_rotate(T, heads, D, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(T, heads + 3, D, device=DEVICE).to(dtype)[:, :heads]                       # v lies behind q and k
    angles = torch.rand(T, 1, D // 2, device=DEVICE) * 6
    angles = torch.cat((-angles, angles), -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    y = fused.rotate(x, cos, sin)
    assert y.is_contiguous() and y.dtype == dtype
    torch.testing.assert_close(y, rotate(x, cos, sin), **TOLERANCE[dtype])


@settings(deadline=None, max_examples=10)
@given(T=st.integers(0, 4), width=st.integers(1, 2500), dtype=DTYPE, seed=st.integers(0, 99))
def test_swiglu(T, width, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(T, 2 * width, device=DEVICE).to(dtype) * 5
    gate, up = x.chunk(2, -1)
    y = fused.swiglu(x)
    assert y.dtype == dtype and y.shape == (T, width)
    torch.testing.assert_close(y, F.silu(gate) * up, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_everything_is_written_and_nothing_beside_it(dtype, monkeypatch):
    """Results are made within poisoned room."""
    rooms = []

    def guarded(*shape, **kinds):
        count = math.prod(shape)
        rooms.append((torch.full((count + 128,), torch.nan, device=DEVICE, dtype=dtype), count))
        return rooms[-1][0][64:64 + count].view(shape)

    monkeypatch.setattr(fused, "torch", SimpleNamespace(empty=guarded, empty_like=lambda x: guarded(*x.shape)))
    x = torch.ones(3, 130, device=DEVICE, dtype=dtype)
    fused.add_norm(x, x, x[0], 1e-5), fused.swiglu(x), fused.rotate(x.view(3, 13, 10), x[:, None, :10].contiguous(), x[:, None, :10].contiguous())
    assert len(rooms) == 4
    for room, count in rooms:
        assert room.isnan().sum() == 128 and not room[64:64 + count].isnan().any()


@pytest.mark.parametrize("bits", [16, 8, 4])
@torch.inference_mode()
def test_a_model_whose_every_kernel_runs(bits, monkeypatch):
    """As on a GPU: the same logits, with four launches between the products of a layer, and one before the head."""
    config = Config(**SMALL | dict(hidden_size=64, intermediate_size=96, head_dim=16))
    plain = Llama(config, seed=1, device=DEVICE)
    llama = plain if bits == 16 else Llama(config.quantized(Quantization(bits, group=32)), seed=None, device=DEVICE)
    if bits < 16:
        llama.fill(plain.places().items())
    tokens, launches, rows = torch.arange(5, device=DEVICE), [], torch.tensor([1, 4], device=DEVICE)
    monkeypatch.setattr(model, "on_gpu", lambda x: False)
    monkeypatch.setattr(quantmatmul, "on_gpu", lambda x: False)
    expected = llama(tokens, rows=rows)
    monkeypatch.setattr(model, "on_gpu", lambda x: True)
    monkeypatch.setattr(quantmatmul, "on_gpu", lambda x: True)
    for page, name in [(fused, "add_norm"), (fused, "rotate"), (fused, "swiglu"), (weightonly, "product")]:
        made = getattr(page, name)
        monkeypatch.setattr(page, name, lambda *args, made=made, name=name: launches.append(name) or made(*args))
    torch.testing.assert_close(llama(tokens, rows=rows), expected, rtol=1e-4, atol=1e-4)
    between, products = [name for name in launches if name != "product"], launches.count("product")
    assert between == ["add_norm", "rotate", "add_norm", "swiglu"] * 2 + ["add_norm"] and products == (0 if bits == 16 else 9)
    assert bits == 16 or (llama.head.path(64), llama.head.path(65), llama.head.path(0)) == ("kernel", "tiles", "tiles")


@torch.inference_mode()
def test_a_step_with_a_cache_rotates_where_it_stores(monkeypatch):
    llama, tokens, launches = Llama(Config(**SMALL | dict(head_dim=16)), seed=1, device=DEVICE), torch.arange(5, device=DEVICE), []
    monkeypatch.setattr(model, "on_gpu", lambda x: False)
    expected = llama(tokens)
    monkeypatch.setattr(model, "on_gpu", lambda x: True)
    for name in ("add_norm", "rotate", "swiglu"):
        made = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *args, made=made, name=name: launches.append(name) or made(*args))
    with in_triton():
        cache = llama.cache(8)
        torch.testing.assert_close(llama(tokens, cache.extend([(cache.open(())[0], range(5))])), expected, rtol=1e-4, atol=1e-4)
    assert launches == ["add_norm", "add_norm", "swiglu"] * 2 + ["add_norm"]


def test_gradients_and_float64_take_the_plain_operations(monkeypatch):
    monkeypatch.setattr(model, "on_gpu", lambda x: True)
    x = torch.ones(1, 4, requires_grad=True)
    assert not model.fuses(x) and not model.fuses(x.detach().double()) and model.fuses(x.detach())
    with torch.no_grad():
        assert model.fuses(x)


@pytest.mark.meanwhile(apart, "fused", "compiled", 4096, 14336, 128)
def test_nothing_spills(meanwhile):
    for name, registers, spills, shared in meanwhile():
        assert spills == 0 and registers <= 64 and shared <= 1024, name
