"""Triton's operations keep the contract, and so do recordings: on a GPU; where there is none, in
Triton's interpreter, and on a tape."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton import knobs

import test_kernels
from gpu import GPU
from gpu.testing import DEVICE, Kernels, recorded
from test_kernels import ROUNDING, Contract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # padding is not read
]
COMPILED = not knobs.runtime.interpret
LARGE = {  # sizes of Llama 3.1 8B: for the compiler's kernels alone
    "PRODUCTS": [(1, 6400, 4096, 128), (8, 1024, 4096, 64), (64, 6400, 4096, 128)],
    "ATTENTION": [([(1, 4000), (60, 300), (8, 90)], 8, 4, 128, 16, "rotate")],
    "LOGITS": [(65, 128_256, False, False), (2, 128_256, True, False)],
}


class TestTriton(Contract):
    """The contract's fixed sizes only."""

    ops = GPU(records=False)
    device = DEVICE
    dtypes = (torch.float32, torch.float64)
    refuses = False  # a GPU would have to wait for its logits
    test_whole_passes_and_all_drafts_of_a_round = None

    if COMPILED:  # the interpreter has no products in 16 bits
        dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16)

    @pytest.fixture(autouse=True)
    def larger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpu.tuning.LEAST_KEYS", 64)  # so that keys are split
        for name, sizes in LARGE.items():
            if COMPILED:
                monkeypatch.setattr(test_kernels, name, getattr(test_kernels, name) + sizes)

    def check(self, sizes: list[tuple[Any, ...]], *strategies: Any) -> Any:
        def run(body: Callable[..., None]) -> None:
            for seed, (size, dtype) in enumerate(product(sizes, self.dtypes)):
                if size is sizes[0] or dtype is self.dtypes[0]:
                    body(*size, dtype, seed)

        return run

    def rounding(self, dtype: torch.dtype, bits: int) -> float:
        """Keys and values in few bits are read in float32 at most."""
        least = 0.0 if bits == 16 else ROUNDING[torch.float32]
        return max(ROUNDING[dtype], least)


class TestRecordings(Contract):
    """A coupled round, and one of requests with different numbers of drafts."""

    ops = Kernels()
    device = DEVICE
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
