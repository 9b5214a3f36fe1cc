"""The step of both caches on a CPU, where native.py serves it: a few new tokens a text, one call a layer.

As on a GPU (kernelstep.py), a text's keys and values are read where they lie, through its table of blocks, and a contiguous cache is a paged one
with a single block a text. A call turns q and k, stores k and v, and lets each query look back: no past is gathered, and nothing is padded.

Not covered: keys and values of 4 bits, and prompts, whose many queries are the library's attention's (pagedstep.py).

    L layers · N blocks · S tokens of a block · T tokens of a step · H, G heads · D head size
"""
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import native
from kernels import FEW
from kvquant import KVStore

Span = tuple[Sequence[int], int, int]                   # of a text: its blocks, its length before and with the new tokens


def parts(kept: "Tensor | KVStore") -> tuple[Tensor, ...]:
    """The numbers, and of fewer bits what they are scaled with."""
    return (kept,) if isinstance(kept, Tensor) else kept.parts


def attends(keys: "Tensor | KVStore", values: "Tensor | KVStore", spans: Sequence[Span]) -> bool:
    """Whether this is a step for native.py. keys, values: [L, N, S, G, D], or views that look so."""
    return (all(kept.device.type == "cpu" and parts(kept)[0].dtype in native.KINDS[:3] for kept in (keys, values))
            and all(stop - start <= FEW for _, start, stop in spans) and native.library() is not None)


class NativeStep:
    """The new tokens of one forward pass, packed end to end."""

    whole = True                                        # whether it may go through all layers at once (phases.py looks at each)

    def __init__(self, keys: "Tensor | KVStore", values: "Tensor | KVStore", spans: Sequence[Span], S: int):
        most = max(-(-stop // S) for _, _, stop in spans)
        self.keys, self.values = parts(keys), parts(values)
        self.positions = torch.tensor([i for _, start, stop in spans for i in range(start, stop)])                          # int64[T]
        self.owner = torch.tensor([b for b, (_, start, stop) in enumerate(spans) for _ in range(start, stop)])              # int64[T]
        tables = array("q")                                                                                                 # long ones are copied as they are
        for blocks, _, _ in spans:
            tables.extend([*blocks[:most], *[0] * (most - len(blocks))])
        self.tables = torch.frombuffer(tables, dtype=torch.int64).view(-1, most)                                            # int64[B, most]
        seen = sum((stop - start) * stop for _, start, stop in spans)
        self.places = native.Step.of(self.keys, self.values, self.positions, self.owner, self.tables, S, seen)
        self.kv_heads, self.vectors = self.keys[0].shape[3], self.keys[0].stride(0) // self.keys[0].shape[4]                # of a layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [T, G, D]; then let q: [T, H, D] look back, each token within its own sequence -> [T, H, D]."""
        return self.attend_turned(layer, torch.cat((q, k, v), 1).float(), None, None).to(q.dtype)

    def attend_turned(self, layer: int, qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """qkv: float32[T, H + 2 G, D], q and k not yet rotated unless cos and sin: [T, 1, D] are None -> [T, H, D]."""
        return native.attend(qkv, cos, sin, self.places, self.kv_heads, layer * self.vectors)

    def through(self, layers: native.Layers, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All layers at once, and the last norm. x: float32[T, C], which is written on -> [T, C], what the head multiplies."""
        return layers(x, cos, sin, self.places, self.vectors)

    def drafts(self, layers: native.Layers, x: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """What is drafted at this step's places: native.Layers.drafts."""
        return layers.drafts(x, cos, sin, self.places, self.vectors, *rest)
