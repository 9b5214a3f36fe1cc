"""A CPU's operations keep the contract, with C and without."""

import pytest

from cpu import CPU, native
from test_kernels import Contract


class TestC(Contract):
    ops = CPU()

    @pytest.fixture(autouse=True)
    def compiled(self) -> None:
        """Where there is a compiler, it compiles this source."""
        if why := native.why_not():
            assert not why.startswith("the C compiler failed"), why
            pytest.skip(why)


class TestWithoutC(Contract):
    ops = CPU()

    @pytest.fixture(autouse=True)
    def no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: None)
