"""The peers: Hugging Face transformers and llama.cpp, with the same prompts and weights, in turns.

    python bench.py --against transformers --target NAME
    python bench.py --against llama.cpp --target NAME --gguf FILE      NAME's weights in its format

All programs read the same tokens and make as many, greedily, with as many threads: short prompts
that are continued, long prompts, and sixteen texts together. A text is timed from its first token
to its last; a ratio is a median. transformers runs in float32, and in bfloat16, too, where the CPU
has instructions for it; ours computes in float32, whatever its weights are. In float32 the same
weights give the same tokens, up to near-ties: a wrongly configured peer is noticed.

Invariant: a peer that is not installed is named, with the way to get it.
Not covered: peers' own speculation.
"""

import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from app.shell import say
from checkpoint.config import Config
from checkpoint.hub import find_folder
from checkpoint.save import copy_files, save_model
from checkpoint.weights import weight_bytes
from errors import UserError
from loading import Model
from measure.clock import in_turns, ratio, read_bandwidth
from measure.machine import has_bfloat16
from measure.serving import engine_for, serve
from measure.sizes import Sizes
from measure.steps import PROMPTS, Rows, label
from model import Llama
from quant import Kind
from request import Request, Settings
from tokenizer import Tokenizer

PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}  # -> what is imported
TOGETHER = 16  # texts made together,
TOGETHER_LENGTH = 32  # the tokens of each one's prompt, and as many new ones
Prompts = Sequence[Sequence[int]]


class Made(NamedTuple):
    """Texts that were made together: the first one's tokens, and seconds."""

    tokens: list[int]
    first: float  # until the first token
    total: float

    @property
    def tokens_per_second(self) -> float:
        """After the first token."""
        return (len(self.tokens) - 1) / (self.total - self.first)


class Contestant(NamedTuple):
    """This project, or a peer."""

    name: str
    make: Callable[[Prompts, int], Made]  # prompts of one length, and how many tokens each gets
    bytes: int = 0  # of weights that a token reads; 0 for a peer

    def seconds(self, prompts: Prompts, count: int) -> float:
        return self.make(prompts, count).total


def check_peer(name: str, gguf: str | None) -> None:
    """UserError if this peer cannot run."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise UserError(
            f"{name} is not installed here, so nothing is compared with it: "
            "pip install transformers, or llama_cpp_python"
        )
    if name == "llama.cpp" and gguf is None:
        raise UserError(
            "llama.cpp reads a format of its own: --gguf FILE, made of --target with its "
            "convert_hf_to_gguf.py --outtype q8_0, or its llama-quantize"
        )


# ---- The contestants -----------------------------------------------------------------------------


def ours(target: str | Path, bits: Kind = 16) -> Contestant:
    """Its name tells the width of its weights: bits 16 leaves them in the target's dtype."""
    model = Model.load(target, "cpu", torch.float32, bits)
    dtype = str(model.llama.weight_dtype).removeprefix("torch.")
    name = dtype if bits == 16 else f"INT{bits}"

    def make(prompts: Prompts, count: int) -> Made:
        settings = Settings(temperature=0.0, seed=0, max_tokens=count)
        requests = [Request(prompt, settings) for prompt in prompts]
        served = serve(engine_for(model, None, requests), requests)
        return Made(served.texts[0], served.first_token[0], served.seconds)

    return Contestant(name, make, weight_bytes(model.llama, read=True))


def our_widths(target: str) -> list[Contestant]:
    """The target as it is stored, and copies of it in bfloat16, INT8 and INT4."""
    with TemporaryDirectory() as folder:
        in_bfloat16 = Path(folder)
        save_model(Llama.load(target, "cpu", torch.float32, trainable=True), in_bfloat16)
        copy_files(find_folder(target), in_bfloat16)
        widths = [ours(target), ours(in_bfloat16), ours(target, 8), ours(target, 4)]
    return list({one.name: one for one in widths}.values())  # the first two may be alike


