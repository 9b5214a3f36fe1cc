"""A checkpoint's tensors are checked before one is read; damaged files are refused by name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint.formats import Header, header_of
from checkpoint.tensors import Checkpoint
from errors import UserError

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.ones(4),
    "c.bias": torch.zeros(2, 2),
}
EXPECTED = {name: header_of(tensor) for name, tensor in TENSORS.items()}
SHARDS = {"one.safetensors": ["a.weight"], "two.safetensors": ["b.weight", "c.bias"]}
WEIGHT_MAP = {name: file for file, names in SHARDS.items() for name in names}


def write(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, weight_map: object = WEIGHT_MAP) -> Path:
    for file, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    checkpoint.check(EXPECTED)
    return {name: checkpoint.read(name).clone() for name in EXPECTED}


def assert_equal(tensors: dict[str, torch.Tensor]) -> None:
    for name in TENSORS:
        torch.testing.assert_close(tensors[name], TENSORS[name], rtol=0, atol=0)


@pytest.mark.parametrize("make", [write, write_shards])
def test_all_tensors_are_read(tmp_path, make):
    assert_equal(read_all(make(tmp_path)))


def test_the_dtype_of_most_weights_comes_first(tmp_path):
    tensors = {
        "a.weight": torch.zeros(9).half(),
        "b.bias": torch.zeros(2),
        "b.weight": torch.zeros(2),
        "c.scale": torch.zeros(99, dtype=torch.float64),
        "d.weight": torch.zeros(99, dtype=torch.int8),
    }
    assert Checkpoint(write(tmp_path, tensors)).dtypes == [torch.float16, torch.float32]


def test_tensors_that_do_not_fit_are_named(tmp_path):
    without_b = {name: tensor for name, tensor in TENSORS.items() if name != "b.weight"}
    for tensors, says in (
        (without_b, r"tensor b\.weight \[4\] is missing"),
        ({}, "is missing"),
        (
            TENSORS | {"d.weight": torch.ones(1)},
            r"d\.weight in .*model\.safetensors does not belong",
        ),
        (TENSORS | {"a.bias": torch.zeros(1)}, r"tensor a\.bias .* does not belong"),
        (TENSORS | {"q_norm.weight": torch.ones(1)}, "q_norm.weight .* does not belong"),
        (TENSORS | {"inv_freq": torch.ones(1)}, "inv_freq .* does not belong"),
        (
            TENSORS | {"a.weight": torch.ones(3, 2)},
            r"tensor a\.weight in .* is \[3, 2\]; the config asks for \[2, 3\]",
        ),
        (TENSORS | {"b.weight": torch.ones(4).to(torch.int8)}, r"b\.weight in .* is I8; weights"),
        (TENSORS | {"b.weight": torch.ones(4).to(torch.float8_e4m3fn)}, "is F8_E4M3; weights"),
    ):
        with pytest.raises(UserError, match=says):
            Checkpoint(write(tmp_path, tensors)).check(EXPECTED)
    checkpoint = Checkpoint(write(tmp_path, TENSORS | {"x.rotary_emb.inv_freq": torch.ones(1)}))
    checkpoint.check(EXPECTED)  # old checkpoints have it: it is computed here
    with pytest.raises(UserError, match="a.weight in .* is F32; weights must be I32"):
        checkpoint.check(EXPECTED | {"a.weight": Header([2, 3], "I32")})


def test_names_are_printable(tmp_path):
    for name in ("a\nb", "a\x00", "a\x1b[2J", "x" * 1000):
        checkpoint = Checkpoint(write(tmp_path, TENSORS | {name: torch.ones(1)}))
        with pytest.raises(UserError, match="tensor .* does not belong") as error:
            checkpoint.check(EXPECTED)
        assert str(error.value).isprintable() and len(str(error.value)) < 1000


@given(st.floats(0, 1, exclude_max=True))
@example(0.0)
def test_a_file_cut_anywhere_is_refused(tmp_path, share):
    file = write(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="model.safetensors is not a whole safetensors file"):
        read_all(tmp_path)


@given(st.integers(0), st.integers(1, 255))
def test_a_damaged_header_is_refused_or_means_the_same(tmp_path, position, change):
    file = write(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[position % (8 + int.from_bytes(content[:8], "little"))] ^= change
    file.write_bytes(content)
    try:
        tensors = read_all(tmp_path)
    except UserError as error:
        assert str(tmp_path) in str(error)
    else:
        assert_equal(tensors)


def test_files_that_are_no_safetensors(tmp_path):
    header = '{"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,%s]}}   '
    offsets = [(header % end).encode() for end in ("Infinity", "20", "NaN")]
    file = tmp_path / "model.safetensors"
    for content in (
        b"",
        b"\x00" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 40) + b"{}",
        b"PK\x03\x04" + b"x" * 100,
        *(struct.pack("<Q", len(offset)) + offset + bytes(24) for offset in offsets),
        (write(tmp_path) / "model.safetensors").read_bytes() + bytes(4),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match="model.safetensors"):
            read_all(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path):
    same_folder = "must give a .safetensors file in the same folder"
    two = "two.safetensors"
    for weight_map, says in (
        ({"a.weight": "../one.safetensors"}, f"{same_folder}.*; ../one.safetensors"),
        ({"a.weight": "one.bin"}, f"{same_folder}.*; one.bin is none"),
        ({"a.weight": "three.safetensors"}, "three.safetensors is none, or is missing"),
        ({"a.weight": 1}, same_folder),
        ({"a.weight": "x" * 5000 + ".safetensors"}, same_folder),
        ({}, "weight_map must give"),
        ([1], "weight_map must give"),
        (None, "weight_map must give"),
        ({"a.weight": two, "b.weight": two, "c.bias": two}, "a.weight .* is missing"),
        ({"a.weight": "one.safetensors", "b.weight": two}, "c.bias .* is missing"),
    ):
        with pytest.raises(UserError, match=says):
            read_all(write_shards(tmp_path, weight_map))
    write_shards(tmp_path)
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, tmp_path / "one.safetensors")
    assert torch.equal(read_all(tmp_path)["b.weight"], TENSORS["b.weight"])  # the index decides


def test_a_file_that_is_cut_after_its_header_was_read(tmp_path):
    checkpoint = Checkpoint(write(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.read("a.weight")


def test_a_pickle_is_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(FileNotFoundError, match="is a pickle: convert it first"):
        Checkpoint(tmp_path)
