"""Pictures of what bench.py measured, as SVG, which is text that every browser draws.

Each picture is a chart of horizontal bars, with a background, so that it looks the same on light
and dark pages.

Invariant: the same results give the same picture, to the byte.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from measure.report import SAME_WIDTH, Results, fill_template, rows_of

INK = "#1f2328"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
WIDTH = 900  # pixels
LEFT = 250  # where bars begin
LONGEST = 250  # bar
ROW = 28  # height of a row
TOP = 54


class Picture(NamedTuple):
    """A bar for each row that has all values of its label and words."""

    title: str  # a template (report.py), filled from the first row
    label: str  # a template
    words: str  # a template, of the text behind the bar
    length: Callable[[Results], float]  # of the bar; the longest one fills the chart
    is_drawn: Callable[[Results], bool] = bool


PICTURES = {
    "stack": Picture(
        "{target}: one technique added to the other",
        "{name}",
        "{tokens_per_second:.0f} tokens/s · {gain:ratio} · weights {weight_bytes:bytes} · KV cache "
        "{cache_bytes:bytes}",
        lambda row: row["tokens_per_second"],
    ),
    "drafts": Picture(
        "Speculation, {target}, temperature 1: times as fast as plain decoding",
        "{draft}, γ = {gamma}",
        "{speed_up:ratio} · {tokens_per_round:.2f} tokens a round",
        lambda row: row["speed_up"],
        lambda row: (row["target"], row["temperature"]) == ("tiny, float32", 1),
    ),
    "bits": Picture(
        "Fewer bits: the rise of perplexity, and bytes of the weights",
        "{weights}, KV {kv}",
        "{loss:+.2%} · {bytes:bytes}",
        lambda row: max(0.0, row["loss"]),
    ),
    "invariance": Picture(
        "{target}: requests whose output changes in batches of 1, 4 and 16 (temperature 0)",
        "{program}",
        "{varying} of {requests}",
        lambda row: row["varying"] / row["requests"],
    ),
    "peers": Picture(
        "{target}, one text: times as fast as another program",
        "{ours}",
        "{ratio:ratio} of {peer} · {tokens_per_second:.0f} tokens/s",
        lambda row: row["ratio"],
        lambda row: (row["ours"], row["peer"]) in SAME_WIDTH,
    ),
}


def draw(picture: Picture, rows: Sequence[Results]) -> str:
    bars = []
    for row in rows:
        label = fill_template(picture.label, row)
        words = fill_template(picture.words, row)
        if words:
            bars.append((label, picture.length(row), words))
    title = escape(fill_template(picture.title, rows[0]))
    height = TOP + ROW * len(bars) + 10
    longest = max(length for _, length, _ in bars) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}" '
        f'font-family="{FONT}" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff" stroke="#8b949e" rx="6"/>',
        f'<text x="20" y="30" font-size="15">{title}</text>',
    ]
    for i, (label, length, words) in enumerate(bars):
        y = TOP + ROW * i
        width = max(1.0, round(LONGEST * length / longest, 1))
        words_x = LEFT + width + 7
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width}" height="18" fill="#2a7d4f" rx="2"/>',
            f'<text x="{words_x:.1f}" y="{y + 14}">{escape(words)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def draw_all(results: Results) -> dict[str, str]:
    """The pictures for which these results have measurements, each of the first model measured."""
    pictures = {}
    for name, picture in PICTURES.items():
        rows = [row for row in rows_of(results, name) if picture.is_drawn(row)]
        if rows:
            first = rows[0].get("target")
            pictures[name] = draw(picture, [row for row in rows if row.get("target") == first])
    return pictures
