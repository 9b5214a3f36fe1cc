"""The drafts of a lone text on a CPU, in one call: pass, softmax, pick, and the next pass, without a Python between them.

A small draft is sooner through with a token than the Python around it is (room in the cache, the places of a step, the model's operators, softmax, the
coin), so drafting seems to cost nearly what it saves: the demonstration shows how much. As on a GPU, where the drafts of a
round are one recording (graphs.py), they are one call here: native.py's `Layers.drafts`. Room is reserved for all at once, under
tokens that nobody knows yet (−1); whoever keeps them later says what they were (`settle`).

Invariant: drafts, and the distributions they were drawn from, are those of `write_drafts`, up to the order of sums.

Not covered: several texts, top-k, top-p and min-p, keys and values of 4 bits (drafters.py has them all).
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import native
from drafters import SETTINGS, Round, finite, write_drafts
from kernels import FEW
from nativestep import NativeStep
from sampling import Keyed


def serves(llama: Any, unread: Sequence[Sequence[int]], round: Round) -> bool:
    """Whether this round's drafts can be one call."""
    tokens = len(unread[0]) + round.gammas[0] - 1
    return (len(round.gammas) == 1 and getattr(llama, "few", None) is not None and native.library() is not None and unread[0] and tokens <= FEW
            and isinstance(round.coin, type) and issubclass(round.coin, Keyed) and NativeStep.whole
            and all(round.settings(name)[0] in (None, neutral) for name, neutral in SETTINGS.items() if name != "temperature"))


def write_at_once(llama: Any, extend: Callable[..., Any], seqs: Sequence[int], unread: Sequence[Sequence[int]], round: Round) -> tuple[Tensor, Tensor]:
    """As `write_drafts`, whose work it is where this is not for it -> int64[1, k], float32[1, k, V]."""
    if not serves(llama, unread, round):
        return write_drafts(llama, extend, seqs, unread, round)
    (new,), k = unread, round.gammas[0]
    step = extend([(seqs[0], [*new, *[-1] * (k - 1)])])
    coins, temperature = round.coins[round.own:round.own + k], round.settings("temperature")[0]
    drafted, q = step.drafts(llama.few, llama.embed.rows(torch.tensor(new)), *llama.turns(step.positions),
                             1.0 if temperature is None else temperature, coins.place, coins.role, round.vocab)
    return drafted[None], finite(q)[None]


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what a draft of a token costs, over a pass of the target.

@torch.inference_mode()
def main() -> None:
    from engine import paged
    from matmul import seconds
    from model import Llama
    from request import Request, Settings
    if native.library() is None:
        return print(f"there is no C here: {native.why_not()}. Drafts are written one by one.")
    target, draft = (Llama.load(name, "cpu", torch.float32) for name in ("tiny", "tiny-draft"))
    caches, text = [paged(llama, 20, 200) for llama in (target, draft)], Request(list(range(1, 101)), Settings(1.0, seed=1, max_tokens=50), ())
    seqs = [cache.open(())[0] for cache in caches]
    for llama, cache, seq in zip((target, draft), caches, seqs):
        llama(torch.tensor(text.tokens[:-1]), cache.extend([(seq, text.tokens[:-1])]))

    def taken(cache: Any, seq: int, run: Callable[[], object]) -> float:
        return seconds(lambda: (run(), cache.truncate(seq, 99)), 50)
    one = taken(caches[0], seqs[0], lambda: target(torch.tensor([1]), caches[0].extend([(seqs[0], [1])])))
    print(f"a pass of tiny over one token: {1e6 * one:.0f} microseconds; four tokens drafted by tiny-draft, a token, over that pass")
    for name, write in (("one by one", write_drafts), ("in one call", write_at_once)):
        spent = taken(caches[1], seqs[1], lambda: write(draft, caches[1].extend, [seqs[1]], [[1]], Round([text], [4], target.config.vocab_size, target.device)))
        print(f"  {name:12} c = {spent / 4 / one:.2f}")


if __name__ == "__main__":
    main()
