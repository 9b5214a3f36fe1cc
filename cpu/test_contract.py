"""A CPU's operations keep the contract, with C and without."""

import pytest
import torch

from cpu import CPU, native
from cpu.test_products import rounding_of_x
from quant import Quantized
from test_kernels import ROUNDING, Contract


class TestC(Contract):
    ops = CPU()

    @pytest.fixture(autouse=True)
    def compiled(self) -> None:
        """Where there is a compiler, it compiles this source."""
        if why := native.why_not():
            assert not why.startswith("the C compiler failed"), why
            pytest.skip(why)

    def more_size(
        self, w: torch.Tensor | Quantized, x: torch.Tensor, wide: torch.Tensor
    ) -> torch.Tensor | float:
        return rounding_of_x(w, x, wide) / ROUNDING[torch.float32]


class TestWithoutC(Contract):
    ops = CPU()

    @pytest.fixture(autouse=True)
    def no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: None)
