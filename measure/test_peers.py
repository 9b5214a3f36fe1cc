"""Peers: one that is missing is named; our widths; labels. (test_figures.py has the figures.)"""

import pytest
from safetensors.torch import load_file, save_file

from checkpoint.hub import find_folder
from checkpoint.save import TOKENIZER_FILES, copy_files
from errors import UserError
from measure import peers


def test_a_peer_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for name in peers.PACKAGES:
        with pytest.raises(UserError, match=f"{name} is not installed here.*pip install"):
            peers.check_peer(name, None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="--gguf FILE"):
        peers.check_peer("llama.cpp", None)


def test_transformers_runs_in_bfloat16_if_the_cpu_has_instructions_for_it(monkeypatch, capsys):
    for has_bfloat16, dtypes in ((True, ["float32", "bfloat16"]), (False, ["float32"])):
        monkeypatch.setattr(peers, "has_bfloat16", lambda: has_bfloat16)
        assert peers.transformers_dtypes() == dtypes
    assert capsys.readouterr().err.count("transformers runs only in float32") == 1


def test_our_weights_are_as_stored_and_in_fewer_bits(tmp_path, compiler):
    """Without a compiler bfloat16 is widened, so its copy is no other width than float32."""
    tiny = find_folder("tiny")
    copy_files(tiny, tmp_path, [*TOKENIZER_FILES, "config.json"])
    tensors = load_file(tiny / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(wide, tmp_path / "model.safetensors")
    dtypes = ["float32", "bfloat16"] if compiler else ["float32"]
    widths = {one.name: one for one in peers.our_widths(str(tmp_path))}
    assert [*widths] == [*dtypes, "INT8", "INT4", "INT4, groups of 32"]
    assert widths["float32"].bytes > 3.9 * widths["INT8"].bytes
    made = widths[dtypes[-1]].make([[1, 2, 3], [4, 5, 6]], 5)
    assert len(made.tokens) == 5
    assert 0 < made.first < made.total
    assert widths["INT4, groups of 32"].bytes > widths["INT4"].bytes
    assert [one.name for one in peers.our_widths("tiny")][0] == dtypes[-1]


def test_a_label_has_no_folder(tmp_path):
    (tmp_path / "SmolLM2").mkdir()
    assert peers.label(str(tmp_path / "SmolLM2")) == "SmolLM2"
    assert peers.label("owner/model") == "owner/model"
