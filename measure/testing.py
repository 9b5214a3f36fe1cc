"""A pretended clock, and a pretended GPU: tensors that say they are on cuda:0, with their numbers
on the CPU.

The clock moves only by the seconds that a test gives to work, so that every figure is known.

Most first runs on a GPU fail for reasons that no kernel's test sees: a host tensor among device
tensors, a number sent to the host during a recording, an argument that changes while a graph still
uses it. Here the whole program runs as it would on a GPU:

    an operation on device tensors   runs on the CPU, and fails if a host tensor is among them
                                     (scalars may be)
    a Triton kernel                  runs in Triton's interpreter (or where else a launch goes here:
                                     .ci/emulator.py), and fails likewise
    a recording (gpu/graphs.py)      is the list of its launches with their arguments; a wait in
                                     it fails, and so does a copy from the host, which a replay
                                     would not repeat with new numbers
    a wait                           is noted: the function in which the host asked for numbers

Invariant: numbers are those of the CPU's operations and the interpreter's kernels. Not covered:
streams, free memory, times; bfloat16, which Triton's interpreter multiplies as whole numbers.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

HERE = torch.device("cpu")
OPS = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
COPIES = (OPS._to_copy, OPS.copy_)
# Their results, or the sizes of these, are on the host:
ASKS = (OPS._local_scalar_dense, OPS.nonzero, OPS.masked_select, OPS.equal)
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
}"""


class Clock:
    """Stands in for time.perf_counter. is_late: as on a GPU, work takes no time until the host
    waits for it, because it asks for a number."""

    def __init__(self, patch: Any):
        self.patch = patch  # pytest's monkeypatch
        self.is_late = False
        self.now = 0.0
        self.queued = 0.0  # seconds of work that the host has not waited for
        patch.setattr(time, "perf_counter", lambda: self.now)
        patch.setattr(torch.cuda, "synchronize", self.wait)
        for name in ("item", "tolist"):
            ask = getattr(Tensor, name)
            patch.setattr(Tensor, name, lambda x, ask=ask: (self.wait(), ask(x))[1])

    def wait(self) -> None:
        self.now += self.queued
        self.queued = 0.0

    def work(self, seconds: float) -> None:
        self.queued += seconds
        if not self.is_late:
            self.wait()

    def times(self, owner: Any, name: str, seconds: Callable[..., float]) -> None:
        """Let each call of owner.name take `seconds` of its arguments."""
        does = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            self.work(seconds(*args, **options))
            return does(*args, **options)

        self.patch.setattr(owner, name, run)


def build_device() -> None:
    """Make PyTorch's CPU build accept cuda devices: once in a process, before the pages that
    compute are imported.

    inference_mode becomes no_grad. RuntimeError if this machine or build does not allow it.
    """
    import torch._dynamo  # before inference_mode changes

    if torch.backends.cuda.is_built() or shutil.which("g++") is None:
        raise RuntimeError(
            "no device: this needs g++ and PyTorch's CPU build, which asks no driver for devices"
        )
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{root}/include",
            source,
            "-o",
            library,
            f"-L{root}/lib",
        ]
        made = subprocess.run([*command, "-lc10"], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"no device: {made.stderr[:300]}")
        torch.ops.load_library(library)
    torch.inference_mode = lambda mode=True: (
        torch.no_grad()
    )  # tensors of inference_mode cannot be wrapped


