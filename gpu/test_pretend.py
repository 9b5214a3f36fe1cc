"""The whole program as on a GPU, where there is none: the CPU's texts, no tensor of the host there,
one wait a step. And the contract there.

Most first runs on a GPU fail for reasons that no kernel's test sees: a host tensor among device
tensors, a number sent to the host during a recording, an argument that changes while a graph still
uses it. So tensors here say that they are on cuda:0, and have their numbers on the CPU:

    an operation on device tensors   runs on the CPU, and fails if a host tensor is among them
                                     (scalars may be)
    a Triton kernel                  runs in Triton's interpreter, and fails likewise
    a recording (gpu/graphs.py)      is the list of its launches with their arguments; a wait in
                                     it fails, and so does a copy from the host, which a replay
                                     would not repeat with new numbers
    a wait                           is noted: the function in which the host asked for numbers

Numbers are those of the CPU's operations and the interpreter's kernels. Not covered: streams, free
memory, times; bfloat16, which Triton's interpreter multiplies as whole numbers.
"""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

pytest.importorskip("triton", reason="Triton exists for Linux only")
from app.cli import main
from gpu import fused, graphs
from runner import ModelRunner
from testing.folders import write_model
from testing.programs import program

pytestmark = pytest.mark.gpu

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


def build_device() -> None:
    """Make PyTorch's CPU build accept cuda devices: once in a process. RuntimeError if this machine
    or build does not allow it."""
    if torch.backends.cuda.is_built() or shutil.which("g++") is None:
        raise RuntimeError(
            "no device: this needs g++ and PyTorch's CPU build, which asks no driver for devices"
        )
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "guard.cpp")
        library = Path(folder, "guard.so")
        source.write_text(GUARD)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library]
        command += [f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"no device: {made.stderr[:300]}")
        torch.ops.load_library(library)


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
        self.copies = 0  # from the host
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
        if self.comes_from_host(tensors, args, wanted):
            if self.tape is not None:
                raise RuntimeError(
                    f"{caller()} copies from the host, which a replay would not repeat"
                )
            self.copies += name in COPIES
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


# ---- The program ---------------------------------------------------------------------------------

SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
DRAFTS = ["--draft", "DRAFT", "--gamma", "2"]
CASES = {
    "greedy, in rows": ["--temperature", "0", "--kv", "contiguous"],
    "several": ["--n", "2", "--kv-bits", "8/4"],
    "n-grams": ["--draft", "ngram", "--gamma", "2"],
    "drafts": ["--temperature", "0.8", "--top-p", "0.9", "--min-p", "0.01", *DRAFTS],
    "INT8, coupled": ["--bits", "8", "--kv-bits", "8", *DRAFTS, "--verify", "coupled"],
    "FP8": ["--bits", "fp8"],
    "INT4": ["--bits", "4"],
    "NF4": ["--bits", "nf4"],
    "its own draft": ["--draft", "self", "--gamma", "2", "--kv-bits", "4"],
    "float64": ["--dtype", "float64"],
}
ONCE = {"run_rounds", "_pick", "_verify"}  # a step
OTHERS = {"draft", "feed"}  # where a draft has much to read


def text(device: str, arguments: list[str]) -> str:
    """What the program prints."""
    flags = ["--device", device, "--max-tokens", "6", "--seed", "3"]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*flags, *arguments, "hello hello hello"])
    assert status == 0, err.seek(0) or err.read()
    out.seek(0)
    return out.read()


def runs() -> dict[str, Any]:
    """Each case: [is it the CPU's text (or an error), where it waited, copies of each step]."""
    found = {}
    steps: list[int] = []
    step = ModelRunner.step

    def counted(self: ModelRunner, scheduled: Any) -> Any:
        if not steps and PRESENT:
            PRESENT[-1].waits.clear()  # those of loading
        before = PRESENT[-1].copies if PRESENT else 0
        result = step(self, scheduled)
        steps.append(PRESENT[-1].copies - before if PRESENT else 0)
        return result

    ModelRunner.step = counted
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = str(write_model(Path(folder, "a"), **SHAPE))
        draft = str(write_model(Path(folder, "b"), seed=3, **SHAPE))
        for name, arguments in CASES.items():
            flags = ["--target", target]
            if "--dtype" not in arguments:
                flags += ["--dtype", "float32"]
            flags += [draft if word == "DRAFT" else word for word in arguments]
            wanted = text("cpu", flags)
            steps.clear()
            with pretended() as waits:
                try:
                    same: bool | str = text("cuda", flags) == wanted
                except RuntimeError as error:  # this case's: the others go on
                    same = str(error)
                found[name] = [same, waits, [*steps]]
    return found


def wrong() -> list[str]:
    """What is done to tensors there as one must not -> what is said of it."""
    said = []
    with pretended() as waits:
        x = torch.arange(3, device="cuda")
        record = PRESENT[-1].record
        mistakes = (
            lambda: x + torch.ones(3),
            lambda: torch.cat((x, torch.tensor([1]))),
            lambda: record(lambda: (x + 1).tolist()),
            lambda: record(lambda: x.copy_(torch.ones(3))),
            lambda: record(lambda: torch.ones(3).to("cuda")),
            lambda: record(lambda: torch.tensor([1], device="cuda")),
        )
        for mistake in mistakes:
            with pytest.raises(RuntimeError) as error:
                mistake()
            said.append(str(error.value))
        assert (x + torch.tensor(1)).sum().item() == 6
        assert x[x > 1].cpu().tolist() == [2]
        assert waits == ["<module>"] * 3  # of this page no function is named
        replay = record(lambda: x.add_(1))
        replay()
        assert x.tolist() == [2, 3, 4]
    return said


def contract() -> int:
    """The status of the contract's tests there."""
    with pretended():
        return int(pytest.main(["-q", "-x", "-m", "gpu", "gpu/test_contract.py"]))


CODE = """
import json, torch, torch._dynamo
# Tensors of inference_mode cannot be wrapped: before the pages that compute are imported.
torch.inference_mode = lambda mode=True: torch.no_grad()
from gpu import test_pretend as page
page.build_device()
print(json.dumps({}))
"""


def found_there(wanted: str) -> Any:
    """What functions of this page return, in a process of their own."""
    done = program("-c", CODE.format(wanted))
    if "RuntimeError: no device" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def observed() -> Any:
    """The runs; and what is said of mistakes."""
    return found_there("[page.runs(), page.wrong()]")


@pytest.mark.parametrize("name", CASES)
def test_the_program_as_on_a_gpu(name, observed):
    same, waits, copies = observed[0][name]
    assert same is True
    assert sum(waits.count(wait) for wait in ONCE) == len(copies) > 1
    assert set(waits) <= ONCE | OTHERS
    if name in ("greedy, in rows", "float64"):
        assert len(copies) == 3  # a prompt, four tokens ahead, one
    if name == "greedy, in rows":
        assert copies == [4, 2 + 1, 3 + 1]  # a new recording gets its padding, once
