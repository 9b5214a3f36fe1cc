"""Work on the tensors of a model, one after the other: in threads, with a bar at a terminal.

Loading rounds and packs hundreds of matrices by some twenty small operations each. PyTorch gives
each operation to all its threads, and waits for the slowest of them: beside another program that
takes many times as long. So here a thread works alone on a matrix.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from tqdm import tqdm

Item = TypeVar("Item")
Done = TypeVar("Done")

# On standard error, if that is a terminal, after two seconds; it is wiped at the end.
progress_bar = partial(tqdm, delay=2, leave=False, disable=None)


def do_each(
    verb: str,
    work: Callable[[Item], int],
    items: Iterable[Item],
    device: torch.device,
    num_bytes: int,
) -> None:
    """Do the work on each item: item -> the bytes that are done, of `num_bytes` in all."""
    with progress_bar(desc=verb, total=num_bytes, unit="B", unit_scale=True) as bar:
        for done in map_in_threads(work, items, device):
            bar.update(done)


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
