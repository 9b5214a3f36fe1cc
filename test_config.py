"""Every config we refuse, and how fast positions turn."""
import json
import math
from pathlib import Path

import pytest

from config import Config, inverse_frequencies

DATA = Path(__file__).parent / "test_data"
GOOD = json.loads((DATA / "mha" / "config.json").read_text())


@pytest.mark.parametrize("case", ["mha", "linear-scaling", "llama3-scaling"])
def test_frequencies_follow_the_published_rules(case):
    config = Config.load(DATA / case)
    scaling = config.rope_scaling or {}
    for i, got in enumerate(inverse_frequencies(config).tolist()):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        if scaling.get("rope_type") == "linear":
            frequency /= scaling["factor"]
        elif scaling:
            wavelength, original = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
            if wavelength > original / scaling["low_freq_factor"]:
                frequency /= scaling["factor"]
            elif wavelength >= original / scaling["high_freq_factor"]:
                smooth = (original / wavelength - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        assert got == pytest.approx(frequency, rel=1e-5)


@pytest.mark.parametrize("change, says", [
    (dict(model_type="qwen2"), "model_type is 'qwen2'"), (dict(model_type=None), "model_type is None"),
    (dict(architectures=["LlamaForSequenceClassification"]), "architectures is ['LlamaForSequenceClassification']"), (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    (dict(quantization_config={"bits": 4}), "quantization_config"), (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    (dict(vocab_size=None), "vocab_size is missing"), (dict(hidden_size=0), "hidden_size is 0"), (dict(hidden_size="24"), "hidden_size is '24'"),
    (dict(num_hidden_layers=2.0), "num_hidden_layers is 2.0"), (dict(num_attention_heads=True), "num_attention_heads is True"),
    (dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"), (dict(head_dim=5), "head_dim 5 is odd"),
    (dict(hidden_size=26, head_dim=None), "hidden_size 26 is not a multiple"), (dict(rms_norm_eps=0), "rms_norm_eps is 0"),
    (dict(rope_theta=-1.0, rope_parameters=None), "rope_theta is -1.0"), (dict(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "rope_type is 'yarn'"),
    (dict(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type is 'dynamic'"),
    (dict(rope_parameters={"rope_type": "linear"}), "factor is missing"), (dict(rope_parameters=[1]), "rope_parameters is [1]"),
    (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4,
                           "original_max_position_embeddings": 16}), "low_freq_factor 4.0 must be below"),
    (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}),
     "original_max_position_embeddings is missing"),
    (dict(rope_parameters={"factor": 8.0}), "has no use for factor"), (dict(rope_parameters={"rope_theta": 0}), "rope_theta is 0"),
    (dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "has no use for full_attention"),
    (dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
    (dict(rms_norm_eps=10**400), "rms_norm_eps is 1000"), (dict(hidden_size=2**70), "hidden_size is 1180591620717411303424"),
    (dict(vocab_size=10**9), "vocab_size is 1000000000"),
    (dict(num_hidden_layers=10**5), "num_hidden_layers is 100000"), (dict(head_dim=2**30), "head_dim is 1073741824"),
    (dict(max_position_embeddings=10**18), "max_position_embeddings is 1000000000000000000"),
    (dict(rms_norm_eps=1e-320), "rms_norm_eps is 1e-320"), (dict(rms_norm_eps=1e30), "rms_norm_eps is 1e+30"),
    (dict(rope_parameters={"rope_theta": 1e-300}), "more than a million radians"),
    (dict(rope_parameters={"rope_type": "linear", "factor": 1e-300}), "more than a million radians"),
    (dict(hidden_act="x" * 10**5), "hidden_act is 'xxx"),
    (dict(eos_token_id="x"), "eos_token_id is 'x'"), (dict(architectures=7), "architectures is 7")])
def test_a_config_that_asks_for_something_else(tmp_path, change, says):
    (tmp_path / "config.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError) as error:
        Config.load(tmp_path)
    assert says in str(error.value) and "config.json" in str(error.value) and len(str(error.value)) < 1000


def test_not_a_number_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOOD | {"rms_norm_eps": math.nan}))
    with pytest.raises(ValueError, match="NaN is not a JSON number"):
        Config.load(tmp_path)
