"""Pictures of what bench.py measured, as SVG, which is text that every browser draws.

    stack      one technique added to the other: times the first row's speed, on a logarithmic axis
    gammas     the gain of speculation by γ: measured, and by the formula
    bits       what fewer bits of the weights cost in perplexity, beside their bytes
    peers      tokens a second of one text, here and by other programs

Each picture is a chart of horizontal bars. It has a background, so that it looks the same on light
and dark pages.

Invariant: the same results give the same picture, to the byte.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from measure.report import Results, format_bytes, format_ratio, rows_of

INK = "#1f2328"
PALE = "#8b949e"
GOOD = "#2a7d4f"
BAD = "#c2562d"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
WIDTH = 880  # pixels
LEFT = 230  # where bars begin
LONGEST = 250  # bar
ROW = 28  # height of a row
TOP = 54


class Bar(NamedTuple):
    label: str
    length: float  # the longest one fills the chart
    color: str
    words: str  # behind the bar


def chart(title: str, bars: Sequence[Bar]) -> str:
    height = TOP + ROW * len(bars) + 10
    longest = max(bar.length for bar in bars) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        f'font-family="{FONT}" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff" stroke="{PALE}" rx="6"/>',
        f'<text x="20" y="30" font-size="15">{escape(title)}</text>',
    ]
    for i, bar in enumerate(bars):
        y = TOP + ROW * i
        width = max(1.0, round(LONGEST * bar.length / longest, 1))
        text_y = y + 14
        words_x = LEFT + width + 7
        parts += [
            f'<text x="{LEFT - 12}" y="{text_y}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width}" height="18" fill="{bar.color}" rx="2"/>',
            f'<text x="{words_x:.1f}" y="{text_y}">{escape(bar.words)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def draw_stack(rows: Sequence[Results]) -> str:
    bars = []
    for row in rows:
        words = [
            format_ratio(row["speed_up"]),
            f"{row['tokens_per_second']:.0f} tokens/s",
            f"weights {format_bytes(row['weight_bytes'])}",
            f"cache {format_bytes(row['cache_bytes'])}",
        ]
        color = BAD if row["gain"] and row["gain"] < 1 else GOOD
        length = math.log(max(1.0, row["speed_up"]))
        bars.append(Bar(row["name"], length, color, " · ".join(words)))
    count = rows[0]["texts"]
    return chart(f"{count} requests: one technique added to the other (logarithmic)", bars)


def draw_gammas(rows: Sequence[Results]) -> str:
    bars = []
    for row in rows:
        if row["gamma"] is None:
            continue
        label = f"γ = {row['gamma']}, acceptance {row['acceptance']:.2f}"
        measured = row["speed_up"]
        color = GOOD if measured >= 1 else BAD
        bars.append(Bar(label, measured, color, format_ratio(measured)))
        formula = row["formula"]
        bars.append(Bar("", formula, PALE, f"{format_ratio(formula)} by the formula"))
    return chart("Speculation: times as fast as plain decoding", bars)


def draw_bits(rows: Sequence[Results]) -> str:
    bars = []
    for row in rows:
        if row["kv"] == "16":
            words = f"{row['loss']:+.2%} · {format_bytes(row['bytes'])}"
            bars.append(Bar(row["weights"], max(0.0, row["loss"]), BAD, words))
    return chart("Weights in fewer bits: the rise of perplexity, and bytes", bars)


def draw_peers(rows: Sequence[Results]) -> str:
    """Everyone's tokens a second with the first model."""
    bars = {}
    for row in rows:
        if row["target"] == rows[0]["target"]:
            ours = row["tokens_per_second"]
            theirs = row["peer_tokens_per_second"]
            bars.setdefault(row["ours"], Bar(f"ours, {row['ours']}", ours, GOOD, f"{ours:.0f}"))
            bars.setdefault(row["peer"], Bar(row["peer"], theirs, PALE, f"{theirs:.0f}"))
    title = f"{rows[0]['target']}, one text: tokens a second"
    return chart(title, sorted(bars.values(), key=lambda bar: bar.length))


PICTURES: dict[str, Callable[[Sequence[Results]], str]] = {
    "stack": draw_stack,
    "gammas": draw_gammas,
    "bits": draw_bits,
    "peers": draw_peers,
}


def draw_all(results: Results) -> dict[str, str]:
    """The pictures for which these results have measurements."""
    pictures = {}
    for name, draw in PICTURES.items():
        rows = rows_of(results, name)
        if rows:
            pictures[name] = draw(rows)
    return pictures
