"""How the tests run: how many random cases, with or without C; and the folders of two models."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():  # before anybody imports Triton: it runs kernels as Python then
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("testing", "cpu.testing", "gpu.testing")

from testing.folders import CHATML, write_model

# Random cases of every test are so many times as many. .ci/run says 10 for some files.
TIMES = int(os.environ.get("TEST_TIMES", "1"))
hypothesis.settings.register_profile(
    "tests",
    max_examples=15 * TIMES,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")


def examples(count: int) -> hypothesis.settings:
    """For a test whose number of random cases is not the profile's."""
    return hypothesis.settings(max_examples=count * TIMES)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Products this small are not worth sharing: on a busy machine threads wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def in_time() -> Iterator[None]:
    """A test that takes 15 seconds of a processor fails: it would run forever."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, 15)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.fixture(params=["C", "no C"] if find_spec("cpu") else ["no C"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether cpu/native.py has a library: once as it is here, and once without."""
    if not find_spec("cpu"):
        return False
    from cpu import native

    if request.param == "no C":
        monkeypatch.setattr(native, "library", lambda: None)
    return native.library() is not None


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: no chat template."""
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    folder = tmp_path_factory.mktemp("instruct")
    return write_model(folder, template=CHATML, eos_token_ids=(256, 258))
