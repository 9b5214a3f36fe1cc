"""Before one rents a machine: what a model will need on GPUs that are not here, and how many tokens
a second they can make.

    python bench.py --plan 70B --gpu H200 --gpus 4 --bits 4 --kv-bits 8 --context 8192

Bytes are those of the project's own model without numbers, matrix by matrix, scales included. A
step takes as long as the slower of two things, reading and computing (the *roofline*):

    seconds = max(bytes read / bandwidth, operations / rate)

    bytes read    the weights, and the keys and values of all texts in the step
    operations    2 for each weight and token; in each layer 4 · H · D for each token, and each
                  that it looks back at

So no program on these GPUs is faster.

Not covered: prompts, all-reduces, launches of kernels, products in 8 bits, prefix caching,
speculation.

    H query heads · D head size
"""

import argparse
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from app.shell import number_or_word
from checkpoint.config import Config
from checkpoint.gguf_model import GGUFCheckpoint, read_gguf_config
from checkpoint.hub import EMBEDDED, find_model, is_gguf
from checkpoint.load import in_bits
from checkpoint.weights import weight_bytes
from errors import UserError
from kernels import Ops
from kvcache import KVSpec
from measure.gpu_parts import SHAPES
from measure.report import Section, format_bytes, markdown
from model import Llama
from paged import BLOCK_SIZE
from quant import widths

