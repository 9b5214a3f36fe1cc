"""What a person sees while a model is loaded, and what runs then: all on standard error.

Nothing for two seconds. Then at a terminal one line, which is rewritten and wiped at the end; in a
pipe or a file a line every few seconds.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from app.shell import say
from checkpoint import progress
from checkpoint.progress import Progress
from model import Llama, weight_bytes

QUIET = 2.0  # seconds
EVERY = 5.0  # seconds from line to line in a pipe
REWRITE = 0.1  # seconds from one text of the line to the next at a terminal
WIPE = "\r\x1b[K"


class ProgressLine:
    """Shows progress: at a terminal a line that is rewritten."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.next = time.perf_counter() + QUIET
        self.is_shown = False

    def show(self, text: str) -> None:
        """Show the text, unless it is too early for a new one."""
        now = time.perf_counter()
        if now < self.next:
            return
        if self.is_terminal:
            self.is_shown = True
            self.next = now + REWRITE
            say(WIPE + text, end="")
        else:
            self.next = now + EVERY
            say(text)

    def wipe(self) -> None:
        if self.is_shown:
            self.is_shown = False
            say(WIPE, end="")

    def watch(self, at: Progress) -> None:
        """A watcher of loading."""
        self.show(
            f"{at.verb}: {at.num_tensors:,} of {at.all_tensors:,} tensors, "
            f"{at.num_bytes / 1e6:,.0f} of {at.all_bytes / 1e6:,.0f} MB"
        )


@contextmanager
def shown_progress() -> Iterator[ProgressLine]:
    """In the block loading shows how far it is."""
    line = ProgressLine()
    progress.watchers.append(line.watch)
    try:
        yield line
    finally:
        progress.watchers.remove(line.watch)
        line.wipe()


def describe(name: str, llamas: Sequence[Llama]) -> str:
    """What runs: the model, how its weights are stored, the memory of these and of a draft's, in
    what it computes, and on what."""
    target = llamas[0]
    stored = str(target.weight_dtype)
    if target.config.quantization is not None:
        stored = target.config.quantization.name
    megabytes = sum(map(weight_bytes, llamas)) / 1e6
    text = f"running {name}: {stored} weights, {megabytes:,.0f} MB"
    if len(llamas) > 1:
        text += " with the draft's"
    text += f"; computed in {target.dtype} on {target.device}"
    if target.device.type == "cpu":
        text += f", threads: {torch.get_num_threads()}"
    return text.replace("torch.", "")
