"""As on a GPU, where there is none: python pretend.py SCRIPT.py … | -m MODULE …      in the project's root

Over the pretended device of gpu/test_pretend.py: kernels run in Triton's interpreter, recordings are lists of launches.
"""
import os, runpy, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, os.getcwd())
import torch, torch._dynamo
torch.inference_mode = lambda mode=True: torch.no_grad()  # its tensors cannot be wrapped
from gpu import test_pretend as page
page.build_device()
torch.set_num_threads(1)
torch.cuda.get_device_name = lambda *_: "a pretended GPU"
if sys.argv[1] == "-m":
    sys.argv = sys.argv[2:]
    start = lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    start = lambda: runpy.run_path(sys.argv[0], run_name="__main__")
with page.pretended():
    start()
