"""Peers: who is not there is named; ratios are of the same prompts; a model's name has no folder."""

from types import SimpleNamespace

import pytest
import torch

from measure import peers
from measure.clock import read_bandwidth
from measure.gpumodels import TOY
from measure.pair import QUICK


def test_who_is_not_there_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for name in peers.PACKAGES:
        with pytest.raises(ValueError, match=f"{name} is not installed here.*pip install"):
            peers.against(name, "tiny", None, QUICK)


def test_llama_cpp_asks_for_its_own_format(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: True)
    with pytest.raises(ValueError, match="--gguf FILE"):
        peers.against("llama.cpp", "tiny", None, QUICK)


def test_a_peer_beside_ours_in_turns(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: True)
    monkeypatch.setattr(peers, "read_bandwidth", lambda: read_bandwidth(16))
    own = peers.ours("tiny", 16)

    def twice(prompts, count):
        tokens, first, total = own.make(prompts, count)
        return peers.Made(tokens, 2 * first, 2 * total)

    monkeypatch.setattr(peers, "transformers", lambda target: peers.Contestant("a peer", twice))
    rows = peers.against("transformers", "tiny", None, QUICK)
    (label, first), (_, second), (_, third) = rows.items()
    assert label.startswith("tiny, ") and label.split(", ")[-2] in (
        "float32",
        "bfloat16 in float32",
    )
    assert first["texts"] == first["same_texts"] == 1 and first["bandwidth"] > 0 < first["seconds"]
    assert second["ours"].startswith("INT8 in ") and third["ours"].startswith("INT4 in ")
    assert all(0.8 < first[name] < 5 for name in ("ratio", "prompt32", "prompt128", "together"))


def test_the_ratio_is_the_median_over_prompts_and_the_bandwidth_what_is_read():
    one = peers.Contestant("ours", None, bytes=1000)
    made = lambda seconds, last=3: peers.Made([1, 2, last], 1.0, 1.0 + seconds)
    turns = [(made(2.0), made(1.0)), (made(9.0), made(1.0)), (made(3.0), made(1.0, last=4))]
    row = peers.row(
        "m", one, peers.Contestant("theirs", None), turns, roofs=[4000.0, 4000.0, 8000.0]
    )
    assert row["ratio"] == 3.0 and row["tokens_per_second"] == 2.0
    assert row["bandwidth"] == 0.5 and row["same_texts"] == 2


def test_seconds_are_from_the_first_token_to_the_last(monkeypatch):
    def generate(tokens, streamer, max_new_tokens, **_):
        for _ in range(1 + max_new_tokens):  # the prompt, and each token
            streamer.put(None)
        return torch.cat((tokens, torch.tensor([[7, 8, 9]])), 1)

    monkeypatch.setattr(peers.time, "perf_counter", iter([10.0, 12.0, 13.0, 15.0]).__next__)
    peer = SimpleNamespace(device="cpu", generate=generate)
    assert peers.reply(peer, [[1, 2]], 3) == ([7, 8, 9], 2.0, 5.0)


def test_a_name_has_no_folder(tmp_path):
    (tmp_path / "SmolLM2").mkdir()
    assert (
        peers.label(str(tmp_path / "SmolLM2")) == "SmolLM2"
        and peers.label("owner/model") == "owner/model"
    )


@pytest.mark.skipif(
    not peers.installed("transformers"), reason="needs transformers: pip install transformers"
)
@torch.inference_mode()
def test_transformers_serves_random_weights_alone_and_together():
    peer = peers.RandomTransformers(TOY, "cpu", torch.float32)
    assert all(peer.seconds_a_token(4, 3, 1, kind) > 0 for kind in ("dynamic", "static"))
    assert peer.batched([(8, 4), (5, 6)]) > 0 and peer.attention
