"""Tables of what bench.py measured: for a terminal, and for the front page.

    sections(results)  ->  [Section(title, headers, rows, notes)]          one for each thing that was measured
    text(section) · markdown(section)                                      the same, to look at and to be kept in README.md

README.md names a file of results between two markers, and what stands there is made from that file alone, by one command:

    <!-- figures of results/NAME.json -->  …  <!-- end of figures -->      python bench.py --readme

A note says, in measured numbers, where a technique does not do what it claims. It is made here, of the same results: it goes when the
reason goes.

Invariant: no figure is written by hand.
"""
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Results = dict[str, Any]
MARKED = re.compile(r"(<!-- figures of (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


class Section(NamedTuple):
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


# ---- Numbers, in words ----------------------------------------------------------------------------------------------------------

def size(count: float) -> str:
    """Bytes, to three digits."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} B" if count else "0"


def span(seconds: float) -> str:
    """Seconds, to three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def times(ratio: float) -> str:
    return f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


def machine(results: Results) -> str:
    """The line under every table."""
    return (f"{results['machine']}, {results['threads']} threads, torch {results['torch']}, {results['date']}; "
            f"this machine reads {results['read_bandwidth'] / 1e9:.3g} GB/s")


# ---- The sections ---------------------------------------------------------------------------------------------------------------

def stack(results: Results) -> Section:
    rows, first = results["stack"], results["stack"][0]
    headers = ("", "tokens/s", "first token", "keys and values", "a text", "weights", "times the row before", "times the first", "same texts")
    cells = [(row["name"], f"{row['tokens_per_second']:.0f}", span(row["first_token"]), size(row["cache_bytes"]), size(row["cache_bytes"] / row["in_flight"]),
              size(row["weight_bytes"]), times(row["gain"]) if row is not first else "", times(row["speed_up"]),
              f"{row['same_texts']} of {row['texts']}") for row in rows]
    title = f"Everything together: {first['texts']} requests that arrive at once and begin alike, temperature 0, float32"
    return Section(title, headers, cells, remarks(results))


def remarks(results: Results) -> list[str]:
    """Where a technique did not do what it is for, and why, by what was measured beside it; and what another is not for."""
    rows, said = {row["name"]: row for row in results["stack"]}, []
    cost = {(p["bits"], p["rows"]): p["microseconds"] for p in results["products"]}
    paths = {p["bits"]: p["path"] for p in results["products"]}
    draft = next(row for name, row in rows.items() if "speculation" in name)
    batch = next(row for name, row in rows.items() if "batching" in name)
    for name, row in rows.items():
        if "speed" in row["claims"] and row["gain"] < 1.03:
            said.append(f"{name[2:] if name[0] == '+' else name}: no gain in speed here ({times(row['gain'])} the row before).")
        if row["claims"] == "memory" and row["gain"] < 0.97:
            said.append(f"{name[2:]}: for memory; it makes {times(row['gain'])} the tokens a second of the row before.")
    said.append(f"One row by a matrix of the model: {cost[32, 1]:.0f} µs in float32, {cost[8, 1]:.0f} µs in INT8, {cost[4, 1]:.0f} µs in INT4"
                f"{', which becomes numbers first' if paths[4] == 'tiles' else ''}; "
                f"16 rows: {cost[32, 16]:.0f}, {cost[8, 16]:.0f} and {cost[4, 16]:.0f} µs.")
    said.append(f"By the clock, the draft guesses {draft['drafted']:.2g} tokens a round for one text, of which each costs {draft['draft_cost']:.2f} of a plain pass, "
                f"and {batch['drafted']:.2g} where {batch['in_flight']} share a pass.")
    return said


def gammas(results: Results) -> Section:
    rows = results["gammas"]
    cells = [(str(row["gamma"]) if row["gamma"] is not None else f"by the clock: {row['drafted']:.1f}", f"{row['acceptance']:.2f}", f"{row['draft_cost']:.2f}",
              f"{row['pass_cost']:.2f}" if "pass_cost" in row else "", times(row["speed_up"]), times(row["formula"]) if "formula" in row else "",
              times(row["formula_flat"]) if "formula_flat" in row else "") for row in rows]
    return Section(f"Speculation, tiny with tiny-draft, {rows[0]['dtype']}, temperature 1, one text at a time",
                   ("γ", "acceptance α", "a draft's cost c", "a pass's cost w", "measured", "formula", "formula, w = 1"), cells,
                   ["Costs are over a plain step. Formula: (1 − α^(γ+1)) / (1 − α) / (w + γ c)."])


def bits(results: Results) -> Section:
    rows = results["bits"]
    cells = [(row["weights"], row["kv"], size(row["bytes"]), size(row["kv_bytes"]), f"{row['perplexity']:.3f}",
              f"{100 * (row['perplexity'] / rows[0]['perplexity'] - 1):+.2f} %")
             for row in rows]
    return Section(f"Perplexity of {rows[0]['tokens']:,} tokens {'of ' + rows[0]['text'] if rows[0]['text'] else 'that tiny told'}",
                   ("weights", "KV bits", "bytes", "a token's keys and values", "perplexity", ""), cells)


def waste(results: Results) -> Section:
    rows = results["waste"]
    cells = [(row["layout"], f"{row['texts_in_flight']:.1f}", f"{row['waste']:.1%}") for row in rows]
    return Section("The same memory, 8 · 1024 tokens, in rows or in blocks; texts of 300 tokens on average", ("layout", "texts in flight", "wasted"), cells)


def latency(results: Results) -> Section:
    rows = results["latency"]
    cells = [(row["step"], *(span(row[f"{what}_p{percent}"]) for what in ("between", "first") for percent in (50, 95, 99))) for row in rows]
    return Section("Short texts, and prompts of 900 tokens that arrive among them, at half the pace at which this machine can make them",
                   ("a step reads at most", *(f"{what} p{percent}" for what in ("between tokens", "first token") for percent in (50, 95, 99))), cells)


def peers(results: Results) -> Section:
    cells = [(row["target"], row["ours"], row["peer"], f"{row['tokens_per_second']:.1f}", f"{row['peer_tokens_per_second']:.1f}", times(row["ratio"]),
              f"{row['bandwidth']:.0%}", f"{row['same_texts']} of {row['texts']}") for row in results["peers"].values()]
    return Section("Against others: the same prompts and weights, one text at a time, in turns",
                   ("model", "ours", "theirs", "tokens/s", "theirs", "ratio", "of the read bandwidth", "same texts"), cells)


def gpu(results: Results) -> list[Section]:
    """The cases of gpu.py bring their own headers."""
    cells = lambda rows: [[cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row] for row in rows]
    return [Section(case["title"], case["headers"], cells(case["rows"]), case.get("notes", ())) for case in results.get("gpu", {}).values()]


SECTIONS: dict[str, Callable[[Results], Section]] = dict(stack=stack, gammas=gammas, bits=bits, waste=waste, latency=latency, peers=peers)


def sections(results: Results) -> list[Section]:
    """What was measured, in reading order."""
    return [make(results) for name, make in SECTIONS.items() if results.get(name)] + gpu(results)


# ---- Where they are shown -------------------------------------------------------------------------------------------------------

def text(section: Section) -> str:
    """For a terminal: columns side by side, the first to the left, the others to the right."""
    table = [section.headers, *section.rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in table]
    return "\n".join([section.title, *lines, *section.notes])


def markdown(section: Section) -> str:
    """For README.md."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    table = [line(section.headers), "|---" + "|---:" * (len(section.headers) - 1) + "|", *map(line, section.rows)]
    return "\n".join([f"**{section.title}**", "", *table, "", *(f"- {note}" for note in section.notes), *([""] if section.notes else [])])


def front_page(readme: str, load: Callable[[Path], Results]) -> str:
    """README.md with what stands between its markers made anew of the results that they name."""
    def figures(found: re.Match[str]) -> str:
        results = load(Path(found[2]))
        return found[1] + "\n".join([f"Measured by `python bench.py`: {machine(results)}.", "", *map(markdown, sections(results))]) + found[3]
    return MARKED.sub(figures, readme)
