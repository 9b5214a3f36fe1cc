"""Quantized numbers are within half a step of what they stand for, a quantized folder is the model it came from, or it is refused."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import quant
from config import Config, Quantization
from conftest import SMALL, peak, write_model
from model import Llama
from quant import dequantize, from_int4, from_int8, int4, int8, pack4, quantize, round_up, unpack4

MAX = torch.finfo(torch.float32).max
KINDS = {"plain": lambda x: x, "zeros": lambda x: 0 * x, "constant": lambda x: 0 * x + x.flatten()[0], "largest": lambda x: (x.clamp(-3, 3) / 3) * MAX,
         "all at the largest": lambda x: x.sign() * MAX, "near the largest": lambda x: (0.9 + 0.1 * torch.sigmoid(x)) * MAX,
         "large": lambda x: x * 1e36, "tiny": lambda x: x * 1e-31, "below all": lambda x: x * 1e-40, "small": lambda x: x * 1e-27,
         "far from 0": lambda x: 1e6 + x, "at the edge of far": lambda x: 200 + 0.75 * x.sigmoid(), "one outlier": lambda x: torch.cat((x[:, :1] * 1e4, x[:, 1:]), 1),
         "positive": lambda x: x.abs(), "some zero": lambda x: x * (x > 0)}


def numbers(kind: str, N: int, K: int, seed: int) -> torch.Tensor:
    return KINDS[kind](torch.randn(N, K, generator=torch.Generator().manual_seed(seed)))


def off_by(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest difference, in steps; in float64, where nothing is rounded."""
    assert y.isfinite().all() and scale.isfinite().all() and (scale.float() >= 1e-30 * 0.999).all()
    return ((x.double() - y.double()).abs() / scale.double()).max().item()


def columns_of(x: torch.Tensor, q: quant.Quantized) -> torch.Tensor:
    return x.repeat_interleave(q.group, 1)[:, :q.columns]


# ---- Weights

@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 4), st.integers(1, 300), st.sampled_from([8, 4]), st.sampled_from([1, 2, 5, 32, 64, 128]), st.integers(0, 99))
@example("all at the largest", 2, 33, 4, 32, 0)
@example("all at the largest", 2, 33, 8, 32, 0)
@example("near the largest", 4, 300, 4, 5, 0)
def test_weights_are_within_half_a_step(kind, N, K, bits, group, seed):
    w = numbers(kind, N, K, seed)
    q = quantize(w, bits, group)
    M = 1 if bits == 8 else -(-K // group)
    back = dequantize(*q)
    assert back.shape == w.shape and back.dtype == torch.float32 and q.scale.shape == (N, M)
    assert off_by(w, back, columns_of(q.scale, q)) <= 0.5 * (1 + 1e-3)
    assert sum(t.nbytes for t in q[:3] if t is not None) == N * (K + 2 if bits == 8 else -(-K // 2) + 4 * M)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.integers(1, 200), st.sampled_from([8, 4]), st.sampled_from([1, 5, 32]), st.integers(0, 99), st.floats(-20, 20))
def test_a_step_is_no_longer_than_it_must_be(N, K, bits, group, seed, power):
    w = numbers("plain", N, K, seed) * 10**power
    q = quantize(w, bits, group)
    for g, part in enumerate(w.split(K if bits == 8 else group, 1)):
        low, high = part.amin(1), part.amax(1)
        least = torch.maximum(high, -low) / 127 if bits == 8 else torch.maximum((high - low) / 15, torch.maximum(high, -low) / 2000)
        assert (q.scale[:, g].float() <= least * (1 + 2.0**-7) + 1e-30).all()


def test_what_is_on_the_grid_stays():
    """All 255 and all 16 numbers, wherever the sixteen begin."""
    every = torch.arange(-127.0, 128)[None] * 0.25
    assert torch.equal(dequantize(*quantize(every, 8)), every)
    for begin in (-15, -7, 0, 100, -1000):
        every = torch.arange(begin, begin + 16.0)[None].repeat(1, 2) * 0.125
        q = quantize(every, 4, 16)
        assert torch.equal(dequantize(*q), every) and torch.equal(unpack4(q.values)[0, :16], torch.arange(16, dtype=torch.uint8))


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), min_size=1, max_size=40))
def test_packing_round_trips_to_the_bit(numbers):
    q = torch.tensor([numbers, numbers[::-1]], dtype=torch.uint8)
    packed = pack4(q)
    assert packed.shape[1] == (len(numbers) + 1) // 2 and torch.equal(unpack4(packed)[:, :len(numbers)], q)
    assert packed[0, 0] == numbers[0] + 16 * (numbers[1] if len(numbers) > 1 else 0)            # the order that files and kernels rely on


