"""Where the time goes: a trace of torch.profiler with the phases of a step by name, and a line for each.

    python generate.py --profile trace.json --max-tokens 64 "Once upon a time"          opens in ui.perfetto.dev

    draft      proposing tokens: the draft's own products, or n-grams looked up
    verify     the target's pass over what is pending and what was drafted, without what follows
    attend     storing keys and values, and attention, of target and draft
    sample     logits to probabilities, and every pick and acceptance
    the rest   scheduling, bookkeeping, text

A phase inside another counts as itself: the lines add up to the whole. The names are put around the functions only while a profile is
taken, so that without one they cost nothing, and no page has to know of it. A model whose layers are one call on a CPU (native.py) goes layer by
layer meanwhile, so that attention can be told from the rest, and is slower for it.

Invariant: afterwards every function is what it was.

On a GPU, work is launched and goes on while Python does. So that a phase's seconds are its own, its end waits for the device, but not
while a CUDA graph is captured; what a graph replays is one launch, and counts for the phase that launched it.

Not covered: the time of single kernels by phase, which the trace shows.
"""
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import speculative
from drafters import ModelDrafter, NgramDrafter, Round, SelfDrafter
from kvcache import Alone, Step
from nativestep import NativeStep
from pagedstep import PagedStep
from sampling import Keyed
from shell import check_file, say, whole
from speculative import Decoder

PHASES = [(ModelDrafter, "propose", "draft"), (SelfDrafter, "propose", "draft"), (NgramDrafter, "propose", "draft"), (Decoder, "_read", "verify"),
          (Step, "attend", "attend"), (PagedStep, "attend", "attend"), (NativeStep, "attend", "attend"), (NativeStep, "attend_turned", "attend"),
          (Alone, "attend", "attend"), (Round, "probabilities", "sample"),
          (Keyed, "pick", "sample"), (Keyed, "accept", "sample"), (Keyed, "ahead", "sample"),
          (speculative, "verify", "sample"), (speculative, "couple", "sample")]


class Phases:
    """Seconds of each phase, without those of phases inside it."""

    def __init__(self) -> None:
        self.seconds, self.inside, self.start = Counter[str](), ["the rest"], time.perf_counter()

    def _turn(self) -> None:
        if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.inside[-1]] += now - self.start
        self.start = now

    def named(self, run: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The same function, in this phase."""
        @wraps(run)
        def within(*args: Any, **more: Any) -> Any:
            self._turn()
            self.inside.append(phase)
            try:
                with record_function(phase):
                    return run(*args, **more)
            finally:
                self._turn()
                self.inside.pop()
        return within

    @contextmanager
    def watched(self) -> Iterator["Phases"]:
        """Every function of PHASES is in its phase."""
        phases = list(PHASES)
        if torch.cuda.is_available() and find_spec("triton"):                   # which kernelstep.py needs
            from kernelstep import KernelStep
            phases += [(KernelStep, "attend", "attend"), (KernelStep, "attend_turned", "attend")]
        own = [(owner, name, vars(owner)[name], phase) for owner, name, phase in phases if name in vars(owner)]
        self.start = time.perf_counter()
        try:
            for owner, name, run, phase in own:
                setattr(owner, name, self.named(run, phase))
            NativeStep.whole = False                                            # layer by layer, so that attention can be told from the rest
            yield self
        finally:
            NativeStep.whole = True
            self._turn()
            for owner, name, run, _ in own:
                setattr(owner, name, run)

    def lines(self) -> list[str]:
        whole = sum(self.seconds.values()) or 1.0
        return [f"{phase:10}{self.seconds[phase]:8.3f} s {self.seconds[phase] / whole:6.1%}" for phase in ("draft", "verify", "attend", "sample", "the rest")]


@contextmanager
def profiled(file: str) -> Iterator[None]:
    """What is done inside is traced into this file, and told in five lines."""
    stopped = None
    check_file(Path(file))                              # refuses now what cannot be written
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as trace, Phases().watched() as phases:
        try:
            yield
        except KeyboardInterrupt as error:              # what there is, is told
            stopped = error
    with whole(Path(file)) as new:
        trace.export_chrome_trace(str(new))
    say("\n".join(phases.lines()) + f"\n{file} has the trace: open it in ui.perfetto.dev")
    if stopped:
        raise stopped
