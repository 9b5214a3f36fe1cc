"""The documents: figures are those of results/*.json, code is that of the pages, commands parse,
links lead somewhere."""

import ast
import re
import runpy
import shlex
import sys
import textwrap
from importlib.util import find_spec
from urllib.parse import unquote

import pytest

import automaton
import bounds
import grammar
import settings
from app.flags import generate_flags, server_flags
from checkpoint import sandbox
from docs.tour import notebook
from exercise import exercise_flags
from test_house import ENGINE, ORDER
from testing.pages import FOLDERS, PAGES, ROOT, nodes, tree
from testing.programs import program

for name in ("bench", "train.distill", "train.quantize", "cpu", "gpu"):
    pytest.importorskip(name, reason="README.md is that of the whole tree")
if not (ROOT / "README.md").exists():
    pytest.skip("a copy of exercise.py has no documents", allow_module_level=True)
import bench
from train import distill, quantize

NAMES_OF_DOCUMENTS = (*bench.DOCUMENTS, "docs/server.md", "CONTRIBUTING.md")
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES_OF_DOCUMENTS}
README = DOCUMENTS["README.md"]
TOUR = DOCUMENTS["TOUR.md"]
EVERY = "\n".join(DOCUMENTS.values())
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
MODULES = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in NAMES]
DEMONSTRATIONS = ("sampling", "gamma", "speculative", "train.bpe", "kernels")  # the quick ones


# ---- Figures


def test_tables_and_pictures_are_those_of_the_results():
    for name, text in DOCUMENTS.items():
        assert bench.with_figures(text) == text, f"{name}: bench.py --readme"
    assert "<!-- memory of models -->" in EVERY
    for name, picture in bench.all_pictures(DOCUMENTS.values()).items():
        stored = (ROOT / "results" / f"{name}.svg").read_text(encoding="utf-8")
        assert stored == picture, "bench.py --readme"
        assert f"results/{name}.svg" in README + TOUR


def test_the_table_of_bounds_is_that_of_the_code():
    """A row's numbers, in order. At each bound, and beyond it, there is a test of its page."""
    pytest.importorskip("app.server", reason="the extra 'server' is not installed")
    from app import asgi, connections, fields, openai, server

    after = DOCUMENTS["docs/server.md"].partition("<!-- bounds -->")[2]
    table = after.partition("<!-- end of bounds -->")[0]
    rows = [line.split("|")[1:3] for line in table.strip().splitlines()[2:]]
    told = []
    for cells in rows:
        numbers = re.findall(r"\d[\d,]*", " ".join(cells))
        told.append([int(number.replace(",", "")) for number in numbers])
    assert told == [
        [connections.MAX_HEAD],
        [connections.HEAD_SECONDS],
        [connections.MAX_CONNECTIONS],
        [asgi.MAX_BODY, asgi.PATIENCE],
        [fields.MAX_BRACKETS],
        [server.SMALL_BODY, server.MAX_HELD],
        [server.SMALL_BODY, server.LARGE_BODIES],
        [asgi.PATIENCE],
        [],
        [openai.MAX_CHOICES],
        [],
        [openai.MAX_STOPS, openai.MAX_STOP_CHARACTERS],
        [settings.MAX_LOGPROBS],
        [openai.MAX_ECHOED],
        [
            settings.MAX_GRAMMAR,
            bounds.MAX_PATTERN_CHARACTERS,
            bounds.MAX_NAMES,
            bounds.MAX_REMAINDERS,
        ],
        [server.MAX_COMPILING, server.COMPILE_SECONDS],
        [automaton.LIMITS["step_max_items"], 1000 * grammar.SLOW_MASK, 1000 * grammar.SLOW_STEP],
        [automaton.REMEMBERED],
        [sandbox.SECONDS, sandbox.LONGEST],
        [server.MAX_WATCHERS],
    ]


