"""C against plain torch: ragged shapes, poisoned surroundings; Ctrl-C; why there may be no C."""

import ctypes
import math
import platform
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import cpu
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from conftest import examples
from cpu import CPU, native
from cpu.testing import has_tiles, rounding_of_x
from kernels import HeadNorm, Linear, Ops
from kvcache import AttentionMetadata, KVCache, KVSpec, SequenceSlice, Store
from model import Llama
from paged import PagedCache
from quant import KEY_GROUP, WIDTHS, quantize
from sampling import Keyed
from test_kernels import Cached
from testing.models import SMALL
from testing.tensors import LAYOUTS, attend, laid_out, stands_for

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")
NAN = float("nan")
PLAIN = Ops()


def amid(x: Tensor, fill: float | int = NAN) -> Tensor:
    """The same numbers, in memory between others that must not be used."""
    memory = torch.full((x.numel() + 128,), fill, dtype=x.dtype)
    memory[64 : 64 + x.numel()] = x.flatten()
    return memory[64 : 64 + x.numel()].view(x.shape)


def poisoned_weight(
    w: Tensor, layout: Any, group: int, bias: Tensor | None = None
) -> tuple[native.Weight, Any]:
    """W [N, K] as products.c reads it, amid numbers that must not be used, and as it is stored."""
    stored = w.to(layout) if isinstance(layout, torch.dtype) else laid_out(w, layout, group)
    weight = native.Weight.of(Linear(stored, bias))
    for name in ("w", "scale", "zero"):
        part = weight.tensors[name]
        if part is not None:
            part = amid(part, NAN if part.is_floating_point() else 99)
            weight.tensors[name] = part
            setattr(weight, name, part.data_ptr())
    return weight, stored


@pytest.mark.parametrize("layout", [torch.float32, torch.bfloat16, *LAYOUTS[1:]])
@examples(5)
@given(
    T=st.integers(0, 15) | st.integers(23, 66) | st.integers(190, 300),
    N=st.integers(1, 40) | st.integers(500, 520),
    K=st.integers(1, 150) | st.integers(255, 400),
    group=st.sampled_from([32, 64, 128, 512]),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**30),
)
@example(T=40, N=50, K=1090, group=128, has_bias=True, threads=2, seed=0)
@torch.inference_mode()
def test_products_of_any_shape(layout, T, N, K, group, has_bias, threads, seed):
    """Each row as in float64, and the same to the bit alone, beside any rows, in chunks, and on any
    number of threads. Rows may be views, and of 16 bits; they may be so small that products are
    subnormal, which tiles count as 0."""
    torch.manual_seed(seed)
    x = amid(torch.randn(T, K) * 10.0 ** torch.randint(-38, 30, (T, 1)))
    bias = torch.randn(N) if has_bias else torch.zeros(N)
    weight, stored = poisoned_weight(torch.randn(N, K), layout, group, bias if has_bias else None)
    W, seen_x, size = stands_for(stored, x)
    torch.set_num_threads(threads)
    y = native.product(x, weight)
    torch.set_num_threads(1)
    assert y.shape == (T, N)
    error = (y.double() - seen_x @ W.T - bias).abs()
    bound = 1e-6 * (size + bias.abs()) + rounding_of_x(stored, seen_x, W)
    in_tiles = layout == torch.bfloat16 and has_tiles()
    if in_tiles:  # x has two times eight bits there
        bound += 2**-17 * size
    assert (error <= bound + 1e-26).all()  # 8 bits of x: up to 1e-30 is 0
    for rows in (1, 2, 3, 7, 20, 37) if T < 50 else (37,):
        chunks = [native.product(chunk, weight) for chunk in x.split(rows)]
        assert torch.equal(torch.cat(chunks), y)
    assert torch.equal(native.product(x.T.contiguous().T, weight), y)
    if layout == torch.bfloat16 and not in_tiles:  # as the same numbers in float32
        wide, _ = poisoned_weight(W, torch.float32, group, bias if has_bias else None)
        assert torch.equal(native.product(x, wide), y)
    short = amid(x.bfloat16())
    wanted = native.product(short.float(), weight).bfloat16()
    assert torch.equal(native.product(short, weight), wanted)
    indices = torch.randint(N, (5,))
    assert torch.equal(weight.rows(indices), W[indices].float())


