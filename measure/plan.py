"""Before one rents a machine: what a model will need and do on GPUs that are not here.

    python bench.py --plan 70B --gpu H200 --gpus 4 --bits 4 --kv-bits 8 --context 8192

Bytes are those of the project's own model without numbers, matrix by matrix, scales included. A
step takes as long as the slower of two things, reading and computing (the *roofline*):

    seconds = max(bytes read / bandwidth, operations / rate)

    bytes read    the weights, and the keys and values of all texts in the step
    operations    2 for each weight and token; 4 · H · D for each query and key that meet

So no program on these GPUs is faster.

Not covered: all-reduces, launches of kernels, products in 8 bits, speculation, prefix caching.

    H query heads · D head size
"""

import argparse
import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from app.shell import number_or_word
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.gguf_model import GGUFCheckpoint, read_gguf_config
from checkpoint.hub import EMBEDDED, find_model, is_gguf
from errors import UserError
from generate import STEP_BUDGET
from kvcache import KVSpec
from measure.gpu_parts import SHAPES
from measure.report import Section, format_bytes, format_seconds, markdown
from model import Llama, weight_bytes
<<<<<<< HEAD
from paged import BLOCK_SIZE
from parallel import shard_config, traffic
=======
from parallel import shard_config
>>>>>>> 252f438 (A GPU's first minutes: one parent forks a step after the other, kernels are compiled before on all cores, peers take turns; γ has one table; a plan is bytes and the roofline)
from quant import Kind, widths

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
            f"--plan {name} is neither {names} nor a folder, and a plan downloads nothing: name a "
            "folder that holds the model's config.json"
        )
    path = find_model(name)
    return read_gguf_config(GGUFCheckpoint(path)) if is_gguf(path) else Config.load(path)


def in_bits(config: Config, bits: Kind) -> Config:
    """As `--bits` rounds the weights of a model while loading them."""
    if bits == 16:
        return config
    return config.quantized(Quantization(bits))


def without_numbers(config: Config) -> Llama:
    return Llama(config, "meta", torch.bfloat16, seed=None)


def stored_bytes(config: Config, tokens: int, kv_bits: str, dtype: torch.dtype) -> int:
    """Keys and values of so many tokens."""
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, tokens
    return kv_bytes(*shape, dtype, widths(kv_bits))


# ---- Bytes and seconds ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A model on `n` GPUs; a text has `context` tokens, prompt and answer."""

    name: str
    config: Config  # of the whole model
    gpu_name: str
    n: int
    kv_bits: str
    context: int

    @property
    def gpu(self) -> DataSheet:
        return GPUS[self.gpu_name]

    @cached_property
    def shard(self) -> Llama:
        """What each GPU holds, without numbers. UserError if so many cannot share the model."""
        is_shared = self.n > 1
        return without_numbers(shard_config(self.config, self.n) if is_shared else self.config)

    @cached_property
    def num_weights(self) -> int:
        """Weights that a token is multiplied by on each GPU."""
        plain = without_numbers(replace(self.shard.config, quantization=None))
        return weight_bytes(plain, read=True) // plain.dtype.itemsize

