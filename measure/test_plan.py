"""Plans: known sizes, the roofline by hand, the program's own bytes, and ways out that are true."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bench
from errors import UserError
from kvcache import KVSpec
from measure import plan
from measure.plan import GPUS, KV_SHARE, MODELS, Plan
from model import Llama, weight_bytes
from paged import PagedCache
from quant import WIDTHS


def make(name="8B", gpu="H100", n=1, bits=16, kv_bits="16", context=4096) -> Plan:
    return Plan(name, plan.in_bits(plan.find_config(name), bits), gpu, n, kv_bits, context)


@pytest.mark.parametrize(
    "name, weights", [("1B", 1.236e9), ("3B", 3.213e9), ("8B", 8.030e9), ("70B", 70.55e9)]
)
def test_weights_are_those_that_the_makers_count(name, weights):
    assert weight_bytes(make(name, "B200").shard) == pytest.approx(2 * weights, rel=1e-3)


def test_bytes_are_known_facts():
    assert weight_bytes(make("8B").shard) / 1e9 == pytest.approx(16.06, abs=0.005)
    assert weight_bytes(make("70B").shard) / 1e9 == pytest.approx(141, abs=0.2)
    assert make("8B").stored_bytes(1) == 131_072
    assert make("70B", n=8).stored_bytes(1) * 8 == 2 * 80 * 8 * 128 * 2


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
    assert made.num_weights == make("8B").num_weights
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
    operations = 2 * ((layers + norms) * 1024 + head) + 4 * 4096 * 32 * 1024 * 1025 / 2
    assert text.prompt_seconds(1024) == pytest.approx(operations / 989e12, rel=1e-9)
    assert text.prompt_seconds(513) > text.prompt_seconds(512) + 2 * layers / 3.35e12


def test_rounded_activations_have_a_rate_of_their_own():
    config = MODELS["8B"].quantized(plan.Quantization(8, activations=8))
    rates = [replace(make(), config=config, gpu_name=name).product_rate for name in GPUS]
    assert rates == [1e12 * gpu.int8 for gpu in GPUS.values()]
    fp8 = config.quantization.__class__("fp8", activations=8)
    config = replace(config, quantization=fp8)
    rates = [replace(make(), config=config, gpu_name=name).product_rate for name in GPUS]
    assert rates == [1e12 * (gpu.fp8 or gpu.bf16) for gpu in GPUS.values()]


def test_all_reduces_by_hand():
    two = make("70B", "A100-80GB", n=2)
    assert two.num_all_reduces == 161
    sent = 3 * 161 * 8192 * 2 + 3 * 128256 // 2 * 2
    assert two.link_seconds(3, 3) == pytest.approx(161 * 10e-6 + sent / 300e9)
    assert make().link_seconds(3, 3) == make().num_all_reduces == 0


@given(
    name=st.sampled_from(list(MODELS)),
    gpu=st.sampled_from(list(GPUS)),
    n=st.sampled_from([1, 2, 4, 8]),
    bits=st.sampled_from([16, 8, 4, "fp8", "nf4"]),
    kv_bits=st.sampled_from(list(WIDTHS)),
    context=st.integers(1, 131_072),
)
def test_texts_fit_and_one_more_does_not_or_a_way_out_is_true(name, gpu, n, bits, kv_bits, context):
    made = make(name, gpu, n, bits, kv_bits, context)
    rest = KV_SHARE * (1e9 * GPUS[gpu].memory - weight_bytes(made.shard))
    c = made.shard.config
    spec = KVSpec.of(c, torch.bfloat16, WIDTHS[kv_bits])
    text = spec.bytes(16 * ((context + 15) // 16))
    if rest >= text:
        plan.check_plan(made)
        assert made.num_texts * text <= rest < (made.num_texts + 1) * text
        assert made.decode_seconds(2) > made.decode_seconds(1)
        return
    with pytest.raises(UserError) as refused:
        plan.check_plan(made)
    assert "\n" not in str(refused.value) and "a larger --gpu" in str(refused.value)
    for flag, value in re.findall(r"--(bits|gpus) (\d+)", str(refused.value)):
        changed = {"bits": bits, "gpus": n} | {flag: int(value)}
        again = make(name, gpu, changed["gpus"], changed["bits"], kv_bits, context)
        plan.check_plan(again)


def test_what_was_measured_scales_the_tokens(tmp_path):
    """A GPU that reads 80 % of its data sheet's bandwidth, and 90 % of that when it decodes."""
    rows = [["8B, 16 bits", "1", "90%", "", ""], ["1B, 16 bits", "", "", "", "wrong: an error"]]
    results = {"machine": "NVIDIA H200", "read_bandwidth": 0.8 * 4.8e12}
    results["gpu"] = {"decode": {"rows": rows}}
    (tmp_path / "b.json").write_text(json.dumps(results))
    (tmp_path / "a.json").write_text(json.dumps({"machine": "AMD EPYC"}))
    assert plan.measured_share(make(gpu="H200"), tmp_path) == pytest.approx(0.72)
    for other in (make(gpu="H100"), make("1B", "H200"), make(gpu="H200", bits=4)):
        assert plan.measured_share(other, tmp_path) is None
    by_roofline, measured, *_ = plan.speed_section(make(gpu="H200"), tmp_path).rows
    assert float(measured[1]) == pytest.approx(0.72 * float(by_roofline[1]), abs=1)


@pytest.mark.parametrize(
    "machine, gpus",
    [
        ("NVIDIA A100-SXM4-80GB", ["A100-80GB"]),
        ("NVIDIA GeForce RTX 4090", ["RTX4090"]),
        ("NVIDIA GeForce RTX 3060 Ti", []),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", []),
        ("NVIDIA L4", ["L4"]),
        ("NVIDIA H100 80GB HBM3", ["H100"]),
    ],
)
def test_a_machine_is_one_gpu(machine, gpus):
    assert [name for name in GPUS if plan.is_of(name, machine)] == gpus


# ---- The command


def test_the_command_prints_a_table_and_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(bench, "machine", None)
    how = "--plan 70B --gpu H200 --gpus 4 --bits 4 --kv-bits 8 --context 8192"
    assert bench.main(how.split()) == 0
    printed = capsys.readouterr().out
    assert "70B on 4 x H200" in printed and "of a step, 161 all-reduces" in printed


@pytest.mark.parametrize(
    "how, words",
    [
        ("--plan 70B --gpu H100", "take --bits 8; or --gpus 2"),
        ("--plan 8B", "--gpu is None: it must be one of RTX3060"),
        ("--plan 8B --gpu decode", "--gpu is decode"),
        ("--gpu H100", "--gpu is H100: it must be one of first"),
        ("--gpus 2", "--gpus has no use but with --plan"),
        ("--plan 8B --gpu H100 --quick", "--quick has no use with --plan"),
        ("--plan meta/Llama --gpu H100", "downloads nothing"),
        ("--plan 8B --gpu H100 --gpus 3", "multiple of 3"),
        ("--plan 8B --gpu H100 --gpus 0", "--gpus is 0"),
        ("--plan 8B --gpu H100 --bits 5", "bits is 5"),
        ("--plan 8B --gpu H100 --kv-bits 5", "kv_bits is '5'"),
        ("--plan tiny --gpu H100", "--context is 4096"),
    ],
)
def test_a_mistake_is_one_line(how, words, capsys):
    try:
        status = bench.main(how.split())
    except SystemExit as error:
        status = error.code
    told = capsys.readouterr().err
    assert status == 2 and told.count("\n") == 1 and words in told
