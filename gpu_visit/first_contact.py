"""The first minutes on a GPU: steps with a limit each, the most telling first; then the culprit.

    cd PROJECT && python /…/first_contact.py OUT.json [seconds, 540]

Each step is a process of its own: an illegal address ends all that a process does on a GPU. What
hangs is killed and named. If a step of tests fails, its first failures run again with one part of
gpu/ after the other turned off (LLAMA_GPU_OFF): where a test passes then, that part is at fault.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
OUT = sys.argv[1]
END = time.monotonic() + float((sys.argv[2:] or [540])[0])
TESTS = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=line"]
BENCH = [sys.executable, "bench.py", "--out", OUT, "--gpu"]
STEPS = [  # seconds at most, command, what it should show
    (40, [*BENCH, "machine"], "the GPU that you mean; 700 TFLOP/s of an H100, 90 % of its bandwidth"),
    (120, [sys.executable, str(HERE / "precompile.py")], "kernels found, if you brought a cache"),
    (150, [*TESTS, "gpu/test_layer.py"], "all passed"),
    (100, [*TESTS, "gpu/test_contract.py"], "all passed"),
    (110, [*BENCH, "decode"], "INT8 1.6 times the tokens/s of 16 bits, INT4 2.3 times"),
    (60, [*BENCH, "kernels"], "for many texts, a large share of the bandwidth in all widths"),
    (150, [*BENCH, "peers"], "above 1"),
    (45, [*BENCH, "profile"], "which kernels to look at"),
    (80, [*BENCH, "speculation"], "above 1 where drafts are accepted"),
    (90, [*BENCH, "serving"], "many times the tokens/s of one stream"),
]
PARTS = ("graphs", "splits", "products", "attention", "sampling", "fused")
MOST_AGAIN = 8  # tests


def run(seconds: float, command: list[str], off: str = "") -> tuple[str, str]:
    """-> its outcome, and what it said; it is killed after so many seconds, or at the end."""
    seconds = min(seconds, END - time.monotonic())
    if seconds < 10:
        return "no time was left", ""
    log = Path(OUT + ".log")
    with log.open("w") as file:
        environment = os.environ | ({"LLAMA_GPU_OFF": off} if off else {})
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            outcome = "ok" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            outcome = f"killed after {seconds:.0f} s"
    return outcome, log.read_text()


def find_part(failed: list[str]) -> None:
    for part in PARTS:
        outcome, _ = run(60, [*TESTS, *failed[:MOST_AGAIN]], off=part)
        print(f"  without {part}: {outcome}", flush=True)


outcomes = []
for seconds, command, wanted in STEPS:
    name = " ".join(command[-2:])
    print(f"\n{name}, {seconds} s at most; should show: {wanted}", flush=True)
    outcome, said = run(seconds, command)
    print(said[-4000:], f"{name}: {outcome}", flush=True)
    outcomes.append(f"{name}: {outcome}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+\[.*?\]|\S+)", said, re.MULTILINE)
    if failed:
        find_part(failed)
print("\n" + "\n".join(outcomes))
