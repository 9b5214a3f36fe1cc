"""Triton's operations keep the contract, in the interpreter; and so do recordings, on a tape."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import GPU
from gpu.test_graphs import Kernels, recorded
from test_kernels import ROUNDING, Contract

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the contract's tensors are on the CPU"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]  # of padding, which is not read


class TestInterpreter(Contract):
    ops = GPU(records=False)
    dtypes = (torch.float32, torch.float64)
    examples, slow = 2, True
    refuses = False  # a GPU would have to wait for its logits
    test_whole_passes_and_all_drafts_of_a_round = None

    @pytest.fixture(autouse=True)
    def short_splits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpu.flash.LEAST_KEYS", 64)

    def rounding(self, dtype: torch.dtype, bits: int) -> float:
        """Keys and values in few bits are read in float32."""
        return ROUNDING[dtype if bits == 16 else torch.float32]


class TestRecordings(Contract):
    ops = Kernels()
    refuses = False
    test_products_and_look_ups = test_between_the_products = test_attention_reads_what_is_stored = (
        None
    )
    test_attention_without_a_cache = test_sampling = test_room_and_dtype = None

    @pytest.fixture(autouse=True)
    def tape(self) -> Iterator[None]:
        with recorded() as made:
            yield
        assert made
