"""CUDA graphs: all launches of a step as one launch.

Python takes longer to launch a small model's kernel than the GPU to run it. A CUDA graph is a
recording of launches and their arguments, which the GPU repeats by itself. So everything that
changes from step to step must be in tensors that keep their addresses and are filled before each
replay, and no recorded operation may send a number to the host.

    Recorded(run)   the first call runs `run`, which compiles its kernels, then records it; later
                    calls replay it
    Passes(llama)   records passes over a few tokens of each sequence
    Drafts(llama)   records the γ passes and picks by which a model drafts for all requests of a
                    round; and the plain tokens that the target makes before the host looks
                    (runner.py), as drafts of its own

A recording has a fixed shape: numbers of sequences and blocks are rounded up (`bucket_of`), and the
surplus is padding. It is made when a shape first occurs. All recordings share one memory pool,
because they run one at a time. The γ drafts need no host in between: their slots in the cache are
reserved at once, and `next_step` computes the next step's metadata on the device.

Invariant: results are those of the model called directly, drafts those of kernels.Ops.draft. The
next round of a shape overwrites this round's drafts.
Not covered: graphs for prompts, and for sequences with very different numbers of new tokens.

    B sequences of a bucket · k the largest γ of a round · V vocabulary · T tokens of a step
    M blocks of the longest sequence
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor

from kvcache import AttentionMetadata, SequenceSlice
from sampling import SETTINGS

if TYPE_CHECKING:
    from kvcache import Cache
    from model import Llama
    from speculative import Round

MOST_TOKENS = 17  # of a sequence in a recorded step: 16 drafts and 1
Run = Callable[[], object]


# ---- Recordings ----------------------------------------------------------------------------------


@cache
def memory_pool(device: int) -> Any:
    """Of all recordings, held for good: its id would die with the last recording that uses it."""
    return torch.cuda.MemPool()


def record(run: Run) -> Run:
    """Record the launches of `run` -> a function that replays them."""
    graph = torch.cuda.CUDAGraph()
    pool = memory_pool(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool.id, capture_error_mode="thread_local"):
        run()
    return graph.replay


class Recorded:
    """Runs and records `run`, later replays it.

    `run` reads and fills only tensors that keep their addresses.
    """

    def __init__(self, run: Run):
        self.run = run
        self.replay: Run | None = None

    def __call__(self) -> None:
        if self.replay is not None:
            self.replay()
            return
        self.run()
        self.replay = record(self.run)


# ---- Metadata of a fixed shape -------------------------------------------------------------------


class Bucket(NamedTuple):
    """The shape of a recording."""

    sequences: int
    each: int  # new tokens of a sequence
    blocks: int  # of a sequence


def rounded(n: int) -> int:
    """n rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: at most a third of the rows are padding."""
    power = 1 << max(0, n - 1).bit_length()
    between = power * 3 // 4
    return between if power > 2 and n <= between else power


def bucket_of(metadata: AttentionMetadata, sequences: int, each: int) -> Bucket:
    """The shape of the recording for this step, rounded up so that many steps share it."""
    longest_table = max(len(sequence.block_table) for sequence in metadata.sequences)
    return Bucket(rounded(sequences), each, rounded(longest_table))


def empty_metadata(cache: Cache, bucket: Bucket) -> AttentionMetadata:
    """Of a step without sequences, to be filled with up to as many and as long ones.

    It refers to the cache weakly, because the cache owns the recordings.
    """
    B, each, M = bucket
    metadata = AttentionMetadata((), cache.block_size, proxy(cache), (B * each, B, M))
    metadata = metadata.to(cache.device)
    metadata.num_new_tokens = [each] * B
    metadata.backend["longest"] = M * cache.block_size
    return metadata


def next_step(metadata: AttentionMetadata, stops: Tensor) -> AttentionMetadata:
    """The step of each sequence's next token, computed on the device.

    stops: int32[B], the lengths at which to stop: a token there is padding.
    """
    following = copy(metadata)
    B, M = metadata.block_tables.shape
    S = metadata.block_size
    lengths = metadata.seq_lens
    position = torch.minimum(lengths, stops - 1).clamp(min=0)
    column = (position // S).long()[:, None]
    block = metadata.block_tables.gather(1, column)[:, 0]  # int32[B]
    following.shape = (B, B, M)
    following.num_new_tokens = [1] * B
    following.positions = lengths
    following.slot_mapping = torch.where(lengths < stops, block * S + position % S, -1)
    following.cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=lengths.device)
    following.seq_lens = torch.minimum(lengths + 1, stops)
    following.backend = {"longest": metadata.backend["longest"]}
    return following


# ---- Passes --------------------------------------------------------------------------------------


class RecordedPass(NamedTuple):
    tokens: Tensor  # int64[T]
    metadata: AttentionMetadata
    run: Recorded


class Passes:
    """Recordings of one model's passes over one cache."""

    def __init__(self, llama: Llama):
        self.llama = llama
        self.passes: dict[Bucket, RecordedPass] = {}
        self.logits: dict[int, Tensor] = {}  # [T, V] for each T

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None,
    ) -> Tensor:
        """`Ops.forward`, recorded where all logits are wanted of a step of a few tokens each."""
        T = len(tokens)
        B = len(metadata.sequences)
        each = max(metadata.num_new_tokens)
        mostly_padding = each * B > 2 * T
        if logits_indices is not None or each > MOST_TOKENS or mostly_padding:
            return self.llama.forward(tokens, metadata, logits_indices)
        bucket = bucket_of(metadata, B, each)
        if bucket not in self.passes:
            self.passes[bucket] = self._prepare(metadata.cache, bucket)
        recorded = self.passes[bucket]
        recorded.tokens[:T] = tokens
        recorded.metadata.fill(metadata.sequences)
        recorded.run()
        return self.logits[len(recorded.tokens)][:T].clone()

    def _prepare(self, cache: Cache, bucket: Bucket) -> RecordedPass:
        llama = self.llama
        T = bucket.sequences * bucket.each
        if T not in self.logits:
            shape = T, llama.config.vocab_size
            self.logits[T] = torch.empty(shape, dtype=llama.dtype, device=llama.device)
        logits = self.logits[T]
        tokens = torch.zeros(T, dtype=torch.int64, device=llama.device)
        metadata = empty_metadata(cache, bucket)

        def run() -> None:  # without `self`, which holds it
            logits.copy_(llama.forward(tokens, metadata, None))

        return RecordedPass(tokens, metadata, Recorded(run))


