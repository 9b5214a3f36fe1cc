"""Without a GPU: the coin, random models, errors and peers on toy shapes; and on a GPU, the CPU's own tokens."""
import re
from functools import partial

import pytest
import torch

from kernels import Ops
from measure import gpucases, gpukernels, gpumodels
from measure.gpumodels import QUICK, TOY
from measure.pair import random_request, weight_bytes
from generate import Model
from sampling import probabilities

ROOF = (1e10, 1e11)


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_the_coin_accepts_with_its_probability_whatever_the_models_say(alpha):
    coin = gpucases.Biased(torch.arange(4000), torch.zeros(4000, dtype=torch.int64), alpha=alpha)
    stands = coin.accept(torch.tensor([[0.001, 1.0, 0.0]]).expand(4000, 3))
    assert abs(stands[:, :2].float().mean() - alpha) < 0.02 and not stands[:, 2].any()
    assert coin[:10].alpha == alpha and isinstance(coin[[1, 2]], gpucases.Biased)
    other = gpucases.Biased(torch.arange(4), torch.zeros(4, dtype=torch.int64), alpha=0.1)
    assert (other.alpha, coin.alpha) == (0.1, alpha)


def test_acceptance_in_the_production_loop_is_the_coins():
    target, draft = (gpumodels.random_model(config, 16, QUICK) for _, config in QUICK.models)
    made = gpumodels.random_engine(target, draft, 400, 400, 1)
    made.decoder.coin = partial(gpucases.Biased, alpha=0.8)
    one = random_request(8, 300, 1, gamma=3)
    list(made.batch.run([one]))
    assert len(one.tokens) == 308 and abs(one.acceptance - 0.8) < 0.08


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_random_models_are_finite_and_of_the_size_of_their_bits(bits):
    llama = gpumodels.random_model(TOY, bits, QUICK)
    logits = llama(torch.arange(5))
    assert logits.isfinite().all() and logits.std() > 1e-3
    share = weight_bytes(llama) / weight_bytes(gpumodels.random_model(TOY, 16, QUICK))
    assert share == 1 if bits == 16 else share < {8: 0.4, 4: 0.4}[bits]
    plain = gpumodels.random_model(TOY, 16, QUICK)
    x = torch.randn(64, TOY.hidden_size)
    sizes = [model.ops.linear(x, model.layers[0].gate_up).std() for model in (llama, plain)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


def test_the_shapes_are_those_of_the_models():
    from model import Llama
    for config, billions in ((gpumodels.LLAMA_8B, 8.03), (gpumodels.LLAMA_1B, 1.236)):
        count = sum(place.numel() for place in Llama(config, "meta", seed=None).places().values())
        assert abs(count / 1e9 - billions) < 0.005


# ---- Errors

@torch.inference_mode()
def test_errors_of_attention_are_those_of_rounding_and_the_kernels_own():
    rows = {row[0].split(", ")[-2:][0] + " " + row[0].split("KV ")[1]: row[-1]
            for row in gpukernels.decode_rows(TOY, QUICK, ROOF)}
    assert list(rows) == ["rows 16", "blocks 16", "blocks 8", "blocks 8/4", "blocks 4"]
    rounding = {name: float(told.split(",")[0]) for name, told in rows.items()}
    assert max(rounding["rows 16"], rounding["blocks 16"]) < 1e-6 < 1e-4 < rounding["blocks 8"] < 0.02
    assert 0.02 < rounding["blocks 8/4"] < rounding["blocks 4"] < 0.2
    for name in ("blocks 8", "blocks 8/4", "blocks 4"):
        assert float(re.search(r", (\S+) beside what is stored", rows[name])[1]) < 1e-5


@torch.inference_mode()
def test_a_wrong_kernel_shows_beside_what_is_stored(monkeypatch):
    class Wrong(Ops):
        def look_back(self, *args):
            return 1.003 * super().look_back(*args)

    monkeypatch.setattr(gpukernels, "ops_for", lambda device: Wrong())
    eight = next(row for row in gpukernels.decode_rows(TOY, QUICK, ROOF) if row[0].endswith("KV 8"))
    assert eight[-1].endswith(", 3.0e-03 beside what is stored")


@torch.inference_mode()
def test_errors_of_products_are_within_their_rounding():
    rows = gpukernels.product_rows(QUICK, ROOF)
    for row, bits in zip(rows, [16] * 3 + [8] * 3 + [4] * 3, strict=True):
        assert row[0].endswith(f", {bits} bits")
        rounding, own = (float(told.split()[0]) for told in (row[-1].split(", ")[0], row[-1].split(", ")[-1]))
        low, high = {16: (-1, 1e-6), 8: (1e-3, 1e-2), 4: (2e-2, 0.2)}[bits]
        assert own < 1e-4 and low < rounding < high


@torch.inference_mode()
def test_sampling_beside_the_cpus_and_by_sorting():
    rows = gpukernels.sampling_rows(QUICK, ROOF)
    assert [row[0].split(", ", 2)[2] for row in rows] == [*gpukernels.FILTERS] * 2
    assert all(row[-1].startswith("0 of ") for row in rows)
    logits = (4 * gpumodels.random_numbers(QUICK, 1, 16)).expand(2000, -1)                    # one row, many times
    for setting in gpukernels.FILTERS.values():
        law = probabilities(logits[:1], 0.6, **setting)[0]
        drawn = torch.bincount(gpukernels.by_sorting(logits, **setting), minlength=16) / 2000
        assert (drawn - law).abs().max() < 0.05 and not drawn[law == 0].any()


# ---- The same tokens

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: this is the CPU's own")
@pytest.mark.parametrize("draft", [None, "tiny-draft"])
def test_greedy_texts_of_the_embedded_pair_are_the_cpus_up_to_near_ties(draft):
    assert all(gap < 1e-4 for gap in gpukernels.partings("cuda", draft, 64))


@torch.inference_mode()
def test_where_a_text_parts_the_gap_is_that_of_the_two_best(monkeypatch):
    model, right = Model.load("tiny", "cpu", torch.float32), gpukernels.greedy
    logits = model.llama(torch.tensor(model.encode(gpukernels.OWN[1])))[-1].topk(2)

    def wrong(model, draft, count):                              # the second best token, once; and only on "the device"
        texts = right(model, None, count)
        if draft is not None:
            texts[1][-count:] = [logits.indices[1].item()] * count
        return texts
    assert gpukernels.partings("cpu", "tiny-draft", 3) == []
    monkeypatch.setattr(gpukernels, "greedy", wrong)
    gap = (logits.values[0] - logits.values[1]).item()
    assert gpukernels.partings("cpu", "tiny-draft", 3) == [pytest.approx(gap, abs=1e-4)]


# ---- Rows

@torch.inference_mode()
def test_by_the_clock_the_formula_is_that_of_the_gamma_that_was_taken():
    target, draft = (gpumodels.random_model(config, 16, QUICK) for _, config in QUICK.models)
    for gamma, streams in ((2, 1), (None, 2)):
        _, taken, told, gain, formula, share = gpucases.speculate(target, draft, 0.7, gamma, streams, QUICK)
        assert taken == "2" if gamma else 0 <= float(taken.removeprefix("by the clock: ")) < 8
        assert told == str(streams) and float(formula) > 0
        assert float(share) == pytest.approx(float(gain) / float(formula), rel=0.1)


class Fake:
    def __init__(self, *shape): pass
    def one_at_a_time(self, work): return 10.0 * len(work)
    def batched(self, work): raise OSError("no such\nthing")


@torch.inference_mode()
def test_serving_beside_peers_and_what_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(gpucases, "installed", lambda name: False)
    alone = gpucases.serving_case(QUICK, ROOF)
    note, = alone["notes"]
    assert note == "transformers is not installed here, so nothing is compared with it: pip install transformers"
    monkeypatch.setattr(gpucases, "installed", lambda name: True)
    monkeypatch.setattr(gpucases, "RandomTransformers", Fake)
    case = gpucases.serving_case(QUICK, ROOF)
    assert len(case["rows"]) == len(alone["rows"]) + 1
    ours, theirs = case["rows"][0], case["rows"][2]
    assert "one at a time by transformers, answers of at most 4 (ours: all 4)" in theirs[0]
    assert theirs[1] == "10 tokens/s"
    assert float(theirs[3]) == pytest.approx(float(ours[1].split()[0]) / 10, rel=0.02)
    assert case["notes"] == ["no figure for 2 of them by transformers' continuous batching: OSError: no such thing"]
