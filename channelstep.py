"""The step of the caches whose keys have 4 bits by channel, on a GPU: kernelstep.py's one buffer, and two kernels a layer.

What such a step needs beyond the others' is which ring is whose. It stands where everything stands that the host tells a step, in the table
of blocks: a text's row ends with the number of its ring, which fills the row to the width of the widest.

    tables      [ block  block  block  ring ]        attend(layer, q, k, v)      channelstore.py: k, v to their places, full groups
                [ block  ring   ring   ring ]                                    rounded; channelflash.py: q looks back

Which groups a step finishes, whose raw keys are where, and what each query sees follow on the device from a text's length and its new tokens.
So nothing is computed for a layer, no layer waits for the host, and a captured graph stays valid while texts grow.

Invariant: what is stored is what kivi.py's own step stores, to the bit.

Not covered: float64, which only kivi.py's own step has.

    L layers · U blocks, or rows · N groups of one · S tokens of a block · T tokens of a step · B sequences · H, G heads · D head size
"""
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import channelflash
import channelstore
from flash import Pool, plan
from kernels import processors
from kernelstep import Bucket, KernelStep, Span
from kvquant import KVStore


def spans(texts: Sequence[tuple[Sequence[int], int, int, int]]) -> list[Span]:
    """Of each text its blocks, its ring, its length before and with the new tokens -> the same with the ring after the blocks."""
    return [([*blocks, ring], start, stop) for blocks, ring, start, stop in texts]


class ChannelKernelStep(KernelStep):
    """The new tokens of one forward pass, packed end to end, on a GPU; elsewhere for tests, in Triton's interpreter."""

    def __init__(self, keys: KVStore, rings: Tensor, values: KVStore, spans: Sequence[Span], S: int, rows: bool = False, bucket: Bucket | None = None):
        """keys: [L, U, N, G, 16, D]; rings: [L, texts, 32, G, D]; values: [L, U, S, G, D], or a view that looks so. spans: those of `spans`;
        a bucket has room for the ring among its blocks."""
        super().__init__(values, values, spans, S, rows, bucket)
        self.keys, self.rings, self.most = keys, rings, max(self.counts)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [T, G, D]; then let q: [T, H, D] look back, each token within its own sequence -> [T, H, D]."""
        fresh, _ = channelstore.store(k, v, *self._places(layer), *self._texts(), self.S, self.most)
        return self._see(layer, q, fresh)

    def attend_turned(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """qkv: [T, H + 2 G, D], q and k not yet rotated; cos, sin: [T, 1, D] -> [T, H, D]."""
        G = self.kv_heads
        q, k, v = qkv.split((qkv.shape[1] - 2 * G, G, G), dim=1)
        fresh, turned = channelstore.store(k, v, *self._places(layer), *self._texts(), self.S, self.most, q, cos, sin)
        return self._see(layer, turned, fresh)

    def of(self, bucket: Bucket) -> "ChannelKernelStep":
        return ChannelKernelStep(self.keys, self.rings, self.values, (), self.S, self.rows, bucket)

    def _texts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.places.tables, self.places.query_start, self.places.lengths

    def _places(self, layer: int) -> tuple[KVStore, Tensor, Pool]:
        return self.keys[layer], self.rings[layer], Pool.of(self.values[layer])

    def _see(self, layer: int, q: Tensor, fresh: Tensor) -> Tensor:
        if self._launches is None:                                               # the same in all layers
            self._launches = plan(self.counts, self.longest, q.shape[1], self.kv_heads, processors(self.device))
        keys, ring, values = self._places(layer)
        return channelflash.attend(q, keys, ring, fresh, values, *self._texts(), self._launches, 0 if self.rows else self.S)


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the tables of a step that reads, verifies and decodes, and what its kernels need of a GPU that is not there.

def kernels(wanted: Sequence[tuple[int, str, int, str]]) -> list[list[Any]]:
    """(architecture, model, M, kind of numbers) of attention, M = 0: storing -> its name, registers, spills, shared memory, wgmma, mma."""
    found = []
    for arch, model, M, kind in wanted:
        report = channelflash.compiled(arch, model, M, kind=kind) if M else channelstore.compiled(arch, model)
        found.append([f"sm_{arch} {model} {f'attention, {M} rows' if M else 'storing'}, {kind}", *report[:3], report.wgmma, report.count("mma.sync")])
    return found


def main() -> None:
    texts = [("reads 40", [7, 2, 9], 2, 0, 40), ("verifies 5", [5, 0, 3], 0, 30, 35), ("decodes", [4], 1, 4, 5)]
    print("blocks of 16 tokens, and the ring in the last column; which groups are rounded in this step, and which one is read from the ring")
    for (name, _, _, start, stop), (row, _, _) in zip(texts, spans([text[1:] for text in texts])):
        rounded = ", ".join(map(str, range(start // 16, stop // 16))) or "none"
        print(f"  {name:11}{str(row):18}rounded: {rounded:6}as it is: {stop // 16 if stop % 16 else 'none'}")
    print(f"{'':35}{'registers':>11}{'spills':>8}{'shared':>9}{'wgmma':>7}{'mma':>5}")
    for name, registers, spills, shared, wgmma, mma in kernels([(90, "8B", M, "bf16") for M in (0, 16, 128)]):
        print(f"  {name:33}{registers:11}{spills:8}{shared:9,}{wgmma:7}{mma:5}")


if __name__ == "__main__":
    main()
