"""Before one rents a machine: what a model will need and do on GPUs that are not here.

    python bench.py --plan 70B --gpu H200 --gpus 4 --bits 4 --kv-bits 8 --context 8192

Bytes are those of the project's own model without numbers, matrix by matrix, scales included. A
step takes as long as the slower of two things, reading and computing (the *roofline*), and then as
long as its all-reduces:

    seconds = max(bytes read / bandwidth, operations / rate) + all-reduces

    bytes read    the weights, and the keys and values of all texts in the step
    operations    2 for each weight and token; 4 · H · D for each query and key that meet
    all-reduces   2 (n − 1) / n of their bytes over the link, and a latency each

On one GPU no program is faster than that. How near ours comes is known where results/ has the GPU:
its row of `python bench.py --gpu decode` scales the tokens a second.

Not covered: launches of kernels, speculation, prefix caching, several machines (whose link is
slower), programs beside this one on the GPU.

    n processes, a GPU each · H query heads · D head size
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
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
from paged import BLOCK_SIZE
from parallel import shard_config, traffic
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
    fp8: float  # the same; 0: none
    int8: float
    link: float  # GB/s to other GPUs, one way


PCIE4 = 32
PCIE5 = 64
# NVIDIA's data sheets; of the RTX cards its architecture white papers, with sums in float32. Rates
# are without sparsity: data sheets often print twice as much. Links: NVLink, or PCIe of 16 lanes.
GPUS = {
    "RTX3060": DataSheet(12, 360, 25, 0, 102, PCIE4),
    "RTX3090": DataSheet(24, 936, 71, 0, 284, PCIE4),
    "RTX4090": DataSheet(24, 1008, 165, 330, 661, PCIE4),
    "RTX5090": DataSheet(32, 1792, 210, 419, 838, PCIE5),
    "A10": DataSheet(24, 600, 125, 0, 250, PCIE4),
    "L4": DataSheet(24, 300, 121, 242, 242, PCIE4),
    "L40S": DataSheet(48, 864, 362, 733, 733, PCIE4),
    "A100-40GB": DataSheet(40, 1555, 312, 0, 624, 300),
    "A100-80GB": DataSheet(80, 2039, 312, 0, 624, 300),
    "H100": DataSheet(80, 3350, 989, 1979, 1979, 450),
    "H200": DataSheet(141, 4800, 989, 1979, 1979, 450),
    "B200": DataSheet(180, 8000, 2250, 4500, 4500, 900),
}
MEMORY = re.compile(r"(<!-- memory of models -->\n).*?(<!-- end of memory -->)", re.DOTALL)
KV_SHARE = 0.8  # of the memory beside the weights, as generate.py takes it
PCIE_LATENCY = 20e-6  # seconds of an all-reduce of nothing: assumed, as is usual
NVLINK_LATENCY = 10e-6
MOST_GPUS = 64  # that are proposed


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

    def stored_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens on each GPU."""
        return self.shard.kv_spec(widths(self.kv_bits)).bytes(tokens)

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

    @property
    def num_all_reduces(self) -> int:
        """Of a step: one for the embedding, two a layer."""
        return 2 * self.config.num_hidden_layers + 1 if self.n > 1 else 0

    @property
    def latency(self) -> float:
        """Seconds that each all-reduce takes, however small it is."""
        return PCIE_LATENCY if self.gpu.link <= PCIE5 else NVLINK_LATENCY

    @property
    def product_rate(self) -> float:
        """Operations a second of products with weights."""
        layout = self.config.quantization
        rate = self.gpu.bf16
        if layout is not None and layout.activations == 8:
            rate = (self.gpu.fp8 if layout.bits == "fp8" else self.gpu.int8) or rate
        return 1e12 * rate

    def link_seconds(self, tokens: int, num_logits: int) -> float:
        """What all-reduces, and gathering the logits, add to a step of so many tokens."""
        if self.n == 1:
            return 0.0
        reduced, gathered = traffic(self.config, self.n, self.shard.dtype.itemsize)
        sent = 2 * (self.n - 1) / self.n * reduced * tokens
        sent += (self.n - 1) * gathered * num_logits
        return self.num_all_reduces * self.latency + sent / (1e9 * self.gpu.link)

    def step_seconds(self, tokens: int, stored: int, pairs: int, num_logits: int) -> float:
        """A step of new tokens that reads `stored` tokens' keys and values; in `pairs` a query and
        a key meet. By the roofline, and all-reduces."""
        c = self.shard.config
        read = weight_bytes(self.shard, read=True) + self.stored_bytes(stored)
        head = c.vocab_size * c.hidden_size
        products = 2 * ((self.num_weights - head) * tokens + head * num_logits)
        attention = 4 * c.query_size * c.num_hidden_layers * pairs
        computing = products / self.product_rate + attention / (1e12 * self.gpu.bf16)
        reading = read / (1e9 * self.gpu.bandwidth)
        return max(reading, computing) + self.link_seconds(tokens, num_logits)

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


