"""Pictures of what bench.py measured, as SVG, which is text that every browser draws.

    stack      the combined table as a waterfall: each row begins where the row before ended, on a logarithmic axis
    blocks     a paged pool as texts come and go: a color is a text's block, black shared, hatched cached, white free
    gammas     the gain of speculation by γ: measured, and by the formula
    bits       what fewer bits of the weights cost in perplexity, by their bytes
    peers      tokens a second of one text, here and by other programs
    session    a terminal: a text as it was drafted, accepted and corrected, in slow motion

A position is data · scale + margin. Each picture has a background, so that it looks the same on light and dark pages.

Invariant: the same results give the same picture, to the byte.
"""

import colorsys
import math
from html import escape
from textwrap import wrap
from typing import Any

from errors import UserError
from measure.report import Results, format_bytes

INK, PALE, GRID, GOOD, BAD = "#1f2328", "#59636e", "#d1d9e0", "#2a7d4f", "#c2562d"
WHITE, HATCHED, BLUE = "#ffffff", "url(#cached)", "#2f6db5"
DARK, PAPER, DIM = "#0d1117", "#e6edf3", "#9198a1"  # a terminal's
ORIGINS = {"accepted": "#3fb950", "corrected": "#ff7b72", "bonus": "#39c5cf"}
MONO, CHARACTER, COLUMNS, SLOW = (
    "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
    8.4,
    100,
    8.0,
)
ANIMATED = "<style>.new{animation:show 1ms both}@keyframes show{from{opacity:0}}</style>"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
HATCH = (
    '<defs><pattern id="cached" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="5" height="5" fill="{WHITE}"/><rect width="2" height="5" fill="{PALE}"/></pattern></defs>'
)
SHAPES = dict(rect="x y width height fill", line="x1 y1 x2 y2 stroke", text="x y text-anchor fill")


class Canvas:
    """A sheet with a title. Coordinates are pixels from its upper left corner."""

    def __init__(
        self, width: float, height: float, title: str, ground: str = WHITE, ink: str = INK
    ):
        self.width, self.height, self.title, self.parts = width, height, title, [HATCH]
        self.add("rect", 0.5, 0.5, width - 1, height - 1, ground, stroke=GRID, rx=6)
        self.text(20, 30, title, "start", ink, 15, font_weight=600)

    def add(self, shape: str, *values: str | float, content: str = "", **more: Any) -> None:
        """Add a shape. values: of its attributes in SHAPES, numbers rounded to a tenth of a pixel; more: attributes."""
        rounded = [value if isinstance(value, str) else round(float(value), 1) for value in values]
        attributes = dict(zip(SHAPES[shape].split(), rounded)) | more
        told = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.parts.append(
            f"<{shape}{told}>{escape(content)}</{shape}>" if content else f"<{shape}{told}/>"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "start",
        color: str = PALE,
        points: int = 11,
        **more: Any,
    ) -> None:
        self.add("text", x, y, anchor, color, content=words, font_size=points, **more)

    def svg(self) -> str:
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}" '
            f'font-family="{FONT}">\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def color(letter: str) -> str:
    """The color of a text's blocks: hues a golden section apart, in two strengths."""
    i = ord(letter) - ord("a")
    rgb = colorsys.hls_to_rgb(0.58 + 0.381966 * i, 0.44 if i % 2 else 0.54, 0.5)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def draw_stack(results: Results) -> str:
    rows, left, right, step, top, width = results["stack"], 232, 310, 34, 66, 960
    bottom, ratios = top + step * len(rows), [row["speed_up"] for row in rows]
    least, most = min(1.0, *ratios), max(ratios)
    sheet = Canvas(
        width, bottom + 56, f"{rows[0]['texts']} requests at once: one technique added to the other"
    )
    x = lambda ratio: (
        left + (width - left - right) * math.log(ratio / least) / max(1e-9, math.log(most / least))
    )
    for tick in (t for t in (1, 2, 5, 10, 20, 50, 100) if least <= t <= most):
        sheet.add("line", x(tick), top - 4, x(tick), bottom, GRID)
        sheet.text(x(tick), bottom + 16, f"{tick}x", "middle")
    words = "times the tokens a second of the first row (logarithmic)"
    sheet.text((left + width - right) / 2, bottom + 36, words, "middle")
    columns = {"tokens/s": width - 190, "weights": width - 120, "keys, values": width - 20}
    for words, at in columns.items():
        sheet.text(at, top - 12, words, "end")
    for i, (row, before, now) in enumerate(zip(rows, [ratios[0], *ratios], ratios)):
        y, (low, high) = top + step * i + 6, sorted((x(before), x(now)))
        sheet.text(left - 12, y + 15, row["name"], "end", INK, 12)
        fill = PALE if i == 0 else GOOD if now >= before else BAD
        sheet.add("rect", low - 1, y, max(3.0, high - low), step - 12, fill, rx=2)
        sheet.text(high + 7, y + 15, f"{now:.3g}x", color=INK, points=12, font_weight=600)
        cells = (
            f"{row['tokens_per_second']:.0f}",
            format_bytes(row["weight_bytes"]),
            format_bytes(row["cache_bytes"]),
        )
        for words, at in zip(cells, columns.values()):
            sheet.text(at, y + 15, words, "end", points=12)
        if i + 1 < len(rows):
            sheet.add("line", x(now), y + step - 12, x(now), y + step, PALE, stroke_dasharray="2 2")
    return sheet.svg()


