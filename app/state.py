"""What the page at / shows of a running batch."""

from typing import Any

from batcher import Batcher


def snapshot(batcher: Batcher, since: float = 0) -> dict[str, Any]:
    """The state of the batch now. Called between two steps."""
    return {
        "steps": batcher.num_steps,
        "running": len(batcher.running),
        "waiting": len(batcher.waiting),
    }
