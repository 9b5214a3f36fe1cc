"""Tensors are worked on in threads, in order, each alone; whoever watches sees all of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from checkpoint import progress
from checkpoint.progress import Progress, map_in_threads
from conftest import write_model
from model import Llama

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
def test_watchers_see_every_tensor(tmp_path, monkeypatch, bits, threads):
    seen: list[Progress] = []
    monkeypatch.setattr(progress, "watchers", [seen.append])
    llama = Llama.load(write_model(tmp_path), "cpu", torch.float64, bits=bits)
    for verb in ("loading", "packing"):
        numbers = [told for told in seen if told.verb == verb]
        last = numbers[-1]
        assert last.num_tensors == last.all_tensors >= 4 * len(llama.layers)
        assert last.num_bytes == last.all_bytes > 0
        assert [told.num_bytes for told in numbers] == sorted(told.num_bytes for told in numbers)


def test_threads_work_in_the_callers_mode(tmp_path, threads):
    """A tensor that was made in inference mode may be written in that mode alone."""
    folder = write_model(tmp_path)
    wanted = Llama.load(folder, "cpu", bits=8)(torch.arange(5))
    with torch.inference_mode():
        assert torch.equal(Llama.load(folder, "cpu", bits=8)(torch.arange(5)), wanted)
