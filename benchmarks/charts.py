"""Charts as SVG: bars and lines in panels side by side, nothing but text, boxes and paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

PANEL = 460  # px, as all sizes
LABELS = 150
ROW = 34
TOP = 64
LINES_HEIGHT = 300
OURS_COLOUR = "#c2410c"
COLOURS = ("#1d4ed8", "#0f766e", "#7e22ce", "#a16207", "#be185d", "#4d7c0f", "#475569", "#0891b2")
DARK, LIGHT, GRID, TEXT = "#64748b", "#cbd5e1", "#e2e8f0", "#1e293b"


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart.

    Attributes:
        label: Name of the row.
        value: Length of its bar.
        lesser: Length of a lighter bar below, or None.
        ours: Whether it stands out.
    """

    label: str
    value: float
    lesser: float | None
    ours: bool


@dataclass(frozen=True)
class Line:
    """A line of a chart: (x, y), both above 0."""

    label: str
    points: Sequence[tuple[float, float]]
    ours: bool


def bar_chart(title: str, legend: str, panels: Mapping[str, Sequence[Bar]]) -> str:
    """Return panels of horizontal bars, each with a scale of its own."""
    parts = []
    for number, (name, bars) in enumerate(panels.items()):
        left = number * PANEL
        parts.append(_text(left + LABELS, TOP - 10, name, "600 13px"))
        longest = max(bar.value for bar in bars)
        for row, bar in enumerate(sorted(bars, key=lambda bar: -bar.value)):
            scale = (PANEL - LABELS - 70) / longest
            parts.append(_bar(bar, left + LABELS, TOP + row * ROW, scale))
    height = TOP + ROW * max(map(len, panels.values())) + 12
    return _svg(title, legend, len(panels) * PANEL, height, parts)


def _bar(bar: Bar, left: float, top: float, scale: float) -> str:
    colour = OURS_COLOUR if bar.ours else DARK
    weight = "600" if bar.ours else "400"
    height = 22 if bar.lesser is None else 13
    parts = [
        _text(left - 8, top + 16, bar.label, f"{weight} 12px", "end"),
        _box(left, top, bar.value * scale, height, colour),
        _text(left + bar.value * scale + 6, top + height / 2 + 4, _short(bar.value), "600 12px"),
    ]
    if bar.lesser is not None:
        parts.append(_box(left, top + 14, bar.lesser * scale, 8, LIGHT))
    return "".join(parts)


def line_chart(title: str, legend: str, panels: Mapping[str, Sequence[Line]]) -> str:
    """Return panels of latencies (ms) over clients, both axes logarithmic."""
    parts = [
        _line_panel(name, lines, number * PANEL)
        for number, (name, lines) in enumerate(panels.items())
    ]
    return _svg(title, legend, len(panels) * PANEL, TOP + LINES_HEIGHT + 36, parts)


def _line_panel(name: str, lines: Sequence[Line], left: float) -> str:
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = math.log10(min(ys) / 1.3), math.log10(max(ys) * 1.6)
    start, width, bottom = left + 64, PANEL - 64 - LABELS, TOP + LINES_HEIGHT

    def across(x: float) -> float:
        return start + width * math.log(x / xs[0]) / max(math.log(xs[-1] / xs[0]), 1)

    def down(y: float) -> float:
        return bottom - LINES_HEIGHT * (math.log10(y) - low) / (high - low)

    parts = [_text(start, TOP - 10, name, "600 13px")]
    for y in (10.0**power for power in range(math.ceil(low), math.floor(high) + 1)):
        parts.append(f'<path d="M{start} {down(y):.1f}h{width}" stroke="{GRID}"/>')
        tick = f"{y:g} ms" if y < 1000 else f"{y / 1000:g} s"
        parts.append(_text(start - 8, down(y) + 4, tick, "400 11px", "end"))
    for x in xs:
        tick = f"{x:g}" if x < xs[-1] else f"{x:g} clients"
        parts.append(_text(across(x), bottom + 20, tick, "400 11px", "middle"))
    colours = iter(COLOURS)
    ends = _spread([down(line.points[-1][1]) for line in lines])
    for line, end in zip(lines, ends, strict=True):
        colour, weight, stroke = (OURS_COLOUR, 600, 3) if line.ours else (next(colours), 400, 1.6)
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in line.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>')
        parts.append(_text(start + width + 8, end + 4, line.label, f"{weight} 12px", fill=colour))
    return "".join(parts)


def _spread(ys: Sequence[float], gap: float = 15) -> list[float]:
    """Return places for labels near `ys`, pushed apart to about `gap`."""
    order = sorted(range(len(ys)), key=lambda index: ys[index])
    placed = list(ys)
    for upper, lower in list(pairwise(order)) * 100:
        push = max(0.0, gap - (placed[lower] - placed[upper])) / 2
        placed[upper] -= push
        placed[lower] += push
    return placed


def _svg(title: str, legend: str, width: int, height: float, parts: Sequence[str]) -> str:
    head = _text(16, 24, title, "600 15px") + _text(width - 16, 24, legend, "400 12px", "end")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" font-family="system-ui, sans-serif" role="img">'
        f'<title>{escape(title)}</title><rect width="100%" height="100%" rx="8" fill="#fff"/>'
        f"{head}{''.join(parts)}</svg>\n"
    )


def _text(  # noqa: PLR0913
    x: float, y: float, text: str, font: str, anchor: str = "start", fill: str = TEXT
) -> str:
    weight, size = font.split()
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" font-size="{size}" '
        f'text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )


def _box(left: float, top: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" '
        f'rx="2" fill="{fill}"/>'
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