def without_numbers(config: Config) -> Llama:
    return Llama(config, "meta", torch.bfloat16, seed=None)


# ---- What does not fit ---------------------------------------------------------------------------


def check_plan(plan: Plan) -> None:
    """UserError with the way out if the weights, or one text beside them, do not fit."""
    most = plan.config.max_position_embeddings
    if not 0 < plan.context <= most:
        raise UserError(f"--context is {plan.context}: {plan.name} has texts of 1 to {most} tokens")
    if plan.num_texts > 0:
        return
    ways = [way for way in (fewer_bits(plan), more_gpus(plan)) if way]
    ways.append("a larger --gpu, or a smaller model")
    weights = format_bytes(weight_bytes(plan.shard))
    raise UserError(
        f"{plan.name} does not fit on {plan.n} x {plan.gpu_name}: on each, its weights take "
        f"{weights} of {plan.gpu.memory} GB, and a text of {plan.context:,} tokens takes "
        f"{format_bytes(plan.text_bytes)} of {KV_SHARE:.0%} of the rest: take {'; or '.join(ways)}"
    )


def fewer_bits(plan: Plan) -> str:
    """The flag with which it fits on these GPUs; empty if there is none."""
    if plan.config.quantization is None:
        for bits in (8, 4):
            if replace(plan, config=in_bits(plan.config, bits)).num_texts > 0:
                return f"--bits {bits}"
    return ""


def more_gpus(plan: Plan) -> str:
    """The flag with which it fits in these bits; empty if no number of GPUs does."""
    n = 2 * plan.n
    while n <= MOST_GPUS:
        try:
            if replace(plan, n=n).num_texts > 0:
                return f"--gpus {n}"
        except UserError:  # so many cannot share the model
            return ""
        n *= 2
    return ""


def in_bits(config: Config, bits: Kind) -> Config:
    """As `--bits` rounds the weights of a model while loading them."""
    if bits == 16:
        return config
    return config.quantized(Quantization(bits))


# ---- What was measured ---------------------------------------------------------------------------


