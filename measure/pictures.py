"""Pictures of what bench.py measured, as SVG: text that a browser draws, and nothing to install.

    draw(results)  ->  {"stack": svg, "gammas": svg, "places": svg, "blocks": svg}

    stack      the combined table as a waterfall: each row begins where the row before ended, on a logarithmic axis
    gammas     speed-up against γ: dots are measured, lines are the formula
    places     the places of a batch over its steps, static above continuous: a colour is a text, grey is nobody's
    blocks     a paged pool as texts come and go: a colour has one owner, black several, hatched is cached, white is free

A position is data · scale + margin, and all data is in results/*.json. They have a white ground of their own, so they look the same on a
light page and on a dark one.

Invariant: the same results give the same picture, to the byte.
"""
import colorsys
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from measure.report import size

INK, PALE, GRID, GOOD, BAD, EMPTY = "#1f2328", "#59636e", "#d1d9e0", "#2a7d4f", "#c2562d", "#e4e8ec"
BLUE, ORANGE = "#2f6fb4", "#c2562d"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Canvas:
    """A white sheet. Coordinates are pixels from its upper left corner."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title, self.parts = width, height, title, list[str]()
        self.rect(0.5, 0.5, width - 1, height - 1, "#ffffff", stroke=GRID, rx=6)
        self.text(20, 30, title, bold=True, points=15)

    def _add(self, kind: str, content: str | None = None, **attributes: Any) -> None:
        told = " ".join(f'{name.replace("_", "-")}="{round(value, 1) if isinstance(value, float) else value}"' for name, value in attributes.items())
        self.parts.append(f"<{kind} {told}/>" if content is None else f"<{kind} {told}>{content}</{kind}>")

    def text(self, x: float, y: float, words: str, anchor: str = "start", color: str = INK, points: float = 12, bold: bool = False) -> None:
        self._add("text", escape(words), x=float(x), y=float(y), text_anchor=anchor, fill=color, font_size=points, **({"font_weight": 600} if bold else {}))

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: Any) -> None:
        self._add("rect", x=float(x), y=float(y), width=float(width), height=float(height), fill=fill, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = GRID, **more: Any) -> None:
        self._add("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=color, **more)

    def path(self, points: Sequence[tuple[float, float]], color: str, **more: Any) -> None:
        self._add("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", stroke=color, stroke_width=2, **more)

    def dot(self, x: float, y: float, color: str) -> None:
        self._add("circle", cx=float(x), cy=float(y), r=4.5, fill=color)

    def svg(self) -> str:
        hatch = (f'<defs><pattern id="cached" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" '
                 f'fill="#ffffff"/><rect width="2" height="5" fill="{PALE}"/></pattern></defs>')
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img" '
                f'aria-label="{escape(self.title)}" font-family="{FONT}">\n' + "\n".join([hatch, *self.parts]) + "\n</svg>\n")


def color(letter: str) -> str:
    """A text's own: hues a golden section apart, in two strengths."""
    i = ord(letter) - ord("a")
    r, g, b = colorsys.hls_to_rgb(0.58 + 0.381966 * i, 0.44 if i % 2 else 0.54, 0.5)
    return f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}"


# ---- The combined table ---------------------------------------------------------------------------------------------------------

