"""Tables of what bench.py measured, in Markdown.

A document names a file of results and some of its tables; `python bench.py --readme` writes these
tables from that file alone (no names: all tables).

    <!-- figures of results/NAME.json: stack drafts -->  …  <!-- end of figures -->
    <!-- machines -->  …  <!-- end of machines -->    a row for each file of results

Invariant: no figure is written by hand.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from measure.steps import PROMPTS, ROWS

Results = dict[str, Any]
MARKED = re.compile(
    r"(<!-- figures of (?P<results>\S+?)(?:: ([\w ]+))? -->\n).*?(<!-- end of figures -->)",
    re.DOTALL,
)
MACHINES = re.compile("(<!-- machines -->\n).*?(<!-- end of machines -->)", re.DOTALL)


class Section(NamedTuple):
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


# ---- Numbers -------------------------------------------------------------------------------------


def format_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B" if count else "0"


FORMATTERS = {
    "bytes": format_bytes,
    "seconds": lambda seconds: f"{1e3 * seconds:.4g} ms",
    "ratio": lambda ratio: f"{ratio:.3g}x",
    "rate": lambda seconds: f"{1 / seconds:,.0f}",
}


class CellFormatter(Formatter):
    """`{name:seconds}`, as str.format would."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec in FORMATTERS:
            return FORMATTERS[spec](value)
        return format(value, spec)


def fill_template(template: str, row: Results) -> str:
    """The template with the row's values; "" if one is missing."""
    measured = {name: value for name, value in row.items() if value is not None}
    try:
        return CellFormatter().vformat(template, (), measured)
    except KeyError:
        return ""


# ---- Tables --------------------------------------------------------------------------------------


class Table(NamedTuple):
    title: str  # a template, filled from the first row
    columns: dict[str, str]  # header -> template

    def section(self, rows: Sequence[Results]) -> Section:
        """Without the columns of which no row has anything."""
        columns = {}
        for header, template in self.columns.items():
            cells = [fill_template(template, row) for row in rows]
            if any(cells):
                columns[header] = cells
        title = fill_template(self.title, rows[0])
        return Section(title, [*columns], [[*row] for row in zip(*columns.values())])


TABLES = {
    "stack": Table(
        "One technique added to the other, temperature 0: one request, then many that arrive at "
        "once and begin alike",
        {
            "model": "{target}",
            "requests": "{texts}",
            "": "{name}",
            "tokens/s": "{tokens_per_second:.0f}",
            "time to first token": "{first_token:seconds}",
            "KV cache": "{cache_bytes:bytes}",
            "weights": "{weight_bytes:bytes}",
            "times the row before": "{gain:ratio}",
            "times the first": "{speed_up:ratio}",
            "texts of the row before": "{same_texts} of {texts}",
        },
    ),
    "drafts": Table(
        "Drafts, one text at a time; a draft's cost over that of a plain token",
        {
            "target": "{target}",
            "draft": "{draft}",
            "temperature": "{temperature:.0f}",
            "γ": "{gamma}",
            "acceptance by position": "{acceptance}",
            "tokens a round": "{tokens_per_round:.2f}",
            "a draft's cost": "{draft_cost:.2f}",
            "times plain": "{speed_up:ratio}",
            "same texts": "{same_texts} of {texts}",
        },
    ),
    "bits": Table(
        "Perplexity of {tokens:,} tokens that tiny told",
        {
            "weights": "{weights}",
            "KV bits": "{kv}",
            "bytes": "{bytes:bytes}",
            "a token's keys and values": "{kv_bytes:bytes}",
            "perplexity": "{perplexity:.3f}",
            "more": "{loss:+.2%}",
        },
    ),
    "waste": Table(
        "The same memory, 8 · 1024 tokens, in rows or in blocks; texts of 300 tokens on average",
        {
            "layout": "{layout}",
            "texts in flight": "{texts_in_flight:.1f}",
            "wasted": "{waste:.1%}",
        },
    ),
    "steps": Table(
        "A step of so many rows, after 100 tokens, and a prompt: in float32, and times as fast",
        {"model": "{target}", "weights": "{width}"}
        | {f"rows {n}": f"{{rows{n}_seconds:seconds}}, {{rows{n}:ratio}}" for n in ROWS}
        | {f"prompt {n}": f"{{prompt{n}_seconds:seconds}}, {{prompt{n}:ratio}}" for n in PROMPTS},
    ),
    "grammars": Table(
        "Sixteen texts with a JSON schema each: what masks take of a token's time, and the time to "
        "a first mask",
        {
            "model": "{target}",
            "vocabulary": "{vocab_size:,}",
            "share": "{share:.1%}",
            "first mask": "{first_mask:seconds}",
        },
    ),
    "invariance": Table(
        "The same request alone, among 4 and among 16, temperature 0",
        {
            "model": "{target}",
            "program": "{program}",
            "requests": "{requests}",
            "with more than one output": "{varying}",
            "outputs in all": "{outputs}",
        },
    ),
    "peers": Table(
        "Against others: the same model and prompts, in turns. Prompt of N: their time to the "
        "first token over ours; sixteen texts: the ratio of tokens a second, all together; empty: "
        "not measured",
        {
            "model": "{target}",
            "ours": "{ours}",
            "theirs": "{peer}",
            "tokens/s: ours, theirs": "{tokens_per_second:.1f}, {peer_tokens_per_second:.1f}",
            "ratio": "{ratio:ratio}",
            "ours, of the memory bandwidth": "{bandwidth:.0%}",
            "same texts": "{same_texts} of {texts}",
            "perplexity: ours, theirs": "{perplexity:.2f}, {peer_perplexity:.2f}",
        }
        | {f"prompt of {n}": f"{{prompt{n}:ratio}}" for n in PROMPTS}
        | {"sixteen texts": "{together:ratio}"},
    ),
}

