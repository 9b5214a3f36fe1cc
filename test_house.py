"""The plan of the house: imports go one way, from the folders to the root."""
import ast
from collections.abc import Iterator

import pytest

from conftest import ROOT

FOLDERS = {"": set(), "train": {"train"}, "measure": {"train", "measure"}}    # imported beside the root


def imports(node: ast.AST) -> Iterator[str]:
    """The modules that it imports, in functions too; not what only a program does, under `if __name__ == "__main__"`."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    if isinstance(node, ast.ImportFrom):
        yield node.module or ""
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder):
    for file in (ROOT / folder).glob("*.py"):
        found = {name.split(".")[0] for name in imports(ast.parse(file.read_text(encoding="utf-8")))}
        assert found & FOLDERS.keys() <= FOLDERS[folder] or file.name == "bench.py", file
