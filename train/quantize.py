"""A model's weights in 8 or 4 bits, in a folder of their own: the command line behind `python quant.py NAME`.

    python quant.py NAME --bits 4 --method gptq --data FILE --out DIR    a smaller model, which --target DIR reads
    python quant.py NAME --table TEXT --data FILE                        bytes and perplexity of all widths and methods
    python quant.py                                                      a short table of the embedded model

Invariant: a folder is there whole, or not at all.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from app.shell import Parser, number_or_word, say, status
from checkpoint.config import Config
from checkpoint.files import read_json
from checkpoint.formats import Quantization
from checkpoint.hub import find_folder
from checkpoint.tensors import EXACT, Checkpoint
from errors import UserError
from kernels import find_device
from model import Llama
from quant import GROUPS, STORED
from tokenizer import Tokenizer
from train import perplexity
from train.bpe import END, FILES, copy_files
from train.calibrate import quantized, size
from train.stories import hold_out, read_file

METHODS = ("rtn", "awq", "gptq", "awq+gptq")  # of whole numbers, from the cheapest to the best


def save(llama: Llama, source: Path, out: Path) -> None:
    """Write a quantized model's folder. Unquantized tensors have the dtype of `source`; its other files are copied."""
    dtype = Checkpoint(source).dtypes[0]
    kept = lambda name, place: name.endswith("_scale") or place.dtype in EXACT
    tensors = {
        name: place.to("cpu", place.dtype if kept(name, place) else dtype, copy=True)
        for name, place in llama.places().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    copy_files(source, out, (*FILES, "chat_template.jinja", "generation_config.json"))
    config = read_json(source / "config.json") | {
        "quantization_config": llama.config.to_dict()["quantization_config"]
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def pieces(
    file: str, tokenizer: Tokenizer, length: int, count: int, calibrate: bool = False
) -> list[Tensor]:
    """Up to `count` pieces of up to `length` tokens of a text, from its beginning; with calibrate, spread over it. From
    a file of stories (stories.py), pieces are of the held-out stories; with calibrate, of the others."""
    if END in (text := read_file(file)):
        text = END.join(
            hold_out([story for part in text.split(END) if (story := part.strip())])[
                0 if calibrate else 1
            ]
        )
    end = [tokenizer.specials[END]] if END in tokenizer.specials else []
    ended = lambda part: [
        token for story in part.split(END) for token in (*tokenizer.prompt(story.strip()), *end)
    ]
    encode = lambda part: ended(part) if END in part else tokenizer.prompt(part)
    size = 8 * length  # characters: about twice those of `length` tokens
    if calibrate:
        found = [
            torch.tensor(encode(text[len(text) * i // count :][:size]))[:length]
            for i in range(count)
        ]
    else:
        found = list(torch.tensor(encode(text[: size * count])).split(length))[:count]
    if not (found := [piece for piece in found if len(piece) > 1]):
        raise UserError(f"{file} holds no text: at least two tokens are needed")
    return found


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser("quant.py", "Store a model's weights in 8 or 4 bits.")
    add = p.add_argument
    add("name", help="the model: an alias, a Hub id or a folder")
    add(
        "--bits",
        type=number_or_word,
        default=8,
        choices=[*STORED],
        help="of the layers' weights (8)",
    )
    add(
        "--method",
        default="rtn",
        choices=[*METHODS, "smoothquant"],
        help="round to nearest (rtn, the default), or calibrated on --data; smoothquant: with --activations 8",
    )
    add(
        "--activations",
        type=int,
        choices=[16, 8],
        help="8: round what comes into a layer's products, too (16)",
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
    add(
        "--pieces",
        type=int,
        default=32,
        metavar="N",
        help="calibrate with N pieces of 512 tokens all over it (32)",
    )
    add("--out", metavar="DIR", help="the new folder")
    add(
        "--table",
        metavar="FILE",
        help="write nothing; print the perplexity of this text with all bits and methods",
    )
    add("--tokens", type=int, default=8192, metavar="N", help="of it, the first N tokens (8192)")
    add("--device", metavar="NAME", help="default: a GPU if there is one")
    args = p.parse_args(arguments)
    if args.bits not in GROUPS and args.head_bits not in GROUPS and args.table is None:
        p.unused(args, "group", f"with --bits {args.bits}, where a whole row shares a scale")
    if args.table is not None:
        p.unused(args, "bits method group activations", "with --table, which measures them all")
        if args.data is None:
            p.unused(args, "pieces", "without --data")
    else:
        p.unused(args, "tokens", "without --table")
        if args.method == "rtn":
            p.unused(args, "data pieces", "with --method rtn, which looks at no text")
    return args


def store_or_measure(args: argparse.Namespace) -> None:
    activations = args.activations or (8 if args.method == "smoothquant" else 16)
    how = Quantization(
        args.bits,
        args.group or GROUPS.get(args.bits, 128),
        args.head_bits,
        args.method,
        activations,
    )
    for flag, value, least, most in (
        ("pieces", args.pieces, 1, 2**16),
        ("tokens", args.tokens, 2, 2**31),
    ):
        if not least <= value <= most:
            raise UserError(
                f"--{flag} is {value}: it must be at least {least} and at most {most:,}"
            )
    if (args.out is None) == (args.table is None):
        raise UserError("give either --out, the folder to write, or --table, a text to measure on")
    if how.method != "rtn" and args.data is None and args.table is None:
        raise UserError(f"--method {how.method} looks at text: give some with --data FILE")
    source, device = find_folder(args.name), find_device(args.device)
    length = min(
        1024, Config.load(source).quantized(how).max_position_embeddings
    )  # or it is refused now
    calibration = (
        pieces(args.data, Tokenizer.load(source), 512, args.pieces, calibrate=True)
        if args.data
        else []
    )
    if args.table is not None:
        texts = pieces(args.table, Tokenizer.load(source), length, -(-args.tokens // length))
        recipes = perplexity.recipes(
            METHODS if calibration else METHODS[:1], head_bits=args.head_bits
        )
        perplexity.table(args.name, texts, calibration, recipes, device, say)
        return
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder: give a new one")
    out.mkdir(parents=True, exist_ok=True)  # or it is refused now
    try:
        llama = quantized(source, how, calibration, device)
        save(llama, source, out)
    except BaseException:  # no half-written folder stays
        shutil.rmtree(out, ignore_errors=True)
        raise
    say(f"{out} holds the model in {size(llama):,} bytes; python generate.py --target {out}")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    return status(
        lambda: store_or_measure(parse_flags(arguments)) if arguments else perplexity.main(),
        SafetensorError,
    )
