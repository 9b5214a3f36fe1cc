"""What you read is what runs: C and Triton replace a function only while it is unchanged.

Backends (cpu/, gpu/) override operations of `kernels.Ops` with code that does the same, faster. If
you change a page, that code no longer does what the page says. So edits.json lists, for each
operation, the definitions that it runs in plain PyTorch, directly or through others, with a digest
of each. `put_back` compares them when a model is loaded. If a definition has changed, its
operations run as the page is written, and a warning names the definition. When the backends and the
pages agree again (`pytest cpu`, `pytest gpu`), `python -m cpu.accept` writes edits.json.

A digest is computed from the syntax tree, so comments, docstrings and layout do not matter.

Invariant: a backend overrides an operation only if none of the operation's definitions has changed.
Cost: 3 ms at start. A page that has changed is parsed, which takes 5 to 15 ms.
Not covered: functions that a program replaces while it runs.
"""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

from kernels import Ops

FOLDER = Path(__file__).parent
RECORD = FOLDER / "edits.json"


def file_digest(page: str) -> str:
    return hashlib.sha256((FOLDER / page).read_bytes()).hexdigest()


def digest(definition: ast.AST) -> str:
    """16 hexadecimal digits for a function or an assignment, the same in every Python version."""
    return hashlib.sha256(repr(plain_tree(definition)).encode()).hexdigest()[:16]


def plain_tree(node: Any) -> Any:
    """A syntax tree as nested lists, without docstrings, line numbers and empty fields."""
    if isinstance(node, list):
        return [plain_tree(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    parts = [type(node).__name__]
    for name, value in fields.items():
        if value not in (None, []) and name not in ("ctx", "kind"):
            parts += [name, plain_tree(value)]
    return parts


@cache
def definitions(page: str) -> dict[str, ast.AST]:
    """A page's functions, methods ("Llama.forward") and assigned names, by name."""
    found = {}
    for node in ast.parse((FOLDER / page).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = method
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found[ast.unparse(target)] = node
    return found


@cache
def changed() -> dict[str, list[str]]:
    """The operations with changed definitions -> these definitions ("model.py: Llama.rope")."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    edited = set()
    for page, (whole, digests) in record["pages"].items():
        if file_digest(page) == whole:
            continue
        for name, recorded in digests.items():
            definition = definitions(page).get(name)
            if definition is None or digest(definition) != recorded:
                edited.add(f"{page}: {name}")
    found = {}
    for operation, names in record["operations"].items():
        stale = sorted(edited & {*names})
        if stale:
            found[operation] = stale
    return found


def put_back(ops: Ops) -> set[str]:
    """Undo a backend's overrides of operations with changed definitions, so that these run as the
    pages are written -> the names of these operations."""
    operations = set()
    names = set()
    for operation, stale in changed().items():
        plain = getattr(Ops, operation)
        if getattr(type(ops), operation) is not plain:
            setattr(ops, operation, MethodType(plain, ops))
            operations.add(operation)
            names.update(stale)
    if names:
        language, *_ = ops.language.split()
        warnings.warn(
            f"{', '.join(sorted(names))}: changed, so the page runs as written, without {language} "
            "(slower)"
        )
    return operations


def main() -> None:
    """Demonstration: how many definitions each operation has, and which of them have changed."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for operation, names in record["operations"].items():
        stale = changed().get(operation, [])
        print(f"{operation:14}{len(names):4} definitions; changed: {', '.join(stale) or 'none'}")


if __name__ == "__main__":
    main()
