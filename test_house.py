"""The plan of the house: imports go one way, a page reads at first sight, one name has one meaning.

Size and density are counted in nodes of the syntax tree, as a reader takes them in: packing a line
changes nothing. There is no limit on lines. ruff checks the rest: columns, branches, parameters.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from generate import Engine
from loading import Model, load_draft
from request import Request, Settings
from settings import Options
from testing.pages import PAGES, ROOT, nodes, size, tree

ORDER = (
    "errors settings sampling quant parallel devices kernels edits flash kvcache paged model "
    "tokenizer bounds automaton grammar request speculative gamma drafters eagle lookup runner "
    "batcher proof loading generate serve museum exercise"
).split()  # the root's: a page imports pages before it
ENGINE = (
    "generate model kernels kvcache sampling tokenizer request paged speculative drafters "
    "runner batcher"
).split()  # in the order of reading: what the rest stands on
WINGS = {  # the pages of checkpoint/ that a page of the root may import
    "model": {"checkpoint.load", "checkpoint.weights"},
    "tokenizer": {
        f"checkpoint.{page}"
        for page in "vocabulary pieces gguf gguf_vocabulary hub chat files".split()
    },
    "eagle": {"checkpoint.weights"},
    "exercise": {"app.shell"},
    "loading": {f"checkpoint.{page}" for page in "eagle generation hub load".split()},
}
BACKEND = {*ORDER[: ORDER.index("paged")], "speculative", "drafters", "eagle", "runner"} - {"flash"}
MAY_IMPORT = {
    "checkpoint": {"checkpoint", *ORDER},
    "app": {"app", "checkpoint", *ORDER},
    "cpu": {"cpu"} | BACKEND,
    "gpu": {"gpu"} | BACKEND,
    "train": {"train", "app", "checkpoint", *ORDER},
    "measure": {"measure", "train", "app", "checkpoint", "cpu", "gpu", *ORDER},
    "docs": set(),
}
MACHINE = {"cuda", "triton", "native"}  # words for devices.py and kernels.py, but for these:
ALLOWED = {
    "speculative.py": "the clock",
    "runner.py": "the clock",
    "gamma.py": "the clock",
    "generate.py": "a docstring",
}
SEVERAL = {"main", "ops"}  # names that several pages define; ops: the seam of cpu/ and gpu/

NODES_A_LINE = 7.5
NODES_A_LINE_OF_A_FUNCTION = 14  # at the root
NODES = 118_250
NODES_OF_THE_ROOT = 36_950
NODES_OF_TESTS = 185_600  # and of .ci

TESTS = [
    path
    for pattern in ("*test*.py", "*/test*.py", "testing/*.py", ".ci/*.py")
    for path in ROOT.glob(pattern)
]


# ---- Counting nodes of syntax trees


def code_lines(text: str, parsed: ast.Module) -> int:
    """Lines that hold code: no docstring, comment or blank line."""
    words = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                words.update(range(node.lineno, node.end_lineno + 1))
    lines = [line for i, line in enumerate(text.split("\n"), 1) if i not in words]
    return sum(is_code(line) for line in lines)


def is_code(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def density(function: ast.FunctionDef, text: str) -> float:
    """Nodes a line of a function's body, its docstring aside."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0.0
    lines = text.split("\n")[body[0].lineno - 1 : function.end_lineno]
    return sum(map(nodes, body)) / max(1, sum(map(is_code, lines)))


def test_pages_read_at_first_sight():
    """Density: nodes a line of a page, of a function; no conditional inside another."""
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        text = page.read_text(encoding="utf-8")
        parsed = tree(page)
        a_line = size(page) / max(1, code_lines(text, parsed))
        if a_line > NODES_A_LINE:
            found.append(f"{name}: {a_line:.2f} nodes a line")
        for node in ast.walk(parsed):
            if isinstance(node, ast.IfExp):
                inner = sum(isinstance(child, ast.IfExp) for child in ast.walk(node))
                if inner > 1:
                    found.append(f"{name}:{node.lineno}: a conditional inside another")
            if isinstance(node, ast.FunctionDef) and page.parent == ROOT:
                is_long = node.end_lineno - node.lineno > 3
                if is_long and density(node, text) > NODES_A_LINE_OF_A_FUNCTION:
                    found.append(f"{name}: {node.name} {density(node, text):.1f} nodes a line")
    assert not found, "\n".join(found)


def test_there_is_not_too_much_to_read():
    grown = "there is more to read: shorten something, or raise this number on purpose"
    root = [page for page in PAGES if page.parent == ROOT]
    for paths, most in ((root, NODES_OF_THE_ROOT), (PAGES, NODES), (TESTS, NODES_OF_TESTS)):
        assert sum(map(size, paths)) <= most, grown


# ---- The caller's program

