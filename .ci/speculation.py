"""Speculation on real models: the same greedy tokens, and what it gains and costs on this machine.

    python .ci/speculation.py SMOLLM2 PROMPTS           (a folder with a model; JSONL whose lines have "turns")

Speeds are ratios between texts made in turns in one run. The machine is shared: what is not reached is measured once more, and then a
lower limit counts.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from gamma import expected_tokens
from generate import Engine, Model, load_draft
from model import Llama
from request import Request, Settings

OPENINGS = [
    "Once upon a time",
    "One day, Tom",
    "The little dog",
    "Lily saw a",
    "There was a big red ball",
    "Mom said",
]


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


def write(model: Model, draft, requests: list[Request], coupled: bool = False):
    """All of them to their ends, in one batch."""
    longest = max(len(r.tokens) + r.left for r in requests)
    maker = Engine(model, draft, longest * len(requests), longest, len(requests), coupled).decoder
    for request in requests:
        maker.open(request)
    while work := [maker.plan(request) for request in requests if not request.finish_reason]:
        maker.step(work)
    return maker


def seconds(request: Request) -> float:
    """Seconds a token, after the round that read the prompt."""
    return sum(taken.seconds for taken in request.rounds[1:]) / (
        len(request.tokens) - request.prompt - 1
    )


@torch.inference_mode()
def same_greedy_tokens(model: Model, prompts: list[str]) -> None:
    """30 prompts: with n-gram drafts and without; where they part, the two best logits must be a near-tie."""

    def texts(draft, gamma):
        requests = [
            Request(
                model.encode(prompt), Settings(0.0, seed=0, max_tokens=24, gamma=gamma), model.ends
            )
            for prompt in prompts
        ]
        write(model, draft, requests)
        return requests

    plain = texts(None, 0)
    for gamma in (3, None):
        drafted, ties = texts("ngram", gamma), 0
        for a, b in zip(plain, drafted):
            if a.tokens != b.tokens:
                at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y)
                best = (
                    model.llama(torch.tensor(a.tokens[:at]), rows=slice(-1, None))[0].topk(2).values
                )
                require(
                    float(best[0] - best[1]) < 1e-4,
                    f"where the texts part, at token {at}, the two best logits are a near-tie",
                )
                ties += 1
        stood = sum(taken.accepted for request in drafted for taken in request.rounds)
        require(
            stood > 20 or gamma is None,
            f"{len(prompts)} greedy texts, n-gram drafts, γ {gamma or 'auto'}: the same tokens but for {ties} near-ties; {stood} drafts stood",
        )


def speed(model: Model, draft, gamma: int | None, count: int = 256) -> tuple[float, float, float]:
    """(speed-up over plain decoding, in turns; as a share of the formula with a pass's width; acceptance), medians over texts."""
    gains, shares, acceptances = [], [], []
    for i, opening in enumerate(OPENINGS):
        runs = []
        for d, g in ((None, 0), (draft, gamma)):
            request = Request(
                model.encode(opening), Settings(1.0, seed=i, max_tokens=count, gamma=g)
            )
            maker = write(model, d, [request])
            runs.append((request, seconds(request)))
        (_, plain), (request, drafted) = runs
        gains.append(plain / drafted)
        acceptances.append(request.acceptance or 0.0)
        if gamma:
            w = maker.costs.passes.at(gamma + 1) / plain  # `plain` is the whole of a plain round
            a, c = request.acceptance, maker.costs.drafting(gamma) / plain
            shares.append(plain / drafted / (expected_tokens(a, gamma) / (w + gamma * c)))
    return median(gains), median(shares) if shares else 0.0, median(acceptances)


def attempt(measure, good) -> tuple:
    got = measure()
    return got if good(got) else measure()


def main(folder: str, prompts: str) -> int:
    torch.set_num_threads(2)
    turns = [json.loads(line)["turns"][0] for line in open(prompts, encoding="utf-8")][:30]
    same_greedy_tokens(Model.load(folder, "cpu", torch.float32), turns)
    model, draft = Model.load("tiny", "cpu"), Model.load("tiny-draft", "cpu")
    for gamma in (
        2,
        4,
    ):  # what it gains is the machine's; what the formula makes of its times is ours
        best = gain, share, alpha = attempt(
            lambda: speed(model, draft, gamma), lambda got: got[1] > 0.9
        )
        require(
            share > 0.8,
            f"tiny with tiny-draft, temperature 1, γ = {gamma}: {gain:.2f} times plain decoding, acceptance {alpha:.2f}, "
            f"{share:.2f} of the formula",
        )
    least = 0.85 * max(best[0], 1.0)
    gain, _, alpha = attempt(lambda: speed(model, draft, None), lambda got: got[0] > least)
    require(
        gain > 0.9 * least,
        f"with γ by the clock: {gain:.2f} times plain decoding, at least {0.9 * least:.2f}",
    )
    useless = Model(
        Llama(replace(draft.llama.config), dtype=draft.llama.dtype, seed=1).prepare(),
        draft.tokenizer,
        draft.recommended,
    )
    gain, _, alpha = attempt(lambda: speed(model, useless, None, 512), lambda got: got[0] > 0.95)
    require(
        gain > 0.9,
        f"with a draft of random weights and γ by the clock, 512 tokens: {gain:.3f} of plain decoding, acceptance {alpha:.2f}",
    )
    copy = load_draft("self", model)
    *_, alpha = speed(model, copy, 2, 96)
    require(
        alpha > 0.9, f"tiny with its own INT4 copy, temperature 1, γ = 2: acceptance {alpha:.2f}"
    )
    gain, *_ = attempt(lambda: speed(model, copy, None), lambda got: got[0] > 0.95)
    require(gain > 0.9, f"with γ by the clock: {gain:.3f} of plain decoding")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
