"""Tables of what bench.py measured: for a terminal, and for the documents.

A document names a file of results and some of its tables; `python bench.py --readme` writes these tables from that file
alone. A number within a sentence is a link to the file. The link's title says which number it is: table, row, column
and format, as in a table's template.

    <!-- figures of results/NAME.json: stack gammas -->  …  <!-- end of figures -->          no names: all tables
    [11.3x](results/NAME.json "stack; + KV cache; gain:ratio")

A note says, in measured numbers, where a technique does not do what it claims; it is written only while that is so.

Invariant: no figure is written by hand.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from errors import UserError
from measure.steps import LENGTHS, SIZES

Results = dict[str, Any]
MARKED = re.compile(
    r"(<!-- figures of (\S+?)(?:: ([\w ]+))? -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
LINKED = re.compile(r'\[[^][]*\](\((results/\S+\.json) "([^";]+); ([^";]+); ([^";]+)"\))')


class Section(NamedTuple):
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def format_bytes(count: float) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} B" if count else "0"


def format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


FORMATS: dict[str, Callable[[float], str]] = dict(
    bytes=format_bytes, seconds=format_seconds, ratio=format_ratio
)


def fill(template: str, row: Results) -> str:
    """The template with each `{name:spec}` replaced by the row's value, in the format spec; by "" if it is absent."""

    def value(found: re.Match[str]) -> str:
        given, spec = row.get(found[1], ""), found[2] or ""
        return (
            "" if given == "" else FORMATS[spec](given) if spec in FORMATS else format(given, spec)
        )

    return re.sub(r"{([\w. ]+):?(.*?)}", value, template)


class Table(NamedTuple):
    title: str  # a template, filled from the first row
    columns: Sequence[tuple[str, str]]  # header, template
    derive: Callable[[Results, Results], Results] = lambda row, first: {}  # more values for a row
    notes: Callable[[Results], list[str]] = lambda results: []

    def section(self, name: str, results: Results) -> Section:
        rows = [row | self.derive(row, results[name][0]) for row in results[name]]
        cells = [[fill(template, row) for _, template in self.columns] for row in rows]
        return Section(
            fill(self.title, rows[0]),
            [header for header, _ in self.columns],
            cells,
            self.notes(results),
        )


def stack_notes(results: Results) -> list[str]:
    """Notes: where a technique did not do what it claims, and what drafts cost in the same run."""
    notes = []
    for row in results["stack"]:
        name, gain = row["name"].removeprefix("+ "), format_ratio(row["gain"])
        if "speed" in row["claims"] and row["gain"] < 1.03:
            notes.append(f"{name}: no gain in speed here ({gain} the row before).")
        if row["claims"] == "memory" and row["gain"] < 0.97:
            notes.append(f"{name}: for memory; {gain} the tokens a second of the row before.")
    draft, batch = (
        next(r for r in results["stack"] if word in r["name"])
        for word in ("speculation", "batching")
    )
    return [
        *notes,
        f"Measured cost chose a mean γ of {draft['drafted']:.2g} for one text and of {batch['drafted']:.2g} for "
        f"{batch['in_flight']} texts together; a drafted token costs {draft['draft_cost']:.2f} of a plain pass.",
        "Ratios are medians over turns, not quotients of the columns. INT4 and INT8 weights are another model, so "
        "texts differ.",
    ]


