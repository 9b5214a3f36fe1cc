"""CUDA graphs: a tape records what is launched on a CPU, with its numbers, as a graph on a GPU."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton.runtime.interpreter import InterpretedFunction

from app.launch import joined
from automaton import Grammars
from checkpoint.config import Config
from drafters import ModelDrafter
from errors import UserError
from gpu import GPU, graphs
from gpu.graphs import rounded
from gpu.testing import DEVICE, LAUNCH, Kernels, record, recorded
from grammar import GrammarState
from kernels import Ops, ops_for
from kvcache import AttentionMetadata, Cache, KVCache, KVSpec, SequenceSlice
from model import Llama
from paged import PagedCache
from proof import (
    Branch,
    Toy,
    Walk,
    WalkingRng,
    distance,
    enumerate_distribution,
    sequential_distribution,
)
from request import Request, Settings
from runner import ModelRunner
from sampling import Keyed
from settings import Grammar
from speculative import Drawing, Round
from testing.heads import random_head
from testing.models import SMALL, model_chain, proposed
from testing.toys import Place

pytestmark = pytest.mark.gpu


TINY = dict(
    vocab_size=67,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)


@contextmanager
def waits() -> Iterator[list[None]]:
    """-> a list that grows whenever numbers are brought to the host."""
    times: list[None] = []
    tolist = Tensor.tolist
    item = Tensor.item
    with (
        mock.patch.object(Tensor, "tolist", lambda x: times.append(None) or tolist(x)),
        mock.patch.object(Tensor, "item", lambda x: times.append(None) or item(x)),
    ):
        yield times


def loud(seed: int, ops: Ops) -> Llama:
    llama = Llama(Config(**{**SMALL, **TINY}), DEVICE, seed=seed, ops=ops)
    for name, tensor in llama.named_tensors().items():
        tensor.mul_(1 if "norm" in name else 12)
    return llama.pack_weights()


def contiguous_cache(llama: Llama) -> Cache:
    return KVCache(llama.kv_spec(), 40, 3)


def paged_cache(llama: Llama) -> Cache:
    return PagedCache(llama.kv_spec(), 30, 6, max_len=40)


def test_shapes_are_few_and_large_enough():
    assert [rounded(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert all(n <= rounded(n) <= max(n, n * 3 / 2) for n in range(1, 3000))
    assert len({rounded(n) for n in range(1, 1025)}) == 20


def test_metadata_is_refilled_in_place_and_padded():
    """The padding has no slot: m0at/rvllm#32 stored it in slot 0."""
    cache = PagedCache(KVSpec(1, 1, 16, device=DEVICE), 9, 4)
    metadata = graphs.BucketMetadata(cache, graphs.Bucket(sequences=3, each=2, blocks=2))
    buffer = metadata.buffer
    for _ in range(2):
        metadata.fill([SequenceSlice([2, 6], 3, 6)])
        assert metadata.buffer is buffer
        assert metadata.positions.tolist() == [3, 4, 5, 0, 0, 0]
        assert metadata.slot_mapping.tolist() == [11, 24, 25, -1, -1, -1]
        assert metadata.cu_seqlens.tolist() == [0, 3, 3, 3]
        assert metadata.seq_lens.tolist() == [6, 0, 0]
        assert metadata.block_tables.tolist() == [[2, 6], [0, 0], [0, 0]]
        metadata.fill([SequenceSlice([7], 0, 2)] * 3)
        assert metadata.slot_mapping.tolist() == [28, 29] * 3


def test_a_sequence_that_has_all_its_drafts_stores_nothing_more():
    """Blocks of 4 tokens: the first sequence has two steps left, the second none, the third one, to
    the end of its blocks."""
    sequences = [
        SequenceSlice([7, 5], 2, 3),
        SequenceSlice([6], 2, 3),
        SequenceSlice([8, 9], 6, 7),
        SequenceSlice((), 0, 0),
    ]
    metadata = AttentionMetadata(sequences, 4)
    metadata.backend["longest"] = 8
    counts = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
    positions = []
    slots = []
    lengths = []
    for step in graphs.next_steps(metadata, counts, 3):
        positions.append(step.positions.tolist())
        slots.append(step.slot_mapping.tolist())
        lengths.append(step.seq_lens.tolist())
    assert positions == [[3, 3, 7, 0], [4, 3, 8, 0], [5, 3, 8, 0]]
    assert slots == [[31, -1, 39, -1], [20, -1, -1, -1], [-1, -1, -1, -1]]
    assert lengths == [[4, 3, 8, 0], [5, 3, 8, 0], [5, 3, 8, 0]]


