"""GGUF files are read as they were written; damaged ones are refused; blocks are what they say."""

import gc
import json
import math
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.gguf import GGUF, LARGEST_HEADER, PLAIN
from checkpoint.gguf_blocks import BLOCK_FORMATS, unpack, unpermute
from errors import UserError
from testing.gguf import (
    CODES,
    METADATA,
    SMALL,
    Stored,
    number,
    quantized,
    random_blocks,
    raw,
    string,
    write,
)
from testing.programs import told

EXPECTED = {
    "general.architecture": "llama",
    **{f"number.{code}": 1 for code in CODES},
    **{f"numbers.{code}": [0, 1, 1] for code in CODES},
    "signed": [-(2**63), 2**63 - 1],
    "no numbers": [],
    "tokens": ["", "▁the", "Ġ\u0000", "😀"],
}


# ---- Files


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096, 40])
def test_a_file_is_read_as_it_was_written(tmp_path, version, alignment):
    plain = {}
    for type, dtype in PLAIN.items():
        for shape in ([5], [3, 7], [2, 3, 1, 5]):
            plain[f"{type} {shape}"] = torch.randn(shape).to(dtype)
    blocks = {}
    for type, form in BLOCK_FORMATS.items():
        for shape in ([form.weights], [3, 2 * form.weights], [2, 1, 3, form.weights]):
            blocks[f"{type} {shape}"] = (quantized(type, shape), shape)
    tensors = [
        (name, Stored(name.split()[0], list(x.shape), raw(x))) for name, x in plain.items()
    ] + [(name, stored) for name, (stored, _) in blocks.items()]
    metadata = [*METADATA, ("general.alignment", alignment)]
    file = write(tmp_path / "a.gguf", metadata, tensors, version, alignment)
    opened = GGUF.open(file)
    assert opened.file == file
    assert opened.metadata == EXPECTED | {"general.alignment": alignment}
    assert list(opened.tensors) == [name for name, _ in tensors]
    for name, x in plain.items():
        assert torch.equal(opened.read(name), x) and opened.read(name).dtype == x.dtype
        assert opened.tensors[name].shape == tuple(x.shape)
    for name, (stored, shape) in blocks.items():
        read = opened.read(name)
        info = opened.tensors[name]
        assert read.shape == (math.prod(shape[:-1]), info.nbytes // math.prod(shape[:-1]))
        assert raw(read) == stored.data and info.shape == tuple(shape)
        assert info.offset % alignment == 0 and info.type == name.split()[0]


def test_the_padding_behind_a_header_of_any_length(tmp_path):
    for n in range(32):
        file = write(tmp_path / f"{n}.gguf", [("key", "a" * n)], [("a", SMALL)])
        assert GGUF.open(file).read("a").tolist() == [1, 2, 3]


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_a_tensor_is_mapped_and_let_go(tmp_path):
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(file))

    file = write(tmp_path / "mapped.gguf", tensors=[("a", SMALL)])
    content = file.read_bytes()
    opened = GGUF.open(file)
    assert mappings() == 0
    tensor = opened.read("a")[1:]
    gc.collect()
    assert mappings() == 1 and tensor.tolist() == [2, 3]
    tensor.fill_(7)
    assert file.read_bytes() == content
    del tensor
    gc.collect()
    assert mappings() == 0


def test_a_large_vocabulary_is_read_at_once(tmp_path):
    tokens = [f"token {i}" for i in range(128_000)]
    scores = [float(i) for i in range(128_000)]
    metadata = [("tokens", tokens), ("scores", scores)]
    file = write(tmp_path / "large.gguf", metadata)
    start = time.perf_counter()
    opened = GGUF.open(file)
    seconds = time.perf_counter() - start
    assert opened.metadata == {"tokens": tokens, "scores": scores}
    assert seconds < 2  # 0.1 on an idle machine


# ---- Splits


def write_split(folder: Path, **lies: Any) -> list[Path]:
    """Three files with a tensor each, but for the first, which has none."""
    files = []
    for i in range(3):
        metadata = [
            ("split.no", number("H", lies.get("no", i) if i == 2 else i)),
            ("split.count", number("H", lies.get("count", 3) if i == 2 else 3)),
            ("split.tensors.count", lies.get("total", 2)),
        ]
        tensors = [(lies.get("name", f"tensor {i}"), SMALL)] if i else []
        if not i:
            metadata += METADATA
        files.append(write(folder / f"m-{i + 1:05}-of-00003.gguf", metadata, tensors))
    return files


