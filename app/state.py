"""What the page at / shows of a running batch: a picture of it between two steps.

`snapshot` looks at the batch, its cache and its speculation, and changes nothing. The thread that
runs the batch calls it, between steps, at most ten times a second, and only while somebody looks.
The page draws it, and its changes over time. Acceptance is the drafter's average (gamma.py).

Blocks are told as one letter each: `f` free, `c` cached (no text has it, a prompt that begins alike
may), `s` shared by several texts, `t` of one text.

Invariant: a block has exactly one letter, so the four counts add up to the pool's total.
Cost: a loop over the blocks, 0.05 µs each (1.4 ms of 30,000), and over the running texts.
Not covered: the draft's own cache.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from batcher import Batcher
from kvcache import Cache
from paged import BlockPool, PagedCache
from request import Request

KINDS = {"free": "f", "cached": "c", "shared": "s", "text": "t"}
MAX_BLOCKS = 4096  # letters that are told; counts are of all blocks
MAX_WAITING = 64  # rows of the queue that are told
Picture = dict[str, Any]


def snapshot(batcher: Batcher, num_tokens: int) -> Picture:
    """The batch as JSON holds it. num_tokens: made since the server began."""
    runner = batcher.runner
    rows = [picture_row(request) | stored_row(batcher, request) for request in batcher.running]
    rows += map(picture_row, islice(batcher.waiting, MAX_WAITING))
    return {
        "seconds": time.perf_counter(),
        "step": batcher.num_steps,
        "max_batch": batcher.max_batch,
        "running": len(batcher.running),
        "waiting": len(batcher.waiting),
        "requests": rows,
        "cache": cache_state(runner.cache),
        "num_tokens": num_tokens,
        "acceptance": runner.drafter.acceptance.alpha if runner.has_drafter else None,
    }


# ---- Rows of the batch ---------------------------------------------------------------------------


def picture_row(request: Request) -> Picture:
    """A text. In the queue it is not begun, or preempted, so that it has no blocks."""
    return {
        "number": request.number,
        "prompt_tokens": request.num_prompt_tokens,
        "tokens": len(request.tokens) - request.num_prompt_tokens,
        "max_tokens": request.settings.max_tokens,
        "preemptions": request.num_preemptions,
        "drafts": request.rounds[-1].num_drafts if request.rounds else 0,
        "state": "preempted" if request.num_preemptions else "waiting",
        "stored": 0,
        "blocks": [],
    }


def stored_row(batcher: Batcher, request: Request) -> Picture:
    """What the cache has of a text in the batch: while it lacks more than the last token, the text
    is read."""
    cache = batcher.runner.cache
    return {
        "state": "reading" if batcher.runner.num_pending(request) > 1 else "writing",
        "stored": cache.length(request.seq),
        "blocks": cache.sequence(request.seq).block_table[:],
    }


# ---- The cache -----------------------------------------------------------------------------------


def cache_state(cache: Cache) -> Picture:
    """Paged: its blocks. Contiguous: rows, one for each text: `blocks` of `requests` names them."""
    if isinstance(cache, PagedCache):
        return {"kind": "paged", "block_size": cache.block_size} | pool_state(cache.pool)
    return {"kind": "contiguous", "row_tokens": cache.max_len}


def pool_state(pool: BlockPool) -> Picture:
    """The letter of each block, and how many have each."""
    letters = bytearray(KINDS["text"].encode() * pool.total)
    for block, references in enumerate(pool.references):
        if references > 1:
            letters[block] = ord(KINDS["shared"])
    for block in pool.idle:
        letters[block] = ord(KINDS["cached"])
    for block in pool.free:
        letters[block] = ord(KINDS["free"])
    counts = {kind: letters.count(letter.encode()) for kind, letter in KINDS.items()}
    return {"total": pool.total, "counts": counts, "blocks": letters[:MAX_BLOCKS].decode()}
