"""CUDA graphs: all launches of a step as one launch.

Python takes longer to launch a small model's kernel than the GPU to run it. A CUDA graph is a recording of launches and
their arguments, which the GPU repeats by itself. So everything that changes from step to step must be in tensors that
keep their addresses and are filled before each replay, and no recorded operation may send a number to the host.

    Recorded(run)      the first call runs `run`, which compiles its kernels, then records it; later calls replay it
    Passes(…)          records passes over a few tokens of each text
    Drafts(…)          records the γ passes and picks by which a model drafts for all texts of a round; and the plain
                       tokens that the target makes ahead, as drafts of its own (speculative.py)

A recording has a fixed shape: numbers of sequences and blocks are rounded up (`bucket_of`), and the surplus is padding.
It is made when a shape first occurs. All recordings share one memory pool, because they run one at a time. The γ drafts
need no host in between: their room in the cache is reserved at once, and `following` computes on the device the next
step's positions, slots and text lengths. The picks are those of drafters.write_drafts.

Invariant: results are those of the model called directly. The next round of a shape overwrites this round's drafts.
Not covered: graphs for prompts, and for texts with very different numbers of new tokens.

    B sequences of a bucket · k the largest γ of a round · V vocabulary · T tokens of a step
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor

from kernels import Places, Span, Step
from sampling import SETTINGS

MOST = 17  # the most tokens of a text in a recorded step: 16 drafts and 1
Run = Callable[[], object]


@cache
def memory(device: int) -> Any:
    """The memory pool of all recordings, held for good: its id would die with the last recording that uses it."""
    return torch.cuda.MemPool()


def record(run: Run) -> Run:
    """Record the launches of `run` -> a function that replays them."""
    graph, pool = torch.cuda.CUDAGraph(), memory(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool.id, capture_error_mode="thread_local"):
        run()
    return graph.replay


class Recorded:
    """Runs and records `run`, later replays it. `run` reads and fills only tensors that keep their addresses."""

    def __init__(self, run: Run):
        self.run, self.replay = run, None

    def __call__(self) -> None:
        if self.replay:
            self.replay()
        else:
            self.run()
            self.replay = record(self.run)


class Bucket(NamedTuple):
    sequences: int
    each: int  # new tokens of a sequence
    blocks: int  # of a sequence

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.sequences * self.each, self.sequences, self.blocks


def rounded(n: int) -> int:
    """n rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: at most a third of the rows are padding."""
    power = 1 << max(0, n - 1).bit_length()
    return power * 3 // 4 if power > 2 and n <= power * 3 // 4 else power


def bucket_of(step: Step, sequences: int, each: int) -> Bucket:
    """The shape of the recording for this step, rounded up so that many steps share it."""
    return Bucket(
        rounded(sequences), each, rounded(max(len(blocks) for blocks, _, _ in step.spans))
    )


def place_for(step: Step, bucket: Bucket) -> Step:
    """An empty step over the same cache, for `refill`. It refers to the cache weakly: the cache owns the recordings."""
    made = Step((), step.block_size, proxy(step.cache), step.device, bucket.shape)
    made.counts = [bucket.each] * bucket.sequences
    made.longest = bucket.blocks * step.block_size
    return made


def refill(step: Step, bucket: Bucket, spans: Sequence[Span]) -> None:
    """Put other texts into the step's tensors. ValueError, before any change, if they do not fit the bucket."""
    shape = (
        len(spans),
        max(stop - start for _, start, stop in spans),
        max(len(blocks) for blocks, _, _ in spans),
    )
    if any(size > most for size, most in zip(shape, bucket)):
        raise ValueError(f"texts of {Bucket(*shape)} do not fit {bucket}: take a larger bucket")
    step.fill(spans)


