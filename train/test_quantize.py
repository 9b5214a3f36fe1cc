"""A quantized folder is the model that it came from, with rounded weights, or it is refused."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import quant
from app.cli import main as cli
from checkpoint.config import Config
from checkpoint.formats import Quantization
from conftest import write_model
from generate import generate
from kvcache import KVCache
from model import Llama
from quant import GROUPS, STORED
from tokenizer import Tokenizer
from train import calibrate, quantize


def rounded(folder: Path, how: Quantization) -> Llama:
    """The plain model whose weights are the numbers that the quantized ones stand for, in float64."""
    llama = Llama.load(folder, "cpu", torch.float64, trainable=True).requires_grad_(False)
    for name, place in llama.named_tensors().items():
        bits = how.head_bits if "embed" in name or "lm_head" in name else how.bits
        if place.ndim == 2 and bits != 16:
            place.copy_(
                quant.dequantize(*quant.quantize(place, bits, how.group), dtype=torch.float64)
            )
    return llama


def run(*arguments: str) -> int:
    return quantize.main([str(a) for a in arguments])


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
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "bits, group, head",
    [
        (8, 128, 8),
        (4, 32, 8),
        (4, 64, 16),
        (4, 32, 4),
        (8, 128, 16),
        (8, 32, 4),
        ("fp8", 128, 8),
        ("nf4", 64, 16),
    ],
)
@torch.inference_mode()
def test_a_quantized_folder_is_the_model_with_rounded_weights(tmp_path, shape, bits, group, head):
    folder, text = write_model(tmp_path / "plain", **shape), torch.arange(40)
    grouped = ["--group", group] if bits in GROUPS or head in GROUPS else []
    assert (
        run(folder, "--bits", bits, *grouped, "--head-bits", head, "--out", tmp_path / "out") == 0
    )
    expected = rounded(folder, Quantization(bits, group, head))(text)
    small = Llama.load(tmp_path / "out", "cpu", torch.float64)
    assert (
        small.config.quantization == Quantization(bits, group, head, "rtn")
        and small.dtype == torch.float64
    )
    torch.testing.assert_close(small(text), expected, rtol=1e-9, atol=1e-9)
    fast = Llama.load(tmp_path / "out", "cpu")
    prepared = fast.ops.prepare(Llama(fast.config, seed=None).layers[0].o, torch.float32, "o")
    assert fast.dtype == torch.float32 and type(fast.layers[0].o) is type(prepared)
    torch.testing.assert_close(
        fast(text).double(), expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item()
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", STORED)
@torch.inference_mode()
def test_bits_at_load_are_the_same_as_a_folder(tmp_path, shape, bits):
    folder = write_model(tmp_path / "plain", **shape)
    run(folder, "--bits", bits, "--out", tmp_path / "out")
    a, b = Llama.load(folder, bits=bits), Llama.load(tmp_path / "out")
    assert a.config == b.config and a.config.quantization == Quantization(
        bits, GROUPS.get(bits, 128)
    )
    assert torch.equal(a(torch.arange(9)), b(torch.arange(9)))
    step = KVCache.of(a, 16)
    seq, _ = step.open(())
    assert a(torch.arange(9), step.extend([(seq, range(9))]), rows=slice(-1, None)).shape == (
        1,
        261,
    )


def test_the_folder_has_what_the_model_had(tmp_path):
    folder = write_model(
        tmp_path / "plain", template="{{ messages }}", generation={"temperature": 0.5}
    )
    run(folder, "--bits", 4, "--out", tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
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


def change(folder: Path, **recipe) -> None:
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] |= recipe
    (folder / "config.json").write_text(json.dumps(data))


def change_tensor(folder: Path, name: str, new) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    save_file(tensors | ({name: new(tensor)} if new else {}), folder / "model.safetensors")


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


DOWN, EMBED = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "bits, harm, says",
    [
        (
            4,
            lambda f: change(f, group=64),
            r"tensor .*weight_(scale|zero) in .*model.safetensors is \[24, 3\]; config.json asks for \[24, 2\]",
        ),
        (4, lambda f: change(f, bits=8), r"tensor .*q_proj.weight in .* is (U8|\[24, 12\])"),
        (8, lambda f: change(f, bits=4), r"tensor .*q_proj.weight in .* is I8; weights must be U8"),
        (
            4,
            lambda f: change(f, head_bits=16),
            r"tensor model.embed_tokens.weight in .* is I8; weights must be one of",
        ),
        (
            4,
            lambda f: change_tensor(f, DOWN + "_scale", None),
            r"tensor .*down_proj.weight_scale \[24, 3\] is missing from",
        ),
        (
            4,
            lambda f: change_tensor(f, DOWN + "_zero", None),
            r"tensor .*down_proj.weight_zero \[24, 3\] is missing",
        ),
        (
            8,
            lambda f: change_tensor(f, DOWN + "_scale", None),
            r"tensor .*down_proj.weight_scale \[24, 1\] is missing",
        ),
        (
            8,
            lambda f: change_tensor(f, EMBED + "_scale", None),
            r"tensor model.embed_tokens.weight_scale \[261, 1\] is missing",
        ),
        (
            8,
            lambda f: change_tensor(f, DOWN, lambda t: t.float()),
            r"down_proj.weight in .* is F32; weights must be I8",
        ),
        (
            8,
            lambda f: change_tensor(f, DOWN, lambda t: t[:, :-1].contiguous()),
            r"down_proj.weight in .* is \[24, 69\]",
        ),
        (
            8,
            lambda f: change_tensor(f, DOWN + "_scale", lambda t: t.to(torch.int8)),
            r"down_proj.weight_scale in .* is I8",
        ),
        (4, lambda f: change(f, group=48), "quantization: group is 48; it must be 32, 64 or 128"),
        (4, lambda f: change(f, bits=3), "bits is 3"),
        (4, lambda f: change(f, head_bits=2), "head_bits is 2"),
        (4, lambda f: change(f, method="magic"), "method is 'magic'"),
        (
            4,
            lambda f: change(f, order="columns"),
            "quantization_config is .*order.*, which is not supported",
        ),
        (
            4,
            lambda f: change(f, quant_method="hqq"),
            "quant_method is .hqq.; it must be .quant.py., .gptq., .awq., .* or",
        ),
        (4, shorten, "model.safetensors is not a whole safetensors file"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused_before_memory_is_asked_for(
    tmp_path, small, monkeypatch, bits, harm, says
):
    folder = shutil.copytree(small / str(bits), tmp_path / "harmed")
    harm(folder)
    create = Llama.__init__

    def only_meta(self, config, device="cpu", *rest, **more):
        assert device == "meta"
        create(self, config, device, *rest, **more)

    monkeypatch.setattr(Llama, "__init__", only_meta)
    with pytest.raises(ValueError, match=says):
        Llama.load(folder, "cpu")


@pytest.mark.parametrize(
    "ask, says",
    [
        (
            dict(bits=8),
            "the weights are INT4 already: quantize the folder that they were made from",
        ),
        (dict(trainable=True), "quantized weights cannot be trained"),
    ],
)
def test_a_quantized_model_is_not_quantized_again_nor_trained(small, ask, says):
    with pytest.raises(ValueError, match=says):
        Llama.load(small / "4", **ask)


def test_what_makes_no_sense_at_load_is_refused(small):
    for ask in (dict(bits=5), dict(bits=8, trainable=True)):
        with pytest.raises(
            ValueError, match="bits is 5; it must be 8, 4, 'fp8' or 'nf4'|cannot be trained"
        ):
            Llama.load(small / "plain", **ask)
    with pytest.raises(ValueError, match="no random weights"):
        Llama(Config.load(small / "8"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--bits", "4", "--table", "x"],
        ["--tokens", "9", "--out", "x"],
        ["--data", "x", "--out", "x"],
        ["--group", "32", "--bits", "fp8", "--out", "x"],
        ["--pieces", "5", "--table", "x"],
    ],
)
def test_flags_that_would_do_nothing_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        quantize.parse_flags(["tiny", *flags])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith(
        f"error: {flags[0]} has no use"
    )


def test_the_command_line_says_what_is_wrong_in_one_line(small, tmp_path, capsys):
    plain, out = small / "plain", tmp_path / "out"
    calibrated = [plain, "--out", out, "--method", "awq", "--data"]
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.txt").write_text("")
    for arguments, says in [
        ([plain], "give either --out"),
        ([plain, "--out", out, "--table", __file__], "give either --out"),
        (
            [plain, "--out", out, "--method", "gptq"],
            "--method gptq looks at text: give some with --data FILE",
        ),
        ([plain, "--out", small], "exists and is not an empty folder"),
        ([plain, "--out", __file__], "exists and is not an empty folder"),
        (["nothing", "--out", out], "'nothing' is neither a folder"),
        ([small / "4", "--out", out], "are INT4 already"),
        ([*calibrated, __file__, "--pieces", 0], "--pieces is 0: it must be at least 1"),
        (
            [*calibrated, __file__, "--pieces", 10**18],
            f"is {10**18}: it must be at least 1 and at most 65,536",
        ),
        ([plain, "--table", __file__, "--tokens", 1], "--tokens is 1"),
        ([plain, "--table", __file__, f"--tokens={10**400}"], "--tokens is 1000"),
        ([plain, "--out", out, "--device", "tpu"], "device 'tpu'"),
        (
            [plain, "--out", out, "--bits", 4, "--activations", 8],
            "activations of 8 bits need weights in 8 or fp8, not 4",
        ),
        (
            [*calibrated, __file__, "--method", "gptq", "--bits", "nf4"],
            "gptq needs whole numbers: bits 8 or 4, not nf4",
        ),
        (
            [*calibrated, __file__, "--method", "smoothquant", "--activations", 16],
            "smoothquant is for weights and activations of 8",
        ),
        ([*calibrated, tmp_path / "none"], "No such file"),
        ([*calibrated, tmp_path / "bytes.txt"], "bytes.txt cannot be read as UTF-8 text"),
        ([*calibrated, tmp_path / "empty.txt"], "empty.txt holds no text"),
    ]:
        assert run(*arguments) == 2, arguments
        stdout, stderr = capsys.readouterr()
        assert stdout == "" and stderr.startswith("error: ") and stderr.count("\n") == 1, (
            says,
            stderr,
        )
        assert says in stderr, (says, stderr)
        assert not out.exists()
    for wrong in (["--bits", 5], ["--group", 16], ["--method", "guess"]):
        with pytest.raises(SystemExit) as stop:
            run(plain, "--out", out, *wrong)
        assert stop.value.code == 2


@pytest.mark.parametrize(
    "stop, code", [(KeyboardInterrupt, 130), (OSError("No space left on device"), 2)]
)
def test_half_a_folder_is_no_model(base, tmp_path, monkeypatch, stop, code):
    monkeypatch.setattr("shutil.copy", Mock(side_effect=stop))
    assert run(base, "--out", tmp_path / "out") == code and not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_folder_tells_what_its_source_tells_with_such_weights_and_has_no_smaller_copy(
    base, capsys, tmp_path, bits
):
    assert run(base, "--bits", bits, "--out", tmp_path / "out") == 0
    common = dict(seed=3, max_tokens=12, dtype=torch.float64)
    told = generate("Once", tmp_path / "out", **common)
    assert told["tokens"] == generate("Once", base, bits=bits, **common)["tokens"]
    for flags, says in (
        (["--bits", "8"], f"the weights are INT{bits} already"),
        (
            ["--draft", "self"],
            "the target's weights are INT4"
            if bits == 4
            else "out holds weights in INT8, and the INT4 copy",
        ),
    ):
        capsys.readouterr()
        assert cli(["--target", str(tmp_path / "out"), *flags, "Once"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and err.startswith("error: ") and says in err


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
    held, heard = (
        torch.cat(quantize.pieces(file, tokenizer, 6, 100, calibrate=c)) for c in (False, True)
    )
    assert set(held.tolist()) == {57, 256} and 57 not in heard and 256 in heard and len(held) == 24


def test_the_size_of_a_model_is_that_of_its_file(small):
    plain = Llama.load(small / "plain", "cpu", torch.float32, trainable=True)
    file = (small / "plain" / "model.safetensors").read_bytes()
    assert (
        calibrate.size(plain) * 2 == len(file) - int.from_bytes(file[:8], "little") - 8
    )  # in 16 bits: half
