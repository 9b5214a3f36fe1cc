"""Plans: known sizes, the roofline by hand, the program's own bytes, and what does not fit."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bench
from checkpoint.weights import weight_bytes
from errors import UserError
from measure import plan
from measure.plan import GPUS, KV_SHARE, MODELS, Plan
from model import Llama
from paged import PagedCache
from quant import WIDTHS


def make(name="8B", gpu="H100", n=1, bits=16, kv_bits="16", context=4096) -> Plan:
    return Plan(
        name, plan.in_bits(plan.find_config(name), bits), gpu, n=n, kv_bits=kv_bits, context=context
    )


@pytest.mark.parametrize(
    "name, weights", [("1B", 1.236e9), ("3B", 3.213e9), ("8B", 8.030e9), ("70B", 70.55e9)]
)
def test_weights_are_those_that_the_makers_count(name, weights):
    assert weight_bytes(make(name, "B200").shard) == pytest.approx(2 * weights, rel=1e-3)


def test_bytes_are_known_facts():
    assert weight_bytes(make("8B").shard) / 1e9 == pytest.approx(16.06, abs=0.005)
    llama = plan.without_numbers(MODELS["70B"])
    assert weight_bytes(llama) / 1e9 == pytest.approx(141, abs=0.2)
    assert plan.stored_bytes(MODELS["8B"], 1, "16", torch.bfloat16) == 131_072
    shard = make("70B", n=8).shard.config
    assert plan.stored_bytes(shard, 1, "16", torch.bfloat16) * 8 == 2 * 80 * 8 * 128 * 2


@pytest.mark.parametrize("bits, kv_bits", [(16, "16"), (8, "8"), (4, "8/4"), ("nf4", "4")])
def test_bytes_are_those_of_the_program(bits, kv_bits):
    llama = Llama.load("tiny", "cpu", torch.bfloat16, bits=bits)
    planned = make("tiny", bits=bits, kv_bits=kv_bits, context=100)
    assert weight_bytes(planned.shard) == weight_bytes(llama)
    assert planned.text_bytes == PagedCache(llama.kv_spec(bits=WIDTHS[kv_bits]), 7, 16).bytes


def test_a_folder_in_another_layout_has_its_own_bytes(tmp_path):
    """GPTQ in 4 bits with act-order: one GPU holds it, two cannot share it."""
    method = dict(quant_method="gptq", bits=4, group_size=128, desc_act=True, sym=True)
    config = MODELS["8B"].to_dict() | {"quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = make(str(tmp_path))
    assert 5.5e9 < weight_bytes(made.shard) < 6e9  # embedding and head keep 16 bits
    assert made.prompt_seconds(4096) == make("8B").prompt_seconds(4096)
    with pytest.raises(UserError, match="act-order"):
        assert make(str(tmp_path), n=2).num_texts


def test_a_step_by_hand():
    """8B on an H100: one text reads, 512 tokens of a prompt compute."""
    layers = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    head = 128256 * 4096
    norms = 65 * 4096
    text = make(context=1000)
    read = 2 * (layers + head + norms) + 1000 * 131_072
    assert text.decode_seconds(1) == pytest.approx(read / 3.35e12, rel=1e-9)
    read = 2 * (layers + head + norms) + 16 * 131_072
    assert text.prompt_seconds(16) == pytest.approx(read / 3.35e12, rel=1e-9)
    operations = 2 * ((layers + norms) * 1024 + head) + 4 * 4096 * 32 * 1024 * 1025 / 2
    assert text.prompt_seconds(1024) == pytest.approx(operations / 989e12, rel=1e-9)


@given(
    name=st.sampled_from(list(MODELS)),
    gpu=st.sampled_from(list(GPUS)),
    n=st.sampled_from([1, 2, 4, 8]),
    bits=st.sampled_from([16, 8, 4, "fp8", "nf4"]),
    kv_bits=st.sampled_from(list(WIDTHS)),
    context=st.integers(1, 131_072),
)
def test_texts_fit_and_one_more_does_not(name, gpu, n, bits, kv_bits, context):
    config = plan.in_bits(MODELS[name], bits).shard(n)
    rest = KV_SHARE * (1e9 * GPUS[gpu].memory - weight_bytes(plan.without_numbers(config)))
    tokens = 16 * ((context + 15) // 16)
    text = plan.stored_bytes(config, tokens, kv_bits, torch.bfloat16)
    if rest < text:
        with pytest.raises(UserError, match="take fewer --bits, more --gpus"):
            make(name, gpu, n, bits, kv_bits, context)
        return
    made = make(name, gpu, n, bits, kv_bits, context)
    assert made.num_texts * text <= rest < (made.num_texts + 1) * text
    assert made.decode_seconds(2) > made.decode_seconds(1)


# ---- The command


def test_the_command_prints_a_table_and_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(bench, "machine", None)
    how = "--plan 70B --gpu H200 --gpus 4 --bits 4 --kv-bits 8 --context 8192"
    assert bench.main(how.split()) == 0
    printed = capsys.readouterr().out
    assert "70B on 4 x H200" in printed and "| tokens/s of one text, at most | 495 |" in printed
    assert bench.main("--plan 8B --gpu H100 --bits 4 --draft 1B".split()) == 0
    printed = capsys.readouterr().out
    for bits, cost in ((16, "2.47 GB, a token 0.55"), (8, "1.24 GB, a token 0.29")):
        assert f"| 1B drafts in {bits} bits | {cost} steps of 8B |" in printed
