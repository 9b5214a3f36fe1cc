"""C against plain torch: few rows, ragged shapes, poisoned surroundings; and what happens where there is no compiler."""
import ctypes
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import native
from config import Config, Quantization
from conftest import SMALL
from kernels import attention
from model import Llama, rotate, swiglu
from kvquant import KVStore, store
from nativestep import NativeStep, attends, parts
from paged import PagedCache
from quant import dequantize, quantize

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
NAN = float("nan")


def amid(x: Tensor, fill: float | int = NAN) -> Tensor:
    """The same numbers, in memory between others that must not be used."""
    room = torch.full((x.numel() + 128,), fill, dtype=x.dtype)
    room[64:64 + x.numel()] = x.flatten()
    return room[64:64 + x.numel()].view(x.shape)


def weight(w: Tensor, kind: str, group: int, bias: Tensor | None = None) -> tuple[native.Weight, Tensor]:
    """W [N, K] as products.c reads it, amid numbers that must not be used, and the numbers that it stands for."""
    if kind.startswith("INT"):
        q = quantize(w, int(kind[3:]), group)
        made, wide = native.Weight.of(q.values, bias, q.scale, q.zero, q.columns, q.group), dequantize(*q, dtype=torch.float64)
    else:
        made, wide = native.Weight.of(w.to(getattr(torch, kind)), bias), w.to(getattr(torch, kind)).double()
    held = []
    for i, (name, part) in enumerate((name, part) for name, part in zip(("w", "scale", "zero"), made.held) if getattr(made, name)):
        held.append(amid(part, NAN if part.is_floating_point() else 99))
        setattr(made, name, held[i].data_ptr())
    made.held += held
    return made, wide


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "INT8", "INT4"])
@settings(max_examples=30, deadline=None)
@given(st.one_of(st.integers(0, 15), st.integers(31, 66)), st.one_of(st.integers(1, 40), st.integers(500, 520)), st.one_of(st.integers(1, 150), st.integers(255, 400)),
       st.sampled_from([32, 64, 128]), st.booleans(), st.integers(1, 3), st.integers(0, 2**30))
