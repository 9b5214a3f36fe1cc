"""Perplexity through the cache beside the plain formula, and what a method saves."""

import pytest
import torch

from checkpoint.formats import Quantization
from kvcache import KVCache, KVSpec
from model import Llama
from quant import WIDTHS
from testing.folders import write_model
from train import quantize
from train.calibrate import size
from train.perplexity import Recipe, perplexity, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("small"), intermediate_size=70)


@pytest.fixture(scope="module")
def llama(folder) -> Llama:
    return Llama.load(folder, "cpu", torch.float32)


TEXTS = [torch.arange(96) * 7 % 256, torch.arange(50), torch.arange(2)]


@torch.inference_mode()
def test_perplexity_is_the_plain_formula_however_a_text_is_cut(llama, monkeypatch):
    p = [llama(text).softmax(-1)[torch.arange(len(text) - 1), text[1:]] for text in TEXTS]
    plain = torch.cat(p).log().mean().neg().exp().item()
    for chunk in (256, 7, 1):
        monkeypatch.setattr("train.perplexity.CHUNK", chunk)
        assert perplexity(llama, TEXTS) == pytest.approx(plain, rel=1e-5)


@torch.inference_mode()
def test_author_weighs_every_token_by_its_probability(llama, folder, monkeypatch):
    other = Llama.load(folder, "cpu", torch.float32, bits=4)
    p, q = (torch.cat([model(text[:-1]).softmax(-1) for text in TEXTS]) for model in (llama, other))
    for chunk in (256, 7):
        monkeypatch.setattr("train.perplexity.CHUNK", chunk)
        for model, distribution in ((llama, p), (other, q)):
            plain = -(p * distribution.log()).sum(-1).mean()
            assert perplexity(model, TEXTS, author=llama) == pytest.approx(
                plain.exp().item(), rel=1e-5
            )


@torch.inference_mode()
def test_perplexity_is_that_of_decoding_with_these_kv_bits(llama, monkeypatch):
    """Token by token, through a cache of these bits."""
    monkeypatch.setattr("train.perplexity.CHUNK", 1)
    cache, losses = KVCache(llama.kv_spec(bits=WIDTHS["8/4"]), 96), []
    for text in TEXTS:
        seq, _ = cache.open(())
        for token, after in zip(text.tolist(), text[1:].tolist()):
            losses.append(
                -llama(torch.tensor([token]), cache.extend([(seq, [token])]))[0].log_softmax(-1)[
                    after
                ]
            )
        cache.free(seq)
    by_hand = torch.stack(losses).mean().exp().item()
    assert perplexity(llama, TEXTS, WIDTHS["8/4"]) == pytest.approx(by_hand, rel=1e-5)
    assert perplexity(llama, TEXTS) != pytest.approx(by_hand, rel=1e-5)


@pytest.mark.slow
def test_the_command_prints_a_line_for_each(folder, llama, tmp_path, capsys):
    (text := tmp_path / "text").write_text("Some text of a few words, again and again. " * 4)
    (data := tmp_path / "data").write_text("Other words, a few of them. " * 9)
    flags = (folder, "--table", text, "--data", data)
    assert quantize.main([str(flag) for flag in flags]) == 0
    measured, calibrated, *lines = capsys.readouterr().out.splitlines()
    assert (measured, calibrated) == (f"measured on {text}", f"calibrated on {data}")
    widths = len(WIDTHS)
    kinds = [line[:30].strip() for line in lines[2:]]
    others = ["FP8 rtn", "NF4 rtn, groups of 64", "W8A8 rtn", "W8A8 smoothquant"]
    fours = [
        f"INT4 {method}, groups of {group}"
        for group in (32, 64, 128)
        for method in ("rtn", "awq", "gptq", "awq+gptq")
    ]
    assert kinds == (
        ["16 bits"] * widths
        + ["INT8 rtn"]
        + ["INT8 awq+gptq"] * widths
        + others
        + fours
        + ["INT4 awq+gptq, groups of 128"] * (widths - 1)
    )
    told = [float(line.split()[-1].rstrip("%")) / 100 for line in lines[2:]]
    found = torch.tensor([float(line.split()[-2]) for line in lines[2:]])
    assert told == pytest.approx((found / found[0] - 1).tolist(), abs=1e-4) and max(told) > 0
    for line, (name, bits) in zip(lines[2:], WIDTHS.items()):
        token = KVSpec.of(llama.config, torch.bfloat16, bits).bytes(1)
        assert line[30:35].strip() == name
        assert f"{size(Llama.load(folder, trainable=True)):,}" in line and f"{token:,.0f}" in line


def test_a_row_is_what_it_is_alone(folder):
    text, rtn = [torch.arange(90) * 7 % 256], Recipe(Quantization(4, 32), ["8"])
    rows = table(
        folder, text, [], [Recipe(None, ["16", "8"]), Recipe(Quantization(8), ["16"]), rtn], "cpu"
    )
    assert table(folder, text, [], [rtn], "cpu")[0] == rows[-1]
    eight = perplexity(Llama.load(folder, "cpu", torch.float32, bits=8), text)
    assert rows[2].perplexity == eight != rows[0].perplexity
    assert [row.kv for row in rows] == ["16", "8", "16", "8"]
    assert rows[0].bytes == rows[1].bytes > rows[2].bytes > rows[3].bytes
