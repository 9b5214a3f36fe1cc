"""What the bits cost a real model: the table of `python quant.py NAME --table`, for groups of 128 alone, and the limits that it must keep.

    python .ci/quantization.py SMOLLM2 TEXT             (a folder with a model; text, of which the beginning is measured, the rest calibrates)

SmolLM2's folder holds values that were rounded to 4 bits once already, so its "16 bits" are no better than they are: a model whose weights never
were may lose more, or less, by rounding them anew.
"""
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from config import Quantization
from kvquant import WIDTHS
from perplexity import Recipe, Row, saved, table
from quant import pieces
from tokenizer import Tokenizer

TOKENS, PIECES = 4096, 16
LIMITS = {"8": 0.002, "8/4": 0.02, "4": 0.04}           # of perplexity, for keys and values


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


def texts(folder: str, file: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The beginning of the file's first half, and pieces from all over its second."""
    tokenizer, text = Tokenizer.load(Path(folder)), Path(file).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        rest = Path(place) / "rest.txt"
        rest.write_text(text[len(text) // 2:], encoding="utf-8")
        return pieces(file, tokenizer, 1024, TOKENS // 1024), pieces(str(rest), tokenizer, 512, PIECES, calibrate=True)


def main(folder: str, file: str) -> int:
    torch.set_num_threads(2)
    measured, calibration = texts(folder, file)
    four = [Recipe(Quantization(4, 128, 8, method), ["16", "8/4"] if method == "gptq" else ["16"]) for method in ("rtn", "awq", "gptq")]
    rows = table(folder, measured, calibration, [Recipe(None, list(WIDTHS)), Recipe(Quantization(8, head_bits=16), ["16"]), Recipe(Quantization(8), ["16", "8"]), *four],
                 "cpu", progress=lambda line: None)
    print("(this folder's weights were rounded to 4 bits once already)")
    lost = lambda row: row.perplexity / rows[0].perplexity - 1
    find = lambda width, bits=16, method="rtn", head=8: next(row for row in rows if row.width == width and (
        row.how is None if bits == 16 else row.how and (row.how.bits, row.how.method, row.how.head_bits) == (bits, method, head)))
    for width in list(WIDTHS)[1:]:
        require(lost(find(width)) < LIMITS[width], f"keys and values in {width} bits cost {lost(find(width)):.2%}; at most {LIMITS[width]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