# ---- Drafts --------------------------------------------------------------------------------------


class Inputs:
    """The inputs of a round's drafts, beside the metadata: views of one buffer, for one copy."""

    def __init__(self, B: int, k: int, device: torch.device | str, pinned: bool = False):
        sizes = [2 * B, B, B, 3 * B * (k + 1), len(SETTINGS) * B]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        tokens, num_drafts, stops, coins, settings = self.buffer.split(sizes)
        self.tokens = tokens  # int64[2 B], unread ones, end to end
        self.num_drafts = num_drafts  # int64[B]
        self.stops = stops  # int64[B], lengths up to which the cache has slots
        self.coins = coins.view(-1, 3)  # int64[B · (k + 1), 3]: seeds, positions, roles
        self.settings = settings.view(torch.float64).view(-1, B)  # float64[settings, B]

    @classmethod
    def of(
        cls, round: Round, unread: Sequence[Sequence[int]], lengths: Sequence[int], B: int
    ) -> Inputs:
        """Those of a round, on the host. lengths: of the sequences, unread tokens included."""
        n = len(lengths)
        inputs = cls(B, max(round.num_drafts), "cpu", pinned=round.device.type == "cuda")
        tokens: list[int] = []
        stops = []
        for new, num_drafts, length in zip(unread, round.num_drafts, lengths):
            if num_drafts:
                tokens += new
            stops.append(length + max(0, num_drafts - 1))
        inputs.tokens[: len(tokens)] = torch.tensor(tokens)
        inputs.num_drafts[:n] = torch.tensor(round.num_drafts)
        inputs.stops[:n] = torch.tensor(stops)
        inputs.coins[: len(round.keys)] = torch.tensor(round.keys)
        for row, (name, neutral) in zip(inputs.settings, SETTINGS.items()):
            values = [neutral if value is None else value for value in round.setting(name)]
            row[:n] = torch.tensor(values, dtype=torch.float64)
        return inputs


