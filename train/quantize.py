"""A model's weights in 8 or 4 bits, in a folder of their own.

    python -m train.quantize NAME --bits 4 --method gptq --data FILE --out DIR    a smaller model
    python -m train.quantize NAME --table TEXT --data FILE    bytes and perplexity of all recipes

`python generate.py --target DIR` reads the folder. Calibration (calibrate.py) reads pieces of 512
tokens, spread over FILE. Invariant: config.json, without which a folder is no model, comes last.
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from app.shell import Parser, check_folder, number_or_word, say, status, write
from checkpoint.config import Config
from checkpoint.files import read_json
from checkpoint.formats import Quantization
from checkpoint.hub import find_folder
from checkpoint.save import TOKENIZER_FILES, copy_files, save_folder
from checkpoint.tensors import Checkpoint
from devices import find_device
from errors import UserError
from model import Llama
from quant import FORMATS
from tokenizer import Tokenizer
from train import perplexity
from train.bpe import END
from train.calibrate import quantize_model, size
from train.stories import hold_out, read_file, split_stories

METHODS = ("rtn", "awq", "gptq", "awq+gptq")  # of integers, from the cheapest to the best
PIECES = 32  # of 512 tokens, to calibrate with
COPIED = (*TOKENIZER_FILES, "generation_config.json")


def save(llama: Llama, source: Path, out: Path) -> None:
    """Write a quantized model's folder: the other tensors in `source`'s dtype, its other files."""
    copy_files(source, out, COPIED)
    config = read_json(source / "config.json")
    config["quantization_config"] = llama.config.quantization.to_dict()
    save_folder(llama, out, config, Checkpoint(source).dtypes[0])


def pieces(
    file: str, tokenizer: Tokenizer, length: int, count: int, calibrate: bool = False
) -> list[Tensor]:
    """Up to `count` pieces of up to `length` tokens of a text: int64[≤ length] each.

    From its beginning; with calibrate, spread over it. Of a file of stories (stories.py), the
    held-out ones; with calibrate, the others.
    """
    text = read_file(file)
    if END in text:
        train, held_out = hold_out(split_stories(text))
        text = END.join(train if calibrate else held_out)
    size = 8 * length  # characters: about twice those of `length` tokens
    if calibrate:
        starts = [len(text) * i // count for i in range(count)]
        found = [encode(text[start : start + size], tokenizer)[:length] for start in starts]
    else:
        found = encode(text[: size * count], tokenizer).split(length)[:count]
    found = [piece for piece in found if len(piece) > 1]
    if not found:
        raise UserError(
            f"{file} holds no text: at least two tokens are needed, or ten stories if it holds "
            "stories, of which every tenth is held out"
        )
    return found


def encode(text: str, tokenizer: Tokenizer) -> Tensor:
    """The tokens of a text, int64[T]. A story after an end of text begins as a prompt does."""
    tokens = []
    for i, story in enumerate(text.split(END)):
        if i > 0 and END in tokenizer.specials:
            tokens.append(tokenizer.specials[END])
        tokens += tokenizer.prompt(story)
    return torch.tensor(tokens)


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser("python -m train.quantize", "Store a model's weights in 8 or 4 bits.")
    add = p.add_argument
    add("name", help="the model: an alias, a Hub id or a folder")
    add(
        "--bits",
        type=number_or_word,
        default=8,
        choices=[*FORMATS],
        help="of the layers' weights (8)",
    )
    add(
        "--method",
        default="rtn",
        choices=[*METHODS, "smoothquant"],
        help="round to nearest (rtn, the default), or calibrated on --data; "
        "smoothquant: with --activations 8",
    )
    add(
        "--activations",
        type=int,
        choices=[16, 8],
        help="8: round the inputs of the layers' products, too (16)",
    )
    add(
        "--group",
        type=int,
        choices=[32, 64, 128],
        help="numbers that share a scale in 4 bits (128; nf4: 64)",
    )
    add(
        "--head-bits",
        type=int,
        default=8,
        choices=[16, 8, 4],
        help="of the embedding and the head (8)",
    )
    add("--data", metavar="FILE", help="text to calibrate with: all but rtn need it")
    add("--out", metavar="DIR", help="the new folder")
    add(
        "--errors",
        action="store_true",
        help="print the relative error of each matrix, the worst first: of its weights, or, "
        "calibrated, of its outputs on --data",
    )
    add(
        "--table",
        metavar="FILE",
        help="write nothing; print the perplexity of 8192 tokens of it with all bits and methods",
    )
    add("--device", metavar="NAME", help="default: a GPU if there is one")
    args = p.parse_args(arguments)
    if (args.out is None) == (args.table is None):
        p.error("give either --out, the folder to write, or --table, a text to measure on")
    if args.table is not None:
        p.unused(
            args,
            "bits method group head_bits activations errors",
            "with --table, which measures them all",
        )
        return args
    if not (FORMATS[args.bits].group or args.head_bits == 4):
        p.unused(args, "group", "without 4 bits, in the layers or in the head")
    if args.method == "rtn":
        p.unused(args, "data", "with --method rtn, which uses no text")

    elif args.data is None:
        p.error(f"--method {args.method} looks at text: give some with --data FILE")
    return args


def measure_or_store(args: argparse.Namespace) -> None:
    source = find_folder(args.name)
    activations = args.activations or (8 if args.method == "smoothquant" else 16)
    how = Quantization(
        args.bits, args.group, args.head_bits, method=args.method, activations=activations
    )
    config = Config.load(source).quantized(how)  # refuses a model that is quantized
    args.device = find_device(args.device)
    calibration = []
    if args.data is not None:
        calibration = pieces(args.data, Tokenizer.load(source), 512, PIECES, calibrate=True)
    if args.table is None:
        store(args, source, how, calibration)
    else:
        length = min(1024, config.max_position_embeddings)
        texts = pieces(args.table, Tokenizer.load(source), length, 8192 // length)
        methods = METHODS[:1]
        write(f"measured on {args.table}\n")
        if calibration:
            methods = METHODS
            write(f"calibrated on {args.data}\n")
        recipes = perplexity.recipes(methods)
        perplexity.table(args.name, texts, calibration, recipes, args.device)


def store(
    args: argparse.Namespace, source: Path, how: Quantization, calibration: Sequence[Tensor]
) -> None:
    """Write the folder --out."""
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder: give a new one")
    check_folder(out)
    before = size(Llama(Config.load(source), "meta", seed=None))
    losses: dict[str, float] | None = {} if args.errors else None
    llama = quantize_model(
        Llama.load(source, args.device, trainable=True), how, calibration, losses
    )
    out.mkdir(parents=True, exist_ok=True)
    save(llama, source, out)
    after = size(llama)
    if losses is not None:
        print_losses(losses)
    say(f"{before:,} bytes in 16 bits, {after:,} in {how.name}: {after / before:.2f} of them")
    say(f"{out} holds the model: python generate.py --target {out}")


def print_losses(losses: dict[str, float]) -> None:
    """A line for each matrix, the worst first."""
    for name in sorted(losses, key=losses.__getitem__, reverse=True):
        write(f"{losses[name]:8.2%}  {name}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_flags(arguments)
    return status(lambda: measure_or_store(args))


if __name__ == "__main__":
    sys.exit(main())
