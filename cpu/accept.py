"""Record which definitions of the pages C and Triton stand in for: `python -m cpu.accept`.

The pages run in plain PyTorch, on the examples of the self-test and on short texts with every kind
of draft. What each operation of `kernels.Ops` calls, directly or through others, is what a backend
replaces when it overrides the operation. edits.json gets these definitions, and digests of them.
Run it after a change of a page, when `pytest cpu` (and on a GPU `pytest gpu`) has shown that the
backends compute what the page now says. `python -m cpu.accept FILE` writes another file.

Invariant: what is written depends on the pages alone.
Not covered: definitions that no example here runs.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cpu import selftest
from edits import FOLDER, RECORD, definitions, digest, file_digest
from kernels import Linear, Ops
from quant import Quantized

# A backend stores a weight so that its own operations read it.
READERS = {"pack_weight": ("embed", "linear")}
CHOICES = ("dtypes", "warm_up")  # which a backend adds to, and does not replace


@contextmanager
def calls_of_operations() -> Iterator[dict[str, set[str]]]:
    """Within it, each operation that runs -> the definitions that it calls. It is filled as the
    pages run."""
    calls = defaultdict(set)
    active = []  # operations that are running, the innermost last
    names = {}  # of code: its definition, or ""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in names:
            names[code] = name_of(Path(code.co_filename), code.co_firstlineno)
        name = names[code]
        operation = operation_of(name)
        if event == "call":
            if operation:
                active.append(operation)
            for each in active if name else ():
                calls[each].add(name)
        elif operation:
            active.pop()

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def name_of(file: Path, line: int) -> str:
    """The definition of a page of the root that begins in this line; empty if there is none."""
    if file.parent != FOLDER or not file.exists():
        return ""
    for name, node in definitions(file.name).items():
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        if first == line:
            return f"{file.name}: {name}"
    return ""


def operation_of(name: str) -> str:
    """The operation whose plain code this definition is; empty if there is none."""
    operation = name.removeprefix("kernels.py: Ops.")
    return "" if operation == name else operation


@cache
def origins(page: str) -> dict[str, str]:
    """The names that a page imports from other pages -> these pages."""
    found = {}
    for node in ast.parse((FOLDER / page).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (FOLDER / f"{node.module}.py").exists():
            found |= {each.name: f"{node.module}.py" for each in node.names}
    return found


def named_in(name: str) -> Iterator[str]:
    """The functions and assigned names of pages that this definition names."""
    page, definition = name.split(": ")
    for node in ast.walk(definitions(page)[definition]):
        if isinstance(node, ast.Name):
            origin = origins(page).get(node.id, page)
            if node.id in definitions(origin):
                yield f"{origin}: {node.id}"


def closure(names: set[str]) -> set[str]:
    """These definitions, and all that they name: a run sees no branch that it does not take."""
    found = set()
    new = names
    while new:
        found |= new
        new = {read for name in new for read in named_in(name)} - found
    return found


def run_the_pages() -> None:
    """Call every operation in plain PyTorch, in each way in which a backend may answer."""
    plain = Ops()
    x = selftest.waves(3, selftest.K)
    for weight in selftest.weights().values():
        if isinstance(weight, Quantized):  # texts multiply by the others
            plain.linear(x, Linear(weight))
            plain.embed(torch.arange(3), Linear(weight), x.dtype)
    for examples in (selftest.between_products, selftest.attentions):
        for _ in examples(plain):
            pass
    asked = dict(max_tokens=8, gamma=3, seed=1)
    filters = dict(top_k=50, top_p=0.9, min_p=0.01, temperature=0.8)
    target = Model.load("tiny", "cpu", torch.float32, plain=True)
    for way in (
        dict(draft="tiny-draft", **filters),
        dict(draft="tiny-draft", verify="coupled", kv_bits=8, **filters),
        dict(draft="tiny-draft", verify="token"),
        dict(draft="tiny-eagle", kv_bits=4),
        dict(draft="self", kv="contiguous", temperature=0),
    ):
        generate(["Once upon a time", "Lily"], target, **asked, **way)


def new_record() -> dict[str, Any]:
    """What edits.json holds."""
    with calls_of_operations() as calls:
        run_the_pages()
    for operation, readers in READERS.items():
        calls[operation].update(*(calls[each] for each in readers))
    replaced = sorted(calls.keys() - {*CHOICES})
    operations = {operation: sorted(closure(calls[operation])) for operation in replaced}
    pages = {}
    for name in sorted(set().union(*operations.values())):
        page, definition = name.split(": ")
        _, digests = pages.setdefault(page, (file_digest(page), {}))
        digests[definition] = digest(definitions(page)[definition])
    return {"operations": operations, "pages": {page: [*pair] for page, pair in pages.items()}}


def main(file: str | Path = RECORD) -> None:
    """file: where the record goes."""
    text = json.dumps(new_record(), indent=1)
    Path(file).write_text(text + "\n", encoding="utf-8")
    print(f"{file} is written")


if __name__ == "__main__":
    from generate import generate
    from loading import Model

    main(*sys.argv[1:])
