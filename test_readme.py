"""The front page: its figures are those of results/*.json, its commands are accepted, its map is complete."""
import re
import runpy
import shlex
import sys
from types import SimpleNamespace

import pytest

import cli
from conftest import PAGES, ROOT, program
from test_house import FOLDERS, ORDER

bench, distill, quantize, _, _ = (pytest.importorskip(name, reason="README.md is that of the whole tree")
                                  for name in ("bench", "train.distill", "train.quantize", "cpu", "gpu"))

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS += [line.strip() for line in README.splitlines() if line.startswith("    python ")]
COMMANDS += re.findall(r"`(python (?:-m )?[\w.]+[^`\n]*)`", README)
PARSERS = {"generate.py": lambda flags: cli.check_flags(cli.parser().parse_args(flags, SimpleNamespace(profiled=True))),
           "bench.py": lambda flags: bench.parse_bench(
               [f.replace("PEER", "transformers") for f in flags]),
           "quant.py": quantize.parse_flags, "train.distill": distill.parse}
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
MODULES = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in NAMES]
MAPPED = re.findall(r"^\| `([\w./]+)` \|[^|]+\|[^|]+\|$", README, re.MULTILINE)
QUICK = ("sampling", "gamma", "speculative", "train.bpe", "kernels")       # the others' demonstrations run in .ci/run


def test_tables_and_pictures_are_those_of_the_results():
    results = bench.load_results(bench.named(README))
    assert results and bench.report.front_page(README, bench.load_results) == README, "python bench.py --readme"
    for name, drawn in bench.pictures.draw_all(results).items():
        assert (ROOT / "results" / f"{name}.svg").read_text(encoding="utf-8") == drawn, "python bench.py --readme"
        assert f"results/{name}.svg" in README


def test_the_map_has_every_page_and_folder_in_the_order_of_imports():
    assert MAPPED == [*(f"{name}.py" for name in ORDER), *(f"{folder}/" for folder in FOLDERS), "bench.py"]


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
