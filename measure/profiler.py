"""Where the time goes: a trace of torch.profiler, and a line for each phase of a step.

    python generate.py --profile trace.json --max-tokens 64 "Once upon a time"

The trace opens in ui.perfetto.dev; its named ranges are the phases:

    draft      proposing tokens with a model
    verify     the target's pass over pending and drafted tokens
    attend     storing keys and values, and attention: within draft and verify
    sample     logits to probabilities, and every pick: within draft, and beside verify

What is in none of them is scheduling, acceptance, n-grams, bookkeeping and text. On a CPU the
profiled model runs layer by layer, which is slower, so that attention can be timed. On a GPU a
replayed CUDA graph is one launch, and belongs to the phase that launched it.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import profile, record_function

from app.shell import say
from checkpoint.files import check_file, new_file
from drafters import Chain
from eagle import EagleHead
from kernels import Ops
from model import Llama
from speculative import Proposal, Round

PHASES = ("draft", "verify", "attend", "sample")


class TimedOps:
    """The operations `ops` of a model, each in the range of its phase. phase: that of its passes,
    beside those of a chain of drafts."""

    def __init__(self, ops: Ops, phase: str):
        self.ops = ops
        self.phase = phase
        self.is_drafting = False
        self.attend = record_function("attend")(ops.attend)
        self.probabilities = record_function("sample")(ops.probabilities)
        self.pick = record_function("sample")(ops.pick)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def whole_passes(self, llama: Llama | EagleHead) -> Ops:
        """Who runs a whole pass: on a CPU the plain loops, which call the operations above."""
        return self.ops if llama.device.type == "cuda" else Ops()

    def forward(self, llama: Llama, *arguments: Any) -> Tensor:
        return self.timed(self.whole_passes(llama).forward, llama, *arguments)

    def forward_head(self, head: EagleHead, *arguments: Any) -> Tensor:
        return self.timed(self.whole_passes(head).forward_head, head, *arguments)

    def timed(self, run: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """A pass, in the range of its phase unless a chain of drafts has one already."""
        if self.is_drafting:
            return run(*arguments)
        with record_function(self.phase):
            return run(*arguments)

    def chain(self, chain: Chain, round: Round) -> Proposal:
        self.is_drafting = True
        try:
            with record_function("draft"):
                return self.whole_passes(chain.model).chain(chain, round)
        finally:
            self.is_drafting = False


@contextmanager
def trace_phases(file: str, target: Llama, drafts: Sequence[Llama] = ()) -> Iterator[None]:
    """Trace the work of these models into this file, and print a line for each phase."""
    check_file(Path(file))  # before the work
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of PyTorch's own
    models = [target, *drafts]
    original = [llama.ops for llama in models]
    for llama in models:
        llama.ops = TimedOps(llama.ops, "verify" if llama is target else "draft")
    trace = profile()
    trace.start()
    start = time.perf_counter()
    try:
        yield
    finally:  # Ctrl-C too: what was measured is still written
        seconds = time.perf_counter() - start
        trace.stop()
        for llama, ops in zip(models, original):
            llama.ops = ops
        say_phases(trace, seconds)
        with new_file(Path(file)) as new:
            trace.export_chrome_trace(str(new))
            if not new.exists():  # PyTorch does not tell
                raise OSError(f"{file} cannot be written: is the disk full?")
        say(f"{file} has the trace: open it in ui.perfetto.dev")


def say_phases(trace: profile, total: float) -> None:
    for event in trace.key_averages():
        if event.key in PHASES:
            seconds = max(event.cpu_time_total, event.device_time_total) / 1e6
            say(f"{event.key:8}{seconds:8.3f} s {seconds / total:6.1%}")