@settings(deadline=None, max_examples=300)
@given(st.floats(0, 2.0**120, width=32))
@example(1.0)
@example(1.0000001192092896)
@example(1.9999998807907104)
def test_16_bits_are_rounded_up_and_only_as_far_as_they_must(x):
    x = torch.tensor([x])
    up = round_up(x)
    assert up.dtype == torch.bfloat16 and up.float() >= x
    below = (up.view(torch.int16) - 1).view(torch.bfloat16)
    assert up == 0 or below.float() < x


def test_a_weight_in_slabs_is_the_same_as_whole(monkeypatch):
    w = numbers("plain", 7, 37, 0)
    whole = {bits: quantize(w, bits, 32) for bits in (8, 4)}
    monkeypatch.setattr(quant, "SLAB", 80)
    for bits, q in whole.items():
        for a, b in zip(q, quantize(w, bits, 32)):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
def test_other_dtypes_are_numbers_too(dtype, bits):
    w = numbers("plain", 3, 50, 0).to(dtype)
    q, same = quantize(w, bits, 32), quantize(w.float(), bits, 32)
    assert all(torch.equal(a, b) for a, b in zip(q[:2], same[:2])) and dequantize(*q, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("w, bits, group, says", [
    (torch.ones(2, 2), 3, 32, "bits is 3: weights are stored in 8 or 4"), (torch.ones(2, 2), 16, 32, "bits is 16"), (torch.ones(2, 2), 4, 0, "group is 0"),
    (torch.tensor([[1.0, torch.nan]]), 8, 32, r"\[1, 2\] cannot be quantized: it holds numbers that are not finite"),
    (torch.tensor([[1.0, -torch.inf]]), 4, 32, "not finite"), (torch.tensor([[1.0, torch.inf]]), 8, 32, "not finite"),
    (torch.ones(2, 2, dtype=torch.int8), 8, 32, r"a weight of torch.int8 \[2, 2\]"), (torch.ones(2), 8, 32, "must be a matrix"), (torch.ones(0, 2), 8, 32, "must be a matrix")])
def test_what_cannot_be_quantized_is_refused(w, bits, group, says):
    with pytest.raises(ValueError, match=says):
        quantize(w, bits, group)


# ---- Keys and values

@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.integers(1, 2), st.integers(1, 16), st.sampled_from([None, 1, 4, 16]), st.integers(0, 99))
def test_keys_and_values_are_within_half_a_step(kind, n, heads, half, group, seed):
    x = numbers(kind, heads * n, 2 * half, seed).view(heads, n, 2 * half)
    values, scale = int8(x)
    assert values.dtype == torch.int8 and scale.dtype == torch.bfloat16 and scale.shape == (heads, n, 1)
    assert off_by(x, from_int8(values, scale), scale) <= 0.5 * (1 + 1e-3)
    packed, scale, zero = int4(x, group)
    M = -(-2 * half // group) if group else 1
    assert packed.shape == (heads, n, half) and packed.dtype == torch.uint8
    assert scale.shape == zero.shape == (heads, n, M)
    if M > 1 and x.abs().max() > 1e38:                                                           # which no product could use
        return
    again = from_int4(packed, scale, zero, group=group)
    assert off_by(x, again, scale.repeat_interleave(group or 2 * half, -1)[..., :2 * half]) <= 0.5 * (1 + 1e-3)


def test_a_vector_does_not_depend_on_its_neighbours():
    """So a text can be stored in any chunks, and blocks can be shared."""
    x = numbers("one outlier", 12, 8, 0).view(3, 4, 8)
    for store in (int8, int4, lambda x: int4(x, 3)):
        whole, first = store(x), store(x[:1])
        assert all(torch.equal(a[:1], b) for a, b in zip(whole, first))


def test_numbers_that_are_large_in_every_key_spoil_their_group_alone():
    keys = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    keys[:, 5] += 20
    keys[:, 9] *= 15
    whole, grouped = ((from_int4(*int4(keys, group), group=group) - keys).square().sum(0) for group in (None, 16))
    assert grouped[16:].sum() < 0.05 * whole[16:].sum() and grouped[:16].sum() < 1.1 * whole[:16].sum()


def test_bytes_of_a_vector():
    keys = torch.randn(4, 32, 64)
    assert sum(t.nbytes for t in int8(keys)) == 4 * 32 * (64 + 2) <= 0.54 * keys.bfloat16().nbytes
    assert sum(t.nbytes for t in (*int4(keys, 16), *int4(keys))) <= 0.33 * 2 * keys.bfloat16().nbytes
    assert sum(t.nbytes for t in (*int8(keys), *int4(keys))) <= 0.42 * 2 * keys.bfloat16().nbytes
    assert from_int8(*int8(keys), torch.bfloat16).dtype == from_int4(*int4(keys), torch.bfloat16).dtype == torch.bfloat16


# ---- Models

def rounded(folder: Path, how: Quantization) -> Llama:
    """The plain model whose weights are the numbers that the quantized ones stand for, in float64."""
    llama = Llama.load(folder, "cpu", torch.float64, trainable=True).requires_grad_(False)
    for name, place in llama.places().items():
        bits = how.head_bits if "embed" in name or "lm_head" in name else how.bits
        if place.ndim == 2 and bits != 16:
            place.copy_(dequantize(*quantize(place, bits, how.group), dtype=torch.float64))
    return llama


def run(*arguments: str) -> int:
    return quant.main([str(a) for a in arguments])


SHAPES = [dict(), dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True, hidden_size=70, intermediate_size=33, head_dim=10)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits, group, head", [(8, 128, 8), (4, 32, 8), (4, 64, 16), (4, 32, 4), (8, 32, 16)])
@torch.inference_mode()
def test_a_quantized_folder_is_the_model_with_rounded_weights(tmp_path, shape, bits, group, head):
    folder, text = write_model(tmp_path / "plain", **shape), torch.arange(40)
    assert run(folder, "--bits", bits, "--group", group, "--head-bits", head, "--out", tmp_path / "out") == 0
    expected, small = rounded(folder, Quantization(bits, group, head))(text), Llama.load(tmp_path / "out", "cpu", torch.float64)
    assert small.config.quantization == Quantization(bits, group, head, "rtn") and small.dtype == torch.float64
    torch.testing.assert_close(small(text), expected, rtol=1e-9, atol=1e-9)
    fast = Llama.load(tmp_path / "out", "cpu")
    assert fast.dtype == torch.float32 and {p.path(1) for p, _ in fast.layers[0].parts()} <= {"native", "packed", "tiles"}
    torch.testing.assert_close(fast(text).double(), expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_bits_at_load_are_the_same_as_a_folder(tmp_path, shape, bits):
    folder = write_model(tmp_path / "plain", **shape)
    run(folder, "--bits", bits, "--out", tmp_path / "out")
    a, b = Llama.load(folder, bits=bits), Llama.load(tmp_path / "out")
    assert a.config == b.config and a.config.quantization == Quantization(bits)
    assert torch.equal(a(torch.arange(9)), b(torch.arange(9)))
    step = a.cache(16)
    seq, _ = step.open(())
    assert a(torch.arange(9), step.extend([(seq, range(9))]), rows=slice(-1, None)).shape == (1, 261)


def test_the_folder_has_what_the_model_had(tmp_path):
    folder = write_model(tmp_path / "plain", template="{{ messages }}", generation={"temperature": 0.5})
    run(folder, "--bits", 4, "--out", tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config") == dict(quant_method="quant.py", bits=4, group=128, head_bits=8, method="rtn")
    assert config == json.loads((folder / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for name, t in tensors.items() if "norm" in name} == {torch.float32} and tensors["model.embed_tokens.weight"].dtype == torch.int8
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (24, 20)
    norms = sum(t.nbytes for name, t in tensors.items() if "norm" in name)
    assert quant.size(Llama(Config.load(tmp_path / "out"), "meta", seed=None)) == sum(t.nbytes for t in tensors.values()) - norms // 2


def test_a_16_bit_model_stays_one_in_what_is_not_quantized(tmp_path):
    folder = write_model(tmp_path / "plain")
    save_file({name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}, folder / "model.safetensors")
    run(folder, "--bits", 4, "--head-bits", 16, "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16 and tensors["model.layers.0.mlp.up_proj.weight_zero"].dtype == torch.int16


# ---- What is refused

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_model(folder / "plain", intermediate_size=70)
    for bits in (8, 4):
        run(folder / "plain", "--bits", bits, "--group", 32, "--out", folder / str(bits))
    return folder


def change(folder: Path, **recipe) -> None:
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] |= recipe
    (folder / "config.json").write_text(json.dumps(data))


def change_tensor(folder: Path, name: str, new) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    save_file(tensors | ({name: new(tensor)} if new else {}), folder / "model.safetensors")


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("bits, harm, says", [
    (4, lambda f: change(f, group=64), r"tensor .*weight_(scale|zero) in .*model.safetensors is \[24, 3\]; config.json asks for \[24, 2\]"),
    (4, lambda f: change(f, bits=8), r"tensor .*q_proj.weight in .* is (U8|\[24, 12\])"),
    (8, lambda f: change(f, bits=4), r"tensor .*q_proj.weight in .* is I8; weights must be U8"),
    (4, lambda f: change(f, head_bits=16), r"tensor model.embed_tokens.weight in .* is I8; weights must be one of"),
    (4, lambda f: change_tensor(f, DOWN + "_scale", None), r"tensor .*down_proj.weight_scale \[24, 3\] is missing from"),
    (4, lambda f: change_tensor(f, DOWN + "_zero", None), r"tensor .*down_proj.weight_zero \[24, 3\] is missing"),
    (8, lambda f: change_tensor(f, DOWN + "_scale", None), r"tensor .*down_proj.weight_scale \[24, 1\] is missing"),
    (8, lambda f: change_tensor(f, "model.embed_tokens.weight_scale", None), r"tensor model.embed_tokens.weight_scale \[261, 1\] is missing"),
    (8, lambda f: change_tensor(f, DOWN, lambda t: t.float()), r"down_proj.weight in .* is F32; weights must be I8"),
    (8, lambda f: change_tensor(f, DOWN, lambda t: t[:, :-1].contiguous()), r"down_proj.weight in .* is \[24, 69\]"),
    (8, lambda f: change_tensor(f, DOWN + "_scale", lambda t: t.to(torch.int8)), r"down_proj.weight_scale in .* is I8"),
    (4, lambda f: change(f, group=48), "quantization: group is 48; it must be 32, 64 or 128"), (4, lambda f: change(f, bits=3), "bits is 3"),
    (4, lambda f: change(f, head_bits=2), "head_bits is 2"), (4, lambda f: change(f, method="magic"), "method is 'magic'"),
    (4, lambda f: change(f, order="columns"), "quantization_config is .*order.*, which is not supported"),
    (4, lambda f: change(f, quant_method="gptq"), "quantization_config is .*, which is not supported; only quant.py's"),
    (4, lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]), "model.safetensors is not a whole safetensors file")])
def test_a_folder_that_is_not_what_it_says_is_refused_before_memory_is_asked_for(tmp_path, small, monkeypatch, bits, harm, says):
    folder = shutil.copytree(small / str(bits), tmp_path / "harmed")
    harm(folder)
    create = Llama.__init__

    def only_meta(self, config, device="cpu", *rest, **more):
        assert device == "meta"
        create(self, config, device, *rest, **more)
    monkeypatch.setattr(Llama, "__init__", only_meta)
    with pytest.raises(ValueError, match=says):
        Llama.load(folder, "cpu")


@pytest.mark.parametrize("ask, says", [
    (dict(bits=8), "the weights have 4 bits already: quantize the folder that they were made from"), (dict(trainable=True), "quantized weights cannot be trained")])
def test_a_quantized_model_is_not_quantized_again_nor_trained(small, ask, says):
    with pytest.raises(ValueError, match=says):
        Llama.load(small / "4", **ask)


def test_what_makes_no_sense_at_load_is_refused(small):
    for ask in (dict(bits=5), dict(bits=8, trainable=True)):
        with pytest.raises(ValueError, match="bits is 5; it must be 8 or 4|cannot be trained"):
            Llama.load(small / "plain", **ask)
    with pytest.raises(ValueError, match="no random weights"):
        Llama(Config.load(small / "8"))


def test_the_command_line_says_what_is_wrong_in_one_line(small, tmp_path, capsys):
    plain, out = small / "plain", tmp_path / "out"
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.txt").write_text("")
    for arguments, says in [
            ([plain], "give either --out"), ([plain, "--out", out, "--table", __file__], "give either --out"),
            ([plain, "--out", out, "--method", "gptq"], "--method gptq looks at text: give some with --data FILE"),
            ([plain, "--out", small], "exists and is not an empty folder"), ([plain, "--out", __file__], "exists and is not an empty folder"),
            (["nothing", "--out", out], "'nothing' is neither a folder"), ([small / "4", "--out", out], "have 4 bits already"),
            ([plain, "--out", out, "--pieces", 0], "--pieces is 0: it must be at least 1"), ([plain, "--table", __file__, "--tokens", 1], "--tokens is 1"),
            ([plain, "--out", out, "--method", "awq", "--data", tmp_path / "none"], "No such file"),
            ([plain, "--out", out, "--method", "awq", "--data", tmp_path / "bytes.txt"], "bytes.txt cannot be read as UTF-8 text"),
            ([plain, "--out", out, "--method", "awq", "--data", tmp_path / "empty.txt"], "empty.txt holds no text")]:
        assert run(*arguments) == 2, arguments
        stdout, stderr = capsys.readouterr()
        assert stdout == "" and stderr.startswith("error: ") and stderr.count("\n") == 1 and says in stderr, (says, stderr)
        assert not out.exists()
    for wrong in (["--bits", 5], ["--group", 16], ["--method", "guess"]):
        with pytest.raises(SystemExit) as stop:
            run(plain, "--out", out, *wrong)
        assert stop.value.code == 2


# ---- What is measured

def test_pieces_of_a_text_and_of_stories(tmp_path, small):
    from tokenizer import Tokenizer
    tokenizer = Tokenizer.load(small / "plain")                                 # a byte is a token
    (tmp_path / "text").write_text("".join(chr(97 + i % 26) for i in range(1000)))
    first = quant.pieces(str(tmp_path / "text"), tokenizer, 100, 3)
    assert [len(p) for p in first] == [100] * 3 and torch.cat(first).tolist() == [97 + i % 26 for i in range(300)]
    spread = quant.pieces(str(tmp_path / "text"), tokenizer, 100, 4, calibrate=True)
    assert [p[0] for p in spread] == [97 + i % 26 for i in (0, 250, 500, 750)] and [len(p) for p in spread] == [100] * 4
    (tmp_path / "stories").write_text("<|endoftext|>\n".join(str(i % 10) * 5 for i in range(40)))
    held, heard = (torch.cat(quant.pieces(str(tmp_path / "stories"), tokenizer, 6, 100, calibrate=c)) for c in (False, True))
    assert set(held.tolist()) == {57, 256} and 57 not in heard and 256 in heard and len(held) == 24


def test_the_size_of_a_model_is_that_of_its_file(small):
    plain, file = Llama.load(small / "plain", "cpu", torch.float32, trainable=True), small / "plain" / "model.safetensors"
    assert quant.size(plain) * 2 == file.stat().st_size - int.from_bytes(file.read_bytes()[:8], "little") - 8           # in 16 bits: half


LARGE = dict(tie_word_embeddings=False, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, head_dim=64, vocab_size=8192)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.meanwhile(peak, json.dumps(LARGE), 'Llama.load("test_data/mha", "cpu", torch.float32, bits=8)', 'llama = Llama.load(folder, "cpu", torch.float32, bits=8)')
def test_quantizing_at_load_never_has_the_plain_model_in_memory(meanwhile):
    plain = sum(place.numel() * 4 for place in Llama(Config(**SMALL | LARGE), "meta", seed=None).places().values())
    # 45 MB are a tensor's own numbers as it is rounded; where malloc keeps what was freed, 130 (both are seen). The plain model would be 155 more.
    assert plain > 150e6 and meanwhile() < plain / 4 + 145e6 < 5 / 4 * plain, f"{meanwhile() >> 20} MiB for {plain >> 20}"
