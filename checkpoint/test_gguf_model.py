"""A model in GGUF is the model that its numbers say: logits, texts, vocabulary; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Core
from torch import Tensor

from checkpoint.gguf import GGUF, PLAIN
from checkpoint.gguf_blocks import BLOCK_FORMATS
from checkpoint.gguf_model import GGUFCheckpoint, read_gguf_config
from checkpoint.gguf_vocabulary import PRE_TOKENIZERS, read_gguf_vocabulary
from checkpoint.hub import find_folder, find_model
from errors import UserError
from generate import generate
from loading import Model
from model import Llama
from testing.folders import byte_alphabet
from testing.folders import tokenizer_json as tokenizer_file
from testing.gguf import (
    EMBEDDING,
    SHAPE,
    Stored,
    gguf_name,
    interleaved,
    raw,
    settings_of,
    spm_gguf,
    write,
    write_model,
)
from testing.pieces import load, tokenizer_model, vocabulary
from testing.programs import told
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent


MIXED = {"v_proj": "Q6_K", "gate_proj": "Q4_K", "down": "Q5_0", "embed": "Q6_K", "": "Q4_K"}
NOT_WHOLE = {"v_proj": "Q4_1", "": "Q4_0"}  # zeros of a part of a product are no whole numbers
HALF = {"0.self_attn.k": "F16", "": "Q8_0"}  # a product of which a part is not quantized
LLAMAS = [*({"": type} for type in (*BLOCK_FORMATS, *PLAIN)), MIXED, NOT_WHOLE, HALF]


@pytest.mark.parametrize(
    "types, kind",
    [*((types, "llama") for types in LLAMAS), (HALF, "qwen2"), (MIXED, "qwen3")],
    ids=str,
)
def test_logits_are_those_of_the_stored_numbers(tmp_path, types, kind):
    file = tmp_path / "model.gguf"
    shape = dict(tie_word_embeddings=types != MIXED, model_type=kind)
    has_biases = types == NOT_WHOLE
    shape |= dict(attention_bias=has_biases, mlp_bias=has_biases)
    wanted = write_model(file, types, **shape)(torch.arange(30))
    for dtype, most in ((torch.float64, 1e-5), (torch.float32, 2e-3)):
        llama = Llama.load(file, "cpu", dtype)
        logits = llama(torch.arange(30)).double()
        assert (logits - wanted).norm() <= most * wanted.norm(), dtype
    bits = {q.weight.bits for q in quantized_matrices(file)}
    if types == MIXED:
        assert bits == {4, 8}


def quantized_matrices(file: Path) -> list[Any]:
    """The quantized matrices of the first layer, before they are packed."""
    checkpoint = GGUFCheckpoint(file)
    layer = Llama(read_gguf_config(checkpoint), "meta", seed=None).layers[0]
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return [linear for linear in linears if not isinstance(linear.weight, Tensor)]


def tensors_of(file: Path) -> list[tuple[str, Stored]]:
    """To be written again."""
    gguf = GGUF.open(file)
    tensors = []
    for name, info in gguf.tensors.items():
        tensors.append((name, Stored(info.type, list(info.shape), raw(gguf.read(name)))))
    return tensors


def test_a_file_that_names_no_kv_heads_has_as_many_as_query_heads(tmp_path):
    file = tmp_path / "model.gguf"
    wanted = write_model(file, {"": "F32"}, num_key_value_heads=8)(torch.arange(30))
    metadata = settings_of(SHAPE)
    del metadata["llama.attention.head_count_kv"]
    write(file, metadata.items(), tensors_of(file))
    logits = Llama.load(file, "cpu", torch.float64)(torch.arange(30))
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_frequencies_are_divided_as_the_file_says(tmp_path):
    """By linear scaling, under each of its names; by numbers of each pair; by both; by yarn."""
    file = tmp_path / "model.gguf"
    write_model(file, {"": "F32"})
    plain = Llama.load(file, "cpu").frequencies
    tensors = tensors_of(file)
    ones = torch.ones(16)
    factors = torch.rand(16) + 1
    none = {"llama.rope.scaling.type": "none"}
    linear = {"llama.rope.scaling.type": "linear"}
    for metadata, divisor in (
        ({"llama.rope.scale_linear": 4.0}, 4),
        ({"llama.rope.scaling.factor": 4.0}, 4),
        (linear | {"llama.rope.scaling.factor": 4.0}, 4),
        (none | {"llama.rope.scaling.factor": 4.0}, 1),
        (linear | {"llama.rope.scaling.factor": 0.0}, 1),
    ):
        for pairs in (ones, factors):
            more = [("rope_freqs.weight", Stored("F32", [16], raw(pairs)))]
            stored = tensors if pairs is ones else [*more, *tensors]
            write(file, (settings_of(SHAPE) | metadata).items(), stored)
            divided = Llama.load(file, "cpu").frequencies
            torch.testing.assert_close(divided * pairs * divisor, plain)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.yarn_beta_slow": 0.5,
    }
    write(file, (settings_of(SHAPE) | yarn).items(), tensors)
    llama = Llama.load(file, "cpu")
    assert llama.config.max_position_embeddings == 4 * 32
    assert llama.config.rope_scaling["beta_slow"] == 0.5
    slower = plain / llama.frequencies  # the first pair is kept, most are not
    assert slower[0] == 1 and slower[-1] == 4
    assert llama.attention_factor == pytest.approx(1.1386, abs=1e-4)
    write(file, (settings_of(SHAPE) | yarn).items(), [more[0], *tensors])
    with pytest.raises(UserError, match="rope_type beside rope_freqs.weight is 'yarn'"):
        Llama.load(file, "cpu")
    for wrong in (0.0, -1.0, 1e7, torch.nan):
        factors[5] = wrong
        damaged = ("rope_freqs.weight", Stored("F32", [16], raw(factors)))
        write(file, settings_of(SHAPE).items(), [damaged, *tensors])
        with pytest.raises(UserError, match="must hold 16 numbers between 0.1 and 1e6"):
            Llama.load(file, "cpu")


def test_a_sliding_window_is_the_longest_text(tmp_path):
    for size, most in ((24, 24), (0, 64)):  # 0: there is none
        file = tmp_path / f"{size}.gguf"
        window = {"llama.attention.sliding_window": size}
        write(file, (settings_of(SHAPE) | window).items(), [EMBEDDING])
        assert read_gguf_config(GGUFCheckpoint(file)).max_position_embeddings == most


# ---- The embedded model


def tiny_gguf(file: Path, folder: str = "tiny", **more: Any) -> Path:
    """An embedded model in GGUF, float32, with its vocabulary."""
    source = ROOT / "models" / folder
    config = json.loads((source / "config.json").read_text())
    data = json.loads((source / "tokenizer.json").read_text())
    special = {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    vocab = data["model"]["vocab"] | special
    tokens = sorted(vocab, key=vocab.__getitem__)
    metadata = settings_of(config) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.ggml.merges": data["model"]["merges"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    llama = Llama.load(source, "cpu", torch.float32, trainable=True)
    tensors = [
        (gguf_name(name), Stored("F32", list(x.shape), raw(interleaved(x.detach(), name, config))))
        for name, x in llama.named_tensors().items()
    ]
    return write(file, (metadata | more).items(), tensors)


@pytest.mark.parametrize("name", ["qwen2", "deepseek-r1-qwen"])
def test_qwens_texts_get_their_normal_form(tmp_path, name):
    """It is not stored."""
    pre = {"tokenizer.ggml.pre": name}
    qwen = Tokenizer.load(tiny_gguf(tmp_path / "qwen.gguf", "tiny-draft", **pre))
    other = Tokenizer.load(ROOT / "models" / "tiny-draft")
    text = "cafe\u0301 12"
    assert qwen.encode(text) == qwen.encode("café 12") != other.encode(text)
    assert len(qwen.encode("12345")) == 5


@pytest.mark.slow
def test_a_gguf_tells_what_its_folder_tells(tmp_path):
    """Greedy texts, with a draft in GGUF; rounded weights, keys and values."""
    target = tiny_gguf(tmp_path / "tiny.gguf")
    draft = tiny_gguf(tmp_path / "draft.gguf", "tiny-draft")
    prompts = ["Once upon a time", "Tom had a red ball."]
    how = dict(temperature=0, max_tokens=20, dtype=torch.float64)
    wanted = [result.text for result in generate(prompts, "tiny", **how)]
    assert [r.text for r in generate(prompts, target, draft=draft, gamma=3, **how)] == wanted
    assert Tokenizer.load(target).difference(Tokenizer.load(ROOT / "models" / "tiny")) is None
    rounded = [r.text for r in generate(prompts, "tiny", bits=8, kv_bits=8, **how)]
    assert [r.text for r in generate(prompts, target, bits=8, kv_bits=8, **how)] == rounded


# ---- Vocabularies


def test_tokens_that_end_a_text_are_control_tokens(tmp_path):
    """Those that the file names, and those that are spelled like one, whatever their kind. An
    unused id is no text; of a padding nothing is asked."""
    end = len(vocabulary()) + 1
    names = {
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.eom_token_id": end + 1,
        "tokenizer.ggml.padding_token_id": 99999,
    }
    more = {"<x>": 4, "<y>": 1, "<|im_end|>": 4, "<z>": 4}
    file = spm_gguf(tmp_path / "a.gguf", more, **settings_of(SHAPE), **names)
    assert read_gguf_config(GGUFCheckpoint(file)).eos_token_ids == (end, end + 1, end + 2)
    tok = Tokenizer.load(file)
    ids = tok.encode("<x><y><|im_end|><z>")
    assert tok.specials.keys() == {"<unk>", "<s>", "</s>", "<x>", "<y>", "<|im_end|>"}
    assert not {*ids} & {*tok.specials.values()} and ids[-1] == end + 3
    assert tok.decode([end - 1]) == ""


def test_pieces_of_a_gguf_are_those_of_the_other_files(tmp_path):
    wanted = load(tmp_path / "folder", tokenizer_model())
    tok = Tokenizer.load(spm_gguf(tmp_path / "a.gguf"))
    assert wanted.difference(tok) is None
    for sample in ("the cat  sat", " naïve é😀", "", "</s>"):
        assert tok.prompt(sample) == wanted.prompt(sample) == [1, *tok.encode(sample)]
    assert tok.chat([{"role": "user", "content": "the"}]) == [1, *tok.encode("the")]
    unused = Tokenizer.load(spm_gguf(tmp_path / "unused.gguf", {"bm": 5}))
    assert unused.encode("mbm") == tok.encode("mbm")  # b and m do not merge
    hostile = {"tokenizer.chat_template": "{{ 'x' * 10**10 }}"}
    with pytest.raises(UserError, match="^the chat template fails .* is repeated to more than"):
        Tokenizer.load(spm_gguf(tmp_path / "c.gguf", **hostile)).chat([])
    no_bos = {"tokenizer.ggml.add_bos_token": False}
    unspaced = {"tokenizer.ggml.add_space_prefix": False}
    plain = Tokenizer.load(spm_gguf(tmp_path / "b.gguf", **no_bos, **unspaced))
    wanted = load(tmp_path / "unspaced", tokenizer_model(n3=0))
    assert plain.prompt("the cat") == wanted.encode("the cat") != tok.encode("the cat")


SAMPLE = "we'LL isOK/\n 1234½ éß日本x -ǀ,$+!\n\n  a אב  "
LLAMA3_PIECES = "we|'LL| isOK|/\n| |123|4½| éß日本x| -|ǀ|,$+!\n\n| | a| אב|  "
NAMES = {  # of patterns -> the pieces of the sample, whether tokens stay whole, whether bos begins
    "llama3": (LLAMA3_PIECES, True, True),
    "falcon3": (LLAMA3_PIECES, True, True),
    "smaug-bpe": (LLAMA3_PIECES, True, False),
    "dbrx": (LLAMA3_PIECES, False, False),
    "tekken": ("we|'LL| is|OK|/\n| |1|2|3|4|½| éß日本x| -|ǀ|,$+!\n\n| | a| אב|  ", True, True),
    "refact": ("we|'|LL| isOK|/|\n |1|2|3|4|½| éß日本x| -|ǀ|,$+!|\n\n | a| אב|  ", False, False),
    "deepseek-coder": (
        "we|'|LL| isOK|/|\n| |1|2|3|4|½| éß|日本|x| -|ǀ|,|$+|!|\n|\n| | a| אב|  ",
        False,
        False,
    ),
    "deepseek-llm": (
        "we|'|LL| isOK|/|\n| |1|2|3|4|½| éß|日本|x| -|ǀ|,$+!|\n|\n| | a| אב|  ",
        False,
        False,
    ),
    "default": ("we|'|LL| isOK|/|\n| |123|4½| éß日本x| |-|ǀ|,$+!|\n\n | a| אב|  ", False, False),
}


def bytes_gguf(pre: str | None) -> GGUF:
    """A vocabulary of 256 bytes and a bos."""
    metadata = dict(model="gpt2", pre=pre, merges=[], bos_token_id=256, token_type=[1] * 256 + [3])
    metadata["tokens"] = [*byte_alphabet(), "<|begin_of_text|>"]
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return GGUF(Path("a.gguf"), named, {})


def test_patterns_are_known_by_name():
    for name, (expected, keeps, begins) in NAMES.items():
        assert read_gguf_vocabulary(bytes_gguf(name)).prefix == [256] * begins, name
        pre = PRE_TOKENIZERS[name]
        assert pre.keeps_tokens == keeps, name
        whole = tokenizer_file({}, [], pre.steps())
        package = Core.from_str(json.dumps(whole)).pre_tokenizer
        spans = [span for _, span in package.pre_tokenize_str(SAMPLE)]
        assert "|".join(SAMPLE[start:end] for start, end in spans) == expected, name


def test_llama_3_is_known_by_a_token(monkeypatch):
    """A file that names no patterns, or those of a model that its converter did not know."""
    monkeypatch.setattr("checkpoint.gguf_vocabulary.BEGIN_OF_LLAMA3", 256)
    for pre in (None, "default"):
        assert read_gguf_vocabulary(bytes_gguf(pre)).prefix == [256]
    monkeypatch.setattr("checkpoint.gguf_vocabulary.BEGIN_OF_LLAMA3", 255)
    assert read_gguf_vocabulary(bytes_gguf("default")).prefix == []
    with pytest.raises(UserError, match="pre is None, and .*gguf-new-metadata --pre-tokenizer"):
        read_gguf_vocabulary(bytes_gguf(None))


REFUSED = told(
    """
    {"tokenizer.ggml.model": "bert"} → tokenizer.ggml.model is 'bert'
    {"tokenizer.ggml.pre": "viking"} → tokenizer.ggml.pre is 'viking'
    {"tokenizer.ggml.add_eos_token": true} → add_eos_token
    {"tokenizer.ggml.tokens": 3} → tokenizer.ggml.tokens is 3
    {"tokenizer.ggml.token_type": [1]} → tokenizer is not as it should be
    {"tokenizer.ggml.merges": 1} → ggml.merges is 1; it must be a list
    {"tokenizer.ggml.merges": ["a"]} → merge 0 is 'a'
    {"tokenizer.ggml.eos_token_id": 99999} → ggml.eos_token_id is 99999
    {"tokenizer.ggml.bos_token_id": -1} → ggml.bos_token_id is -1
    {"tokenizer.ggml.add_bos_token": true} → no tokenizer.ggml.bos_token_id
    {"tokenizer.chat_template": 5} → chat_template is 5
    {"llama.attention.sliding_window": 0.5} → sliding_window is 0.5
    {"general.architecture": "qwen3moe"} → general.architecture is 'qwen3moe'
    {"llama.pooling_type": 3} → llama.pooling_type is 3
    {"llama.classifier.output_labels": ["yes"]} → output_labels is ['yes']
    {"llama.final_logit_softcapping": 30.0} → logit_softcapping is 30.0
    {"llama.expert_count": 8} → llama.expert_count is 8
    {"llama.block_count": 0} → num_hidden_layers is 0
    {"llama.block_count": 9} → is missing
    {"llama.attention.head_count": [4, 4]} → num_attention_heads is [4, 4]
    {"llama.attention.head_count_kv": 4} → the config asks for [128, 128]
    {"llama.rope.dimension_count": 16} → rope.dimension_count is 16
    {"llama.rope.scaling.attn_factor": 0.5} → rope.scaling.attn_factor is 0.5
    {"llama.rope.scaling.type": "longrope"} → rope_type is 'longrope'
    {"llama.rope.scaling.type": "yarn"} → factor is missing
    {"llama.rope.scaling.yarn_attn_factor": 2.0} → yarn_attn_factor is 2.0
    {"llama.attention.value_length": 16} → attention.value_length is 16
    {"llama.attention.causal": false} → is_causal is False
    """
)


@pytest.mark.slow
def test_what_is_not_honoured_is_named(tmp_path):
    kinds = GGUF.open(tiny_gguf(tmp_path / "a.gguf")).metadata["tokenizer.ggml.token_type"]
    texts = GGUF.open(tmp_path / "a.gguf").metadata["tokenizer.ggml.tokens"]
    odd_kind = {"tokenizer.ggml.token_type": [6, *kinds[1:]]}
    twice = {"tokenizer.ggml.tokens": [texts[5], *texts[1:]]}
    more = [(odd_kind, "kinds are from 1 to 5"), (twice, "is there twice")]
    with pytest.raises(UserError, match="no token_embd.weight: it is not a complete model"):
        Llama.load(write(tmp_path / "vocabulary.gguf", settings_of(SHAPE).items()))
    cases = [(json.loads(change), says) for change, says in REFUSED] + more
    for i, (change, says) in enumerate(cases):
        file = tiny_gguf(tmp_path / f"{i}.gguf", "tiny-draft", **change)
        with pytest.raises(UserError) as error:
            Model.load(file)
        said = str(error.value)
        assert says in said and said.count(".gguf") == 1 and "\n" not in said, (says, said)


def test_rounded_weights_are_not_rounded_again(tmp_path):
    file = tmp_path / "model.gguf"
    write_model(file, {"": "Q4_0"})
    for how in (dict(bits=8), dict(trainable=True)):
        with pytest.raises(UserError, match="quantize the folder|were made from"):
            Llama.load(file, **how)
    with pytest.raises(UserError, match="name the folder"):
        find_folder(file)


# ---- Names


def test_a_folder_with_one_gguf_is_that_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        Llama.load(tmp_path)
    part = tmp_path / "a-00002-of-00002.gguf"
    first = tmp_path / "a-00001-of-00002.gguf"
    for file in (first, part):
        file.touch()
    assert find_model(tmp_path) == find_model(first) == first
    blob = tmp_path / "sha256-abc"
    blob.write_bytes(b"GGUF")
    assert find_model(blob) == blob
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match="several models in GGUF: name one of a-00001"):
        find_model(tmp_path)
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path) == tmp_path


def test_a_file_of_a_hub_repository_is_fetched_alone(monkeypatch, tmp_path):
    asked = []

    def download(repository, allow_patterns=None, **how):
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("owner/name:a.gguf") == tmp_path / "a.gguf"
    assert find_model("owner/name:q/a-00001-of-00003.gguf").name == "a-00001-of-00003.gguf"
    assert asked == [
        ("owner/name", ["a.gguf"]),
        ("owner/name", ["q/a-*-of-00003.gguf"]),
    ]
