"""CUDA graphs: everything that a step launches, in one launch.

A decoding step of a small model is hundreds of kernels, each over so few numbers that Python needs longer to launch
one than the GPU to run it. A CUDA graph is a recording: the launches of one step, with their arguments as they were,
which the GPU then goes through by itself. So whatever changes from step to step must be in tensors that stay where they
are, filled anew before each replay, and nothing that is recorded may ask the device for a number.

    Recorded(run)      at first `run` itself, which compiles what it needs; from then on its recording
    Replayed(llama)    is called as the model is: a pass over a few tokens of each text is a recording
    Drafts()           is called as `write_drafts` is: all γ tokens that a model drafts for all texts of a round, picks included, are one recording

A recording is for a shape: sequences and blocks are rounded up (`bucket`), and what a step has less of is left empty. They are made when
a shape is first met, and share their memory, for they run one after the other. Prompts are not recorded; neither is what follows the
target's pass, probabilities and verification: Python launches that while the device is busy with the pass.

The γ drafts need no host between them: their room is reserved at once, each token goes from the pick to the next step on the device, and
so do its position, its slot and the length of its text (`KernelStep.following`). Noise is counter-based, so the picks are those of
`write_drafts`, token for token.

Invariant: results are those of the model called directly. They are in tensors that the next call of this shape fills anew.

Not covered: graphs for prompts; one graph for drafts and verification together.

    B sequences of a bucket · k the largest γ of a round · V vocabulary · T tokens of a step
"""
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters import SETTINGS, Round, write_drafts
from kernelstep import Bucket, KernelStep
from sampling import probabilities

MOST = 17                                               # tokens of a text, in a step that is recorded: verification of 16 drafts
Run = Callable[[], object]


@cache
def memory() -> Any:
    """For what recordings need while they run."""
    return torch.cuda.graph_pool_handle()