def test_the_replay_is_the_page_with_a_session_that_shows_everything():
    """As .ci/replay.py writes it; .ci/page.py plays it in a browser."""
    before, after = (ROOT / "app" / "page.html").read_text(encoding="utf-8").split(">null<")
    replay = (ROOT / "docs" / "replay" / "index.html").read_text(encoding="utf-8")
    assert replay.startswith(before) and replay.endswith(after), "run .ci/replay.py"
    recording = replay[len(before) : -len(after)]
    assert len(recording) < 200_000
    for seen in 'waiting preempted accepted corrected bonus shared":[1-9] drafts":[1-9]'.split():
        assert re.search(f'"{seen}', recording), seen


# ---- Links and the map


def anchors(document: str) -> list[str]:
    """The anchors that GitHub makes of a document's titles."""
    titles = re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    found = []
    for title in titles:
        words = re.sub(r"\]\([^)]*\)", "", title).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def test_links_lead_somewhere():
    for name, text in DOCUMENTS.items():
        for link in re.findall(r"\]\(([^)\s]+)", text):
            target, _, anchor = link.partition("#")
            if link.startswith("http"):
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            assert path.exists(), f"{name}: {link}"
            if anchor:
                document = path.resolve().relative_to(ROOT.resolve()).as_posix()
                assert anchor in anchors(DOCUMENTS[document]), f"{name}: {link}"


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(tmp_path):
    """And every section is a chapter, with its code and its folded answers. mkdocs itself, with
    --strict, finds links between documents that lead nowhere."""
    pytest.importorskip("material", reason="the extra 'docs' is not installed")
    done = program("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    chapters = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    del chapters[tmp_path / "docs" / "replay" / "index.html"]  # a page of its own
    whole = "".join(chapters.values())
    others = len(chapters) - TOUR.count("\n## ")  # the start of the tour, and the guides
    assert whole.count("<h1") == len(chapters) and others < 10
    assert whole.count("<details") == TOUR.count("<details markdown>") > 20
    assert whole.count("<iframe") == 1  # the recorded session
    assert whole.count('class="filename"') == TOUR.count("```python ") > 20
    for page, text in chapters.items():
        assert 'src="file:' not in text, f"{page.name}: a picture that is not on the site"
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            address, _, anchor = unquote(link.removeprefix("file://")).partition("#")
            if address.startswith("http") or page.name == "404.html":
                continue
            target = (page.parent / address).resolve() if address else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or f'id="{anchor}"' in chapters[target], f"{page.name}: {link}"


def test_the_notebook_is_that_of_the_tour():
    stored = (ROOT / "tour.ipynb").read_text(encoding="utf-8")
    assert stored == notebook(), "python docs/tour.py"


def test_there_is_one_order_of_reading():
    """README's map has a row for each page of the root, in the order of TOUR's titles, and the
    engine first; then for each folder, and for bench.py."""
    mapped = re.findall(r"^\| `([\w./]+)` \|[^|]+\|[^|]+\|$", README, re.MULTILINE)
    titles = re.findall(r"^## \d+\. .*$", TOUR, re.MULTILINE)
    toured = re.findall(r"\]\((\w+\.py)\)", "\n".join(titles))
    n = len(ORDER)
    assert mapped[: len(ENGINE)] == [f"{name}.py" for name in ENGINE]
    assert mapped[:n] == toured and sorted(toured) == sorted(f"{name}.py" for name in ORDER)
    assert sorted(mapped[n:]) == sorted([*(f"{name}/" for name in FOLDERS if name), "bench.py"])
    numbers = [int(re.search(r"\d+", title)[0]) for title in titles]
    assert numbers == [*range(1, len(titles) + 1)]


def test_the_engine_is_as_long_as_it_says():
    pages = [ROOT / f"{name}.py" for name in ENGINE]
    lines = sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages)
    there = (
        f"{len(pages)} pages, {lines:,} lines ({sum(nodes(tree(page)) for page in pages):,} nodes"
    )
    told = re.findall(r"The engine: (\d+ pages, [\d,]+ lines \([\d,]+ nodes)", README)
    rounded = re.sub(r"\d\d(?= lines| nodes)", "00", there)
    assert told == [rounded], f'README.md, "The pages": there are {there}'


