"""The arithmetic of what is measured, with a clock and models that are known."""

import pytest
import torch

from batcher import Batcher
from kvcache import KVCache
from measure import pair, traffic
from measure.pair import random_request
from measure.traffic import Blank, in_flight, mixed
from paged import PagedCache
from request import Request, RoundStats, Settings
from speculative import Decoder


def test_arrivals_are_waited_for_and_every_token_is_counted():
    cache = KVCache(1, 1, 1, 64, 2)
    asked = [
        (0.05, random_request(3, 4, 1)),
        (0.0, random_request(5, 2, 2)),
        (0.02, random_request(2, 6, 3)),
    ]
    served = pair.serve(Batcher(Decoder(Blank(), cache, 2), 2), [cache], asked)
    assert (
        served.tokens == 12
        and [len(text) for text in served.texts] == [4, 2, 6]
        and served.seconds > 0.05
    )
    assert (
        len(served.first) == 3
        and len(served.gaps) == 9
        and all(0 < at < served.seconds for at in served.first)
    )
    assert served.held == cache.bytes and served.read == served.steps * cache.bytes
    assert served.rate == 12 / served.seconds
    assert (
        sum(served.first) + sum(served.gaps) <= 3 * served.seconds - 0.07
    )  # counted from each one's arrival


def test_a_mixed_load_comes_at_half_the_machines_pace(monkeypatch):
    """A machine that makes all of it in 7 seconds gets it over 14; and percentiles are those of what it says."""
    loads, told = [], pair.Served(7.0, 1, [0.3] * 100, [i / 100 for i in range(100)], 0, 1, 0, [])
    monkeypatch.setattr(traffic.Model, "load", lambda *_: None)
    monkeypatch.setattr(
        traffic,
        "under_load",
        lambda model, arrivals, budget: loads.append((budget, arrivals)) or told,
    )
    rows = traffic.latency(pair.QUICK)
    (_, at_once), *turns = loads
    assert [budget for budget, _ in turns] == [row["budget"] for row in rows] == [1024, 128]
    assert {at for at, *_ in at_once} == {0.0}
    assert sorted(sizes for _, *sizes in at_once) == [[24, 64], [24, 64], [900, 16]]
    for _, arrivals in turns:
        assert max(at for at, *_ in arrivals) == pytest.approx(14.0)
        assert [sizes for _, *sizes in arrivals] == [sizes for _, *sizes in at_once]
    assert (rows[0]["between_p50"], rows[0]["between_p99"], rows[0]["first_p100"]) == (
        0.5,
        0.99,
        0.3,
    )


def test_live_blocks_are_what_a_paged_cache_holds():
    cache = PagedCache(1, 1, 1, 8, block_size=4)
    assert pair.held([cache]) == 0
    seq, _ = cache.open([1] * 9)
    cache.extend([(seq, [1] * 9)])
    assert pair.held([cache]) == 3 * cache.bytes // 8
    cache.free(seq)
    assert pair.held([cache]) == 0 and pair.held([object()]) == 0


@pytest.mark.parametrize(
    "cache, texts, waste",
    [(KVCache(1, 1, 1, 1024, 8), 7.9, 0.6), (PagedCache(1, 1, 1, 512, 16, 1024), 20, 0.0)],
)
def test_what_is_in_flight_with_the_same_memory(cache, texts, waste):
    got = in_flight(cache, mixed(40))
    assert got["texts_in_flight"] >= texts and (
        got["waste"] > waste if waste else got["waste"] < 0.05
    )
    if isinstance(cache, KVCache):
        assert got["texts_in_flight"] <= 8


def test_speed_up_is_of_the_same_tokens_and_the_formula_of_what_was_measured():
    def made(rounds: list[RoundStats]) -> Request:
        one = Request([1], Settings(1.0, seed=0, max_tokens=100))
        one.rounds = [RoundStats(0, 0, 9.0), *rounds]  # the first read the prompt
        return one

    plain, drafted = (
        made([RoundStats(0, 0, 1.0)] * 4),
        made([RoundStats(2, 2, 1.5), RoundStats(2, 0, 1.5)]),
    )
    assert pair.seconds_a_token(plain) == 1.0 and pair.seconds_a_token(drafted) == 0.75
    maker = Decoder(Blank(), None, 2)
    for _ in range(3):
        maker.costs.drafts.saw(2, 0.2)
        maker.costs.passes.saw(3, 1.2)
    row = pair.against_plain(2, [((plain, maker), (drafted, maker))])
    alpha = 2 / 3
    assert row["acceptance"] == alpha and row["speed_up"] == 1 / 0.75
    assert row["draft_cost"] == pytest.approx(0.1) and row["pass_cost"] == pytest.approx(1.2)
    tokens = 1 + alpha + alpha**2
    assert row["formula"] == pytest.approx(tokens / 1.4) and row["formula_flat"] == pytest.approx(
        tokens / 1.2
    )


def test_lengths_are_spread_and_names_are_files():
    lengths = sorted(pair.log_spread(16, 48, 12.0))
    assert (lengths[0], lengths[-1]) == (4, 48) and len(pair.log_spread(1, 9)) == 1
    assert pair.slug("NVIDIA H200 (141 GB)") == "nvidia-h200-141-gb"
    assert pair.slug("Intel(R) Xeon(R) @ 2.0GHz") == "intel-r-xeon-r-2-0ghz"


def test_bytes_of_weights_are_those_of_the_numbers():
    from dataclasses import replace

    from checkpoint.formats import Quantization
    from measure.gpumodels import TOY
    from model import Llama

    plain = Llama(TOY, dtype=torch.float32)
    numbers = sum(place.numel() for place in plain.places().values())
    assert pair.weight_bytes(plain) == 4 * numbers == pair.weight_bytes(plain.prepare())
    tied = Llama(replace(TOY, tie_word_embeddings=True), dtype=torch.float32)
    assert (
        pair.weight_bytes(plain, read=True)
        == pair.weight_bytes(plain) - 4 * TOY.vocab_size * TOY.hidden_size
    )
    assert (
        pair.weight_bytes(tied, read=True)
        == pair.weight_bytes(tied)
        == pair.weight_bytes(plain, read=True)
    )
    assert pair.weight_bytes(
        Llama(TOY.quantized(Quantization(8)), seed=None)
    ) < 0.4 * pair.weight_bytes(plain)
