"""Bytes of caches and weights, and memory that is wasted; lengths of requests."""

from copy import deepcopy
from dataclasses import replace

from checkpoint.formats import Quantization
from checkpoint.weights import weight_bytes
from kvcache import KVCache, KVSpec
from measure import memory, serving
from measure.effort import Effort
from measure.gpu_parts import SHAPES
from measure.serving import log_spread, random_request
from model import Llama
from paged import PagedCache


def test_texts_that_begin_alike_share_no_block_where_waste_is_measured(monkeypatch):
    """The last ones wait for memory, while the first one still runs."""
    alike = [random_request(900, num_tokens, 1) for num_tokens in (100, *[10] * 9)]
    monkeypatch.setattr(memory, "mixed_requests", lambda count: deepcopy(alike))
    *_, blocks_of_one = memory.waste(Effort())
    assert blocks_of_one["waste"] == 0


def test_bytes_in_use_are_live_blocks():
    cache = PagedCache(KVSpec(1, 1, 1), 8, 4)
    assert serving.bytes_in_use([cache]) == 0
    seq, _ = cache.open([1] * 9)
    cache.extend([(seq, [1] * 9)])
    assert serving.bytes_in_use([cache]) == 3 * cache.bytes // 8
    cache.free(seq)
    rows = KVCache(KVSpec(1, 1, 1), 64, 2)
    assert serving.bytes_in_use([cache, rows]) == rows.bytes


def test_bytes_of_weights_are_those_of_the_numbers():
    shape = replace(SHAPES["tiny"], tie_word_embeddings=False)
    embedding = 4 * shape.vocab_size * shape.hidden_size
    plain = Llama(shape)
    numbers = sum(tensor.numel() for tensor in plain.named_tensors().values())
    assert weight_bytes(plain) == 4 * numbers == weight_bytes(plain.pack_weights())
    assert weight_bytes(plain, read=True) == 4 * numbers - embedding
    tied = Llama(SHAPES["tiny"])
    assert weight_bytes(tied) == weight_bytes(tied, read=True) == 4 * numbers - embedding
    small = Llama(shape.quantized(Quantization(8)), seed=None)
    assert weight_bytes(small) < 0.4 * weight_bytes(plain)


def test_lengths_are_spread():
    spread = log_spread(16, 50)
    lengths = sorted(spread)
    assert spread not in (lengths, lengths[::-1])
    assert 10 <= lengths[0] < 12
    assert lengths[-1] == 50
    assert len(set(lengths)) > 10
