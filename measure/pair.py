"""Measurements of the embedded pair: the gain and cost of each technique on this machine.

A claim of speed is a ratio of two measurements made in one run, in turns; the figure is the median over the turns. A
machine that is slow for a minute is slow for both. A bound of every figure is measured in the same run:

    tokens/s of one stream ≤ bytes read a second / bytes of the weights

Each measurement returns plain numbers, lists and names, for results/*.json; traffic.py measures many texts at a time.

Invariant: within a turn every row serves the same requests, each row with a new engine.
"""

import io
import platform
import random
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
from checkpoint.hub import find_folder
from gamma import expected_tokens
from generate import Engine, Model
from measure.clock import read_bandwidth
from model import Llama
from paged import PagedCache
from request import Request, Settings
from speculative import Decoder
from tokenizer import Tokenizer
from train.distill import sample_corpus
from train.perplexity import recipe_label, recipes, table
from train.quantize import pieces

Rows = list[dict[str, Any]]
Run = tuple[Request, Decoder]

# The prompts of the combined table: SHARED, the common beginning, and one sentence of OWN each.
SHARED = (
    "Once upon a time, there was a little girl named Lily. She had a dog named Max and a big red ball. Every "
    "day they went to the park with her mom. There was a tall tree, a pond with ducks, and a lot of grass. Lily"
    " loved to run and to laugh. Max loved to bark at the ducks, and the ducks were not afraid of him at all. "
    "Her friend Tom came to the park too, with his blue kite. "
)
OWN = (
    "One day, the ball was gone.",
    "One day, it began to rain.",
    "Then Tom saw a cat in the tree.",
    "Max found a box in the grass.",
    "But today Lily was sad.",
    "A duck came to them and said,",
    "Tom's kite flew away.",
    "Lily's mom had a big cake.",
    '"Look!" said Tom.',
    "It was very cold that day.",
    "A new boy sat under the tree.",
    "Lily wanted to swim in the pond.",
    "They heard a loud noise.",
    "Max did not want to play.",
    "The sun was hot.",
    "Tom asked Lily for the ball.",
)
OPENINGS = (
    "Once upon a time",
    "One day, Tom",
    "The little dog",
    "Lily saw a",
    "There was a big red ball",
    "Mom said",
)


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    turns: int = 3
    texts: int = 16  # requests of the combined table
    longest: int = 96  # new tokens of the longest of these
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    count: int = 128  # new tokens of a text that measures a γ
    openings: Sequence[str] = OPENINGS
    load: int = 24  # short requests under mixed load (traffic.latency)
    many: int = 96  # texts that measure waste (traffic.waste)
    methods: tuple[str, ...] = ("rtn", "gptq")  # how weights are quantized to 4 bits


QUICK = Effort(1, 3, 6, (2,), 12, OPENINGS[:1], load=2, many=6, methods=("rtn",))


