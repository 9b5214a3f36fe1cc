"""Several processes that run one program in step, as tensor parallelism (parallel.py) needs them.

PyTorch's torchrun starts them, for --tensor-parallel, too: the program starts torchrun, which runs
the program's command again in each process, and the environment says where they meet. All run the
same code. Only the first reads and prints; what it reads goes to the others (`read_once`).

  - When a process ends with an error, torchrun ends all. An error of all processes is printed once,
    by the first. A process that fails alone waits a moment, and prints its error itself.
  - torchrun hands each signal on: Ctrl-C ends all processes, in a chat, too.

Not covered: a process that hangs (torchrun kills it 30 seconds after Ctrl-C); processes whose
torchrun was killed; a machine that is cut off, which PyTorch notices after half an hour (on GPUs
after 10 minutes): a chat on several machines ends, too, if its reader is silent for so long.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.shell import interruption, is_launched, nowhere, status
from devices import live_graphs
from errors import UserError, brief
from parallel import num_processes

PROGRAM = Path(__file__).parent.parent / "generate.py"
FOREVER = timedelta(days=365)  # a chat waits for its reader
BEGINNING = timedelta(minutes=5)  # until all processes have met
GRACE = 5.0  # seconds for torchrun to end this process, because another one has failed


# ---- The first process and the others ----------------------------------------------------------


def rank() -> int:
    """This process's number: 0 is the first."""
    return int(os.environ["RANK"]) if is_launched() else 0


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
        setattr(sys, name, nowhere())

    def run_patiently() -> None:
        try:
            run()
        except BaseException:
            time.sleep(GRACE)  # an error of all processes ends this one here
            sys.stderr = sys.__stderr__
            raise

    return status(run_patiently, signals=())


# ---- Beginning ---------------------------------------------------------------------------------


def check_device(device: torch.device) -> None:
    if device.index is not None:
        raise UserError(
            f"--device is {device}, but each process chooses its own: name {device.type}"
        )


def launch(n: int, device: torch.device, arguments: Sequence[str]) -> int:
    """Run the program in n processes of torchrun -> its exit status."""
    from torch.distributed import run as torchrun  # 0.1 seconds
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    check_device(device)
    os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // n))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # no lines of PyTorch's own beside our error
    logging.disable()
    flags = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(n)]
    try:
        torchrun.run(torchrun.parse_args([*flags, str(PROGRAM), *arguments]))
    except SignalException as error:
        raise interruption(error.sigval) from None
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise UserError(f"process {number + 1} of {n} was killed, so all of them end") from None
        return failure.exitcode
    return 0


@contextmanager
def joined(n: int, device: torch.device) -> Iterator[torch.device]:
    """Run the block in each process that torchrun has started -> the device of this one.

    n: of --tensor-parallel, which starts them on this machine; 1: torchrun was started by hand, or
    this process is alone.
    """
    if not is_launched():
        yield device
        return
    size = os.environ["WORLD_SIZE"]
    if n > 1 and str(n) != size:
        raise UserError(
            f"--tensor-parallel is {n}, and torchrun has started {size} processes: leave it out"
        )
    check_device(device)
    try:
        store, number, _ = next(dist.rendezvous("env://", timeout=BEGINNING))
        timeout = FOREVER if n > 1 else None
        dist.init_process_group(store=store, rank=number, world_size=int(size), timeout=timeout)
    except RuntimeError as error:
        raise UserError(
            "the processes cannot reach each other: set GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME, "
            f"to the name of the network between the machines ({brief(error)})"
        ) from None
    try:
        index = int(os.environ["LOCAL_RANK"])
        yield device if device.type == "cpu" else torch.device(device.type, index)
    except RuntimeError:  # perhaps because another process has ended, which torchrun notices
        time.sleep(1)
        raise
    finally:  # an error's traceback may keep recordings alive, and NCCL waits for these
        for graph in live_graphs:
            graph.reset()
        dist.destroy_process_group()
