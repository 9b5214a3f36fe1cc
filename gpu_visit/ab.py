"""decode's rows with parts of gpu/ turned off, in turns, over the same weights:   python ab.py [--quick] [name,way …]

Prints tokens a second of each setting in the order of the turns (A B C D D C B A), then each setting's mean beside the first one's.
In the project's root. LLAMA_GPU_OFF is read at each launch, and every setting has an engine, a cache and recordings of its own.
"""
import gc, os, sys, time
sys.path.insert(0, os.getcwd())
import torch
from measure.gpu_cases import sizes_of
from measure.gpu_parts import random_engine, random_model, stream_seconds

QUICK = "--quick" in sys.argv
SECONDS = float(os.environ.get("SECONDS_LEFT", "1e9"))
SIZES = sizes_of("decode", QUICK, True)
SETTINGS = ["early,fetch", "fetch", "early", ""]  # what is off
KEYS = [tuple(word.split(",")) for word in sys.argv[1:] if "," in word] or [(SIZES.target, "16 bits"), (SIZES.target, "INT4"), (SIZES.draft, "16 bits")]
BEGIN = time.monotonic()
with torch.inference_mode():
    for name, way in KEYS:
        llama = random_model(name, way, SIZES)
        found = {off: [] for off in SETTINGS}
        for off in SETTINGS + SETTINGS[::-1]:
            if time.monotonic() - BEGIN > SECONDS - 8:
                break
            os.environ["LLAMA_GPU_OFF"] = off
            engine = random_engine(llama, None, 2 * SIZES.context, 1)
            found[off].append(1 / stream_seconds(engine, SIZES))
            print(f"{time.monotonic() - BEGIN:5.0f} s  {name} {way}  off: {off or 'nothing':12} {found[off][-1]:.1f} tokens/s", flush=True)
            del engine
            gc.collect()
        base = sum(found[SETTINGS[0]]) / max(1, len(found[SETTINGS[0]]))
        for off, turns in found.items():
            if turns and base:
                mean = sum(turns) / len(turns)
                print(f"{name} {way}  off: {off or 'nothing':12} mean {mean:.1f}, {mean / base - 1:+.1%}; turns differ by {max(turns) / min(turns) - 1:.1%}", flush=True)
        del llama
        gc.collect()