def machine(bandwidth: float | None = None) -> dict[str, Any]:
    """The machine, and its read bandwidth, measured now if it is not given."""
    return dict(
        machine=processor(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        read_bandwidth=bandwidth or read_bandwidth(),
    )


def processor() -> str:
    """The GPU's name, or the CPU's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    told = Path("/proc/cpuinfo")
    found = re.search(
        r"^model name\s*:\s*(.*\S)", told.read_text() if told.exists() else "", re.MULTILINE
    )
    return found[1] if found else platform.processor() or platform.machine()


def slug(name: str) -> str:
    """A machine's name -> a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def random_request(prompt: int, count: int, seed: int, gamma: int | None = 0) -> Request:
    """A request for exactly `count` tokens after a prompt of `prompt` random tokens."""
    tokens = random.Random(seed).choices(range(300, 4000), k=prompt)
    return Request(tokens, Settings(1.0, seed=seed, max_tokens=count, gamma=gamma))


class Served(NamedTuple):
    """The costs of serving some requests."""

    seconds: float
    tokens: int
    first: list[float]  # seconds from a request's arrival to its first token
    gaps: list[float]  # seconds between a text's successive tokens, or rounds
    held: int  # the most bytes of keys and values at any time
    steps: int  # passes of the target
    read: int  # bytes of keys and values, the sum over steps
    texts: list[list[int]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def held(caches: Sequence[Any]) -> int:
    """Bytes in use: all of a contiguous cache, the live blocks of a paged cache, none of `NoCache`."""

    def live(cache: Any) -> float:
        return (
            (cache.pool.total - cache.pool.available) / cache.pool.total
            if isinstance(cache, PagedCache)
            else 1
        )

    return round(sum(cache.bytes * live(cache) for cache in caches if hasattr(cache, "bytes")))


def serve(
    batch: Batcher, caches: Sequence[Any], arrivals: Sequence[tuple[float, Request]]
) -> Served:
    """Serve all requests. arrivals: (seconds after the start, request)."""
    start, due, kept = (
        time.perf_counter(),
        sorted(arrivals, key=lambda arrival: arrival[0]),
        list[int](),
    )
    last, first, gaps = {request: at for at, request in arrivals}, list[float](), list[float]()
    passed = lambda: time.perf_counter() - start
    while due or batch.waiting or batch.running:
        while due and (due[0][0] <= passed() or not (batch.waiting or batch.running)):
            time.sleep(max(0.0, due[0][0] - passed()))
            batch.add(due.pop(0)[1])
        grown = batch.step()
        passes = 1 if batch.decoder.drafts else max(map(len, grown.values()), default=1)
        kept += [held(caches)] * passes
        ended = passed()
        for request, new in grown.items():
            (first if len(request.tokens) - len(new) == request.prompt else gaps).append(
                ended - last[request]
            )
            last[request] = ended
    texts = [request.tokens[request.prompt :] for _, request in arrivals]
    return Served(ended, sum(map(len, texts)), first, gaps, max(kept), len(kept), sum(kept), texts)


def at_once(engine: Engine, requests: Sequence[Request]) -> Served:
    """Serve all requests; they arrive at the start."""
    return serve(engine.batch, engine.caches, [(0.0, request) for request in requests])


def weight_bytes(llama: Llama, read: bool = False) -> int:
    """Bytes of the weights as they are stored, scales included; tied embedding and head count once. read: only what a
    step reads, so without an embedding that is not tied, of which a step reads single rows."""
    plain, own = (
        Llama(llama.config, "meta", llama.dtype, None, None, llama.weight_dtype),
        llama.embed is not llama.head,
    )
    return sum(
        place.nbytes
        for name, place in plain.places().items()
        if not (read and own and "embed_tokens" in name)
    )


class StackRow(NamedTuple):
    """A row of the combined table: the technique that it adds to the row before, and the settings of them all."""

    name: str
    claims: str  # what it is for: speed, memory, or both
    engine: dict[str, Any] = {}
    bits: int = 16
    draft: bool = False


ALONE, PAGED = dict(kv="contiguous"), dict(kv_bits="8", max_batch=16)
STACK = (
    StackRow("one at a time, no cache", "", dict(use_cache=False)),
    StackRow("+ KV cache", "speed", ALONE),
    StackRow("+ INT8 keys and values", "memory", ALONE | dict(kv_bits="8")),
    StackRow("+ speculation (tiny-draft)", "speed", ALONE | dict(kv_bits="8"), draft=True),
    StackRow(
        "+ paged, continuous batching",
        "speed and memory",
        PAGED | dict(prefix_cache=False),
        draft=True,
    ),
    StackRow("+ INT4 weights", "memory", PAGED | dict(prefix_cache=False), bits=4, draft=True),
    StackRow("+ prefix sharing: all", "speed and memory", PAGED, bits=4, draft=True),
    StackRow("all, with INT8 weights", "speed", PAGED, bits=8, draft=True),
)


def stack(effort: Effort) -> Rows:
    """The combined table: all rows in turns serve the same requests, at temperature 0, which arrive at once."""
    draft = Model.load("tiny-draft", "cpu", torch.float32)
    models = {bits: Model.load("tiny", "cpu", torch.float32, bits) for bits in (16, 8, 4)}
    turns = [
        [serve_row(row, models[row.bits], draft, effort) for row in STACK]
        for _ in range(effort.turns)
    ]
    base, told = [turn[0][0] for turn in turns], []
    for i, row in enumerate(STACK):
        served, drafted, costs = zip(*(turn[i] for turn in turns))
        speed_up = median(s.rate / b.rate for s, b in zip(served, base))
        told.append(
            dict(
                name=row.name,
                claims=row.claims,
                tokens_per_second=median(s.rate for s in served),
                first_token=median(median(s.first) for s in served),
                cache_bytes=max(s.held for s in served),
                in_flight=min(row.engine.get("max_batch", 1), effort.texts),
                weight_bytes=weight_bytes(models[row.bits].llama)
                + row.draft * weight_bytes(draft.llama),
                speed_up=speed_up,
                same_texts=sum(a == b for a, b in zip(served[0].texts, base[0].texts)),
                texts=effort.texts,
                drafted=median(drafted),
                draft_cost=median(costs),
                gain=speed_up / (told[-1]["speed_up"] if told else speed_up),
            )
        )
    return told


def serve_row(
    row: StackRow, model: Model, draft: Model, effort: Effort
) -> tuple[Served, float, float]:
    """Serve a row -> its costs, the mean number of drafts a round, and the cost of a draft in plain passes."""
    limit, batch = model.llama.config.max_position_embeddings, row.engine.get("max_batch", 1)
    requests = [
        Request(model.encode(SHARED + own), Settings(0.0, seed=0, max_tokens=count))
        for own, count in zip(OWN, log_spread(effort.texts, effort.longest))
    ]
    engine = Engine(model, draft if row.draft else None, batch * limit, limit, **row.engine)
    served, costs = at_once(engine, requests), engine.decoder.costs
    plain = costs.plain() or costs.plain(batch)  # a pass of one text, or of all
    drafted = mean(taken.drafted for request in requests for taken in request.rounds)
    return served, drafted, costs.drafting(drafted) / plain if plain else 0.0


def log_spread(count: int, longest: int, ratio: float = 5.0) -> list[int]:
    """`count` lengths from longest / ratio to longest, evenly spaced on a logarithmic scale, shuffled."""
    return [
        round(longest / ratio * ratio ** ((7 * i % count) / max(1, count - 1)))
        for i in range(count)
    ]


def gammas(effort: Effort) -> Rows:
    """Acceptance and speed-up for each γ (None: by the clock) at temperature 1: medians over texts."""
    model, draft = (Model.load(name, "cpu") for name in ("tiny", "tiny-draft"))
    wanted: list[int | None] = [*effort.gammas, None]
    runs = [
        [drafted(model, draft, gamma, opening, i, effort.count) for gamma in (0, *wanted)]
        for i, opening in enumerate(effort.openings)
    ]
    return [
        against_plain(gamma, [(turn[0], turn[i]) for turn in runs])
        | dict(dtype=str(model.llama.dtype)[6:])
        for i, gamma in enumerate(wanted, 1)
    ]


def drafted(
    model: Model, draft: Model, gamma: int | None, opening: str, seed: int, count: int
) -> Run:
    """Make a text of `count` tokens with drafts (γ = 0: without) -> its request, with its rounds, and the decoder."""
    request = Request(
        model.encode(opening), Settings(1.0, seed=seed, max_tokens=count, gamma=gamma)
    )
    longest = request.prompt + count
    engine = Engine(model, None if gamma == 0 else draft, longest, longest)
    at_once(engine, [request])
    return request, engine.decoder


def seconds_a_token(request: Request) -> float:
    """Seconds of a token, on average over the rounds after the first, which read the prompt."""
    rounds = request.rounds[1:]
    return sum(taken.seconds for taken in rounds) / sum(taken.accepted + 1 for taken in rounds)


def against_plain(gamma: int | None, runs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """A row from pairs of runs, (plain, drafted). formula: with the measured cost w of a pass; formula_flat: w = 1."""
    made = [
        (seconds_a_token(plain), request, decoder.costs) for (plain, _), (request, decoder) in runs
    ]
    gain = median(once / seconds_a_token(request) for once, request, _ in made)
    alpha = median(request.acceptance or 0.0 for _, request, _ in made)
    drafts = (
        mean(taken.drafted for _, request, _ in made for taken in request.rounds)
        if gamma is None
        else gamma
    )
    c = median(costs.drafting(drafts) / once for once, _, costs in made)
    row = dict(gamma=gamma, acceptance=alpha, speed_up=gain, draft_cost=c)
    if gamma is None:
        return row | dict(drafted=drafts)
    w = median(costs.passes.at(gamma + 1) / once for once, _, costs in made)
    tokens = expected_tokens(alpha, gamma)
    return row | dict(
        pass_cost=w, formula=tokens / (w + gamma * c), formula_flat=tokens / (1 + gamma * c)
    )


def bits(effort: Effort, data: str | None = None) -> Rows:
    """Bytes and perplexity of the embedded model in fewer bits, on stories that it made, or on the text of a file."""
    llama = Llama.load("tiny", "cpu", torch.float32, trainable=True).requires_grad_(False)
    count = 8 * effort.turns if effort.turns > 1 else 2
    if data is None:
        told = sample_corpus(llama, 4 * count, 72, llama.config.eos_token_ids[0], seed=1).tokens
        texts = list(told.roll(1).split(73))  # each begins with an end of text, as it did when told
        calibration, texts = texts[:count], texts[count:]
    else:
        calibration, texts = (
            pieces(data, Tokenizer.load(find_folder("tiny")), 512, count, part)
            for part in (True, False)
        )
    with redirect_stdout(io.StringIO()):
        rows = table(
            "tiny",
            texts,
            calibration,
            recipes(effort.methods, (32, 128)),
            author=None if data else llama,
        )
    return [
        dict(
            weights=recipe_label(row.how),
            kv=row.width,
            bytes=row.bytes,
            kv_bytes=row.token,
            perplexity=row.perplexity,
            text=data and Path(data).name,
            tokens=sum(map(len, texts)),
        )
        for row in rows
    ]
