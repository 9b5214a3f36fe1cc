"""A CPU's operations keep the contract, with C and without."""

import pytest
import torch

from cpu import CPU, native
from cpu.testing import rounding_of_x
from quant import Quantized
from test_kernels import ATTENTION, ROUNDING, Contract


class TestC(Contract):
    ops = CPU()
    attention = [*ATTENTION, ([(140, 30), (1, 250)], 2, 1, 132, 5, "")]  # several tiles

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
    """Where it differs from plain torch then: products of 16 bits, attention, whole passes."""

    ops = CPU()
    test_between_the_products = test_attention_without_a_cache = test_forbidden_tokens = None
    test_sampling = test_verifying = test_each_draft_is_accepted_by_its_own_number = None
    test_room_and_dtype = test_where_a_round_may_end_and_with_which_tokens = None

    @pytest.fixture(autouse=True)
    def no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: None)

    @pytest.mark.parametrize("layout", [16, 4])
    def test_products_and_look_ups(self, layout: int) -> None:
        super().test_products_and_look_ups(layout)
