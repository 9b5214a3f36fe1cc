"""TOUR.md as a site and as a notebook.

    mkdocs build --strict     the site, in site/: each section a chapter, beside the guides
    mkdocs serve              the same at http://localhost:8000/, rebuilt after each edit
    python docs/tour.py       tour.ipynb: each section, followed by its commands as cells

TOUR.md is the only source. For the site this file is a hook of mkdocs.yml. All documents have the
places that they have in the repository, so links between them stay as they are; only TOUR.md is
split. A link to any other file leads to the file in the repository.

Invariant: every command in a section is a cell, unless NOT_A_CELL names it.
Not covered: links to other sites are not checked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
GUIDES = ["docs/using.md", "docs/server.md", "results/README.md", "CONTRIBUTING.md"]
REPLAY = "docs/replay/index.html"  # the recorded session, which its chapter plays
PLAYER = f'<iframe src="{REPLAY}" width="100%" height="700"></iframe>'
# They copy the project, serve or train until they are stopped, or write files of the project.
NOT_A_CELL = ("exercise.py", "serve.py", "train.eagle", "bench.py", "cpu.accept")
SET_UP = """\
import os
import sys

if not os.path.exists("TOUR.md"):  # in Colab
    address = input("The address of this repository: ")
    !git clone --depth 1 {address} tour && pip install -q './tour[server]'
    %cd tour
# The cells below run the Python of this notebook.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
"""


# ---- TOUR.md


class Chapter(NamedTuple):
    """A section of TOUR.md, which is a chapter of the site."""

    part: str | None  # the title of the part that begins here
    text: str  # its title, in Markdown with links to the section's files, and what follows

    @property
    def name(self) -> str:
        return re.match("# (.+?)(: \\[|\n)", self.text)[1]

    @property
    def place(self) -> str:
        """On the site. It has no number, so a new section before this one does not change it."""
        return re.sub(r"[\W\d]+", "-", self.name.lower()).strip("-") + ".md"


def tour_sections() -> tuple[str, list[Chapter]]:
    """-> what comes before the first section, and the sections."""
    text = (ROOT / "TOUR.md").read_text(encoding="utf-8")
    first, *rest = re.split(r"^(?:# (.+)\n\n)?#(?=# )", text, flags=re.MULTILINE)
    return first, [*map(Chapter, rest[::2], rest[1::2])]


# ---- The notebook


def cell_commands(text: str) -> list[str]:
    """The commands in its sentences that a cell can run, each once."""
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = dict.fromkeys(re.findall(r"`(python [^`]+)`", sentences))
    return [command for command in found if not any(name in command for name in NOT_A_CELL)]


def prose_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(True)}


def code_cell(text: str) -> dict[str, Any]:
    return prose_cell(text) | {"cell_type": "code", "execution_count": None, "outputs": []}


def notebook() -> str:
    """The text of tour.ipynb."""
    first, found = tour_sections()
    cells = [prose_cell(first), code_cell(SET_UP)]
    for section in found:
        part = f"# {section.part}\n\n" if section.part else ""
        cells.append(prose_cell(f"{part}#{section.text}"))
        # %%sh stops the notebook at a command that fails; ! would not.
        cells += [code_cell(f"%%sh\n{command}") for command in cell_commands(section.text)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


# ---- The site: mkdocs calls the functions whose names begin with on_


def on_config(config: MkDocsConfig) -> None:
    """The navigation: the parts of the tour with their chapters, and the guides."""
    config.nav = [{"The project": "README.md"}, {"The tour": "TOUR.md"}]
    for section in tour_sections()[1]:
        if section.part:
            chapters: list[dict[str, str]] = []
            config.nav.append({section.part: chapters})
        chapters.append({section.name: section.place})
    config.nav.append({"Guides": GUIDES})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Every file has the place that it has in the repository; TOUR.md is split."""
    from mkdocs.structure.files import File

    first, found = tour_sections()
    for place, text in [("TOUR.md", first), *((each.place, each.text) for each in found)]:
        # A link to a section becomes one to its chapter.
        text = re.sub(r"\]\(#([\w-]+)\)", r"](\1.md)", text)
        text = text.replace(f"{REPLAY}) in a browser.\n", f"{REPLAY}) in a browser.\n\n{PLAYER}\n")
        files.append(File.generated(config, place, content=text))
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for pattern in ("[CR]*.md", "results/*.md", "results/*.svg", "docs/*.md", "docs/replay/*"):
        for path in ROOT.glob(pattern):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A document's text, with links to files that are not on the site."""
    source = f"{config.repo_url}/blob/HEAD" if config.repo_url else ROOT.as_uri()

    def link(found: re.Match[str]) -> str:
        path = urljoin(page.file.src_uri, found[1])
        return found[0] if path in files.src_uris else f"]({source}/{path}"

    return re.sub(r"\]\((?!https?:)([^)#\s]+)", link, markdown)


if __name__ == "__main__":
    (ROOT / "tour.ipynb").write_text(notebook(), encoding="utf-8")
