"""Several processes that run one program in step, as tensor parallelism (parallel.py) needs them.

torchrun starts them, or `others` does, in the same way: it runs the program's command again, and
the environment says where to meet. Then the user's process is the first one, and keeps the terminal
with its input and its signals. All run the same code. Only the first reads and prints; what it
reads goes to the others (`read_once`).

  - Signals are for the first process; the others ignore them. While all compute, a signal only sets
    the stop flag, which travels with the next numbers on which the processes agree: so all stop
    after one step.
  - A second signal ends the program at once, also where a process hangs: a thread looks for it.
  - An error of all processes is told once, by the first. A process that fails alone waits a moment,
    tells its error, and ends; then all end.

Invariant: when a process ends, all end. Not covered: starting processes on several machines, and
one line for an error there (torchrun has its own words).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from app.shell import SIGNALS, Terminated, raise_signal, say, status
from errors import UserError
from kernels import recordings
from parallel import num_processes, stop_flag

PROGRAM = Path(__file__).parent.parent / "generate.py"
TO_BEGIN = timedelta(minutes=5)
FOREVER = timedelta(days=365)  # a chat waits for its reader
GRACE = 1.0  # seconds for another process to end first


# ---- Signals -----------------------------------------------------------------------------------


class Signals:
    """How the first process handles Ctrl-C and SIGTERM: at once, unless they wait."""

    wait = False  # for the end of a step, or until a result is printed
    watched = False  # by a thread


signals = Signals()


def handle_signal(number: int, frame: Any) -> None:
    """The signal handler of the command line."""
    if not signals.wait:
        raise_signal(number, frame)
    if not signals.watched:
        set_stop_flag(number)


def set_stop_flag(number: int) -> None:
    """Let this signal wait; a second one ends the program."""
    if stop_flag.error is not None:
        os._exit(128 + number)
    stop_flag.error = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


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


@contextmanager
def watched_signals() -> Iterator[None]:
    """In the block a thread sets the stop flag: the first thread may wait for others in C++."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            set_stop_flag(number[0])

    Thread(target=watch, daemon=True).start()
    signal.set_wakeup_fd(writer)  # C writes each signal's number there, at once
    signals.watched = True
    try:
        yield
    finally:
        signals.watched = False
        signal.set_wakeup_fd(-1)
        os.close(writer)


# ---- The first process and the others ----------------------------------------------------------


def read_once(read: Callable[[], Any]) -> Any:
    """The first process reads; every process returns what it read, or raises its error."""
    if num_processes() == 1:
        return read()
    answer: list[Any] = [None, None]  # what was read, and an error
    if dist.get_rank() == 0:
        try:
            answer[0] = read()
        except (EOFError, OSError, UnicodeError, UserError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def follow(run: Callable[[], Any]) -> int:
    """Run it in a process after the first, in silence, unless it fails alone -> the exit status."""
    sys.stdin = open(os.devnull, encoding="utf-8")
    sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.stderr = open(os.devnull, "w", encoding="utf-8")

    def run_patiently() -> None:
        try:
            run()
        except KeyboardInterrupt:  # the first process has the status, and may still be printing
            return
        except Exception:
            time.sleep(GRACE)  # an error of all processes ends this one here
            sys.stderr = sys.__stderr__
            raise

    return status(run_patiently, signals=())


# ---- Beginning ---------------------------------------------------------------------------------


def environment_number(name: str, default: int) -> int:
    """A number that torchrun sets."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r} in the environment: unset it, or use torchrun")
    return int(text)


def torchrun_ranks() -> tuple[int, int, int]:
    """Rank, number of processes and rank on this machine, set by torchrun; one process: 0, 1, 0."""
    rank = environment_number("RANK", 0)
    n = environment_number("WORLD_SIZE", 1)
    local_rank = environment_number("LOCAL_RANK", 0)
    if n == 1:  # a rank alone means nothing
        return 0, 1, 0
    if rank >= n or "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"WORLD_SIZE is {n} in the environment, with RANK {rank} or without MASTER_ADDR: unset "
            "them, or use torchrun"
        )
    return rank, n, local_rank


def leave() -> None:
    """Leave the group, after an error, too: its threads end. Recordings go first: NCCL waits for
    those that launch it, and an error's traceback may keep them alive."""
    for graph in recordings:
        graph.reset()
    dist.destroy_process_group()


@contextmanager
def joined(n: int | None, device: torch.device, arguments: Sequence[str]) -> Iterator[torch.device]:
    """Run the block in n processes -> the device of this one. n None: as torchrun says, or one.

    arguments: the program's, for the processes that are started here.
    """
    rank, started, local_rank = torchrun_ranks()
    if n is not None and n < 1:
        raise UserError(f"--tensor-parallel is {n}: it must be at least 1")
    if started > 1 and n not in (None, started):
        raise UserError(
            f"--tensor-parallel is {n}, and torchrun has started {started} processes: leave it out"
        )
    n = n or started
    if n == 1:
        yield device
        return
    if device.index is not None:
        raise UserError(f"--device is {device}, but each process takes its own: name {device.type}")
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(watched_signals())
        else:  # torchrun sends signals to all; the first process stops all
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        if started == 1:
            store = stack.enter_context(others(n, arguments))
        else:  # by hand: to meet has a time limit, what comes later has none
            store, *_ = next(dist.rendezvous("env://", timeout=TO_BEGIN))
        dist.init_process_group(store=store, rank=rank, world_size=n, timeout=FOREVER)
        stack.callback(leave)
        yield device if device.type == "cpu" else torch.device(device.type, local_rank)


@contextmanager
def others(n: int, arguments: Sequence[str]) -> Iterator[dist.Store]:
    """Start n − 1 processes, as torchrun would -> where all meet. Each has a share of the cores."""
    store = dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False)
    threads = max(1, torch.get_num_threads() // n)
    torch.set_num_threads(threads)
    environment = os.environ | dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        WORLD_SIZE=str(n),
        OMP_NUM_THREADS=str(threads),
        TORCH_CPP_LOG_LEVEL="FATAL",  # no lines of PyTorch's own beside our error
    )
    processes: list[subprocess.Popen[bytes]] = []
    leaving = Event()

    def end_with(rank: int) -> None:
        """End this process when that one has ended with an error."""
        code = processes[rank - 1].wait()
        if code == 0 or leaving.is_set():
            return
        if code < 0:
            code = 2
            say(f"error: process {rank + 1} of {n} was killed, and so all end")
        end_all()
        os._exit(code)

    def end_all() -> None:
        leaving.set()
        for process in processes:
            process.kill()

    try:
        with waiting_signals():
            for rank in range(1, n):
                process = subprocess.Popen(
                    [sys.executable, str(PROGRAM), *arguments],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,  # the terminal's Ctrl-C is for the first process
                )
                processes.append(process)
        for rank in range(1, n):
            Thread(target=end_with, args=[rank], daemon=True).start()
        yield store
    except RuntimeError:  # perhaps because another process has ended: `end_with` tells why
        time.sleep(GRACE / 2)
        raise
    finally:
        end_all()
