"""What a step of a real model costs with fewer bits: whole steps of 1 to 256 tokens after 100, in turns.

    python .ci/steps.py SMOLLM2     (a folder with a model)

INT8 and INT4 are as `--bits` makes them, in the type that is this CPU's own for the model; both are compared with float32. The goals are, for INT8, 1.6 times float32 at one row, and never below 0.9. What is required is less:
these machines are shared.
"""
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

import native
from model import Llama

ROWS, TURNS = (1, 4, 16, 64, 256), 9
REQUIRED = {1: 1.6, 4: 0.9}                             # times float32; of other widths 0.75


def step(llama: Llama, rows: int) -> float:
    """Seconds for so many tokens after 100, the logits of all of them up to 16."""
    cache, new = llama.cache(400), torch.arange(rows)
    seq, _ = cache.open(())
    llama(torch.arange(100), cache.extend([(seq, range(100))]), rows=slice(-1, None))
    made = cache.extend([(seq, new.tolist())])
    start = time.perf_counter()
    llama(new, made, rows=None if rows <= 16 else slice(-1, None))
    return time.perf_counter() - start


@torch.inference_mode()
def main(folder: str) -> int:
    torch.set_num_threads(2)
    models = {"float32": Llama.load(folder, "cpu", torch.float32), "INT8": Llama.load(folder, "cpu", bits=8), "INT4": Llama.load(folder, "cpu", bits=4)}
    product, wrong = models["INT8"].layers[0].down_proj, 0
    print(f"steps of {Path(folder).name}, milliseconds; INT8 and INT4 compute in {str(models['INT8'].dtype)[6:]}, one copy of the weights: "
          f"{product.nbytes:,} bytes for {product.in_features * product.out_features:,} weights of a product in INT8")
    print(f"{'rows':>6}" + "".join(f"{name:>10}" for name in models) + "    INT8 is  INT4 is  times as fast   INT8's product")
    for rows in ROWS:
        turns = [{name: step(llama, rows) for name, llama in models.items()} for _ in range(TURNS if rows < 64 else 5)]
        took = {name: median(turn[name] for turn in turns) for name in models}
        gains = {name: median(turn["float32"] / turn[name] for turn in turns) for name in ("INT8", "INT4")}
        enough = gains["INT8"] >= REQUIRED.get(rows, 0.75) or native.library() is None
        wrong += not enough
        print(f"{rows:6}" + "".join(f"{1e3 * took[name]:10.1f}" for name in models) + f"{gains['INT8']:11.2f}{gains['INT4']:9.2f}{'':18}{product.path(rows)}"
              + "  WRONG" * (not enough), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
