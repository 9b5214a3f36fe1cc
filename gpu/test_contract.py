"""Triton's operations keep the contract in the interpreter, and recordings keep it on a tape."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
import test_kernels
from gpu import GPU
from gpu.testing import Kernels, recorded
from test_kernels import ROUNDING, Contract

pytestmark = [
    pytest.mark.gpu_interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the contract's tensors are on the CPU"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # padding is not read
]


class TestInterpreter(Contract):
    """The contract's fixed sizes only."""

    ops = GPU(records=False)
    dtypes = (torch.float32, torch.float64)
    refuses = False  # a GPU would have to wait for its logits
    test_whole_passes_and_all_drafts_of_a_round = None

    def check(self, sizes: list[tuple[Any, ...]], *strategies: Any) -> Any:
        def run(body: Callable[..., None]) -> None:
            for seed, (size, dtype) in enumerate(product(sizes, self.dtypes)):
                if size is sizes[0] or dtype is self.dtypes[0]:
                    body(*size, dtype, seed)

        return run

    @pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
    def test_attention_reads_what_is_stored(self, bits, monkeypatch):
        monkeypatch.setattr("gpu.tuning.LEAST_KEYS", 64)
        super().test_attention_reads_what_is_stored(bits)

    def rounding(self, dtype: torch.dtype, bits: int) -> float:
        """Keys and values in few bits are read in float32."""
        return ROUNDING[dtype if bits == 16 else torch.float32]


class TestRecordings(Contract):
    """A coupled round, and one of requests with different numbers of drafts."""

    ops = Kernels()
    refuses = False
    test_products_and_look_ups = None
    test_between_the_products = None
    test_what_is_not_finite_is_seen = None
    test_attention_reads_what_is_stored = None
    test_attention_without_a_cache = None
    test_sampling = None
    test_verifying = None
    test_a_draft_whose_q_is_nan_is_not_accepted = None
    test_each_draft_is_accepted_by_its_own_number = None
    test_where_a_round_may_end_and_with_which_tokens = None
    test_room_and_dtype = None

    @pytest.fixture(autouse=True)
    def tape(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(test_kernels, "ROUNDS", test_kernels.ROUNDS[3:5])
        with recorded() as recordings:
            yield
        assert recordings