def stack(results: dict[str, Any]) -> str:
    rows, left, right, step, top = results["stack"], 232, 310, 34, 66
    width, bottom = 960, top + step * len(results["stack"])
    sheet = Canvas(width, bottom + 56, f"{rows[0]['texts']} requests at once: one technique added to the other")
    most = max(row["speed_up"] for row in rows)
    least = min(1.0, *(row["speed_up"] for row in rows))
    x = lambda ratio: left + (width - left - right) * math.log(ratio / least) / max(1e-9, math.log(most / least))
    for tick in (t for t in (1, 2, 5, 10, 20, 50, 100) if least <= t <= most):
        sheet.line(x(tick), top - 4, x(tick), bottom)
        sheet.text(x(tick), bottom + 16, f"{tick}x", "middle", PALE, 11)
    sheet.text((left + width - right) / 2, bottom + 36, "times the tokens a second of the first row (logarithmic)", "middle", PALE, 11)
    columns = (("tokens/s", width - 190), ("weights", width - 120), ("keys, values", width - 20))
    for words, at in columns:
        sheet.text(at, top - 12, words, "end", PALE, 11)
    before = rows[0]["speed_up"]
    for i, row in enumerate(rows):
        y, now = top + step * i + 6, row["speed_up"]
        low, high = sorted((x(before), x(now)))
        sheet.text(left - 12, y + 15, row["name"], "end")
        sheet.rect(low - 1, y, max(3.0, high - low), step - 12, PALE if i == 0 else GOOD if now >= before else BAD, rx=2)
        sheet.text(high + 7, y + 15, f"{now:.3g}x", bold=True)
        for words, (_, at) in zip((f"{row['tokens_per_second']:.0f}", size(row["weight_bytes"]), size(row["cache_bytes"])), columns):
            sheet.text(at, y + 15, words, "end", PALE)
        if i + 1 < len(rows):
            sheet.line(x(now), y + step - 12, x(now), y + step, PALE, stroke_dasharray="2 2")
        before = now
    return sheet.svg()


# ---- Speed-up against γ ---------------------------------------------------------------------------------------------------------

def gammas(results: dict[str, Any]) -> str:
    fixed, auto = [row for row in results["gammas"] if row["gamma"] is not None], next((row for row in results["gammas"] if row["gamma"] is None), None)
    sheet, left, right, top, bottom = Canvas(760, 380, "Speculation: speed-up against γ"), 64, 730, 72, 318
    furthest = max(row["gamma"] for row in fixed)
    most = math.ceil(max(1.5, *(row[key] for row in fixed for key in ("speed_up", "formula", "formula_flat"))) * 4 + 0.5) / 4
    least = math.floor(min(1.0, *(row[key] for row in fixed for key in ("speed_up", "formula"))) * 4) / 4
    x = lambda gamma: left + (right - left) * gamma / furthest
    y = lambda ratio: bottom - (bottom - top) * (ratio - least) / (most - least)
    for i in range(round((most - least) * 4) + 1):
        sheet.line(left, y(least + i / 4), right, y(least + i / 4), PALE if least + i / 4 == 1 else GRID)
        sheet.text(left - 8, y(least + i / 4) + 4, f"{least + i / 4:.2f}x", "end", PALE, 11)
    for gamma in range(furthest + 1):
        sheet.text(x(gamma), bottom + 18, str(gamma), "middle", PALE, 11)
    sheet.text((left + right) / 2, bottom + 40, "γ, tokens drafted a round", "middle", PALE, 11)
    sheet.text(left - 44, top - 12, "times plain decoding", "start", PALE, 11)
    start = [(x(0), y(1.0))]
    sheet.path(start + [(x(row["gamma"]), y(row["formula_flat"])) for row in fixed], PALE, stroke_dasharray="3 4")
    sheet.path(start + [(x(row["gamma"]), y(row["formula"])) for row in fixed], BLUE)
    if auto is not None:
        sheet.line(left, y(auto["speed_up"]), right, y(auto["speed_up"]), GOOD, stroke_dasharray="7 4", stroke_width=1.5)
    for row in fixed:
        sheet.dot(x(row["gamma"]), y(row["speed_up"]), ORANGE)
    legend(sheet, auto)
    return sheet.svg()


