"""Recommended settings are checked, completed by the user's, and never dropped in silence."""

import json
from typing import Any

import pytest

from checkpoint.generation import GenerationConfig
from errors import UserError
from testing.gguf import write


def test_settings_follow_do_sample():
    data = {"temperature": 0.6, "top_p": 0.9, "top_k": None}
    greedy = GenerationConfig(data)
    assert greedy.complete({}) == {"temperature": 0.0}
    assert greedy.complete({"top_k": 5}) == {"temperature": 0.6, "top_p": 0.9, "top_k": 5}
    sampled = GenerationConfig(data | {"do_sample": True})
    assert sampled.complete({}) == {"temperature": 0.6, "top_p": 0.9}
    assert sampled.complete({"temperature": 0.1}) == {"temperature": 0.1, "top_p": 0.9}
    assert GenerationConfig({"do_sample": True}).complete({}) == {"temperature": 1.0}
    penalty = {"repetition_penalty": 1.05}  # for greedy text, too, as in transformers
    for data, asked, temperature in (
        (penalty, {}, 0.0),
        (penalty | {"top_p": 0.5}, {"presence_penalty": 1.0}, 0.0),
        (penalty | {"do_sample": True}, {}, 1.0),
        (penalty, {"temperature": 0.0}, 0.0),
    ):
        completed = GenerationConfig(data).complete(asked)
        assert completed == {"temperature": temperature} | penalty | asked


def test_a_bad_recommendation_is_refused_where_it_is_used():
    config = GenerationConfig({"do_sample": True, "top_k": -1})
    with pytest.raises(UserError, match="generation_config.json: top_k is -1.*yourself"):
        config.complete({"temperature": 0.5})
    assert config.complete({"top_k": 2}) == {"temperature": 1.0, "top_k": 2}


def test_settings_without_effect_are_supported():
    config = GenerationConfig({"num_beams": 1, "top_k": 3, "repetition_penalty": 1.2})
    assert config.unsupported() == []
    assert GenerationConfig({"num_beams": 4, "min_length": 0}).unsupported() == ["num_beams 4"]
    harmless = dict(_from_model_config=True, pad_token_id=7, max_length=20, use_cache=True)
    harmless |= dict(
        transformers_version="5", chat_format="chatml", penalty_last_n=64, typical_p=1.0
    )
    assert GenerationConfig(harmless).unsupported() == []
    assert len(GenerationConfig(dict(forced_eos_token_id=7, mirostat=1)).unsupported()) == 2
    many = dict.fromkeys(map(str, range(999)), "x" * 999)
    assert len("".join(GenerationConfig(many).unsupported())) < 3000
    for name, value in (("exponential_decay_length_penalty", [5, 1.5]), ("new", True)):
        assert GenerationConfig({name: value}).unsupported() == [f"{name} {value}"]


def test_the_file_is_optional_and_its_mistakes_name_it(tmp_path):
    assert GenerationConfig.load(tmp_path).eos_token_ids == ()
    file = tmp_path / "generation_config.json"
    for end, tokens in ((7, (7,)), ([7, 8], (7, 8)), (None, ())):
        file.write_text(json.dumps({"eos_token_id": end}))
        assert GenerationConfig.load(tmp_path).eos_token_ids == tokens
    for data, says in (
        ({"do_sample": "false"}, "do_sample is 'false'"),
        ({"eos_token_id": [-1]}, r"eos_token_id is \[-1\]"),
        ({"eos_token_id": ["x" * 9999]}, "eos_token_id is"),
    ):
        file.write_text(json.dumps(data))
        with pytest.raises(UserError, match=f"generation_config.json: {says}") as error:
            GenerationConfig.load(tmp_path)
        assert len(str(error.value)) < 1000


def test_a_gguf_recommends_settings_in_its_metadata(tmp_path):
    """As llama.cpp's converter copies them from a generation_config.json, in float32."""

    def load(**settings: Any) -> GenerationConfig:
        metadata = [(f"general.sampling.{name}", value) for name, value in settings.items()]
        return GenerationConfig.load(write(tmp_path / "model.gguf", metadata))

    assert load() == GenerationConfig({"do_sample": False}, "metadata")
    assert load().complete({}) == {"temperature": 0.0}
    config = load(temp=0.6, top_p=0.9, top_k=20)
    assert config.complete({}) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert config.unsupported() == []
    assert load(top_k=-1).complete({}) == {"temperature": 1.0, "top_k": 0}
    config = load(penalty_repeat=1.1, mirostat=2, sequence="kt")
    assert config.complete({}) == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert config.unsupported() == ["mirostat 2", "sequence kt"]
    neutral = dict(xtc_probability=0.0, mirostat=0)
    assert load(**neutral, penalty_repeat=1.0).unsupported() == []
    assert load(penalty_repeat=1.1, penalty_last_n=64).unsupported() == ["penalty_last_n 64"]
    assert load(penalty_repeat=1.1, penalty_last_n=-1).unsupported() == []
    for wrong in ("hot", float("nan")):
        with pytest.raises(UserError, match="the model's metadata: temperature is .*yourself"):
            load(temp=wrong).complete({})