def test_a_split_is_one_model(tmp_path):
    files = write_split(tmp_path)
    for file in files:
        opened = GGUF.open(file)
        assert opened.file == files[0]
        assert opened.metadata.items() >= EXPECTED.items()
        assert [info.file for info in opened.tensors.values()] == files[1:]
        assert opened.read("tensor 2").tolist() == [1, 2, 3]


@pytest.mark.parametrize("count", [0, 1])  # 0: a split that was merged
def test_a_split_of_one_file_may_have_any_name(tmp_path, count):
    metadata = [("split.count", number("H", count))]
    file = write(tmp_path / "merged.gguf", metadata, [("a", SMALL)])
    assert GGUF.open(file).read("a").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "lies, says",
    [
        (dict(no=1), "00003.gguf: it has .*'split.no': 1.* must have .*'split.no': 2"),
        (dict(count=4), "00003.gguf: it has .*'split.count': 4.* must have .*'split.count': 3"),
        (dict(total=3), "'split.tensors.count': 3.* must have .*'split.tensors.count': 2"),
        (dict(name="same"), "00003.gguf: .* no tensor of another file"),
    ],
)
def test_a_split_that_does_not_agree(tmp_path, lies, says):
    files = write_split(tmp_path, **lies)
    with pytest.raises(UserError, match=says):
        GGUF.open(files[0])


def test_a_split_with_a_file_missing_or_renamed(tmp_path):
    files = write_split(tmp_path)
    renamed = tmp_path / "model.gguf"
    for name in ("model.gguf", "m-00001-of-00004.gguf", "m-1-of-3.gguf"):
        renamed = files[0].rename(tmp_path / name)
        with pytest.raises(UserError, match="split.count is 3, so its name must end"):
            GGUF.open(renamed)
        renamed.rename(files[0])
    files[1].unlink()
    with pytest.raises(UserError, match="m-00002-of-00003.gguf is missing"):
        GGUF.open(files[2])
    for value in (3.0, "3", [3], -1):
        file = write(tmp_path / "x-00001-of-00003.gguf", [("split.count", value)])
        with pytest.raises(UserError, match="split.count|is missing"):
            GGUF.open(file)


# ---- Damaged files


def with_metadata(value: Any, key: str | bytes = "key", **lies: Any) -> dict[str, Any]:
    return dict(metadata=[(key, value)], **lies)


def with_tensor(
    type: str, shape: list[int], nbytes: int, lies: dict[str, Any] = {}
) -> dict[str, Any]:
    return dict(tensors=[("a", SMALL), ("b\n", Stored(type, shape, bytes(nbytes), **lies))])


def array(type: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, type, count) + data


TENSORS = told(
    r"""
    ["F32", [], 4] → tensor b has dims .*; there must be 1 to 4, and none 0
    ["F32", [1, 1, 1, 1, 1], 4] → dims \[1, 1, 1, 1, 1\]; there must be 1 to 4
    ["F32", [2, 0], 4] → dims \[0, 2\]; there must be 1 to 4, and none 0
    ["F32", [4611686018427387904, 4611686018427387904, 4], 4] → it must begin at .*, and the file
    ["Q4_K", [72057594037927936], 144] → it must begin at .*, and the file has
    ["Q2_K", [256], 84] → b has type Q2_K; it must be one of F32, .*, Q6_K
    ["F64", [1], 8] → b has type F64; it must be one of F32
    ["F32", [1], 8, {"number": 4}] → b has type 4; it must be one of F32
    ["NVFP4", [64], 36] → b has type NVFP4; it must be one of F32
    ["F32", [1], 8, {"number": 42}] → has type 42; it must be one of F32
    ["F32", [1], 8, {"number": 4294967295}] → has type 4294967295; it must be one of
    ["Q8_0", [8, 33], 272] → rows of 33 weights; of Q8_0 .* a multiple of 32
    ["Q6_K", [2, 128], 210] → rows of 128 weights; of Q6_K .* a multiple of 256
    ["F32", [3], 12, {"offset": 64}] → has bytes .* and the file has
    ["F32", [3], 12, {"offset": 18446744073709551584}] → has bytes .* and the file has
    ["F32", [3], 12, {"offset": 4}] → it must begin at a multiple of 32
    """
)