SHAPE = "C wants numbers of shape"
STEP = "in this step and its cache"


def refused(says: str, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises((ValueError, IndexError), match=says):
        call(*arguments)


def test_wrong_shapes_and_rows_are_refused():
    weight = native.Weight.of(Linear(torch.randn(5, 8)))
    refused("rows of 9 .* a matrix of 8 columns", native.product, torch.zeros(1, 9), weight)
    for wrong in (-1, 5):
        refused(f"row {wrong} of a matrix of 5", weight.rows, torch.tensor([0, wrong]))
    q = quantize(torch.randn(5, 64), 4, 32)
    parts = [dict(scale=q.scale[:4]), dict(zero=q.zero[:, :1]), dict(columns=72)]
    weights = [Linear(q._replace(**part)) for part in parts]
    weights += [Linear(q._replace(order=torch.arange(9))), Linear(torch.randn(5, 8), torch.ones(4))]
    for linear in weights:
        refused(SHAPE, native.Weight.of, linear)
    x = torch.zeros(2, 8)
    refused(SHAPE, native.add_norm, x, x[:1], x[0], 1e-5)
    refused(SHAPE, native.add_norm, x, x, x[0, :7], 1e-5)
    p = torch.full((2, 3, 7), 1 / 7)
    drafted = torch.zeros(2, 2, dtype=torch.int64)
    rng = Keyed(torch.arange(2), torch.arange(2))
    refused(SHAPE, native.verify_drafts, p[:, :2], p, drafted, rng)
    refused(SHAPE, native.verify_drafts, p, p[:1], drafted, rng)
    refused(SHAPE, native.verify_drafts, p, p, drafted, rng[:1])


def test_a_step_is_of_its_cache():
    """A cache of another model has other layers, heads, or another head_dim."""
    cache = KVCache(KVSpec(1, 2, 4), 8, 1)
    seq, _ = cache.open([1, 2, 3])
    metadata = cache.extend([(seq, [1, 2, 3])])
    for T, G, D, layer in ((2, 2, 4, 0), (3, 1, 4, 0), (3, 2, 2, 0), (3, 2, 4, 1), (3, 2, 4, -1)):
        refused(STEP, native.attend, torch.zeros(T, 8, D), G, None, metadata, layer)
    qkv = torch.zeros(3, 8, 4)
    angles = torch.zeros(3, 1, 2)
    for rope in ((angles, angles[:1]), (angles[..., :1], angles)):
        refused(SHAPE, native.attend, qkv, 2, rope, metadata, 0)
    norm = HeadNorm(torch.ones(4), 1e-5)
    refused(SHAPE, native.attend, qkv, 2, None, metadata, 0, norm)
    llama = Llama(Config(**SMALL), ops=CPU())
    llama.pack_weights()
    refused(STEP, llama, torch.tensor([1, 2, 3]), metadata)


def test_what_there_is_c_for():
    wide = torch.randn(2, 300)
    assert native.multiplies(torch.empty(2, 4)[:, :2])
    assert native.multiplies(quantize(torch.randn(2, 4), 8), torch.bfloat16)
    for bits in (4, "nf4"):
        for group in (8, 12, 48, 128, 160, 256, 300):
            in_c = native.multiplies(quantize(wide, bits, group))
            assert in_c == (group not in (12, 160)), group
    assert not native.multiplies(torch.empty(2, 2, dtype=torch.float64))
    assert not native.multiplies(torch.empty(2, 2, dtype=torch.float16))
    assert not native.multiplies(torch.empty(2, 2), torch.float64)
    assert not native.multiplies(torch.empty(2, 2, device="meta"))
    x = torch.ones(2, 2)
    assert native.serves(x, None)
    assert not native.serves(x, x.double()) and not native.serves(x.bfloat16())
    assert not native.serves(x.requires_grad_())
    with torch.no_grad():
        assert native.serves(x)


@torch.inference_mode()
def test_the_exponential_at_its_ends():
    gate = torch.tensor(
        [-1e30, -200, -90, -88, -87, -1e-8, 0, 1e-8, 1, 87, 88, 200, 1e30, math.inf, NAN]
    )
    y = native.swiglu(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    wanted = torch.nn.functional.silu(gate)
    torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-6, equal_nan=True)


# ---- Attention ----------------------------------------------------------------------------------


def poisoned(shape: tuple[int, ...], bits: int, dtype: torch.dtype, group: int | None) -> Store:
    """Keys or values that must not be used, as the CPU has them."""
    store = Store.empty(shape, bits, dtype, torch.device("cpu"), CPU().empty_kv, group)
    for part in store.parts:
        part.fill_(NAN if part.is_floating_point() else 77)
    return store


def halfway(x: Tensor) -> Tensor:
    """The same numbers, but halfway between two of bfloat16: the even one is stored."""
    return ((x.view(torch.int32) & -0x10000) | 0x8000).view(torch.float32)


@examples(40)
@given(st.data())
@torch.inference_mode()
def test_attention_of_a_token_is_the_same_to_the_bit_whatever_shares_its_pass(data):
    """A text read at once, beside another one, on any number of threads, is one read in pieces."""
    G, R, S = (data.draw(st.integers(1, most)) for most in (3, 5, 40))
    D = data.draw(st.sampled_from([2, 20, 64, 72, 128]))
    bits = data.draw(st.sampled_from(list(WIDTHS.values())))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=2))
    torch.manual_seed(data.draw(st.integers(0, 2**30)))
    texts = [torch.randn(n, (R + 2) * G, D) for n in lengths]
    table = range(-(-150 // S))
    pieces = data.draw(st.lists(st.sampled_from([1, 2, 5, 16, 17, 33]), min_size=150, max_size=150))

    def empty_cache() -> Cached:
        shape = (1, 2 * len(table), S, G, D)
        keys, values = (poisoned(shape, b, dtype, g) for b, g in zip(bits, (KEY_GROUP, None)))
        return Cached(keys, values, dtype, block_size=S)

    slices = []
    for b, n in enumerate(lengths):
        slices.append(SequenceSlice([b * len(table) + i for i in table], 0, n))
    together = AttentionMetadata(slices, S, empty_cache())
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    whole = native.attend(torch.cat(texts), G, None, together, 0)
    torch.set_num_threads(1)
    cache = empty_cache()
    stop = 0
    for piece in pieces:
        start, stop = stop, min(stop + piece, lengths[0])
        if start < stop:
            alone = AttentionMetadata([SequenceSlice(table, start, stop)], S, cache)
            out = native.attend(texts[0][start:stop], G, None, alone, 0)
            assert torch.equal(out, whole[start:stop])


@pytest.mark.parametrize("bits", [16, 8, 4])
@torch.inference_mode()
def test_numbers_of_any_size_are_stored_as_plain_torch_stores_them(bits):
    """To the bit; NaN is read as NaN, as is a group of few bits that is not finite."""
    D = 36
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    torch.manual_seed(bits)
    sizes = torch.tensor([1e-44, 1e-30, 1e-3, 1.0, 1e38, 3.4e38])
    k, v = halfway((2 * torch.rand(2, len(sizes), 1, D) - 1) * sizes[:, None, None])
    v[:-1] += sizes[:-1, None, None]
    v[0] = 1e6 + torch.rand(1, D)  # a grid of 4 bits whose zero lies far outside
    v[2] = torch.linspace(-1.5, 13.5, D)  # 15 steps and a zero of 2: 13.5 is cut off at 15
    q = torch.zeros(len(sizes), 1, D)
    results = []
    for ops in (CPU(), PLAIN):
        stores = [poisoned((2, 1, 8, 1, D), bits, dtype, g) for g in (KEY_GROUP, None)]
        cache = Cached(*stores, torch.float32, 8)
        metadata = AttentionMetadata([SequenceSlice([0], 0, len(sizes))], 8, cache)
        attend(ops, q, k, v, metadata, 1)
        results.append([part for store in stores for part in store.parts])
    for part, wanted_part in zip(*results, strict=True):
        as_bytes = part.contiguous().view(torch.uint8)
        assert torch.equal(as_bytes, wanted_part.contiguous().view(torch.uint8))
    metadata = AttentionMetadata([SequenceSlice([0], 0, 1)], 8, cache)
    damage = torch.tensor([NAN, NAN, math.inf, -math.inf])
    damage.view(torch.int32)[0] = -1  # a NaN with all bits
    for wrong in damage[: 2 if bits == 16 else 4]:
        for damaged in (k, v):
            vectors = torch.ones(2, 1, 1, D)
            vectors[int(damaged is v), ..., -1] = wrong
            out = attend(CPU(), q[:1], *vectors, metadata, 1)
            assert out[..., -1].isnan().all()


def test_caches_that_c_does_not_read():
    """Of float16, and in another order in memory than the tokens of a head side by side."""
    shape = (1, 2, 4, 2, 8)
    device = torch.device("cpu")
    for ops, bits, group, in_c in (
        (CPU(), 16, None, True),
        (CPU(), 8, None, True),
        (CPU(), 4, None, True),
        (CPU(), 4, 16, True),
        (PLAIN, 16, None, False),
    ):
        store = Store.empty(shape, bits, torch.float32, device, ops.empty_kv, group)
        assert native.reads(store) == in_c
    half = Store.empty(shape, 16, torch.float16, device, CPU().empty_kv)
    full = Store.empty(shape, 16, torch.float32, device, CPU().empty_kv)
    assert not native.reads(full, half)


def test_which_attention_a_step_takes(compiler, monkeypatch):
    """C, with a cache and without; plain torch for float64, gradients, and without a compiler."""
    cpu.ops()  # its self-test uses what is replaced here
    called = []
    for page in (native, Ops):
        answer = lambda *args, page=page: called.append(page) or torch.zeros(2, 1, 4)  # noqa: E731
        monkeypatch.setattr(page, "attend", answer)
    for bits, dtype, in_c in (
        ((16, 16), torch.float32, True),
        ((8, 8), torch.bfloat16, True),
        ((4, 4), torch.float32, True),
        ((8, 4), torch.float64, False),
    ):
        cache = KVCache(KVSpec(2, 1, 4, dtype=dtype, bits=bits, ops=CPU()), 20, 2)
        slices = [SequenceSlice([b], 0, 2) for b in range(2)]
        q = torch.zeros(4, 1, 4, dtype=dtype)
        attend(CPU(), q, q, q, AttentionMetadata(slices, 20, cache), 0)
        assert called.pop() == (native if in_c and compiler else Ops)
    for dtype, learns in ((torch.float32, False), (torch.float64, False), (torch.float32, True)):
        q = torch.zeros(4, 1, 4, dtype=dtype, requires_grad=learns)
        attend(CPU(), q, q, q, AttentionMetadata.without_cache(2, 2), 1)
        in_c = compiler and dtype == torch.float32 and not learns
        assert called.pop() == (native if in_c else Ops)


# ---- All layers in one call ---------------------------------------------------------------------


def filled_llama(config: dict[str, Any], quantization: Quantization | None, ops: Ops) -> Llama:
    torch.manual_seed(0)
    plain = Llama(Config(**config))
    for name, tensor in plain.named_tensors().items():
        norm = "norm" in name
        tensor.copy_(torch.randn(tensor.shape) * (0.1 if norm else 0.15) + norm)
    stored = plain.config.quantized(quantization) if quantization else plain.config
    llama = Llama(stored, seed=None, ops=ops)
    fill_model(llama, plain.named_tensors().items())
    llama.pack_weights()
    return llama


BIASED = SMALL | dict(attention_bias=True, mlp_bias=True)
KINDS = [(SMALL, quantization) for quantization in (None, Quantization(8), Quantization(4, 32))]
KINDS += [(BIASED, None), (BIASED, Quantization(8))]


@pytest.mark.parametrize("config, quantization", KINDS)
@torch.inference_mode()
def test_logits_are_the_same_to_the_bit_however_a_text_is_read(config, quantization, monkeypatch):
    """At once, in pieces, beside others; in one call or layer by layer; on one thread or two; and
    up to rounding what the model is without a line of C."""
    llama = filled_llama(config, quantization, CPU())
    text = torch.randint(200, (110,)).tolist()
    calls = []
    run_layers = native.NativeModel.run_layers

    def counted(*arguments):
        calls.append(arguments)
        return run_layers(*arguments)

    monkeypatch.setattr(native.NativeModel, "run_layers", counted)

    def read(pieces: list[int], num_texts: int, model: Llama = llama) -> Tensor:
        calls.clear()
        spec = model.kv_spec(WIDTHS[kv_bits])
        cache = KVCache(spec, 110, num_texts)
        if num_texts > 1:
            cache = PagedCache(spec, 28 * num_texts, 4, prefix_caching=False)
        seqs = [cache.open(())[0] for _ in range(num_texts)]
        logits = []
        start = 0
        for n in pieces:
            new = text[start : start + n]
            start += n
            step = cache.extend([(seq, new) for seq in seqs])
            logits.append(model(torch.tensor(new * num_texts), step)[-n:])
        return torch.cat(logits)

    plain = filled_llama(config, quantization, PLAIN)
    for kv_bits in WIDTHS:
        whole = read([110], 1)
        assert not calls
        assert torch.equal(read([1] * 110, 1), whole) and len(calls) == 110
        torch.set_num_threads(2)
        for pieces, num_texts in (([20, 17, 16, 57], 1), ([16, 5, 80, 9], 3)):
            assert torch.equal(read(pieces, num_texts), whole) and calls
        torch.set_num_threads(1)
        if kv_bits == "16":  # rounded numbers may fall on the other side
            wanted = read([20, 1, 3, 20, 66], 1, plain)
            torch.testing.assert_close(whole, wanted, atol=2e-4 * wanted.abs().max(), rtol=0)


@torch.inference_mode()
def test_a_model_of_16_bits_or_unlike_products_goes_layer_by_layer():
    full, *others = (
        Llama(Config(**SMALL), dtype=dtype, ops=CPU())
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    )
    assert full.ops.native_model(full) is None  # not packed yet
    for llama in (full, *others):
        llama.pack_weights()
    model = full.ops.native_model(full)
    assert model is not None and full.ops.native_model(full) is model
    assert not any(llama.ops.native_model(llama) for llama in others)
    slices = [SequenceSlice([0], 0, 1)]
    for dtype, in_c in ((torch.float32, True), (torch.bfloat16, True), (torch.float64, False)):
        cache = KVCache(replace(full.kv_spec(), dtype=dtype), 9)
        assert cpu.attends_in_c(AttentionMetadata(slices, 9, cache)) == in_c
    llama = Llama(Config(**SMALL), ops=CPU())
    o = llama.layers[1].o
    llama.pack_weights()
    llama.layers[1].o = o
    assert llama.ops.native_model(llama) is None


# ---- Ctrl-C -------------------------------------------------------------------------------------


@torch.inference_mode()
def test_ctrl_c_between_calls_of_c_is_a_keyboard_interrupt():
    """Never a ctypes.ArgumentError: no Python code runs while arguments are converted."""
    weight = native.Weight.of(Linear(torch.randn(16, 8)))
    x = torch.ones(1, 8)
    raised: Counter[str] = Counter()
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-6 * i)
                for _ in range(10_000):
                    native.product(x, weight)
                    native.add_norm(x, x, x[0], 1e-5)
            except (KeyboardInterrupt, ctypes.ArgumentError) as error:
                raised[type(error).__name__] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert raised == {"KeyboardInterrupt": 300}


def test_ctrl_c_while_a_cache_is_looked_at_leaves_it_to_c(monkeypatch):
    """Otherwise its next texts would be slower, and have other last bits."""
    cache = KVCache(KVSpec(1, 1, 8), 4)

    def interrupted(store: Store) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native.Vectors, "of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            native.cache_layout(cache)
    assert native.cache_layout(cache) is not None


# ---- Where it cannot be compiled ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, why",
    [
        (dict(LLAMA_NATIVE="0"), "LLAMA_NATIVE=0"),
        (dict(CC="false"), "the C compiler failed"),
        (dict(CC="/no/such/compiler"), "no C compiler: there is no /no/such/compiler"),
        (dict(CC="gcc -D__clang__"), "the C compiler failed: #error clang asks for the threads"),
        (dict(CC="gcc -mavx2 -D__builtin_cpu_supports(name)=0"), "this CPU lacks instructions"),
    ],
)
def test_why_there_is_no_library(environment, why, tmp_path, monkeypatch):
    if "clang" in why and "libgomp" not in Path(native.openmp_library()).name:
        pytest.skip("PyTorch has LLVM's OpenMP")
    if "gcc" in environment.get("CC", "") and shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    if "-mavx2" in environment.get("CC", "") and platform.machine() != "x86_64":
        pytest.skip("AVX2 is of x86")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-O0",))  # quickly
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as told:
        loaded = native.load_library.__wrapped__()
    reason = loaded.why_not
    assert loaded.library is None and reason.startswith(why) and len(reason.splitlines()) == 1
    wanted = [] if "LLAMA_NATIVE" in environment else [f"{native.WITHOUT_C}: {reason}"]
    assert [str(warning.message) for warning in told] == wanted


