"""Damaged tokenizers and GGUFs: each is read, or one line names what is wrong.

    python .ci/damaged.py [MUTATIONS]

Of each kind of file, bytes are changed, left out, put in, or cut off, 5,000 times. No exception but
UserError, no line break in it, and no more than a gigabyte of memory.
"""

import json
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint.test_gguf_model import spm_gguf, write_model
from errors import UserError
from model import Llama
from test_spm import tokenizer_json, tokenizer_model
from tokenizer import Tokenizer

GIGABYTE = 2**30


def damaged(whole: bytes, draw: random.Random, header: int) -> bytes:
    """A few changes, most of them among the first `header` bytes."""
    data = bytearray(whole)
    for _ in range(draw.randrange(1, 5)):
        most = min(header, len(data)) if draw.random() < 0.8 else len(data)
        at = draw.randrange(most)
        match draw.randrange(9):
            case 1:
                del data[at : at + draw.randrange(1, 9)]
            case 2:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 3:
                data[at : at + 4] = draw.choice((b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80"))
            case _:
                data[at] = draw.randrange(256)
    if draw.random() < 0.1:
        del data[draw.randrange(len(data)) :]
    return bytes(data or b"\0")


def check(kind: str, file: Path, read: Callable[[], object], header: int, count: int) -> None:
    """Damage this file again and again, and read it."""
    whole = file.read_bytes()
    draw = random.Random(kind)
    num_read = 0
    for i in range(count):
        file.write_bytes(damaged(whole, draw, header))
        try:
            read()
            num_read += 1
        except UserError as error:
            if "\n" in str(error):
                sys.exit(f"{kind}, mutation {i}: {error!r}")
        except Exception as error:
            print(f"{kind}, mutation {i}: {type(error).__name__}", flush=True)
            raise error
    print(f"{kind}: {num_read} of {count} damaged files are read, {count - num_read} refused")


def main(count: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIGABYTE, -1))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "a", "tokenizer.model")
        model.parent.mkdir()
        model.write_bytes(tokenizer_model())
        check("tokenizer.model", model, lambda: Tokenizer.load(model.parent), 20_000, count)
        text = Path(folder, "b", "tokenizer.json")
        text.parent.mkdir()
        text.write_text(json.dumps(tokenizer_json()))
        check("tokenizer.json", text, lambda: Tokenizer.load(text.parent), 20_000, count)
        vocabulary = spm_gguf(Path(folder, "vocabulary.gguf"))
        check("vocabulary in GGUF", vocabulary, lambda: Tokenizer.load(vocabulary), 8_000, count)
        weights = Path(folder, "model.gguf")
        write_model(weights, {"": "Q4_K"})
        check("model in GGUF", weights, lambda: Llama.load(weights), 2_500, count)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000)
