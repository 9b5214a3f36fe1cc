"""Pictures of what bench.py measured, as SVG: text that a browser draws, and nothing to install.

    stack      the combined table as a waterfall: each row begins where the row before ended, on a logarithmic axis
    blocks     a paged pool as texts come and go: a color is one text, black several, hatched cached, white free

A position is data · scale + margin. The ground is white, so that a light page and a dark one show the same picture.

Invariant: the same results give the same picture, to the byte.
"""
import colorsys
import math
from html import escape
from typing import Any

from measure.report import Results, format_bytes

INK, PALE, GRID, GOOD, BAD = "#1f2328", "#59636e", "#d1d9e0", "#2a7d4f", "#c2562d"
WHITE, HATCHED = "#ffffff", "url(#cached)"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
HATCH = ('<defs><pattern id="cached" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
         f'<rect width="5" height="5" fill="{WHITE}"/><rect width="2" height="5" fill="{PALE}"/></pattern></defs>')
SHAPES = dict(rect="x y width height fill", line="x1 y1 x2 y2 stroke", text="x y text-anchor fill")


class Canvas:
    """A white sheet. Coordinates are pixels from its upper left corner."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title, self.parts = width, height, title, [HATCH]
        self.add("rect", 0.5, 0.5, width - 1, height - 1, WHITE, stroke=GRID, rx=6)
        self.text(20, 30, title, "start", INK, 15, font_weight=600)

    def add(self, shape: str, *values: str | float, content: str = "", **more: Any) -> None:
        """values: the attributes of SHAPES, numbers to a tenth of a pixel."""
        rounded = [value if isinstance(value, str) else round(float(value), 1) for value in values]
        attributes = dict(zip(SHAPES[shape].split(), rounded)) | more
        told = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.parts.append(f"<{shape}{told}>{escape(content)}</{shape}>" if content else f"<{shape}{told}/>")

    def text(self, x: float, y: float, words: str, anchor: str = "start", color: str = PALE, points: int = 11,
             **more: Any) -> None:
        self.add("text", x, y, anchor, color, content=words, font_size=points, **more)

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}" '
                f'font-family="{FONT}">\n' + "\n".join(self.parts) + "\n</svg>\n")


def color(letter: str) -> str:
    """A text's own: hues a golden section apart, in two strengths."""
    i = ord(letter) - ord("a")
    rgb = colorsys.hls_to_rgb(0.58 + 0.381966 * i, 0.44 if i % 2 else 0.54, 0.5)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def draw_stack(results: Results) -> str:
    rows, left, right, step, top, width = results["stack"], 232, 310, 34, 66, 960
    bottom, ratios = top + step * len(rows), [row["speed_up"] for row in rows]
    least, most = min(1.0, *ratios), max(ratios)
    sheet = Canvas(width, bottom + 56, f"{rows[0]['texts']} requests at once: one technique added to the other")
    x = lambda ratio: left + (width - left - right) * math.log(ratio / least) / max(1e-9, math.log(most / least))
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
        cells = f"{row['tokens_per_second']:.0f}", format_bytes(row["weight_bytes"]), format_bytes(row["cache_bytes"])
        for words, at in zip(cells, columns.values()):
            sheet.text(at, y + 15, words, "end", points=12)
        if i + 1 < len(rows):
            sheet.add("line", x(now), y + step - 12, x(now), y + step, PALE, stroke_dasharray="2 2")
    return sheet.svg()


def draw_blocks(results: Results) -> str:
    told, left, top, cell, step = results["blocks"], 258, 78, 15, 28
    count, border = len(told[0]["row"]), dict(stroke_width=0.7, rx=1.5)
    sheet = Canvas(left + cell * count + 20, top + step * len(told) + 8, f"A pool of {count} blocks of 4 tokens")
    at, fills = left, {"·": WHITE, "░": HATCHED, "*": INK}
    for fill, words in ((color("a"), "one text's"), (INK, "shared"), (HATCHED, "cached"), (WHITE, "free")):
        sheet.add("rect", at, 45, 12, 12, fill, stroke=PALE, **border)
        sheet.text(at + 18, 55, words)
        at += 34 + 7 * len(words)
    for i, picture in enumerate(told):
        sheet.text(left - 12, top + step * i + 11.5, picture["what"], "end", INK, 12)
        for j, owner in enumerate(picture["row"]):
            fill, stroke = fills.get(owner) or color(owner), GRID if owner == "·" else PALE
            sheet.add("rect", left + cell * j, top + step * i, cell - 2, cell, fill, stroke=stroke, **border)
    return sheet.svg()


PICTURES = dict(stack=draw_stack, blocks=draw_blocks)


def draw_all(results: Results) -> dict[str, str]:
    """The pictures of what these results have. ValueError if they have none."""
    if not (drawn := {name: picture(results) for name, picture in PICTURES.items() if results.get(name)}):
        raise ValueError(f"these results have none of {', '.join(PICTURES)}: run python bench.py first")
    return drawn
