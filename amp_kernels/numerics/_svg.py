"""SVG charts in a self-contained HTML file, without scripts, fonts or network access."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 240, 64, 12, 28, 26
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
svg { width: 100%; height: auto; margin: .5rem 0 1.5rem }
text { font-size: 12px; fill: #555 }
.title { font-size: 14px; fill: #222 }
.grid { stroke: #ddd }
.mark { stroke: #b33; stroke-dasharray: 4 3 }
.line { stroke: #3554a5; fill: none; stroke-width: 1.5 }
.bar { fill: #3554a5 }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .2rem .8rem .2rem 0; text-align: left }
pre { overflow-x: auto }
@media (prefers-color-scheme: dark) {
body { color: #ddd; background: #181a1f }
text { fill: #aaa }
.title { fill: #ddd }
.grid { stroke: #333 }
.line { stroke: #8ea6ee }
.bar { fill: #8ea6ee }
.mark { stroke: #e77 }
}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """One HTML file; ``parts`` are HTML."""
    name = html.escape(title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{name}</h1>{"".join(parts)}</body></html>'


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    lines = [_row(header, "th"), *(_row(row, "td") for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


class _Frame:
    """Maps values to positions and draws title, grid and labels."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self._xs, self._ys = xs, (ys[0], ys[1] if ys[1] > ys[0] else ys[0] + 1.0)

    def x(self, value: float) -> float:
        low, high = self._xs
        return _LEFT + (value - low) / ((high - low) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._ys
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def around(self, title: str, x_labels: Sequence[tuple[float, str]], inside: str) -> str:
        parts = [f'<text class="title" x="{_LEFT}" y="16">{html.escape(title)}</text>']
        for tick in _ticks(*self._ys):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        for value, label in x_labels:
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(label)}</text>'
            )
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}{inside}</svg>'


def bars(title: str, values: Sequence[tuple[int, float]], marks: Mapping[int, str]) -> str:
    """A bar chart of shares by exponent, with a dashed line before each visible exponent in ``marks``."""
    low, high = min(x for x, _ in values) - 1, max(x for x, _ in values) + 2
    frame = _Frame((low, high), (0.0, max(y for _, y in values)))
    wide = frame.x(1) - frame.x(0)
    drawn = [
        f'<rect class="bar" x="{frame.x(x):.1f}" y="{frame.y(y):.1f}" width="{wide * 0.9:.1f}" height="{frame.y(0) - frame.y(y):.1f}"/>'
        for x, y in values
    ]
    for x, label in marks.items():
        if low < x < high:
            place = frame.x(x)
            drawn.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
            drawn.append(f'<text x="{place - 4:.1f}" y="{_TOP + 10}" text-anchor="end">{html.escape(label)}</text>')
    step = -(-(high - low) // 11)
    labels = [(x + 0.5, f"2^{x}") for x in range(low + 1, high, step)]
    return frame.around(title, labels, "".join(drawn))


def line(title: str, xs: Sequence[float], ys: Sequence[float], *, logarithmic: bool = False) -> str:
    """A curve with gaps at non-finite values and, on a logarithmic axis (base 2), at values not above 0."""
    shown = [math.log2(y) if logarithmic and y > 0 else math.nan if logarithmic else y for y in ys]
    finite = [y for y in shown if math.isfinite(y)]
    if not finite:
        return ""
    frame = _Frame((min(xs), max(xs)), (min(finite), max(finite)))
    pieces: list[list[str]] = [[]]
    for x, y in zip(xs, shown, strict=True):
        if math.isfinite(y):
            pieces[-1].append(f"{frame.x(x):.1f},{frame.y(y):.1f}")
        elif pieces[-1]:
            pieces.append([])
    drawn = "".join(f'<polyline class="line" points="{" ".join(piece)}"/>' for piece in pieces if piece)
    steps = [(x, f"{x:g}") for x in dict.fromkeys((min(xs), max(xs)))]
    return frame.around(title + (" (power of two)" if logarithmic else ""), steps, drawn)


def stacks(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Horizontal bars of stacked parts with their sums; a file of its own. Parts keep their shade in all rows."""
    parts = list(dict.fromkeys(part for _, row in rows for part in row))
    left, step = 240, 24
    scale = (_WIDTH - left - 60) / max(sum(row.values()) for _, row in rows)
    shade = {
        part: f'class="bar" fill-opacity="{1 - 0.8 * i / max(len(parts) - 1, 1):.2f}"' for i, part in enumerate(parts)
    }
    drawn = [f'<text class="title" x="8" y="16">{html.escape(title)}</text>']
    for i, part in enumerate(parts):
        x = left + 110 * i
        drawn.append(f'<rect {shade[part]} x="{x}" y="28" width="12" height="12"/>')
        drawn.append(f'<text x="{x + 17}" y="39">{html.escape(part)}</text>')
    for i, (label, row) in enumerate(rows):
        x, y = float(left), 52 + step * i
        drawn.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>')
        for part, value in row.items():
            drawn.append(f'<rect {shade[part]} x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{step - 6}"/>')
            x += value * scale
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{sum(row.values()):.5g}</text>')
    size = f'viewBox="0 0 {_WIDTH} {60 + step * len(rows)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" role="img">'
    return f"{head}<style>{_STYLE}</style>{''.join(drawn)}</svg>\n"


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers in the range."""
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((unit * m for m in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