TABLES = dict(
    stack=Table(
        "Everything together: {texts} requests that arrive at once and begin alike, temperature 0, float32",
        [
            ("", "{name}"),
            ("tokens/s", "{tokens_per_second:.0f}"),
            ("time to first token", "{first_token:seconds}"),
            ("KV cache", "{cache_bytes:bytes}"),
            ("of a text", "{each:bytes}"),
            ("weights", "{weight_bytes:bytes}"),
            ("times the row before", "{gain:ratio}"),
            ("times the first", "{speed_up:ratio}"),
            ("same texts", "{same_texts} of {texts}"),
        ],
        lambda row, first: dict(
            each=row["cache_bytes"] / row["in_flight"], gain="" if row is first else row["gain"]
        ),
        stack_notes,
    ),
    gammas=Table(
        "Speculation, tiny with tiny-draft, {dtype}, temperature 1, one text at a time",
        [
            ("γ", "{gamma}"),
            ("acceptance α", "{acceptance:.2f}"),
            ("a draft's cost c", "{draft_cost:.2f}"),
            ("a pass's cost w", "{pass_cost:.2f}"),
            ("measured", "{speed_up:ratio}"),
            ("formula", "{formula:ratio}"),
            ("formula, w = 1", "{formula_flat:ratio}"),
        ],
        lambda row, first: (
            dict(gamma=f"by the clock: {row['drafted']:.1f}") if row["gamma"] is None else {}
        ),
        lambda results: [
            "Costs are over a plain step. Formula: (1 − α^(γ+1)) / (1 − α) / (w + γ c)."
        ],
    ),
    bits=Table(
        "Perplexity of {tokens:,} tokens {source}",
        [
            ("weights", "{weights}"),
            ("KV bits", "{kv}"),
            ("bytes", "{bytes:bytes}"),
            ("a token's keys and values", "{kv_bytes:bytes}"),
            ("perplexity", "{perplexity:.3f}"),
            ("", "{loss:+.2f} %"),
        ],
        lambda row, first: dict(
            source=f"of {row['text']}" if row["text"] else "that tiny told",
            loss=100 * (row["perplexity"] / first["perplexity"] - 1),
        ),
    ),
    waste=Table(
        "The same memory, 8 · 1024 tokens, in rows or in blocks; texts of 300 tokens on average",
        [
            ("layout", "{layout}"),
            ("texts in flight", "{texts_in_flight:.1f}"),
            ("wasted", "{waste:.1%}"),
        ],
    ),
    latency=Table(
        "Short texts, and prompts of 900 tokens that arrive among them, "
        "at half the pace at which this machine can make them",
        [
            ("a step reads at most", "{step}"),
            *(
                (f"{what} {told}", f"{{{what.split()[0]}_{p}:seconds}}")
                for what in ("between tokens", "first token")
                for p, told in (("p50", "p50"), ("p99", "p99"), ("p100", "at worst"))
            ),
        ],
    ),
    parallel=Table(
        "One model over several processes of this CPU (they share its cores): a token after 100 others",
        [
            ("model", "{name}"),
            ("processes", "{processes}"),
            ("tokens/s of one", "{one:.1f}"),
            ("of all together", "{many:.1f}"),
            ("times one", "{ratio:ratio}"),
            ("a token's bytes", "{bytes:bytes}"),
        ],
    ),
    steps=Table(
        "A step of so many rows, after 100 tokens, and a prompt: in float32, and times as fast",
        [
            ("model", "{target}"),
            ("CPU", "{code}"),
            ("weights", "{width}"),
            *(
                (size.replace("rows", "rows ").replace("prompt", "prompt of "), f"{{{size}}}")
                for size in SIZES
            ),
        ],
        lambda row, first: {
            size: format_ratio(row[size])
            if row["width"].startswith("INT")
            else format_seconds(row[f"{size}_seconds"])
            for size in SIZES
            if size in row
        },
    ),
    summary=Table(
        "One text at a time, against other programs: the same model and prompts, in turns",
        [
            ("model", "{target}"),
            ("ours", "{ours}"),
            ("tokens/s", "{tokens_per_second:.0f}"),
            ("of the read bandwidth", "{bandwidth:.0%}"),
            ("over transformers float32", "{transformers float32:ratio}"),
            ("over llama.cpp q8_0", "{llama.cpp q8_0:ratio}"),
            ("over llama.cpp q4_0", "{llama.cpp q4_0:ratio}"),
            ("prompt of 512: over transformers", "{prompt transformers float32:ratio}"),
            ("over llama.cpp q8_0", "{prompt llama.cpp q8_0:ratio}"),
        ],
    ),
    peers=Table(
        "Against others: the same prompts and weights, in turns; the ratios of long prompts, until the first "
        "token, and of sixteen texts together",
        [
            ("model", "{target}"),
            ("CPU", "{code}"),
            ("ours", "{ours}"),
            ("theirs", "{peer}"),
            ("tokens/s, theirs", "{tokens_per_second:.1f}, {peer_tokens_per_second:.1f}"),
            ("ratio", "{ratio:ratio}"),
            ("of the read bandwidth", "{bandwidth:.0%}"),
            ("same texts", "{same_texts} of {texts}"),
            ("ready after, theirs", "{seconds:seconds}, {peer_seconds:seconds}"),
            ("memory, theirs", "{memory:bytes}, {peer_memory:bytes}"),
            *((f"prompt of {n}", f"{{prompt{n}:ratio}}") for n in LENGTHS),
            ("sixteen texts", "{together:ratio}"),
        ],
    ),
)


