"""A GPU that is not there: tensors that say they are on cuda:0, with their numbers on the CPU.

A program's first minute on a GPU mostly ends for reasons that no kernel's test sees: a tensor that stayed on the host beside others that did
not, a number asked for in the middle of a recording, an argument that a graph goes on using after it has changed. Here the whole program runs as
it would there, on whatever machine:

    an operation on tensors of the device    runs on the CPU, and fails where a tensor of the host is among them (a single number may be)
    a Triton kernel                          runs in Triton's interpreter, and fails likewise
    a recording (graphs.py)                  is what was launched, with the tensors and numbers it was launched with; it fails if it waits
    a wait                                   is written down: the function in which the host asked the device for numbers

    begin()                                  once in a process, before the pages that compute are imported
    with pretended() as waits: …             torch.device("cuda") can be used; waits: list[str]

Invariant: numbers are those of the CPU's operations and the interpreter's kernels; outside of `pretended` nothing is changed but what `begin` says.

Not covered: streams, what memory is left, times. bfloat16, which Triton's interpreter multiplies as whole numbers.
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
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

HERE, OPS = torch.device("cpu"), torch.ops.aten
ASKS = (OPS._local_scalar_dense, OPS.nonzero, OPS.masked_select, OPS.equal)             # whose result is on the host, or is as large as numbers say
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }"""      # else PyTorch has no such device


class NoGrad(torch.no_grad):
    """Instead of inference_mode, whose tensors cannot be wrapped."""

    def __new__(cls, mode: bool = True) -> "NoGrad":
        return object.__new__(cls)

    def __init__(self, mode: bool = True):
        super().__init__()


def begin() -> None:
    """PyTorch's CPU build learns that there are GPUs, and inference_mode is no_grad. RuntimeError if it cannot be."""
    if torch.backends.cuda.is_built() or shutil.which("g++") is None:
        raise RuntimeError("no device: this needs PyTorch's CPU build (that for CUDA asks a driver for devices) and g++")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        made = subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", str(source), "-o", str(library), f"-L{root}/lib", "-lc10"],
                              capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"no device: {made.stderr[:300]}")
        torch.ops.load_library(library)
    torch.inference_mode = NoGrad


class There(Tensor):
    """A tensor on cuda:0; its numbers are `here`."""
    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made = Tensor._make_wrapper_subclass(cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device="cuda:0")
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PRESENT[-1].run(func, args, kwargs or {})


PRESENT: list["Device"] = []


def here(x: Any) -> Any:
    return x.here if isinstance(x, There) else x


class Device(TorchDispatchMode):
    """What is launched there, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.tape: list[Callable[[], None]] | None = None               # of what is being recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation, where its tensors are or its `device` says."""
        if func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name, tensors = func.overloadpacket, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there, wanted = any(isinstance(x, There) for x in tensors), kwargs.get("device")
        copies = name in (OPS._to_copy, OPS.copy_)
        if there and not copies and any(x.dim() for x in tensors if not isinstance(x, There)):
            raise RuntimeError(f"{func}: on the host and on the device are {', '.join(f'{type(x).__name__}{list(x.shape)}' for x in tensors)}")
        masked = "index" in func.name() and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:2]))
        if there and (name in ASKS or masked or name is OPS._to_copy and wanted == HERE or name is OPS.copy_ and not isinstance(args[0], There)):
            self.wait()
        ours = {id(x.here): x for x in tensors if isinstance(x, There)}
        args, kwargs = tree_map(here, args), {key: here(x) for key, x in kwargs.items() if key != "pin_memory"} | ({"device": HERE} if wanted is not None else {})
        done = func(*args, **kwargs)
        if name is OPS._local_scalar_dense or not (there if wanted is None else torch.device(wanted).type == "cuda"):
            return done
        self.launched(lambda: func(*args, **kwargs), done)
        return tree_map(lambda x: x if not isinstance(x, Tensor) else ours[id(x)] if id(x) in ours else There(x), done)

    def kernel(self, run: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Triton's, in its interpreter."""
        if any(isinstance(x, Tensor) and not isinstance(x, There) for x in args):
            raise RuntimeError("a kernel gets a tensor of the host")

        def launch() -> None:
            with _disable_current_modes():
                run(*map(here, args), **kwargs)
        launch()
        self.launched(launch, None)

    def launched(self, again: Callable[[], Any], done: Any) -> None:
        """A recording has it done again, on the same tensors; results go where they were."""
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
        """The host asks for numbers, in the innermost function that is not of this page or a library."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ or "-packages" in frame.f_code.co_filename:
            frame = frame.f_back
        if self.tape is not None:
            raise RuntimeError(f"{frame.f_code.co_name} waits for the device, which cannot be recorded")
        self.waits.append(frame.f_code.co_name)


class Event:
    """Of torch.cuda."""

    def __init__(self, **options: Any):
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at - self.at)


@contextmanager
def pretended() -> Iterator[list[str]]:
    """torch.device("cuda") is there -> the functions in which the host waited for it, one for each time."""
    from triton.runtime.interpreter import InterpretedFunction

    import graphs
    device, run, tolist, pointer, tensor, generator = Device(), InterpretedFunction.run, Tensor.tolist, Tensor.data_ptr, torch.tensor, torch.Generator

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> Tensor:
        made = tensor(*args, **more)
        return There(made) if device is not None and torch.device(device).type == "cuda" else made

    def numbers(x: Tensor) -> Any:
        if isinstance(x, There):
            device.wait()
        return tolist(here(x))

    cuda = dict(_lazy_init=lambda: None, is_available=lambda: True, synchronize=lambda *_: None, empty_cache=lambda: None, Event=Event,
                is_current_stream_capturing=lambda: False, get_device_capability=lambda *_: (9, 0), mem_get_info=lambda *_: (1 << 30, 1 << 30),
                get_device_properties=lambda *_: SimpleNamespace(multi_processor_count=132))
    with ExitStack() as changed:
        for owner, name, value in (*((torch.cuda, name, value) for name, value in cuda.items()), (torch, "tensor", make), (graphs, "record", device.record),
                                   (torch, "Generator", lambda device=None: generator()), (Tensor, "pin_memory", lambda x: x), (Tensor, "data_ptr", lambda x: pointer(here(x))),
                                   (Tensor, "tolist", numbers), (InterpretedFunction, "run", lambda kernel, *args, **more: device.kernel(lambda *a, **m: run(kernel, *a, **m), args, more))):
            changed.enter_context(mock.patch.object(owner, name, value))
        PRESENT.append(device)
        changed.callback(PRESENT.pop)
        changed.enter_context(device)
        yield device.waits
