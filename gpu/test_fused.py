"""The fused kernels against the plain operations of kernels.Ops."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
from checkpoint.config import Config
from checkpoint.formats import Quantization
from conftest import SMALL
from gpu import GPU, fused, weightonly
from gpu.test_crosscompile import apart
from kernels import Linear, Ops
from kvcache import KVCache
from model import Llama
from quant import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs the kernels in the interpreter
# A rounding of each kind; the interpreter cuts 16 bits off where a GPU rounds.
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-6),
    torch.float16: dict(rtol=4e-3, atol=1e-3),
    torch.bfloat16: dict(rtol=3e-2, atol=1e-2),
}
DTYPE = st.sampled_from(list(TOLERANCE))


@settings(deadline=None, max_examples=6)
@example(T=3, C=600, dtype=torch.bfloat16, first=False, seed=1)
@given(
    T=st.integers(0, 4),
    C=st.integers(1, 600),
    dtype=DTYPE,
    first=st.booleans(),
    seed=st.integers(0, 99),
)
def test_add_norm(T, C, dtype, first, seed):
    torch.manual_seed(seed)
    weight = torch.empty(C, device=DEVICE).normal_(1, 0.2).to(dtype)
    x, delta = (torch.randn(2 * T, C, device=DEVICE).to(dtype)[::2] * 3 for _ in range(2))
    kept = x.clone()
    total, y = fused.fused_norm(x, None if first else delta, weight, 1e-5)
    expected = x if first else x + delta
    assert torch.equal(x, kept) and total.dtype == y.dtype == dtype
    torch.testing.assert_close(total, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(y, Ops().add_norm(total, None, weight, 1e-5)[1], **TOLERANCE[dtype])


@settings(deadline=None, max_examples=6)
@example(T=4, heads=8, D=128, dtype=torch.bfloat16, seed=54)  # here two roundings meet
@given(
    T=st.integers(0, 4),
    heads=st.integers(1, 20),
    D=st.sampled_from([2, 6, 64, 80, 128]),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_rotate(T, heads, D, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(T, heads + 3, D, device=DEVICE).to(dtype)[:, :heads]  # v lies behind q and k
    angles = torch.rand(T, 1, D // 2, device=DEVICE) * 6
    angles = torch.cat((-angles, angles), -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    y = fused.fused_rotate(x, cos, sin)
    assert y.is_contiguous() and y.dtype == dtype
    near, far = x.double() * cos, x.double().roll(D // 2, -1) * sin
    rounding = torch.finfo(dtype).eps * (2 * near.abs() + far.abs())  # of x cos, and of the sum
    assert ((y - (near + far)).abs() <= 1.01 * rounding + torch.finfo(dtype).tiny).all()


@settings(deadline=None, max_examples=6)
@example(T=2, width=2500, dtype=torch.float16, seed=1)  # three programs a token
@given(T=st.integers(0, 4), width=st.integers(1, 2500), dtype=DTYPE, seed=st.integers(0, 99))
def test_swiglu(T, width, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(T, 2 * width, device=DEVICE).to(dtype) * 5
    y = fused.fused_swiglu(x)
    assert y.dtype == dtype and y.shape == (T, width)
    torch.testing.assert_close(y, Ops().swiglu(x), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_everything_is_written_and_nothing_beside_it(dtype, monkeypatch):
    """Results are made within poisoned room."""
    rooms = []

    def guarded(*shape, **kinds):
        count = math.prod(shape)
        rooms.append((torch.full((count + 128,), torch.nan, device=DEVICE, dtype=dtype), count))
        return rooms[-1][0][64 : 64 + count].view(shape)

    monkeypatch.setattr(
        fused, "torch", SimpleNamespace(empty=guarded, empty_like=lambda x: guarded(*x.shape))
    )
    x = torch.ones(3, 130, device=DEVICE, dtype=dtype)
    fused.fused_norm(x, x, x[0], 1e-5)
    fused.fused_swiglu(x)
    fused.fused_rotate(
        x.view(3, 13, 10), x[:, None, :10].contiguous(), x[:, None, :10].contiguous()
    )
    assert len(rooms) == 4
    for room, count in rooms:
        assert room.isnan().sum() == 128 and not room[64 : 64 + count].isnan().any()


KERNELS = {
    "fused_norm": fused,
    "fused_rotate": fused,
    "fused_swiglu": fused,
    "weight_only_product": weightonly,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, by name."""
    names: list[str] = []

    def watched(name: str, own: Any) -> Any:
        return lambda *args: names.append(name) or own(*args)

    for name, page in KERNELS.items():
        monkeypatch.setattr(page, name, watched(name, getattr(page, name)))
    return names


