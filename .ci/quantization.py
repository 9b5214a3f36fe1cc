"""What the bits cost a real model: the table of `python quant.py NAME --table`, for groups of 128 alone, and the limits that it must keep.

    python .ci/quantization.py SMOLLM2 TEXT STORIES     (a folder with a model; text, of which the beginning is measured, the rest calibrates;
                                                         the embedded model's stories, of which those that it never saw are measured)

The goal of 4-bit weights in groups of 128 is that calibration saves half of what rounding loses. The embedded model reaches it by GPTQ. SmolLM2's
folder, whose values were rounded to 4 bits once already, needs AWQ and GPTQ together (55 % of 4,096 tokens, calibrated on 24 pieces; here it has 8).
"""
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from weights import Quantization, find
from quant import WIDTHS
from tokenizer import Tokenizer
from train.perplexity import Recipe, saved, table
from train.quantize import pieces

TOKENS, PIECES = 4096, 8                                # measured; of 512 tokens each, to calibrate with
LIMITS = {"8": 0.002, "8/4": 0.02, "4": 0.04}           # what keys and values of these widths may cost


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


def texts(folder: str, file: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The beginning of the file, and pieces from all over its second half."""
    tokenizer, text = Tokenizer.load(Path(folder)), Path(file).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        rest = Path(place) / "rest.txt"
        rest.write_text(text[len(text) // 2:], encoding="utf-8")
        return pieces(file, tokenizer, 1024, TOKENS // 1024), pieces(str(rest), tokenizer, 512, PIECES, calibrate=True)


def embedded(stories: str) -> None:
    """GPTQ on stories that the model has not seen."""
    tokenizer = Tokenizer.load(find("tiny"))
    found = [pieces(stories, tokenizer, length, count, calibrate) for length, count, calibrate in ((1024, TOKENS // 1024, False), (512, PIECES, True))]
    rows = table("tiny", *found, [Recipe(None, ["16"]), Recipe(Quantization(8), ["16", "8"]), Recipe(Quantization(4), ["16"]), Recipe(Quantization(4, method="gptq"), ["16"])],
                 "cpu", progress=lambda line: None)
    for row in rows[1:3]:
        require(row.perplexity < 1.002 * rows[0].perplexity, f"weights in 8 bits, keys and values in {row.width}: at most 0.2%")
    require(saved(rows[-1], rows) > 0.5, f"weights in 4 bits, groups of 128: GPTQ saves {saved(rows[-1], rows):.0%} of what rounding loses, at least half")


def main(folder: str, file: str, stories: str) -> int:
    embedded(stories)
    wanted = [Recipe(None, list(WIDTHS)), Recipe(Quantization(8), ["16"]), Recipe(Quantization(4), ["16"]), Recipe(Quantization(4, method="awq+gptq"), ["16", "8/4"])]
    rows = table(folder, *texts(folder, file), wanted, "cpu", progress=lambda line: None)
    print("(this folder's 16 bits were rounded to 4 once already: other models lose other amounts)")
    *kv, eight, rounded, four, both = rows
    lost = {row: row.perplexity / rows[0].perplexity - 1 for row in rows}
    for row in kv[1:]:
        require(lost[row] < LIMITS[row.width], f"keys and values in {row.width} bits cost {lost[row]:.2%}, at most {LIMITS[row.width]:.1%}")
    require(lost[eight] < 0.002, f"weights in 8 bits cost {lost[eight]:.2%}, at most 0.2%")
    # What they save hangs on the last bits: 36, 48 and 55 % by the number of threads and the order of sums alone, 42 % with a millionth of noise.
    require(saved(four, rows) > 0.3, f"in 4 bits, groups of 128: rounding costs {lost[rounded]:.1%}, AWQ and GPTQ save {saved(four, rows):.0%} of that, at least 30 %")
    require(lost[both] < lost[four] + 0.03, f"with keys and values in 8/4 bits it is {lost[both]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