class Launches(TorchDispatchMode):
    """Counts what is launched, operations and Triton's kernels; a view is no launch."""

    count = 0
    is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.is_counting and not func.is_view
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
        """In place of `graphs.record`."""

        def launch(*args: Any, **kwargs: Any) -> None:
            self.count += self.is_counting
            LAUNCH(*args, **kwargs)

        with mock.patch.object(InterpretedFunction, "run", launch), self:
            run()
        return run

    def leave_out(self, owner: object, name: str) -> None:
        """Do not count what this function launches."""
        function = getattr(owner, name)

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            self.is_counting = False
            result = function(*args, **kwargs)
            self.is_counting = True
            return result

        setattr(owner, name, uncounted)


@cache
def rng_of(ops: Ops) -> Callable[..., Keyed]:
    return partial(Keyed, draw=ops.pick)


def draft(
    llama: Llama,
    num_unread: list[int],
    k: int = 2,
    coupled: bool = False,
    dtype: torch.dtype = torch.float32,
    kv: Cache | None = None,
) -> tuple[Tensor, Tensor | None]:
    """k drafts of new texts with so many unread tokens."""
    kv = kv or PagedCache(llama.kv_spec(), 30, 6, max_len=40)
    unread = [[1] * n for n in num_unread]
    requests = [Request(text, Settings(seed=seed)) for seed, text in enumerate(unread)]
    seqs = [kv.open(())[0] for _ in requests]
    rng = rng_of(llama.ops)
    round = Round(
        requests,
        [k] * len(seqs),
        Drawing(67, coupled, rng),
        target=Place(DEVICE, dtype, llama.ops),
    )
    return model_chain(llama, kv, seqs, unread, round).draft(round)


def launches_of_a_round(k: int, coupled: bool) -> int:
    """In the recording of k drafts each, beside those of passes, probabilities and picks."""
    llama = loud(1, Kernels())
    launches = Launches()
    launches.leave_out(llama, "forward")
    launches.leave_out(llama.ops, "probabilities")
    launches.leave_out(llama.ops, "pick")
    with mock.patch.object(graphs, "record", launches):
        draft(llama, [2, 1], k, coupled)
    assert launches.count > 0
    return launches.count


@pytest.mark.parametrize("coupled", [True, False])
@torch.inference_mode()
def test_a_token_of_a_round_launches_little_beside_its_pass(coupled):
    """Its input; in exact mode its distribution, too."""
    fewer, more = (launches_of_a_round(k, coupled) for k in (3, 4))
    assert more - fewer <= 2 - coupled


@torch.inference_mode()
def test_a_coupled_round_records_no_distributions():
    V = 5000
    llama = Llama(Config(**{**SMALL, **TINY, "vocab_size": V}), DEVICE, ops=Kernels())
    for coupled in (False, True):
        drafter = ModelDrafter(llama, contiguous_cache(llama))
        with recorded() as recordings:
            _, q, largest = proposed(drafter, coupled, 2, V, DEVICE)
        assert recordings and (q is None) == coupled
        assert (largest >= 2 * 3 * V) != coupled


@torch.inference_mode()
def test_texts_without_padding_where_it_costs():
    """Many texts with a token each are a pass of so many; few share a recording with two each."""
    llama = loud(1, Kernels())
    kv = paged_cache(llama)
    with recorded() as recordings, mock.patch.object(llama, "forward", wraps=llama.forward) as run:
        draft(llama, [1, 2], kv=kv)
        draft(llama, [1, 1], kv=kv)
        assert len(recordings) == 1
        run.reset_mock()
        draft(llama, [1] * 6)
    assert [len(call.args[0]) for call in run.call_args_list] == [6] * 2 * 2


@torch.inference_mode()
def test_q_has_the_dtype_of_the_round():
    """Of the target's probabilities, where a draft's are float32."""
    llama = loud(1, Kernels())
    with recorded():
        _, q = draft(llama, [1], dtype=torch.float64)
    assert q.dtype == torch.float64
    torch.testing.assert_close(q[:, :-1].sum(-1), torch.ones_like(q[:, :-1, 0]))


