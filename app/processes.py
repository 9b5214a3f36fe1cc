"""Several processes that run one command line in step, as tensor parallelism (parallel.py) needs them.

The first process reads, prints and gets signals; the others only compute. torchrun or the first starts them.

  - Only the first process reads a stream; it sends what it read to all processes (`read_once`).
  - A connection joins the first process to each other one (`Lifelines`). It carries one message, the last. If it breaks
    without a message, a process has died: the process at the other end ends at once, whatever it waits for.
  - Only the first process acts on Ctrl-C and SIGTERM. While all compute, it remembers the signal, and all stop after
    the same step (`asked_to_stop`): a chat can go on, and results are whole.

Invariant: when a process ends, all end. Standard error has one line for it, and otherwise what one process prints.
Not covered: a machine that vanishes without closing its connections; starting processes on several machines (torchrun).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from app.shell import LONGEST, Terminated, refuse
from errors import UserError, brief

PLACE = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0)  # set by torchrun; the values of one process
MOST_PROCESSES = 64
SIGNALS = signal.SIGINT, signal.SIGTERM
FOREVER = timedelta(days=365)  # a chat waits for its reader
GRACE = 1.0  # seconds for a process to end by itself
WORD = 4 * LONGEST  # bytes of a last message


def several() -> bool:
    """Whether this process is one of several that share each model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# ---- What the first decides ------------------------------------------------------------------------------------------


class Later:
    """The signal handler of the first process: while all processes compute, it only remembers a signal."""

    def __init__(self, now: Callable[[int, Any], Any]):
        self.now, self.number, self.alone = now, 0, True  # alone: no other process computes

    def __call__(self, number: int, frame: Any) -> None:
        if self.alone:
            self.now(number, frame)
        if self.number:  # a second signal ends the program
            raise Terminated
        self.number = number

    def turn(self, alone: bool) -> int:
        """Set `alone` -> the signal remembered until now; 0: none."""
        self.alone, number, self.number = alone, self.number, 0
        return number


def handler() -> Later:
    held = [now for now in map(signal.getsignal, SIGNALS) if isinstance(now, Later)]
    return held[0] if held else Later(signal.default_int_handler)


def asked_to_stop() -> int:
    """The signal that the first process remembers, for all processes to stop after this step; 0: none."""
    return handler().turn(alone=False)


def stop_together(number: int) -> None:
    """Raise, in every process, what this signal of the first process means; 0: go on."""
    if number:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def read_once(read: Callable[[], Any]) -> Any:
    """The first process reads -> the result, in every process; an error is raised in every process, too."""
    if not several():
        return read()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        handler().turn(alone=True)
        try:
            said[0] = read()
        except (EOFError, OSError, ValueError) as error:
            said[1] = error
        handler().turn(alone=False)
    dist.broadcast_object_list(said)
    if said[1] is not None:
        raise said[1]
    return said[0]


def hush() -> None:
    """All but the first process read nothing and say nothing."""
    if int(os.environ.get("RANK", 0)):
        sys.stdin, sys.stdout, sys.stderr = (
            open(os.devnull),
            open(os.devnull, "w"),
            open(os.devnull, "w"),
        )


# ---- A word before the end ------------------------------------------------------------------------------------------


class Lifelines:
    """A connection of the first process to each other one. If it breaks without a message, all processes end.

    The message of a process that fails is the reason, to the first process; every other message is empty.
    """

    def __init__(self, rank: int, n: int):
        self.rank, self.n, self.left, self.speaks = rank, n, Event(), Lock()
        self.listeners = {
            peer: Thread(target=self.listen, args=(peer,), daemon=True)
            for peer in ([0] if rank else range(1, n))
        }
        for listener in self.listeners.values():
            listener.start()

    def listen(self, peer: int) -> None:
        word = torch.zeros(WORD, dtype=torch.uint8)
        try:
            dist.recv(word, peer)
            why = bytes(word.tolist()).rstrip(b"\0").decode()
            if self.rank == 0 and not why or self.left.wait(GRACE):
                return
        except RuntimeError:
            why = "it was killed, or its machine is gone"
        if not self.left.is_set():
            self.end(why and f"process {peer + 1} of {self.n} has ended, and so do all: {why}")

    def end(self, why: str) -> None:
        """End this process at once, whatever it waits for. why: an error to print; empty: none."""
        self.speaks.acquire()  # and never released
        self.say("")
        sys.stderr = (
            sys.__stderr__ if self.rank == 1 else sys.stderr
        )  # the first is gone: one other speaks
        os._exit(refuse(why) if why else 0)

    def say(self, word: str) -> None:
        told = torch.tensor([*word.encode()[:WORD]], dtype=torch.uint8)
        for peer in self.listeners:
            with suppress(RuntimeError):  # it has ended
                dist.send(F.pad(told, (0, WORD - len(told))), peer)

    def leave(self, error: BaseException | None) -> None:
        if isinstance(error, RuntimeError):  # perhaps another process died: `listen` ends this one
            time.sleep(GRACE)
        self.left.set()
        failed = self.rank and isinstance(error, Exception)
        self.say(brief(error or type(error).__name__, LONGEST) if failed else "")
        for listener in self.listeners.values():
            listener.join(3 * GRACE)
        dist.destroy_process_group()


