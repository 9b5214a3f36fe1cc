"""INT8 and INT4 numbers: fewer bytes for the same weights, keys and values.

A decoding step takes as long as reading the weights takes, and a cache fills the memory that is left. So numbers are stored as
small integers on a grid, a grid for each row or group, and become numbers again where they are used:

    x ≈ (q − zero) · scale          8 bits: q in [−127, 127], zero = 0           4 bits: q in [0, 15], two in a byte

    |x − (q − zero) · scale| ≤ scale / 2        scale = max|x| / 127     or      (max x − min x) / 15,   zero = −round(min x / scale)

Zero is a whole number, so the grid is {k · scale} for whole k and 4 bits are sixteen neighbours of it, wherever they
lie: groups far from 0 lose nothing. Scales of 16 bits are rounded *up* before q is computed with them (rounded down, max x
would not be reached any more). A scale is at least 1e-30: all-zero groups are exact, and nothing is ever divided by 0.

  - Weights: 8 bits have a scale for each row of W; 4 bits a scale and a zero for each group of 32, 64 or 128 numbers of a
    row, the last of which may be short. Bytes of W [N, K]: N (K + 2), or N (K / 2 + 4 ⌈K / group⌉). INT4 is a quarter of 16 bits, *plus scales*.
  - Keys and values: a scale (and a zero) for each token and head, as they come; 4-bit keys have one for each group of 16
    numbers (kvquant.py), and their zeros count quarters of a step. From a whole zero a group's largest and smallest
    number, which a key hangs on, can be half a step off: that costs nearly twice the perplexity (SmolLM2: 4 %, not 2 %).

`python quant.py NAME --bits 4 --method gptq --data FILE --out DIR` writes a smaller model folder (calibrate.py has GPTQ and AWQ,
quantmatmul.py the products, weightonly.py those of a GPU); `--table` measures all of them (perplexity.py); with no flags it shows what the bits
cost on the embedded model.

Not covered: NF4, FP8, quantized activations (SmoothQuant).

Frantar et al. 2023, GPTQ (arXiv:2210.17323); Lin et al. 2023, AWQ (2306.00978).

    N rows of W, out_features · K columns, in_features · M = ⌈K / group⌉ groups of a row · D head size
"""
from shell import begin

begin(__name__)                                         # what follows takes its time: a signal ends it in silence

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shell import Parser, say, status

if TYPE_CHECKING:
    from config import Quantization
    from model import Llama
    from tokenizer import Tokenizer

TINY = 1e-30                                            # the smallest scale: what is smaller counts as 0
FAR = 2000                                              # steps from 0 at most, so that float32 still tells a step's thousandth
PARTS = 4                                               # of a step, which the zeros of a vector's groups count
SLAB = 1 << 22                                          # numbers that are quantized at a time
MOST8, MOST4 = 2.679e36, 4.851e37                       # scales so large that 127 (7) steps just stay below float32's largest number


# ---- Grids and numbers ----------------------------------------------------------------------------------------------------------

def round_up(x: Tensor) -> Tensor:
    """The next bfloat16 that is not below x ≥ 0, a float32."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def grid8(x: Tensor) -> Tensor:
    """The scale of symmetric 8-bit numbers over the last dimension: bfloat16[..., 1]."""
    return round_up((x.abs().amax(-1, keepdim=True).float() / 127).clamp_(TINY, MOST8))


def groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., M, group], the last group filled up with its last number, which changes no grid."""
    if short := -x.shape[-1] % group:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), -1)
    return x.unflatten(-1, (-1, group))


def spread(x: Tensor, group: int | None, columns: int) -> Tensor:
    """One for each group [..., M] -> one for each column [..., K], or one for all of them."""
    return x if x.shape[-1] == 1 else x.repeat_interleave(group, -1)[..., :columns]


