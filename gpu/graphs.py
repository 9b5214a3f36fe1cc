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
                    (steps.py), as drafts of its own

A recording has a fixed shape: numbers of sequences and blocks are rounded up (`bucket_of`), and the
surplus is padding. It is made when a shape first occurs. All recordings share one memory pool,
because they run one at a time. The γ drafts need no host in between: their slots in the cache are
reserved at once, and `next_steps` computes the metadata of all their steps on the device.

Invariant: results are those of the model called directly, drafts those of `Chain.one_by_one`. The
next round of a shape overwrites this round's drafts.
Not covered: graphs for prompts, and for sequences with very different numbers of new tokens.

    B sequences of a bucket · k the largest γ of a round · V vocabulary · T tokens of a step
    M blocks of the longest sequence
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor

from devices import live_graphs, send
from gpu.tuning import FEW
from kvcache import AttentionMetadata, SequenceSlice, joined_parts, pack_metadata
from settings import SETTINGS
from speculative import Proposal

if TYPE_CHECKING:
    from drafters import ModelChain
    from kvcache import Cache
    from model import Features, Llama
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
    live_graphs.add(graph)
    return graph.replay


class Recorded:
    """Runs and records `run`, later replays it.

    `run` reads and fills only tensors that keep their addresses.
    """

    def __init__(self, run: Run):
        self.run = run
        self.replay: Run | None = None

    def __call__(self) -> None:
        if self.replay is None:
            self.run()
            self.replay = record(self.run)
        else:
            self.replay()


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


class BucketMetadata(AttentionMetadata):
    """Of a step without sequences, to be filled with up to as many and as long ones: a recording
    reads its tensors. It refers to the cache weakly, because the cache owns the recordings."""

    def __init__(self, cache: Cache, bucket: Bucket):
        super().__init__((), cache.block_size, proxy(cache), cache.device)
        self.bucket = bucket
        self.num_new_tokens = [bucket.each] * bucket.sequences
        self._set_parts(padded_metadata((), self.block_size, bucket), bucket.blocks)
        self.backend["longest"] = bucket.blocks * cache.block_size

    def fill(self, sequences: Sequence[SequenceSlice]) -> None:
        """Write these sequences into the same tensors."""
        self.sequences = sequences
        packed = joined_parts(padded_metadata(sequences, self.block_size, self.bucket))
        self.buffer.copy_(send(packed, self.device), non_blocking=True)


def padded_metadata(
    sequences: Sequence[SequenceSlice], block_size: int, bucket: Bucket
) -> list[array]:
    """`pack_metadata`, with rows of padding up to the shape of the bucket. A token of padding has
    the slot −1: it is stored nowhere."""
    B, each, M = bucket
    parts = pack_metadata(sequences, block_size, M)
    positions, slot_mapping, cu_seqlens, seq_lens, block_tables = parts
    padding = B * each - len(positions)
    missing = B - len(sequences)
    positions.extend([0] * padding)
    slot_mapping.extend([-1] * padding)
    cu_seqlens.extend([cu_seqlens[-1]] * missing)
    seq_lens.extend([0] * missing)
    block_tables.extend([0] * (M * missing))
    return parts


