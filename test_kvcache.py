"""The cache against lists of vectors; and a text cut in any way gives the same logits."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kernels import attention
from kvcache import CacheFull, KVCache, kv_bytes
from config import Config
from model import Llama

L, G, H, D, N, S = 2, 2, 4, 6, 9, 3


class CacheMachine(RuleBasedStateMachine):
    """Every operation on the cache beside the same on Python lists: {seq: [k and v of each token, per layer]}."""

    def __init__(self):
        super().__init__()
        self.cache, self.texts = KVCache(L, G, D, N, S, dtype=torch.float64), {}
        self.cache.keys.fill_(math.nan)                          # what was never stored must never be read
        self.cache.values.fill_(math.nan)
        self.random = torch.Generator().manual_seed(0)

    def rand(self, *shape):
        return torch.randn(*shape, dtype=torch.float64, generator=self.random)

    def pick(self, i):
        return sorted(self.texts)[i % len(self.texts)]

    @rule()
    def open(self):
        if len(self.texts) == S:
            with pytest.raises(CacheFull):
                self.cache.open([1])
        else:
            seq, have = self.cache.open([1, 2])
            assert have == 0 and seq not in self.texts
            self.texts[seq] = []

    @precondition(lambda self: self.texts)
    @rule(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=S))
    def extend(self, sizes):
        wanted = [(seq, n) for seq, n in zip(sorted(self.texts), sizes) if n]
        if not wanted:
            with pytest.raises(ValueError):
                self.cache.extend([(self.pick(0), [])])
            return
        fits = all(len(self.texts[seq]) + n <= N for seq, n in wanted)
        assert self.cache.fits(wanted) == fits
        if not fits:
            with pytest.raises(CacheFull, match=f"a row holds {N}"):
                self.cache.extend([(seq, range(n)) for seq, n in wanted])
            return
        step = self.cache.extend([(seq, range(n)) for seq, n in wanted])
        assert step.positions.tolist() == [len(self.texts[seq]) + i for seq, n in wanted for i in range(n)]
        T = sum(n for _, n in wanted)
        q, k, v = self.rand(L, T, H, D), self.rand(L, T, G, D), self.rand(L, T, G, D)
        outs = [step.attend(layer, q[layer], k[layer], v[layer]) for layer in range(L)]
        at = 0
        for seq, n in wanted:
            self.texts[seq] += [(k[:, i], v[:, i]) for i in range(at, at + n)]
            for layer in range(L):
                keys, values = (torch.stack([token[i][layer] for token in self.texts[seq]], dim=1) for i in (0, 1))      # [G, m, D]
                torch.testing.assert_close(outs[layer][at:at + n], attention(q[layer, at:at + n], keys, values))
            at += n

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9), keep=st.integers(0, N + 2))
    def truncate(self, i, keep):
        seq = self.pick(i)
        if keep > len(self.texts[seq]):
            with pytest.raises(ValueError, match=f"cannot be truncated to {keep}"):
                self.cache.truncate(seq, keep)
        else:
            self.cache.truncate(seq, keep)
            del self.texts[seq][keep:]

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def fork(self, i):
        seq = self.pick(i)
        if len(self.texts) == S:
            with pytest.raises(CacheFull):
                self.cache.fork(seq)
        else:
            self.texts[self.cache.fork(seq)] = list(self.texts[seq])

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def free(self, i):
        seq = self.pick(i)
        self.cache.free(seq)
        del self.texts[seq]
        for operation in (self.cache.length, self.cache.free, lambda s: self.cache.truncate(s, 0), lambda s: self.cache.extend([(s, [1])])):
            with pytest.raises(KeyError, match=f"sequence {seq} is not open"):
                operation(seq)

    @precondition(lambda self: self.texts)
    @rule()
    def twice(self):
        with pytest.raises(ValueError, match="twice"):
            self.cache.extend([(self.pick(0), [1]), (self.pick(0), [2])])

    @invariant()
    def lengths_agree(self):
        assert {seq: self.cache.length(seq) for seq in self.texts} == {seq: len(text) for seq, text in self.texts.items()}


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
test_any_history = CacheMachine.TestCase


def test_the_formula_is_the_allocation():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        cache = KVCache(3, 2, 8, max_len=11, sequences=2, dtype=dtype)
        assert cache.bytes == 2 * kv_bytes(3, 2, 8, 11, dtype) == cache.keys.numel() * dtype.itemsize * 2
    assert kv_bytes(80, 8, 128, 4096, torch.bfloat16) == 1_342_177_280              # Llama 2 70B: not the 80 GB of an article


@pytest.mark.parametrize("wrong", ["layers", "kv_heads", "head_dim", "max_len", "sequences"])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{wrong} is 0"):
        KVCache(**{**dict(layers=1, kv_heads=1, head_dim=2, max_len=3, sequences=1), wrong: 0})


def test_a_dtype_that_is_no_number_format_of_a_cache_is_refused():
    with pytest.raises(ValueError, match="torch.int8"):
        KVCache(1, 1, 2, 3, dtype=torch.int8)


# ---- However a text is cut, the logits are the same

CONFIG = Config(vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                head_dim=10, max_position_embeddings=64)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def loud(dtype: torch.dtype) -> Llama:
    """A model whose logits are of order 1 and depend on everything."""
    llama = Llama(CONFIG, dtype=dtype, seed=3)
    with torch.no_grad():
        for name, place in llama.places().items():
            place.mul_(1 if "norm" in name else 10)
    return llama.pack()


MODELS = {dtype: loud(dtype) for dtype in TOLERANCE}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=24), st.lists(st.integers(1, 24), max_size=8), st.sampled_from(list(TOLERANCE)))
@torch.inference_mode()
def test_every_split_of_a_prompt(text, cuts, dtype):
    llama, tokens = MODELS[dtype], torch.tensor(text)
    whole = llama(tokens)
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    cache = llama.cache(len(text))
    seq, _ = cache.open(text)
    parts = [llama(tokens[a:b], cache.extend([(seq, text[a:b])])) for a, b in zip(bounds, bounds[1:])]
    torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@torch.inference_mode()
def test_texts_packed_into_one_step_do_not_see_each_other(dtype):
    llama, tolerance = MODELS[dtype], TOLERANCE[dtype]
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8] * 11]
    cache = llama.cache(16, sequences=3)
    seqs, done, out = [cache.open(text)[0] for text in texts], [0, 0, 0], [[], [], []]
    for sizes in ((5, 1, 3), (1, 1, 7), (2, 1, 1)):
        chunks = [text[a:a + n] for text, a, n in zip(texts, done, sizes)]
        logits = llama(torch.tensor(sum(chunks, [])), cache.extend(list(zip(seqs, chunks))))
        for i, part in enumerate(logits.split(sizes)):
            out[i].append(part)
        done = [a + n for a, n in zip(done, sizes)]
    for text, parts in zip(texts, out):
        torch.testing.assert_close(torch.cat(parts), llama(torch.tensor(text)), atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_taking_tokens_back_is_as_if_they_had_never_been():
    llama = MODELS[torch.float64]
    cache = llama.cache(12)
    seq, _ = cache.open([])
    llama(torch.tensor([1, 2, 3, 9, 9, 9]), cache.extend([(seq, range(6))]))
    cache.truncate(seq, 3)
    other = cache.length(seq)
    logits = llama(torch.tensor([4, 5]), cache.extend([(seq, [4, 5])]))
    assert other == 3
    torch.testing.assert_close(logits, llama(torch.tensor([1, 2, 3, 4, 5]))[3:], atol=1e-12, rtol=1e-12)
