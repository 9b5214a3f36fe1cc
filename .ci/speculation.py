"""Speculation on real models: the same greedy tokens, and what it gains and costs on this machine.

    python .ci/speculation.py SMOLLM2 PROMPTS    (a model's folder; JSONL whose lines have "turns")

Speeds are ratios of texts that are made in turns in one run: medians over six texts. What is aimed
at is printed beside each figure; the limit is lower, because this machine is shared, and what
misses it is measured once more.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from generate import Engine, Model, load_draft
from measure.effort import OPENINGS
from measure.pair import timed_text
from measure.serving import serve_at_once
from model import Llama
from request import Request, Settings

NUM_TOKENS = 128
MAX_LEN = 200
GAMMAS = (1, 2, 3, 4, 6, 8)


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


# ---- The same tokens


def greedy(model: Model, draft, gamma: int | None, prompts: list[str]) -> list[Request]:
    """The texts of all prompts, made together."""
    settings = Settings(temperature=0.0, seed=0, max_tokens=24, gamma=gamma)
    requests = []
    for prompt in prompts:
        requests.append(Request(model.encode(prompt), settings, model.eos_token_ids))
    longest = max(len(request.tokens) for request in requests) + 24
    engine = Engine(model, draft, longest * len(requests), longest, len(requests))
    serve_at_once(engine, requests)
    return requests


def is_near_tie(model: Model, tokens: list[int]) -> bool:
    """Whether the two best logits after these tokens are all but equal."""
    logits = model.llama(torch.tensor(tokens), logits_indices=slice(-1, None))
    best, second = logits[0].topk(2).values
    return float(best - second) < 1e-4


@torch.inference_mode()
def same_greedy_tokens(model: Model, prompts: list[str]) -> None:
    """With n-gram drafts and without; where the texts part, there must be a near-tie."""
    plain = greedy(model, None, 0, prompts)
    for gamma in (3, None):
        drafted = greedy(model, load_draft("ngram", model), gamma, prompts)
        ties = 0
        for a, b in zip(plain, drafted):
            pairs = list(zip(a.tokens, b.tokens))
            same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
            if same < len(pairs):
                require(is_near_tie(model, a.tokens[:same]), f"a near-tie at token {same}")
                ties += 1
        stood = sum(stats.num_accepted for request in drafted for stats in request.rounds)
        told = f"{len(prompts)} greedy texts, n-gram drafts, γ {gamma or 'auto'}: the same tokens"
        require(stood > 20 or gamma is None, f"{told} but for {ties} near-ties; {stood} stood")


# ---- Speed


def gains(model: Model, draft: Model, gammas: tuple[int | None, ...]) -> dict[int | None, float]:
    """Times as fast as plain decoding, for each γ (None: auto): medians over texts, in turns."""
    plain = Engine(model, None, MAX_LEN, MAX_LEN)
    drafting = {}  # an engine for each γ makes all texts, so its trial is the first text's
    for gamma in gammas:
        drafting[gamma] = Engine(model, load_draft(draft, model), MAX_LEN, MAX_LEN)
    found = {gamma: [] for gamma in gammas}
    for seed, opening in enumerate(OPENINGS):
        seconds = seconds_of(plain, model, opening, seed, None)
        for gamma, engine in drafting.items():
            found[gamma].append(seconds / seconds_of(engine, model, opening, seed, gamma))
    return {gamma: median(ratios) for gamma, ratios in found.items()}


def seconds_of(engine: Engine, model: Model, opening: str, seed: int, gamma: int | None) -> float:
    """Seconds a token of a text of NUM_TOKENS, after the first step."""
    settings = Settings(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS, gamma=gamma)
    request = Request(model.encode(opening), settings)
    return serve_at_once(engine, [request]).seconds_per_token


def auto_pays(model: Model, draft: Model) -> None:
    """auto is as good as the best fixed γ, and as plain decoding."""
    share = 0.0
    for _ in range(4):
        found = gains(model, draft, (*GAMMAS, None))
        auto = found.pop(None)
        fixed = ", ".join(f"{gamma}: {gain:.2f}" for gamma, gain in found.items())
        print(f"tiny with tiny-draft, times plain decoding: {fixed}; auto: {auto:.2f}")
        share = max(share, auto / max(1.0, *found.values()))
        if share >= 0.95:
            break
    require(share > 0.85, f"auto has {share:.2f} of the best (aim: 0.95)")


def auto_does_not_cost(model: Model, draft: Model, name: str) -> None:
    """With a draft that does not pay, auto is as good as plain decoding."""
    gain = 0.0
    for _ in range(4):
        gain = max(gain, *gains(model, draft, (None,)).values())
        if gain >= 0.97:
            break
    require(gain > 0.9, f"{name}, auto: {gain:.3f} of plain decoding (aim: 0.97)")


def main(folder: str, prompts: str) -> int:
    torch.set_num_threads(2)
    with open(prompts, encoding="utf-8") as lines:
        turns = [json.loads(line)["turns"][0] for line in lines][:30]
    same_greedy_tokens(Model.load(folder, "cpu", torch.float32), turns)
    model = Model.load("tiny", "cpu")
    draft = Model.load("tiny-draft", "cpu")
    auto_pays(model, draft)
    config = replace(draft.llama.config)
    random = Llama(config, dtype=draft.llama.dtype, seed=1).pack_weights()
    useless = Model(random, draft.tokenizer)
    auto_does_not_cost(model, useless, "a draft of random weights")
    request, _ = timed_text(model, "self", 2, OPENINGS[0], 0, NUM_TOKENS)
    alpha = request.acceptance
    require(alpha > 0.9, f"tiny with its own INT4 copy, γ = 2: acceptance {alpha:.2f}")
    auto_does_not_cost(model, "self", "tiny with its own INT4 copy")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