def next_steps(metadata: AttentionMetadata, counts: Tensor, n: int) -> Iterator[AttentionMetadata]:
    """The steps of each sequence's next n tokens, one each: views of tensors [n, B] that the device
    computes at once.

    counts: int32[B], how many tokens are stored of each sequence; the others are padding.
    """
    B, M = metadata.block_tables.shape
    S = metadata.block_size
    stops = metadata.seq_lens + counts.clamp(min=0)
    cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=stops.device)
    ahead = torch.arange(n, dtype=torch.int32, device=stops.device)[:, None]
    all_positions = torch.minimum(metadata.seq_lens + ahead, stops)
    columns = (all_positions // S).clamp(max=M - 1)  # at a stop there may be no block
    blocks = metadata.block_tables.T.gather(0, columns.long())  # int32[n, B]
    slots = blocks * S + all_positions % S
    slot_mappings = torch.where(all_positions < stops, slots, -1)
    all_seq_lens = torch.minimum(all_positions + 1, stops)
    for positions, slot_mapping, seq_lens in zip(all_positions, slot_mappings, all_seq_lens):
        step = copy(metadata)
        step.num_new_tokens = [1] * B
        step.positions = positions
        step.slot_mapping = slot_mapping
        step.cu_seqlens = cu_seqlens
        step.seq_lens = seq_lens
        step.backend = {"longest": metadata.backend["longest"]}
        yield step


# ---- Passes --------------------------------------------------------------------------------------


class RecordedPass(NamedTuple):
    tokens: Tensor  # int64[T]
    metadata: BucketMetadata
    features: Features | None
    run: Recorded


class Passes:
    """Recordings of one model's passes over one cache."""

    def __init__(self, llama: Llama):
        self.llama = llama
        self.passes: dict[Any, RecordedPass] = {}
        self.logits: dict[int, Tensor] = {}  # [T, V] for each T

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None,
        features: Features | None = None,
    ) -> Tensor:
        """`Ops.forward`, recorded where all logits are wanted of a step of a few tokens each."""
        T = len(tokens)
        B = len(metadata.sequences)
        each = max(metadata.num_new_tokens)
        mostly_padding = each * B > 2 * T
        if logits_indices is not None or each > MOST_TOKENS or mostly_padding:
            return self.llama.forward(tokens, metadata, logits_indices, features)
        bucket = bucket_of(metadata, B, each)
        wanted = features.layers if features else ()
        key = bucket, wanted
        if key not in self.passes:
            self.passes[key] = self._prepare(metadata.cache, bucket, wanted)
        recorded = self.passes[key]
        recorded.tokens[:T] = tokens
        recorded.metadata.fill(metadata.sequences)
        recorded.run()
        if features:
            features.values.copy_(recorded.features.values[:T])
        return self.logits[len(recorded.tokens)][:T].clone()

    def _prepare(self, cache: Cache, bucket: Bucket, wanted: tuple[int, ...]) -> RecordedPass:
        llama = self.llama
        T = bucket.sequences * bucket.each
        if T not in self.logits:
            shape = T, llama.config.vocab_size
            self.logits[T] = torch.empty(shape, dtype=llama.dtype, device=llama.device)
        logits = self.logits[T]
        tokens = torch.zeros(T, dtype=torch.int64, device=llama.device)
        metadata = BucketMetadata(cache, bucket)
        features = llama.empty_features(wanted, T) if wanted else None

        def run() -> None:  # without `self`, which holds it
            logits.copy_(llama.forward(tokens, metadata, None, features))

        return RecordedPass(tokens, metadata, features, run=Recorded(run))


# ---- Drafts --------------------------------------------------------------------------------------


class Inputs:
    """The inputs of a round's drafts, beside the metadata: views of one buffer, for one copy."""

    def __init__(self, B: int, k: int, device: torch.device | str, pinned: bool = False):
        sizes = [2 * B, B, 3 * B * (k + 1), len(SETTINGS) * B]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        tokens, num_drafts, rngs, settings = self.buffer.split(sizes)
        self.tokens = tokens  # int64[2 B], unread ones, end to end
        self.num_drafts = num_drafts  # int64[B]
        self.rngs = rngs.view(-1, 3)  # int64[B · (k + 1), 3]: seeds, positions, roles
        self.settings = settings.view(torch.float64).view(-1, B)  # float64[settings, B]

    @classmethod
    def of(cls, round: Round, tokens: Sequence[int], B: int) -> Inputs:
        """Those of a round, on the host."""
        n = len(round.num_drafts)
        inputs = cls(B, max(round.num_drafts), "cpu", pinned=round.device.type == "cuda")
        inputs.tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        inputs.num_drafts[:n] = torch.tensor(round.num_drafts, dtype=torch.int64)
        inputs.rngs[: len(round.keys)] = torch.tensor(round.keys, dtype=torch.int64)
        for row, (name, neutral) in zip(inputs.settings, SETTINGS.items()):
            values = [neutral if value is None else value for value in round.setting(name)]
            row[:n] = torch.tensor(values, dtype=torch.float64)
        return inputs


