"""Registers, instructions and barriers of the kernels that steps of 8B launch on sm_90: python sasscount.py OUT.json  (project's root; Triton by PYTHONPATH)"""
import json, os, re, subprocess, sys, tempfile
sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.getcwd()]
os.environ.pop("TRITON_INTERPRET", None)
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from gpu import GPU, run_empty_step, testing
from checkpoint.config import Config
from checkpoint.formats import Quantization
from model import Llama
from paged import PagedCache

ROWS = {}
LABEL = ""

def sass(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin); f.flush()
        text = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", f.name], capture_output=True, text=True).stdout
    code = []
    for line in text.splitlines():
        m = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
        if m:
            body = re.sub(r"^@!?U?P\w+\s+", "", m[2].strip())
            code.append((int(m[1], 16), body.split()[0], body))
    loops = []
    for a, op, body in code:
        m = re.search(r"0x([0-9a-f]+)", body)
        if op.startswith("BRA") and m and int(m[1], 16) < a:
            loops.append([c for c in code if int(m[1], 16) <= c[0] <= a])
    inner = max(loops, key=lambda l: sum(c[1].startswith(("HGMMA", "HMMA", "IMMA", "QGMMA")) for c in l) * 10000 - len(l), default=[])
    first = next((i for i, c in enumerate(code) if c[1].startswith("LDGSTS")), -1)
    count = lambda ops, words: sum(c[1].startswith(words) for c in ops)
    return dict(all=len(code), before_first_copy=first, loop=len(inner), loop_bar=count(inner, ("BAR", "WARPSYNC")),
                loop_sts=count(inner, ("STS",)), loop_shfl=count(inner, ("SHFL",)), loop_mma=count(inner, ("HGMMA", "HMMA", "IMMA", "QGMMA")),
                bar=count(code, ("BAR",)), acqbulk=count(code, ("ACQBULK",)), prefetch=count(code, ("UBLKPF", "CCTL")))

def compile_source(source, options, arch):
    k = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    regs, spills = testing.resources(k.asm["cubin"])
    names = source.fn.arg_names
    constants = {names[p[0]]: v for p, v in source.constants.items()}
    what = {n: v for n, v in constants.items() if n in ("KIND", "COLS", "ROWS", "M", "SWIGLU", "K_BITS", "V_BITS", "SPLIT")}
    key = f"{LABEL} {source.fn.__name__} " + " ".join(f"{n}={v}" for n, v in sorted(what.items()))
    stats = dict(regs=regs, spills=spills, shared=k.metadata.shared, warps=k.metadata.num_warps, **sass(k.asm["cubin"]))
    if key in ROWS and ROWS[key] != stats:
        key += " (another)"
    ROWS[key] = stats
    print(key, stats, flush=True)
    return testing.Report(source.fn.__name__, {}, regs, spills, 0, 0, False, "", arch)

testing.compile_source = compile_source
def steps(way, kv, shapes):
    global LABEL
    config = Config(512, 4096, 14336, 1, 32, 8, 128, 4096)
    if way: config = config.quantized(Quantization(*way))
    llama = Llama(config, "meta", torch.bfloat16, seed=None, ops=GPU(records=False)).pack_weights()
    cache = PagedCache(llama.kv_spec(bits=kv), 16)
    def run():
        global LABEL
        for shape in shapes:
            LABEL = f"{way} {kv} {shape[0]}x{shape[1]}"
            for _ in range(2):
                run_empty_step(llama, cache, shape, splits=2 if shape == (1, 1) else 1)
    testing.compile_launches(run, 90)
with torch.inference_mode():
    steps((), (16, 16), [(1, 1), (1, 8), (1, 40)])
    steps((4,), (8, 8), [(1, 1), (64, 1)])
    steps(("nf4", 64), (8, 4), [(1, 1), (64, 1)])
    steps((8,), (4, 4), [(1, 1), (64, 1)])
json.dump(ROWS, open(sys.argv[1], "w"), indent=1)