def grid4(x: Tensor, group: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Grids of groups of 4-bit numbers [..., K]: scale, bfloat16[..., M]; zero, in parts of a step, int16[..., M]."""
    low, high = (edge.float() for edge in torch.aminmax(groups(x, group), dim=-1))
    far = torch.maximum(high, -low)
    scale = torch.maximum(high / 15 - low / 15, far / FAR).clamp_(min=TINY).masked_fill_(far > 1e38, MOST4)
    scale = round_up(scale)
    return scale, (-(low / scale * parts).round_()).to(torch.int16)


def pack4(q: Tensor) -> Tensor:
    """Two numbers below 16 in a byte, the first in its lower half: uint8[..., K] -> uint8[..., ⌈K / 2⌉]."""
    q = F.pad(q, (0, q.shape[-1] % 2))
    return q[..., ::2] | q[..., 1::2] << 4


def unpack4(packed: Tensor) -> Tensor:
    """uint8[..., J] -> uint8[..., 2 J]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values [..., D] -> int8[..., D] and a scale for each vector, bfloat16[..., 1]."""
    scale = grid8(x)
    return (x.float() / scale).round_().to(torch.int8), scale


def int4(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values [..., D] -> packed, uint8[..., D / 2]; scale, bfloat16[..., M]; zero, int16[..., M].

    group: numbers that share a scale, None for all of a vector. Zeros of several groups are in PARTS of a step, which
    numbers up to 1e38 can have.
    """
    D = x.shape[-1]
    parts = PARTS if D > (group or D) else 1
    scale, zero = grid4(x, group or D, parts)
    q = (x.float() / spread(scale, group, D)).add_(spread(zero, group, D) / parts).round_().clamp_(0, 15)
    return pack4(q.to(torch.uint8)), scale, zero


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (values * scale.float()).to(dtype)


def from_int4(packed: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype = torch.float32,
              group: int | None = None) -> Tensor:
    zero = zero / (PARTS if zero.shape[-1] > 1 else 1)
    scale, zero = (spread(x, group, 2 * packed.shape[-1]) for x in (scale.float(), zero))
    return ((unpack4(packed) - zero) * scale).to(dtype)


# ---- Weights --------------------------------------------------------------------------------------------------------------------

class Quantized(NamedTuple):
    """A matrix W [N, K] in 8 or 4 bits. `dequantize(*q)` makes numbers of it again."""
    values: Tensor                                      # int8[N, K]       or uint8[N, ⌈K / 2⌉], two numbers a byte
    scale: Tensor                                       # bfloat16[N, 1]   or bfloat16[N, M]
    zero: Tensor | None                                 # None             or int16[N, M]
    columns: int                                        # K, which half a byte does not tell
    group: int                                          # columns that share a scale


def check(bits: int, group: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits!r}: weights are stored in 8 or 4")
    if group < 1:
        raise ValueError(f"group is {group}: at least one number must share a scale")


def round4(w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """W: [N, K] -> the nearest numbers of their grids, uint8[N, ⌈K / 2⌉], scale and zero."""
    (scale, zero), K = grid4(w, group), w.shape[1]
    q = (w.float() / spread(scale, group, K)).round_().add_(spread(zero, group, K)).clamp_(0, 15)
    return pack4(q.to(torch.uint8)), scale, zero


@torch.no_grad()
def quantize(w: Tensor, bits: int, group: int = 128) -> Quantized:
    """W: float[N, K], rounded to the nearest. 8 bits have a scale for each row, whatever `group`. ValueError for numbers that are none."""
    check(bits, group)
    if w.ndim != 2 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"a weight of {w.dtype} {list(w.shape)} cannot be quantized: it must be a matrix of floating-point numbers")
    columns, parts = w.shape[1], []
    for rows in w.split(max(1, SLAB // columns)):                               # a few at a time: what is in between takes several times their room
        if not rows.isfinite().all():
            raise ValueError(f"a weight of {list(w.shape)} cannot be quantized: it holds numbers that are not finite")
        parts.append(int8(rows) if bits == 8 else round4(rows, group))
    values, scale, *zero = (torch.cat(part) for part in zip(*parts))
    return Quantized(values, scale, zero[0] if zero else None, columns, columns if bits == 8 else group)


def dequantize(values: Tensor, scale: Tensor, zero: Tensor | None, columns: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that a quantized matrix stands for: float[N, K]."""
    if zero is None:
        return from_int8(values, scale, dtype)
    return ((unpack4(values)[:, :columns] - spread(zero, group, columns)) * spread(scale.float(), group, columns)).to(dtype)


# ---- Folders --------------------------------------------------------------------------------------------------------------------

COPIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def quantized(name: str | Path, how: "Quantization | None", texts: Sequence[Tensor] = (), device: str | None = None,
              dtype: torch.dtype | None = None, progress: Callable[[str], None] = say) -> "Llama":
    """The model of this name, quantized layer by layer; not packed."""
    from calibrate import quantize_model
    from model import Llama
    llama = Llama.load(name, device, dtype, trainable=True).requires_grad_(False)
    return llama if how is None else quantize_model(llama, how, texts, progress)


def save(llama: "Llama", source: Path, out: Path) -> None:
    """A quantized model's folder: what is not quantized in the dtype that it had in `source`, whose other files are copied."""
    from safetensors.torch import save_file
    from vocabulary import read_json
    from weights import Checkpoint
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


def size(llama: "Llama") -> int:
    """Bytes of all weights, scales included, what is not quantized in 16 bits; embedding and head once if they are tied."""
    whole = {place.dtype for place in llama.places().values() if not place.is_floating_point()}
    return sum(place.nbytes if place.dtype in whole or name.endswith("_scale") else 2 * place.numel() for name, place in llama.places().items())


def pieces(file: str, tokenizer: "Tokenizer", length: int, count: int, calibrate: bool = False) -> list[Tensor]:
    """Up to `count` pieces of up to `length` tokens of a text (.xz too): its beginning, or, to calibrate with, from all over it.

    Of a file of stories (stories.py): the beginning of those that are held out; to calibrate with, the others.
    """
    import lzma
    from bpe import END
    from stories import hold_out
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
    from config import Config, Quantization
    from engine import check_device
    from perplexity import recipes, table
    from tokenizer import Tokenizer
    from weights import find
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
        table(args.name, texts, calibration, recipes(("rtn", "awq", "gptq", "awq+gptq") if calibration else ("rtn",), head_bits=args.head_bits), device)
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
    from safetensors import SafetensorError
    arguments = sys.argv[1:] if arguments is None else arguments

    def demonstration() -> None:
        from perplexity import main as show
        show()
    return status(lambda: run(parse(arguments)) if arguments else demonstration(), SafetensorError)


if __name__ == "__main__":
    sys.exit(main())