class RecordedRound(NamedTuple):
    inputs: Inputs
    metadata: BucketMetadata
    drafted: Tensor  # int64[B, k]
    q: Tensor | None  # float[B, k + 1, V]
    run: Recorded


class Drafts:
    """Recordings of one model's drafts over one cache, a round each."""

    def __init__(self, llama: Llama):
        self.llama = llama
        self.rounds: dict[Any, RecordedRound] = {}
        self.q: dict[Any, Tensor] = {}  # by shape and dtype

    def __call__(self, chain: ModelChain, round: Round) -> Proposal:
        """`Chain.one_by_one`, with at most two unread tokens of each sequence."""
        n = len(round.num_drafts)
        slices = iter(chain.reserved.sequences)
        sequences = []
        tokens = []
        for b in range(n):
            if b in chain.new:
                block_table, start, _ = next(slices)
                sequences.append(SequenceSlice(block_table, start, start + len(chain.new[b])))
                tokens += chain.new[b]
            else:
                sequences.append(SequenceSlice((), 0, 0))
        # Rounds of few sequences share a recording, with one unread token and with two.
        each = 2 if 2 * n <= FEW else max(map(len, chain.new.values()))
        bucket = bucket_of(chain.reserved, n, each)
        recorded = self._recorded(chain.cache, bucket, round)
        recorded.metadata.fill(sequences)
        inputs = Inputs.of(round, tokens, bucket.sequences)
        recorded.inputs.buffer.copy_(inputs.buffer, non_blocking=True)
        recorded.run()
        q = None if recorded.q is None else recorded.q[:n]
        return Proposal(recorded.drafted[:n], q)

    def _recorded(self, cache: Cache, bucket: Bucket, round: Round) -> RecordedRound:
        """The recording for such a round."""
        B = bucket.sequences
        k = max(round.num_drafts)
        V = round.vocab_size
        device = round.device
        used = tuple(
            name for name in SETTINGS if any(value is not None for value in round.setting(name))
        )
        key = bucket, k, used, round.drawing, round.dtype
        if key in self.rounds:
            return self.rounds[key]
        q = None
        if not round.coupled:
            shape = B, k + 1, V
            if (shape, round.dtype) not in self.q:  # row k stays 0: no draft fills it
                self.q[shape, round.dtype] = torch.zeros(shape, dtype=round.dtype, device=device)
            q = self.q[shape, round.dtype]
        drafted = torch.empty(B, k, dtype=torch.int64, device=device)
        zero = torch.zeros((), dtype=round.dtype, device=device)
        inputs = Inputs(B, k, device)
        first_metadata = BucketMetadata(cache, bucket)
        llama = self.llama
        rng = round.make_rng
        first_rng = round.first_draft_rng
        ops = round.ops

        def run() -> None:  # `Chain.one_by_one` for all B rows; without `self`, which holds it
            rngs = rng(*inputs.rngs.unbind(1))
            settings = {name: row for name, row in zip(SETTINGS, inputs.settings) if name in used}
            is_padding = inputs.num_drafts[:, None] <= torch.arange(k, device=device)  # bool[B, k]
            following = next_steps(first_metadata, inputs.num_drafts.int() - 1, k - 1)
            tokens = inputs.tokens[: B * bucket.each]
            logits_indices = first_metadata.cu_seqlens[1:].long() - 1  # the last unread tokens
            picked = []
            for j, metadata in enumerate([first_metadata, *following]):
                logits = llama.forward(tokens, metadata, logits_indices)[:, :V]  # [B, V]
                probs = ops.probabilities(logits, **settings)
                if q is not None:
                    torch.where(is_padding[:, j, None], zero, probs.to(q.dtype), out=q[:, j])
                picked.append(rngs[first_rng + j :: k + 1].pick(probs))
                tokens = picked[j].clamp(min=0)  # −1: not finite
                logits_indices = None
            torch.stack(picked, 1, out=drafted)
            drafted.masked_fill_(is_padding, -1)

        self.rounds[key] = RecordedRound(inputs, first_metadata, drafted, q=q, run=Recorded(run))
        return self.rounds[key]