@torch.inference_mode()
def test_products_of_any_shape(kind, T, N, K, group, bias, threads, seed):
    """Each row as in float64, the same to the bit with any rows beside it and any number of threads; rows may be views, and of 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    x, bias = amid(torch.randn(T, K, generator=generator)), torch.randn(N, generator=generator) if bias else None
    own, wide = weight(torch.randn(N, K, generator=generator), kind, group, bias)
    x = amid(x.bfloat16().float()) if kind == "bfloat16" else x
    torch.set_num_threads(threads)
    y = native.product(x, own)
    torch.set_num_threads(1)
    more = torch.zeros(N) if bias is None else bias
    assert y.shape == (T, N) and ((y.double() - x.double() @ wide.T - more).abs() <= 1e-6 * (x.double().abs() @ wide.abs().T + more.abs()) + 1e-30).all()
    for t in {0, T // 2, T - 1} if T else ():
        assert torch.equal(native.product(x[t:t + 1], own), y[t:t + 1])
    assert torch.equal(native.product(x.T.contiguous().T, own), y)
    short = amid(x.bfloat16())
    assert torch.equal(native.product(short, own), native.product(short.float(), own).bfloat16())
    which = torch.randint(N, (5,), generator=generator)
    assert torch.equal(own.rows(which), wide[which].float())
    with pytest.raises(ValueError, match=f"rows of {K + 1} numbers cannot be multiplied by a matrix of {K} columns"):
        native.product(torch.zeros(1, K + 1), own)
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"row {wrong} of a matrix of {N}"):
            own.rows(torch.tensor([0, wrong]))


def test_what_has_no_product():
    for there, dtype, weight, group in ((True, torch.float32, torch.empty(2, 4)[:, :2], 0), (False, torch.float32, torch.empty(2, 2, dtype=torch.float64), 0),
                                        (False, torch.float32, torch.empty(2, 2, dtype=torch.float16), 0), (False, torch.float64, torch.empty(2, 2), 0),
                                        (False, torch.float32, torch.empty(2, 2, device="meta"), 0), (True, torch.bfloat16, torch.empty(2, 2, dtype=torch.int8), 0),
                                        *((group == 64, torch.float32, torch.empty(2, 2, dtype=torch.uint8), group) for group in (48, 64, 256))):
        assert native.multiplies(dtype, weight, group) == there
    x = torch.ones(2, 2)
    assert native.serves(x, None) and not native.serves(x, x.double()) and not native.serves(x.bfloat16()) and not native.serves(x.requires_grad_())
    with torch.no_grad():
        assert native.serves(x)


@pytest.mark.parametrize("T, C", [(0, 8), (1, 1), (3, 37), (2, 576), (70, 640)])
@torch.inference_mode()
def test_between_the_products(T, C, monkeypatch):
    torch.set_num_threads(2)
    x, delta, weight = (amid(torch.randn(*shape)) for shape in ((T, C), (T, C), (C,)))
    total, y = native.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (C,), weight, 1e-5), atol=1e-6, rtol=1e-5)
    same, y = native.add_norm(x, None, weight, 1e-5)
    assert torch.equal(same, x)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (C,), weight, 1e-5), atol=1e-6, rtol=1e-5)
    wide, qkv, cos, sin = amid(20 * torch.randn(T, 2 * C)), torch.randn(T, 5, 2 * C), torch.randn(T, 1, 2 * C), torch.randn(T, 1, 2 * C)
    mine = swiglu(wide), rotate(qkv[:, :3], cos, sin)
    monkeypatch.setattr(native, "library", lambda: None)
    for own, plain in zip(mine, (swiglu(wide), rotate(qkv[:, :3], cos, sin))):
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_the_exponential_at_its_ends():
    gate = torch.tensor([-1e30, -200, -88, -87, -1e-8, 0, 1e-8, 1, 87, 88, 200, 1e30, math.inf, NAN])
    y = native.swiglu(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    torch.testing.assert_close(y, torch.nn.functional.silu(gate), atol=1e-5, rtol=1e-6, equal_nan=True)


KEPT = ("float32", "bfloat16", "8")


def room(kind: str, shape: tuple[int, ...]) -> Tensor | KVStore:
    """[L, N, S, G, D], poisoned, with heads outermost."""
    L, N, S, G, D = shape
    kept = store((L, G, N, S, D), 8 if kind == "8" else 16, "cpu", torch.float32 if kind == "8" else getattr(torch, kind))
    for part in parts(kept):
        part.fill_(NAN if part.is_floating_point() else 77)
    return kept.transpose(1, 2).transpose(2, 3)


@settings(max_examples=60, deadline=None)
@given(st.data())
@torch.inference_mode()
def test_attention_over_blocks_anywhere(data):
    """Several texts, each with a few new tokens: what is stored is what is stored in torch, to the bit; each text as alone in plain torch;
    beyond them nothing is read, and nothing else written."""
    G, R, S, B = (data.draw(st.integers(1, most)) for most in (3, 4, 5, 3))
    D, threads = data.draw(st.sampled_from([2, 6, 16, 20, 64, 80, 132])), data.draw(st.integers(1, 3))
    kinds = data.draw(st.tuples(st.sampled_from(KEPT), st.sampled_from(KEPT)))
    lengths = [data.draw(st.integers(1, 40)) for _ in range(B)]
    counts = [data.draw(st.integers(1, min(4, n))) for n in lengths]
    torch.manual_seed(data.draw(st.integers(0, 2**30)))
    N, H, L = sum(-(-n // S) for n in lengths) + 2, G * R, 2
    order = torch.randperm(N).tolist()
    tables = [[order.pop() for _ in range(-(-n // S))] for n in lengths]
    pools, plain = ([room(kind, (L, N, S, G, D)) for kind in kinds] for _ in range(2))
    k, v = ([torch.randn(n, G, D) * 10**data.draw(st.integers(-2, 1)) for n in lengths] for _ in range(2))
    k[0][-1], v[0][-1, 0] = 0, 0                                                    # rows of zeros have a scale, too
    q = [torch.randn(n, H, D) for n in counts]
    for pool, also, own in zip(pools, plain, (k, v)):
        for table, length, count, text in zip(tables, lengths, counts, own):
            for i in range(length):
                also[1, table[i // S], i % S].copy_(text[i])
                if i < length - count:
                    pool[1, table[i // S], i % S].copy_(text[i])
    spans = [(table, length - count, length) for table, length, count in zip(tables, lengths, counts)]
    assert attends(*pools, spans)
    step = NativeStep(*pools, spans, S)
    assert step.positions.tolist() == [i for length, count in zip(lengths, counts) for i in range(length - count, length)]
    torch.set_num_threads(threads)
    out = step.attend(1, torch.cat(q), *(torch.cat([text[-n:] for text, n in zip(own, counts)]) for own in (k, v)))
    torch.set_num_threads(1)
    for pool, also in zip(pools, plain):
        assert all(torch.equal(a.view(torch.int16 if a.dtype == torch.bfloat16 else a.dtype).nan_to_num(7), b.view(torch.int16 if b.dtype == torch.bfloat16 else b.dtype).nan_to_num(7))
                   for a, b in zip(parts(pool), parts(also)))
    read = [[torch.stack([pool[1, table[i // S], i % S].to(torch.float32) for i in range(length)], 1) for table, length in zip(tables, lengths)] for pool in plain]
    alone = torch.cat([attention(*whole) for whole in zip(q, *read)])
    torch.testing.assert_close(out, alone, atol=1e-5 * max(1, alone.abs().max().item()), rtol=1e-4)


def models() -> list[Any]:
    wide = SMALL | dict(attention_bias=True, mlp_bias=True)
    return [pytest.param(config, quantization, id=f"{name}-{quantization.bits if quantization else 16}")
            for name, config in (("plain", SMALL), ("biases", wide)) for quantization in (None, Quantization(8), Quantization(4, 32))]


@pytest.mark.parametrize("config, quantization", models())
@pytest.mark.parametrize("layout", ["rows", "blocks"])
@torch.inference_mode()
def test_all_layers_in_one_call_are_the_layers_one_by_one(config, quantization, layout, monkeypatch):
    """To the bit; and up to rounding what the model is without a line of C."""
    torch.manual_seed(0)
    plain = Llama(Config(**config))
    for name, place in plain.places().items():
        place.copy_(torch.randn(place.shape) * (0.1 if "norm" in name else 0.15) + ("norm" in name))
    llama = Llama(plain.config.quantized(quantization), seed=None) if quantization else Llama(plain.config, seed=None)
    llama.fill((name, place) for name, place in plain.places().items())
    assert llama.pack().few is not None
    texts, pieces = [torch.randint(0, 200, (n,)) for n in (30, 26, 9)], [20, 1, 3, 2, 1, 1, 1, 1]

    def run() -> list[Tensor]:
        c = llama.config
        cache = llama.cache(40, 3) if layout == "rows" else PagedCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 40, 4, prefix_sharing=False)
        seqs, logits, at = [cache.open(())[0] for _ in texts], [], 0
        for n in pieces:
            new = [(seq, text[at:at + n].tolist()) for seq, text in zip(seqs, texts) if len(text) > at]
            logits.append(llama(torch.tensor([token for _, tokens in new for token in tokens]), cache.extend(new)))
            at += n
        return logits

    through = mock.Mock(side_effect=NativeStep.through, autospec=True)
    monkeypatch.setattr(NativeStep, "through", lambda *x: through(*x))
    whole = run()
    assert through.call_count == len(pieces) - 1 and [len(call.args[2]) for call in through.call_args_list] == [2, 6, 4, 1, 1, 1, 1]
    monkeypatch.setattr(NativeStep, "whole", False)
    assert all(torch.equal(a, b) for a, b in zip(whole, run())) and through.call_count == len(pieces) - 1
    llama = Llama(llama.config, seed=None)
    monkeypatch.setattr(native, "library", lambda: None)
    llama.fill((name, place) for name, place in plain.places().items())
    assert llama.pack().few is None
    for a, b in zip(whole, run()):
        torch.testing.assert_close(a, b, atol=2e-4 * b.abs().max().item(), rtol=0)


@torch.inference_mode()
def test_a_model_of_16_bits_or_unlike_products_goes_layer_by_layer():
    assert Llama(Config(**SMALL), dtype=torch.bfloat16).pack().few is None and Llama(Config(**SMALL), dtype=torch.float64).pack().few is None
    llama = Llama(Config(**SMALL))
    llama.layers[1].o_proj.pack = lambda keep: None
    assert llama.pack().few is None


# ---- Where it cannot be had ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("environment, why", [
    (dict(LLAMA_NATIVE="0"), "LLAMA_NATIVE=0"), (dict(CC="false"), "the C compiler failed"),
    (dict(CC="/no/such/compiler"), "no C compiler: there is no /no/such/compiler"),
    (dict(CC="gcc -D__clang__"), "the C compiler failed: #error clang asks for the threads of LLVM's OpenMP, and PyTorch has GCC's")])
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
