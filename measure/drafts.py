"""Drafts for a target, beside plain decoding: what they cost, how many stand, and the gain.

    python bench.py --target NAME --draft NAME --draft NAME … --prompts FILE

Each prompt is told plainly, then with each draft and each γ, one text at a time, in turns: in
float32, INT8 and INT4, at temperature 0 and 1. A draft has the target's bits, or --draft-bits. The
prompts of one kind ("kind" in their lines: chat, code, …) follow each other in one engine, as a
server's requests do: so γ is learnt, and look-ups find what was answered before.

Invariant: at temperature 0 all texts of a prompt are the plain one, but for what rounding moves:
`same texts` counts them.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from checkpoint.files import parse_object, read_bounded
from errors import UserError
from generate import Engine
from loading import Draft, Model, load_draft
from lookup import History
from measure.serving import serve
from measure.sizes import Sizes
from measure.steps import WIDTHS, label
from quant import Kind
from request import Request, Settings
from settings import Options
from speculative import Proposal, Round

Row = dict[str, Any]
Key = tuple[str, str, float, int | None]  # target, draft, temperature, γ
MOST = 4  # positions of a round whose acceptance is told


class Told:
    """A text, and what it cost."""

    def __init__(self, model: Model, engine: Engine, prompt: str, settings: Settings):
        self.request = Request(model.encode(prompt), settings, model.eos_token_ids)
        self.drafter = engine.batcher.runner.drafter
        self.propose = self.drafter.propose
        self.drafter.propose = self.timed_propose
        self.draft_seconds = 0.0
        self.num_drafts = 0
        served = serve(engine, [self.request])
        self.drafter.propose = self.propose
        self.tokens = served.texts[0]
        self.seconds_per_token = served.seconds_per_token if served.gaps else None
        self.rounds = self.request.rounds[1:]  # the first reads the prompt

    def timed_propose(self, round: Round) -> Proposal:
        start = time.perf_counter()
        proposal = self.propose(round)
        self.draft_seconds += time.perf_counter() - start
        self.num_drafts += sum(round.num_drafts)
        return proposal


def prompts_of(file: Path) -> dict[str, list[str]]:
    """The prompts of JSON lines {"prompt": "…", "kind": "…"}, by their kind; "" is that of lines
    without one. (Settings are not supported: all runs have the same.)"""
    if not file.exists():
        raise UserError(f'--prompts {file} is missing: name a file of lines {{"prompt": "…"}}')
    prompts: dict[str, list[str]] = {}
    for number, line in enumerate(read_bounded(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = parse_object(line)
        except UserError:
            fields = None
        match fields:
            case {"prompt": str(prompt), "kind": str(kind), **others} if not others:
                prompts.setdefault(kind, []).append(prompt)
            case {"prompt": str(prompt), **others} if not others:
                prompts.setdefault("", []).append(prompt)
            case _:
                raise UserError(
                    f'{file}, line {number}: it must be {{"prompt": "…"}}, perhaps with a "kind", '
                    "and nothing else"
                )
    if not prompts:
        raise UserError(f"{file} has no prompts: name another file")
    return prompts


def drafts(
    sizes: Sizes,
    target: str,
    names: Sequence[str],
    file: Path | None,
    draft_bits: Kind | None = None,
) -> dict[str, Row]:
    """A row for each width, draft, temperature and γ (None: auto)."""
    prompts = prompts_of(file) if file else {"": list(sizes.openings)}
    asked = "" if draft_bits is None else f", --draft-bits {draft_bits}"
    runs: dict[Key, list[tuple[Told, Told]]] = {}
    for width, bits in WIDTHS.items():
        model = Model.load(target, "cpu", torch.float32, bits)
        loaded = {name: load_draft(name, model, bits=draft_bits) for name in names}
        for temperature, (kind, of_kind) in product((0.0, 1.0), prompts.items()):
            where = ", ".join(filter(None, (label(target), width, kind)))
            longest = max(len(model.encode(prompt)) for prompt in of_kind) + sizes.num_tokens
            plain_engine = engine_of(model, None, longest)
            engines = {}
            for key in product(loaded, (*sizes.gammas, None)):
                engines[key] = engine_of(model, loaded[key[0]], longest)
            for seed, prompt in enumerate(of_kind):
                settings = partial(Settings, temperature, seed=seed, max_tokens=sizes.num_tokens)
                plain = Told(model, plain_engine, prompt, settings=settings(gamma=0))
                for (name, gamma), engine in engines.items():
                    told = Told(model, engine, prompt, settings=settings(gamma=gamma))
                    if plain.seconds_per_token and told.seconds_per_token:  # more than one token
                        key = where, label(name) + asked, temperature, gamma
                        runs.setdefault(key, []).append((plain, told))
    rows = {}
    for (model_name, draft_name, temperature, gamma), texts in runs.items():
        row = {"target": model_name, "draft": draft_name, "temperature": temperature}
        name = f"{model_name}, {draft_name}, T {temperature:.0f}, {gamma}"
        rows[name] = row | row_of(gamma, temperature, texts)
    return rows


def engine_of(model: Model, draft: Draft | None, longest: int) -> Engine:
    """An engine for one text at a time, with a history of its own."""
    model.history = History()
    return Engine(model, draft, Options(max_len=longest, max_batch=1), tokens=longest)


def of_tiny(sizes: Sizes) -> dict[str, Row]:
    """Those of the embedded pair."""
    return drafts(sizes, "tiny", ["tiny-draft"], None)


def row_of(gamma: int | None, temperature: float, texts: Sequence[tuple[Told, Told]]) -> Row:
    """The figures of one draft and γ: the gain is a median over texts, acceptance of all rounds.

    draft_cost: of proposing alone, without the rows that a head makes of tokens that were read.
    """
    rounds = [stats for _, told in texts for stats in told.rounds]
    mean_drafts = fmean(stats.num_drafts for stats in rounds)
    row = {
        "gamma": f"auto: {mean_drafts:.1f}" if gamma is None else str(gamma),
        "tokens_per_round": fmean(stats.num_accepted + 1 for stats in rounds),
        "speed_up": median(
            plain.seconds_per_token / told.seconds_per_token for plain, told in texts
        ),
    }
    if temperature == 0:
        same = [plain.tokens == told.tokens for plain, told in texts]
        row |= {"same_texts": sum(same), "texts": len(texts)}
    costs = []
    for plain, told in texts:
        if told.num_drafts:
            costs.append(told.draft_seconds / told.num_drafts / plain.seconds_per_token)
    if costs:
        row["draft_cost"] = median(costs)
    by_position = []
    for j in range(MOST):
        examined = [s for s in rounds if s.num_drafts > j and s.num_accepted >= j]
        if examined:
            by_position.append(fmean(s.num_accepted > j for s in examined))
    row["acceptance"] = " ".join(f"{alpha:.2f}" for alpha in by_position)
    return row
