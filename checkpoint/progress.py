"""Work on the tensors of a model, one after the other: in threads, and watched.

Loading rounds and packs hundreds of matrices by some twenty small operations each. PyTorch gives
each operation to all its threads, and waits for the slowest of them: beside another program that
takes many times as long. So here a thread works alone on a matrix.

`watchers` are called after each tensor; app/progress.py shows a person how far the work is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

Item = TypeVar("Item")
Done = TypeVar("Done")


class Progress(NamedTuple):
    """How far the work on a model's tensors is."""

    verb: str  # loading, packing
    num_tensors: int
    all_tensors: int
    num_bytes: int
    all_bytes: int


watchers: list[Callable[[Progress], None]] = []


def do_each(
    verb: str,
    work: Callable[[Item], list[int]],
    items: Iterable[Item],
    device: torch.device,
    sizes: list[int],
) -> None:
    """Do the work on each item, and tell the watchers.

    work: item -> the bytes of each tensor that is done; sizes: the bytes of all tensors.
    """
    progress = Progress(verb, 0, len(sizes), 0, sum(sizes))
    for done in map_in_threads(work, items, device):
        progress = progress._replace(
            num_tensors=progress.num_tensors + len(done),
            num_bytes=progress.num_bytes + sum(done),
        )
        for watch in watchers:
            watch(progress)


def map_in_threads(
    function: Callable[[Item], Done], items: Iterable[Item], device: torch.device
) -> Iterator[Done]:
    """function(item) of each item, in order; on a CPU in as many threads as PyTorch has."""
    count = torch.get_num_threads() if device.type == "cpu" else 1
    if count == 1:
        yield from map(function, items)
        return
    is_inference = torch.is_inference_mode_enabled()  # each thread has a mode of its own

    def work(item: Item) -> Done:
        with torch.inference_mode(is_inference):
            return function(item)

    waiting: deque[Future[Done]] = deque()
    try:
        with ThreadPoolExecutor(count, "tensors", torch.set_num_threads, [1]) as pool:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > count:  # few tensors at a time: memory holds them
                    yield waiting.popleft().result()
            for future in waiting:
                yield future.result()
    finally:
        torch.set_num_threads(count)  # a thread of the pool sets it for threads to come, too
