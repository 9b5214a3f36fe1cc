"""config.json: what is read, what is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint.config import Config, end_tokens
from checkpoint.files import read_json
from errors import UserError
from model import Llama
from testing.models import SMALL
from testing.programs import told

DATA = Path(__file__).parent.parent / "test_data"
GOOD = json.loads((DATA / "mha" / "config.json").read_text())
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32768,
    "attention_factor": 0.1 * math.log(4) + 1,
}


def write(folder: Path, data: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_a_config_is_read_as_it_was_written(tmp_path):
    for changes in (
        {},
        dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True, eos_token_ids=(1, 2)),
        dict(rope_theta=5e5, rope_scaling=LLAMA31, eos_token_ids=()),
        dict(rope_scaling={"rope_type": "linear", "factor": 2.0}, model_type="qwen2"),
        dict(rope_theta=1e6, model_type="qwen3"),
        dict(rope_scaling=YARN, model_type="qwen2", max_position_embeddings=131072),
    ):
        config = Config(**{**SMALL, **changes})
        assert Config.load(write(tmp_path, config.to_dict())) == config


def test_defaults_are_those_of_transformers(tmp_path):
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "mlp_bias")
    config = Config.load(write(tmp_path, GOOD | dict.fromkeys(names)))
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.head_dim == config.hidden_size // 4
    assert config.rms_norm_eps == 1e-6 and config.rope_theta == 10000.0
    assert config.rope_scaling is None and config.mlp_bias is False
    assert config.query_size == config.kv_size == config.hidden_size


def test_kin_of_llama_is_llama(tmp_path):
    """Mistral, up to its sliding window; what Llama 2's configs say beside."""
    llama = Config.load(write(tmp_path, GOOD))
    kin = GOOD | dict(model_type="mistral", architectures=["MistralForCausalLM"])
    for changes in (
        kin | dict(sliding_window=None),
        kin | dict(sliding_window=GOOD["max_position_embeddings"]),
        GOOD | dict(pretraining_tp=2, sliding_window=16, attention_dropout=0.0, pad_token_id=0),
    ):
        assert Config.load(write(tmp_path, changes)) == llama
    for changes, most in (
        (dict(sliding_window=3), 3),
        ({}, 4096),
        ({"sliding_window": None}, 9000),
    ):
        config = Config.load(write(tmp_path, kin | dict(max_position_embeddings=9000) | changes))
        assert config == replace(llama, max_position_embeddings=most)


def test_a_window_counts_where_a_layer_has_it(tmp_path):
    """A Qwen's, as transformers reads these settings; the longest text is then the window."""
    full, slides = ["full_attention"], ["sliding_attention"]
    num_layers = GOOD["num_hidden_layers"]
    for settings, most in (
        (dict(max_window_layers=num_layers), 64),
        (dict(max_window_layers=num_layers - 1), 8),
        (dict(max_window_layers=0, layer_types=full * num_layers), 64),
        (dict(layer_types=full * (num_layers - 1) + slides), 8),
        (dict(max_window_layers=0, sliding_window=None), 64),
        (dict(max_window_layers=0, sliding_window=90), 64),
        (dict(max_window_layers=0, use_sliding_window=False), 64),
        ({}, 64),
    ):
        qwen = dict(model_type="qwen3", use_sliding_window=True, sliding_window=8)
        data = GOOD | qwen | dict(max_position_embeddings=64) | settings
        assert Config.load(write(tmp_path, data)).max_position_embeddings == most, settings


def test_families_have_the_biases_that_transformers_gives_them(tmp_path):
    for kind, asked, of_qkv, of_o in (
        ("llama", True, True, True),
        ("qwen2", None, True, False),
        ("qwen2", True, True, False),
        ("qwen3", False, False, False),
        ("qwen3", True, True, True),
    ):
        data = GOOD | dict(model_type=kind, attention_bias=asked, sliding_window=9)
        config = Config.load(write(tmp_path, data))
        assert (config.qkv_bias, config.o_bias) == (of_qkv, of_o), (kind, asked)
        assert config.max_position_embeddings == GOOD["max_position_embeddings"]


def test_rope_settings_are_read_wherever_they_are(tmp_path):
    plain = {name: GOOD[name] for name in GOOD if not name.startswith("rope")}
    for data, theta, scaling in (
        ({"rope_theta": 500.0}, 500.0, None),
        ({"rope_theta": 500, "rope_scaling": None}, 500.0, None),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, 500.0, None),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 500.0}}, 500.0, None),
        ({"rope_theta": 500.0, "rope_scaling": LLAMA31}, 500.0, LLAMA31),
        ({"rope_parameters": LLAMA31 | {"rope_theta": 500.0}}, 500.0, LLAMA31),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            10000.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_scaling": {"type": "yarn"} | LINEAR}, 10000.0, LINEAR),
        # as Qwen 2.5 documents it
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                }
            },
            10000.0,
            YARN,
        ),
    ):
        config = Config.load(write(tmp_path, plain | data))
        assert (config.rope_theta, config.rope_scaling) == (theta, scaling), data