def draw_blocks(results: Results) -> str:
    told, left, top, cell, step = results["blocks"], 258, 78, 15, 28
    count, border = len(told[0]["row"]), dict(stroke_width=0.7, rx=1.5)
    sheet = Canvas(
        left + cell * count + 20,
        top + step * len(told) + 8,
        f"A pool of {count} blocks of 4 tokens",
    )
    at, fills = left, {"·": WHITE, "░": HATCHED, "*": INK}
    for fill, words in (
        (color("a"), "one text's"),
        (INK, "shared"),
        (HATCHED, "cached"),
        (WHITE, "free"),
    ):
        sheet.add("rect", at, 45, 12, 12, fill, stroke=PALE, **border)
        sheet.text(at + 18, 55, words)
        at += 34 + 7 * len(words)
    for i, picture in enumerate(told):
        sheet.text(left - 12, top + step * i + 11.5, picture["what"], "end", INK, 12)
        for j, owner in enumerate(picture["row"]):
            fill, stroke = fills.get(owner) or color(owner), GRID if owner == "·" else PALE
            sheet.add(
                "rect",
                left + cell * j,
                top + step * i,
                cell - 2,
                cell,
                fill,
                stroke=stroke,
                **border,
            )
    return sheet.svg()


def draw_gammas(results: Results) -> str:
    rows, left, bottom, step = [row for row in results["gammas"] if row["gamma"]], 60, 240, 96
    width = left + max(500, step * len(rows) + 120)
    sheet = Canvas(width, bottom + 50, "Speculation: times as fast as plain decoding, by γ")
    most = max(2.0, *(row[name] for row in rows for name in ("speed_up", "formula_flat")))
    at = lambda i, gain: (left + step * (i + 0.5), bottom - (bottom - 60) * gain / most)
    for gain in (0, 1, 2):
        sheet.add(
            "line",
            left,
            at(0, gain)[1],
            left + step * len(rows),
            at(0, gain)[1],
            PALE if gain == 1 else GRID,
        )
        sheet.text(left - 8, at(0, gain)[1] + 4, f"{gain}x", "end")
    for i, row in enumerate(rows):
        sheet.text(at(i, 0)[0], bottom + 16, f"γ = {row['gamma']}", "middle")
        sheet.text(at(i, 0)[0], bottom + 32, f"α = {row['acceptance']:.2f}", "middle")
    kinds = (
        ("formula_flat", "formula, w = 1", GRID),
        ("formula", "formula", BLUE),
        ("speed_up", "measured", GOOD),
    )
    for below, (name, words, stroke) in enumerate(kinds):
        places = [at(i, row[name]) for i, row in enumerate(rows)]
        for before, now in zip(places, places[1:]):
            sheet.add("line", *before, *now, stroke, stroke_width=2)
        for x, y in places:
            sheet.add("rect", x - 3, y - 3, 6, 6, stroke, rx=3)
        sheet.text(
            places[-1][0] + 10,
            places[-1][1] + 16 * below - 10,
            words,
            color=PALE if stroke == GRID else stroke,
        )
    return sheet.svg()