def test_the_first_screen_has_a_number_of_the_results():
    """The least ratio of all machines, in 8 bits beside llama.cpp in 8 bits."""
    ratios = []
    for path in (ROOT / "results").glob("*.json"):
        for row in bench.load_results(path).get("peers", {}).values():
            if row["ours"] in ("INT8", "GGUF q8_0") and row["peer"] == "llama.cpp q8_0":
                ratios.append(row["ratio"])
    (told,) = re.findall(r"least\s+([\d.]+) times as many tokens a second as llama.cpp", README)
    assert told == f"{int(10 * min(ratios)) / 10}"


# ---- Code


def test_code_in_the_tour_is_that_of_the_pages():
    pattern = r'^In `([\w.]+)`:\n\n```python title="(\S+)"\n(.*?)\n```$'
    pieces = re.findall(pattern, TOUR, re.DOTALL | re.MULTILINE)
    assert len(pieces) == TOUR.count("```python") >= 15
    for name, page, code in pieces:
        node = tree(ROOT / page)
        for part in name.split("."):
            node = next(child for child in ast.walk(node) if getattr(child, "name", "") == part)
        lines = (ROOT / page).read_text(encoding="utf-8").split("\n")[node.lineno : node.end_lineno]
        wanted = code.count("\n") + 1
        windows = ("\n".join(lines[i : i + wanted]) for i in range(len(lines)))
        assert code in map(textwrap.dedent, windows), (page, code)


def test_the_python_in_it_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = block.splitlines()
    if find_spec("llguidance") is None:
        lines = [line for line in lines if "the extra server" not in line]
    names: dict[str, object] = {}
    exec("\n".join(lines), names)
    assert capsys.readouterr().out.strip()
    assert names["logits"].shape[0] == 3


@pytest.mark.parametrize("page", DEMONSTRATIONS)
def test_a_page_shows_its_claim(page, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{page}.py"])
    runpy.run_path(str(ROOT / f"{page.replace('.', '/')}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.slow
def test_nothing_runs_at_import():
    usable = [name for name in MODULES if find_spec("triton") or not name.startswith("gpu.")]
    done = program("-c", "import " + ", ".join(usable))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- Commands


def commands() -> set[str]:
    """Every command of the documents: in blocks, in indented lines, and within sentences."""
    found = re.findall(r"`(python (?:-m )?[\w.]+[^`\n]*)`", EVERY)
    for block in re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE):
        found += [line.split("  #")[0].strip() for line in block.splitlines()]
    for line in EVERY.splitlines():
        if line.startswith("    python "):
            found.append(line.strip().split("   ")[0])
    return set(found)


def parse_bench(flags: list[str]) -> None:
    bench.parse_bench([flag.replace("PEER", "transformers") for flag in flags])


PARSERS = {
    "serve.py": server_flags,
    "generate.py": generate_flags,
    "bench.py": parse_bench,
    "exercise.py": exercise_flags,
    "train.quantize": quantize.parse_flags,
    "train.distill": distill.parse,
}


def test_commands_are_accepted():
    """Their flags parse, and their files are there."""
    assert len(commands()) > 30
    for command in commands():
        words = shlex.split(command.split("|")[-1].split("&&")[-1])
        if words[0] != "python" or words[1] == "-c":
            known = (".", "python", "python3", "pytest", "printf", "echo", "pip")
            assert words[0] in known, command
            continue
        page, *flags = [word for word in words[1:] if word not in ("-m", "…", "--help")]
        assert page in (*NAMES, *MODULES, "pytest"), command
        if flags and page in PARSERS:
            PARSERS[page](flags)