@pytest.mark.parametrize("bits", [16, 8, 4])
@torch.inference_mode()
def test_a_model_whose_every_kernel_runs(bits, launched):
    """As on a GPU: the same logits, with four launches between the products of a layer, and one before the head."""
    layers = 2 if bits == 16 else 1
    small = dict(
        vocab_size=32, hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=layers
    )
    config = Config(**SMALL | small)
    plain = Llama(config, seed=1, device=DEVICE)
    llama = (
        plain
        if bits == 16
        else Llama(config.quantized(Quantization(bits, group=32)), seed=None, device=DEVICE)
    )
    if bits < 16:
        llama.fill(plain.places().items())
    tokens, rows = torch.arange(3, device=DEVICE), torch.tensor([0, 2], device=DEVICE)
    llama.ops = Ops()
    expected = llama(tokens, rows=rows)
    assert launched == []
    llama.ops = GPU(records=False)
    torch.testing.assert_close(llama.prepare()(tokens, rows=rows), expected, rtol=1e-4, atol=1e-4)
    between, products = (
        [name for name in launched if name in dir(fused)],
        launched.count("weight_only_product"),
    )
    assert between == ["fused_norm", "fused_rotate", "fused_norm", "fused_swiglu"] * layers + [
        "fused_norm"
    ]
    assert products == (0 if bits == 16 else 5)


@pytest.mark.parametrize("T, dtype, count", [(3, torch.float32, 1), (3, torch.float64, 0)])
def test_weights_of_fewer_bits_are_numbers_where_no_kernel_multiplies_them(
    T, dtype, count, launched
):
    torch.manual_seed(T)
    weight = Linear(quantize(torch.randn(40, 64), 4, 32), torch.randn(40, dtype=dtype))
    x = torch.randn(T, 64, dtype=dtype)
    torch.testing.assert_close(
        GPU().linear(x, weight), Ops().linear(x, weight), rtol=1e-4, atol=1e-4
    )
    assert launched == ["weight_only_product"] * count


@torch.inference_mode()
def test_a_step_with_a_cache_rotates_where_it_stores(launched):
    llama = Llama(Config(**SMALL | dict(head_dim=16)), DEVICE, seed=1, ops=Ops())
    tokens = torch.arange(3, device=DEVICE)
    expected, llama.ops = llama(tokens), GPU(records=False)
    cache = KVCache.of(llama, 8)
    found = llama(tokens, cache.extend([(cache.open(())[0], range(3))]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert launched == ["fused_norm", "fused_norm", "fused_swiglu"] * 2 + ["fused_norm"]


@pytest.mark.parametrize(
    "kind, fuses", [("float32", True), ("float64", False), ("gradients", False), ("no_grad", True)]
)
def test_gradients_and_float64_take_the_plain_operations(kind, fuses, launched):
    x = torch.randn(
        2,
        8,
        dtype=torch.float64 if kind == "float64" else torch.float32,
        requires_grad="grad" in kind,
    )
    cos, weight = torch.ones(2, 1, 4, dtype=x.dtype), torch.ones(8, dtype=x.dtype)

    def found(ops: Ops) -> list[torch.Tensor]:
        return [
            *ops.add_norm(x, x, weight, 1e-5),
            ops.rotate(x.view(2, 2, 4), cos, cos),
            ops.swiglu(x),
        ]

    with torch.set_grad_enabled(kind != "no_grad"):
        ours, plain = found(GPU()), found(Ops())
    torch.testing.assert_close(ours, plain)
    assert launched == (["fused_norm", "fused_rotate", "fused_swiglu"] if fuses else [])
    assert all(y.requires_grad == (kind == "gradients") for y in ours)


@pytest.mark.meanwhile(apart, "gpu.fused", "compile_fused", 4096, 14336, 128)
def test_nothing_spills(meanwhile):
    for name, registers, spills, shared in meanwhile():
        assert spills == 0 and registers <= 64 and shared <= 1024, name
