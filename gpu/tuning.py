"""Every number that was guessed: tiles, stages, warps, splits, and what each is guessed from.

How products of few rows in 8 and 4 bits are cut was measured on an H100: of up to 40 cuts for each
of five shapes, one that is near the best for all of them. The other numbers follow from an H200's
data sheet (132 multiprocessors of 65,536 registers and 227 KB of shared memory, 4.8 TB/s) and from
what the compiler says of the kernels (gpu/test_resources.py). `python bench.py --gpu all` shows
which of them are wrong.

    number               guessed from
    FEW, ROWS            rows of x: up to FEW, reading W is all that counts; beyond ROWS, a product
                         is bound by tensor cores, and cuBLAS is better at these
    STEP_BUDGET          tokens of a step while prompts are read: by a model of 256 requests, a
                         sixth more tokens a second than 512; but a request waits 50 ms for a token
    MOST_TILES           counters of tiles that several programs share: plan_product shares only
                         where there are fewer tiles than multiprocessors
    BLOCK                numbers of a program of an element-wise kernel
    FETCHED, ASKED       bytes of weights that are fetched while attention leaves memory idle: in
                         all, a third of an H100's L2 cache; by a thread
    warps_of_row         16 numbers a thread, where a program has a whole row
    PIECE, TILE          candidates of a row of logits that a program holds, or reads, at a time
    LEAST_KEYS           of a split: fewer cost more to merge than they save
    MOST_SPLITS          of a sequence's keys: as many programs as the GPU has places for
    MERGED               parts of rows that a merge reads at a time: no more registers than
                         attention itself; three times as many are on their way
    plan_product         below
    tile_shape           below

What is wrong on a GPU is found by turning parts off: LLAMA_GPU_OFF=graphs,splits …

    early        no kernel starts before the one before it has ended
    fetch        no weights are fetched while attention runs
    apart        few rows or many: 4-bit weights are multiplied by pairs of columns of x
    chunks       prompts are read in chunks of 512 tokens
    graphs       nothing is recorded: Python launches every kernel
    splits       keys and columns are not shared among programs, so that nothing is counted
    products     a kernel dequantizes W, and torch multiplies
    attention    plain torch stores and attends
    sampling     plain torch makes probabilities and picks
    fused        plain torch adds, norms, and computes SwiGLU

Without attention or sampling nothing is recorded, either: plain torch asks the host.

A kernel of few programs, other than a product, starts while the one before it ends (programmatic
dependent launch, from sm_90 on): its programs take their places, and wait there until all results
of that kernel are written, which hides the microsecond of a launch. Where every kernel did, an H100
made 3 to 11 % fewer tokens a second; perhaps programs that come while others end are spread over
fewer multiprocessors. What `early`, `fetch`, `apart` and `chunks` gain has not
been measured.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda

from errors import check_names
from quant import Kind

FEW = 8
ROWS = 64
STEP_BUDGET = 2048
MOST_TILES = 1 << 13
BLOCK = 1024
FETCHED = 16 << 20
ASKED = tl.constexpr(4096)
PIECE = 2048
TILE = 1024
LEAST_KEYS = 128
MOST_SPLITS = 128
MERGED = tl.constexpr(16)
# Where both halves of bytes are joined, Triton 3.6 adds some columns of a product twice, and others
# never, if it has fewer than these (mended later: triton-lang/triton, pull request 11691).
LEAST_DEPTH = 32


# ---- What is turned off --------------------------------------------------------------------------

SWITCHES = (
    "early",
    "fetch",
    "apart",
    "chunks",
    "graphs",
    "splits",
    "products",
    "attention",
    "sampling",
    "fused",
)


def is_on(part: str) -> bool:
    """Whether LLAMA_GPU_OFF leaves this part on."""
    return part not in parts_off(os.environ.get("LLAMA_GPU_OFF", ""))


@cache
def parts_off(names: str) -> list[str]:
    """UserError for a name that is not among SWITCHES."""
    parts = [name.strip() for name in names.split(",") if name.strip()]
    check_names(parts, SWITCHES, "part of gpu/ that LLAMA_GPU_OFF turns off")
    return parts


# ---- The machine ---------------------------------------------------------------------------------


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (132, an H100's, where there is no GPU)."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> int:
    """90 for an H100, 80 for an A100; 90 where there is no GPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_sm_90(device: torch.device) -> bool:
    """Whether kernels may have sm_90's instructions. The interpreter does not know them."""
    return capability(device) >= 90 and not knobs.runtime.interpret


def starts_early(device: torch.device, is_small: bool = True) -> bool:
    """Whether a kernel may start while the one before it ends, or may let the next one do so.

    is_small: whether it has few programs, by what it is compiled for anyway: Triton compiles a
    kernel once more that starts early.
    """
    return is_small and has_sm_90(device) and is_on("early")


def fetches(device: torch.device, T: int) -> bool:
    """Whether `_store` asks for the weights that are read after attention of T tokens."""
    return T <= FEW and has_sm_90(device) and is_on("fetch")


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """What every program of a kernel does first that may start early: let the next kernel take its
    places, and wait for the results of the one before. So the end of a kernel means that all
    kernels before it have ended, too."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def warps_of_row(size: int) -> int:
    """For a program that holds so many numbers."""
    return max(1, min(16, size // 512))


# ---- Products ------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a product is cut into programs."""

    rows: int  # rows of W of a program
    cols: int  # T, rounded up
    piece: int  # columns that are multiplied together
    at_once: int  # pieces at a time, by different warps
    shares: int  # programs that share the columns
    num_warps: int
    num_stages: int


