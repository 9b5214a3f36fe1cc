"""Measurements of the embedded pair: what each technique gains and costs on this machine.

A claim of speed is a ratio between two things that were measured in one run, in turns, and the median over the turns: a machine that is
slow for a minute is slow for both. What a figure could at most be, the roof, is measured in the same run:

    tokens/s of one stream ≤ bytes read a second / bytes of the weights

    stack        the techniques, one added to the other: tokens/s, time to first token, bytes, and whose texts are still the first row's
    products     why: what one product of one row costs in 32, 8 and 4 bits
    gammas       acceptance and speed-up against γ, beside the formula (gamma.py)
    bits         bytes and perplexity of fewer bits (train/perplexity.py)

Each returns plain numbers, lists and names, as they go into results/*.json; traffic.py has those about many texts at a time.
`Effort` says how much is done: `QUICK` is for tests.

Invariant: within a turn every row makes the same requests, from an engine of its own that has seen nothing yet.

Not covered: energy; several processes; what a network adds.
"""
import io
import platform
import re
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from batcher import Batcher
from engine import Engine
from gamma import expected_tokens
from matmul import Linear, read_bandwidth, seconds
from model import Llama
from paged import PagedCache
from pretrained import Model
from quant import quantize
from quantmatmul import QuantizedLinear
from request import Request, Settings
from speculative import Decoder
from tokenizer import Tokenizer
from train.distill import tell
from train.perplexity import recipes, table
from train.quantize import pieces
from weights import find

Rows = list[dict[str, Any]]

# What the requests of the combined table have in common, and how each goes on.
SHARED = ("Once upon a time, there was a little girl named Lily. She had a dog named Max and a big red ball. Every day they went to the park with "
          "her mom. There was a tall tree, a pond with ducks, and a lot of grass. Lily loved to run and to laugh. Max loved to bark at the ducks, and "
          "the ducks were not afraid of him at all. Her friend Tom came to the park too, with his blue kite. ")
OWN = ("One day, the ball was gone.", "One day, it began to rain.", "Then Tom saw a cat in the tree.", "Max found a box in the grass.",
       "But today Lily was sad.", "A duck came to them and said,", "Tom's kite flew away.", "Lily's mom had a big cake.",
       "\"Look!\" said Tom.", "It was very cold that day.", "A new boy sat under the tree.", "Lily wanted to swim in the pond.",
       "They heard a loud noise.", "Max did not want to play.", "The sun was hot.", "Tom asked Lily for the ball.")
OPENINGS = ("Once upon a time", "One day, Tom", "The little dog", "Lily saw a", "There was a big red ball", "Mom said")


@dataclass(frozen=True)
class Effort:
    """How much is measured."""
    turns: int = 3
    texts: int = 16                                     # of the combined table
    longest: int = 96                                   # tokens of the longest of them
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    count: int = 128                                    # tokens of a text by which γ is measured
    openings: Sequence[str] = OPENINGS
    load: int = 24                                      # short requests of a mixed load
    many: int = 96                                      # texts whose caches are looked at
    methods: tuple[str, ...] = ("rtn", "gptq")          # by which weights get 4 bits


QUICK = Effort(turns=1, texts=3, longest=6, gammas=(2,), count=12, openings=OPENINGS[:1], load=2, many=6, methods=("rtn",))


# ---- The machine ----------------------------------------------------------------------------------------------------------------

def machine(bandwidth: float | None = None) -> dict[str, Any]:
    """What this was measured on, and its roof: bytes read a second, unless they were measured already."""
    return dict(machine=processor(), date=time.strftime("%Y-%m-%d", time.gmtime()), torch=torch.__version__, threads=torch.get_num_threads(),
                read_bandwidth=bandwidth or read_bandwidth())


def processor() -> str:
    """The GPU's name, or the CPU's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    told = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in told.read_text().splitlines() if line.startswith("model name")] if told.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def slug(name: str) -> str:
    """A machine's name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# ---- Making texts, and looking at the clock -------------------------------------------------------------------------------------

