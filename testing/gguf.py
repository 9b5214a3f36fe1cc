"""A writer of GGUF files, and of models in them."""

import math
import random
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.config import Config
from checkpoint.gguf import PLAIN, TYPES
from checkpoint.gguf_blocks import BLOCK_FORMATS, unpack
from checkpoint.gguf_model import GGUF_SETTINGS, MODULES
from checkpoint.load import fill_model
from kernels import Ops
from model import Llama
from testing.pieces import BYTES, vocabulary

CODES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def number(code: str, value: Any) -> bytes:
    return struct.pack(f"<I{code}", CODES[code], value)


def string(value: str | bytes) -> bytes:
    return struct.pack("<I", 8) + text(value)


def numbers(code: str, values: list[Any]) -> bytes:
    head = struct.pack("<IIQ", 9, CODES[code], len(values))
    return head + struct.pack(f"<{len(values)}{code}", *values)


def strings(values: list[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def value_of(value: Any) -> bytes:
    """A value as a converter stores it; bytes are one already."""
    match value:
        case bytes():
            return value
        case str():
            return string(value)
        case [str(), *_]:
            return strings(value)
        case [first, *_]:
            return numbers("f" if isinstance(first, float) else "i", value)
        case bool():
            return number("?", value)
        case float():
            return number("f", value)
    return number("i" if value < 0 else "I", value)


class Stored:
    """A tensor in a file; whatever is given explicitly is written as it is given."""

    def __init__(self, type: str, shape: list[int], data: bytes, **lies: Any) -> None:
        self.data = data
        self.dims = lies.get("dims", shape[::-1])
        self.type = lies.get("number", TYPES.index(type))
        self.offset = lies.get("offset")


def write(
    file: Path,
    metadata: Iterable[tuple[str, Any]] = (),
    tensors: list[tuple[str, Stored]] = (),
    version: int = 3,
    alignment: int = 32,
    **lies: Any,
) -> Path:
    content = lies.get("magic", b"GGUF") + struct.pack("<I", version)
    content += struct.pack("<Q", lies.get("num_tensors", len(tensors)))
    content += struct.pack("<Q", lies.get("num_metadata", len(metadata)))
    for key, value in metadata:
        content += text(key) + value_of(value)
    data = b""
    for name, stored in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if stored.offset is None else stored.offset
        content += text(name) + struct.pack("<I", len(stored.dims))
        content += struct.pack(f"<{len(stored.dims)}Q", *stored.dims)
        content += struct.pack("<IQ", stored.type, offset)
        data += stored.data
    content += bytes(-len(content) % alignment) + data
    file.write_bytes(content)
    return file


def random_blocks(type: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Blocks with scales of an ordinary size, one of them 0: uint8[rows, bytes of a row]."""
    form = BLOCK_FORMATS[type]
    draw = random.Random(seed)
    blocks = []
    for i in range(rows * columns // form.weights):
        block = bytearray(draw.randbytes(form.nbytes))
        starts = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(type, [0, 2])
        for start in starts:
            struct.pack_into("<e", block, start, draw.uniform(-0.1, 0.1))
        if i == 1:
            struct.pack_into("<e", block, starts[0], 0)
        blocks.append(bytes(block))
    return torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8).view(rows, -1)


METADATA = [
    ("general.architecture", "llama"),
    *((f"number.{code}", number(code, 1)) for code in CODES),
    *((f"numbers.{code}", numbers(code, [0, 1, 1])) for code in CODES),
    ("signed", numbers("q", [-(2**63), 2**63 - 1])),
    ("no numbers", numbers("f", [])),
    ("tokens", ["", "▁the", "Ġ\u0000", "😀"]),
]

SMALL = Stored("F32", [3], struct.pack("<3f", 1, 2, 3))


def raw(data: Tensor) -> bytes:
    return bytes(data.contiguous().view(torch.uint8).flatten().tolist())


def quantized(type: str, shape: list[int]) -> Stored:
    return Stored(type, shape, raw(random_blocks(type, math.prod(shape[:-1]), shape[-1])))


SHAPE = dict(
    vocab_size=40,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    rms_norm_eps=2.0**-17,
    rope_theta=5000.0,
)
EMBEDDING = ("token_embd.weight", Stored("F32", [40, 256], bytes(40 * 256 * 4)))
THEIRS = {ours: theirs for theirs, ours in MODULES.items()}


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a config.json."""
    kind = config.get("model_type", "llama")
    named = {f"{kind}.{theirs}": config[ours] for ours, theirs in GGUF_SETTINGS.items()}
    return {"general.architecture": kind} | named


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, i, rest = module.split(".", 3)
        return f"blk.{i}.{THEIRS[rest]}.{kind}"
    return f"{THEIRS[module]}.{kind}"


def interleaved(x: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """Rows of q and k as a GGUF has them: a Llama's, the two of a pair side by side."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    module = name.split(".")[-2]
    if module not in heads or config.get("model_type", "llama") != "llama":
        return x
    D = config["head_dim"]
    order = []
    for head in range(config[heads[module]]):
        for pair in range(D // 2):
            order += [head * D + pair, head * D + D // 2 + pair]
    return x[order]


def write_model(file: Path, types: dict[str, str], **changes: Any) -> Llama:
    """A random model in a GGUF; types: of matrices, by a part of their name ("": all others). And
    the same in float64: its numbers as the specification says."""
    config = SHAPE | changes
    llama = Llama(Config(**config), dtype=torch.float64, ops=Ops())
    tensors = []
    filled = {}
    for name, tensor in llama.named_tensors().items():
        shape = list(tensor.shape)
        type = next((type for part, type in types.items() if part in name), "F32")
        if tensor.ndim == 1:
            type = "F32"
        if "_norm" in name or "bias" in name:  # a norm of q, of k
            tensor.uniform_(0.5, 1.5)
        if type in PLAIN:
            small = tensor.to(PLAIN[type])
            filled[name] = small.double()
            stored = Stored(type, shape, raw(interleaved(small, name, config)))
        else:
            stored = quantized(type, shape)
            blocks = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(shape[0], -1)
            filled[name] = unpack(type, blocks).dequantize().double()
            stored = Stored(type, shape, raw(interleaved(blocks, name, config)))
        tensors.append((gguf_name(name), stored))
    fill_model(llama, filled.items())
    write(file, settings_of(config).items(), tensors)
    return llama


def spm_gguf(file: Path, more: dict[str, int] = {}, **changes: Any) -> Path:
    """test_pieces' vocabulary. more: tokens behind it, text -> kind."""
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "[PAD]": 5} | dict.fromkeys(BYTES, 6) | more
    texts = [*vocabulary(), "[PAD]", *more]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": numbers("f", [-float(i) for i in range(len(texts))]),
        "tokenizer.ggml.token_type": [kinds.get(piece, 1) for piece in texts],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    return write(file, (metadata | changes).items(), [EMBEDDING])
