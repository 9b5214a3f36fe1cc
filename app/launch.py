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
  - Processes of torchrun may be on several machines. Each has a connection to the first one, which
    is silent until both are done. It closes when one of them ends before, and fails, after about 20
    seconds, when the other machine cannot be reached any more.

Not covered: a process that hangs (Ctrl-C waits for it, the terminal's Ctrl-\\ does not); torchrun's
own words, which follow the line that tells an error.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from app.shell import SIGNALS, interruption, say, status
from errors import UserError, brief
from kernels import live_graphs
from parallel import num_processes, stop_flag

PROGRAM = Path(__file__).parent.parent / "generate.py"
FOREVER = timedelta(days=365)  # a chat waits for its reader
GRACE = 1.0  # seconds for another process to end first
# A silent connection is probed after 5 seconds, and every 5 seconds; it fails after 3 lost probes.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


# ---- Signals -----------------------------------------------------------------------------------


class Signals:
    """How the first process handles a signal (shell.SIGNALS): at once, unless it has to wait."""

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
    if n == 1:
        meeting = met_by_torchrun()
    elif is_started:  # by `others`
        meeting = nullcontext(next(dist.rendezvous("env://")))
    else:
        meeting = others(n, arguments)
    with meeting as (store, number, size):
        start_group(store, number, size)
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


def start_group(store: dist.Store, number: int, size: int) -> None:
    try:
        dist.init_process_group(store=store, rank=number, world_size=size, timeout=FOREVER)
    except RuntimeError as error:
        raise UserError(
            "the processes do not reach each other: set GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME, "
            f"to the name of the network between the machines ({brief(error)})"
        ) from None


@contextmanager
def met_by_torchrun() -> Iterator[tuple[dist.Store, int, int]]:
    """Where all meet, the number of this process, and how many there are."""
    store, number, size = next(dist.rendezvous("env://"))
    peers = connect(store, number, size)
    for peer in peers:
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            peer.connection.setsockopt(socket.IPPROTO_TCP, option, value)
        Thread(target=end_with_peer, args=(peer,), daemon=True).start()
    is_done = True  # so it is after Ctrl-C, too, which all processes hear of
    try:
        yield store, number, size
    except Exception:
        is_done = False
        raise
    finally:
        if is_done:
            for peer in peers:
                peer.connection.send(b".")


class Peer(NamedTuple):
    """Another process of torchrun's."""

    connection: socket.socket
    host: str


def connect(store: dist.Store, number: int, size: int) -> list[Peer]:
    """Connect the first process to all others -> those that this process is connected to."""
    host = os.environ["MASTER_ADDR"]  # of the first process
    if number > 0:
        return [Peer(socket.create_connection((host, int(store.get("port")))), host)]
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.create_server(("", 0), family=family) as listener:
        store.set("port", str(listener.getsockname()[1]))
        accepted = [listener.accept() for _ in range(1, size)]
    return [Peer(connection, address[0]) for connection, address in accepted]


def end_with_peer(peer: Peer) -> None:
    """End this process when another one fails, or its machine is cut off."""
    told = f"the process on {peer.host} has ended"
    try:
        if peer.connection.recv(1):  # it is done
            return
    except OSError:
        told = f"{peer.host} cannot be reached"
    print(f"error: {told}, and so all end", file=sys.__stderr__, flush=True)
    os._exit(2)


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
