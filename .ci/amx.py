"""Runs `python ARGUMENTS` where tile instructions work: the CPU's own, or those of amx.c.

    python .ci/amx.py -m pytest -p no:faulthandler cpu

A CPU that has tiles runs the arguments as they are: it would not refuse LDTILECFG, so the emulator
would never see the shapes of the tiles.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from cpu import compiled


def environment(folder: str) -> dict[str, str]:
    """What the emulator needs, which is compiled into this folder; nothing if the CPU has tiles."""
    if "amx_tile" in compiled.cpu_features():
        return {}
    emulator = f"{folder}/amx.so"
    flags = ("-O2", "-mfma", "-shared", "-fPIC")
    command = ["gcc", *flags, "-o", emulator, str(HERE / "amx.c"), "-lm"]
    subprocess.run(command, check=True)
    return {"CC": "gcc -mamx-int8 -mamx-bf16", "LD_PRELOAD": emulator}


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | environment(folder)).returncode)
