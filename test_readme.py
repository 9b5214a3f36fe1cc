"""The front page: its figures are those of results/*.json, its commands are accepted, its map is complete."""
import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

import bench
import generate
import pictures
import quant
import report
from conftest import program

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS += [line.strip() for line in README.splitlines() if line.startswith("    python ")]
COMMANDS += re.findall(r"`(python [\w.]+\.py[^`\n]*)`", README)
QUICK = ("sampling", "gamma", "speculative", "bpe", "kernels")             # the others' demonstrations run in .ci/run


def pages() -> set[str]:
    return {path.name for path in HERE.glob("*.py") if not path.name.startswith("test_") and path.name != "conftest.py"}


def test_tables_and_pictures_are_those_of_the_results():
    results = bench.load(bench.named(README))
    assert results and report.front_page(README, bench.load) == README, "python bench.py --readme"
    for name, drawn in pictures.draw(results).items():
        assert (HERE / "results" / f"{name}.svg").read_text(encoding="utf-8") == drawn, "python bench.py --pictures"
        assert f"results/{name}.svg" in README


def test_the_map_has_every_page_and_no_other():
    mapped = re.findall(r"^\| `(\w+\.py)` \|[^|]+\|[^|]+\|$", README, re.MULTILINE)
    assert len(mapped) == len(set(mapped)) and set(mapped) <= pages() and pages() <= set(mapped)


def test_a_page_builds_on_pages_above_it():
    """In reading order: at module level nothing is imported from further down."""
    mapped = re.findall(r"^\| `(\w+)\.py` \|", README, re.MULTILINE)
    for i, page in enumerate(mapped):
        for node in ast.parse((HERE / f"{page}.py").read_text(encoding="utf-8")).body:
            imported = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not set(imported) & set(mapped[i:]), page


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_is_accepted(command):
    """Its flags parse, and its files are there."""
    words = shlex.split(command.split("|")[-1].split("&&")[-1])
    if words[0] == "python" and words[1] != "-c":
        assert words[1] == "-m" or words[1] in pages() or "<" in words[1], command
        flags = [word for word in words[2:] if word not in ("…", "--help")]
        if words[1] == "generate.py":
            generate.check_flags(generate.parser().parse_args(flags))
        elif words[1] == "bench.py":
            bench.parser().parse_args([re.sub("^(PEER)$", "transformers", flag) for flag in flags])
        elif words[1] == "quant.py" and flags:
            quant.parse(flags)
    else:
        assert words[0] in ("python", "python3", "pytest", "printf", "echo", "pip"), command


def test_the_python_in_it_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    found: dict[str, object] = {}
    exec(block, found)
    assert capsys.readouterr().out.strip() and found["logits"].shape[0] == 3


@pytest.mark.parametrize("page", QUICK)
def test_a_page_shows_its_claim(page, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{page}.py"])
    importlib.import_module(page).main()
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.meanwhile(program, "-c", "import " + ", ".join(sorted(page.removesuffix(".py") for page in pages())))
def test_nothing_runs_at_import(meanwhile):
    done = meanwhile()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
