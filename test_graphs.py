"""CUDA graphs: a tape records what is launched on a CPU, with the numbers it was launched with, as a graph does on a GPU."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

import graphs
from config import Config
from conftest import SMALL
from drafters import ModelDrafter, Round, SelfDrafter, write_drafts
from graphs import Drafts, Replayed, rounded
from kvcache import KVCache
from model import Llama
from paged import PagedCache
from proof import Branch, Toy, Walk, WalkingCoin, distance, enumerate_law, own_law
from request import Request, Settings
from sampling import probabilities
from speculative import Decoder
from test_flash import in_triton

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
OPS = torch.ops.aten
WAITS = (OPS._local_scalar_dense, OPS.nonzero, OPS.masked_select, OPS.lift_fresh, OPS.equal)   # ask the device, or bring numbers from the host
TINY = dict(vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)


def refuse(what: object) -> None:
    raise RuntimeError(f"{what} cannot be recorded")


class Tape(TorchDispatchMode):
    """Every operation, to be done again on the tensors that it was done on; its results go to where they were then."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITS or any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:2]) if "index" in func.name()):
            refuse(func)
        made = func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **(kwargs or {})))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.done.append(again)
        return made

    def launch(self, kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            LAUNCH(kernel, *args, **kwargs)
        self.done.append(lambda: LAUNCH(kernel, *args, **kwargs))


LAUNCH = InterpretedFunction.run


def record(run: Callable[[], object]) -> Callable[[], None]:
    tape = Tape()
    launch = mock.patch.object(InterpretedFunction, "run", lambda kernel, *args, **kwargs: tape.launch(kernel, *args, **kwargs))
    with launch, mock.patch.object(Tensor, "tolist", lambda x: refuse("tolist")), tape:
        run()
    return lambda: [again() for again in tape.done] and None


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """On a CPU as on a GPU: the caches' steps are Triton's, and are recorded. -> a list that grows with each recording."""
    made: list[Any] = []
    if DEVICE.type == "cuda":
        original = graphs.record
        with mock.patch.object(graphs, "record", lambda run: made.append(original(run)) or made[-1]):
            yield made
        return
    with in_triton(), mock.patch.object(graphs, "record", lambda run: made.append(record(run)) or made[-1]), mock.patch("sampling.on_gpu", lambda _: True):
        yield made


@contextmanager
def asked() -> Iterator[list[None]]:
    """-> a list that grows whenever numbers are brought to the host."""
    times: list[None] = []
    tolist, item = Tensor.tolist, Tensor.item
    with mock.patch.object(Tensor, "tolist", lambda x: times.append(None) or tolist(x)), mock.patch.object(Tensor, "item", lambda x: times.append(None) or item(x)):
        yield times


def loud(seed: int, **config: Any) -> Llama:
    llama = Llama(Config(**{**SMALL, **TINY, **config}), DEVICE, seed=seed)
    for name, place in llama.places().items():
        place.mul_(1 if "norm" in name else 12)
    return llama


def caches(llama: Llama, layout: str, texts: int = 3) -> Any:
    return llama.cache(40, texts) if layout == "rows" else PagedCache(llama.config.num_hidden_layers, 1, 8, 30, 4, 40, DEVICE, prefix_sharing=True)


def test_shapes_are_few_and_hold_what_they_are_for():
    assert [rounded(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert all(n <= rounded(n) <= max(n, n * 3 / 2) for n in range(1, 3000)) and len({rounded(n) for n in range(1, 1025)}) == 20


@torch.inference_mode()
def test_a_recorded_pass_is_the_models():
    llama, generator, layout = loud(1, num_hidden_layers=2), torch.Generator().manual_seed(0), "blocks"
    with recorded() as made:
        cache, other, replayed = caches(llama, layout), caches(llama, layout), Replayed(llama)
        seqs = [(cache.open(())[0], other.open(())[0]) for _ in range(3)]
        for counts in ((9, 1, 2), (1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 1, 2), (1, 1)):
            new = [torch.randint(67, (n,), generator=generator).tolist() for n in counts]
            tokens = torch.tensor(sum(new, []), device=DEVICE)
            steps = [kept.extend([(pair[which], piece) for pair, piece in zip(seqs, new)]) for which, kept in enumerate((cache, other))]
            torch.testing.assert_close(replayed(tokens, steps[0]), llama(tokens, steps[1]), atol=1e-4, rtol=1e-4)
        assert len(made) == 3                           # 1, 1, 1 in 3 blocks; 2, 2, 2 and what fits in it, in 4; 1, 1
        rows = replayed(torch.tensor([1] * 3, device=DEVICE), cache.extend([(mine, [1]) for mine, _ in seqs]), rows=slice(-1, None))
        assert len(rows) == 1 and len(made) == 3


@pytest.mark.parametrize("layout, coupled", [("rows", True), ("blocks", False)])
@torch.inference_mode()
def test_recorded_drafts_are_those_that_are_written_one_by_one(layout, coupled):
    llama, generator = loud(2), torch.Generator().manual_seed(1)
    plain = [Settings(1.0, seed=3), Settings(0.7, seed=4), Settings(0.0, seed=5)]
    filters = [plain[0], Settings(0.7, min_p=0.1, seed=4), plain[2]]
    with recorded() as made:
        cache, other = caches(llama, layout), caches(llama, layout)
        texts = [[torch.randint(67, (n,), generator=generator).tolist() for n in (5, 9, 1)] for _ in range(2)][0]
        pairs = [(cache.open(())[0], other.open(())[0]) for _ in texts]
        for kept, which in ((cache, 0), (other, 1)):
            llama(torch.tensor(sum(texts, []), device=DEVICE), kept.extend([(pair[which], text) for pair, text in zip(pairs, texts)]))
        write = Drafts()
        for gammas, unread in (((3, 3, 3), (1, 1, 2)), ((3, 2, 3), (2, 2, 1)), ((3, 0, 1), (1, 1, 1)), ((0, 3, 3), (1, 2, 2))):
            new = [torch.randint(67, (n,), generator=generator).tolist() for n in unread]
            requests = [Request([*text, *piece], s) for text, piece, s in zip(texts, new, plain if gammas == (3, 3, 3) else filters)]
            round = lambda: Round(requests, gammas, 67, DEVICE, coupled=coupled)           # noqa: E731
            before = [cache.length(mine) for mine, _ in pairs]
            drafted, q = write(llama, cache.extend, [mine for mine, _ in pairs], new, round())
            expected, p = write_drafts(llama, other.extend, [its for _, its in pairs], new, round())
            assert torch.equal(drafted, expected)
            torch.testing.assert_close(q, p, atol=1e-4, rtol=1e-3)
            assert [cache.length(mine) for mine, _ in pairs] == [other.length(its) for _, its in pairs]
            for (mine, its), length, gamma, piece, text in zip(pairs, before, gammas, new, texts):
                keep = length + len(piece) if gamma else length                             # what was drafted is rejected
                cache.truncate(mine, keep), other.truncate(its, keep)
                text += piece if gamma else []
        assert len(made) == (2 if layout == "rows" else 3)                                  # with a filter and without; in up to 4 blocks and in 6


@pytest.mark.parametrize("layout, draft", [("rows", "self"), ("blocks", "model")])
def test_texts_made_of_recordings_are_those_without(layout, draft):
    """Greedy, coupled and by rejection: the same texts, token for token, with prefixes shared and settled."""
    target, other = loud(5), loud(6)

    def texts(coupled: bool) -> list[list[int]]:
        caches_ = [caches(llama, layout) for llama in (target, other)]
        drafter = ModelDrafter(other, caches_[1]) if draft == "model" else SelfDrafter(other, caches_[0])
        model = Replayed(target) if caches_[0].in_place else target
        maker = Decoder(model, caches_[0], 67, drafter, coupled=coupled, budget=40)
        requests = [Request([1 + i] * 5 + [i], Settings(t, seed=i, max_tokens=8, gamma=2)) for i, t in ((1, 0.0), (2, 1.0))]
        for request in requests:
            maker.open(request)
        while work := [w for request in requests if not request.finish_reason and (w := maker.plan(request))]:
            with asked() as times:
                maker.step(work)
            assert len(times) == 1 or not caches_[0].in_place or any(w.read > 2 for w in work)
        if layout == "blocks":
            for request in requests:
                assert caches_[0]._texts[request.seq].tokens == request.tokens[:-1]
            maker.close(requests[0])
            assert caches_[0].open(requests[0].tokens)[1] == 12                             # of 14
        return [request.tokens for request in requests]

    for coupled in (False, True) if draft == "model" else (True,):
        if DEVICE.type == "cpu":
            expected = texts(coupled)
        else:
            with mock.patch("kvcache.in_place", lambda *_: False), mock.patch("paged.in_place", lambda *_: False):
                expected = texts(coupled)
        with recorded() as made:
            assert texts(coupled) == expected and made


class Table(Toy):
    """A toy to whom padding, which is of no text, is some text."""
    config = Config(**{**SMALL, "vocab_size": 2})

    def __call__(self, tokens: Tensor, step: Any, rows: Any = None) -> Tensor:
        most = (len(self.table) - 1) / (step.positions + 1.0)
        attend = lambda *args: step.attend(*args).nan_to_num().minimum(most[:, None, None])          # noqa: E731
        return super().__call__(tokens, SimpleNamespace(positions=step.positions, attend=attend), rows)


class Only(Walk):
    """Decides for rows that are somebody's: texts of four tokens in the end, rounds of two drafts at most, fewer at the end."""

    def __call__(self, seeds: Tensor, positions: Tensor, roles: Tensor) -> WalkingCoin:
        drafts = [(role - 1) // 2 < min(2, 3 - length) for length, role in zip(positions.tolist(), roles.tolist())]
        return WalkingCoin([self.branches[seed] if length and wanted else Branch(()) for seed, length, wanted in zip(seeds.tolist(), positions.tolist(), drafts)])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the walking coin is on the host: nothing can be recorded")
def test_the_law_of_the_recorded_path_is_the_targets_own():
    """By enumeration, with the steps, the room and the drafts of the recorded path, done again instead of recorded."""
    target, draft = Table(2, 5, seed=1), Table(2, 5, seed=2)

    def run(walk: Walk, n: int) -> list[Any]:
        rows = [KVCache(1, 1, 1, 5, n) for _ in range(2)]
        maker = Decoder(Replayed(target), rows[0], 2, ModelDrafter(draft, rows[1]), coin=walk)
        requests = [Request([1], Settings(seed=row, max_tokens=3, gamma=2)) for row in range(n)]
        for request in requests:
            maker.open(request)
        while work := [maker.plan(request) for request in requests if not request.finish_reason]:
            maker.step(work)
        return [tuple(request.tokens[1:]) for request in requests]

    with in_triton(), mock.patch.object(graphs, "record", lambda run: run), mock.patch("proof.Walk", Only):
        assert distance(enumerate_law(run), own_law(target, (1,), 3, (), lambda logits: logits.softmax(-1))) < 1e-6


def test_filters_can_be_recorded():
    logits, k, p = torch.zeros(2, 9, device=DEVICE), torch.tensor([3.0, 0], dtype=torch.float64, device=DEVICE), torch.tensor([1.0, 0.5], dtype=torch.float64, device=DEVICE)
    held = torch.zeros_like(logits)
    with recorded():
        run = graphs.Recorded(lambda: held.copy_(probabilities(logits, None, k, p)))
        for seed in range(2):
            logits.copy_(torch.randn(2, 9, generator=torch.Generator().manual_seed(seed)))
            run()
            rows = [probabilities(logits[0], top_k=3), probabilities(logits[1], top_p=0.5)]
            torch.testing.assert_close(held, torch.stack(rows))


def test_a_tape_refuses_what_waits():
    for waits in (lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0]), lambda x: bool(x.any())):
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            record(lambda: waits(torch.ones(3)))