class There(Tensor):
    """A tensor that says it is on cuda:0. `here` is the CPU tensor that holds its numbers."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        where = dict(storage_offset=here.storage_offset(), dtype=here.dtype, device="cuda:0")
        made = Tensor._make_wrapper_subclass(cls, here.shape, here.stride(), **where)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PRESENT[-1].run(func, args, kwargs or {})


PRESENT: list["Device"] = []


def here(x: Any) -> Any:
    return x.here if isinstance(x, There) else x


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Device(TorchDispatchMode):
    """The pretended device: it runs every operation at once, and notes waits and recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.tape: list[Callable[[], None]] | None = None  # of a recording under way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the CPU; its results are on the device of its tensors, or of its
        argument `device`."""
        if func._can_decompose() and has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name, wanted = func.overloadpacket, kwargs.get("device")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        theirs = {id(x.here): x for x in tensors if isinstance(x, There)}
        if (
            theirs
            and name not in COPIES
            and any(x.dim() for x in tensors if not isinstance(x, There))
        ):
            shapes = ", ".join(f"{type(x).__name__}{list(x.shape)}" for x in tensors)
            raise RuntimeError(f"{func}: on the host and on the device are {shapes}")
        if theirs and self.asks(func, args, wanted):
            self.wait()
        if self.tape is not None and self.comes_from_host(tensors, args, wanted):
            raise RuntimeError(f"{caller()} copies from the host, which a replay would not repeat")
        args, kwargs = (
            tree_map(here, args),
            {key: here(x) for key, x in kwargs.items() if key != "pin_memory"},
        )
        kwargs |= {"device": HERE} if wanted is not None else {}
        done = func(*args, **kwargs)
        if name is OPS._local_scalar_dense or not (theirs if wanted is None else is_cuda(wanted)):
            return done
        self.launched(lambda: func(*args, **kwargs), done)
        return tree_map(
            lambda x: (
                theirs[id(x)] if id(x) in theirs else There(x) if isinstance(x, Tensor) else x
            ),
            done,
        )

    @staticmethod
    def asks(func: Any, args: Any, wanted: Any) -> bool:
        """Whether the host waits for this operation: its result, or the size of its result, is
        needed on the host."""
        if func.overloadpacket in COPIES:
            return (
                wanted == HERE
                if func.overloadpacket is OPS._to_copy
                else not isinstance(args[0], There)
            )
        masks = [
            x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype == torch.bool
        ]
        return func.overloadpacket in ASKS or "index" in func.name() and bool(masks)

    @staticmethod
    def comes_from_host(tensors: Any, args: Any, wanted: Any) -> bool:
        """Whether an operation copies a host tensor's numbers to the device."""
        target = is_cuda(wanted) or (args and isinstance(args[0], There))
        return bool(target) and any(not isinstance(x, There) for x in tensors)

    def kernel(self, launch: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Launch a Triton kernel over the CPU tensors."""
        if any(isinstance(x, Tensor) and not isinstance(x, There) for x in args):
            raise RuntimeError("a kernel gets a tensor of the host")

        def again() -> None:
            with _disable_current_modes():
                launch(*map(here, args), **kwargs)

        again()
        self.launched(again, None)

    def launched(self, again: Callable[[], Any], done: Any) -> None:
        """If a recording is under way, add a launch: a replay computes again and fills the same
        result tensors."""

        def repeat() -> None:
            for old, new in zip(tree_leaves(done), tree_leaves(again())):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        if self.tape is not None:
            self.tape.append(repeat)

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        self.tape = tape = []
        try:
            run()
        finally:
            self.tape = None

        def replay() -> None:
            with _disable_current_modes():
                for repeat in tape:
                    repeat()

        return replay

    def wait(self) -> None:
        """Note a wait, by the function that waits. RuntimeError in a recording."""
        if self.tape is not None:
            raise RuntimeError(f"{caller()} waits for the device, which cannot be recorded")
        self.waits.append(caller())


def caller() -> str:
    """The innermost function outside this page and the libraries."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or "-packages" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name


def event(**options: Any) -> SimpleNamespace:
    """A torch.cuda.Event; any two are a millisecond apart."""
    return SimpleNamespace(record=lambda: None, elapsed_time=lambda later: 1.0)


CUDA = dict(
    _lazy_init=lambda: None,
    is_available=lambda: True,
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    set_device=lambda index: None,
    is_current_stream_capturing=lambda: False,
    get_device_capability=lambda *_: (9, 0),
    Event=event,
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
    get_device_properties=lambda *_: SimpleNamespace(
        multi_processor_count=132, name="a pretended GPU"
    ),
)


@contextmanager
def pretended() -> Iterator[list[str]]:
    """Within this context torch.device("cuda") exists -> a list of the functions in which the host
    waited, in order."""
    from gpu import fused, graphs

    device = Device()
    kernels = type(fused._swiglu)
    launch = kernels.run
    tolist = Tensor.tolist
    pointer = Tensor.data_ptr
    set_item = Tensor.__setitem__
    tensor = torch.tensor
    generator = torch.Generator

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> Tensor:
        if is_cuda(device) and PRESENT[-1].tape is not None:
            raise RuntimeError(f"{caller()} copies from the host, which a replay would not repeat")
        made = tensor(*args, **more)
        return There(made) if is_cuda(device) else made

    def on_device(index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(map(on_device, index))
        return make(index, device="cuda") if isinstance(index, list) else index

    def write(x: Tensor, index: Any, value: Any) -> None:
        set_item(x, on_device(index) if isinstance(x, There) else index, value)

    def numbers(x: Tensor) -> Any:
        if isinstance(x, There):
            device.wait()
        return tolist(here(x))

    patches = {
        torch.cuda: CUDA,
        graphs: dict(record=device.record),
        kernels: dict(run=lambda *args, **more: device.kernel(launch, *args, **more)),
        torch: dict(tensor=make, Generator=lambda device=None: generator()),
        Tensor: dict(
            pin_memory=lambda x: x,
            data_ptr=lambda x: pointer(here(x)),
            tolist=numbers,
            __setitem__=write,
        ),
    }
    with ExitStack() as changed:
        for owner, names in patches.items():
            changed.enter_context(mock.patch.multiple(owner, **names))
        PRESENT.append(device)
        changed.callback(PRESENT.pop)
        changed.enter_context(device)
        yield device.waits