def test_where_there_are_no_threads_to_share(monkeypatch):
    monkeypatch.setattr(native, "openmp_library", lambda: None)
    with pytest.raises(OSError, match="^this PyTorch has no OpenMP threads to share$"):
        native.build_library()
    monkeypatch.setattr(native.platform, "system", lambda: "Plan 9")
    with pytest.raises(OSError, match="^Plan 9 is neither Linux nor macOS$"):
        native.build_library()


def test_the_threads_are_those_of_pytorch(tmp_path):
    """Though another package may have brought an OpenMP of its own."""
    file = native.openmp_library()
    others = [ctypes.CDLL(shutil.copy(file, tmp_path / f"libgomp-{i}.so.1")) for i in range(3)]
    assert len(others) == 3 and native.openmp_library() == file
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


def test_after_a_long_wait_half_of_the_threads_rest() -> None:
    second = 1_000_000_000
    loops = [  # milliseconds: a loop's begin, its first thread's end, its last one's; threads then
        (0, 0.1, 0.9, 4),  # a short wait
        (0, 9, 12, 4),  # a wait that is less than half of its loop
        (0, 0.1, 4, 2),
        (4, 5, 9, 1),
        (9, 18, 18, 1),
        (20, 21, 21, 4),  # the rest of 10 ms is over
        (30, 30, 33, 2),  # interrupted again, soon
        (50, 52, 52, 2),
        (53, 54, 54, 4),
    ]

    def run_loops() -> list[int]:
        torch.set_num_threads(4)
        threads = []
        for *times, _ in loops:
            native.library().notice(*[second + int(time * 1_000_000) for time in times])
            threads.append(torch.get_num_threads())
        return threads

    # Each thread that calls products has a state of its own.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_loops).result() == [threads for *_, threads in loops]
