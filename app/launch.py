"""Several processes that run one program in step, as tensor parallelism (parallel.py) needs them.

torchrun starts them, or `others` does, in the same way: it runs the program's command again,
and the environment says where to meet. Then the user's process is the first one, and keeps the
terminal with its input and its signals. All run the same code. Only the first reads and prints;
what it reads goes to the others (`read_once`).

  - Signals are for the first process; the others ignore them. While all compute, a signal only sets
    the stop flag, which travels with the next numbers on which the processes agree: so all stop
    after one step. A second signal ends the program at once.
  - An error of all processes is told once, by the first. A process that fails alone waits a moment,
    tells its error, and ends.
  - When a process ends, all end. The first one waits for the others' ends in threads; the standard
    input of the others is a pipe that closes when the first one has ended, in whatever way.

Not covered: a process that hangs (Ctrl-C waits for it, the terminal's Ctrl-\\ does not); starting
processes on several machines, and one line for an error there (torchrun has its own words).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from app.shell import SIGNALS, interruption, say, status
from errors import UserError
from kernels import live_graphs
from parallel import num_processes, stop_flag

PROGRAM = Path(__file__).parent.parent / "generate.py"
FOREVER = timedelta(days=365)  # a chat waits for its reader
GRACE = 1.0  # seconds for another process to end first


# ---- Signals -----------------------------------------------------------------------------------


class Signals:
    """How the first process handles Ctrl-C and SIGTERM: at once, unless they wait."""

    wait = False  # for the end of a step, or until a result is printed


signals = Signals()


def handle_signal(number: int, frame: Any) -> None:
    """The signal handler of the command line. A second signal that has to wait ends the program."""
    if not signals.wait:
        raise interruption(number)
    if stop_flag.error is not None:
        os._exit(128 + number)
    stop_flag.error = interruption(number)


@contextmanager
def waiting_signals() -> Iterator[None]:
    """A signal waits for the end of the block, or for the stop flag to be looked at (`agree`)."""
    outer = signals.wait
    signals.wait = True
    try:
        yield
    finally:
        signals.wait = outer
    error = stop_flag.error
    if error is not None and not outer:
        stop_flag.error = None
        raise error


# ---- The first process and the others ----------------------------------------------------------


def read_once(read: Callable[[], Any]) -> Any:
    """The first process reads, and every process returns what it read. An error ends all."""
    if num_processes() == 1:
        return read()
    answer = [read() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer)
    return answer[0]


def follow(run: Callable[[], Any]) -> int:
    """Run it in a process after the first, in silence, unless it fails alone -> the exit status."""
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))

    def run_patiently() -> None:
        with suppress(KeyboardInterrupt):  # the first process has the status, and may still print
            try:
                run()
            except Exception:
                time.sleep(GRACE)  # an error of all processes ends this one here
                sys.stderr = sys.__stderr__
                raise

    return status(run_patiently, signals=())


# ---- Beginning ---------------------------------------------------------------------------------


def rank() -> int:
    """This process's number: 0 is the first."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


@contextmanager
def joined(n: int, device: torch.device, arguments: Sequence[str]) -> Iterator[torch.device]:
    """Run the block in n processes -> the device of this one. n 1: in torchrun's, or in one.

    arguments: the program's, for the processes that are started here.
    """
    is_started = dist.is_torchelastic_launched()
    if n == 1 and not is_started:
        yield device
        return
    if n > 1 and is_started and rank() == 0:
        raise UserError(f"--tensor-parallel is {n}, and torchrun starts processes: leave it out")
    if device.index is not None:
        raise UserError(f"--device is {device}, but each process takes its own: name {device.type}")
    if rank() > 0:
        for number in SIGNALS:  # torchrun sends them to all; the first process stops all
            signal.signal(number, signal.SIG_IGN)
        if n > 1:
            Thread(target=end_with_first, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // n))  # each has a share of the cores
    meeting = nullcontext(next(dist.rendezvous("env://"))) if is_started else others(n, arguments)
    with meeting as (store, number, size):
        dist.init_process_group(store=store, rank=number, world_size=size, timeout=FOREVER)
        try:
            index = int(os.environ.get("LOCAL_RANK", 0))
            yield device if device.type == "cpu" else torch.device(device.type, index)
        except RuntimeError:  # perhaps because another process has ended: `end_with` tells why
            time.sleep(GRACE / 2)
            raise
        finally:  # an error's traceback may keep recordings alive, and NCCL waits for these
            for graph in live_graphs:
                graph.reset()
            dist.destroy_process_group()


@contextmanager
def others(n: int, arguments: Sequence[str]) -> Iterator[tuple[dist.Store, int, int]]:
    """Start n − 1 processes, as torchrun would -> where all meet, the number of this one, and n."""
    store = dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False)
    environment = os.environ | dict(
        TORCHELASTIC_RUN_ID="none",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        WORLD_SIZE=str(n),
        TORCH_CPP_LOG_LEVEL="FATAL",  # no lines of PyTorch's own beside our error
    )
    with ExitStack() as pipes:
        for other in range(1, n):
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments],
                env=environment | dict(RANK=str(other), LOCAL_RANK=str(other)),
                stdin=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C is for the first process
            )
            pipes.enter_context(process.stdin)
            name = f"process {other + 1} of {n}"
            Thread(target=end_with, args=(process, name), daemon=True).start()
        yield store, 0, n


def end_with(process: subprocess.Popen[bytes], name: str) -> None:
    """End this process when another one fails."""
    code = process.wait()
    if code < 0:
        say(f"error: {name} was killed, and so all end")
        code = 2
    if code:
        os._exit(code)


def end_with_first() -> None:
    """End this process when the first one ends: then the pipe closes, which never holds a byte."""
    os.read(0, 1)
    os._exit(0)
