"""What the guessed numbers of gpu/tuning.py should be, in two minutes: every cut beside today's, in µs.

    python tune.py compile [part …]      here, without a GPU, into $TRITON_CACHE_DIR
    python tune.py [seconds] [part …]    there: rows of name, µs, share of the bandwidth; "*" marks today's cut
    TINY=1 python pretend.py tune.py …   a rehearsal

In the project's root. Parts: decode (attention of a text), some (16 to 64 rows), texts (of 64 texts), few (1 row). A product goes over so
many copies of its weight that no L2 cache holds them. A cut that does not compile, or is wrong by more than 3 % beside today's, is named.
"""
import os, sys, time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.getcwd()]
import torch
import gpu.tuning as tuning
from gpu import GPU
from kernels import Linear
from kvcache import KVSpec
from measure.gpu_parts import WAYS, open_texts, stopwatch
from measure.sizes import GPU_SIZES
from quant import WIDTHS, quantize

TINY = bool(os.environ.get("TINY"))
COMPILE = sys.argv[1:2] == ["compile"]
WORDS = sys.argv[2 if COMPILE else 1 :]
SECONDS = float(next((w for w in WORDS if w.replace(".", "").isdigit()), 170))
PARTS = [w for w in WORDS if not w.replace(".", "").isdigit()] or ["decode", "some", "texts", "few"]
DEVICE = "meta" if COMPILE else "cuda"
DTYPE = torch.float32 if TINY else torch.bfloat16
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TEXTS, LONG, SHORT = 64, 8192, 1088
if TINY:
    SHAPES = dict.fromkeys(SHAPES, (64, 128))
    TEXTS, LONG, SHORT = 2, 48, 160
PLAN, TILE = tuning.plan_product, tuning.tile_shape
END = time.monotonic() + (1e9 if COMPILE else SECONDS)
BANDWIDTH = 1.0