@torch.inference_mode()
def test_drafts_beside_a_grammar_are_made_one_by_one_with_its_masks():
    """A recorded round sees no masks; only one text of the two has a grammar."""
    pytest.importorskip("llguidance", reason="the extra 'server' is not installed")
    spelled = [bytes([40 + id]) for id in range(66)]  # token 66 is the end of a text
    tokenizer = SimpleNamespace(
        vocab_size=67,
        specials={"<end>": 66},
        token_bytes=lambda id: [*spelled, b""][id],
        encode=lambda text, is_first: [letter - 40 for letter in text.encode()],
    )
    llama = loud(1, Kernels())
    kv = PagedCache(llama.kv_spec(), 30, 6, max_len=40)
    requests = [Request([1], Settings(seed=seed)) for seed in range(2)]
    grammars = Grammars(tokenizer, {66})
    requests[1].grammar_state = GrammarState(
        grammars, grammars.compile(Grammar("regex", "[AB]C[DE]")), []
    )
    seqs = [kv.open(())[0] for _ in requests]
    round = Round(requests, [3, 3], Drawing(67, make_rng=rng_of(llama.ops)), target=llama)
    with recorded(), mock.patch.object(graphs.Drafts, "__call__", side_effect=AssertionError):
        drafted, q = model_chain(llama, kv, seqs, [[1], [1]], round).draft(round)
    assert b"".join(spelled[id] for id in drafted[1].tolist()) in (b"ACD", b"ACE", b"BCD", b"BCE")
    assert q[1].count_nonzero(-1).tolist() == [2, 1, 2, 0]
    assert q[0, :-1].count_nonzero(-1).min() > 9
    round.masks.tasks[-1].result()  # the worker has read the last draft, too
    assert requests[1].grammar_state.num_drafts == 3


def test_logits_that_are_not_finite_are_an_error_and_cost_no_wait():
    """The draft's, that are recorded."""
    target = loud(1, Kernels())
    draft = loud(2, Kernels())
    draft.norm.fill_(torch.nan)
    with recorded():
        drafter = ModelDrafter(draft, contiguous_cache(draft))
        runner = ModelRunner(target, paged_cache(target), Drawing(67), drafter=drafter)
        requests = []
        for temperature, gamma in ((1.0, 2), (0.0, 0)):
            settings = Settings(temperature, seed=0, gamma=gamma)
            requests.append(Request([0, 1], settings))
            runner.open(requests[-1])
        scheduled = [runner.schedule(request) for request in requests]
        with waits() as times, pytest.raises(UserError, match="logits are not finite"):
            runner.step(scheduled)
        assert len(times) == 1
        assert all(request.seq is None for request in requests)  # they were closed


def test_texts_from_recordings_are_those_without():
    """Coupled, greedy and drawn: token for token, with prefixes shared and drafts committed."""

    def texts(ops: Ops) -> list[list[int]]:
        target = loud(5, ops)
        draft = loud(6, ops)
        cache = paged_cache(target)
        drafter = ModelDrafter(draft, paged_cache(draft))
        runner = ModelRunner(target, cache, Drawing(67, True), drafter=drafter, budget=40)
        requests = []
        for i, temperature in ((1, 0.0), (2, 1.0)):
            settings = Settings(temperature, seed=i, max_tokens=30, gamma=2)
            requests.append(Request([1 + i] * 5 + [i], settings))
            runner.open(requests[-1])
        for _ in range(4):
            scheduled = [runner.schedule(request) for request in requests]
            reads_prompt = any(item.num_tokens > 2 for item in scheduled)
            with waits() as times:
                runner.step(scheduled)
            assert len(times) == 1 or type(ops) is Ops or reads_prompt
        for request in requests:
            assert cache.sequence(request.seq).tokens == request.tokens[:-1]
        runner.close(requests[0])
        _, num_cached = cache.open(requests[0].tokens)
        assert num_cached == (len(requests[0].tokens) - 1) // 6 * 6
        return [request.tokens for request in requests]

    expected = texts(Ops())
    with recorded() as recordings:
        assert texts(Kernels()) == expected and recordings


