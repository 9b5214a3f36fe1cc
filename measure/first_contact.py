"""The first minutes on a GPU: every step with what it should show, the most telling first.

    python bench.py --gpu first

One process imports all, and forks a child for each step: an illegal address ends all that a process
does on a GPU, and the next step must be clean. Before anything is launched, all kernels are
compiled, on all cores (precompile.py). Rows are stored as they come. A step has a limit, and so
have all together; what hangs is killed and named, and a step for which no time is left is left out.

If rows of `smoke` are wrong, the first of each kind is computed again at once, with one part of
gpu/ after the other turned off: where the row is right then, that part is at fault.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from app.shell import say
from measure.gpu_cases import (
    CASES,
    OFF,
    Key,
    gpu_rows,
    row_name,
    run_case,
    scale_of,
    wrong_rows,
)
from measure.gpu_parts import QUICK, Scale
from measure.precompile import compile_kernels
from measure.report import Results

Store = Callable[[Results], None]
Send = Callable[[Any], None]

ALL_SECONDS = 540
QUICK_SECONDS = 3600
SHORTEST = 10  # seconds: with less, a step is left out


class Stage(NamedTuple):
    case: str
    seconds: float  # at most
    wanted: str  # what it should show
    off: str = ""  # parts of gpu/ that are turned off
    keys: Sequence[Key] | None = None  # of its rows, if not all

    @property
    def name(self) -> str:
        return f"{self.case}, without {self.off}" if self.off else self.case


STEPS = (
    Stage("machine", 40, "the GPU that you mean; 700 TFLOP/s of an H100, 90 % of its bandwidth"),
    Stage("compile", 120, "300 kernels found, if you brought a cache"),
    Stage("smoke", 150, "ok in every row"),
    Stage("texts", 100, "ok in every row; a near-tie or two, above 0, are possible"),
    Stage("decode", 110, "INT8 1.6 times the tokens/s of 16 bits, INT4 2.3 times"),
    Stage("kernels", 60, "for many texts, a large share of the bandwidth in all widths"),
    Stage("peers", 150, "above 1"),
    Stage("profile", 45, "which kernels to look at"),
    Stage("speculation", 80, "above 1 where drafts are accepted, and auto not far below the best"),
    Stage("serving", 90, "many times the tokens/s of one stream"),
)
AGAIN = 25  # seconds, with a part turned off
MOST_AGAIN = 8  # rows


def run_first(quick: bool, store: Store) -> int:
    """Run all steps -> 1 if a step went wrong, else 0."""
    (has_gpu,) = forked(lambda send: send(torch.cuda.is_available()), 60)
    scale_of("first", quick, has_gpu)  # or an error
    end = time.monotonic() + (QUICK_SECONDS if quick else ALL_SECONDS)
    outcomes = {}
    for step in STEPS:
        wrong = run_step(step, end, quick, store)
        outcomes[step.name] = wrong
        if step.case == "smoke" and wrong:
            find_part(step, wrong, end, quick)
    say("")
    for name, wrong in outcomes.items():
        say(f"{name}: {f'{len(wrong)} wrong, first {wrong[0]}' if wrong else 'ok'}")
    return 1 if any(outcomes.values()) else 0


def run_step(step: Stage, end: float, quick: bool, store: Store) -> list[str]:
    """Run a step until `end` at most -> the names of wrong rows, and of one that took too long."""
    left = end - time.monotonic()
    seconds = left if quick else min(step.seconds, left)  # a CPU may be slow
    say(f"\n{step.name}, {seconds:.0f} s at most; should show: {step.wanted}")
    if left < SHORTEST:
        return ["no time was left"]
    if step.case == "compile":
        return [] if quick else compile_kernels(seconds)
    results: Results = {}
    try:
        for results in forked(partial(run_child, step, quick), seconds):
            store(results)
    except (TimeoutError, ChildProcessError) as error:
        keys = [*step_keys(step, quick), ("its end",)]
        at = row_name(keys[len(gpu_rows(results))])
        say(f"at {at}: {error}")
        return [*wrong_rows(results), at]
    return wrong_rows(results)


def run_child(step: Stage, quick: bool, send: Send) -> None:
    os.environ[OFF] = step.off  # before gpu/ is imported
    run_case(step.case, quick, send, step.keys)


def step_keys(step: Stage, quick: bool) -> Iterable[Key]:
    return step.keys or CASES[step.case].keys(QUICK if quick else Scale())


def find_part(step: Stage, wrong: Sequence[str], end: float, quick: bool) -> None:
    """Run the first wrong row of each kind again, with nothing and with each part turned off."""
    from gpu.tuning import SWITCHES

    first: dict[Key, Key] = {}
    for key in step_keys(step, quick):
        if row_name(key) in wrong:
            first.setdefault(key[:3], key)
    keys = [*first.values()][:MOST_AGAIN]
    told = []
    for part in ("", *SWITCHES):
        again = Stage(step.case, AGAIN, "which part is at fault", off=part, keys=keys)
        still_wrong = run_step(again, end, quick, lambda results: None)
        told.append(f"{again.name}: {len(still_wrong)} of {len(keys)} are wrong")
    say("\n" + "\n".join(told))


def forked(work: Callable[[Send], object], seconds: float) -> Iterator[Any]:
    """What `work(send)` sends from its process.

    TimeoutError if it takes longer: it is killed. ChildProcessError if it fails.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: work(sender.send))
    process.start()
    sender.close()  # so that the pipe ends with the process
    end = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            yield receiver.recv()
        raise TimeoutError(f"killed after {seconds:.0f} s")
    except EOFError:
        process.join()
        if process.exitcode:
            raise ChildProcessError(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
