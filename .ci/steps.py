"""What a real model's steps and prompts cost with fewer bits, in turns with float32: none may cost more.

    python .ci/steps.py SMOLLM2     (a folder with a model)

LLAMA_MARCH, ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY hold the machine down to an older CPU; LLAMA_NATIVE=0 takes the
C away: then weights of fewer bits become numbers first, and nothing is required. The machines are shared: what
misses the limit is measured once more, and then a wider one counts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from cpu import native
from measure.steps import compare, machine_code, of_all_widths

SIZES = [(100, rows) for rows in (1, 5, 16, 64)] + [
    (0, tokens) for tokens in (20, 128)
]  # before, and new
LIMITS = 1 / 1.1, 1 / 1.2  # times as fast as float32, at first and then


def main(folder: str) -> int:
    torch.set_num_threads(2)
    models, wrong = of_all_widths(folder), 0
    print(f"{Path(folder).name}, {machine_code()}: milliseconds, and times as fast as float32")
    print(f"{'':22}" + "".join(f"{name:>10}" for name in models) + f"{'INT8':>12}{'INT4':>8}")
    for past, new in SIZES:
        for limit in LIMITS:
            found = compare(models, past, new, 9 if new < 64 else 3)
            missed = (
                native.library() is not None and min(gain for _, gain in found.values()) < limit
            )
            if not missed:
                break
        wrong += missed
        print(
            f"{new:3} {'rows after 100' if past else 'tokens of a prompt':18}"
            + "".join(f"{1e3 * seconds:10.1f}" for seconds, _ in found.values())
            + f"{found['INT8'][1]:12.2f}{found['INT4'][1]:8.2f}"
            + "  WRONG" * missed,
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