def measured_share(plan: Plan, folder: Path) -> float | None:
    """The share of the data sheet's bandwidth at which `--gpu decode` read weights in these bits on
    this GPU: of 1B for 1B, else of 8B. None if results/ has none."""
    layout = plan.config.quantization
    way = "16 bits" if layout is None else layout.name
    shape = "1B" if plan.name == "1B" else "8B"
    for file in sorted(folder.glob("*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        if not is_of(plan.gpu_name, results["machine"]):
            continue
        for name, _, share, *_ in results.get("gpu", {}).get("decode", {}).get("rows", []):
            if name == f"{shape}, {way}" and share:  # an error leaves it empty
                bandwidth = results["read_bandwidth"] / (1e9 * plan.gpu.bandwidth)
                return float(share.rstrip("%")) / 100 * bandwidth
    return None


def is_of(gpu_name: str, machine: str) -> bool:
    """Whether the driver's name of a machine is this GPU's: NVIDIA A100-SXM4-80GB, A100-80GB."""
    words = re.findall(r"\w+", machine.replace("RTX ", "RTX"))
    is_other = {"Ti", "SUPER", "Laptop"} & {*words}
    return {*gpu_name.split("-")} <= {*words} and not is_other


# ---- The tables ----------------------------------------------------------------------------------


def add_plan_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--plan", metavar="NAME", help="1B, 3B, 8B, 70B, or a model's folder; on --gpu")
    p.add_argument("--gpus", type=int, default=1, help="that share the model (default 1)")
    p.add_argument("--bits", type=number_or_word, default=16, help="of weights: 16, 8, 4, fp8, nf4")
    p.add_argument("--kv-bits", default="16", help="of keys and values: 16, 8, 8/4, 4")
    p.add_argument(
        "--context", type=int, default=4096, help="tokens of a text, with its prompt (default 4096)"
    )


def plan_sections(args: argparse.Namespace, folder: Path) -> list[Section]:
    """The plan of these flags. folder: results/. UserError for a plan that is impossible."""
    if args.gpus < 1:
        raise UserError(f"--gpus is {args.gpus}: it must be at least 1")
    config = in_bits(find_config(args.plan), args.bits)
    plan = Plan(args.plan, config, args.gpu, args.gpus, args.kv_bits, args.context)
    check_plan(plan)
    return [bytes_section(plan), speed_section(plan, folder)]


def bytes_section(plan: Plan) -> Section:
    on_each = {
        "weights": weight_bytes(plan.shard),
        "keys and values of a token": plan.stored_bytes(1),
        f"of a text of {plan.context:,} tokens": plan.text_bytes,
        f"memory for {plan.num_texts:,} such texts": plan.kv_memory,
    }
    rows = []
    for name, count in on_each.items():
        rows.append([name, format_bytes(plan.n * count), format_bytes(count)])
    title = f"{plan.name} on {plan.n} x {plan.gpu_name}: bytes"
    return Section(title, ("", "in all", f"on each GPU, of {plan.gpu.memory} GB"), rows)


def speed_section(plan: Plan, folder: Path) -> Section:
    """By the roofline, of one text and of a full batch."""
    counts = [1, min(plan.num_texts, STEP_BUDGET)]
    link = [plan.link_seconds(count, count) for count in counts]
    steps = [plan.decode_seconds(count) for count in counts]
    rows = [["tokens/s, at most", *tokens_per_second(counts, steps)]]
    measured = measured_share(plan, folder)
    if measured is not None:
        slower = [(step - sums) / measured + sums for step, sums in zip(steps, link)]
        label = f"tokens/s, where {measured:.0%} of the bandwidth are read, as was measured"
        rows.append([label, *tokens_per_second(counts, slower)])
    if plan.n > 1:
        reduced, _ = traffic(plan.config, plan.n, plan.shard.dtype.itemsize)
        label = f"of a step, {plan.num_all_reduces} all-reduces, {format_bytes(reduced)} a text"
        rows.append([label, *map(format_seconds, link)])
    for length in sorted({min(1024, plan.context), plan.context}):
        seconds = plan.prompt_seconds(length)
        rows.append([f"first token after a prompt of {length:,}", format_seconds(seconds), ""])
    title = f"By the roofline: {plan.gpu.bandwidth:,} GB/s, {plan.gpu.bf16} TFLOPS in bfloat16"
    if plan.n > 1:
        latency = f"{1e6 * plan.latency:.0f} µs"
        title += f", a link of {plan.gpu.link} GB/s; each all-reduce takes {latency}, as assumed"
    return Section(title, ("", "one text", f"{counts[1]} texts"), rows)


def memory_section() -> Section:
    """What the published models take: weights in 16, 8 and 4 bits, a cache of 8,192 tokens. (A
    CPU's is in 32 bits, unless it is told otherwise.)"""
    rows = []
    for name, config in MODELS.items():
        cells = [name]
        for bits in (16, 8, 4):
            cells.append(format_bytes(weight_bytes(without_numbers(in_bits(config, bits)))))
        for kv_bits, dtype in (
            ("16", torch.float32),
            ("16", torch.bfloat16),
            ("8", torch.bfloat16),
        ):
            spec = KVSpec.of(config, dtype, widths(kv_bits))
            cells.append(format_bytes(spec.bytes(8192)))
        rows.append(cells)
    weights = ("weights, 16 bits", "8 bits", "4 bits")
    headers = ("Llama 3", *weights, "8,192 tokens, 32 bits", "16 bits", "8 bits")
    return Section("Memory", headers, rows)


def with_memory(document: str) -> str:
    """The document with its table of memory made anew."""
    table = markdown(memory_section()).partition("\n\n")[2]
    return MEMORY.sub(lambda found: found[1] + table + found[2], document)


def tokens_per_second(counts: Sequence[int], seconds: Sequence[float]) -> list[str]:
    return [f"{count / second:,.0f}" for count, second in zip(counts, seconds)]