@pytest.mark.parametrize(
    "how, says",
    [
        (dict(magic=b"GGML"), "begins with 0x4c4d4747, version 3; GGUF's begins with 0x46554747"),
        (dict(version=1), "version 1; .* version 2 or 3"),
        (dict(version=3 << 24), "version 50331648; .* little-endian"),
        (dict(num_metadata=2**63), "metadata needs .* bytes, but . are left"),
        (dict(num_tensors=2**63), "tensor needs .* bytes, but . are left"),
        (with_metadata(1, b"\xff"), "metadata has b'.xff', which is not UTF-8"),
        (with_metadata(string(b"a\xc3")), "metadata key has b'a.xc3', which is not UTF-8"),
        (with_metadata(struct.pack("<IQ", 8, 2**64 - 1)), f"key needs {2**64 - 1} bytes, but"),
        (with_metadata(struct.pack("<IQ", 13, 0)), "key has values of type 13; it must be 0 to 12"),
        (with_metadata(array(4, 2**62)), f"key needs {2**64} bytes, but"),
        (with_metadata(array(8, 2**61)), "key needs .* bytes, but"),
        (with_metadata(array(0, 99)), "key needs 99 bytes, but"),
        (
            with_metadata(array(9, 1, array(4, 0)[4:])),
            "key has values of type 9; .* not 9 in an array",
        ),
        (with_metadata(array(13, 1)), "key has values of type 13; it must be 0"),
        (dict(metadata=[("a", 1)] * 2), "metadata a is there twice"),
        (dict(tensors=[("a", SMALL)] * 2), "tensor a is there twice"),
        (dict(tensors=[(b"\xfe", SMALL)]), "tensor has b'.xfe', which is not UTF-8"),
        *(
            (with_metadata(wrong, "general.alignment"), f"alignment is {wrong}; it must be a mult")
            for wrong in (0, 12, -8, 32.0, True, "32")
        ),
        *((with_tensor(*json.loads(stored)), says) for stored, says in TENSORS),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path, how, says):
    file = write(tmp_path / "damaged.gguf", **how)
    with pytest.raises(UserError, match=says) as error:
        GGUF.open(file)
    message = str(error.value)
    assert message.startswith(str(file)) and message.isprintable() and len(message) < 1000


def test_files_that_are_none(tmp_path):
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for file in (empty, tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(UserError, match="0 are left|is missing, or not a regular file"):
            GGUF.open(file)


def test_a_header_has_a_limit(tmp_path):
    """A file of many gigabytes may not become a list of as many numbers."""
    file = write(tmp_path / "sparse.gguf", **with_metadata(array(0, LARGEST_HEADER)))
    with file.open("r+b") as opened:
        opened.truncate(8 * LARGEST_HEADER)
    with pytest.raises(UserError, match=f"needs {LARGEST_HEADER} bytes, but .* are left"):
        GGUF.open(file)


def test_a_file_that_is_cut_after_its_header_was_read(tmp_path):
    file = write(tmp_path / "cut.gguf", tensors=[("a", SMALL)])
    opened = GGUF.open(file)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(UserError, match="cut.gguf was cut after its header was read"):
        opened.read("a")


# ---- Blocks, each weight by its definition


def bits_of_k(block: bytes, j: int) -> tuple[int, int]:
    """The scale and the minimum of group j, of 6 bits each."""
    packed = block[4:16]
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    scale = (packed[j + 4] & 15) + 16 * (packed[j - 4] >> 6)
    minimum = (packed[j + 4] >> 4) + 16 * (packed[j] >> 6)
    return scale, minimum


def nibble(data: bytes, i: int, half: int) -> int:
    """Number i: `half` low nibbles come first, then the high ones of the same bytes."""
    byte = data[i % half]
    return byte & 15 if i < half else byte >> 4


def of_k(block: bytes, q: int, i: int) -> float:
    d, dmin = struct.unpack_from("<2e", block)
    scale, minimum = bits_of_k(block, i // 32)
    return d * scale * q - dmin * minimum


def q4_k(block: bytes, i: int) -> float:
    chunk = block[16 + i // 64 * 32 :]
    return of_k(block, nibble(chunk, i % 64, 32), i)


def q5_k(block: bytes, i: int) -> float:
    chunk = block[48 + i // 64 * 32 :]
    fifth = block[16 + i % 32] >> (i // 32) & 1
    return of_k(block, nibble(chunk, i % 64, 32) + 16 * fifth, i)


def q6_k(block: bytes, i: int) -> float:
    (d,) = struct.unpack_from("<e", block, 208)
    (scale,) = struct.unpack_from("<b", block, 192 + i // 16)
    half = i // 128
    low = nibble(block[64 * half :], i % 128, 64)
    high = block[128 + 32 * half + i % 32] >> (2 * (i % 128 // 32)) & 3
    return d * scale * (low + 16 * high - 32)


def fifth(block: bytes, start: int, i: int) -> int:
    (bits,) = struct.unpack_from("<I", block, start)
    return 16 * (bits >> i & 1)


def first(block: bytes, count: int = 1) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}e", block)


def with_minimum(block: bytes, q: int) -> float:
    d, m = first(block, 2)
    return d * q + m


DEFINITIONS: dict[str, Callable[[bytes, int], float]] = {
    "Q8_0": lambda block, i: first(block)[0] * struct.unpack_from("<b", block, 2 + i)[0],
    "Q4_0": lambda block, i: first(block)[0] * (nibble(block[2:], i, 16) - 8),
    "Q4_1": lambda block, i: with_minimum(block, nibble(block[4:], i, 16)),
    "Q5_0": lambda block, i: first(block)[0] * (nibble(block[6:], i, 16) + fifth(block, 2, i) - 16),
    "Q5_1": lambda block, i: with_minimum(block, nibble(block[8:], i, 16) + fifth(block, 4, i)),
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


@pytest.mark.parametrize("type", BLOCK_FORMATS)
def test_blocks_are_what_their_definition_says(type):
    form = BLOCK_FORMATS[type]
    N, K = 3, 2 * form.weights
    blocks = random_blocks(type, N, K)
    expected = []
    for row in blocks:
        for block in row.view(-1, form.nbytes):
            content = bytes(block.tolist())
            expected += [DEFINITIONS[type](content, i) for i in range(form.weights)]
    reference = torch.tensor(expected).view(N, K)
    q = unpack(type, blocks)
    assert q.values.dtype == torch.int8 and q.group == form.group
    assert (q.zero is not None) == form.zeros
    w = q.dequantize()
    assert w.dtype == torch.float32
    torch.testing.assert_close(w, reference, rtol=0, atol=1e-6 * reference.abs().max().item())


@pytest.mark.parametrize("type", BLOCK_FORMATS)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_scales_must_be_finite(type, number):
    for start in [208] if type == "Q6_K" else [0, 2] if type in WITH_MINIMUM else [0]:
        blocks = random_blocks(type, 2, 2 * BLOCK_FORMATS[type].weights)
        half = struct.pack("<e", number)
        blocks[1, start : start + 2] = torch.tensor(list(half), dtype=torch.uint8)
        with pytest.raises(UserError, match=f"{type} has a scale that is not finite"):
            unpack(type, blocks)


WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


# ---- The order of rows


@pytest.mark.parametrize("heads, D", [(1, 2), (4, 6), (2, 8)])
def test_rows_return_to_hugging_faces_order(heads, D):
    """Row i and row i + D / 2 of a head are turned together; GGUF has them side by side."""
    rows = torch.randn(heads * D, 3)
    stored = []
    for head in rows.split(D):
        for i in range(D // 2):
            stored += [head[i], head[i + D // 2]]
    assert torch.equal(unpermute(torch.stack(stored), heads), rows)


def test_rows_may_be_packed():
    blocks = random_blocks("Q4_K", 12, 512)
    packed = unpack("Q4_K", unpermute(blocks, 3)).dequantize()
    assert torch.equal(packed, unpermute(unpack("Q4_K", blocks).dequantize(), 3))