def transformers_dtypes() -> list[str]:
    """float32, and bfloat16 if it may be faster: that depends on the work."""
    if has_bfloat16():
        return ["float32", "bfloat16"]
    say("transformers runs only in float32: this CPU has no instructions for bfloat16")
    return ["float32"]


def transformers(target: str, dtype: str) -> Contestant:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(find_folder(target), dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # no text stops early
    return Contestant(f"transformers {dtype}", partial(transformers_text, model))


def transformers_text(model: Any, prompts: Prompts, count: int) -> Made:
    """Texts by transformers' `generate`."""
    tokens = torch.tensor(prompts, device=model.device)
    times: list[float] = []  # when it gets the prompt, and each token
    streamer = SimpleNamespace(
        put=lambda value: times.append(time.perf_counter()), end=lambda: None
    )
    texts = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
    )
    new_tokens = texts[0, len(prompts[0]) :].tolist()
    return Made(new_tokens, times[1] - times[0], times[-1] - times[0])


def llama_cpp(gguf: str) -> Contestant:
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    model = Llama(gguf, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def make(prompts: Prompts, count: int) -> Made:
        model.reset()
        tokens = []
        times = []
        start = time.perf_counter()
        generator = model.generate(list(prompts[0]), temp=0.0, repeat_penalty=1.0)
        for token in islice(generator, count):
            tokens.append(int(token))
            times.append(time.perf_counter() - start)
        return Made(tokens, times[0], times[-1])

    return Contestant(f"llama.cpp {stored_width(gguf)}", make)


def stored_width(gguf: str) -> str:
    """Of a GGUF, by its name: q8_0, say."""
    return Path(gguf).stem.lower().replace("-", ".").split(".")[-1]


# ---- The comparison ------------------------------------------------------------------------------


@torch.inference_mode()
def against(name: str, target: str, gguf: str | None, sizes: Sizes) -> Rows:
    """Our widths, and what we read in the peer's file, beside the peer in each of its dtypes -> a
    row for each pair. UserError if the peer cannot run."""
    check_peer(name, gguf)
    tokenizer = Tokenizer.load(find_folder(target))
    openings = [tokenizer.prompt(opening) for opening in sizes.openings]
    widths = our_widths(target)
    if gguf is None:
        rivals = [transformers(target, dtype) for dtype in transformers_dtypes()]
    else:
        rivals = [llama_cpp(gguf)]
        widths.append(ours(gguf)._replace(name=f"GGUF {stored_width(gguf)}"))
    everyone = [*rivals, *widths]
    for one in everyone:
        one.make(openings[:1], 2)  # warms up

    roofs = []
    texts = []  # of each opening, what everyone made
    for opening in openings:
        roofs.append(read_bandwidth())
        made = [one.make([opening], sizes.num_tokens // 2) for one in everyone]
        texts.append(dict(zip(everyone, made)))
    totals = {}  # of long work: everyone's seconds in each turn
    for key, prompts, count in long_work(rivals[0], Config.load(find_folder(target))):
        runs = [partial(one.seconds, prompts, count) for one in everyone]
        totals[key] = dict(zip(everyone, in_turns(runs, sizes.turns)))
    rows = {}
    for peer, one in product(rivals, widths):
        turns = [(text[peer], text[one]) for text in texts]
        row = {"target": label(target)} | compare_texts(one, peer, turns, roofs)
        for key, seconds in totals.items():
            row[key] = ratio(seconds[peer], seconds[one])
        rows[f"{label(target)}, {one.name}, {peer.name}"] = row
    return rows


def long_work(peer: Contestant, config: Config) -> Iterator[tuple[str, Prompts, int]]:
    """Long prompts, of which a token is wanted; and texts together, if the peer can."""
    generators = map(random.Random, range(TOGETHER))
    texts = [generator.choices(range(250), k=TOGETHER_LENGTH) for generator in generators]
    for n in PROMPTS:
        if n < config.max_position_embeddings:
            yield f"prompt{n}", [(texts[0] * n)[:n]], 1
    if not peer.name.startswith("llama.cpp"):
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
