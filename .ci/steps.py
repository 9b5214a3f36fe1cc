"""A real model's steps and prompts with fewer bits, in turns with float32: none costs more.

    python .ci/steps.py SMOLLM2     (a folder with a model)

LLAMA_MARCH, ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY hold the machine down to an older CPU.
LLAMA_NATIVE=0 takes the C away: then weights of fewer bits become numbers first, and nothing is
required. The machine is shared: what misses the limit is measured again, and at last a wider one
counts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from cpu import native
from measure.machine import instruction_set
from measure.steps import PAST, compare, load_widths

SIZES = [(PAST, rows) for rows in (1, 5, 16, 64)]  # tokens before, new tokens
SIZES += [(0, tokens) for tokens in (20, 128)]
LIMITS = (1.1, 1.1, 1.0, 1 / 1.1)  # times as fast as float32, each time


def main(folder: str) -> int:
    torch.set_num_threads(2)
    models = load_widths(folder)
    limits = LIMITS if native.library() is not None else (0.0,)
    num_wrong = 0
    print(f"{Path(folder).name}, {instruction_set()}: ms, and times as fast as float32")
    print(f"{'':22}" + "".join(f"{name:>10}" for name in models) + f"{'INT8':>12}{'INT4':>8}")
    for past, new in SIZES:
        for limit in limits:
            found = compare(models, past, new, 9 if new < 64 else 3)
            is_wrong = min(gain for _, gain in found.values()) < limit
            if not is_wrong:
                break
        num_wrong += is_wrong
        label = f"{new:3} rows after {past}" if past else f"{new:3} tokens of a prompt"
        times = "".join(f"{1e3 * seconds:10.1f}" for seconds, _ in found.values())
        gains = f"{found['INT8'][1]:12.2f}{found['INT4'][1]:8.2f}"
        print(f"{label:22}{times}{gains}{'  WRONG' if is_wrong else ''}", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