def legend(sheet: Canvas, auto: dict[str, Any] | None) -> None:
    entries = [(ORANGE, "measured", ""), (BLUE, "formula", ""), (PALE, "formula, wide passes free", "3 4")]
    entries += [(GOOD, f"γ by the clock: {auto['speed_up']:.2f}x", "7 4")] if auto is not None else []
    at = 196
    for color, words, dashes in entries:
        if words == "measured":
            sheet.dot(at + 8, 50, color)
        else:
            sheet.line(at, 50, at + 18, 50, color, stroke_width=2, **({"stroke_dasharray": dashes} if dashes else {}))
        sheet.text(at + 24, 54, words, points=11)
        at += 46 + 6.2 * len(words)


# ---- Batches and blocks ---------------------------------------------------------------------------------------------------------

def places(results: dict[str, Any]) -> str:
    told, left, top, row, wide = results["places"], 20, 66, 20, 860
    steps, width = max(len(told[kind][0]) for kind in ("static", "continuous")), len(told["static"])
    title = f"{len(told['lengths'])} texts of {min(told['lengths'])} to {max(told['lengths'])} tokens in {width} places"
    sheet, y = Canvas(left + wide + 20, top + 2 * (width * row + 44) + 14, title), top
    for kind in ("static", "continuous"):
        rows = told[kind]
        lost = sum(line.count("·") for line in rows) / (width * len(rows[0]))
        sheet.text(left, y - 8, f"{kind}: {len(rows[0])} steps, {lost:.0%} of the places in vain", bold=True)
        for i, line in enumerate(rows):
            for start, end, letter in runs(line):
                box = (left + wide * start / steps, y + row * i, wide * (end - start) / steps - 1, row - 3)
                sheet.rect(*box, EMPTY if letter == "·" else color(letter))
                if letter != "·" and box[2] > 9:
                    sheet.text(box[0] + box[2] / 2, y + row * i + 12.5, letter, "middle", "#ffffff", 11)
        y += width * row + 44
    for step in range(0, steps + 1, 20):
        sheet.text(left + wide * step / steps, y - 22, str(step), "middle" if step else "start", PALE, 11)
    sheet.text(left + wide, y - 4, "steps", "end", PALE, 11)
    return sheet.svg()


def runs(line: str) -> list[tuple[int, int, str]]:
    """Stretches of one letter: (start, end, letter)."""
    cuts = [0, *(i for i in range(1, len(line)) if line[i] != line[i - 1]), len(line)]
    return [(start, end, line[start]) for start, end in zip(cuts, cuts[1:])]


def blocks(results: dict[str, Any]) -> str:
    told, left, top, cell, step = results["blocks"], 258, 78, 15, 28
    sheet = Canvas(left + cell * len(told[0]["row"]) + 20, top + step * len(told) + 8, f"A pool of {len(told[0]['row'])} blocks of 4 tokens")
    at = left
    for fill, words in ((color("a"), "one text's"), (INK, "shared"), ("url(#cached)", "cached"), ("#ffffff", "free")):
        sheet.rect(at, 45, 12, 12, fill, stroke=PALE, stroke_width=0.7, rx=1.5)
        sheet.text(at + 18, 55, words, color=PALE, points=11)
        at += 34 + 7 * len(words)
    for i, picture in enumerate(told):
        sheet.text(left - 12, top + step * i + 11.5, picture["what"], "end")
        for j, owner in enumerate(picture["row"]):
            fill = {"·": "#ffffff", "░": "url(#cached)", "*": INK}.get(owner) or color(owner)
            sheet.rect(left + cell * j, top + step * i, cell - 2, cell, fill, stroke=GRID if owner == "·" else PALE, stroke_width=0.7, rx=1.5)
    return sheet.svg()


PICTURES: dict[str, Callable[[dict[str, Any]], str]] = dict(stack=stack, gammas=gammas, places=places, blocks=blocks)


def draw(results: dict[str, Any]) -> dict[str, str]:
    """The pictures of what these results have. ValueError if they have none."""
    if not (drawn := {name: picture(results) for name, picture in PICTURES.items() if results.get(name)}):
        raise ValueError(f"these results have none of {', '.join(PICTURES)}: run python bench.py first")
    return drawn
