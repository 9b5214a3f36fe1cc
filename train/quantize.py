"""A model's weights in 8 or 4 bits, in a folder of their own: the command line behind `python quant.py NAME`.

    python quant.py NAME --bits 4 --method gptq --data FILE --out DIR    a smaller model, which --target DIR reads
    python quant.py NAME --table TEXT --data FILE                        bytes and perplexity of all widths and methods
    python quant.py                                                      a short table of the embedded model

quant.py has the numbers, calibrate.py GPTQ and AWQ, perplexity.py the table.

Invariant: a folder is there whole, or not at all.
"""
import argparse
import json
import lzma
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from config import Config, Quantization
from engine import check_device
from model import Llama
from shell import Parser, say, status
from tokenizer import Tokenizer
from train import perplexity
from train.bpe import END
from train.calibrate import quantized, size
from train.stories import hold_out
from vocabulary import read_json
from weights import Checkpoint, find

COPIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def save(llama: Llama, source: Path, out: Path) -> None:
    """A quantized model's folder: what is not quantized in the dtype that it had in `source`, whose other files are copied."""
    dtype = Checkpoint(source).dtype
    asis = lambda name, place: name.endswith("_scale") or not place.is_floating_point()
    tensors = {name: place.detach().to("cpu", place.dtype if asis(name, place) else dtype, copy=True).contiguous() for name, place in llama.places().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in COPIED:
        if (source / file).exists():
            shutil.copy(source / file, out / file)
    config = read_json(source / "config.json") | {"quantization_config": llama.config.to_dict()["quantization_config"]}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def pieces(file: str, tokenizer: Tokenizer, length: int, count: int, calibrate: bool = False) -> list[Tensor]:
    """Up to `count` pieces of up to `length` tokens of a text (.xz too): its beginning, or, to calibrate with, from all over it.

    Of a file of stories (stories.py): the beginning of those that are held out; to calibrate with, the others.
    """
    try:
        with lzma.open(file, "rt", encoding="utf-8") if file.endswith(".xz") else open(file, encoding="utf-8") as lines:
            text = lines.read()
    except (UnicodeError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from None
    if END in text:
        text = END.join(hold_out([story for part in text.split(END) if (story := part.strip())])[0 if calibrate else 1])

    def encode(part: str) -> list[int]:
        end = [tokenizer.specials[END]] if END in tokenizer.specials else []
        return [token for story in part.split(END) for token in (*tokenizer.prompt(story.strip()), *end)] if END in part else tokenizer.prompt(part)

    size = 8 * length                                                           # characters: about twice what so many tokens take
    if calibrate:
        found = [torch.tensor(encode(text[len(text) * i // count:][:size]))[:length] for i in range(count)]
    else:
        found = list(torch.tensor(encode(text[:size * count])).split(length))[:count]
    if not (found := [piece for piece in found if len(piece) > 1]):
        raise ValueError(f"{file} holds no text: at least two tokens are needed")
    return found


# ---- The command line -----------------------------------------------------------------------------------------------------------

def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser("quant.py", "Store a model's weights in 8 or 4 bits.")
    p.add_argument("name", help="the model: an alias, a Hub id or a folder")
    p.add_argument("--bits", type=int, default=8, choices=[8, 4], help="of the layers' weights (8)")
    p.add_argument("--method", default="rtn", choices=["rtn", "gptq", "awq", "awq+gptq"], help="round to nearest (rtn, the default), or calibrated on --data")
    p.add_argument("--group", type=int, default=128, choices=[32, 64, 128], help="numbers that share a scale where there are 4 bits (128)")
    p.add_argument("--head-bits", type=int, default=8, choices=[16, 8, 4], help="of the embedding and the head (8)")
    p.add_argument("--data", metavar="FILE", help="text to calibrate with: all but rtn need it")
    p.add_argument("--pieces", type=int, default=32, metavar="N", help="calibrate with N pieces of 512 tokens from all over it (32)")
    p.add_argument("--out", metavar="DIR", help="the new folder")
    p.add_argument("--table", metavar="FILE", help="write nothing; print the perplexity of this text with all widths of weights, keys and values, methods and groups")
    p.add_argument("--tokens", type=int, default=8192, metavar="N", help="of it, the first N tokens (8192)")
    p.add_argument("--device", metavar="NAME", help="default: a GPU if there is one")
    return p.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    how = Quantization(args.bits, args.group, args.head_bits, args.method)
    for flag, value, least, most in (("pieces", args.pieces, 1, 2**16), ("tokens", args.tokens, 2, 2**31)):
        if not least <= value <= most:
            raise ValueError(f"--{flag} is {value}: it must be at least {least} and at most {most:,}")
    if (args.out is None) == (args.table is None):
        raise ValueError("give either --out, the folder to write, or --table, a text to measure on")
    if how.method != "rtn" and args.data is None and args.table is None:
        raise ValueError(f"--method {how.method} looks at text: give some with --data FILE")
    source, device = find(args.name), check_device(args.device)
    Config.load(source).quantized(how)                                          # or it is refused now
    calibration = pieces(args.data, Tokenizer.load(source), 512, args.pieces, calibrate=True) if args.data else []
    if args.table is not None:
        length = min(1024, Config.load(source).max_position_embeddings)
        texts = pieces(args.table, Tokenizer.load(source), length, -(-args.tokens // length))
        methods = ("rtn", "awq", "gptq", "awq+gptq") if calibration else ("rtn",)
        perplexity.table(args.name, texts, calibration, perplexity.recipes(methods, head_bits=args.head_bits), device)
        return
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not an empty folder: give a new one")
    out.mkdir(parents=True, exist_ok=True)                                      # or it is refused now
    try:
        llama = quantized(source, how, calibration, device)
        save(llama, source, out)
    except BaseException:                                                       # half a folder is no model
        shutil.rmtree(out, ignore_errors=True)
        raise
    say(f"{out} holds the model in {size(llama):,} bytes; python generate.py --target {out}")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    return status(lambda: run(parse(arguments)) if arguments else perplexity.main(), SafetensorError)
