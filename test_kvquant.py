"""A cache of fewer bits: the same views, copies and gathers as a tensor's, and the same text however it was cut."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config
from conftest import SMALL
from engine import Engine, paged
from kvcache import KVCache, kv_bytes, tokens_that_fit
from kvquant import GROUP, WIDTHS, KVStore, store, vector_bytes, widths
from model import Llama
from pretrained import Model
from quant import from_int4, from_int8, int4, int8


KINDS = [(8, GROUP), (4, GROUP), (4, None)]                                     # keys have groups, values none


def rounded(x: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    return from_int8(*int8(x)) if bits == 8 else from_int4(*int4(x, group), group=group)


def filled(shape: tuple[int, ...], bits: int, group: int | None, seed: int = 0) -> tuple[KVStore, torch.Tensor]:
    """A store, and the numbers that it stands for."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    kept = store(shape, bits, "cpu", torch.float32, group)
    kept.copy_(x)
    return kept, rounded(x, bits, group)


OPERATIONS = {"row": lambda x: x[:, 1], "slice": lambda x: x[:, :, 1:3], "transpose": lambda x: x.transpose(1, 2), "flatten": lambda x: x.flatten(1, 2),
              "gather": lambda x: x[0].index_select(0, torch.tensor([2, 0, 2])), "unbind": lambda x: x.unbind()[1], "index": lambda x: x[0][torch.tensor([1, 1])],
              "several": lambda x: x.flatten(1, 2).transpose(0, 1)[3:7].unbind()[2]}


@pytest.mark.parametrize("bits, group", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_views_and_gathers_are_a_tensors(bits, group, name):
    kept, numbers = filled((2, 3, 4, 22), bits, group)
    assert torch.equal(OPERATIONS[name](kept).to(torch.float32), OPERATIONS[name](numbers))
    assert OPERATIONS[name](kept).to(torch.bfloat16).dtype == torch.bfloat16


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 20), st.integers(0, 99), st.data())
def test_storing_into_a_view_changes_these_places_alone(kind, rows, half, seed, data):
    kept, before = filled((rows, 3, 2 * half), *kind, seed)
    first = data.draw(st.integers(0, rows - 1))
    x = torch.randn(rows - first, 3, 2 * half, generator=torch.Generator().manual_seed(seed + 1)) * 10
    kept[first:].copy_(x)
    expected = before.clone()
    expected[first:] = rounded(x, *kind)
    assert torch.equal(kept.to(torch.float32), expected)
    at = torch.randperm(rows)[:2]
    kept.index_copy_(0, at, 3 * before[at])
    expected[at] = rounded(3 * before[at], *kind)
    assert torch.equal(kept.to(torch.float32), expected)
    kept[0] = kept[rows - 1]
    expected[0] = expected[rows - 1]
    assert torch.equal(kept.to(torch.float32), expected)


@pytest.mark.parametrize("D", [64, 80, 72, 128])
def test_bytes_by_formula_and_as_allocated(D):
    bf16 = kv_bytes(3, 2, D, 11, torch.bfloat16)
    for name, most in (("16", 1.0), ("8", 0.54), ("8/4", 0.42), ("4", 0.33 if D != 72 else 0.35)):
        bits = widths(name)
        cache = KVCache(3, 2, D, 11, dtype=torch.bfloat16, bits=bits)
        formula = kv_bytes(3, 2, D, 11, torch.bfloat16, bits)
        one = sum(vector_bytes(D, width, torch.bfloat16, group) for width, group in zip(bits, (GROUP, None)))
        assert cache.bytes == formula == 3 * 2 * 11 * one <= most * bf16
        real = sum(part.nbytes for kept in (cache.keys, cache.values) for part in getattr(kept, "parts", (kept,)))
        assert real == formula
    assert tokens_that_fit(3, 2, D, torch.bfloat16, torch.device("cpu"), bits=(8, 8)) > 1.8 * tokens_that_fit(3, 2, D, torch.bfloat16, torch.device("cpu"))


def random_llama(seed: int = 1) -> Llama:
    llama = Llama(Config(**SMALL), dtype=torch.float64, seed=seed)
    for place in llama.places().values():
        place.mul_(10)
    return llama


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
@torch.inference_mode()
def test_the_logits_do_not_depend_on_cuts_layouts_forks_or_what_was_taken_back(bits):
    llama, text = random_llama(), torch.randint(256, (41,), generator=torch.Generator().manual_seed(2))
    whole = llama.cache(50, bits=bits)
    expected = llama(text, whole.extend([(whole.open(())[0], text.tolist())]))
    plain = llama.cache(50)
    exact = llama(text, plain.extend([(plain.open(())[0], text.tolist())]))
    assert (expected - exact).abs().max() > 1e-4 * exact.abs().max()                             # quantized it is
    for make in (lambda: llama.cache(50, 3, bits=bits), lambda: paged(llama, 12, 50, bits=bits)):
        for sizes in ([41], [1] * 41, [20, 1, 20], [7, 33, 1]):
            cache, parts = make(), []
            seq, _ = cache.open(text.tolist())
            for chunk in text.split(sizes):
                step = cache.extend([(seq, [*chunk.tolist(), 9, 9])])                            # two too many, which are taken back
                parts.append(llama(torch.cat((chunk, torch.tensor([9, 9]))), step)[:-2])
                cache.truncate(seq, cache.length(seq) - 2)
                other, seq = seq, cache.fork(seq)
                cache.free(other)
            torch.testing.assert_close(torch.cat(parts), expected, atol=1e-9, rtol=1e-9)
    cache = paged(llama, 12, 50, bits=bits)
    for _ in range(2):                                                                           # the second finds the blocks of the first
        seq, have = cache.open(text.tolist())
        logits = llama(text[have:], cache.extend([(seq, text[have:].tolist())]))
        cache.free(seq)
    assert have == 32
    torch.testing.assert_close(logits, expected[32:], atol=1e-9, rtol=1e-9)


def test_what_fits_grows():
    model = Model.load("tiny", "cpu", torch.bfloat16)
    blocks = {name: Engine(model, None, 0, 64, 1, kv_memory=2**20, kv_bits=name).caches[0].pool.total for name in WIDTHS}
    assert blocks["8"] >= blocks["16"] / 0.54 - 1 and blocks["8/4"] >= blocks["16"] / 0.42 - 1
    assert blocks["4"] >= blocks["16"] / 0.33 - 1


def test_fewer_bits_hardly_change_what_the_embedded_model_expects():
    model = Model.load("tiny", "cpu", torch.float32)
    text = model.encode("Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog.")
    losses = {}
    for name in WIDTHS:
        cache = model.llama.cache(len(text), bits=widths(name))
        logits = model.llama(torch.tensor(text), cache.extend([(cache.open(())[0], text)]))
        losses[name] = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:])).item()
    for name, most in (("8", 0.005), ("8/4", 0.05), ("4", 0.05)):
        assert abs(losses[name] / losses["16"] - 1) < most


def test_what_is_refused():
    for wrong in ("3", 2, "4/8", ""):
        with pytest.raises(ValueError, match="kv_bits is .*: it must be 16, 8, 4 or 8/4"):
            widths(wrong)
    with pytest.raises(ValueError, match="head_dim is 5: .* use 8 bits"):
        KVCache(1, 1, 5, 4, bits=(8, 4))