<<<<<<< HEAD
    def stored_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens on each GPU."""
        return self.shard.kv_spec(widths(self.kv_bits)).bytes(tokens)

=======
>>>>>>> 252f438 (A GPU's first minutes: one parent forks a step after the other, kernels are compiled before on all cores, peers take turns; γ has one table; a plan is bytes and the roofline)
    @property
    def text_bytes(self) -> int:
        """Keys and values of a text on each GPU, in whole blocks."""
        blocks = math.ceil(self.context / BLOCK_SIZE)
        return self.stored_bytes(blocks * BLOCK_SIZE)

    @property
    def kv_memory(self) -> float:
        """Bytes for keys and values on each GPU; negative if the weights do not fit."""
        return KV_SHARE * (1e9 * self.gpu.memory - weight_bytes(self.shard))

    @property
    def num_texts(self) -> int:
        """Texts that the caches hold at a time."""
        return int(self.kv_memory // self.text_bytes)

    def step_seconds(self, tokens: int, stored: int, pairs: int, num_logits: int) -> float:
        """By the roofline, a step of new tokens that reads `stored` tokens' keys and values; in
        `pairs` a query and a key meet."""
        c = self.shard.config
        read = weight_bytes(self.shard, read=True)
        read += stored_bytes(c, stored, self.kv_bits, self.shard.dtype)
        head = c.vocab_size * c.hidden_size
        products = 2 * ((self.num_weights - head) * tokens + head * num_logits)
        attention = 4 * c.query_size * c.num_hidden_layers * pairs
        computing = (products + attention) / (1e12 * self.gpu.bf16)
        return max(read / (1e9 * self.gpu.bandwidth), computing)

    def decode_seconds(self, num_texts: int) -> float:
        """A step that makes a token of each text; each has `context` tokens."""
        tokens = num_texts * self.context
        return self.step_seconds(num_texts, tokens, tokens, num_texts)

    def prompt_seconds(self, length: int) -> float:
        """Reading a prompt in chunks, as batcher.py does, up to its first token."""
        seconds = 0.0
        for start in range(0, length, STEP_BUDGET):
            stop = min(start + STEP_BUDGET, length)
            pairs = (stop * (stop + 1) - start * (start + 1)) // 2
            seconds += self.step_seconds(stop - start, stop, pairs, int(stop == length))
        return seconds


def check_plan(plan: Plan) -> None:
    """UserError if the weights, or one text beside them, do not fit."""
    most = plan.config.max_position_embeddings
    if not 0 < plan.context <= most:
        raise UserError(f"--context is {plan.context}: {plan.name} has texts of 1 to {most} tokens")
    if plan.num_texts > 0:
        return
    weights = format_bytes(weight_bytes(plan.shard))
    raise UserError(
        f"{plan.name} does not fit on {plan.n} x {plan.gpu_name}: on each, its weights take "
        f"{weights} of {plan.gpu.memory} GB, and a text of {plan.context:,} tokens takes "
        f"{format_bytes(plan.text_bytes)} of {KV_SHARE:.0%} of the rest: take fewer --bits, more "
        "--gpus, a larger --gpu, or a smaller model"
    )


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
    plan = Plan(args.plan, config, args.gpu, args.gpus, args.kv_bits, args.context)
    check_plan(plan)
    token = stored_bytes(plan.shard.config, 1, plan.kv_bits, plan.shard.dtype)
    count = min(plan.num_texts, STEP_BUDGET)
    rows = [
        ["weights on each GPU", format_bytes(weight_bytes(plan.shard))],
        ["keys and values of a token", format_bytes(token)],
        [f"of a text of {plan.context:,} tokens", format_bytes(plan.text_bytes)],
        [f"memory for {plan.num_texts:,} such texts", format_bytes(plan.kv_memory)],
        ["tokens/s of one text, at most", f"{1 / plan.decode_seconds(1):,.0f}"],
        [f"of {count} texts", f"{count / plan.decode_seconds(count):,.0f}"],
    ]
    for length in sorted({min(1024, plan.context), plan.context}):
        seconds = format_seconds(plan.prompt_seconds(length))
        rows.append([f"first token after a prompt of {length:,}, at least", seconds])
    title = f"{plan.name} on {plan.n} x {plan.gpu_name}, by the roofline"
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
<<<<<<< HEAD
        for kv_bits, dtype in (
            ("16", torch.float32),
            ("16", torch.bfloat16),
            ("8", torch.bfloat16),
        ):
            spec = KVSpec.of(config, dtype, widths(kv_bits))
            cells.append(format_bytes(spec.bytes(8192)))
=======
        for kv_bits, dtype in caches:
            cells.append(format_bytes(stored_bytes(config, 8192, kv_bits, dtype)))
>>>>>>> 252f438 (A GPU's first minutes: one parent forks a step after the other, kernels are compiled before on all cores, peers take turns; γ has one table; a plan is bytes and the roofline)
        rows.append(cells)
    weights = ("weights, 16 bits", "8 bits", "4 bits")
    headers = ("Llama 3", *weights, "8,192 tokens, 32 bits", "16 bits", "8 bits")
    return Section("Memory", headers, rows)


def with_memory(document: str) -> str:
    """The document with its table of memory made anew."""
    table = markdown(memory_section()).partition("\n\n")[2]
    return MEMORY.sub(lambda found: found[1] + table + found[2], document)
