"""The walk through everything that can happen: it finds all of it, once, and toys read their whole text."""

import pytest
import torch

from kvcache import KVCache
from proof import Toy, Walk, distance, enumerate_law, sequential_law


def test_a_walk_visits_every_branch_once():
    seen = []

    def run(walk: Walk, n: int) -> list:
        coin = walk(torch.arange(n), torch.zeros(n), 0)
        picked = coin.pick(torch.tensor([[0.5, 0.0, 0.5]]).expand(n, -1)).tolist()
        stands = coin.accept(torch.tensor([[0.25, 0.5]]).expand(n, -1)).tolist()
        seen.extend(zip(picked, map(tuple, stands)))
        return list(zip(picked, map(tuple, stands)))

    law = enumerate_law(run, width=3)
    stands = (((False, False), 0.75), ((True, False), 0.125), ((True, True), 0.125))
    assert law == pytest.approx({(x, a): p * 0.5 for x in (0, 2) for a, p in stands})
    assert len(seen) == len(set(seen)) == 6


def test_rows_of_a_group_share_a_script():
    def run(walk: Walk, n: int) -> list:
        coin = walk(torch.arange(2 * n), torch.zeros(2 * n), 0)
        picked = coin.pick(torch.tensor([[0.5, 0.5]]).expand(2 * n, -1)).tolist()
        return list(zip(picked[::2], picked[1::2]))

    assert enumerate_law(run, group=2) == pytest.approx(
        {(a, b): 0.25 for a in (0, 1) for b in (0, 1)}
    )


def test_a_toy_reads_its_whole_text_back_from_the_cache():
    toy, cache = Toy(), KVCache(1, 1, 1, 7, 2, dtype=torch.float64)
    for text in ([0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0, 1, 2, 1, 0, 2]):
        seq, _ = cache.open(text)
        rows = torch.cat(
            [
                toy(torch.tensor(piece), cache.extend([(seq, piece)]))
                for piece in (text[:2], text[2:3], text[3:])
            ]
        )
        assert torch.equal(
            rows, torch.stack([toy.table[toy.code(text[: i + 1])] for i in range(len(text))])
        )
        cache.free(seq)
    assert toy.code([0]) != toy.code([0, 0]) and len(set(map(tuple, toy.table.tolist()))) > 1000


def test_sequential_law_by_hand():
    toy = Toy()
    law = sequential_law(toy, (1,), 2, (0,), lambda logits: logits.softmax(-1))
    first = toy.table[toy.code((1,))].softmax(-1)
    then = lambda x: toy.table[toy.code((1, x))].softmax(-1)
    expected = {(0,): first[0].item()} | {
        (x, y): (first[x] * then(x)[y]).item() for x in (1, 2) for y in range(3)
    }
    assert distance(law, {text: p for text, p in expected.items() if p > 0}) < 1e-15
    assert sum(law.values()) == pytest.approx(1)
