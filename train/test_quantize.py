"""A quantized folder is the model that it came from, with rounded weights, or it is refused."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import quant
from checkpoint.config import Config
from checkpoint.formats import Quantization
from errors import UserError
from kvcache import KVCache
from model import Llama
from quant import FORMATS
from testing.folders import change_tensors, write_model
from testing.programs import check_refusals, largest_file, told
from tokenizer import Tokenizer
from train import calibrate, quantize


def rounded(folder: Path, how: Quantization) -> Llama:
    """The plain model with the numbers that the quantized weights stand for, in float64."""
    llama = Llama.load(folder, "cpu", torch.float64, trainable=True)
    for name, tensor in llama.named_tensors().items():
        bits = how.head_bits if "embed" in name or "lm_head" in name else how.bits
        if tensor.ndim == 2 and bits != 16:
            q = quant.quantize(tensor, bits, how.group)
            tensor.copy_(q.dequantize(torch.float64))
    return llama


def run(*arguments: object) -> int:
    return quantize.main([str(argument) for argument in arguments])


SHAPES = [
    dict(),
    dict(
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        hidden_size=70,
        intermediate_size=33,
        head_dim=10,
    ),
    dict(model_type="qwen3"),
]


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_quantized_folder_is_the_model_with_rounded_weights(tmp_path, shape):
    folder = write_model(tmp_path / "plain", **shape)
    text = torch.arange(40)
    recipes = [(8, 128, 8), (4, 32, 8), (4, 64, 16), (4, 32, 4)]
    recipes += [(8, 32, 4), ("fp8", 128, 16), ("nf4", 64, 8)]
    for bits, group, head in recipes:
        out = tmp_path / f"{bits}-{group}-{head}"
        flags = ["--bits", bits, "--head-bits", head, "--out", out]
        grouped = ["--group", group] if {bits, head} & {4, "nf4"} else []
        assert run(folder, *flags, *grouped) == 0
        expected = rounded(folder, Quantization(bits, group, head))(text)
        small = Llama.load(out, "cpu", torch.float64)
        assert small.config.quantization == Quantization(bits, group, head, method="rtn")
        torch.testing.assert_close(small(text), expected, rtol=1e-9, atol=1e-9)
        fast = Llama.load(out, "cpu")
        assert fast.dtype == torch.float32
        tolerance = 1e-3 * expected.abs().max().item()
        torch.testing.assert_close(fast(text).double(), expected, rtol=1e-2, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_bits_at_load_are_those_of_a_folder(tmp_path, shape):
    folder = write_model(tmp_path / "plain", **shape)
    text = torch.arange(9)
    for bits in FORMATS:
        run(folder, "--bits", bits, "--out", tmp_path / str(bits))
        loaded = Llama.load(folder, bits=bits)
        stored = Llama.load(tmp_path / str(bits))
        assert loaded.config == stored.config
        assert loaded.config.quantization == Quantization(bits)
        torch.testing.assert_close(loaded(text), stored(text), atol=1e-5, rtol=0)
        cache = KVCache(loaded.kv_spec(), 16)
        seq, _ = cache.open(())
        metadata = cache.extend([(seq, text.tolist())])
        assert loaded(text, metadata, slice(-1, None)).shape == (1, 261)


def test_the_folder_has_what_the_model_had(tmp_path):
    folder = write_model(
        tmp_path / "plain", template="{{ messages }}", generation={"temperature": 0.5}
    )
    files = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    others = ["tokenizer.model", "added_tokens.json", "chat_template.jinja"]  # of other makers
    others.append("additional_chat_templates/tool_use.jinja")
    (folder / "additional_chat_templates").mkdir()
    for name in others:
        (folder / name).write_text(name)
    run(folder, "--bits", 4, "--out", tmp_path / "out")
    for file in files + others:
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    recipe = dict(
        quant_method="quant.py", bits=4, group=128, head_bits=8, method="rtn", activations=16
    )
    assert config.pop("quantization_config") == recipe
    assert config == json.loads((folder / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for name, t in tensors.items() if "norm" in name} == {torch.float32}
    assert tensors["model.embed_tokens.weight"].dtype == torch.int8
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (24, 20)
    norms = sum(t.nbytes for name, t in tensors.items() if "norm" in name)
    size = calibrate.size(Llama(Config.load(tmp_path / "out"), "meta", seed=None))
    assert size == sum(t.nbytes for t in tensors.values()) - norms // 2


def test_a_16_bit_model_stays_one_in_what_is_not_quantized(tmp_path):
    folder = write_model(tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.bfloat16() for name, t in tensors.items()}, folder / "model.safetensors")
    run(folder, "--bits", 4, "--head-bits", 16, "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (
        tensors["model.norm.weight"].dtype
        == tensors["model.embed_tokens.weight"].dtype
        == torch.bfloat16
    )
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight_zero"].dtype == torch.int16


# ---- What is refused


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_model(folder / "plain", intermediate_size=70)
    for bits in (8, 4):
        run(
            folder / "plain",
            "--bits",
            bits,
            *(["--group", 32] if bits == 4 else []),
            "--out",
            folder / str(bits),
        )
    return folder


DAMAGE = told(  # bits; settings, or tensors and their change → what is said
    r"""
    4 {"group": 64} → weight_(scale|zero) in .* is \[24, 3\]
    4 {"bits": 8} → q_proj.weight in .* is (U8|\[24, 12\])
    8 {"bits": 4} → q_proj.weight in .* is I8; weights must be U8
    4 {"head_bits": 16} → embed_tokens.weight in .* is I8; weights must
    4 1.mlp.down_proj.weight_scale missing → _scale \[24, 3\] is missing from
    4 1.mlp.down_proj.weight_zero missing → _zero \[24, 3\] is missing
    8 1.mlp.down_proj.weight_scale missing → down.*_scale \[24, 1\] is missing
    8 embed_tokens.weight_scale missing → \[261, 1\] is missing
    8 1.mlp.down_proj.weight float32 → is F32; weights must be I8
    8 1.mlp.down_proj.weight narrow → down_proj.weight .* is \[24, 69\]
    8 1.mlp.down_proj.weight_scale int8 → weight_scale in .* is I8
    """
)


def test_damaged_folder_is_refused_before_memory_is_asked_for(tmp_path, small, monkeypatch):
    create = Llama.__init__

    def only_meta(self, config, device="cpu", *rest, **more):
        assert device == "meta"
        create(self, config, device, *rest, **more)

    monkeypatch.setattr(Llama, "__init__", only_meta)
    for i, (damage, says) in enumerate(DAMAGE):
        bits, change = damage.split(" ", 1)
        folder = shutil.copytree(small / bits, tmp_path / str(i))
        if change.startswith("{"):
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] |= json.loads(change)
            (folder / "config.json").write_text(json.dumps(config))
        else:
            change_tensors(folder, *change.split(" "))
        with pytest.raises(UserError, match=says):
            Llama.load(folder, "cpu")


def test_quantized_models_are_not_quantized_again_nor_trained(small):
    for folder, ask, says in [
        (
            "4",
            dict(bits=8),
            "the weights are already INT4, and INT8 is asked for: quantize the folder",
        ),
        ("4", dict(trainable=True), "quantized weights cannot be trained"),
        ("plain", dict(bits=5), "bits is 5; it must be 8, 4, 'fp8' or 'nf4'"),
        ("plain", dict(bits=8, trainable=True), "cannot be trained"),
    ]:
        with pytest.raises(UserError, match=says):
            Llama.load(small / folder, **ask)
    with pytest.raises(ValueError, match="no random weights"):
        Llama(Config.load(small / "8"))


def test_bad_flags_are_one_line(small, tmp_path, capsys):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty").write_text("")
    (tmp_path / "letter").write_text("a")
    (tmp_path / "few").write_text("A story.<|endoftext|>\n" * 9)
    table = """
        {plain} → give either --out
        {plain} --out {out} --table {file} → give either --out
        {plain} --bits 4 --table {file} → --bits has no effect with --table
        {plain} --out {out} --bits 8 --group 32 → --group has no effect without 4 bits
        {plain} --out {out} --data {file} → --data has no effect with --method rtn
        {plain} --out {out} --method gptq → gptq looks at text: give some with --data FILE
        {plain} --out {small} → exists and is not an empty folder
        {plain} --out {file} → exists and is not an empty folder
        nothing --out {out} → 'nothing' is neither a folder
        {small}/4 --out {out} → are already INT4
        {plain} --out {out} --device tpu → device 'tpu'
        {plain} --out {out} --bits 4 --activations 8 → need weights in 8 or fp8, not 4
        {plain} --out {out} --method gptq --bits nf4 --data x → whole numbers
        {plain} --out {out} --method awq --data {tmp}/none → No such file
        {plain} --out {out} --method awq --data {tmp}/bytes → bytes cannot be read as UTF-8 text
        {plain} --out {out} --method awq --data {tmp}/empty → empty holds no text
        {plain} --out {out} --method awq --data {tmp}/letter → letter holds no text
        {plain} --table {tmp}/few → ten stories if it holds stories
        {plain} --out {out} --bits 5 → --bits
        {plain} --out {out} --group 16 → --group
    """
    places = dict(plain=small / "plain", small=small, tmp=tmp_path, file=__file__)
    check_refusals(quantize.main, table, capsys, out=tmp_path / "out", **places)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "stop, code", [(KeyboardInterrupt, 130), (OSError("No space left on device"), 2)]
)
def test_interrupted_run_leaves_no_model(base, tmp_path, monkeypatch, stop, code):
    monkeypatch.setattr("shutil.copy", Mock(side_effect=stop))
    assert run(base, "--out", tmp_path / "out") == code
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_sizes_and_errors_are_told_the_worst_first(base, tmp_path, capsys, method):
    (tmp_path / "text").write_text("Once upon a time there was a model. " * 30)
    data = ("--data", tmp_path / "text") if method != "rtn" else ()
    flags = ("--bits", 4, "--group", 32, "--method", method, *data)
    assert run(base, *flags, "--out", tmp_path / "quiet") == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 2  # less than two seconds: no progress
    assert run(base, *flags, "--errors", "--out", tmp_path / "out") == 0
    stdout, stderr = capsys.readouterr()
    rows = [line.split(maxsplit=1) for line in stdout.splitlines()]
    told = [float(share.rstrip("%")) / 100 for share, _ in rows]
    assert told == sorted(told, reverse=True) and len(told) == 4 * len(Llama.load(base).layers)
    plain = Llama.load(base, "cpu", torch.float32, trainable=True).layers[0].down.weight
    error = quant.quantize(plain, 4, 32).dequantize() - plain
    if method == "rtn":
        loss = (error.norm() / plain.norm()).item()
        assert told[[name for _, name in rows].index("layer 1 down")] == pytest.approx(
            loss, abs=1e-4
        )
    size = sum(part.nbytes for part in load_file(tmp_path / "out/model.safetensors").values())
    assert "bytes in 16 bits, " in stderr and 0 < size < 10**6
    before, after = (int(word.replace(",", "")) for word in stderr.split()[:6:5])
    numbers = sum(part.numel() for part in load_file(base / "model.safetensors").values())
    assert after < before == 2 * numbers and f"{after / before:.2f} of them" in stderr


# ---- What is measured


def test_pieces_of_a_text_and_of_stories(tmp_path, small):
    tokenizer = Tokenizer.load(small / "plain")  # a byte is a token
    (tmp_path / "text").write_text("".join(chr(97 + i % 26) for i in range(1000)))
    first = quantize.pieces(str(tmp_path / "text"), tokenizer, 100, 3)
    assert [len(p) for p in first] == [100] * 3 and torch.cat(first).tolist() == [
        97 + i % 26 for i in range(300)
    ]
    spread = quantize.pieces(str(tmp_path / "text"), tokenizer, 100, 4, calibrate=True)
    assert [p[0] for p in spread] == [97 + i % 26 for i in (0, 250, 500, 750)] and [
        len(p) for p in spread
    ] == [100] * 4
    (tmp_path / "stories").write_text("<|endoftext|>\n".join(str(i % 10) * 5 for i in range(40)))
    file = str(tmp_path / "stories")
    held_out = torch.cat(quantize.pieces(file, tokenizer, 6, 100))
    train = torch.cat(quantize.pieces(file, tokenizer, 6, 100, calibrate=True))
    assert held_out.tolist() == [57] * 5 + ([256] + [57] * 5) * 3
    assert 57 not in train and 256 in train


def test_no_text_is_measured_on_that_was_calibrated_with(tmp_path, small, monkeypatch):
    """And no longer ones than the model knows; without calibration only what needs none."""
    file = tmp_path / "stories"
    file.write_text("<|endoftext|>\n".join(str(i % 10) * 50 for i in range(40)))
    plain = small / "plain"
    read = ["--data", file]
    store = Mock()
    table = Mock()
    monkeypatch.setattr(quantize, "store", store)
    monkeypatch.setattr(quantize.perplexity, "table", table)
    run(plain, *read, "--method", "smoothquant", "--out", tmp_path / "out")
    _, _, how, calibration = store.call_args.args
    assert how == Quantization(8, method="smoothquant", activations=8)
    held_out = ord("9")  # every tenth story
    assert held_out not in torch.cat(calibration)
    for data in ([], read):
        run(plain, "--table", file, *data)
        _, texts, calibration, recipes, _ = table.call_args.args
        tokens = torch.cat(texts)
        assert len(tokens) == 4 * 51 - 1 and held_out in tokens and ord("8") not in tokens
        assert max(map(len, texts)) == Config.load(plain).max_position_embeddings == 96
        methods = {recipe.how.method for recipe in recipes if recipe.how}
        assert (methods == {"rtn"}) == (not calibration) == (not data)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Llama, "load", lambda *_, **__: pytest.fail("loaded first"))
    (tmp_path / "file").touch()
    assert run(base, "--out", tmp_path / "file" / "out") == 2
    monkeypatch.setattr("os.access", lambda *_: False)
    for out in (tmp_path / "new", tmp_path / "new" / "out"):
        assert run(base, "--out", out) == 2
        assert not (tmp_path / "new").exists()


def test_a_full_disk_is_one_line(base, tmp_path, capsys):
    with largest_file(20_000):
        assert run(base, "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "model.safetensors cannot be written" in err
