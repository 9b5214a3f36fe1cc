"""The project's pages, and their syntax trees."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "app", "checkpoint", "cpu", "gpu", "train", "measure", "docs")


def is_page(path: Path) -> bool:
    """Whether it is code that a reader reads: no test, and not only a docstring."""
    if path.name.startswith(("test", "conftest")):
        return False
    return path.read_text(encoding="utf-8").count("\n") > 3


PAGES = [
    path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py")) if is_page(path)
]


@cache
def tree(page: Path) -> ast.Module:
    return ast.parse(page.read_text(encoding="utf-8"))


def nodes(tree: ast.AST) -> int:
    """Without contexts (Load, Store) and the module itself, which are no reading."""
    return sum(not isinstance(node, (ast.expr_context, ast.Module)) for node in ast.walk(tree))


@cache
def size(page: Path) -> int:
    return nodes(tree(page))