class RecordedRound(NamedTuple):
    inputs: Inputs
    metadata: AttentionMetadata
    drafted: Tensor  # int64[B, k]
    q: Tensor  # float[B, k, V]
    run: Recorded


class Drafts:
    """Recordings of one model's drafts over one cache, a round each."""

    def __init__(self, llama: Llama):
        self.llama = llama
        self.rounds: dict[Any, RecordedRound] = {}
        self.drafted: dict[Any, tuple[Tensor, Tensor]] = {}  # for each B, k, V and dtype

    def __call__(
        self,
        cache: Cache,
        seqs: Sequence[int],
        unread: Sequence[Sequence[int]],
        round: Round,
        cache_blocks: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.draft`, with at most two unread tokens of each sequence."""
        n = len(round.num_drafts)
        new_tokens = []
        for seq, new, num_drafts in zip(seqs, unread, round.num_drafts):
            if num_drafts:  # 0: a token that only the device will know
                new_tokens.append((seq, [*new, *[0] * (num_drafts - 1)]))
        reserved = cache.extend(new_tokens, cache_blocks)
        bucket = bucket_of(reserved, n, 2)
        recorded = self._recorded(cache, bucket, round)
        slices = iter(reserved.sequences)
        sequences = []
        for new, num_drafts in zip(unread, round.num_drafts):
            if num_drafts:
                block_table, start, _ = next(slices)
                sequences.append(SequenceSlice(block_table, start, start + len(new)))
            else:
                sequences.append(SequenceSlice((), 0, 0))
        recorded.metadata.fill(sequences)
        lengths = [sequence.seq_len for sequence in sequences]
        inputs = Inputs.of(round, unread, lengths, bucket.sequences)
        recorded.inputs.buffer.copy_(inputs.buffer, non_blocking=True)
        recorded.run()
        return recorded.drafted[:n], recorded.q[:n]

    def _recorded(self, cache: Cache, bucket: Bucket, round: Round) -> RecordedRound:
        """The recording for such a round."""
        B = bucket.sequences
        k = max(round.num_drafts)
        V = round.vocab_size
        device = round.device
        used = tuple(
            name for name in SETTINGS if any(value is not None for value in round.setting(name))
        )
        key = bucket, k, used, round.coupled, round.make_coin, V, round.dtype
        if key in self.rounds:
            return self.rounds[key]
        shape = B, k, V, round.dtype
        if shape not in self.drafted:
            drafted = torch.empty(B, k, dtype=torch.int64, device=device)
            q = torch.empty(B, k, V, dtype=round.dtype, device=device)
            self.drafted[shape] = drafted, q
        drafted, q = self.drafted[shape]
        inputs = Inputs(B, k, device)
        first_metadata = empty_metadata(cache, bucket)
        llama = self.llama
        coin = round.make_coin
        first_coin = round.first_draft_coin
        ops = round.ops

        def run() -> None:  # the loop of `Ops.draft` for all B rows; without `self`, which holds it
            seeds, positions, roles = inputs.coins.unbind(1)
            coins = coin(seeds, positions, roles)
            settings = {name: row for name, row in zip(SETTINGS, inputs.settings) if name in used}
            tokens = inputs.tokens
            metadata = first_metadata
            logits_indices: Tensor | None = metadata.cu_seqlens[1:].long() - 1  # the last unread
            for j in range(k):
                logits = llama.forward(tokens, metadata, logits_indices)[:, :V]  # [B, V]
                probs = ops.probabilities(logits, **settings)
                picked = coins[first_coin + j :: k + 1].pick(probs)
                wanted = inputs.num_drafts > j
                drafted[:, j] = torch.where(wanted, picked, -1)
                q[:, j] = torch.where(wanted[:, None], probs, 0)
                tokens = drafted[:, j].clamp(min=0)  # −1: no draft
                metadata = next_step(metadata, inputs.stops.int())
                logits_indices = None

        self.rounds[key] = RecordedRound(inputs, first_metadata, drafted, q, Recorded(run))
        return self.rounds[key]
