"""CUDA graphs: a tape records what is launched on a CPU, with its numbers, as a graph does on a GPU."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is for Linux")

from triton.runtime.interpreter import InterpretedFunction

from checkpoint.config import Config
from conftest import SMALL
from drafters import ModelDrafter, SelfDrafter, write_drafts
from gpu import GPU, graphs
from gpu.graphs import rounded
from kernels import Ops, ops_for
from kvcache import KVCache
from model import Llama
from paged import PagedCache
from proof import Branch, Toy, Walk, WalkingCoin, distance, enumerate_law, own_law
from request import Request, Round, Settings
from sampling import Keyed
from speculative import Decoder

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Kernels(GPU):
    """Triton's attention and sampling. In the interpreter everything between two products is left to plain torch, which
    takes a fraction of the time; test_fused.py has all of them together."""

    if DEVICE.type == "cpu":
        add_norm, swiglu, linear = Ops.add_norm, Ops.swiglu, Ops.linear


OPS = torch.ops.aten
WAITS = (
    OPS._local_scalar_dense,
    OPS.nonzero,
    OPS.masked_select,
    OPS.equal,  # ask the device,
    OPS.lift_fresh,
)  # or bring numbers from the host
TINY = dict(
    vocab_size=67,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)


def refuse(what: object) -> None:
    raise RuntimeError(f"{what} cannot be recorded")


class Tape(TorchDispatchMode):
    """Every operation, to be done again on the tensors that it was done on; its results go to where they were then."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [
            x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype == torch.bool
        ]
        if func.overloadpacket in WAITS or masks and "index" in func.name():
            refuse(func)
        made = func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **(kwargs or {})))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.done.append(again)
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: to say so to torch._dynamo would import it, which takes seconds."""
        return False

    def launch(self, kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            LAUNCH(kernel, *args, **kwargs)
        self.done.append(lambda: LAUNCH(kernel, *args, **kwargs))


LAUNCH = InterpretedFunction.run


def record(run: Callable[[], object]) -> Callable[[], None]:
    tape = Tape()
    with (
        mock.patch.object(
            InterpretedFunction, "run", lambda *args, **more: tape.launch(*args, **more)
        ),
        mock.patch.object(Tensor, "tolist", lambda x: refuse("tolist")),
        tape,
    ):
        run()
    return lambda: [again() for again in tape.done] and None


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """On a CPU passes are recorded by a tape. -> a list that grows with each recording."""
    made: list[Any] = []
    original = graphs.record if DEVICE.type == "cuda" else record
    with mock.patch.object(graphs, "record", lambda run: made.append(original(run)) or made[-1]):
        yield made


@contextmanager
def asked() -> Iterator[list[None]]:
    """-> a list that grows whenever numbers are brought to the host."""
    times: list[None] = []
    tolist, item = Tensor.tolist, Tensor.item
    with (
        mock.patch.object(Tensor, "tolist", lambda x: times.append(None) or tolist(x)),
        mock.patch.object(Tensor, "item", lambda x: times.append(None) or item(x)),
    ):
        yield times


def loud(seed: int, ops: Ops, **config: Any) -> Llama:
    llama = Llama(Config(**{**SMALL, **TINY, **config}), DEVICE, seed=seed, ops=ops)
    for name, place in llama.places().items():
        place.mul_(1 if "norm" in name else 12)
    return llama.prepare()


def cache_of(llama: Llama, layout: str) -> Any:
    return KVCache.of(llama, 40, 3) if layout == "rows" else PagedCache.of(llama, 30, 6, 40)


def test_shapes_are_few_and_hold_what_they_are_for():
    assert [rounded(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert all(n <= rounded(n) <= max(n, n * 3 / 2) for n in range(1, 3000))
    assert len({rounded(n) for n in range(1, 1025)}) == 20


@torch.inference_mode()
def test_a_recorded_pass_is_the_models():
    llama, plain = loud(1, Kernels()), loud(1, Ops())
    generator = torch.Generator().manual_seed(0)
    with recorded() as made:
        cache, other = cache_of(llama, "blocks"), cache_of(plain, "blocks")
        seqs = [(cache.open(())[0], other.open(())[0]) for _ in range(3)]
        for counts in ((6, 1, 1), (1, 1), (1, 1), (2, 2), (1, 2), (1,)):
            new = [torch.randint(67, (n,), generator=generator).tolist() for n in counts]
            tokens = torch.tensor(sum(new, []), device=DEVICE)
            ours, theirs = (
                kept.extend([(pair[which], piece) for pair, piece in zip(seqs, new)])
                for which, kept in enumerate((cache, other))
            )
            torch.testing.assert_close(
                llama(tokens, ours), plain(tokens, theirs), atol=1e-4, rtol=1e-4
            )
        assert len(made) == 3  # 1, 1 in 2 blocks; 2, 2 and what fits in it, in 3; 1 alone
        step = cache.extend([(mine, [1]) for mine, _ in seqs[:2]])
        rows = llama(torch.tensor([1] * 2, device=DEVICE), step, rows=slice(-1, None))
        assert len(rows) == 1 and len(made) == 3


@torch.inference_mode()
def test_each_model_and_each_cache_has_its_own_recordings_and_logits_stay():
    ops, token = Kernels(), torch.tensor([5], device=DEVICE)
    models = [
        (loud(seed, ops, num_hidden_layers=3 - seed), loud(seed, Ops(), num_hidden_layers=3 - seed))
        for seed in (1, 2)
    ]
    with recorded() as made:
        found, expected = [], []
        for cache in (cache_of(models[0][0], "rows"), cache_of(models[0][0], "rows")):
            for llama, plain in models:
                seq, _ = cache.open(())
                found += [llama(token, cache.extend([(seq, [5])])) for _ in range(2)]
                expected += plain(torch.tensor([5, 5], device=DEVICE)).split(1)
        assert len(made) == 4
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_recorded_drafts_are_those_that_are_written_one_by_one():
    own, reference, generator = Kernels(), Ops(), torch.Generator().manual_seed(1)
    models = {ops: loud(2, ops) for ops in (own, reference)}
    coins = {ops: partial(Keyed, picks=ops.pick) for ops in models}
    plain = [Settings(1.0, seed=3), Settings(0.0, seed=4)]
    filters = [plain[0], Settings(0.7, min_p=0.1, seed=4)]
    with recorded() as made:
        caches = {ops: cache_of(llama, "blocks") for ops, llama in models.items()}
        texts = [torch.randint(67, (n,), generator=generator).tolist() for n in (5, 6)]
        seqs = {ops: [cache.open(())[0] for _ in texts] for ops, cache in caches.items()}
        for ops, llama in models.items():
            step = caches[ops].extend(list(zip(seqs[ops], texts)))
            llama(torch.tensor(sum(texts, []), device=DEVICE), step, rows=slice(1))
        for gammas, unread in (
            ((3, 3), (1, 2)),
            ((3, 1), (2, 1)),
            ((0, 3), (1, 1)),
            ((3, 0), (1, 1)),
        ):
            new = [torch.randint(67, (n,), generator=generator).tolist() for n in unread]
            settings = plain if gammas == (3, 3) else filters
            requests = [Request([*text, *piece], s) for text, piece, s in zip(texts, new, settings)]
            before, found = [caches[own].length(seq) for seq in seqs[own]], []
            for ops, llama in models.items():
                round = Round(requests, gammas, 67, DEVICE, coin=coins[ops], ops=ops)
                found.append(ops.draft(write_drafts, llama, caches[ops], seqs[ops], new, round))
            (drafted, q), (expected, p) = found
            assert torch.equal(drafted, expected)
            torch.testing.assert_close(q, p, atol=1e-4, rtol=1e-3)
            lengths = [[cache.length(seq) for seq in seqs[ops]] for ops, cache in caches.items()]
            assert lengths[0] == lengths[1]
            for i, (length, gamma, piece, text) in enumerate(zip(before, gammas, new, texts)):
                for ops, cache in caches.items():  # the drafts are rejected
                    cache.truncate(seqs[ops][i], length + len(piece) if gamma else length)
                text += piece if gamma else []
        assert len(made) == 2  # without a filter, and with it


@pytest.mark.parametrize("gammas", [(3, 0, 3), (0, 3, 3)])
@torch.inference_mode()
def test_beside_texts_that_draft_fewer_and_padding(gammas):
    """Without a filter: what is drafted for nobody is no token, and is not read."""
    found = []
    with recorded():
        for ops in (Kernels(), Ops()):
            llama = loud(2, ops)
            cache = PagedCache.of(llama, 60, 4, 40)
            seqs = [cache.open(())[0] for _ in gammas]
            for n, seq in enumerate(seqs, 4):
                llama(
                    torch.arange(n, device=DEVICE), cache.extend([(seq, range(n))]), rows=slice(1)
                )
            requests = [
                Request([*range(n), 9], Settings(1.0, seed=n)) for n, _ in enumerate(seqs, 4)
            ]
            round = Round(
                requests, gammas, 67, DEVICE, coin=partial(Keyed, picks=ops.pick), ops=ops
            )
            found += ops.draft(write_drafts, llama, cache, seqs, [[9]] * len(gammas), round)
    drafted, q, expected, p = found
    assert torch.equal(drafted, expected)
    torch.testing.assert_close(q, p, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "bad, coupled, prompt, ops",
    [
        ("target", False, 2, Ops()),
        ("target", False, 2, Kernels()),
        ("target", True, 2, Kernels()),
        ("draft", False, 2, Kernels()),
        ("draft", False, 5, Kernels()),
        ("both", True, 2, Kernels()),
    ],
)
def test_logits_that_are_not_finite_are_an_error_and_cost_no_wait(bad, coupled, prompt, ops):
    """The target's, the draft's that are recorded, and those that are not: where it has much to read."""
    target, draft = loud(1, ops), loud(2, ops)
    for llama, name in ((target, "target"), (draft, "draft")):
        if bad in (name, "both"):
            llama.norm.fill_(torch.nan)
    with recorded():
        decoder = Decoder(
            target,
            cache_of(target, "blocks"),
            67,
            ModelDrafter(draft, cache_of(draft, "rows")),
            coupled,
        )
        requests = [
            Request(range(prompt), Settings(t, seed=0, gamma=gamma))
            for t, gamma in ((1.0, 2), (0.0, 0))
        ]
        for request in requests:
            decoder.open(request)
        with asked() as times, pytest.raises(ValueError, match="logits are not finite"):
            decoder.step([decoder.plan(request) for request in requests])
        assert len(times) == 1 or type(ops) is Ops or prompt > 2
        assert [decoder.cache.length(request.seq) for request in requests] == [0, 0]


@pytest.mark.parametrize(
    "layout, draft, coupled", [("rows", "self", False), ("blocks", "model", True)]
)
def test_texts_made_of_recordings_are_those_without(layout, draft, coupled):
    """Greedy, coupled and by rejection: the same texts, token for token, with prefixes shared and settled."""

    def texts(ops: Ops) -> list[list[int]]:
        target, other = loud(5, ops), loud(6, ops)
        cache, draft_cache = cache_of(target, layout), cache_of(other, layout)
        drafter = (
            ModelDrafter(other, draft_cache) if draft == "model" else SelfDrafter(other, cache)
        )
        decoder = Decoder(target, cache, 67, drafter, coupled=coupled, budget=40)
        requests = [
            Request([1 + i] * 5 + [i], Settings(t, seed=i, max_tokens=30, gamma=2))
            for i, t in ((1, 0.0), (2, 1.0))
        ]
        for request in requests:
            decoder.open(request)
        for _ in range(4):
            with asked() as times:
                decoder.step(work := [decoder.plan(request) for request in requests])
            assert len(times) == 1 or type(ops) is Ops or any(w.num_tokens > 2 for w in work)
        if layout == "blocks":
            for request in requests:
                assert cache._texts[request.seq].tokens == request.tokens[:-1]
            decoder.close(requests[0])
            assert cache.open(requests[0].tokens)[1] == (len(requests[0].tokens) - 1) // 6 * 6
        return [request.tokens for request in requests]

    expected = texts(Ops())
    with recorded() as made:
        assert texts(Kernels()) == expected and made


class Padded(GPU):
    """Padding, which is of no text, is read as some text; the distributions are those of the reference."""

    probabilities = Ops.probabilities

    def look_back(self, q: Tensor, k: Tensor, v: Tensor, step: Any, layer: int) -> Tensor:
        most = (Table.texts - 1) / (step.places.positions + 1.0)
        return super().look_back(q, k, v, step, layer).nan_to_num().minimum(most[:, None, None])


class Table(Toy):
    """A toy whose passes go through `Ops.forward`."""

    config, ops, texts = Config(**{**SMALL, "vocab_size": 2}), Padded(), 3**5

    def __call__(self, tokens: Tensor, step: Any, rows: Any = None) -> Tensor:
        return self.ops.forward(self._forward, self, tokens, step, rows)

    def _forward(self, tokens: Tensor, step: Any, rows: Any = None) -> Tensor:
        return super().__call__(tokens, step, rows)


class Only(Walk):
    """Decides for rows of a text: four tokens in the end, rounds of two drafts at most, fewer at the end."""

    def __call__(self, seeds: Tensor, positions: Tensor, roles: Tensor) -> WalkingCoin:
        rows = zip(seeds.tolist(), positions.tolist(), roles.tolist())
        return WalkingCoin(
            [
                self.branches[seed]
                if length and (role - 1) // 2 < min(2, 3 - length)
                else Branch(())
                for seed, length, role in rows
            ]
        )


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the walking coin is on the host: nothing can be recorded"
)
def test_the_law_of_the_recorded_path_is_the_targets_own():
    """By enumeration, with the steps, the room and the drafts of the recorded path, done again instead of recorded."""
    target, draft = Table(2, 5, seed=1), Table(2, 5, seed=2)
    recordings: list[Any] = []

    def run(walk: Walk, n: int) -> list[Any]:
        cache, draft_cache = (KVCache(1, 1, 1, 5, n, ops=target.ops) for _ in range(2))
        decoder = Decoder(target, cache, 2, ModelDrafter(draft, draft_cache), coin=walk)
        requests = [Request([1], Settings(seed=row, max_tokens=3, gamma=2)) for row in range(n)]
        for request in requests:
            decoder.open(request)
        while work := [decoder.plan(request) for request in requests if not request.finish_reason]:
            decoder.step(work)
        return [tuple(request.tokens[1:]) for request in requests]

    with (
        mock.patch.object(graphs, "record", lambda run: recordings.append(run) or run),
        mock.patch("proof.Walk", Only),
    ):
        law = enumerate_law(run)
    assert (
        recordings
        and distance(law, own_law(target, (1,), 3, (), lambda logits: logits.softmax(-1))) < 1e-6
    )


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """PyTorch 2.11's: a pool is gone when its MemPool and its graphs are, and nothing can be captured into it then."""
    books, ids = SimpleNamespace(users=Counter(), device=0), count(1)

    class Pool:
        def __init__(self) -> None:
            self.id, self.device = (0, next(ids)), books.device
            books.users[self.id] += 1
            weakref.finalize(self, books.users.subtract, [self.id])

    class Graph:
        replay = print

    @contextmanager
    def capture(graph: Graph, pool: tuple[int, int], **how: Any) -> Iterator[None]:
        assert pool not in books.users or books.users[pool] > 0, (
            "use_count > 0 INTERNAL ASSERT FAILED"
        )
        books.users[pool] += 1
        weakref.finalize(graph, books.users.subtract, [pool])
        yield

    for name, value in dict(
        MemPool=Pool,
        CUDAGraph=Graph,
        graph=capture,
        graph_pool_handle=lambda: (0, next(ids)),
        current_device=lambda: books.device,
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs.memory.cache_clear()
    yield books
    graphs.memory.cache_clear()


def test_recordings_share_a_pool_that_outlives_them(allocator):
    """One for a device."""
    for device in (0, 0, 1):
        allocator.device = device
        runs = [graphs.record(lambda: None) for _ in range(2)]
        del runs
        gc.collect()
    assert sorted(allocator.users.values()) == [1, 1]


def test_a_models_device_is_the_current_one(monkeypatch):
    """Triton launches there, and graphs are captured there."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "cuda", "cpu", torch.device("cuda", 0)):
        ops_for(device)
    assert chosen == [1, 0]


@torch.inference_mode()
def test_what_nobody_uses_is_gone_at_once():
    """With its recordings, drafts and caches, and no garbage collector."""
    llama, draft = loud(1, Kernels()), loud(2, Kernels())
    with recorded() as made:
        caches = [cache_of(llama, "blocks"), cache_of(draft, "rows")]
        decoder = Decoder(llama, caches[0], 67, ModelDrafter(draft, caches[1]))
        decoder.open(request := Request([1, 2], Settings(0.0, seed=0, max_tokens=9, gamma=2)))
        for _ in range(3):
            decoder.step([decoder.plan(request)])
        count, kept = len(made), [weakref.ref(cache.keys.parts[0]) for cache in caches]
        made.clear()
    gc.disable()
    try:
        del decoder, caches
        assert count == 2 and [part() for part in kept] == [None, None]
    finally:
        gc.enable()


def test_filters_can_be_recorded():
    """With other logits and other settings each time."""
    k, p = (torch.zeros(1, dtype=torch.float64, device=DEVICE) for _ in range(2))
    ops, logits = Kernels(), torch.zeros(1, 9, device=DEVICE)
    held = torch.zeros_like(logits)
    with recorded() as made:
        run = graphs.Recorded(lambda: held.copy_(ops.probabilities(logits, None, k, p)))
        for seed, top_k, top_p in ((0, 3, 1), (1, 0, 0.5)):
            logits.copy_(torch.randn(1, 9, generator=torch.Generator().manual_seed(seed)))
            k.fill_(top_k), p.fill_(top_p)
            run()
            torch.testing.assert_close(held, Ops().probabilities(logits, top_k=top_k, top_p=top_p))
        assert len(made) == 1


def test_a_tape_refuses_what_waits():
    for waits in (
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
        lambda x: bool(x.any()),
    ):
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            record(lambda: waits(torch.ones(3)))