def cut_by(change, *shape):
    cut = PLAN(*shape)
    if "piece" in change and cut.at_once > 1:
        change = change | {"at_once": cut.at_once * cut.piece // change["piece"]}
    return cut._replace(**change)


def tile_by(change, *shape):
    names = ("rows", "keys", "warps", "stages", "registers")
    return tuple(change.get(name, now) for name, now in zip(names, TILE(*shape)))


def stored(way, N, K, copies):
    layout = WAYS[way]
    weights = []
    for _ in range(copies):
        w = torch.randn(N, K, device=DEVICE, dtype=DTYPE)
        if layout is not None:
            w = quantize(w, layout.bits, layout.group)._replace(input_bits=layout.activations)
        weights.append(GPU().pack_weight(Linear(w), DTYPE))
    return weights


def products(way, name, T):
    N, K = SHAPES[name]
    size = stored(way, 16, K, 1)[0].weight.nbytes / 16 * N if not COMPILE else 1e9
    copies = 1 if COMPILE or TINY else max(2, int(2e8 / size) + 1)
    weights = stored(way, N, K, copies)
    x = torch.randn(T, K, device=DEVICE, dtype=DTYPE)
    ops = GPU()

    def run():
        for weight in weights:
            y = ops.linear(x, weight)
        return y

    return run, copies, size


def attention(num_texts, keys, kv):
    spec = KVSpec(1, 8, 128, dtype=DTYPE, bits=WIDTHS[kv], device=torch.device(DEVICE))
    copies = 1 if num_texts > 8 or COMPILE or TINY else 32
    steps = [open_texts(spec, [1] * num_texts, keys - 1, fewer=0) for _ in range(copies)]
    qkv = torch.randn(num_texts, 48, 128, device=DEVICE, dtype=DTYPE)
    ops = GPU()

    def run():
        for step in steps:
            step.backend.clear()  # the plan of its launches
            y = ops.attend(qkv, 8, None, step, 0)
        return y

    return run, copies, spec.bytes(keys) * num_texts


def few():
    rows = [{}, {"rows": 32}, {"rows": 16}, {"num_warps": 8}, {"num_stages": 4}, {"num_stages": 5}]
    for way, name in product(("16 bits", "INT8", "INT4", "NF4"), ("o", "qkv", "down")):
        yield f"{way} {name} 1", partial(products, way, name, 1), "cut", rows


def some():
    rows = [{}, {"off": "apart"}, {"piece": 64}, {"num_stages": 3}, {"rows": 64, "num_warps": 4}, {"rows": 64, "num_warps": 4, "piece": 64}]
    for way, name, T in [("INT4", "gate_up", 64), ("INT4", "gate_up", 16), ("INT4", "o", 64), ("INT4", "o", 16), ("INT4", "down", 64), ("NF4", "gate_up", 64), ("NF4", "gate_up", 16)]:
        yield f"{way} {name} {T}", partial(products, way, name, T), "cut", rows
    for way, T in product(("INT8", "FP8"), (64, 16)):
        yield f"{way} gate_up {T}", partial(products, way, "gate_up", T), "cut", rows[:1] + rows[2:]


def decode():
    rows = [{}, {"least": 64}, {"least": 256}, {"keys": 32, "least": 64}, {"keys": 128}, {"warps": 8}, {"registers": 128}, {"stages": 3}]
    for kv in ("16", "8"):
        yield f"attention 1 text, {SHORT} keys, KV {kv}", partial(attention, 1, SHORT, kv), "tile", rows


def texts():
    rows = [{}, {"keys": 128, "warps": 8, "registers": 128}, {"registers": 128}, {"registers": 96}, {"keys": 128, "registers": 255}, {"stages": 7}]
    for kv in ("8", "8/4", "4", "16"):
        yield f"attention {TEXTS} texts, {LONG} keys, KV {kv}", partial(attention, TEXTS, LONG, kv), "tile", rows


def measure(name, make, kind, changes):
    run, calls, size = make()
    wanted = None
    for change in changes:
        if time.monotonic() > END:
            return
        cut = {key: value for key, value in change.items() if key not in ("least", "off")}
        with ExitStack() as changed:
            if kind == "cut":
                changed.enter_context(mock.patch.object(tuning, "plan_product", partial(cut_by, cut)))
            else:
                changed.enter_context(mock.patch.object(tuning, "tile_shape", partial(tile_by, cut)))
            changed.enter_context(mock.patch.object(tuning, "LEAST_KEYS", change.get("least", tuning.LEAST_KEYS)))
            changed.enter_context(mock.patch.dict(os.environ, LLAMA_GPU_OFF=change.get("off", os.environ.get("LLAMA_GPU_OFF", ""))))
            try:
                if COMPILE:
                    run()
                    print("compiled", name, change, flush=True)
                    continue
                y = run().float()
                wanted = y if wanted is None else wanted
                error = ((y - wanted).norm() / wanted.norm()).item()
                sizes = replace(GPU_SIZES, repeats=1 if TINY else max(2, 40 // calls))
                seconds = stopwatch(run, sizes)() / calls
                share = size / seconds / BANDWIDTH
                print(f"{'*' if not change else ' '} {name:42} {1e6 * seconds:8.1f} µs {share:5.0%}  {change} {'WRONG' if not error < 0.03 else ''}", flush=True)
            except Exception as error:
                print(f"  {name:42} {change}: {type(error).__name__} {str(error)[:100]}", flush=True)


if COMPILE:
    from precompile import launching_nothing
with torch.inference_mode(), launching_nothing() if COMPILE else nullcontext():
    if not COMPILE:
        from measure.clock import read_bandwidth

        BANDWIDTH = read_bandwidth(4 if TINY else 4096, "cuda")
        print(f"{torch.cuda.get_device_name()}: {BANDWIDTH:.3g} bytes a second", flush=True)
    for part in PARTS:
        for case in {"few": few, "some": some, "decode": decode, "texts": texts}[part]():
            measure(*case)