class Served(NamedTuple):
    """What serving some requests took. Seconds are counted from a request's arrival."""
    seconds: float
    tokens: int
    first: list[float]                                  # to each text's first token
    gaps: list[float]                                   # between a text's next tokens, or rounds of them
    held: int                                           # bytes for keys and values, when they were most
    steps: int
    read: int                                           # bytes of keys and values, the sum over steps
    texts: list[list[int]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def held(caches: Sequence[Any]) -> int:
    """Bytes of caches that some text has: all of a contiguous one's, the live blocks of a paged one; none without a cache."""
    live = lambda cache: (cache.pool.total - cache.pool.available) / cache.pool.total if isinstance(cache, PagedCache) else 1
    return round(sum(cache.bytes * live(cache) for cache in caches if hasattr(cache, "bytes")))


def serve(batch: Batcher, caches: Sequence[Any], arrivals: Sequence[tuple[float, Request]]) -> Served:
    """Make all texts; each (seconds, request) arrives so long after the start."""
    start, due, kept, ended = time.perf_counter(), sorted(arrivals, key=lambda arrival: arrival[0]), list[int](), 0.0
    last, first, gaps = dict[Request, float](), list[float](), list[float]()
    while due or batch.waiting or batch.running:
        now = time.perf_counter() - start
        while due and due[0][0] <= now:
            batch.add(due.pop(0)[1])
        if not (batch.waiting or batch.running):
            time.sleep(max(0.0, due[0][0] - now))
            continue
        grown = batch.step()
        kept.append(held(caches))
        ended = time.perf_counter() - start
        arrived = {request: at for at, request in arrivals} if any(request not in last for request in grown) else {}
        for request in grown:
            (gaps if request in last else first).append(ended - last.get(request, arrived.get(request, 0.0)))
            last[request] = ended
    requests = [request for _, request in arrivals]
    return Served(ended, sum(len(r.tokens) - r.prompt for r in requests), first, gaps, max(kept), len(kept), sum(kept), [r.tokens[r.prompt:] for r in requests])


def at_once(engine: Engine, requests: Sequence[Request]) -> Served:
    """All of them arrive at the start."""
    return serve(engine.batch, engine.caches, [(0.0, request) for request in requests])


def weight_bytes(llama: Llama) -> int:
    """Of the weights, scales included, in the type that they are computed in or stored as integers; embedding and head once if they are tied."""
    return sum(place.nbytes for place in Llama(llama.config, "meta", llama.dtype, seed=None).places().values())


# ---- The combined table ---------------------------------------------------------------------------------------------------------

class Row(NamedTuple):
    """A row of the combined table: what is done beyond the row before, and all that is done by then."""
    name: str
    claims: str                                         # what the technique is for: speed, memory, or both
    engine: dict[str, Any] = {}
    bits: int = 16
    draft: bool = False


def stack_rows() -> list[Row]:
    alone, paged = dict(kv="contiguous"), dict(kv_bits="8", max_batch=16)
    return [Row("one at a time, no cache", "", dict(use_cache=False)),
            Row("+ KV cache", "speed", alone),
            Row("+ INT8 keys and values", "memory", alone | dict(kv_bits="8")),
            Row("+ speculation (tiny-draft)", "speed", alone | dict(kv_bits="8"), draft=True),
            Row("+ paged, continuous batching", "speed and memory", paged | dict(prefix_cache=False), draft=True),
            Row("+ INT4 weights", "memory", paged | dict(prefix_cache=False), bits=4, draft=True),
            Row("+ prefix sharing: all", "speed and memory", paged, bits=4, draft=True),
            Row("all, with INT8 weights", "speed", paged, bits=8, draft=True)]


def stack(effort: Effort) -> Rows:
    """Each row's texts in turns: the same requests, at temperature 0, which all arrive at once."""
    rows, draft = stack_rows(), Model.load("tiny-draft", "cpu", torch.float32)
    models = {bits: Model.load("tiny", "cpu", torch.float32, bits) for bits in dict.fromkeys(row.bits for row in rows)}
    turns = [[stack_row(row, models[row.bits], draft, effort) for row in rows] for _ in range(effort.turns)]
    base, told = [turn[0] for turn in turns], []
    for i, row in enumerate(rows):
        served, drafted, costs = zip(*(turn[i] for turn in turns))
        told.append(dict(name=row.name, claims=row.claims, tokens_per_second=median(s.rate for s in served),
                         first_token=median(median(s.first) for s in served),
                         cache_bytes=max(s.held for s in served), in_flight=min(row.engine.get("max_batch", 1), effort.texts),
                         weight_bytes=weight_bytes(models[row.bits].llama) + (weight_bytes(draft.llama) if row.draft else 0),
                         speed_up=median(s.rate / b.rate for s, (b, *_) in zip(served, base)),
                         same_texts=sum(a == b for a, b in zip(served[0].texts, base[0][0].texts)), texts=effort.texts, drafted=median(drafted),
                         draft_cost=median(costs)))
    for before, row in zip([told[0], *told], told):
        row["gain"] = row["speed_up"] / before["speed_up"]
    return told


def stack_row(row: Row, model: Model, draft: Model, effort: Effort) -> tuple[Served, float, float]:
    """What its texts took, how many tokens a round drafted on average, and what one of them costs over a plain pass."""
    limit, batch = model.llama.config.max_position_embeddings, row.engine.get("max_batch", 1)
    requests = [Request(model.encode(SHARED + own), Settings(0.0, seed=0, max_tokens=count)) for own, count in zip(OWN, spread(effort.texts, effort.longest))]
    engine = Engine(model, draft if row.draft else None, batch * limit, limit, **row.engine)
    served, costs = at_once(engine, requests), engine.maker.costs
    plain = costs.plain() or costs.plain(batch)                                                                    # of one text, or of all
    return served, mean(taken.drafted for request in requests for taken in request.rounds), costs.drafting() / plain if plain else 0.0


def spread(count: int, longest: int, ratio: float = 5.0) -> list[int]:
    """Lengths from longest / ratio to longest, spread evenly on a logarithmic scale, in an order of no meaning."""
    return [round(longest / ratio * ratio ** ((7 * i % count) / max(1, count - 1))) for i in range(count)]


@torch.inference_mode()
def products(effort: Effort, N: int = 1408, K: int = 256) -> Rows:
    """One product of the embedded model (gate and up), of 1 and of 16 rows, in microseconds: why fewer bits are faster, or not."""
    torch.manual_seed(0)
    weight, told = torch.randn(N, K), []
    for T in (1, 16):
        x = torch.randn(T, K)
        for bits in (32, 8, 4):
            linear = Linear(K, N) if bits == 32 else QuantizedLinear(K, N, bits=bits)
            linear.weight.copy_(weight) if bits == 32 else linear.put(quantize(weight, bits))
            linear.pack()
            told.append(dict(bits=bits, rows=T, path=linear.path(T), microseconds=1e6 * seconds(lambda: linear(x), 50 * effort.turns)))
    return told


# ---- Speculation ----------------------------------------------------------------------------------------------------------------

def gammas(effort: Effort) -> Rows:
    """Acceptance and speed-up against γ at temperature 1, a text at a time, in the type that is the CPU's own for the pair; γ None is chosen by the
    clock. Medians over texts."""
    model, draft = (Model.load(name, "cpu") for name in ("tiny", "tiny-draft"))
    wanted: list[int | None] = [*effort.gammas, None]
    runs = [[drafted(model, draft, gamma, opening, i, effort.count) for gamma in (0, *wanted)] for i, opening in enumerate(effort.openings)]
    return [against_plain(gamma, [(turn[0], turn[i]) for turn in runs]) | dict(dtype=str(model.llama.dtype)[6:]) for i, gamma in enumerate(wanted, 1)]


def drafted(model: Model, draft: Any, gamma: int | None, opening: str, seed: int, count: int, coupled: bool = False) -> tuple[Request, Decoder]:
    """A text of `count` tokens."""
    request = Request(model.encode(opening), Settings(1.0, seed=seed, max_tokens=count, gamma=gamma))
    longest = request.prompt + count
    engine = Engine(model, None if gamma == 0 else draft, longest, longest, coupled=coupled)
    for _ in engine.batch.run([request]):
        pass
    return request, engine.maker


def seconds_a_token(request: Request) -> float:
    """After the round that read the prompt."""
    return sum(taken.seconds for taken in request.rounds[1:]) / sum(taken.accepted + 1 for taken in request.rounds[1:])


def against_plain(gamma: int | None, runs: Sequence[tuple[tuple[Request, Decoder], tuple[Request, Decoder]]]) -> dict[str, Any]:
    """Of pairs of runs, plain and drafted. By formula: as a pass of γ + 1 tokens costs on this machine, and where it costs what one token's does."""
    gains, alphas, costs, widths = [], [], [], []
    for (plain, _), (request, maker) in runs:
        once = seconds_a_token(plain)
        gains.append(once / seconds_a_token(request))
        alphas.append(request.acceptance or 0.0)
        costs.append(maker.costs.drafting() / once)
        widths.append(maker.costs.verifying((gamma or 0) + 1) / once)
    alpha, c, w = median(alphas), median(costs), median(widths)
    row = dict(gamma=gamma, acceptance=alpha, speed_up=median(gains), draft_cost=c)
    if gamma is None:
        return row | dict(drafted=mean(taken.drafted for _, (request, _) in runs for taken in request.rounds))
    return row | dict(pass_cost=w, formula=expected_tokens(alpha, gamma) / (w + gamma * c), formula_flat=expected_tokens(alpha, gamma) / (1 + gamma * c))


# ---- Bits -----------------------------------------------------------------------------------------------------------------------

def bits(effort: Effort, data: str | None = None) -> Rows:
    """Bytes and perplexity of the embedded model with fewer bits, on what it tells itself, or on the text of a file."""
    llama = Llama.load("tiny", "cpu", torch.float32, trainable=True).requires_grad_(False)
    count = 8 * effort.turns if effort.turns > 1 else 2
    if data is None:
        told = list(tell(llama, 4 * count, 72, llama.config.eos_token_ids[0], seed=1).tokens.split(73))
        calibration, texts = told[:count], told[count:]
    else:
        calibration, texts = (pieces(data, Tokenizer.load(find("tiny")), 512, count, calibrate) for calibrate in (True, False))
    with redirect_stdout(io.StringIO()):
        rows = table("tiny", texts, calibration, recipes(effort.methods, (32, 128)), progress=lambda line: None)
    names = ["16 bits" if row.how is None else f"INT{row.how.bits} {row.how.method}" + f", groups of {row.how.group}" * (row.how.bits == 4) for row in rows]
    return [dict(weights=name, kv=row.width, bytes=row.bytes, kv_bytes=row.token, perplexity=row.perplexity, text=data and Path(data).name,
                 tokens=sum(map(len, texts))) for name, row in zip(names, rows)]
