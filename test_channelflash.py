"""Keys of 4 bits by channel in Triton's kernels, beside kivi.py's own step: the same bits are stored, and the same is seen."""
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"                # Triton reads it when it is imported, which is here or in another test like this
pytest.importorskip("triton", reason="Triton exists for Linux only")

import channelstep
import flash
import kivi
import unpack
from channelstep import ChannelKernelStep, spans
from crosscompile import SHARED, apart
from kernelstep import Bucket
from kivi import ChannelKVCache, ChannelPagedCache
from model import rotate
from quant import from_int4, int4, unpack4
from test_flash import emulate, numbers, poisoned

L, LONGEST = 2, 190
MAKE = {"contiguous": lambda *shape, **kw: ChannelKVCache(L, *shape, LONGEST, 3, bits=(4, 4), **kw),
        "paged": lambda *shape, **kw: ChannelPagedCache(L, *shape, 40, texts=3, bits=(4, 4), **kw),
        "wide blocks": lambda *shape, **kw: ChannelPagedCache(L, *shape, 16, block_size=48, texts=3, bits=(4, 4), **kw)}


def everything(cache: Any) -> list[Tensor]:
    return [cache.rings.keys, *cache.keys.parts, *cache.values.parts]


class Twins:
    """Two caches of which the same is asked: the steps of one are kivi.py's own, of the other the kernels'. What nobody wrote is poisoned."""

    def __init__(self, layout: str, G: int, R: int, D: int, seed: int, splits: int | None = None, dtype: torch.dtype = torch.float32):
        self.pair = [MAKE[layout](G, D, dtype=dtype, device=DEVICE) for _ in "ab"]
        self.shape, self.splits, self.dtype, self.random = (G, R, D), splits, dtype, torch.Generator().manual_seed(seed)
        for part in (part for cache in self.pair for part in everything(cache)):
            part.fill_(float("nan") if part.is_floating_point() else 77)

    def all(self, verb: str, *arguments: Any) -> Any:
        """Both do it -> what the first says."""
        said = [getattr(cache, verb)(*arguments) for cache in self.pair]
        assert said[0] == said[1] or verb == "extend"
        return said if verb == "extend" else said[0]

    def heads(self, T: int) -> list[Tensor]:
        """q: [T, R · G, D]; k, v: [T, G, D], some channels of k large and some far from 0; views, as the model has."""
        G, R, D = self.shape
        row = torch.randn(T, G * (R + 2), D, generator=self.random)
        row[:, R * G:R * G + G] = row[:, R * G:R * G + G] * torch.linspace(0.1, 3, D) + (torch.arange(D) % 5 == 0) * 2
        return list(row.to(DEVICE, self.dtype).split((R * G, G, G), 1))

    def grow(self, texts: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """n more tokens of each (seq, n) -> what plain torch sees, and what the kernels do."""
        heads, plan, out = self.heads(sum(n for _, n in texts)), flash.plan, []
        forced = lambda *shape: [launch._replace(splits=self.splits or launch.splits) for launch in plan(*shape)]
        for cache, kernels in zip(self.pair, (False, True)):
            with mock.patch.object(kivi, "in_place", lambda *_: kernels):
                step = cache.extend([(seq, [0] * n) for seq, n in texts])
            poison = poisoned() if kernels else nullcontext()
            with mock.patch.object(channelstep, "plan", forced), mock.patch("channelflash.LEAST_KEYS", 1), poison:
                out.append(step.attend(1, *heads))
        assert isinstance(step, ChannelKernelStep)
        return out[0], out[1]

    def same(self) -> None:
        for one, other in zip(*map(everything, self.pair)):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))                               # and nothing else was written


moves = st.lists(st.tuples(st.sampled_from([1, 2, 15, 16, 17, 20, 33]), st.sampled_from([0, 0, 1, 5, 17])), min_size=2, max_size=2)


@settings(deadline=None, max_examples=2, phases=(Phase.explicit, Phase.generate))                            # to shrink takes minutes here
@example("paged", 1, 4, 64, [(15, 0), (17, 0)], 1, 1)                                                        # the most that the ring alone can tell
@example("contiguous", 2, 1, 80, [(15, 0), (18, 20), (1, 0)], 2, 2)                                          # one more; cut; on
@example("wide blocks", 1, 2, 128, [(50, 0), (33, 0)], 1, 3)    # tiles that all rows see whole, or only the later ones
@given(st.sampled_from(sorted(MAKE)), st.just(1), st.integers(1, 4), st.sampled_from([64, 80, 128]), moves, st.sampled_from([1, 3]), st.integers(0, 99))
def test_the_kernels_store_and_see_what_plain_torch_does(layout, G, R, D, moves, splits, seed):
    """A text grows, is cut back and goes on, beside one of which each step has a token."""
    twins = Twins(layout, G, R, D, seed, splits)
    text, other = (twins.all("open", ())[0] for _ in "ab")
    for grows, cut in moves:
        found = twins.grow([(other, 1), (text, grows)])
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
        twins.same()
        twins.all("truncate", text, max(0, twins.all("length", text) - cut))


def test_a_fork_and_a_found_beginning():
    twins = Twins("wide blocks", 1, 2, 64, 0)
    text, _ = twins.all("open", ())
    twins.grow([(text, 53)])
    twin = twins.all("fork", text)
    for texts in ([(twin, 9)], [(text, 12), (twin, 3)]):
        torch.testing.assert_close(*twins.grow(texts), atol=1e-5, rtol=1e-5)
    twins.all("free", text)
    found, have = twins.all("open", [0] * 60)
    assert have == 48
    torch.testing.assert_close(*twins.grow([(found, 12), (twin, 1)]), atol=1e-5, rtol=1e-5)


