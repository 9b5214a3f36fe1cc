"""Where the time goes: a trace of torch.profiler with the phases of a step as named ranges, and a line for each phase.

    python generate.py --profile trace.json --max-tokens 64 "Once upon a time"          opens in ui.perfetto.dev

    draft      proposing tokens with a model
    verify     the target's pass over pending and drafted tokens, without attention
    attend     storing keys and values, and attention, of target and draft
    sample     logits to probabilities, and every pick
    the rest   scheduling, acceptance, n-grams, bookkeeping, text

A phase inside another phase counts only as itself, so the lines add up to the whole. On a CPU the profiled model runs
layer by layer, which is slower, so that attention can be timed. On a GPU the end of a phase waits for the device, but
not while a CUDA graph is captured; a replay is one launch, and counts for the phase that launched it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from app.shell import check_file, new_file, say
from kernels import Ops
from model import Llama

PHASES = ("draft", "verify", "attend", "sample", "the rest")


class Phases:
    """Seconds of each phase, without the seconds of phases inside it."""

    def __init__(self) -> None:
        self.seconds, self.inside, self.start = Counter[str](), ["the rest"], time.perf_counter()

    def turn(self) -> None:
        """Add the time since the last turn to the innermost phase."""
        if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.inside[-1]] += now - self.start
        self.start = now

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count time for this phase: as a context manager, or as a decorator."""
        self.turn()
        self.inside.append(phase)
        try:
            with record_function(phase):
                yield
        finally:
            self.turn()
            self.inside.pop()

    def lines(self) -> list[str]:
        all_of_it = sum(self.seconds.values()) or 1.0
        return [
            f"{phase:10}{self.seconds[phase]:8.3f} s {self.seconds[phase] / all_of_it:6.1%}"
            for phase in PHASES
        ]


class Timed:
    """The operations `ops`, each counted for its phase."""

    def __init__(self, ops: Ops, phases: Phases):
        self.ops, self.phases = ops, phases
        self.attend, self.look_back = map(phases.within("attend"), (ops.attend, ops.look_back))
        self.probabilities, self.pick = map(phases.within("sample"), (ops.probabilities, ops.pick))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def around(self, llama: Llama) -> Ops:
        return self.ops if llama.device.type == "cuda" else Ops()

    def forward(self, plain: Callable[..., Any], llama: Any, *pass_: Any) -> Any:
        with self.phases.within("draft" if "draft" in self.phases.inside else "verify"):
            return self.around(llama).forward(plain, llama, *pass_)

    def draft(self, plain: Callable[..., Any], llama: Any, *round: Any) -> Any:
        with self.phases.within("draft"):
            return self.around(llama).draft(plain, llama, *round)


@contextmanager
def profiled(file: str, models: Sequence[Llama]) -> Iterator[None]:
    """Trace the work of these models into this file, and print a line for each phase."""
    check_file(Path(file))  # refuses a file that cannot be written, before the work
    stopped, phases, own = None, Phases(), [llama.ops for llama in models]
    for llama in models:
        llama.ops = Timed(llama.ops, phases)
    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    ) as trace:
        phases.start = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt as error:  # print what was measured
            stopped = error
        finally:
            phases.turn()
            for llama, ops in zip(models, own):
                llama.ops = ops
    with new_file(Path(file)) as new:
        trace.export_chrome_trace(str(new))
    say("\n".join(phases.lines()) + f"\n{file} has the trace: open it in ui.perfetto.dev")
    if stopped:
        raise stopped