A_MACHINE = Table(
    "Every machine: tokens per second of tiny in INT8, for one request and with everything for 16; "
    "the time of a prompt of 512; the best gain by tiny-draft; SmolLM2 in INT8 beside llama.cpp "
    "q8_0; empty: not measured",
    {
        "machine": "{machine}",
        "instructions": "{instructions}",
        "threads": "{threads}",
        "memory": "{read_bandwidth:bytes}/s",
        "one request": "{rows1_seconds:rate}",
        "16 requests": "{tokens_per_second:,.0f}",
        "prompt": "{prompt512_seconds:seconds}",
        "drafts": "{best:ratio}",
        "beside llama.cpp": "{ratio:ratio}",
        "last run": "{date}",
    },
)
IN_BRIEF = Table(  # of "peers"
    "The same model and prompts, in turns, each width beside another program's. Prompt of 512: "
    "their time to the first token over ours",
    {
        "our weights": "{ours}",
        "beside": "{peer}",
        "tokens/s: ours, theirs": "{tokens_per_second:.1f}, {peer_tokens_per_second:.1f}",
        "ratio": "{ratio:ratio}",
        "prompt of 512": "{prompt512:ratio}",
        "perplexity: ours, theirs": "{perplexity:.2f}, {peer_perplexity:.2f}",
    },
)
SAME_WIDTH = [
    ("float32", "transformers float32"),
    ("float32", "OpenVINO float32"),
    ("bfloat16", "transformers bfloat16"),
    ("bfloat16", "OpenVINO bfloat16"),
    ("INT8", "llama.cpp q8_0"),
    ("INT8", "OpenVINO int8"),
    ("INT4", "llama.cpp q4_0"),
    ("INT4, groups of 32", "llama.cpp q4_0"),
    ("INT4, groups of 32", "llama.cpp q4_1"),
    ("INT4", "OpenVINO int4"),
    ("INT4, groups of 32", "OpenVINO int4"),
]


def in_brief(peers: list[Results]) -> list[Results]:
    """The first model's rows in which both programs read about as many bytes."""
    first = peers[0]["target"]
    pairs = {(row["ours"], row["peer"]): row for row in peers if row["target"] == first}
    return [pairs[pair] for pair in SAME_WIDTH if pair in pairs]


def rows_of(results: Results, name: str) -> list[Results]:
    """The rows of a section; where rows have names, these keep those of other runs."""
    rows = results.get(name, [])
    return list(rows.values()) if isinstance(rows, dict) else rows


def sections(results: Results, names: Sequence[str] = ()) -> list[Section]:
    """Sections in reading order, and the GPU cases: those of these names, or all. "brief" has
    rows of "peers"."""
    found = []
    if "brief" in names:
        found.append(IN_BRIEF.section(in_brief(rows_of(results, "peers"))))
    for name, table in TABLES.items():
        rows = rows_of(results, name)
        if rows and name in (names or TABLES):
            found.append(table.section(rows))
    for name, case in results.get("gpu", {}).items():
        if name in (names or results["gpu"]):
            found.append(Section(case["title"], case["headers"], case["rows"]))
    return found


def machines(files: Sequence[Results]) -> Section:
    """A row for each file of results: the machine, and what it has of four sections."""
    rows = []
    for results in files:
        peer = results.get("peers", {}).get("smollm2, INT8, llama.cpp q8_0", {})
        step = results.get("steps", {}).get("tiny, INT8", {})
        together = results.get("stack", [{}])[-1]
        drafts = [row for row in rows_of(results, "drafts") if row["draft"] == "tiny-draft"]
        best = max((row["speed_up"] for row in drafts), default=None)
        rows.append(results | step | together | {"ratio": peer.get("ratio"), "best": best})
    return A_MACHINE.section(rows)


# ---- Documents -----------------------------------------------------------------------------------


def markdown(section: Section) -> str:
    rule = ["---"] + ["---:"] * (len(section.headers) - 1)
    rows = [f"| {' | '.join(row)} |" for row in (section.headers, rule, *section.rows)]
    return "\n".join([f"**{section.title}**", "", *rows, ""])


def machine_line(results: Results) -> str:
    return (
        f"{results['machine']} ({results['instructions'] or 'GPU'}), {results['threads']} threads, "
        f"torch {results['torch']}, {results['date']}; bandwidth of its "
        f"last run: {results['read_bandwidth'] / 1e9:.3g} GB/s"
    )


def with_machines(document: str, files: Sequence[Results]) -> str:
    """The document with its table of machines made anew from all results."""
    return MACHINES.sub(lambda found: found[1] + markdown(machines(files)) + found[2], document)


def with_tables(document: str, load: Callable[[Path], Results]) -> str:
    """The document with its tables made anew from the results that it names."""

    def tables(found: re.Match[str]) -> str:
        begin, path, names, end = found.groups()
        results = load(Path(path))
        measured = f"Measured by `python bench.py`: {machine_line(results)}."
        made = sections(results, (names or "").split())
        return "\n".join([begin + measured, "", *map(markdown, made)]) + end

    return MARKED.sub(tables, document)