LLAMA3 = dict(
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
MODELS = {  # as their makers publish them
    "1B": SHAPES["1B"],
    "3B": Config(128256, 3072, 8192, 28, 24, 8, 128, **LLAMA3, tie_word_embeddings=True),
    "8B": SHAPES["8B"],
    "70B": Config(128256, 8192, 28672, 80, 64, 8, 128, **LLAMA3),
}


class DataSheet(NamedTuple):
    memory: float  # GB
    bandwidth: float  # GB/s
    bf16: float  # dense, 10^12 operations a second


# NVIDIA's data sheets; of the RTX cards its architecture white papers, with sums in float32. Rates
# are without sparsity: data sheets often print twice as much.
GPUS = {
    "RTX3060": DataSheet(12, 360, 25),
    "RTX3090": DataSheet(24, 936, 71),
    "RTX4090": DataSheet(24, 1008, 165),
    "RTX5090": DataSheet(32, 1792, 210),
    "A10": DataSheet(24, 600, 125),
    "L4": DataSheet(24, 300, 121),
    "L40S": DataSheet(48, 864, 362),
    "A100-40GB": DataSheet(40, 1555, 312),
    "A100-80GB": DataSheet(80, 2039, 312),
    "H100": DataSheet(80, 3350, 989),
    "H200": DataSheet(141, 4800, 989),
    "B200": DataSheet(180, 8000, 2250),
}
MEMORY = re.compile(r"(<!-- memory of models -->\n).*?(<!-- end of memory -->)", re.DOTALL)
KV_SHARE = 0.8  # of the memory beside the weights, as generate.py takes it


def find_config(name: str) -> Config:
    """A model's shape: of `MODELS`, or a folder's or a GGUF's own. Nothing is downloaded."""
    if name in MODELS:
        return MODELS[name]
    if name not in EMBEDDED and not Path(name).expanduser().exists():
        names = ", ".join(MODELS)
        raise UserError(
            f"{name} is neither {names} nor a folder, and a plan downloads nothing: name a "
            "folder that holds the model's config.json"
        )
    path = find_model(name)
    return read_gguf_config(GGUFCheckpoint(path)) if is_gguf(path) else Config.load(path)


def without_numbers(config: Config) -> Llama:
    return Llama(config, "meta", torch.bfloat16, seed=None)


def stored_bytes(config: Config, tokens: int, kv_bits: str, dtype: torch.dtype) -> int:
    """Keys and values of so many tokens."""
    return KVSpec.of(config, dtype, widths(kv_bits)).bytes(tokens)


# ---- Bytes and seconds ---------------------------------------------------------------------------


class Plan:
    """A model on n GPUs; a text has `context` tokens, prompt and answer. UserError if so many
    cannot share the model, or it does not fit."""

    def __init__(self, name: str, config: Config, gpu: str, n: int, kv_bits: str, context: int):
        most = config.max_position_embeddings
        if not 0 < context <= most:
            raise UserError(f"--context is {context}: {name} has texts of 1 to {most} tokens")
        self.gpu = GPUS[gpu]
        self.kv_bits = kv_bits
        self.context = context
        self.shard = without_numbers(config.shard(n))
        self.weight_bytes = weight_bytes(self.shard)
        blocks = math.ceil(context / BLOCK_SIZE)
        spec = self.shard.kv_spec(widths(kv_bits))
        self.text_bytes = spec.bytes(blocks * BLOCK_SIZE)
        self.kv_memory = KV_SHARE * (1e9 * self.gpu.memory - self.weight_bytes)
        self.num_texts = int(self.kv_memory // self.text_bytes)  # that the caches hold at a time
        if self.num_texts <= 0:
            raise UserError(
                f"{name} does not fit on {n} x {gpu}: on each, its weights take "
                f"{format_bytes(self.weight_bytes)} of {self.gpu.memory} GB, and a sequence of "
                f"{context:,} tokens takes {format_bytes(self.text_bytes)} of {KV_SHARE:.0%} of "
                "the rest: take fewer --bits, more --gpus, a larger --gpu, or a smaller model"
            )

    def decode_seconds(self, num_texts: int) -> float:
        """By the roofline, a step that makes a token of each text; each has `context` tokens."""
        c = self.shard.config
        plain = without_numbers(replace(c, quantization=None))
        num_weights = weight_bytes(plain, read=True) // plain.dtype.itemsize
        tokens = num_texts * self.context
        read = weight_bytes(self.shard, read=True)
        read += stored_bytes(c, tokens, self.kv_bits, self.shard.dtype)
        operations = 2 * num_weights * num_texts + 4 * c.query_size * c.num_hidden_layers * tokens
        return max(read / (1e9 * self.gpu.bandwidth), operations / (1e12 * self.gpu.bf16))


# ---- The tables ----------------------------------------------------------------------------------


def add_plan_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--plan", metavar="NAME", help="1B, 3B, 8B, 70B, or a model's folder; on --gpu")
    p.add_argument("--gpus", type=int, default=1, help="that share the model (default 1)")
    p.add_argument("--bits", type=number_or_word, default=16, help="of weights: 16, 8, 4, fp8, nf4")
    p.add_argument("--kv-bits", default="16", help="of keys and values: 16, 8, 8/4, 4")
    p.add_argument(
        "--context", type=int, default=4096, help="tokens of a text, with its prompt (default 4096)"
    )


def plan_section(args: argparse.Namespace) -> Section:
    """The plan of these flags. UserError for a plan that is impossible."""
    if args.gpus < 1:
        raise UserError(f"--gpus is {args.gpus}: it must be at least 1")
    config = in_bits(find_config(args.plan), args.bits)
    plan = Plan(
        args.plan, config, args.gpu, n=args.gpus, kv_bits=args.kv_bits, context=args.context
    )
    token = stored_bytes(plan.shard.config, 1, plan.kv_bits, plan.shard.dtype)
    count = min(plan.num_texts, Ops.step_budget)
    rows = [
        ["weights on each GPU", format_bytes(plan.weight_bytes)],
        ["keys and values of a token", format_bytes(token)],
        [f"of a text of {plan.context:,} tokens", format_bytes(plan.text_bytes)],
        [f"memory for {plan.num_texts:,} such texts", format_bytes(plan.kv_memory)],
        ["tokens/s of one text, at most", f"{1 / plan.decode_seconds(1):,.0f}"],
        [f"of {count} texts", f"{count / plan.decode_seconds(count):,.0f}"],
    ]
    title = f"{args.plan} on {args.gpus} x {args.gpu}, by the roofline"
    sheet = f"{plan.gpu.memory} GB, {plan.gpu.bandwidth:,} GB/s, {plan.gpu.bf16} TFLOP/s"
    return Section(title, ("on each", sheet), rows)


def memory_section() -> Section:
    """What the published models take: weights in 16, 8 and 4 bits, a cache of 8,192 tokens. (A
    CPU's is in 32 bits, unless it is told otherwise.)"""
    caches = (("16", torch.float32), ("16", torch.bfloat16), ("8", torch.bfloat16))
    rows = []
    for name, config in MODELS.items():
        cells = [name]
        for bits in (16, 8, 4):
            cells.append(format_bytes(weight_bytes(without_numbers(in_bits(config, bits)))))
        for kv_bits, dtype in caches:
            cells.append(format_bytes(stored_bytes(config, 8192, kv_bits, dtype)))
        rows.append(cells)
    weights = ("weights, 16 bits", "8 bits", "4 bits")
    headers = ("Llama 3", *weights, "8,192 tokens, 32 bits", "16 bits", "8 bits")
    return Section("Memory", headers, rows)


def with_memory(document: str) -> str:
    """The document with its table of memory made anew."""
    table = markdown(memory_section()).partition("\n\n")[2]
    return MEMORY.sub(lambda found: found[1] + table + found[2], document)
