"""Peers: one that is missing is named; ratios are of the same prompts and the same turns."""

from types import SimpleNamespace

import pytest
import torch

from errors import UserError
from measure import peers
from measure.effort import QUICK


def test_a_peer_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for name in peers.PACKAGES:
        with pytest.raises(UserError, match=f"{name} is not installed here.*pip install"):
            peers.check_peer(name, None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="--gguf FILE"):
        peers.check_peer("llama.cpp", None)


def test_a_peer_beside_ours(monkeypatch):
    """A stand-in takes a hundredth of a second a token, and says 7: all ratios are of its times."""

    def slow(prompts, count):
        return peers.Made([7] * count, 1.0, 1.0 + count)

    def quick(prompts, count):
        return peers.Made([7] * count, 0.25, 0.25 + count / 4)

    monkeypatch.setattr(peers, "check_peer", lambda name, gguf: None)
    monkeypatch.setattr(peers, "read_bandwidth", lambda: 1e3)
    monkeypatch.setattr(peers, "transformers", lambda target: peers.Contestant("a peer", slow))
    mine = peers.Contestant
    monkeypatch.setattr(peers, "ours", lambda target, name, bits: mine(name, quick, 100))
    rows = peers.against("transformers", "tiny", None, QUICK)
    assert list(rows) == [f"tiny, {width}, a peer" for width in ("float32", "INT8", "INT4")]
    for row in rows.values():
        assert (row["ratio"], row["prompt128"], row["together"]) == (4.0, 4.0, 4.0)
        assert row["texts"] == row["same_texts"] == len(QUICK.openings)
        count = QUICK.num_tokens // 2
        speed = (count - 1) / (count / 4)
        assert row["tokens_per_second"] == pytest.approx(speed)
        assert row["bandwidth"] == pytest.approx(speed * 100 / 1e3)
        assert "prompt1500" not in row  # beyond tiny's context


def test_ours_makes_the_tokens_that_are_asked_for():
    one = peers.ours("tiny", "INT8", 8)
    made = one.make([[1, 2, 3], [4, 5, 6]], 5)
    assert len(made.tokens) == 5
    assert 0 < made.first < made.total
    assert one.bytes > 1e6


def test_the_ratio_is_the_median_over_prompts():
    one = peers.Contestant("ours", None, bytes=1000)

    def made(seconds: float, last: int = 3) -> peers.Made:
        return peers.Made([1, 2, last], 1.0, 1.0 + seconds)

    turns = [(made(2.0), made(1.0)), (made(9.0), made(3.0)), (made(4.0), made(0.5, last=4))]
    peer = peers.Contestant("theirs", None)
    row = peers.compare_texts(one, peer, turns, roofs=[4000.0, 4000.0, 8000.0])
    assert (row["ratio"], row["tokens_per_second"]) == (3.0, 2.0)
    assert (row["bandwidth"], row["same_texts"]) == (0.5, 2)


def test_transformers_is_timed_from_its_first_token_to_its_last(monkeypatch):
    def generate(tokens, streamer, max_new_tokens, **options):
        for _ in range(1 + max_new_tokens):  # the prompt, and each token
            streamer.put(None)
        return torch.cat((tokens, torch.tensor([[7, 8, 9]])), 1)

    times = iter([10.0, 12.0, 13.0, 15.0])
    monkeypatch.setattr(peers.time, "perf_counter", times.__next__)
    made = peers.transformers_text(SimpleNamespace(generate=generate, device="cpu"), [[1, 2]], 3)
    assert made == ([7, 8, 9], 2.0, 5.0)
    assert made.tokens_per_second == 2 / 3


def test_a_label_has_no_folder(tmp_path):
    (tmp_path / "SmolLM2").mkdir()
    assert peers.label(str(tmp_path / "SmolLM2")) == "SmolLM2"
    assert peers.label("owner/model") == "owner/model"
