"""What a real model's steps and prompts cost with fewer bits, in turns with float32: none may cost more.

    python .ci/steps.py SMOLLM2     (a folder with a model)

LLAMA_MARCH, ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY hold the machine down to an older CPU; LLAMA_NATIVE=0 takes the
C away: then weights of fewer bits become numbers first, and nothing is required. The machines are shared: what
misses the limit is measured once more, and then a wider one counts.
"""
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from cpu import native
from kvcache import KVCache
from model import Llama

STEPS, PROMPTS, TURNS = (1, 5, 16, 64), (20, 128, 512), 9
LIMITS = 1.1, 1.2                                       # times float32, at first and then


def seconds(llama: Llama, past: int, new: int) -> float:
    """For so many tokens after so many, and the logits of all, of a prompt of the last."""
    cache, tokens = KVCache.of(llama, past + new), torch.arange(past + new) % 1000
    seq, _ = cache.open(())
    if past:
        llama(tokens[:past], cache.extend([(seq, tokens[:past].tolist())]), rows=slice(-1, None))
    step = cache.extend([(seq, tokens[past:].tolist())])
    start = time.perf_counter()
    llama(tokens[past:], step, rows=None if past else slice(-1, None))
    return time.perf_counter() - start


def measured(models: dict[str, Llama], past: int, new: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds, and times what float32 takes: medians."""
    turns = [{name: seconds(llama, past, new) for name, llama in models.items()} for _ in range(TURNS if new < 64 else 3)]
    return ({name: 1e3 * median(turn[name] for turn in turns) for name in models},
            {name: median(turn[name] / turn["float32"] for turn in turns) for name in models})


@torch.inference_mode()
def main(folder: str) -> int:
    torch.set_num_threads(2)
    models = {name: Llama.load(folder, "cpu", torch.float32, bits=bits) for name, bits in (("float32", 16), ("INT8", 8), ("INT4", 4))}
    print(f"{Path(folder).name}, ATen {torch.backends.cpu.get_cpu_capability()}, "
          f"{native.why_not() or 'C for ' + (native.os.environ.get('LLAMA_MARCH') or 'this CPU')}: milliseconds, and times float32")
    print(f"{'':22}" + "".join(f"{name:>10}" for name in models) + f"{'INT8':>12}{'INT4':>8}")
    wrong = 0
    for what, past, new in [("rows after 100", 100, rows) for rows in STEPS] + [("tokens of a prompt", 0, length) for length in PROMPTS]:
        for limit in LIMITS:
            took, ratio = measured(models, past, new)
            missed = native.library() is not None and max(ratio.values()) > limit
            if not missed:
                break
        wrong += missed
        print(f"{new:3} {what:18}" + "".join(f"{took[name]:10.1f}" for name in models) + f"{ratio['INT8']:12.2f}{ratio['INT4']:8.2f}"
              + "  WRONG" * missed, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