def following(step: Step, stop: Tensor) -> Step:
    """The step of each sequence's next token, computed on the device. stop: int32[B], the lengths at which to stop."""
    made, B, S = copy(step), len(stop), step.block_size
    _, _, _, lengths, tables = step.places
    place = torch.minimum(lengths, stop - 1).clamp(min=0)
    slots = torch.where(
        lengths < stop, tables.gather(1, (place // S)[:, None].long())[:, 0] * S + place % S, -1
    )
    starts = torch.arange(B + 1, dtype=torch.int32, device=step.device)
    made.places = Places(lengths.long(), slots, starts, torch.minimum(lengths + 1, stop), tables)
    made.counts = [1] * B
    vars(made).pop("launches", None)
    return made


class Passes:
    """Recordings of one model's passes over one cache."""

    def __init__(self) -> None:
        self.passes: dict[Bucket, tuple[Tensor, Step, Recorded]] = {}
        self.logits: dict[int, Tensor] = {}  # [T, V] for each T

    def __call__(
        self,
        plain: Callable[..., Tensor],
        llama: Any,
        tokens: Tensor,
        step: Step,
        rows: Tensor | slice | None,
    ) -> Tensor:
        """tokens: int64[T] -> logits [R, V] of the tokens at `rows`. Recorded where rows is None, in short steps."""
        each = max(step.counts)
        if rows is not None or each > MOST or each * len(step.spans) > 2 * len(tokens):
            return plain(tokens, step, rows)
        bucket = bucket_of(step, len(step.spans), each)
        T, V, device = bucket.shape[0], llama.config.vocab_size, llama.device
        if T not in self.logits:
            self.logits[T] = torch.empty(T, V, dtype=llama.dtype, device=device)
        logits = self.logits[T]
        if bucket not in self.passes:
            held, places = torch.zeros(T, dtype=torch.int64, device=device), place_for(step, bucket)
            self.passes[bucket] = (
                held,
                places,
                Recorded(lambda: logits.copy_(plain(held, places, None))),
            )
        held, places, run = self.passes[bucket]
        held[: len(tokens)] = tokens
        refill(places, bucket, step.spans)
        run()
        return logits[: len(tokens)].clone()


class Inputs(NamedTuple):
    """The inputs of a round's drafts, except the step's places: views of one buffer."""

    tokens: Tensor  # int64[2 B]: unread tokens, end to end
    gammas: Tensor  # int64[B]
    stops: Tensor  # int64[B]: text lengths up to which room is reserved
    coins: Tensor  # int64[B · (k + 1), 3]: seeds, positions, roles
    settings: Tensor  # float64[4, B]

    @classmethod
    def empty(
        cls, B: int, k: int, device: torch.device | str, pinned: bool = False
    ) -> tuple[Tensor, "Inputs"]:
        """The buffer, int64, and its views. B texts, up to k drafts each."""
        sizes = 2 * B, B, B, 3 * B * (k + 1), len(SETTINGS) * B
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        tokens, gammas, stops, coins, settings = buffer.split(sizes)
        return buffer, cls(
            tokens, gammas, stops, coins.view(-1, 3), settings.view(torch.float64).view(-1, B)
        )


class Drafts:
    """Recordings of one model's drafts over one cache, a round each."""

    def __init__(self) -> None:
        self.rounds: dict[Any, tuple[Tensor, Step, tuple[Tensor, Tensor], Recorded]] = {}
        self.drafted: dict[Any, tuple[Tensor, Tensor]] = {}  # for each B, k, V and dtype

    def __call__(
        self,
        model: Callable[..., Tensor],
        cache: Any,
        seqs: Sequence[int],
        unread: Sequence[Sequence[int]],
        round: Any,
        publish: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """As drafters.write_drafts, with at most two unread tokens of each text. model: an unrecorded pass."""
        live, n, k = (
            [b for b, gamma in enumerate(round.gammas) if gamma],
            len(round.gammas),
            max(round.gammas),
        )
        step = cache.extend(
            [(seqs[b], [*unread[b], *[-1] * (round.gammas[b] - 1)]) for b in live], publish
        )
        uses = tuple(any(value is not None for value in round.settings(name)) for name in SETTINGS)
        bucket = bucket_of(step, n, 2)
        key = bucket, k, uses, round.coupled, round.coin, round.vocab, round.dtype
        if key not in self.rounds:
            self.rounds[key] = self._prepare(
                model, place_for(step, bucket), bucket.sequences, round, k, uses
            )
        held, first, (drafted, q), run = self.rounds[key]
        spans = [((), 0, 0)] * n
        for b, (blocks, start, _) in zip(live, step.spans):
            spans[b] = blocks, start, start + len(unread[b])
        refill(first, bucket, spans)
        held.copy_(
            filled(round, unread, [stop for _, _, stop in spans], bucket.sequences),
            non_blocking=True,
        )
        run()
        return drafted[:n], q[:n]

    def _prepare(
        self,
        model: Callable[..., Tensor],
        first: Step,
        B: int,
        round: Any,
        k: int,
        uses: Sequence[bool],
    ) -> tuple[Tensor, Step, tuple[Tensor, Tensor], Recorded]:
        V, device, coin, own, ops = round.vocab, round.device, round.coin, round.own, round.ops
        held, inputs = Inputs.empty(B, k, device)
        if (shape := (B, k, V, round.dtype)) not in self.drafted:
            self.drafted[shape] = (
                torch.empty(B, k, dtype=torch.int64, device=device),
                torch.empty(B, k, V, dtype=round.dtype, device=device),
            )
        drafted, q = self.drafted[shape]

        def run() -> None:
            step, tokens = first, inputs.tokens
            rows = first.places.starts[1:].long() - 1  # each text's last unread token
            coins = coin(*inputs.coins.unbind(1))
            columns = [row if used else None for row, used in zip(inputs.settings, uses)]
            for j in range(k):
                probs = ops.probabilities(model(tokens, step, rows)[:, :V], *columns)  # [B, V]
                rows, wanted = None, inputs.gammas > j
                drafted[:, j] = torch.where(wanted, coins[own + j :: k + 1].pick(probs), -1)
                q[:, j] = torch.where(wanted[:, None], probs, 0)
                step, tokens = (
                    following(step, inputs.stops.int()),
                    drafted[:, j].clamp(min=0),
                )  # −1: no draft

        return held, first, (drafted, q), Recorded(run)


def filled(round: Any, unread: Sequence[Sequence[int]], lengths: Sequence[int], B: int) -> Tensor:
    """The `Inputs` of a round as one buffer on the host. lengths: of the texts, unread tokens included."""
    k, n = max(round.gammas), len(lengths)
    host, inputs = Inputs.empty(B, k, "cpu", round.device.type == "cuda")
    tokens = [token for gamma, new in zip(round.gammas, unread) if gamma for token in new]
    inputs.tokens[: len(tokens)] = torch.tensor(tokens)
    inputs.gammas[:n] = torch.tensor(round.gammas)
    inputs.stops[:n] = torch.tensor(
        [length + max(0, gamma - 1) for length, gamma in zip(lengths, round.gammas)]
    )
    inputs.coins[: len(round.places)] = torch.tensor(round.places)
    for row, (name, neutral) in zip(inputs.settings, SETTINGS.items()):
        values = [neutral if value is None else value for value in round.settings(name)]
        row[:n] = torch.tensor(values, dtype=torch.float64)
    return host
