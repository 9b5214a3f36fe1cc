"""One run of the embedded pair, as `--color` shows it at a terminal: each piece of text with its origin and time."""

import time
from typing import Any

from generate import Engine, Model, load_draft
from measure.pair import Effort
from request import Settings, Writer

PROMPT, SEED, GAMMA = "Once upon a time", 7, 3
COMMAND = f'python generate.py --draft tiny-draft --gamma {GAMMA} --seed {SEED} --color "{PROMPT}"'


def session(effort: Effort) -> list[dict[str, Any]]:
    """The second of two runs, because the first one warms up. pieces: (text, origin, seconds since the start)."""
    model = Model.load("tiny", "cpu")
    draft, asked = load_draft("tiny-draft", model), Settings(seed=SEED, max_tokens=96, gamma=GAMMA)
    for _ in range(2):
        request, pieces = model.request(PROMPT, asked), list[tuple[str, str, float]]()
        length, start = request.prompt + request.left, time.perf_counter()
        show = lambda piece, origin: pieces.append((piece, origin, time.perf_counter() - start))
        writer = Writer(model.tokenizer, request, PROMPT, show)
        (result,) = Engine(model, draft, length, length).serve([writer])
    return [dict(command=COMMAND, prompt=PROMPT, pieces=pieces, told=result.summary().split("\n"))]