def draw_bits(results: Results) -> str:
    rows = [row for row in results["bits"] if row["kv"] == "16"]
    plain = rows[0]
    left, step, top, width = 190, 26, 66, 760
    sheet = Canvas(
        width, top + step * len(rows) + 16, "Weights in fewer bits: bytes, and what they cost"
    )
    most = max(row["perplexity"] / plain["perplexity"] - 1 for row in rows)
    for words, x in (("bytes", left), ("perplexity, over that of 16 bits", 480)):
        sheet.text(x, top - 12, words)
    for i, row in enumerate(rows):
        y, loss = top + step * i, row["perplexity"] / plain["perplexity"] - 1
        sheet.text(left - 12, y + 13, row["weights"], "end", INK, 12)
        sheet.add(
            "rect",
            left,
            y,
            190 * row["bytes"] / plain["bytes"],
            step - 8,
            PALE if i == 0 else GOOD,
            rx=2,
        )
        sheet.text(
            left + 190 * row["bytes"] / plain["bytes"] + 6, y + 13, format_bytes(row["bytes"])
        )
        sheet.add("rect", 480, y, max(1.0, 180 * loss / most), step - 8, BAD, rx=2)
        sheet.text(480 + max(1.0, 180 * loss / most) + 6, y + 13, f"{loss:+.2%}")
    return sheet.svg()


def draw_peers(results: Results) -> str:
    """The peers of the first model on the first CPU."""
    rows = list(results["peers"].values())
    rows = [
        row for row in rows if (row["target"], row["code"]) == (rows[0]["target"], rows[0]["code"])
    ]
    speeds = dict[str, float]()
    for whose, column in (
        ("ours, {ours}", "tokens_per_second"),
        ("{peer}", "peer_tokens_per_second"),
    ):
        for row in rows:  # of several runs the first, as in the table
            speeds.setdefault(whose.format_map(row), row[column])
    left, step, top, width = 190, 30, 52, 700
    sheet = Canvas(
        width, top + step * len(speeds) + 12, f"{rows[0]['target']}, one text: tokens a second"
    )
    for i, (name, speed) in enumerate(speeds.items()):
        y, size = top + step * i, (width - left - 90) * speed / max(speeds.values())
        sheet.text(left - 12, y + 14, name, "end", INK, 12)
        sheet.add("rect", left, y, size, step - 10, GOOD if name.startswith("ours") else PALE, rx=2)
        sheet.text(left + size + 7, y + 14, f"{speed:.0f}", color=INK, points=12, font_weight=600)
    return sheet.svg()


def draw_session(results: Results) -> str:
    (run,) = results["session"]
    slower, row, column, words = (
        SLOW / run["pieces"][-1][2],
        2,
        0,
        [(f"$ {run['command']}", DIM, 0.0, 0, 0)],
    )
    for piece, origin, seconds in ((run["prompt"], "", 0.0), *run["pieces"]):
        for i, line in enumerate(piece.split("\n")):
            if i or column + len(line) > COLUMNS and line.startswith(" "):
                row, column, line = row + 1, 0, line.lstrip()
            words += (
                [(line, ORIGINS.get(origin, PAPER), slower * seconds, row, column)] if line else []
            )
            column += len(line)
    told = [line for text in run["told"] for line in wrap(text, COLUMNS)]
    words += [(line, DIM, SLOW, row + 2 + i, 0) for i, line in enumerate(told)]
    sheet = Canvas(
        60 + CHARACTER * COLUMNS,
        84 + 20 * (row + 1 + len(told)),
        f"A run of the embedded pair, {slower:.0f} times slower",
        DARK,
        PAPER,
    )
    sheet.parts.append(ANIMATED)
    for i, (origin, fill) in enumerate(ORIGINS.items()):
        sheet.text(20 + 110 * i, 80, origin, color=fill, points=13, font_weight=600)
    for part, fill, seconds, y, x in words:
        sheet.text(
            20 + CHARACTER * x,
            60 + 20 * y,
            part,
            "start",
            fill,
            14,
            textLength=round(CHARACTER * len(part), 1),
            **{
                "font-family": MONO,
                "xml:space": "preserve",
                "class": "new",
                "style": f"animation-delay:{seconds:.2f}s",
            },
        )
    return sheet.svg()


PICTURES = dict(
    stack=draw_stack,
    blocks=draw_blocks,
    gammas=draw_gammas,
    bits=draw_bits,
    peers=draw_peers,
    session=draw_session,
)


def draw_all(results: Results) -> dict[str, str]:
    """The pictures for which these results have measurements. ValueError if there are none."""
    if not (
        drawn := {name: picture(results) for name, picture in PICTURES.items() if results.get(name)}
    ):
        raise UserError(
            f"these results have none of {', '.join(PICTURES)}: run python bench.py first"
        )
    return drawn
