"""Triton's attention and store beside plain torch: in the interpreter, on a GPU, and compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton exists for Linux only")
from gpu import GPU
from gpu.flash import LayerStore, flash_attention
from gpu.graphs import Bucket, BucketMetadata, next_steps
from gpu.store import store_vectors
from gpu.tuning import Launch, plan_launches, processors
from kernels import Ops, attention
from kvcache import AttentionMetadata, KVSpec, SequenceSlice, Store
from paged import PagedCache
from quant import KEY_GROUP, WIDTHS, int4, int8
from testing.tensors import attend, heads_first

pytestmark = pytest.mark.gpu


@contextmanager
def poisoned() -> Iterator[None]:
    """What the kernels' own tensors hold before they are written is not a number, or 77."""
    empty = torch.empty

    def poisoned_empty(*size: Any, **how: Any) -> Tensor:
        x = empty(*size, **how)
        return x.fill_(nan if x.is_floating_point() else 77)

    with mock.patch("torch.empty", poisoned_empty):
        yield


class Sequences:
    """Random keys and values of some sequences amid poison, and queries of their newest tokens.

    contiguous: a sequence has one block, of S tokens, and all tokens of a head lie together.
    """

    def __init__(
        self,
        num_new_tokens: list[int],
        past: list[int],
        G: int,
        R: int,
        D: int,
        S: int,
        bits: tuple[int, int],
        contiguous: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        torch.manual_seed(1)
        B = len(num_new_tokens)
        self.num_new_tokens = num_new_tokens
        self.lengths = [n + m for n, m in zip(num_new_tokens, past)]
        self.S = max(self.lengths) if contiguous else S
        self.block = 0 if contiguous else S
        M = -(-max(self.lengths) // self.S)
        self.block_tables = torch.randperm(B * M + 1)[: B * M].view(B, M)
        self.cu_seqlens = torch.tensor([0, *num_new_tokens]).cumsum(0)
        shape = (1, B * M + 1, self.S, G, D)
        empty_kv = heads_first if contiguous else Ops().empty_kv
        key_bits, value_bits = bits
        self.k = Store.empty(shape, key_bits, dtype, "cpu", empty_kv, KEY_GROUP)
        self.v = Store.empty(shape, value_bits, dtype, "cpu", empty_kv)
        for part in (*self.k.parts, *self.v.parts):
            part.fill_(nan if part.is_floating_point() else 77)
        padded = torch.randn(sum(num_new_tokens) + 2, G * (R + 2), D).to(dtype)  # by two rows
        self.q = padded[:, : G * R]  # a view, as in a model
        self.plain = []
        for b, length in enumerate(self.lengths):
            keys = self.put(self.k, b, torch.randn(length, G, D).to(dtype))
            values = self.put(self.v, b, torch.randn(length, G, D).to(dtype))
            self.plain.append((keys, values))

    def put(self, store: Store, b: int, x: Tensor) -> Tensor:
        """Where the block table says -> what is stored, [length, G, D]."""
        i = torch.arange(len(x))
        slots = self.block_tables[b, i // self.S] * self.S + i % self.S
        store.write(0, slots, x)
        return store.read(0, slots, torch.float32)

    def expected(self) -> Tensor:
        """In float32, by the reference, from what is stored: [T, H, D]."""
        queries = self.q[:-2].float().split(self.num_new_tokens)
        outputs = [attention(q, k, v) if len(q) else q for q, (k, v) in zip(queries, self.plain)]
        return torch.cat(outputs)

    def launches(self, splits: int = 0) -> list[Launch]:
        """splits: of sequences of few rows; 0: as many as planned."""
        _, H, _ = self.q.shape
        G = self.k.parts[0].shape[3]
        count = processors(torch.device(DEVICE, 0 if DEVICE == "cuda" else None))
        launches = plan_launches(self.num_new_tokens, max(self.lengths), H, G, count)
        if splits:
            launches[0] = launches[0]._replace(splits=splits)
        return launches

    def attend(self, launches: list[Launch]) -> Tensor:
        """By the kernel: [T, H, D]. Nothing is written around it, or into the cache."""
        T, H, D = self.q.shape
        buffer = torch.full((T + 2, H, D), nan, dtype=self.q.dtype, device=DEVICE)
        stores = [LayerStore.of(on_device(store), 0) for store in (self.k, self.v)]
        parts = [part for store in stores for part in store[:3] if part is not None]
        before = [part.clone() for part in parts]
        lengths = torch.tensor(self.lengths)
        where = [x.int().to(DEVICE) for x in (self.block_tables, self.cu_seqlens, lengths)]
        with poisoned():
            flash_attention(self.q.to(DEVICE), *stores, *where, launches, self.block, buffer[1:-1])
        for x, y in zip(parts, before):
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        assert torch.cat((buffer[:1], buffer[-3:])).isnan().all()
        return buffer[1:-3].cpu()


def on_device(store: Store) -> Store:
    return Store([part.to(DEVICE) for part in store.parts], store.bits, store.group)


CASES = [  # new and past tokens, G, R, D, S, bits, contiguous, splits
    # few rows, many, none, one key; of four splits those of a short sequence have no keys at all
    ([1, 0, 22, 3], [0, 9, 70, 130], 1, 3, 64, 16, (16, 16), False, 4),
    ([1, 0, 3], [0, 9, 70], 1, 3, 64, 16, (8, 8), True, 1),
    ([2, 0, 1], [9, 0, 90], 1, 3, 64, 16, (8, 4), False, 4),
    ([17, 0], [64, 0], 1, 4, 64, 1, (8, 4), True, 0),  # tiles that all rows see
    ([2, 1], [150, 0], 1, 2, 80, 3, (4, 4), False, 10),  # five groups a key; parts of ten splits
    ([33], [2], 1, 2, 160, 16, (16, 16), False, 0),  # wide heads: 16 rows at a time
    ([1, 2], [40, 9], 2, 20, 160, 16, (16, 16), False, 4),  # so a token has two tiles: no splits
]


@pytest.mark.parametrize("new, past, G, R, D, S, bits, contiguous, splits", CASES)
def test_attention_equals_the_reference(new, past, G, R, D, S, bits, contiguous, splits):
    sequences = Sequences(new, past, G, R=R, D=D, S=S, bits=bits, contiguous=contiguous)
    with mock.patch("gpu.tuning.LEAST_KEYS", 1):
        out = sequences.attend(sequences.launches(splits))
    torch.testing.assert_close(out, sequences.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's order can be chosen")
@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_the_last_split_merges_whichever_it_is(order):
    from triton.runtime.interpreter import interpreter_builder

    sequences = Sequences([22, 0, 3, 1], [70, 9, 30, 0], 2, R=3, D=64, S=16, bits=(16, 16))
    launches = [Launch(1, 3, 16, 3), Launch(4, 22, 128, 3)]
    place = interpreter_builder.set_grid_idx
    with mock.patch("gpu.tuning.LEAST_KEYS", 1):
        out = sequences.attend(launches)
        torch.testing.assert_close(out, sequences.expected(), atol=2e-5, rtol=2e-5)
        reordered = mock.Mock(side_effect=lambda x, y, z: place(x, y, order[z]))
        with mock.patch.object(interpreter_builder, "set_grid_idx", reordered):
            assert torch.equal(sequences.attend(launches), out)
    assert reordered.called


def test_zeros_and_scales_far_apart():
    """Keys that are all zero have a scale of 1e-30; others, far from 0, zeros of hundreds."""
    for bits in ((8, 8), (4, 4)):
        sequences = Sequences([4], [60], 1, R=2, D=64, S=16, bits=bits)
        numbers = []
        for i, store in enumerate((sequences.k, sequences.v)):
            x = torch.randn(64, 1, 64) * torch.logspace(-6, 1, 64)[:, None, None]
            x += 30 * (torch.arange(64) % 3 == i)[:, None, None]
            x[::7] = 0
            numbers.append(sequences.put(store, 0, x))
        sequences.plain = [tuple(numbers)]
        expected = sequences.expected()
        error = sequences.attend(sequences.launches()) - expected
        assert error.abs().max() < 3e-5 * expected.abs().max()


def test_a_token_without_keys_becomes_zero():
    """Padding of a recorded step: what it becomes is read by the operations that follow."""
    q = torch.randn(3, 2, 16, device=DEVICE)
    store = LayerStore.of(Store([torch.full((1, 2, 4, 1, 16), nan, device=DEVICE)], 16), 0)
    cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    seq_lens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    for splits in (1, 2):
        with poisoned():
            launches = [Launch(1, 2, 16, splits)]
            out = flash_attention(q, store, store, tables, cu_seqlens, seq_lens, launches, 4)
        assert torch.equal(out, torch.zeros_like(out))


def test_launches_fill_the_machine_from_shapes_alone():
    def plan(num_new_tokens: list[int], longest: int) -> list[Launch]:
        return plan_launches(num_new_tokens, longest, 32, 8, 132)

    assert plan([1], 64) == [Launch(1, 1, 16, 1)]
    (one,) = plan([1], 8192)
    assert 30 <= one.splits <= 64 and one.rows == 16  # 8 programs would be 6 % of it
    (many,) = plan([1] * 64, 8192)
    assert many.splits == 1  # 512 programs are 1.94 rounds
    assert plan([1] * 400, 8192)[0].splits == 1
    assert [launch.rows for launch in plan([5] * 4, 1024)] == [32]
    few = Launch(1, 3, 16, splits=plan([1, 3], 4096)[0].splits)
    assert plan([1, 2000, 3, 0], 4096) == [few, Launch(4, 2000, 128, 1)]
    assert plan([0, 0], 10) == []
    for count in range(1, 70):  # the last round is nearly full
        (launch,) = plan([1] * count, 32768)
        rounds = count * 8 * launch.splits / (2 * 132)
        assert rounds / -(-rounds // 1) > 0.8


# ---- Storing -------------------------------------------------------------------------------------

SIZES = [  # of each token: how far its numbers are from each other, and from 0
    (0.0, 0.0),
    (1.0, 0.0),
    (30.0, 1e4),
    (1e-38, 0.0),
    (1e-6, 1.0),
    (3e38, 0.0),
    (3e38, 3e38),
    (0.0, 3e38),
]


@pytest.mark.parametrize(
    "D, bits, contiguous", [(20, (4, 4), False), (6, (8, 8), True), (64, (8, 4), False)]
)
def test_storing_rounds_as_quant_does_to_the_bit(D, bits, contiguous):
    """Two more tokens are halves of steps, as 4 bits count them, and as 8; one is float32's largest
    number, one has no slot.
    """
    torch.manual_seed(0)
    S = 4
    N = 5
    T = len(SIZES) + 3
    spread, offset = torch.tensor([*SIZES, (0, 0), (0, 0), (0, 0)]).T[:, :, None, None]
    kv = ((torch.rand(T, 3, D) * 2 - 1) * spread / 2 + offset / 4).to(DEVICE)
    for token, (least, most) in enumerate([(-1.5, 13.5), (-100.5, 127)], T - 3):
        kv[token] = torch.arange(D, device=DEVICE) % 16 + 0.5
        kv[token, :, ::16] = least
        kv[token, :, 1::16] = most
    kv[T - 1] = torch.finfo(torch.float32).max
    kv[T - 1, :, ::2] *= -1
    k = kv[:, :1]
    v = kv[:, 1:2]
    empty_kv = heads_first if contiguous else Ops().empty_kv
    shape = (1, N, S, 1, D)
    slots = torch.randperm(N * S)[:T].int()
    slots[T - 4] = -1
    stored = slots >= 0
    block = slots[stored].long() // S
    offset_in_block = slots[stored].long() % S
    stores = []
    wanted = []
    for x, width, group in zip((k, v), bits, (KEY_GROUP, None)):
        store = Store.empty(shape, width, torch.float32, DEVICE, empty_kv, group)
        parts = int8(x) if width == 8 else int4(x, group)
        for part, numbers in zip(store.parts, parts, strict=True):
            part.fill_(77)
            wanted.append(part[0].clone())
            wanted[-1][block, offset_in_block] = numbers[stored]
        stores.append(store)
    layers = [LayerStore.of(store, 0) for store in stores]
    arrivals = torch.full((T, 1), 77, dtype=torch.int32, device=DEVICE)
    store_vectors(k, k, v, *layers, slots.to(DEVICE), S, arrivals, None)
    assert not arrivals.any()
    parts = [part[0] for store in stores for part in store.parts]
    assert all(map(torch.equal, parts, wanted))  # and nothing else has changed


# ---- Metadata of a fixed shape -------------------------------------------------------------------


@torch.inference_mode()
def test_a_draft_too_many_becomes_zero():
    """It has no slot and no keys, and its counters are cleared like all others."""
    cache = PagedCache(KVSpec(1, 2, 16, device=DEVICE), 9, 4)
    first = BucketMetadata(cache, Bucket(sequences=2, each=1, blocks=3))
    (metadata,) = next_steps(first, torch.zeros(2, dtype=torch.int32, device=DEVICE), 1)
    q, k, v = torch.randn(2, 8, 16, device=DEVICE).split((4, 2, 2), 1)
    with poisoned(), mock.patch("gpu.tuning.LEAST_KEYS", 1):
        out = attend(GPU(records=False), q, k, v, metadata, 0)
    assert metadata.backend["launches"][0].splits > 1
    assert torch.equal(out, torch.zeros_like(out))


@torch.inference_mode()
def test_a_refilled_bucket_is_the_step_itself():
    """Fewer sequences and tokens than the bucket has: what is left over is stored nowhere."""
    torch.manual_seed(3)
    ops = GPU(records=False)
    bucket = Bucket(sequences=3, each=2, blocks=3)
    cache = PagedCache(KVSpec(1, 1, 16, device=DEVICE), 9, 4)
    other = PagedCache(KVSpec(1, 1, 16, device=DEVICE), 9, 4)
    for store in (cache.keys, cache.values):
        store.parts[0].normal_()
    metadata = BucketMetadata(cache, bucket)
    pointer = metadata.positions.data_ptr()
    for slices in (
        [([5, 0, 8], 9, 11), ([4], 2, 3)],
        [([6, 2], 3, 5), ([1], 0, 1), ([3, 4, 5], 10, 12)],
    ):
        sequences = [SequenceSlice(*each) for each in slices]
        metadata.fill(sequences)
        for store, reference in ((cache.keys, other.keys), (cache.values, other.values)):
            reference.parts[0].copy_(store.parts[0])
        alone = AttentionMetadata(sequences, 4, other, other.device)
        T = len(alone.positions)
        assert metadata.positions[:T].tolist() == alone.positions.tolist()
        assert metadata.slot_mapping.tolist() == alone.slot_mapping.tolist() + [-1] * (6 - T)
        q, k, v = torch.randn(6, 4, 16, device=DEVICE).split((2, 1, 1), 1)
        with poisoned(), mock.patch("gpu.tuning.LEAST_KEYS", 1):
            out = attend(ops, q, k, v, metadata, 0)
        assert metadata.backend["launches"][0].splits > 1  # so the counters count again
        wanted = attend(Ops(), q[:T], k[:T], v[:T], alone, 0)
        torch.testing.assert_close(out[:T], wanted)
        for store, reference in ((cache.keys, other.keys), (cache.values, other.values)):
            assert torch.equal(store.parts[0], reference.parts[0])
    assert pointer == metadata.positions.data_ptr()


# ---- The compiler, and the machine ---------------------------------------------------------------


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no 16-bit products")
@pytest.mark.parametrize("bits", WIDTHS.values())
def test_16_bits_on_a_gpu(bits):
    for new, past in (
        ([1] * 9, [1000 + 13 * i for i in range(9)]),
        ([5, 1, 8], [4000, 0, 333]),
        ([700, 1, 0, 33], [300, 77, 5, 2000]),
    ):
        for D in (64, 80, 128):
            for contiguous in (False, True):
                for dtype in (torch.bfloat16, torch.float16):
                    sequences = Sequences(
                        new, past, 8, R=4, D=D, S=16, bits=bits, contiguous=contiguous, dtype=dtype
                    )
                    expected = sequences.expected()
                    for splits in (0, 5):
                        error = sequences.attend(sequences.launches(splits)).float() - expected
                        assert error.norm() < 1e-2 * expected.norm()