@pytest.mark.parametrize("dtype, bits", [(torch.float32, (8, 4)), (torch.float64, (16, 16))])
@torch.inference_mode()
def test_a_warm_up_leaves_caches_and_texts_as_they_are(dtype, bits):
    """In float64, too, which Triton's kernels do not read."""
    llama = Llama(Config(**{**SMALL, **TINY}), DEVICE, dtype, seed=1, ops=Kernels()).pack_weights()
    cache = PagedCache(llama.kv_spec(bits=bits), 30, 6, max_len=40)
    seq, _ = cache.open([1, 2, 3])
    llama.forward(torch.tensor([1, 2, 3], device=DEVICE), cache.extend([(seq, [1, 2, 3])]), None)
    parts = [*cache.keys.parts, *cache.values.parts]
    before = [part.clone() for part in parts]
    with recorded() as recordings:
        llama.ops.warm_up(llama, cache, 67)
    assert cache.sequence(seq).tokens == [1, 2, 3] and not cache.backend and not recordings
    for part, was in zip(parts, before):
        assert torch.equal(part.view(torch.uint8), was.view(torch.uint8))  # NaN, too


@torch.inference_mode()
def test_a_head_is_warmed_up():
    """Nothing is stored, and its rows and logits are launched."""
    llama = Llama(Config(**{**SMALL, **TINY}), DEVICE, seed=1, ops=Kernels()).pack_weights()
    head = random_head(llama, range(60), dtype=torch.float32, bits=4)
    head.ops = Kernels()
    cache = PagedCache(llama.kv_spec(draft_layers=1), 30, 6)
    cache.values.parts[0].zero_()
    with mock.patch.object(head, "draft_logits", wraps=head.draft_logits) as logits:
        head.ops.warm_up(head, cache, 67)
    assert logits.called and not cache.values.parts[0].any()


class Padded(GPU):
    """Padding, of no sequence, is read as some text; the distributions are the reference's."""

    probabilities = Ops.probabilities

    def attend(
        self,
        qkv: Tensor,
        G: int,
        rope: None,
        metadata: AttentionMetadata,
        layer: int,
        norm: None = None,
    ) -> Tensor:
        most = (Table.texts - 1) / (metadata.positions + 1.0)
        out = super().attend(qkv, G, rope, metadata, layer)
        return out.nan_to_num().relu().minimum(most[:, None, None])


class Table(Toy):
    """A toy whose passes go through `Ops.forward`."""

    config = Config(**{**SMALL, "vocab_size": 2})
    ops = Padded()
    texts = 3**5

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Any = None,
        features: None = None,
    ) -> Tensor:
        return self.ops.forward(self, tokens, metadata, logits_indices)

    def forward(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Any,
        features: None = None,
    ) -> Tensor:
        return super().__call__(tokens, metadata, logits_indices)


class Only(Walk):
    """Decides for rows of a text: four tokens in the end, at most two drafts, fewer at the end."""

    def __call__(self, seeds: Tensor, positions: Tensor, roles: Tensor) -> WalkingRng:
        branches = []
        for seed, length, role in zip(seeds.tolist(), positions.tolist(), roles.tolist()):
            draws = length and (role - 1) // 2 < min(2, 3 - length)
            branches.append(self.branches[seed] if draws else Branch(()))
        return WalkingRng(branches)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the walking rng is on the host")
def test_the_distribution_of_the_recorded_path_is_the_targets_own():
    """By enumeration, with the steps and drafts of the recorded path, done again, not recorded."""
    target = Table(2, 5, seed=1)
    draft = Table(2, 5, seed=2)
    recordings: list[Any] = []

    def run(walk: Walk, n: int) -> list[Any]:
        spec = KVSpec(1, 1, 1, ops=target.ops)
        cache = KVCache(spec, 5, n)
        drafter = ModelDrafter(draft, KVCache(spec, 5, n))
        runner = ModelRunner(target, cache, Drawing(2, make_rng=walk), drafter=drafter)
        requests = []
        for row in range(n):
            requests.append(Request([1], Settings(seed=row, max_tokens=3, gamma=2)))
            runner.open(requests[-1])
        while True:
            running = [request for request in requests if not request.finish_reason]
            if not running:
                return [tuple(request.tokens[1:]) for request in requests]
            runner.step([runner.schedule(request) for request in running])

    with (
        mock.patch.object(graphs, "record", lambda run: recordings.append(run) or run),
        mock.patch("proof.Walk", Only),
    ):
        distribution = enumerate_distribution(run)
    own = sequential_distribution(target, (1,), 3, (), lambda logits: logits.softmax(-1))
    assert recordings and distance(distribution, own) < 1e-6


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """PyTorch 2.11's: nothing can be captured into a pool whose MemPool and graphs are gone."""
    books = SimpleNamespace(users=Counter(), device=0, graphs=weakref.WeakSet())
    ids = count(1)

    class Pool:
        def __init__(self) -> None:
            self.id = (0, next(ids))
            self.device = books.device
            books.users[self.id] += 1
            weakref.finalize(self, books.users.subtract, [self.id])

    class Graph:
        is_reset = False

        def replay(self) -> None:
            """A method, which holds the graph."""

        def reset(self) -> None:
            self.is_reset = True

    @contextmanager
    def capture(graph: Graph, pool: tuple[int, int], **how: Any) -> Iterator[None]:
        assert pool not in books.users or books.users[pool] > 0, (
            "use_count > 0 INTERNAL ASSERT FAILED"
        )
        books.users[pool] += 1
        books.graphs.add(graph)
        weakref.finalize(graph, books.users.subtract, [pool])
        yield

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(ids)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: books.device)
    graphs.memory_pool.cache_clear()
    yield books
    graphs.memory_pool.cache_clear()