FOLLOW_THE_CALLER = (  # what they make has torch.get_default_dtype(), or has it if it is no integer
    "empty zeros ones full eye tensor as_tensor scalar_tensor rand randn normal linspace logspace"
).split()


def leaves_dtype_open(call: ast.Call) -> bool:
    """Whether it makes a tensor whose dtype the caller's program may choose. Of tensor([…]) nobody
    sees at the call whether it gets whole numbers (or none, which are floats), so it names its
    dtype, too; arange, which counts, needs a name only where it counts in fractions."""
    owner = getattr(call.func, "value", None)
    name = getattr(call.func, "attr", "")
    fractions = any(isinstance(getattr(each, "value", None), float) for each in call.args)
    follows = name in FOLLOW_THE_CALLER or (name == "arange" and fractions)
    is_named = any(keyword.arg == "dtype" for keyword in call.keywords)
    return getattr(owner, "id", "") == "torch" and follows and not is_named


def test_no_tensor_has_the_dtype_that_the_callers_program_prefers():
    """torch.set_default_dtype is the caller's. train/, measure/ and demonstrations are programs of
    their own."""
    found = []
    for page in PAGES:
        for node in tree(page).body:
            is_demonstration = getattr(node, "name", "") == "main"
            if is_demonstration or page.parent.name in ("train", "measure"):
                continue
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and leaves_dtype_open(call):
                    found.append(f"{page.name}:{call.lineno}: {ast.unparse(call)}")
    assert not found, "\n".join(found)


# ---- Imports


def is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(node: ast.AST) -> Iterator[str]:
    """The modules that it imports, in functions, too: but not for types, or as a program."""
    if is_main(node) or is_for_types(node):
        return
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    if isinstance(node, ast.ImportFrom):
        yield node.module or ""
        yield from (f"{node.module}.{name.name}" for name in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def module_name(page: Path) -> str:
    return ".".join(page.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def graph() -> dict[str, set[str]]:
    """The project's modules -> those of the project that each imports."""
    names = {module_name(page): page for page in PAGES}
    return {name: set(imports(tree(page))) & names.keys() - {name} for name, page in names.items()}


def test_root_is_these_pages_and_imports_go_one_way():
    root = {page.stem for page in PAGES if page.parent == ROOT}
    assert root - {"bench"} == {*ORDER}
    for name, imported in graph().items():
        if name in ORDER:
            of_root = {module for module in imported if "." not in module}
            assert of_root & {*ORDER} <= {*ORDER[: ORDER.index(name)]}, name
            beside = {module for module in imported if "." in module} - WINGS.get(name, set())
            assert not beside, f"{name} imports {beside}"


def test_folders_import_what_they_may():
    for name, imported in graph().items():
        folder = name.split(".")[0]
        if folder in MAY_IMPORT:
            owners = {module.split(".")[0] for module in imported}
            assert owners <= MAY_IMPORT[folder], f"{name} imports {owners - MAY_IMPORT[folder]}"


def test_there_is_no_circle_of_imports():
    waiting = dict(graph())
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs & waiting.keys()]
        assert ready, f"a circle among {sorted(waiting)}"
        for name in ready:
            del waiting[name]


def test_nobody_asks_twice_what_the_machine_is():
    for page in PAGES:
        if page.parent == ROOT and page.name not in (
            "devices.py",
            "kernels.py",
            "flash.py",
            "bench.py",
            *ALLOWED,
        ):
            words = set(re.findall(r"\w+", page.read_text(encoding="utf-8")))
            assert not words & MACHINE, f"{page.name}: {words & MACHINE}"


def test_a_public_name_has_one_meaning():
    owners = defaultdict(set)
    for page in PAGES:
        for node in tree(page).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                owners[node.name].add(page.relative_to(ROOT).as_posix())
    several = {name: pages for name, pages in owners.items() if len(pages) > 1}
    assert {name: pages for name, pages in several.items() if name not in SEVERAL} == {}


@pytest.mark.parametrize("draft, most", [(None, 12), ("tiny-draft", 13), ("ngram", 14)])
def test_a_token_visits_few_pages(draft, most, monkeypatch):
    """A step after the prompt, and a round of speculation, as plain torch computes them."""
    monkeypatch.setenv("LLAMA_PLAIN", "1")
    model = Model.load("tiny", "cpu", torch.float32)
    engine = Engine(model, load_draft(draft, model), Options(max_len=100, max_batch=1), tokens=200)
    settings = Settings(1.0, seed=1, max_tokens=40, gamma=3)
    engine.batcher.add(Request(model.encode("Once upon a time"), settings, model.eos_token_ids))
    for _ in range(2):
        engine.batcher.step()
    visited = set()
    sys.setprofile(lambda frame, event, argument: visited.add(frame.f_code.co_filename))
    grown = engine.batcher.step()
    sys.setprofile(None)
    pages = [page for page in PAGES if str(page) in visited]
    assert grown and len(pages) <= most, [page.name for page in pages]
