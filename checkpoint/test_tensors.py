"""A checkpoint loads whole or not at all; configs that are refused; a name leads to a folder or to one line."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoint import hub
from checkpoint.config import Config, inverse_frequencies
from checkpoint.files import read_json
from checkpoint.hub import ALIASES, find_folder
from checkpoint.tensors import Checkpoint
from conftest import SMALL, peak, write_model
from kernels import ops_for
from model import Llama

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.ones(4),
    "c.bias": torch.zeros(2, 2),
}


def places() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in TENSORS.items()}


def write(folder: Path, tensors=None) -> Path:
    save_file(TENSORS if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(
    folder: Path,
    split=(("one.safetensors", ("a.weight",)), ("two.safetensors", ("b.weight", "c.bias"))),
    **index,
) -> Path:
    for file, names in split:
        save_file({name: TENSORS[name] for name in names}, folder / file)
    whole = {"weight_map": {name: file for file, names in split for name in names}, **index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return folder


def fill(folder: Path, targets: dict[str, torch.Tensor]) -> None:
    for name, tensor in Checkpoint(folder).tensors(targets):
        targets[name].copy_(tensor)


@pytest.mark.parametrize("make", [write, write_shards])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_place_is_filled_in_its_own_dtype(tmp_path, make, dtype):
    targets = {name: place.to(dtype) for name, place in places().items()}
    fill(make(tmp_path), targets)
    assert all(torch.equal(targets[name], TENSORS[name].to(dtype)) for name in TENSORS)


@pytest.mark.parametrize(
    "tensors, says",
    [
        (
            {k: v for k, v in TENSORS.items() if k != "b.weight"},
            r"tensor b\.weight \[4\] is missing",
        ),
        (
            TENSORS | {"d.weight": torch.ones(1)},
            r"tensor d\.weight in .*model\.safetensors has no place",
        ),
        (
            TENSORS | {"a.weight": torch.ones(3, 2)},
            r"tensor a\.weight in .* is \[3, 2\]; config\.json asks for \[2, 3\]",
        ),
        (
            TENSORS | {"b.weight": torch.ones(4, dtype=torch.int8)},
            r"tensor b\.weight in .* is I8; weights must be",
        ),
        (
            TENSORS | {"b.weight": torch.ones(4, dtype=torch.float8_e4m3fn)},
            r"tensor b\.weight in .* is F8_E4M3",
        ),
        ({}, "is missing"),
    ],
)
def test_the_audit_names_tensor_and_file_before_anything_is_written(tmp_path, tensors, says):
    targets = places()
    with pytest.raises(ValueError, match=says):
        fill(write(tmp_path, tensors), targets)
    assert all(place.isnan().all() for place in targets.values())


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.floats(0, 1, exclude_max=True))
@example(0.0)
def test_a_file_cut_anywhere_is_refused(tmp_path, share):
    whole = (write(tmp_path) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        fill(tmp_path, places())


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0), st.integers(1, 255))
def test_a_damaged_header_is_refused_or_means_the_same(tmp_path, at, change):
    whole = bytearray((write(tmp_path) / "model.safetensors").read_bytes())
    whole[at % (8 + int.from_bytes(whole[:8], "little"))] ^= change
    (tmp_path / "model.safetensors").write_bytes(whole)
    targets = places()
    try:
        fill(tmp_path, targets)
    except ValueError as error:
        assert "model.safetensors" in str(error) or str(tmp_path) in str(error)
        assert all(place.isnan().all() for place in targets.values())
    else:
        assert all(torch.equal(targets[name], TENSORS[name]) for name in TENSORS)


def test_a_file_that_goes_on_after_its_tensors_is_refused(tmp_path):
    with (write(tmp_path) / "model.safetensors").open("ab") as file:
        file.write(bytes(4))
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        fill(tmp_path, places())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 40) + b"{}",
        b"PK\x03\x04" + b"x" * 100,
        struct.pack("<Q", 73)
        + b'{"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,Infinity]}}   '
        + bytes(24),
        struct.pack("<Q", 68)
        + b'{"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}    '
        + bytes(20),
        struct.pack("<Q", 68)
        + b'{"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,NaN]}}   '
        + bytes(24),
    ],
)
def test_headers_that_are_none(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors"):
        fill(tmp_path, places())


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda f: (f / "two.safetensors").unlink(), "two.safetensors is none, or is missing"),
        (
            lambda f: write_shards(f, weight_map={"a.weight": "../one.safetensors"}),
            "must give a .safetensors file in the same folder for each tensor; ../one.safetensors",
        ),
        (
            lambda f: write_shards(f, weight_map={"a.weight": "one.bin"}),
            "same folder for each tensor; one.bin is none",
        ),
        (lambda f: write_shards(f, weight_map={}), "weight_map must give"),
        (lambda f: write_shards(f, weight_map=[1]), "weight_map must give"),
        (lambda f: write_shards(f, weight_map={"a.weight": 1}), "weight_map must give"),
        (
            lambda f: write_shards(
                f,
                weight_map={
                    "a.weight": "two.safetensors",
                    "b.weight": "two.safetensors",
                    "c.bias": "two.safetensors",
                },
            ),
            "do not agree on whether tensor a.weight is in two.safetensors",
        ),
        (
            lambda f: write_shards(
                f,
                weight_map={
                    "a.weight": "two.safetensors",
                    "b.weight": "one.safetensors",
                    "c.bias": "two.safetensors",
                },
            ),
            "do not agree on whether tensor [ab].weight is in one.safetensors",
        ),
        (
            lambda f: write_shards(
                f, weight_map={"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
            ),
            "do not agree on whether tensor c.bias is in two.safetensors",
        ),
        (
            lambda f: save_file(TENSORS, f / "two.safetensors"),
            "do not agree on whether tensor a.weight is in two",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": NaN}'),
            "NaN is not a JSON number",
        ),
    ],
)
def test_shards_that_do_not_fit_together(tmp_path, change, says):
    change(write_shards(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        fill(tmp_path, places())


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "a\x1b[2J", "x" * 1000])
def test_names_that_cannot_be_printed(tmp_path, name):
    with pytest.raises(ValueError, match="tensor .* in .*model.safetensors has no place") as error:
        fill(write(tmp_path, TENSORS | {name: torch.ones(1)}), places())
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_a_file_that_changes_after_its_header_was_read(tmp_path):
    checkpoint, targets = Checkpoint(write(tmp_path)), places()
    write(tmp_path, TENSORS | {"b.weight": torch.ones(1)})  # it would be copied to all four places
    with pytest.raises(ValueError, match="tensor b.weight in .* is another than a moment ago"):
        list(checkpoint.tensors(targets))
    write(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="cannot be read"):
        list(checkpoint.tensors(targets))


def test_weights_larger_than_memory_are_refused_before_any_is_asked_for(tmp_path, monkeypatch):
    write_model(tmp_path)
    monkeypatch.setattr("model.free_memory", lambda device: 50_000)
    with pytest.raises(ValueError, match="needs 0.0 GB for its weights, and cpu has 0.0 GB free"):
        Llama.load(tmp_path, "cpu")


def test_a_pickle_is_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(FileNotFoundError, match="is a pickle: convert it first"):
        Checkpoint(tmp_path)


def test_old_checkpoints_with_rotary_buffers_load(tmp_path):
    folder = write_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)},
        folder / "model.safetensors",
    )
    Llama.load(folder)
    save_file(tensors | {"model.layers.1.inv_freq": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="inv_freq .* has no place"):
        Llama.load(folder)


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list, not an object"),
        ('{"a": NaN}', "NaN is not"),
        ('{"a": -Infinity}', "-Infinity is not"),
        ("\x00", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"a": 1e999}', "1e999 is too large"),
        ("[" * 10**5, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\ufeff{}", "not valid JSON"),
        (" " * 2**23, "at most 4194304 make sense"),
    ],
)
def test_json_that_is_none(tmp_path, content, says):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        read_json(tmp_path / "config.json")


# ---- Configs, and how fast positions turn

DATA = Path(__file__).parent.parent / "test_data"
GOOD = json.loads((DATA / "mha" / "config.json").read_text())


LLAMA31 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


@pytest.mark.parametrize(
    "case, change",
    [
        ("mha", {}),
        ("linear-scaling", {}),
        ("llama3-scaling", {}),
        # Llama 3.1's: some are slowed down, some in part, some kept.
        ("mha", dict(head_dim=128, rope_theta=5e5, rope_scaling=LLAMA31)),
    ],
)
def test_frequencies_follow_the_published_rules(case, change):
    config = replace(Config.load(DATA / case), **change)
    scaling = config.rope_scaling or {}
    for i, got in enumerate(inverse_frequencies(config).tolist()):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        if scaling.get("rope_type") == "linear":
            frequency /= scaling["factor"]
        elif scaling:
            wavelength, original = (
                2 * math.pi / frequency,
                scaling["original_max_position_embeddings"],
            )
            if wavelength > original / scaling["low_freq_factor"]:
                frequency /= scaling["factor"]
            elif wavelength >= original / scaling["high_freq_factor"]:
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        assert got == pytest.approx(frequency, rel=1e-5)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(model_type="qwen2"), "model_type is 'qwen2'"),
        (dict(model_type=None), "model_type is None"),
        (
            dict(architectures=["LlamaForSequenceClassification"]),
            "architectures is ['LlamaForSequenceClassification']",
        ),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (dict(vocab_size=None), "vocab_size is missing"),
        (dict(hidden_size=0), "hidden_size is 0"),
        (dict(hidden_size="24"), "hidden_size is '24'"),
        (dict(num_hidden_layers=2.0), "num_hidden_layers is 2.0"),
        (dict(num_attention_heads=True), "num_attention_heads is True"),
        (
            dict(num_key_value_heads=3),
            "num_attention_heads 4 must be a multiple of num_key_value_heads 3",
        ),
        (dict(head_dim=5), "head_dim 5 even"),
        (dict(hidden_size=2, head_dim=None), "head_dim is 0"),
        (dict(rms_norm_eps=0), "rms_norm_eps is 0"),
        (dict(rope_theta=-1.0, rope_parameters=None), "rope_theta is -1.0"),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
        (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "rope_type is 'yarn'"),
        (
            dict(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope_type is 'dynamic'",
        ),
        (dict(rope_parameters={"rope_type": "linear"}), "factor is missing"),
        (dict(rope_parameters=[1]), "rope_parameters is [1]"),
        (
            dict(
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 16,
                }
            ),
            "low_freq_factor must be below high_freq_factor",
        ),
        (
            dict(
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                }
            ),
            "original_max_position_embeddings is missing",
        ),
        (dict(rope_parameters={"factor": 8.0}), "has no use for factor"),
        (dict(rope_parameters={"rope_theta": 0}), "rope_theta is 0"),
        (
            dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}),
            "has no use for full_attention",
        ),
        (
            dict(
                rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
            ),
            "partial_rotary_factor is 0.5",
        ),
        (dict(rms_norm_eps=10**400), "rms_norm_eps is 1000"),
        (dict(hidden_size=2**70), "hidden_size is 1180591620717411303424"),
        (dict(vocab_size=10**9), "vocab_size is 1000000000"),
        (dict(num_hidden_layers=10**5), "num_hidden_layers is 100000"),
        (dict(head_dim=2**30), "head_dim is 1073741824"),
        (dict(max_position_embeddings=10**18), "max_position_embeddings is 1000000000000000000"),
        (dict(rms_norm_eps=1e-320), "rms_norm_eps is 1e-320"),
        (dict(rms_norm_eps=1e30), "rms_norm_eps is 1e+30"),
        (dict(rope_parameters={"rope_theta": 1e-300}), "no more than a million radians"),
        (
            dict(rope_parameters={"rope_type": "linear", "factor": 1e-300}),
            "no more than a million radians",
        ),
        (dict(hidden_act="x" * 10**5), "hidden_act is 'xxx"),
        (dict(eos_token_id="x"), "eos_token_id is 'x'"),
        (dict(eos_token_id=[2, -1]), "eos_token_id is [2, -1]"),
        (dict(eos_token_id=True), "eos_token_id is True"),
        (dict(architectures=7), "architectures is 7"),
    ],
)
def test_a_config_that_asks_for_something_else(tmp_path, change, says):
    (tmp_path / "config.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError) as error:
        Config.load(tmp_path)
    assert (
        says in str(error.value)
        and "config.json" in str(error.value)
        and len(str(error.value)) < 1000
    )


def test_not_a_number_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOOD | {"rms_norm_eps": math.nan}))
    with pytest.raises(ValueError, match="NaN is not a JSON number"):
        Config.load(tmp_path)


# ---- Names


def test_a_folder_is_found_as_it_is(tmp_path):
    assert find_folder(tmp_path) == tmp_path == find_folder(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["nothing", "a/b/c", "/no/such", "~nobody-at-all/x", "\0", "./gone", "~/nowhere-at-all", ""],
)
def test_a_name_that_is_nothing(name):
    with pytest.raises(FileNotFoundError, match="neither a folder, nor a Hub id"):
        find_folder(name)


def bare(kind: type[Exception]) -> Exception:
    """Such an error without the response of a server that it usually carries."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    "error, says",
    [
        (lambda: bare(errors.GatedRepoError), "gated model's licence at"),
        (lambda: bare(errors.RepositoryNotFoundError), "Check the name"),
        (lambda: errors.HFValidationError("bad"), r"refuses it \(HFValidationError: bad\)"),
        (lambda: errors.LocalEntryNotFoundError("offline"), "go online once"),
        (lambda: OSError("no route"), "go online once"),
        (
            lambda: RuntimeError("connection\nbroke"),
            r"refuses it \(RuntimeError: connection broke\)",
        ),
        (lambda: bare(errors.HfHubHTTPError), "go online once"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_a_way_out(monkeypatch, error, says):
    def refuse(repo, **how):
        raise (
            error()
            if not how.get("local_files_only")
            else errors.LocalEntryNotFoundError("not cached")
        )

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=says) as told:
        find_folder("owner/name")
    assert "\n" not in str(told.value) and "owner/name" in str(told.value)


def test_an_alias_fetches_its_repository_and_an_offline_cache_works(monkeypatch, tmp_path):
    asked = []

    def offline(repo, **how):
        asked.append((repo, how.get("local_files_only", False)))
        if not how.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("offline")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(FileNotFoundError):
        find_folder("8B")  # the cache holds no weights: a download that was begun
    write(tmp_path)
    assert find_folder("8B") == tmp_path and asked[-2:] == [
        (ALIASES["8B"], False),
        (ALIASES["8B"], True),
    ]


def test_only_what_is_needed_is_fetched():
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "original/consolidated.00.pth",
        "original/params.json",
        "pytorch_model.bin",
        "generation_config.json",
        "original/tokenizer.model",
        "chat_template.jinja",
        "README.md",
    ]
    wanted = set(
        filter_repo_objects(files, allow_patterns=hub.WANTED, ignore_patterns=hub.UNWANTED)
    )
    assert wanted == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    }


# ---- Memory

LARGE = dict(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    head_dim=64,
    vocab_size=8192,
    tie_word_embeddings=False,
)


def loading(stored: str) -> pytest.MarkDecorator:
    small, whole = (
        f'llama = Llama.load({folder}, "cpu", torch.float32)'
        for folder in ("'test_data/mha'", "folder")
    )
    return pytest.mark.meanwhile(peak, json.dumps(LARGE | dict(dtype=stored)), small, whole)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.parametrize(
    "stored", [pytest.param(stored, marks=loading(stored)) for stored in ("float32", "bfloat16")]
)
def test_loading_never_takes_more_than_the_model_and_one_tensor(stored, meanwhile):
    kept = ops_for("cpu").weight_dtype([getattr(torch, stored)], torch.float32)
    model = Llama(Config(**SMALL | LARGE), "meta", seed=None, weight_dtype=kept)
    sizes = [place.nbytes for place in model.places().values()]
    assert sum(sizes) > 75e6
    assert meanwhile() < sum(sizes) + max(sizes) + 12e6, (
        f"{meanwhile() >> 20} MiB for {sum(sizes) >> 20}"
    )
