"""Several processes that run one program in step, as tensor parallelism (parallel.py) needs them.

torchrun starts them, or `joined` does, with PyTorch's own launcher (torch.multiprocessing): then
the user's process is the first one, and keeps the terminal with its input and its signals. All run
the same code. Only the first reads and prints; what it reads goes to the others (`read_once`).

  - A signal reaches the first process alone, and while all compute it only sets the stop flag; the
    flag travels with the next numbers on which the processes agree, so all stop after one step.
  - A second signal ends the program at once, also where a process hangs: a thread looks for it.
  - An error of all processes is told once, by the first. A process that fails alone waits a moment,
    tells its error, and ends; then all end.

Invariant: when a process ends, all end. Not covered: starting processes on several machines, and
one line for an error there (torchrun has its own words).
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from threading import Event, Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from app.shell import Terminated, raise_signal, say, status
from errors import UserError
from parallel import num_processes, stop_flag

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
    signal.set_wakeup_fd(writer)
    signals.watched = True
    try:
        yield
    finally:
        signals.watched = False
        signal.set_wakeup_fd(-1)
        os.close(writer)


# ---- The first process and the others ----------------------------------------------------------


def read_once(read: Callable[[], Any]) -> Any:
    """The first process reads -> what it read, in every process; so is an error."""
    if num_processes() == 1:
        return read()
    answer: list[Any] = [None, None]  # and an error
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


@contextmanager
def joined(
    n: int | None, device: torch.device, function: Callable[[], Any]
) -> Iterator[torch.device]:
    """Run the block in n processes -> the device of this one. n None: as torchrun says, or one.

    The others call `function` (a `partial`, to be sent), which comes here, too.
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
        if num_processes() > 1:  # one of those that `others` has started
            local_rank = dist.get_rank()
        elif started > 1:
            if rank == 0:
                stack.enter_context(watched_signals())
            else:  # torchrun sends Ctrl-C to all; the first process stops all
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            dist.init_process_group(timeout=FOREVER)
            stack.callback(dist.destroy_process_group)
        else:
            stack.enter_context(watched_signals())
            stack.enter_context(others(n, function))
        yield device if device.type == "cpu" else torch.device(device.type, local_rank)


@contextmanager
def others(n: int, function: Callable[[], Any]) -> Iterator[None]:
    """Start n − 1 processes, each with a share of this machine's cores, and join them."""
    threads = max(1, torch.get_num_threads() // n)
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of the others: one line tells all
    context = (n, store.port, threads, function)
    resource_tracker.ensure_running()  # it would unblock signals
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the others inherit that
    processes = start_processes(begin_process, context, n - 1, join=False, daemon=True)
    leaving = Event()
    watcher = Thread(target=end_with, args=(processes, n, leaving), daemon=True)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        watcher.start()
        dist.init_process_group(store=store, rank=0, world_size=n, timeout=FOREVER)
        yield
        dist.destroy_process_group()
    except RuntimeError:  # perhaps because another process has ended: `end_with` tells why
        watcher.join(2 * GRACE)
        raise
    finally:
        leaving.set()
        for process in processes.processes:
            process.kill()


def begin_process(
    index: int, n: int, port: int, threads: int, function: Callable[[], Any]
) -> NoReturn:
    """What a process after the first does."""
    os.setsid()  # the terminal's Ctrl-C is for the first process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what came before
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what comes when the first process has ended
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    torch.set_num_threads(threads)

    def join_and_run() -> None:
        store = dist.TCPStore("127.0.0.1", port, n, timeout=timedelta(seconds=10))
        dist.init_process_group(store=store, rank=index + 1, world_size=n, timeout=FOREVER)
        function()
        dist.destroy_process_group()

    sys.exit(follow(join_and_run))


def end_with(processes: ProcessContext, n: int, leaving: Event) -> None:
    """End this process when another one has ended."""
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    message = ""
    try:
        while not processes.join():
            pass
        return
    except ProcessRaisedException as error:  # a bug
        code = 1
        message = error.msg.strip()
    except ProcessExitedException as error:
        code = error.exit_code  # of a user's mistake, which it has told
        if code < 0:
            code = 2
            message = f"error: process {error.error_index + 2} of {n} was killed, and so all end"
    if leaving.is_set():
        return
    if message:
        say(message)
    os._exit(code)
