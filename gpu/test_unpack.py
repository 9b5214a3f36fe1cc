"""The inline assembly, which the interpreter does not run: its instructions followed one by one."""

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import products, unpack
from quant import nf4, unpack4

pytestmark = pytest.mark.gpu


def as_word(x: Tensor) -> int:
    return int(x.view(torch.int32)) & 0xFFFFFFFF


def as_numbers(words: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(dtype)


def by_table(a: int, b: int, c: int, table: int) -> int:
    """lop3: bit by bit, the table's entry number 4 a + 2 b + c."""
    result = 0
    for i in range(32):
        entry = 4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)
        result |= (table >> entry & 1) << i
    return result


def by_bytes(a: int, b: int, order: int) -> int:
    """prmt: four of eight bytes."""
    source = (a | b << 32).to_bytes(8, "little")
    return sum(source[order >> 4 * i & 15] << 8 * i for i in range(4))


def difference(a: int, b: int, dtype: torch.dtype) -> int:
    a, b = (as_numbers([value], dtype) for value in (a, b))
    return as_word(a - b)


INSTRUCTIONS = {
    "prmt.b32": by_bytes,
    "lop3.b32": by_table,
    "sub.rn.f16x2": lambda a, b: difference(a, b, torch.float16),
    "sub.f32": lambda a, b: difference(a, b, torch.float32),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "mov.b32": lambda a: a,
}


def emulate(code: str, outputs: int, word: int) -> list[int]:
    """What PTX makes of a word that comes after its outputs."""
    registers = {f"${outputs}": word}
    for instruction in re.sub(r"\.reg[^;]*;", "", code.strip("{} \n")).split(";"):
        if instruction.strip():
            name, out, *arguments = instruction.replace(",", " ").split()
            values = []
            for x in arguments:
                values.append(registers[x] if x in registers else int(re.sub("^0f", "0x", x), 0))
            registers[out] = INSTRUCTIONS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize(
    "name, dtype", [("K8", torch.float16), ("V8", torch.bfloat16), ("V4", torch.bfloat16)]
)
def test_bytes_of_keys_and_values_become_numbers(name, dtype):
    for first in range(0, 256, 4):
        packed = torch.tensor([first, first + 1, first + 2, first + 3], dtype=torch.uint8)
        expected = unpack4(packed) + 16 if name == "V4" else packed.view(torch.int8)
        words = emulate(getattr(unpack, name).value, len(expected) // 2, as_word(packed))
        if name[1] != "8" or -128 not in expected.tolist():  # which is never stored
            assert torch.equal(as_numbers(words, dtype), expected.to(dtype))


@pytest.mark.parametrize("kind", [4, "nf4"])
def test_bytes_of_weights_become_numbers(kind):
    code = products.NIBBLES if kind == 4 else products.LOOK_UP
    table = torch.arange(128.0, 144.0) if kind == 4 else nf4()
    table = table.bfloat16().tolist()
    for byte in range(256):
        four = [byte, (byte * 7 + 3) % 256, 255 - byte, byte ^ 0x5A]
        words = emulate(code.value, 4, int.from_bytes(bytes(four), "little"))
        wanted = [table[b & 15] for b in four] + [table[b >> 4] for b in four]
        assert as_numbers(words, torch.bfloat16).tolist() == wanted
