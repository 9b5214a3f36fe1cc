"""Random models in memory, their drafters and caches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint.config import Config
from checkpoint.load import fill_model
from drafters import Drafter, ModelChain
from kernels import Ops
from kvcache import Cache
from model import Llama
from paged import PagedCache
from request import Request, Settings
from runner import ScheduledRequest
from speculative import Drawing, Round
from testing.toys import Place

SMALL = dict(
    vocab_size=261,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=96,
    tie_word_embeddings=True,
    eos_token_ids=(256,),
)


@torch.no_grad()
def random_llama(
    seed: int,
    ops: Ops | None = None,
    dtype: torch.dtype = torch.float64,
    scale: float = 10.0,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **config: Any,
) -> Llama:
    """Random weights, the same in every dtype, and so large (`scale`) that logits differ."""
    plain = {**SMALL, **config, "quantization": None}
    numbers = Llama(Config(**plain), seed=seed, ops=Ops()).named_tensors()
    for name, tensor in numbers.items():
        if "norm" not in name:
            tensor.mul_(scale)
    stored = Config(**{**SMALL, **config})
    llama = Llama(stored, device, dtype, seed=None, ops=ops, weight_dtype=weight_dtype)
    fill_model(llama, numbers.items())
    return llama.pack_weights()


def add_noise(llama: Llama) -> Llama:
    """Make its weights differ a little, as those of a draft do."""
    for tensor in llama.named_tensors().values():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        tensor.mul_(1 + 0.05 * noise)
    return llama


# For tests of memory.
LARGE = dict(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    head_dim=64,
    vocab_size=8192,
    tie_word_embeddings=False,
)


def model_chain(
    llama: Llama, cache: Cache, seqs: list[int], unread: list[list[int]], round: Round
) -> ModelChain:
    """A chain of drafts for the requests of a round that want some."""
    wanted = {b: (seqs[b], list(unread[b])) for b in round.drafting()}
    return ModelChain(llama, cache, round, unread=wanted)


def num_found(cache: PagedCache, tokens: list[int]) -> int:
    """How many of these tokens another text would find in the cache."""
    seq, num_cached = cache.open(tokens)
    cache.free(seq)
    return num_cached


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation makes; a view is not made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [x.numel() for x in tree_leaves(results) if isinstance(x, Tensor)]
            self.numel = max(self.numel, *sizes, 0)
        return results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: to say so to torch._dynamo would import it, in seconds."""
        return False


def read(drafter: Drafter, request: Request, count: int) -> None:
    """Read the text's first tokens, as with a chunk of the target's."""
    drafter.learn([ScheduledRequest(request, 0, count, samples=False)], None)


def proposed(
    drafter: Drafter, coupled: bool, B: int, V: int, device: torch.device = torch.device("cpu")
) -> tuple[list, Tensor | None, int]:
    """Three drafts of each text -> the tokens, their distributions, and what `Largest` says."""
    requests = [Request([7, 30, 4, 7, 30], Settings(1.0, seed=seed)) for seed in range(B)]
    for request in requests:
        read(drafter, request, 3)
    round = Round(requests, [3] * B, Drawing(V, coupled), target=Place(device))
    with Largest() as largest:
        drafted, q = drafter.propose(round)
    return drafted.tolist(), q, largest.numel
