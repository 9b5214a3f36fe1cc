"""What the compiler makes of the kernels that a server launches, for GPUs that are not there."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from checkpoint.config import Config
from checkpoint.formats import Quantization
from gpu import GPU, run_empty_step
from gpu.products import Stored, stored_product
from gpu.testing import SHARED, Report, apart, compile_launches
from kernels import Linear
from model import Llama
from paged import PagedCache
from quant import Quantized

pytestmark = pytest.mark.gpu
DIVIDING = ("_peaks", "_weigh", "_edge", "_cut")  # these spill 8 bytes around a division


def attend_and_multiply(
    bits: int,
    kv: tuple[int, int],
    shapes: list[tuple[int, int]],
    arch: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    D: int = 128,
    kind: str = "llama",
) -> list[Report]:
    """The launches of steps of these shapes, of a layer of Llama 3.1 8B with heads of size D."""
    config = Config(
        vocab_size=512,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=D,
        max_position_embeddings=4096,
        model_type=kind,
    )
    if bits < 16:
        config = config.quantized(Quantization(bits))
    llama = Llama(config, "meta", dtype, seed=None, ops=GPU(records=False)).pack_weights()
    cache = PagedCache(llama.kv_spec(bits=kv), 16)

    def run() -> None:
        for shape in 2 * shapes:  # the second time, weights are fetched ahead
            run_empty_step(llama, cache, shape, splits=2 if shape == (1, 1) else 1)

    with mock.patch("gpu.tuning.capability", lambda device: arch):
        return compile_launches(run, arch)


def sample() -> None:
    ops = GPU()
    logits = torch.empty(2, 128256, dtype=torch.bfloat16, device="meta")
    streams = torch.empty(2, 1, dtype=torch.int64, device="meta")
    ops.pick(ops.probabilities(logits), streams)
    ops.pick(ops.probabilities(logits, top_p=0.9), streams)


def multiply_fp8() -> None:
    """And inputs rounded to FP8, too."""
    values = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(4096, 1, dtype=torch.bfloat16, device="meta")
    weight = Stored.of(Linear(Quantized("fp8", values, scale, zero=None, columns=4096, group=4096)))
    for T in (1, 64):
        x = torch.empty(T, 4096, dtype=torch.bfloat16, device="meta")
        stored_product(x, weight)
        stored_product(x, weight._replace(rounds=True))


def compiled() -> dict[str, list[Report]]:
    decode = (1, 1)
    prompt = (1, 40)
    many_rows = [decode, prompt, (65, 1)]
    return {
        "16": attend_and_multiply(16, (16, 16), [decode, prompt]),
        "8": attend_and_multiply(8, (8, 8), [decode, prompt]),
        "8/4": attend_and_multiply(4, (8, 4), many_rows),
        "4, norms of heads": attend_and_multiply(4, (4, 4), [(1, 8)], kind="qwen3"),
        "heads of 64": attend_and_multiply(16, (8, 8), [decode, (1, 8)], D=64),
        "sm_80": attend_and_multiply(4, (8, 4), [decode, prompt], 80),
        "float32": attend_and_multiply(8, (16, 16), [decode, prompt], 90, torch.float32, 256),
        "float32, 8/4": attend_and_multiply(16, (8, 4), [decode], 90, torch.float32),
        "float32 on sm_80": attend_and_multiply(16, (4, 4), [prompt], 80, torch.float32),
        "sampling": compile_launches(sample),
        "fp8": compile_launches(multiply_fp8),
    }


def test_kernels_spill_nothing_and_copy_ahead():
    """And all fit into shared memory, and multiply by tensor cores: `wgmma` where there is one.

    In float32 products of single numbers would be unrolled, and spill thousands of bytes.
    """
    names = set()
    early = set()
    for case, rows in apart("gpu.test_resources", "compiled").items():
        for report in (Report(*row) for row in rows):
            names.add(report.kernel)
            assert_fits(report, case)
            if assert_early(report):
                early.add(report.kernel)
    assert len(names) == 14 and early == {"_add_norm", "_store", "_attend"}


def assert_early(report: Report) -> bool:
    """-> whether the kernel starts early: then it waits before it reads or writes anything. A
    product only lets the next kernel do so. Before sm_90 there is nothing of it."""
    accesses = ("griddepcontrol.wait", "prefetch", "cp.async", "ld.global", "st.global", "atom")
    lines = [line for line in report.ptx.splitlines() if any(word in line for word in accesses)]
    waits = report.count("griddepcontrol.wait")
    lets = report.count("griddepcontrol.launch_dependents")
    assert report.arch >= 90 or waits == lets == report.ptx.count("prefetch.L2") == 0
    assert waits == 0 or lets == 1 and accesses[0] in lines[0]
    assert lets == 1 or report.kernel != "_product" or report.arch < 90
    return waits > 0


def assert_fits(report: Report, case: str) -> None:
    what = case, *report[:6]
    in_float32 = "float32" in case
    most_spills = 8 if report.kernel in DIVIDING else 0
    if in_float32 and report.kernel == "_attend":
        most_spills = 1023
    assert report.spills <= most_spills and report.shared <= SHARED[report.arch], what
    assert not report.shallow, what
    wgmma = report.count("wgmma.mma")
    mma = report.count("mma.sync")
    if report.kernel == "_attend":
        rows = report.constants["ROWS"]
        least = 2 if report.arch == 90 and not in_float32 else 1
        assert report.ahead >= least or in_float32 and report.arch == 80, what
        if in_float32:
            assert ".tf32" in report.ptx, what
        else:
            assert (wgmma > 0) == (report.arch == 90 and rows >= 64), what
    elif report.kernel == "_product":
        assert report.ahead >= 2, what
        assert not report.count("ld.global.cg"), what  # shares of others are copied ahead, too
        is_wide = report.arch == 90 and report.constants["B"] == 1  # 128 rows of W
        assert (wgmma > 0) == is_wide and (mma > 0) != is_wide, what
    else:
        assert report.registers <= 168, what


def main() -> None:
    """python -m gpu.test_resources: what each kernel takes, by the compiler that is here."""
    print("case              kernel              rows registers spills  shared  ahead")
    for case, reports in compiled().items():
        for report in reports:
            rows = report.constants.get("ROWS", "")
            numbers = f"{report.registers:10}{report.spills:7}{report.shared:8}{report.ahead:7}"
            print(f"{case:18}{report.kernel:14}{rows:>10}{numbers}")


if __name__ == "__main__":
    main()
