"""TOUR.md as a site and as a notebook.

    mkdocs build --strict     the site, in site/: each section a chapter, beside the guides
    mkdocs serve              the same at http://localhost:8000/, rebuilt after each edit
    python docs/tour.py       tour.ipynb: each section, followed by its commands as cells

TOUR.md is the only source. For the site this file is a hook of mkdocs.yml: it adds the chapters to
the pages of docs/ and adjusts the links of all documents. A link to a document leads to that
document's page. A link to any other file leads to the file in the repository.

Invariant: every command in a section is a cell, unless NOT_A_CELL names it.
Not covered: links to other sites are not checked.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
GUIDES = {  # other documents -> their places on the site, in the order of the navigation
    "README.md": "project.md",
    "docs/using.md": "using.md",
    "docs/server.md": "server.md",
    "results/README.md": "measurements.md",
    "CONTRIBUTING.md": "contributing.md",
}
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


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- TOUR.md


class Section(NamedTuple):
    """A section of TOUR.md."""

    part: str | None  # the title of the part that begins here
    title: str  # in Markdown, with links to the section's files
    body: str

    @property
    def name(self) -> str:
        return self.title.split(": [")[0]

    @property
    def place(self) -> str:
        """On the site. It has no number, so a new section before this one does not change it."""
        return re.sub(r"[\W\d]+", "-", self.name.lower()).strip("-") + ".md"

    @property
    def anchor(self) -> str:
        """The one that GitHub gives the title."""
        words = re.sub(r"\]\([^)]*\)", "", self.title).lower()
        return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def sections() -> tuple[str, list[Section]]:
    """-> what comes before the first section, and the sections."""
    first, *rest = re.split(r"^(?:# (.+)\n\n)?## (.+)\n", read("TOUR.md"), flags=re.MULTILINE)
    return first, [Section(*rest[i : i + 3]) for i in range(0, len(rest), 3)]


# ---- The notebook


def commands(text: str) -> list[str]:
    """The commands in its sentences that a cell can run, each once."""
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = dict.fromkeys(re.findall(r"`(python [^`]+)`", sentences))
    return [command for command in found if not any(name in command for name in NOT_A_CELL)]


def prose(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(True)}


def code(text: str) -> dict[str, Any]:
    return prose(text) | {"cell_type": "code", "execution_count": None, "outputs": []}


def notebook() -> str:
    """The text of tour.ipynb."""
    first, found = sections()
    cells = [prose(first), code(SET_UP)]
    for section in found:
        part = f"# {section.part}\n\n" if section.part else ""
        cells.append(prose(f"{part}## {section.title}\n{section.body}"))
        # %%sh stops the notebook at a command that fails; ! would not.
        cells += [code(f"%%sh\n{command}") for command in commands(section.body)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


# ---- The site: mkdocs calls on_config and on_files


def on_config(config: MkDocsConfig) -> None:
    """The navigation: the parts of the tour with their chapters, and the guides."""
    parts: dict[str, list[dict[str, str]]] = {}
    for section in sections()[1]:
        if section.part:
            chapters = parts.setdefault(section.part, [])
        chapters.append({section.name: section.place})
    guides = {"Guides": [*GUIDES.values()]}
    config.nav = [{"The tour": "index.md"}, *({part: parts[part]} for part in parts), guides]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the chapters, the guides and the pictures to the files of docs/."""
    from mkdocs.structure.files import File

    first, found = sections()
    documents = [("index.md", "TOUR.md", first)]
    documents += [(each.place, "TOUR.md", f"# {each.title}\n{each.body}") for each in found]
    documents += [(place, name, read(name)) for name, place in GUIDES.items()]
    places = {f"docs/{name}": name for name in files.src_uris} | GUIDES | {"TOUR.md": "index.md"}
    places |= {f"TOUR.md#{each.anchor}": each.place for each in found}
    source = f"{config.repo_url}/blob/HEAD" if config.repo_url else ROOT.as_uri()
    for picture in (ROOT / "results").glob("*.svg"):
        name = f"results/{picture.name}"
        places[name] = name
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    for place, name, text in documents:
        if place in files.src_uris:  # a guide in docs/
            files.remove(files.src_uris[place])
        content = for_mkdocs(text, name, places, source)
        files.append(File.generated(config, place, content=content))


def for_mkdocs(text: str, document: str, places: dict[str, str], source: str) -> str:
    """The text of a document, as mkdocs reads it.

    places: a document, a section ("TOUR.md#glossary") or a picture -> its place on the site.
    source: the address of the repository's files, for links to all others.
    """

    def link(found: re.Match[str]) -> str:
        target, mark, anchor = found[1].partition("#")
        path = document
        if target:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        place = places.get(path, f"{source}/{path}") + mark + anchor
        return f"]({places.get(path + mark + anchor, place)})"

    text = re.sub(r"^```python (\S+)$", r'```python title="\1"', text, flags=re.MULTILINE)
    text = text.replace("<details>", "<details markdown>")
    return re.sub(r"\]\((?!https?:)([^)\s]+)\)", link, text)


if __name__ == "__main__":
    (ROOT / "tour.ipynb").write_text(notebook(), encoding="utf-8")
