"""The documents: figures are those of results/*.json, code is that of the pages, commands are accepted, the map is
complete."""

import ast
import re
import runpy
import shlex
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from app import cli
from conftest import PAGES, ROOT, program
from test_house import FOLDERS, ORDER, tree

bench, distill, quantize, _, _ = (
    pytest.importorskip(name, reason="README.md is that of the whole tree")
    for name in ("bench", "train.distill", "train.quantize", "cpu", "gpu")
)

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in bench.DOCUMENTS
}
README, TOUR, EVERY = DOCUMENTS["README.md"], DOCUMENTS["TOUR.md"], "\n".join(DOCUMENTS.values())
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS += [
    line.strip().split("   ")[0] for line in EVERY.splitlines() if line.startswith("    python ")
]
COMMANDS += re.findall(r"`(python (?:-m )?[\w.]+[^`\n]*)`", EVERY)
PARSERS = {
    "generate.py": lambda flags: cli.check_flags(
        cli.parser().parse_args(flags, SimpleNamespace(profiled=True))
    ),
    "bench.py": lambda flags: bench.parse_bench([f.replace("PEER", "transformers") for f in flags]),
    "quant.py": quantize.parse_flags,
    "train.distill": distill.parse,
}
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
MODULES = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in NAMES]
MAPPED = re.findall(r"^\| `([\w./]+)` \|[^|]+\|[^|]+\|$", README, re.MULTILINE)
QUICK = (
    "sampling",
    "gamma",
    "speculative",
    "train.bpe",
    "kernels",
)  # the others' demonstrations run in .ci/run


def test_tables_numbers_and_pictures_are_those_of_the_results():
    for name, text in DOCUMENTS.items():
        assert bench.report.renewed(text, bench.load_results) == text, (
            f"{name}: python bench.py --readme"
        )
    for name, drawn in bench.pictures.draw_all(bench.load_results(bench.named(README))).items():
        assert (ROOT / "results" / f"{name}.svg").read_text(encoding="utf-8") == drawn, (
            "python bench.py --readme"
        )
        assert f"results/{name}.svg" in README + TOUR
    assert {path.name for path in (ROOT / "results").glob("*.json")} == set(
        re.findall(r"figures of results/([\w.-]+)", EVERY)
    )


def test_the_front_page_is_short_and_its_links_lead_somewhere():
    assert README.count("\n") < 250
    for name, text in DOCUMENTS.items():
        for link in re.findall(r"\]\(([^)\s]+)", text):
            target, _, part = link.partition("#")
            assert (
                link.startswith("http")
                or (ROOT / name).parent.joinpath(target).exists()
                or (ROOT / target).exists()
            ), link
            if part:
                titles = re.findall(r"^#+ (.*)$", DOCUMENTS[target or name], re.MULTILINE)
                plain = [
                    re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title).lower()).replace(
                        " ", "-"
                    )
                    for title in titles
                ]
                assert part in plain, (link, plain)


def test_code_in_the_tour_is_that_of_the_pages():
    pieces = re.findall(
        r"^In `([\w.]+)`:\n\n```python (\S+)\n(.*?)\n```$", TOUR, re.DOTALL | re.MULTILINE
    )
    assert len(pieces) == TOUR.count("```python") >= 15
    for name, page, code in pieces:
        node: Any = tree(ROOT / page)
        for part in name.split("."):
            node = next(child for child in ast.walk(node) if getattr(child, "name", "") == part)
        lines, wanted = (
            (ROOT / page).read_text(encoding="utf-8").split("\n")[node.lineno : node.end_lineno],
            code.count("\n") + 1,
        )
        assert code in (
            textwrap.dedent("\n".join(lines[i : i + wanted])) for i in range(len(lines))
        ), (page, code)


def test_the_map_has_every_page_and_folder_in_the_order_of_imports():
    assert MAPPED == [
        *(f"{name}.py" for name in ORDER),
        *(f"{folder}/" for folder in FOLDERS),
        "bench.py",
    ]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_is_accepted(command):
    """Its flags parse, and its files are there."""
    words = shlex.split(command.split("|")[-1].split("&&")[-1])
    if words[0] == "python" and words[1] != "-c":
        page, *flags = (word for word in words[1:] if word not in ("-m", "…", "--help"))
        assert page in (*NAMES, *MODULES, "pytest"), command
        if flags and page in PARSERS:
            PARSERS[page](flags)
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
    runpy.run_path(str(ROOT / f"{page.replace('.', '/')}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.meanwhile(program, "-c", "import " + ", ".join(MODULES))
def test_nothing_runs_at_import(meanwhile):
    done = meanwhile()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
