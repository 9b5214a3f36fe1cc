"""C against plain torch: few rows, ragged shapes, poisoned surroundings; and the reason where there is no compiler."""

import ctypes
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cpu
from checkpoint.config import Config
from checkpoint.formats import Quantization
from conftest import SMALL
from cpu import CPU, native
from kernels import Linear, Ops, Span, Step
from kvcache import KVCache, Store
from model import Llama
from paged import PagedCache
from quant import quantize
from test_kernels import LAYOUTS, laid_out, stands_for

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
NAN, PLAIN = float("nan"), Ops()


def amid(x: Tensor, fill: float | int = NAN) -> Tensor:
    """The same numbers, in memory between others that must not be used."""
    room = torch.full((x.numel() + 128,), fill, dtype=x.dtype)
    room[64 : 64 + x.numel()] = x.flatten()
    return room[64 : 64 + x.numel()].view(x.shape)


def weight(
    w: Tensor, kind: Any, group: int, bias: Tensor | None = None
) -> tuple[native.Weight, Any]:
    """W [N, K] as products.c reads it, amid numbers that must not be used, and as it is stored."""
    stored = w.to(kind) if isinstance(kind, torch.dtype) else laid_out(w, kind, group)
    made = native.Weight.of(Linear(stored, bias))
    for name, part in zip(("w", "scale", "zero"), list(made.held)):
        if getattr(made, name):
            made.held.append(amid(part, NAN if part.is_floating_point() else 99))
            setattr(made, name, made.held[-1].data_ptr())
    return made, stored


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, *LAYOUTS[1:]])
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(0, 15) | st.integers(31, 66) | st.integers(190, 200),
    N=st.integers(1, 40) | st.integers(500, 520),
    K=st.integers(1, 150) | st.integers(255, 400),
    group=st.sampled_from([32, 64, 128, 512]),
    bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**30),
)
@torch.inference_mode()
def test_products_of_any_shape(kind, T, N, K, group, bias, threads, seed):
    """Each row as in float64, and the same to the bit with any rows beside it (of INT4, with few) and any number of
    threads. Rows may be views, and of 16 bits.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x, bias = (
        amid(torch.randn(T, K, generator=generator)),
        torch.randn(N, generator=generator) if bias else None,
    )
    own, stored = weight(torch.randn(N, K, generator=generator), kind, group, bias)
    wide, seen, most = stands_for(stored, x)
    more = torch.zeros(N) if bias is None else bias
    torch.set_num_threads(threads)
    y = native.product(x, own)
    torch.set_num_threads(1)
    digits = own.kind == native.KINDS.index(4)
    if digits and T:  # x is rounded by at most 2^-24 of the largest
        most += 0.1 * seen.abs().amax(-1, keepdim=True) * wide.abs().sum(-1)
    assert (
        y.shape == (T, N)
        and ((y.double() - seen @ wide.T - more).abs() <= 1e-6 * (most + more.abs()) + 1e-30).all()
    )
    for t in {0, T // 2, T - 1} if T else ():
        alone, two = (
            native.product(x[t : t + 1], own),
            native.product(x[max(0, t - 1) : t + 1], own),
        )
        assert torch.equal(alone, two[-1:]) and (torch.equal(alone, y[t : t + 1]) or digits)
    assert torch.equal(native.product(x.T.contiguous().T, own), y)
    if kind == torch.bfloat16:  # the same numbers in float32: the same to the bit
        assert torch.equal(native.product(x, weight(wide, torch.float32, group, bias)[0]), y)
    short = amid(x.bfloat16())
    assert torch.equal(native.product(short, own), native.product(short.float(), own).bfloat16())
    which = torch.randint(N, (5,), generator=generator)
    assert torch.equal(own.rows(which), wide[which].float())
    with pytest.raises(
        ValueError, match=f"rows of {K + 1} numbers cannot be multiplied by a matrix of {K} columns"
    ):
        native.product(torch.zeros(1, K + 1), own)
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"row {wrong} of a matrix of {N}"):
            own.rows(torch.tensor([0, wrong]))


def test_what_there_is_c_for():
    full, empty, wide = torch.float32, torch.empty, torch.randn(2, 300)
    assert native.multiplies(empty(2, 4)[:, :2]) and native.multiplies(
        quantize(torch.randn(2, 4), 8), torch.bfloat16
    )
    for bits in (4, "nf4"):
        found = {
            n: native.multiplies(quantize(wide, bits, n)) for n in (8, 12, 48, 128, 160, 256, 300)
        }
        assert [n for n in found if found[n]] == [8, 48, 128, 256, 300]
    for w, dtype in (
        (empty(2, 2, dtype=torch.float64), full),
        (empty(2, 2, dtype=torch.float16), full),
        (empty(2, 2), torch.float64),
        (empty(2, 2, device="meta"), full),
    ):
        assert not native.multiplies(w, dtype)
    x = torch.ones(2, 2)
    assert (
        native.serves(x, None)
        and not native.serves(x, x.double())
        and not native.serves(x.bfloat16())
    )
    assert not native.serves(x.requires_grad_())
    with torch.no_grad():
        assert native.serves(x)


@pytest.mark.parametrize("T, C", [(0, 8), (1, 1), (3, 37), (2, 576), (2, 1100), (70, 640)])
@torch.inference_mode()
def test_between_the_products(T, C):
    torch.set_num_threads(2)
    x, delta, weight = (amid(torch.randn(*shape)) for shape in ((T, C), (T, C), (C,)))
    wide = amid(20 * torch.randn(T, 2 * C))
    made, plain = (
        [
            *ops.add_norm(x, delta, weight, 1e-5),
            *ops.add_norm(x, None, weight, 1e-5),
            ops.swiglu(wide),
        ]
        for ops in (native, PLAIN)
    )
    assert torch.equal(made[0], plain[0]) and torch.equal(made[2], x)
    for own, wanted in zip(made, plain):
        torch.testing.assert_close(own, wanted, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_the_exponential_at_its_ends():
    gate = torch.tensor(
        [-1e30, -200, -88, -87, -1e-8, 0, 1e-8, 1, 87, 88, 200, 1e30, math.inf, NAN]
    )
    y = native.swiglu(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    torch.testing.assert_close(
        y, torch.nn.functional.silu(gate), atol=1e-5, rtol=1e-6, equal_nan=True
    )


# ---- Attention -------------------------------------------------------------------------------------------------------


def poisoned(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> Store:
    """Keys or values that must not be used, as the CPU has them."""
    store = Store.empty(shape, bits, dtype, torch.device("cpu"), CPU().room)
    for part in store.parts:
        part.fill_(NAN if part.is_floating_point() else 77)
    return store


@settings(max_examples=60, deadline=None)
@given(st.data())
@torch.inference_mode()
def test_attention_over_blocks_anywhere(data):
    """Several texts, each with a few new tokens, beside plain torch: what is stored is the same to the bit, nothing
    else is written, and nothing beyond a text is read.
    """
    G, R, S, B = (data.draw(st.integers(1, most)) for most in (3, 4, 5, 3))
    D, threads = (
        data.draw(st.sampled_from([2, 6, 16, 20, 64, 80, 132])),
        data.draw(st.integers(1, 3)),
    )
    kind = st.sampled_from([(16, torch.float32), (16, torch.bfloat16), (8, torch.float32)])
    kinds = [data.draw(kind) for _ in range(2)]
    lengths = [data.draw(st.integers(1, 40)) for _ in range(B)]
    counts = [data.draw(st.integers(1, min(4, n))) for n in lengths]
    torch.manual_seed(data.draw(st.integers(0, 2**30)))
    N, H, T = sum(-(-n // S) for n in lengths) + 2, G * R, sum(counts)
    order = torch.randperm(N).tolist()
    spans = [
        ([order.pop() for _ in range(-(-n // S))], n - count, n)
        for n, count in zip(lengths, counts)
    ]
    q, loud = torch.randn(T, H, D), 10.0 ** data.draw(st.integers(-2, 1))
    past, new = ([loud * torch.randn(n, G, D) for _ in kinds] for n in (sum(lengths) - T, T))
    new[0][-1], new[1][-1, 0] = 0, 0  # vectors of zeros have a scale, too
    made, plain = [], []
    for ops, results in ((CPU(), made), (PLAIN, plain)):
        stores = [poisoned((2, N, S, G, D), *kind) for kind in kinds]
        cache = SimpleNamespace(keys=stores[0], values=stores[1], dtype=torch.float32)
        if sum(lengths) > T:
            before = Step([(blocks, 0, start) for blocks, start, _ in spans], S, cache)
            for store, numbers in zip(stores, past):
                store.write(1, before.places.slots.long(), numbers)
        assert native.reads(*stores)
        torch.set_num_threads(threads)
        results.append(ops.look_back(q, *new, Step(spans, S, cache), 1))
        results += [part for store in stores for part in store.parts]
        torch.set_num_threads(1)
    torch.testing.assert_close(
        made[0], plain[0], atol=1e-5 * max(1, plain[0].abs().max().item()), rtol=1e-4
    )
    for own, wanted in zip(made[1:], plain[1:]):
        assert torch.equal(
            own.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
        )


def test_caches_that_c_does_not_read():
    """Of 4 bits, and in another order in memory than the tokens of a head side by side."""
    shape, cpu = (1, 2, 4, 2, 8), torch.device("cpu")
    for ops, bits, group in (
        (CPU(), 16, None),
        (CPU(), 8, None),
        (CPU(), 4, None),
        (CPU(), 4, 16),
        (PLAIN, 16, None),
    ):
        kept = Store.empty(shape, bits, torch.float32, cpu, ops.room, group)
        assert native.reads(kept) == (ops is not PLAIN and bits > 4)
    assert not native.reads(
        *(
            Store.empty(shape, 16, dtype, cpu, CPU().room)
            for dtype in (torch.float32, torch.float16)
        )
    )


# ---- All layers in one call ------------------------------------------------------------------------------------------


def models() -> list[Any]:
    wide = SMALL | dict(attention_bias=True, mlp_bias=True)
    return [
        pytest.param(config, quantization, id=f"{name}-{quantization.bits if quantization else 16}")
        for name, config in (("plain", SMALL), ("biases", wide))
        for quantization in (None, Quantization(8), Quantization(4, 32))
    ]


def logits_of(llama: Llama, layout: str) -> list[Tensor]:
    """Of three texts, read piece by piece."""
    cache = (
        KVCache.of(llama, 40, 3)
        if layout == "rows"
        else PagedCache.of(llama, 40, 4, prefix_sharing=False)
    )
    texts = [
        torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (30, 26, 9)
    ]
    seqs, logits, at = [cache.open(())[0] for _ in texts], [], 0
    for n in (20, 1, 3, 2, 1, 1, 1, 1):
        new = [
            (seq, text[at : at + n].tolist()) for seq, text in zip(seqs, texts) if len(text) > at
        ]
        logits.append(
            llama(torch.tensor([token for _, tokens in new for token in tokens]), cache.extend(new))
        )
        at += n
    return logits


@pytest.mark.parametrize("config, quantization", models())
@pytest.mark.parametrize("layout", ["rows", "blocks"])
@torch.inference_mode()
def test_all_layers_in_one_call_are_the_layers_one_by_one(
    config, quantization, layout, monkeypatch
):
    """To the bit; and up to rounding what the model is without a line of C."""
    torch.manual_seed(0)
    plain = Llama(Config(**config))
    for name, place in plain.places().items():
        place.copy_(torch.randn(place.shape) * (0.1 if "norm" in name else 0.15) + ("norm" in name))
    models = [
        Llama(
            plain.config.quantized(quantization) if quantization else plain.config,
            seed=None,
            ops=ops,
        )
        for ops in (CPU(), PLAIN)
    ]
    for llama in models:
        llama.fill(plain.places().items())
        llama.prepare()
    calls, layers = [], CPU.layers

    def counted(self: CPU, llama: Llama, cache: Any, spans: list[Span]) -> native.Layers | None:
        calls.append(
            (max(stop - start for _, start, stop in spans), layers(self, llama, cache, spans))
        )
        return calls[-1][1]

    monkeypatch.setattr(CPU, "layers", counted)
    monkeypatch.setattr(cpu, "SCORES", 20 * 20 - 1)
    whole = logits_of(models[0], layout)
    assert [queries for queries, made in calls if made] == [1, 3, 2, 1, 1, 1, 1] and calls[0][
        0
    ] == 20
    monkeypatch.setattr(CPU, "layers", lambda *_: None)
    assert all(map(torch.equal, whole, logits_of(models[0], layout)))
    for own, wanted in zip(whole, logits_of(models[1], layout)):
        torch.testing.assert_close(own, wanted, atol=2e-4 * wanted.abs().max().item(), rtol=0)


@torch.inference_mode()
def test_a_model_of_16_bits_or_unlike_products_goes_layer_by_layer():
    def layers(llama: Llama, dtype: torch.dtype | None = None) -> native.Layers | None:
        return llama.ops.layers(llama, KVCache.of(llama, 9, dtype=dtype), [((), 0, 1)])

    dtypes = torch.float32, torch.bfloat16, torch.float64
    models = [Llama(Config(**SMALL), dtype=dtype, ops=CPU()) for dtype in dtypes]
    assert layers(models[0]) is None  # not prepared yet
    full, *others = [llama.prepare() for llama in models]
    assert layers(full) is layers(full, torch.bfloat16) is not None
    assert not any(map(layers, others)) and layers(full, torch.float64) is None
    llama = Llama(Config(**SMALL), ops=CPU())
    o = llama.layers[1].o
    llama.prepare().layers[1].o = o
    assert layers(llama) is None


# ---- Where it cannot be had ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, why",
    [
        (dict(LLAMA_NATIVE="0"), "LLAMA_NATIVE=0"),
        (dict(CC="false"), "the C compiler failed"),
        (dict(CC="/no/such/compiler"), "no C compiler: there is no /no/such/compiler"),
        (
            dict(CC="gcc -D__clang__"),
            "the C compiler failed: #error clang asks for the threads of LLVM's OpenMP, and PyTorch has GCC's",
        ),
    ],
)
def test_why_there_is_none(environment, why, tmp_path, monkeypatch):
    if "clang" in why and "libgomp" not in Path(native._threads()).name:
        pytest.skip("PyTorch has LLVM's OpenMP")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lib, told = native._library.__wrapped__()
    assert lib is None and told.startswith(why) and len(told.splitlines()) == 1


def test_where_there_are_no_threads_to_share(monkeypatch):
    monkeypatch.setattr(native, "_threads", lambda: None)
    assert native._library.__wrapped__() == (None, "this PyTorch has no OpenMP threads to share")
    monkeypatch.setattr(native.platform, "system", lambda: "Plan 9")
    assert native._library.__wrapped__() == (None, "Plan 9 is not Linux")


def test_the_threads_are_those_of_pytorch(tmp_path):
    """Though another package may have brought an OpenMP of its own."""
    own = native._threads()
    others = [ctypes.CDLL(shutil.copy(own, tmp_path / f"libgomp-{i}.so.1")) for i in range(3)]
    assert len(others) == 3 and native._threads() == own
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