def summary(peers: Sequence[Results]) -> list[Results]:
    """A row for each of our models and widths, with all peers in it; of runs held down to fewer instructions none."""
    rows: dict[tuple[str, ...], Results] = {}
    for row in (row for row in peers if row["code"].startswith("its own")):
        own = rows.setdefault((row["target"], row["ours"]), dict(row))
        own |= {row["peer"]: row["ratio"], f"prompt {row['peer']}": row.get("prompt512", "")}
    return list(rows.values())


def sections(results: Results, names: Sequence[str] = ()) -> list[Section]:
    """Sections in reading order: of these names, or all but the summary and with the GPU cases, which have headers."""
    found = results | {name: list(results.get(name, {}).values()) for name in ("steps", "peers")}
    found["summary"] = summary(found["peers"]) if names else []
    gpu = [] if names else results.get("gpu", {}).values()
    wanted = [name for name in TABLES if name in (names or TABLES) and found.get(name)]
    return [
        *(TABLES[name].section(name, found) for name in wanted),
        *(Section(case["title"], case["headers"], case["rows"], case["notes"]) for case in gpu),
    ]


def text(section: Section) -> str:
    """A section for a terminal: columns side by side, the first aligned left, the others right."""
    table = [section.headers, *section.rows]
    first, *others = [max(map(len, column)) for column in zip(*table)]
    lines = [
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in table
    ]
    return "\n".join([section.title, *lines, *section.notes])


def markdown(section: Section) -> str:
    line = lambda cells: "| " + " | ".join(cells) + " |"
    table = [
        line(section.headers),
        "|---" + "|---:" * (len(section.headers) - 1) + "|",
        *map(line, section.rows),
    ]
    notes = [*(f"- {note}" for note in section.notes), ""] if section.notes else []
    return "\n".join([f"**{section.title}**", "", *table, "", *notes])


def machine_line(results: Results) -> str:
    return (
        f"{results['machine']}, {results['threads']} threads, torch {results['torch']}, {results['date']}; "
        f"this machine reads {results['read_bandwidth'] / 1e9:.3g} GB/s"
    )


def renewed(document: str, load: Callable[[Path], Results]) -> str:
    """The document with tables and numbers renewed from the results that they name. ValueError for a missing number."""

    def figures(found: re.Match[str]) -> str:
        results = load(Path(found[2]))
        tables = "\n".join(map(markdown, sections(results, (found[3] or "").split())))
        return f"{found[1]}Measured by `python bench.py`: {machine_line(results)}.\n\n{tables}{found[4]}"

    def number(found: re.Match[str]) -> str:
        table, derive = load(Path(found[2])).get(found[3], {}), TABLES[found[3]].derive
        rows = (
            table if isinstance(table, list) else [dict(row, key=key) for key, row in table.items()]
        )
        rows = [row | derive(row, rows[0]) for row in rows if found[4] in map(str, row.values())]
        if not rows or not (told := fill(f"{{{found[5]}}}", rows[0])):
            raise UserError(
                f"{found[2]} has no {found[5]} of {found[4]} in {found[3]}: name a number that is there"
            )
        return f"[{told}]{found[1]}"

    return LINKED.sub(number, MARKED.sub(figures, document))