# ---- Beginning -----------------------------------------------------------------------------------------------------


def spawn(count: int, command: Sequence[str]) -> tuple[dist.Store, list[subprocess.Popen[bytes]]]:
    """Start the other processes, each with a share of this machine's cores -> where to meet, the processes."""
    store = dist.TCPStore("127.0.0.1", 0, count, True, wait_for_workers=False)
    torch.set_num_threads(threads := max(1, torch.get_num_threads() // count))
    own = dict(WORLD_SIZE=count, OMP_NUM_THREADS=threads, LLAMA_PORT=store.port)
    return store, [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ
            | {name: str(value) for name, value in dict(own, RANK=rank, LOCAL_RANK=rank).items()},
        )
        for rank in range(1, count)
    ]  # in a session of its own: a terminal's Ctrl-C is the first's


def watch(child: subprocess.Popen[bytes], met: Event) -> None:
    """A process that ends before it has a lifeline ends all, too."""
    if child.wait() and not met.is_set():
        os._exit(
            refuse(
                f"one of the processes has ended before it began (status {child.returncode}), and so do all"
            )
        )


def join(count: int | None, command: Sequence[str], on_exit: ExitStack) -> tuple[int, int, int]:
    """Meet the other processes, started here or by torchrun -> rank, number of processes, rank on this machine."""
    rank, n, local = (int(os.environ.get(name, alone)) for name, alone in PLACE.items())
    if n > 1 and count not in (None, n):
        raise UserError(
            f"--tensor-parallel is {count}, and torchrun has started {n} processes: leave it out"
        )
    if count is not None and not 1 <= count <= MOST_PROCESSES:
        raise UserError(
            f"--tensor-parallel is {count}: it must be from 1 to {MOST_PROCESSES} processes"
        )
    met, port, store = Event(), os.environ.get("LLAMA_PORT"), None
    if n == 1 and (n := count or 1) > 1:
        store, children = spawn(n, command)
        for child in children:
            on_exit.callback(child.kill)
            Thread(target=watch, args=(child, met), daemon=True).start()
        on_exit.callback(met.set)  # first of all: who is killed here has not failed
    elif port and n > 1:
        with suppress(RuntimeError):
            store = dist.TCPStore("127.0.0.1", int(port), n, False, timedelta(seconds=10))
        if store is None:
            raise UserError(
                f"the first of {n} processes has ended before process {rank + 1} began: start all again"
            )
    if n > 1:
        where = {} if store is None else dict(store=store, rank=rank, world_size=n)
        dist.init_process_group(timeout=FOREVER, **where)
        met.set()
    return rank, n, local


@contextmanager
def joined(
    count: int | None, command: Sequence[str], device: torch.device
) -> Iterator[torch.device]:
    """Run the block in all processes -> the device of this process. count: processes to run `command`; under torchrun
    None, or its number. ValueError for any other number."""
    with ExitStack() as on_exit:
        if max(count or 1, int(os.environ.get("WORLD_SIZE", 1))) > 1:
            heard = [
                (number, now) for number in SIGNALS if callable(now := signal.getsignal(number))
            ]
            own = (
                signal.SIG_IGN
                if int(os.environ.get("RANK", 0))
                else Later(heard[0][1])
                if heard
                else None
            )
            for number, now in heard:
                on_exit.callback(signal.signal, number, now)
                signal.signal(number, own)
            handler().turn(alone=False)  # from now on the first process only remembers signals
        rank, n, local = join(count, command, on_exit)
        if n == 1:
            yield device
            return
        lines, error = Lifelines(rank, n), None
        try:
            stop_together(handler().turn(alone=False))
            if device.index is not None:
                raise UserError(
                    f"--device is {device}: each of {n} processes takes its own: name {device.type}"
                )
            yield device if device.type == "cpu" else torch.device(device.type, local)
        except BaseException as stopped:
            error = stopped
            raise
        finally:
            lines.leave(error)
