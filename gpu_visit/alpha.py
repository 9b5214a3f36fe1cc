"""Drafts that do not pay: γ = 2, 4 and auto, times plain decoding, where 3 of 10 drafts are accepted: python alpha.py [--quick]

In the project's root. While γ auto is 0, a step draws four plain tokens (gpu/steps.py): auto is expected at 0.99 (0.93 before).
"""
import os, sys
sys.path.insert(0, os.getcwd())
import torch
from dataclasses import replace
from measure.gpu_cases import speculation_row
from measure.sizes import GPU_SIZES, QUICK
SIZES = replace(QUICK, device="cuda" if torch.cuda.is_available() else "cpu") if "--quick" in sys.argv else GPU_SIZES
with torch.inference_mode():
    print("α 0.3: γ = 2, 4, auto:", *speculation_row(SIZES, "16 bits", "16 bits", 0.3), flush=True)