def test_yarn_makes_the_context_longer(tmp_path):
    """As Qwen documents it; not beyond a sliding window."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    data = GOOD | dict(rope_parameters=yarn, max_position_embeddings=100)
    assert Config.load(write(tmp_path, data)).max_position_embeddings == 400
    data |= dict(model_type="mistral", architectures=None, sliding_window=50)
    assert Config.load(write(tmp_path, data)).max_position_embeddings == 50
    data |= dict(rope_parameters=yarn | {"attention_factor": 0.5})
    config = Config.load(write(tmp_path, data))
    llama = Llama(config, "cpu", torch.float32, seed=0)
    cos, sin = llama.rope(torch.arange(7))
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 0.25))


def published_frequency(config: Config, i: int) -> float:
    """The angle of pair i a position, as the rule is published, pair by pair."""
    frequency = config.rope_theta ** (-2 * i / config.head_dim)
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "default":
        return frequency
    slow = frequency / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    wavelength = 2 * math.pi / frequency
    original = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "yarn":  # the bounds are those of Qwen 2.5
        slowed = min(max((i - 23) / (40 - 23), 0), 1)
        return (1 - slowed) * frequency + slowed * slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength > original / low:
        return slow
    if wavelength < original / high:
        return frequency
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * slow + smooth * frequency


def test_frequencies_follow_the_published_rules():
    plain = Config.load(DATA / "mha")
    for config in (
        plain,
        Config.load(DATA / "linear-scaling"),
        Config.load(DATA / "llama3-scaling"),
        # Llama 3.1's: some pairs are slowed down, some in part, some kept.
        replace(plain, head_dim=128, rope_theta=5e5, rope_scaling=LLAMA31),
        replace(plain, head_dim=128, rope_theta=1e6, rope_scaling=YARN),
    ):
        expected = [published_frequency(config, i) for i in range(config.head_dim // 2)]
        assert config.rope_frequencies().tolist() == pytest.approx(expected, rel=1e-5)


LINEAR = {"rope_type": "linear", "factor": 2.0}
REFUSED = [
    (dict(hidden_act="x" * 10**5), "hidden_act is 'xxx"),
    (dict(rms_norm_eps=10**400), "rms_norm_eps is 1000"),
    (dict(rope_parameters=LINEAR | {"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
    (dict(rope_parameters=LLAMA31 | {"low_freq_factor": 4.0}), "must be below high_freq_factor"),
    (
        dict(rope_parameters=LLAMA31 | {"original_max_position_embeddings": None}),
        "original_max_position_embeddings is missing",
    ),
]
REFUSED_JSON = told(
    """
    {"model_type": "qwen2_moe"} → model_type is 'qwen2_moe'
    {"model_type": "qwen3_next"} → model_type is 'qwen3_next'
    {"architectures": ["Qwen3MoeForCausalLM"]} → architectures is ['Qwen3MoeForCausalLM']
    {"model_type": "qwen2", "use_sliding_window": 1} → use_sliding_window is 1
    {"model_type": "qwen2", "use_sliding_window": true, "layer_types": ["x"]} → layer_types is 'x'
    {"model_type": "qwen2", "use_sliding_window": true, "layer_types": 5} → layer_types is 5
    {"model_type": "qwen2", "use_sliding_window": true, "max_window_layers": "1"} → layer_types is
    {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]} → layer_types is
    {"layer_types": 7} → layer_types is 7
    {"dual_chunk_attention_config": {"chunk_size": 9}} → dual_chunk_attention_config is
    {"model_type": null} → model_type is None
    {"model_type": "mixtral"} → model_type is 'mixtral'
    {"model_type": "mistral", "sliding_window": 0} → sliding_window is 0
    {"model_type": "mistral", "sliding_window": true} → sliding_window is True
    {"architectures": ["LlamaForTokens"]} → architectures is ['LlamaForTokens']
    {"architectures": 7} → architectures is 7
    {"hidden_act": "gelu"} → hidden_act is 'gelu'
    {"quantization_config": {"bits": 4}} → quantization_config
    {"partial_rotary_factor": 0.5} → partial_rotary_factor is 0.5
    {"quantization": {"bits": 4}} → quantization_config: quant_method is None
    {"vocab_size": null} → vocab_size is missing
    {"hidden_size": 0} → hidden_size is 0
    {"hidden_size": "24"} → hidden_size is '24'
    {"num_hidden_layers": 2.0} → num_hidden_layers is 2.0
    {"num_attention_heads": true} → num_attention_heads is True
    {"num_key_value_heads": 3} → 4 must be a multiple of num_key_value_heads 3
    {"head_dim": 5} → head_dim 5 even
    {"hidden_size": 2, "head_dim": null} → head_dim is 0
    {"rms_norm_eps": 0} → rms_norm_eps is 0
    {"rms_norm_eps": 1e+30} → rms_norm_eps is 1e+30
    {"hidden_size": 1180591620717411303424} → hidden_size is 1180591620717411303424
    {"vocab_size": 1000000000} → vocab_size is 1000000000
    {"num_hidden_layers": 100000} → num_hidden_layers is 100000
    {"head_dim": 1073741824} → head_dim is 1073741824
    {"tie_word_embeddings": "yes"} → tie_word_embeddings is 'yes'
    {"attention_bias": 1} → attention_bias is 1
    {"rope_theta": -1.0, "rope_parameters": null} → rope_theta is -1.0
    {"rope_parameters": {"rope_theta": 1e-300}} → rope_theta is 1e-300
    {"rope_parameters": {"rope_type": "yarn"}} → factor is missing
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}} → mscale of rope_type
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": false}} → truncate of
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}} → must be above 1
    {"rope_scaling": {"factor": 4.0}, "rope_parameters": null} → factor of rope_type 'default'
    {"rope_scaling": {"type": "dynamic"}, "rope_parameters": null} → rope_type is 'dynamic'
    {"rope_parameters": {"rope_type": "linear"}} → factor is missing
    {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}} → factor is 1e-300
    {"rope_parameters": [1]} → rope_parameters is [1]
    {"rope_scaling": {"type": "yarn", "factor": 4.0}} → rope_type is 'yarn' in rope_scaling, or
    {"rope_theta": 7, "rope_scaling": {"factor": 1}, "rope_parameters": {"rope_theta": 8}} → and 8
    {"rope_scaling": {"rope_type": "linear", "factor": 4}} → 'default' in rope_parameters
    {"rope_parameters": {"full_attention": {"factor": 8}}} → rope_parameters has full_att
    {"is_causal": false} → is_causal is False
    {"rope_parameters": {"rope_theta": 9e-07}} → turn by no more than 1e+06 radians
    {"eos_token_id": "x"} → eos_token_id is 'x'
    {"eos_token_id": [2, -1]} → eos_token_id is [2, -1]
    {"eos_token_id": true} → eos_token_id is True
    {"max_position_embeddings": 9000000000000000} → max_position_embeddings is 9000000000000000
    {"rope_parameters": {"rope_type": "linear", "factor": 9e-07}} → turn by no more than 1e+06
    """
)


def test_a_setting_that_is_not_honoured_is_refused_by_name(tmp_path):
    changes = [(json.loads(change), says) for change, says in REFUSED_JSON]
    for change, says in changes + REFUSED:
        with pytest.raises(UserError) as error:
            Config.load(write(tmp_path, GOOD | change))
        said = str(error.value)
        assert says in said and "config.json: " in said and len(said) < 1000, (says, said)


def test_numbers_are_finite(tmp_path):
    write(tmp_path, GOOD | {"rms_norm_eps": math.nan})
    with pytest.raises(UserError, match="NaN is not a finite number"):
        Config.load(tmp_path)
    text = json.dumps(GOOD | {"rms_norm_eps": "HUGE"}).replace('"HUGE"', "1e999")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="1e999 is not a finite number"):
        Config.load(tmp_path)


def test_end_tokens_are_none_one_or_several():
    for eos, ends in ((None, ()), (3, (3,)), ([3, 4], (3, 4)), ([], ())):
        assert end_tokens({"eos_token_id": eos}) == ends


def test_json_that_is_none(tmp_path):
    file = tmp_path / "config.json"
    for content, says in (
        ("{", "not valid JSON"),
        ("[]", "holds a list, not an object"),
        ('{"a": NaN}', "NaN is not"),
        ('{"a": -Infinity}', "-Infinity is not"),
        ("\x00", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 10**5, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\ufeff\ufeff{}", "not valid JSON"),
        (" " * 2**23, "at most 4194304 bytes"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=f"config.json .*{says}"):
            read_json(file)
    file.write_text("\ufeff{}")  # a byte order mark, as Windows writes it
    assert read_json(file) == {}
    file.write_bytes(b'{"\xff": 1}')
    with pytest.raises(UserError, match="config.json is not UTF-8"):
        read_json(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        read_json(file)