def record(run: Run) -> Run:
    """What `run` launches, to be launched again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory(), capture_error_mode="thread_local"):
        run()
    return graph.replay


class Recorded:
    """`run`, which reads tensors, and fills tensors, that stay where they are."""

    def __init__(self, run: Run):
        self.run: Run = run
        self.replay: Run | None = None

    def __call__(self) -> None:
        if self.replay is None:
            self.run()
            self.replay = record(self.run)
        else:
            self.replay()


def rounded(n: int) -> int:
    """Up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: at most a third of what is computed is for nobody."""
    power = 1 << max(0, n - 1).bit_length()
    return power * 3 // 4 if power > 2 and n <= power * 3 // 4 else power


def bucket(step: KernelStep, sequences: int, each: int) -> Bucket:
    """A shape that this step fits in, and many others."""
    return Bucket(rounded(sequences), each, rounded(max(len(blocks) for blocks, _, _ in step.spans)))


class Replayed:
    """A Llama, and recordings of it."""

    def __init__(self, llama: Any):
        self.llama, self.device, self.dtype = llama, llama.device, llama.dtype
        self.passes: dict[Any, tuple[Tensor, KernelStep, Tensor, Recorded]] = {}
        self.logits: dict[int, Tensor] = {}             # [T, V] for each T

    def __call__(self, tokens: Tensor, step: Any, rows: Tensor | slice | None = None) -> Tensor:
        """tokens: int64[T] -> logits [R, V] of the tokens at `rows`. Where all are wanted, which are few, it is a recording: the next call fills
        these logits anew."""
        each = max(stop - start for _, start, stop in step.spans) if isinstance(step, KernelStep) else MOST + 1
        if rows is not None or each > MOST or each * len(step.spans) > 2 * len(tokens):
            return self.llama(tokens, step, rows)
        shape = bucket(step, len(step.spans), each)
        if (shape, step.where) not in self.passes:
            self.passes[shape, step.where] = self._prepare(step.of(shape))
        held, places, logits, run = self.passes[shape, step.where]
        held[:len(tokens)] = tokens
        places.refill(step.spans)
        run()
        return logits[:len(tokens)]

    def _prepare(self, step: KernelStep) -> tuple[Tensor, KernelStep, Tensor, Recorded]:
        T = step.bucket.sequences * step.bucket.each
        tokens = torch.zeros(T, dtype=torch.int64, device=self.device)
        if T not in self.logits:
            self.logits[T] = torch.empty(T, self.llama.config.vocab_size, dtype=self.dtype, device=self.device)
        logits = self.logits[T]
        return tokens, step, logits, Recorded(lambda: logits.copy_(self.llama(tokens, step)))


class Inputs(NamedTuple):
    """What the drafts of a round depend on, but for places in the cache: views of one buffer."""
    tokens: Tensor                                      # int64[2 B], end to end: what is unread
    gammas: Tensor                                      # int64[B]
    stops: Tensor                                       # int64[B], the length up to which there is room
    coins: Tensor                                       # int64[B · (k + 1), 3]: seeds, positions, roles
    settings: Tensor                                    # float64[4, B]

    @classmethod
    def of(cls, buffer: Tensor, B: int, k: int) -> "Inputs":
        tokens, gammas, stops, coins, settings = buffer.split([2 * B, B, B, 3 * B * (k + 1), 4 * B])
        return cls(tokens, gammas, stops, coins.view(-1, 3), settings.view(torch.float64).view(4, B))

    @staticmethod
    def numbers(B: int, k: int) -> int:
        return 8 * B + 3 * B * (k + 1)


class Drafts:
    """What a model drafts in a round, recorded."""

    def __init__(self) -> None:
        self.rounds: dict[Any, tuple[Tensor, KernelStep, tuple[Tensor, Tensor], Recorded]] = {}
        self.drafted: dict[Any, tuple[Tensor, Tensor]] = {}                                 # for each B, k and V

    def __call__(self, llama: Any, extend: Callable[..., KernelStep], seqs: Sequence[int], unread: Sequence[Sequence[int]], round: Round) -> tuple[Tensor, Tensor]:
        """As `write_drafts`, whose work it is where a text has more than two unread tokens -> int64[B, k], float[B, k, V]."""
        live, n, k = [b for b, gamma in enumerate(round.gammas) if gamma], len(round.gammas), max(round.gammas)
        if any(len(unread[b]) > 2 for b in live):
            return write_drafts(llama, extend, seqs, unread, round)
        step = extend([(seqs[b], [*unread[b], *[-1] * (round.gammas[b] - 1)]) for b in live])              # −1: only the device will know
        uses = tuple(any(value is not None for value in round.settings(name)) for name in SETTINGS)
        shape = bucket(step, n, 2)
        key = shape, step.where, k, uses, round.coupled, round.coin, round.vocab, round.dtype
        if key not in self.rounds:
            self.rounds[key] = self._prepare(llama, step.of(shape), round, k, uses)
        held, first, (drafted, q), run = self.rounds[key]
        spans = [((), 0, 0)] * n
        for b, (blocks, start, _) in zip(live, step.spans):
            spans[b] = blocks, start, start + len(unread[b])
        first.refill(spans)
        held.copy_(filled(round, unread, [stop for _, _, stop in spans], shape.sequences), non_blocking=True)
        run()
        return drafted[:n], q[:n]

    def _prepare(self, llama: Any, first: KernelStep, round: Round, k: int, uses: Sequence[bool]) -> tuple[Tensor, KernelStep, tuple[Tensor, Tensor], Recorded]:
        B, V, device, coin, own = first.bucket.sequences, round.vocab, round.device, round.coin, round.own
        held = torch.zeros(Inputs.numbers(B, k), dtype=torch.int64, device=device)
        if (B, k, V, round.dtype) not in self.drafted:
            self.drafted[B, k, V, round.dtype] = (torch.empty(B, k, dtype=torch.int64, device=device), torch.empty(B, k, V, dtype=round.dtype, device=device))
        inputs, (drafted, q) = Inputs.of(held, B, k), self.drafted[B, k, V, round.dtype]

        def run() -> None:
            step, tokens, rows = first, inputs.tokens, first.places.query_start[1:].long() - 1              # each text's last unread token
            coins, columns = coin(*inputs.coins.unbind(1)), [row if used else None for row, used in zip(inputs.settings, uses)]
            for j in range(k):
                probs = probabilities(llama(tokens, step, rows)[:, :V], *columns)                           # [B, V]
                tokens, rows, wanted = coins[own + j::k + 1].pick(probs), None, inputs.gammas > j
                drafted[:, j], q[:, j] = torch.where(wanted, tokens, -1), torch.where(wanted[:, None], probs, 0)
                step = step.following(inputs.stops.int())

        return held, first, (drafted, q), Recorded(run)


def filled(round: Round, unread: Sequence[Sequence[int]], lengths: Sequence[int], B: int) -> Tensor:
    """The inputs, on the host. lengths: of each text with what is unread."""
    k, n = max(round.gammas), len(lengths)
    host = torch.zeros(Inputs.numbers(B, k), dtype=torch.int64, pin_memory=round.device.type == "cuda")
    inputs, tokens = Inputs.of(host, B, k), [token for gamma, new in zip(round.gammas, unread) if gamma for token in new]
    inputs.tokens[:len(tokens)] = torch.tensor(tokens)
    inputs.gammas[:n] = torch.tensor(round.gammas)
    inputs.stops[:n] = torch.tensor([length + max(0, gamma - 1) for length, gamma in zip(lengths, round.gammas)])
    inputs.coins[:len(round.places)] = torch.tensor(round.places)
    for row, (name, neutral) in zip(inputs.settings, SETTINGS.items()):
        row[:n] = torch.tensor([neutral if value is None else value for value in round.settings(name)], dtype=torch.float64)
    return host


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: how few shapes there are, and on a GPU what a recording saves.

@torch.inference_mode()
def main() -> None:
    import time

    from engine import paged
    from model import Llama
    shapes = {Bucket(rounded(texts), 1, rounded(blocks)) for texts in range(1, 65) for blocks in range(1, 257)}
    print(f"1 to 64 texts of up to 4,096 tokens, in blocks of 16, decode in {len(shapes)} shapes, not {64 * 256:,}")
    if not torch.cuda.is_available():
        return print("what a recording saves can only be measured on a GPU, and PyTorch finds none here")
    llama = Llama.load("tiny", "cuda", torch.bfloat16)
    cache, tokens = paged(llama, 100, 1024), torch.tensor([1], device="cuda")
    seq, _ = cache.open(())
    for name, run in (("launched one by one", llama), ("recorded", Replayed(llama))):
        for i in range(220):
            if i == 20:
                torch.cuda.synchronize()
                start = time.perf_counter()
            run(tokens, cache.extend([(seq, [1])]))
        torch.cuda.synchronize()
        print(f"a pass of tiny over one token, {name}: {(time.perf_counter() - start) / 200 * 1e6:.0f} microseconds")


if __name__ == "__main__":
    main()
