"""cpu/*.c on ARM: compiled for it, run in an emulator, and judged by the tests of cpu/.

    python .ci/arm.py MARCH COMPILER [pytest's arguments]

Python and PyTorch run here as ever. `native.call` alone is replaced: the call's memory goes to
arm.c under qemu-aarch64-static, and comes back. Both machines lay out C's structures alike.

A compiler for macOS has to compile, and no more.

Not covered: several threads.
"""

import ctypes
import shlex
import signal
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakValueDictionary

import pytest
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cpu import native  # noqa: E402
from quant import nf4  # noqa: E402

SECONDS = 300  # for a compiler, and for a call, which takes milliseconds
NUMBER, BLOCK, REAL = range(3)  # as in arm.c
ALONE = """
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
static inline void omp_set_num_threads(int n) {}
"""
MAC = {  # what C asks of a Mac's own headers, which are not here
    "omp.h": ALONE,
    "math.h": """
        #define INFINITY __builtin_inff()
        #define NAN __builtin_nanf("")
        #define isnan __builtin_isnan
        float rintf(float), fabsf(float), sqrtf(float);
        double log(double);""",
    "stdlib.h": """
        #include <stddef.h>
        void *malloc(size_t), *calloc(size_t, size_t), *aligned_alloc(size_t, size_t);
        void free(void *);""",
    "string.h": """
        void *memcpy(void *, const void *, unsigned long), *memset(void *, int, unsigned long);
        void *memmove(void *, const void *, unsigned long);""",
    "time.h": """
        enum { CLOCK_MONOTONIC = 6 };
        struct timespec { long tv_sec, tv_nsec; };
        int clock_gettime(int, struct timespec *);""",
}


def compiled(march: str, compiler: str, folder: Path) -> Path:
    """The program. There is no OpenMP of clang's for ARM: it makes one thread."""
    options = ["-fopenmp"]
    if "clang" in compiler:
        (folder / "omp.h").write_text(ALONE)
        options = ["-w", "-fopenmp-simd", f"-I{folder}"]
    program = folder / "arm"
    options += [f"-march={march}", *native.FLAGS, "-static", "-o", str(program)]
    source = f"{native.source()}\n{(ROOT / '.ci/arm.c').read_text()}"
    command = [*shlex.split(compiler), *options, "-x", "c", "-", "-lm"]
    subprocess.run(command, input=source, text=True, check=True, timeout=SECONDS)
    return program


def compile_for_mac(march: str, compiler: str, folder: Path) -> None:
    """It has to compile; nothing here can link it, or run it."""
    for name, header in MAC.items():
        (folder / name).write_text(header)
    options = ["-w", "-Xclang", "-fopenmp", "-ffreestanding", f"-I{folder}", f"-march={march}"]
    command = [*shlex.split(compiler), *options, *native.FLAGS, "-x", "c", "-c", "-"]
    command += ["-o", "/dev/null"]
    subprocess.run(command, input=native.source(), text=True, check=True, timeout=SECONDS)


class Emulator:
    """Calls the functions of C there. library: the same ones here, with their parameters."""

    def __init__(self, program: Path, library: ctypes.CDLL):
        self.library = library
        command = ["qemu-aarch64-static", str(program)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdin.write(contents(nf4(), nf4().data_ptr()))
        self.process.stdin.flush()
        (self.int8_columns,) = struct.unpack("q", self.process.stdout.read(8))
        self.owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of addresses
        self.views: dict[int, Tensor] = {}

    def address(self, x: Any, dtypes: tuple[Any, ...]) -> int | None:
        """native.address, but it is remembered what lies there."""
        at = plain_address(x, dtypes)
        if at is not None:
            self.owners[at] = x
        if isinstance(x, Tensor) and x.dim() == 5:  # a view of a cache, which nobody keeps
            self.views[at] = x
        return at

    def call(self, name: str, *arguments: Any) -> int:
        signal.signal(signal.SIGALRM, partial(self.give_up, name))
        signal.alarm(SECONDS)
        blocks: dict[int, Any] = {}  # address -> what lies there
        values = []
        for x, kind in zip(arguments, getattr(self.library, name).argtypes, strict=True):
            if kind is native.FLOAT:
                values.append(struct.pack("qd", REAL, x))
            elif kind is native.LONG or x is None:
                values.append(struct.pack("qq", NUMBER, x or 0))
            else:
                self.add(x, blocks)
                values.append(struct.pack("qq", BLOCK, [*blocks].index(place(x))))
        message = [struct.pack("32sqq", name.encode(), len(blocks), len(values))]
        numbers = {at: b for b, at in enumerate(blocks)}
        message += [struct.pack("qq", size(x), len(pointers(x))) for x in blocks.values()]
        for at, x in blocks.items():
            message.append(contents(x, at))
            message += [struct.pack("qq", where, numbers[to]) for where, to in pointers(x)]
        self.process.stdin.write(b"".join(message + values))
        self.process.stdin.flush()
        (result,) = struct.unpack("q", self.process.stdout.read(8))
        for at, x in blocks.items():
            answer = self.process.stdout.read(size(x))
            if isinstance(x, Tensor):  # structures have addresses, of another machine's
                ctypes.memmove(at, answer, len(answer))
        signal.alarm(0)
        return result

    def give_up(self, name: str, *_: Any) -> None:
        """End all tests: the call does not return. (Hypothesis would catch another exception.)"""
        self.process.kill()
        raise KeyboardInterrupt(f"{name} runs in the emulator for more than {SECONDS} s")

    def add(self, x: Any, blocks: dict[int, Any]) -> None:
        """Make blocks of x, and of what it points to."""
        at = place(x)
        if at in blocks:
            return
        blocks[at] = x
        tensors = getattr(x, "tensors", {}).values()  # tests replace some of a weight's
        own = {part.data_ptr(): part for part in tensors if part is not None}
        for _, to in pointers(x):
            self.add(own[to] if to in own else self.owners[to], blocks)


def contents(x: Any, at: int) -> bytes:
    return ctypes.string_at(at, size(x))


plain_address = native.address


def place(x: Any) -> int:
    return x.data_ptr() if isinstance(x, Tensor) else ctypes.addressof(x)


def size(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else ctypes.sizeof(x)


def pointers(x: Any, at: int = 0) -> list[tuple[int, int]]:
    """Where pointers lie in a structure or an array of them, and the addresses that they hold."""
    if isinstance(x, ctypes.Array) and issubclass(x._type_, ctypes.Structure):
        width = ctypes.sizeof(x._type_)
        return [found for i, each in enumerate(x) for found in pointers(each, at + i * width)]
    found = []
    for name, kind in getattr(x, "_fields_", ()):
        value = getattr(x, name)
        where = at + getattr(type(x), name).offset
        if kind is ctypes.c_void_p and value:
            found.append((where, value))
        elif issubclass(kind, ctypes.Structure):
            found += pointers(value, where)
    return found


def main() -> int:
    march, compiler, *arguments = sys.argv[1:]
    with TemporaryDirectory() as folder:
        if "macos" in compiler:
            compile_for_mac(march, compiler, Path(folder))
            return 0
        program = compiled(march, compiler, Path(folder))
        emulator = Emulator(program, native.library())
        loaded = native.Loaded(emulator)
        units = native.UNITS | {8: emulator.int8_columns}
        native.load_library = lambda: loaded
        native.call = emulator.call
        native.address = emulator.address
        native.language = lambda: "C in an emulator"
        native.unit_of = lambda kind: units.get(kind, 1)
        return pytest.main(["-q", "-p", "no:cacheprovider", *arguments])


if __name__ == "__main__":
    sys.exit(main())
