"""Triton's operations keep the contract, in the interpreter."""
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import GPU
from test_kernels import Contract


@pytest.mark.skipif(torch.cuda.is_available(), reason="the contract's tensors are on the CPU, which only the interpreter reads")
class TestInterpreter(Contract):
    ops = GPU(records=False)
    dtypes = (torch.float32,)
    examples = 2
