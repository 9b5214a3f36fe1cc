"""Launches are counted as they are made, and 8B's follow from two layers and three."""

from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import fused
from kernels import Ops
from measure import launches
from measure.gpu_parts import QUICK, WAYS, random_model
from measure.launches import Launches, launches_a_token, launching_by, token_bytes
from model import weight_bytes

MOST_LAUNCHES = 8  # two norms, storing, attention, and four products
launches_of_8b = cache(launches.launches_of_8b)


@pytest.mark.gpu_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_few_launches(way):
    layer, token = launches_of_8b(way)
    assert 0 < layer <= MOST_LAUNCHES
    assert 32 * layer < token < 32 * layer + 60  # norm, head, sampling, the next step's metadata


def test_kernels_and_operations_are_counted_but_no_views_and_allocations():
    x = torch.ones(4, 8)
    count = Launches(x.device)
    with torch.inference_mode(), count:
        x.view(8, 4).t()[:2].unsqueeze(0)
        torch.empty(3), torch.empty_like(x), x.new_empty(2), x.detach()
        assert count.count == 0
        torch.nn.functional.linear(x, x)
        x.to(torch.float16)
        x.float()  # is one
        assert count.count == 2
        torch.where(x > 0, x, 0)  # the comparison, the number, the choice
        assert count.count == 5
    with launching_by(count.counted):
        fused.fused_swiglu(x)
    assert count.count == 6
    on_meta = Launches(torch.device("meta"))
    with launching_by(on_meta.counted), on_meta:
        fused.fused_swiglu(x.to("meta"))
        x + x  # on the host
    assert on_meta.count == 2  # with the copy


def test_a_recording_is_counted_as_it_runs():
    """In plain torch: a layer more, and its launches."""
    counts = []
    for way in ("16 bits", "INT4"):
        llama = random_model("tiny", way, QUICK, ops=Ops())
        assert launches_a_token(llama, 20) == launches_a_token(llama, 20)
        counts.append(launches_a_token(llama, 20))
    assert 100 < counts[0] < counts[1]


def test_bytes_are_those_of_weights_keys_and_values():
    llama = random_model("tiny", "INT8", QUICK)
    kv = 2 * 8 * 2 * 64 * 4 * 100
    assert token_bytes(llama, 100) == weight_bytes(llama, read=True) + kv


def test_the_prediction_is_bytes_and_launches(monkeypatch):
    monkeypatch.setattr(launches, "launches_of_8b", lambda way: (8.0, 300.0))
    section = launches.prediction()
    assert [row[0] for row in section.rows] == [*WAYS]
    assert {len(row) for row in section.rows} == {len(section.headers)}
    _, layer, token, gigabytes, milliseconds, rate, gain = section.rows[0]
    assert (layer, token, gain) == ("8", "300", "1.00")
    # 8.03e9 weights but the embedding in 2 bytes, and 131,072 bytes of each of 1,024 tokens
    assert float(gigabytes) == pytest.approx((8.03e9 - 128256 * 4096) * 2e-9 + 0.134, abs=0.01)
    seconds = float(gigabytes) * 1e9 / 4.3e12 + 300 * 1.5e-6
    assert float(milliseconds) == pytest.approx(1e3 * seconds, abs=0.01)
    assert float(rate) == pytest.approx(1 / seconds, abs=1)
    assert "assuming" in section.title and "nothing is measured" in section.title
    assert float(section.rows[2][-1]) > float(section.rows[1][-1]) > 1.5  # INT4, INT8