def plan_product(
    T: int, N: int, K: int, kind: Kind, group: int, itemsize: int = 2, processors: int = 132
) -> Cut:
    """The cut for this product. group: columns that share a scale, 0 for all; itemsize: of x.

    Up to FEW rows of x: many small programs, of four warps, hide the time until the first bytes
    come. In 16 bits, whose programs read longer, eight warps do. More rows: shares of the columns,
    for up to two programs a multiprocessor.
    """
    piece = 128 if itemsize == 2 else 32  # more would spill in float32
    if group:
        piece = min(piece, group & -group)
    is_packed = kind in (4, "nf4")
    if T <= FEW:
        rows = 32 if N > 48 * processors and kind in (4, 16) else 16
        columns = 1024 if kind == 4 and rows == 16 and piece > 32 else 512
        if not is_packed:
            piece = min(piece, 64)
        warps = 4 if kind != 16 and itemsize == 2 else 8
        return Cut(
            rows, 8, piece, at_once=columns // piece, shares=1, num_warps=warps, num_stages=3
        )
    cols = max(16, triton.next_power_of_2(T))
    tiles = triton.cdiv(N, 128)
    most_shares = triton.cdiv(K, piece) // 2
    shares = 1
    if is_on("splits"):
        shares = max(1, min(2 * processors // tiles, most_shares))
    return Cut(
        128, cols, piece, at_once=1, shares=shares, num_warps=4 if cols < 64 else 8, num_stages=4
    )


# ---- Attention -----------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A launch of `_attend`: sequences with `fewest` to `most` queries, and how they are cut."""

    fewest: int
    most: int
    rows: int  # M
    splits: int


def plan_launches(
    num_new_tokens: Sequence[int], longest: int, H: int, G: int, processors: int
) -> list[Launch]:
    """A launch for sequences of up to 64 rows, one for longer ones. longest: the most keys."""
    R = H // G
    few = [n for n in num_new_tokens if 0 < n * R <= 64]
    many = [n for n in num_new_tokens if n * R > 64]
    launches = []
    most = max(few, default=0)
    if few:
        rows = max(16, triton.next_power_of_2(most * R))
        splits = count_splits(len(few) * G, longest, 2 * processors)
        launches.append(Launch(1, most, rows, splits=splits))
    if many:
        tiles = sum(triton.cdiv(n * R, 128) for n in many)
        splits = count_splits(tiles * G, longest, processors)
        launches.append(Launch(most + 1, max(many), 128, splits=splits))
    return launches


def count_splits(programs: int, longest: int, slots: int) -> int:
    """How often to split the keys, so that the last round of `slots` programs at a time is nearly
    full.
    """
    if programs >= 4 * slots or not is_on("splits"):
        return 1
    most = max(1, min(MOST_SPLITS, longest // LEAST_KEYS))
    busy = []  # by splits: the share of the slots that work
    for splits in range(1, most + 1):
        rounds = triton.cdiv(programs * splits, slots)
        busy.append(programs * splits / slots / rounds)
    enough = 0.9 * max(busy)
    return next(splits for splits, share in enumerate(busy, 1) if share >= enough)


def tile_shape(
    rows: int, R: int, D: int, bits: tuple[int, int], block: int, arch: int, size: int = 2
) -> tuple[int, int, int, int, int]:
    """M, N, num_warps, num_stages and maxnreg for `rows` rows and numbers of `size` bytes: as much
    in flight as registers and shared memory hold without spilling.

    maxnreg: without a limit, the compiler rather spills 8 bytes than take 129 registers. On sm_90
    every loop in 16 bits copies at least two tiles ahead. Spills are left where D > 128 (64 rows
    and more, up to 208 bytes), and outside the loop (8 bytes) where R is no power of 2.
    """
    stages = 5 if block else 3  # two more for the block table
    exact = bits == (16, 16)
    wide = triton.next_power_of_2(D)
    if size == 4:  # a product is three in tf32
        if wide > 128:
            return 16, 16, 8, stages, 255
        # 64 rows are for four warps: an H100 saw four more read past their shared memory.
        warps = 4 if rows in (16, 64) else 8
        return rows, 16, warps, stages if arch == 90 else 2, 255
    if rows <= 64:
        keys = 128 if rows == 16 and wide <= 64 else 64
        warps = 4 if exact or rows != 32 or wide <= 64 else 8
    else:  # `wgmma` takes fewer registers than sm_80's `mma`
        warps = 8
        roomy = exact + (wide <= 64) >= (1 if arch == 90 else 2)
        keys = 64 if roomy else 32
        if exact and arch == 90 and D == 128 and R in (1, 2, 4, 8):  # other R: too many registers
            keys = 128
    registers = 168 if rows == 16 and wide <= 128 else 255  # 168: three programs at a time
    keys //= max(1, wide // 128)
    if bits[1] == 4:
        keys = max(keys, LEAST_DEPTH)
    return rows, keys, warps, stages, registers
