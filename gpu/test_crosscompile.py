"""What the compiler says of a kernel, read from another process: this one may run kernels in the interpreter."""
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu.crosscompile import SHARED


def apart(module: str, function: str, *arguments: Any) -> Any:
    """module.function(*arguments), JSON all, in a process without the interpreter. RuntimeError if it fails."""
    code = f"import json, sys, triton, {module} as page; print(json.dumps(page.{function}(*json.loads(sys.argv[1]))))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(arguments)], cwd=Path(__file__).parent.parent,
                          env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module}.{function} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def several(*calls: list[Any]) -> list[Any]:
    """module.function(*arguments) of each, in one process."""
    return [getattr(import_module(module), function)(*arguments) for module, function, *arguments in calls]


def compiled() -> list[list[list[int]]]:
    from gpu.crosscompile import demonstration
    return [demonstration(), squeezed(4, 8)]


HERE = apart, "gpu.test_crosscompile", "compiled"


@pytest.mark.meanwhile(*HERE)
def test_the_same_code_becomes_other_instructions(meanwhile):
    for arch, rows, registers, spills, shared, wgmma, mma, copies in meanwhile()[0]:
        assert 16 < registers <= 255 and spills == 0 and 0 < shared <= SHARED[arch] and copies > 0
        assert (wgmma > 0) == (arch == 90 and rows == 128) and (mma > 0) != (wgmma > 0)


def squeezed(*warps: int) -> list[list[int]]:
    from gpu.crosscompile import _product, compile_for
    signature = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"}
    with pytest.raises(ValueError, match="_product has no type for out, K: "):
        compile_for(_product, {"a": "*bf16", "b": "*bf16"}, {"ROWS": 16, "N": 16})
    reports = [compile_for(_product, signature, {"ROWS": 128, "N": 128}, 80, num_warps) for num_warps in warps]
    return [[report.registers, report.spills, report.programs] for report in reports]


@pytest.mark.meanwhile(*HERE)
def test_spills_are_seen_programs_counted_and_types_asked_for(meanwhile):
    (registers, spills, programs), eight = meanwhile()[1]
    assert (registers, programs) == (255, 2) and spills > 100                # 128 sums a thread, beside everything else
    assert eight[1:] == [0, 1]


@pytest.mark.meanwhile(apart, "json", "gone")
def test_what_goes_wrong_there_is_told_here(meanwhile):
    with pytest.raises(RuntimeError, match="json.gone failed:(.|\n)*has no attribute 'gone'"):
        meanwhile()