def test_recordings_share_a_pool_that_outlives_them(allocator):
    """One for a device."""
    for device in (0, 0, 1):
        allocator.device = device
        runs = [graphs.record(lambda: None) for _ in range(2)]
        del runs
        gc.collect()
    assert sorted(allocator.users.values()) == [1, 1]


def test_processes_leave_their_group_without_recordings(allocator, monkeypatch):
    """NCCL waits for them; after Ctrl-C a traceback holds the runner, so that they live."""
    left = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)

    def destroy() -> None:
        left.append([graph.is_reset for graph in allocator.graphs])

    monkeypatch.setattr(dist, "destroy_process_group", destroy)

    def serve() -> None:
        llama = loud(1, Kernels())
        runner = ModelRunner(llama, paged_cache(llama), Drawing(67))
        request = Request([1], Settings(0.0, seed=0))
        runner.open(request)
        runner.step([runner.schedule(request)])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop, joined(1, torch.device("cpu")):
        serve()
    assert left == [[True]]
    assert "runner" in stop.traceback[-1].locals and len(allocator.graphs) == 1


def test_a_models_device_is_the_current_one(monkeypatch):
    """Triton launches there, and graphs are captured there."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    for device in ("cuda:1", "cuda", "cpu", torch.device("cuda", 0)):
        ops_for(device)
    assert chosen == [1, 0]


@torch.inference_mode()
def test_recordings_of_a_runner_are_gone_with_it():
    """With its drafts and caches, and no garbage collector."""
    llama = loud(1, Kernels())
    draft = loud(2, Kernels())
    with recorded() as recordings:
        caches = [paged_cache(llama), contiguous_cache(draft)]
        runner = ModelRunner(llama, caches[0], Drawing(67), drafter=ModelDrafter(draft, caches[1]))
        request = Request([1, 2], Settings(0.0, seed=0, max_tokens=9, gamma=2))
        runner.open(request)
        for _ in range(2):
            runner.step([runner.schedule(request)])
        count = len(recordings)
        parts = [weakref.ref(cache.keys.parts[0]) for cache in caches]
        recordings.clear()
    gc.disable()
    try:
        del runner, caches
        assert count == 2 and [part() for part in parts] == [None, None]
    finally:
        gc.enable()


def test_filters_can_be_recorded():
    """With other logits and other settings each time."""
    k = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    p = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    ops = Kernels()
    logits = torch.zeros(1, 9, device=DEVICE)
    probs = torch.zeros_like(logits)
    with recorded() as recordings:
        run = graphs.Recorded(lambda: probs.copy_(ops.probabilities(logits, top_k=k, top_p=p)))
        for seed, top_k, top_p in ((0, 3, 1), (1, 0, 0.5)):
            logits.copy_(torch.randn(1, 9, generator=torch.Generator().manual_seed(seed)))
            k.fill_(top_k)
            p.fill_(top_p)
            run()
            wanted = Ops().probabilities(logits, top_k=top_k, top_p=top_p)
            torch.testing.assert_close(probs, wanted)
        assert len(recordings) == 1


def test_a_tape_refuses_what_waits():
    for wait in (
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
        lambda x: bool(x.any()),
    ):
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            record(lambda: wait(torch.ones(3)))
