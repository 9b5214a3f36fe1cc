"""The walk through everything that can happen finds all of it, once; toys read their whole text."""

import math

import pytest
import torch

from kvcache import KVCache, KVSpec
from proof import Toy, Walk, distance, enumerate_distribution, sequential_distribution, surprise


def test_walk_visits_every_branch_once():
    visited = []

    def run(walk: Walk, n: int) -> list:
        assert n <= 2
        rng = walk(torch.arange(n), torch.zeros(n), 0)
        picked = rng.pick(torch.tensor([[0.5, 0.0, 0.5]]).expand(n, -1)).tolist()
        accepted = rng.accept(torch.tensor([[0.25, 0.5]]).expand(n, -1)).tolist()
        outcomes = list(zip(picked, map(tuple, accepted)))
        visited.extend(outcomes)
        return outcomes

    distribution = enumerate_distribution(run, width=2)
    assert len(distribution) == len(visited) == 8
    for (x, row), p in distribution.items():
        assert x in (0, 2)
        assert p == pytest.approx(0.5 * (0.25 if row[0] else 0.75) * 0.5)


def test_rows_of_a_group_share_a_script():
    def run(walk: Walk, n: int) -> list:
        rng = walk(torch.arange(2 * n), torch.zeros(2 * n), 0)
        picked = rng.pick(torch.tensor([[0.5, 0.5]]).expand(2 * n, -1)).tolist()
        return list(zip(picked[::2], picked[1::2]))

    expected = {(a, b): 0.25 for a in (0, 1) for b in (0, 1)}
    assert enumerate_distribution(run, group=2) == pytest.approx(expected)


def test_toy_reads_its_whole_text_back_from_the_cache():
    toy = Toy()
    cache = KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 7, 2)
    for text in ([0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0, 1, 2, 1, 0, 2]):
        seq, _ = cache.open(text)
        logits = []
        for chunk in (text[:2], text[2:3], text[3:]):
            logits.append(toy(torch.tensor(chunk), cache.extend([(seq, chunk)])))
        codes = [toy.code(text[: i + 1]) for i in range(len(text))]
        assert torch.equal(torch.cat(logits), toy.table[codes])
        cache.free(seq)
    assert toy.code([0]) != toy.code([0, 0])
    assert len(set(map(tuple, toy.table.tolist()))) > 1000


def test_sequential_distribution_by_hand():
    toy = Toy()
    distribution = sequential_distribution(toy, (1,), 2, (0,), lambda logits: logits.softmax(-1))
    first = toy.table[toy.code((1,))].softmax(-1)
    expected = {(0,): first[0].item()}
    for x in (1, 2):
        second = toy.table[toy.code((1, x))].softmax(-1)
        for y in range(3):
            expected[x, y] = (first[x] * second[y]).item()
    assert distance(distribution, {text: p for text, p in expected.items() if p > 0}) < 1e-15
    assert sum(distribution.values()) == pytest.approx(1)


def test_surprise_by_hand():
    """Of 50 texts 20, 20 and 10 rare ones are expected: χ² is 25/20 + 25/20 + 0/10."""
    distribution = {"a": 0.4, "b": 0.4, **dict.fromkeys("cdef", 0.05)}
    texts = ["a"] * 25 + ["b"] * 15 + ["c"] * 10
    assert surprise(texts, distribution) == pytest.approx((2.5 - 2) / 2)
    assert surprise([*texts, "never"], distribution) == math.inf
