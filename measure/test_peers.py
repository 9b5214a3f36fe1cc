"""Peers: one that is missing is named; ratios are of the same prompts and the same turns."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.hub import find_folder
from errors import UserError
from measure import peers
from measure.effort import QUICK
from train.bpe import FILES, copy_files


def test_a_peer_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for name in peers.PACKAGES:
        with pytest.raises(UserError, match=f"{name} is not installed here.*pip install"):
            peers.check_peer(name, None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="--gguf FILE"):
        peers.check_peer("llama.cpp", None)


def test_transformers_in_each_dtype_beside_ours(monkeypatch):
    """Stand-ins take so many seconds a token, and say 7, or 8 in bfloat16: a row is of its pair."""
    theirs = ("transformers float32", "transformers bfloat16")
    seconds = dict(zip(theirs, (1.0, 0.5))) | {"float32": 0.25, "INT8": 0.125}

    def stand_in(name):
        def make(prompts, count):
            token = 8 if name == "transformers bfloat16" else 7
            return peers.Made([token] * count, seconds[name], seconds[name] * (1 + count))

        return peers.Contestant(name, make)

    monkeypatch.setattr(peers, "check_peer", lambda name, gguf: None)
    monkeypatch.setattr(peers, "read_bandwidth", lambda: 1.0)
    monkeypatch.setattr(peers, "has_bfloat16", lambda: True)
    monkeypatch.setattr(peers, "transformers", lambda _, dtype: stand_in(f"transformers {dtype}"))
    monkeypatch.setattr(peers, "our_widths", lambda target: [stand_in("float32"), stand_in("INT8")])
    rows = peers.against("transformers", "tiny", None, QUICK)
    pairs = product(theirs, ("float32", "INT8"))
    assert [*rows] == [f"tiny, {mine}, {peer}" for peer, mine in pairs]
    for row in rows.values():
        gain = seconds[row["peer"]] / seconds[row["ours"]]
        assert row["ratio"] == row["prompt128"] == row["together"] == gain
        assert row["texts"] == len(QUICK.openings)
        assert row["same_texts"] == (row["texts"] if row["peer"] == theirs[0] else 0)
        assert "prompt1500" not in row  # beyond tiny's context


def test_transformers_runs_in_bfloat16_if_the_cpu_has_instructions_for_it(monkeypatch, capsys):
    for has_bfloat16, dtypes in ((True, ["float32", "bfloat16"]), (False, ["float32"])):
        monkeypatch.setattr(peers, "has_bfloat16", lambda: has_bfloat16)
        assert peers.transformers_dtypes() == dtypes
    assert capsys.readouterr().err.count("transformers runs in float32 alone") == 1


def test_our_weights_are_as_stored_and_in_fewer_bits(tmp_path, compiler):
    """Without a compiler bfloat16 is widened, so its copy is no other width than float32."""
    tiny = find_folder("tiny")
    copy_files(tiny, tmp_path, [*FILES, "config.json"])
    tensors = load_file(tiny / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(wide, tmp_path / "model.safetensors")
    dtypes = ["float32", "bfloat16"] if compiler else ["float32"]
    widths = {one.name: one for one in peers.our_widths(str(tmp_path))}
    assert [*widths] == [*dtypes, "INT8", "INT4"]
    assert widths["float32"].bytes > 3.9 * widths["INT8"].bytes
    made = widths[dtypes[-1]].make([[1, 2, 3], [4, 5, 6]], 5)
    assert len(made.tokens) == 5
    assert 0 < made.first < made.total
    assert [one.name for one in peers.our_widths("tiny")] == [dtypes[-1], "INT8", "INT4"]


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