def step_of(texts: list[tuple[list[int], int, int, int]], seed: int, bucket: Bucket | None = None) -> ChannelKernelStep:
    """Over a pool of its own, of random numbers: blocks of 16 tokens, two heads of 64 numbers."""
    random = torch.Generator().manual_seed(seed)
    cache = ChannelPagedCache(L, 2, 64, 9, texts=4, bits=(4, 4), device=DEVICE)
    cache.rings.keys.copy_(torch.randn(cache.rings.keys.shape, generator=random))
    cache.keys.copy_(torch.randn(L, 9, 1, 2, 16, 64, generator=random).to(DEVICE))
    cache.values.copy_(torch.randn(L, 9, 16, 2, 64, generator=random).to(DEVICE))
    return ChannelKernelStep(cache.keys, cache.rings.keys, cache.values, spans(texts), 16, bucket=bucket)


@torch.inference_mode()
def test_a_refilled_bucket_is_the_step_itself_and_rotation_is_in_the_same_pass():
    torch.manual_seed(0)
    bucket = Bucket(sequences=3, each=18, blocks=4)
    step = step_of([([1], 0, 0, 2), ([2], 1, 0, 2), ([3], 2, 0, 2)], 5, bucket)
    alone = step_of([([1], 0, 0, 2)], 5)
    for i, texts in enumerate(([([5, 0, 8], 3, 30, 48), ([4, 1], 0, 2, 20)], [([7, 6], 2, 0, 18)])):
        step.refill(spans(texts))
        alone = ChannelKernelStep(alone.keys, alone.rings, alone.values, spans(texts), 16)
        T, qkv = sum(stop - start for _, _, start, stop in texts), torch.randn(54, 4 + 4, 64, device=DEVICE)
        cos, sin = torch.randn(2, 54, 1, 64, device=DEVICE)
        q, k, v = qkv.split((4, 2, 2), 1)
        turned = rotate(qkv[:, :6], cos, sin)
        if i == 0:
            found, expected = step.attend(1, q, k, v), alone.attend(1, q[:T], k[:T], v[:T])
        else:
            found, expected = step.attend_turned(1, qkv, cos, sin), alone.attend(1, turned[:T, :4], turned[:T, 4:], v[:T])
        torch.testing.assert_close(found[:T], expected, atol=1e-5, rtol=1e-5)
        for one, other in zip((step.rings, *step.values.parts), (alone.rings, *alone.values.parts)):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert step.positions[:18].tolist() == list(range(18)) and step.places.tables[0, :2].tolist() == [7, 6] and step.places.tables[0, -1] == 2


# ---- The compiler, and the machine ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, dtype, bias", [("CB16", torch.bfloat16, 16), ("C16", torch.float16, 64)])
def test_bytes_scales_and_zeros_become_numbers(name, dtype, bias):
    """The interpreter does not run these instructions, so they are followed one by one."""
    torch.manual_seed(0)
    x = torch.randn(64, 16, 8) * torch.rand(64, 1, 8) + torch.randn(64, 1, 8)
    steps, scale, zero = int4(x, -2)
    for i in range(64):
        low = (-(zero[i, 0].float() + bias) * scale[i, 0].float()).to(dtype)
        words = [int(part.view(torch.int32)) & 0xFFFFFFFF for part in (*scale[i, 0].to(dtype).view(4, 2), *low.view(4, 2))]
        found = numbers(emulate(getattr(unpack, name).value, 4, int(steps[i, 3].view(torch.int32)) & 0xFFFFFFFF, *words), dtype)
        wanted = from_int4(steps[i, 3], scale[i, 0], zero[i, 0])
        assert (found.float() - wanted).abs().max() <= 0.1 * scale[i].float().max() + 2**-8 * wanted.abs().max()
        exact = (unpack4(steps[i, 3]).double() + bias) * scale[i, 0].double() + low.double()
        assert torch.equal(found, exact.to(dtype))                                                           # one rounding, at the end


WANTED = (*((arch, model, 16, "bf16") for arch in (90, 80) for model in ("8B", "1B")), *((arch, "8B", M, "bf16") for arch in (90, 80) for M in (128, 0)),
          (90, "1B", 16, "fp16"), (80, "1B", 16, "fp32"))


@pytest.mark.meanwhile(apart, "channelstep", "kernels", WANTED)
def test_what_the_compiler_makes_of_the_kernels(meanwhile):
    """Nothing spilled, shared memory that fits, prompts by `wgmma` where there is one, and every product there."""
    for (arch, _, M, kind), (name, registers, spills, shared, wgmma, mma) in zip(WANTED, meanwhile(), strict=True):
        assert shared <= (SHARED[arch] if M else 4096), name
        if kind != "fp32":                                               # which is for proofs
            assert spills == 0 and registers <= (255 if M else 192), f"{name}: {registers} registers, {spills} spilled"
            assert not M or (wgmma > 0) == (arch == 90 and M == 128) and wgmma + mma >= 20, name


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no 16-bit products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", MAKE)
def test_16_bits_on_the_machine(dtype, layout):
    for D in (64, 80, 128):
        for splits in (None, 5):
            twins = Twins(layout, 8, 4, D, 1, splits, dtype)
            text, other = (twins.all("open", ())[0] for _ in "ab")
            for texts in ([(text, 1), (other, 150)], [(text, 17), (other, 5)], [(text, 1), (other, 1)], [(text, 40), (other, 3)]):
                expected, found = (x.float() for x in twins.grow(texts))
                assert (found - expected).norm() < 1e-2 * expected.norm()
                twins.same()
