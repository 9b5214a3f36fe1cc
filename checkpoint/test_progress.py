"""Tensors are worked on in threads, in order, each alone; a terminal shows how far it is."""

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tqdm import tqdm

from checkpoint import progress
from checkpoint.progress import map_in_threads
from model import Llama
from testing.folders import write_model

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_thread_works_alone_in_order_and_an_error_comes_out(threads):
    taken = []

    def items():
        for item in range(20):
            taken.append(item)
            yield item

    for i, (item, count) in enumerate(
        map_in_threads(lambda item: (item, torch.get_num_threads()), items(), CPU)
    ):
        assert (item, count) == (i, 1)
        assert len(taken) <= i + 1 + threads  # not all at a time
    with ThreadPoolExecutor(1) as later:  # the engine thread of a server, say
        assert later.submit(torch.get_num_threads).result() == threads
    with pytest.raises(ZeroDivisionError):
        [*map_in_threads(lambda item: 1 // (item - 5), items(), CPU)]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_bars_count_every_byte(tmp_path, monkeypatch, bits, threads):
    bars: list[tqdm] = []

    def bar(**how: Any) -> tqdm:
        bars.append(tqdm(file=io.StringIO(), **how))
        return bars[-1]

    monkeypatch.setattr(progress, "progress_bar", bar)
    llama = Llama.load(write_model(tmp_path), "cpu", torch.float64, bits=bits)
    assert [bar.desc for bar in bars] == ["loading", "packing"]
    assert all(bar.n == bar.total > 1000 * len(llama.layers) for bar in bars)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_at_a_terminal_and_wiped(tmp_path, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    folder = write_model(tmp_path)
    Llama.load(folder, "cpu")
    assert not capsys.readouterr().err  # it takes less than two seconds
    monkeypatch.setitem(progress.progress_bar.keywords, "delay", 0)
    Llama.load(folder, "cpu")
    err = capsys.readouterr().err
    assert ("loading" in err and "packing" in err) == is_terminal
    assert "\n" not in err and not err.split("\r")[-1].strip()


def test_threads_work_in_the_callers_mode(tmp_path, threads):
    """A tensor that was made in inference mode may be written in that mode alone."""
    folder = write_model(tmp_path)
    wanted = Llama.load(folder, "cpu", bits=8)(torch.arange(5))
    with torch.inference_mode():
        assert torch.equal(Llama.load(folder, "cpu", bits=8)(torch.arange(5)), wanted)
