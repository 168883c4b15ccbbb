"""Draw the results of `strategies.py` as one SVG: a panel per condition, with each strategy's ratio and interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from paceline.report.plots.palette import NEUTRALS, colours_of_strategies
from paceline.strategies.registry import ENTRIES

if TYPE_CHECKING:
    from strategy_results import Figures, Line

    from paceline.analysis.statistics import Estimate
    from paceline.records.experiment.design import CandidateRole

WIDTH, NAMES, FIGURES, ROW, HEAD, FOOT, GAP = 615, 240, 112, 22, 46, 30, 24
"""Pixels of a panel: its width, the width of names and of figures, the heights of row, head and foot, and the gap."""
TICKS = (0.25, 0.33, 0.5, 0.67, 1, 1.5, 2, 3, 5, 10, 20, 50)
COLOURS = colours_of_strategies(ENTRIES.values())
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 14px } .tick { fill: #656d76; font-size: 11px } .figure { font-size: 12px }
.bound { fill: #656d76 }
"""


def draw(found: Sequence[Figures]) -> str:
    """Return the picture as SVG: panels in rows of two."""
    heights = [_height(figures) for figures in found]
    rows = [max(heights[at : at + 2]) for at in range(0, len(found), 2)]
    width, height = 2 * WIDTH + GAP, sum(rows) + GAP * (len(rows) - 1)
    panels = []
    for index, figures in enumerate(found):
        x = (index % 2) * (WIDTH + GAP)
        y = sum(rows[: index // 2]) + GAP * (index // 2)
        panels.append(f'<g transform="translate({x},{y})">{"".join(_panel(figures))}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(panels)
    ) + "\n</svg>\n"


def _height(figures: Figures) -> int:
    return HEAD + ROW * len(_drawn(figures)) + FOOT


def _drawn(figures: Figures) -> list[Line]:
    return [line for line in figures.lines if line.to_reference is not None]


def _panel(figures: Figures) -> Iterator[str]:
    lines = _drawn(figures)
    place = _scale(lines)
    bottom = HEAD + ROW * len(lines)
    yield f'<text class="title" x="0" y="18">{escape(figures.title)}</text>'
    yield f'<text class="tick" x="{NAMES}" y="36">time per step ÷ ddp</text>'
    for tick in _ticks(lines):
        x, colour = place(tick), "#57606a" if tick == 1 else "#d8dee4"
        yield _line(x, HEAD, x, bottom, colour)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
    bound = next((line for line in lines if _role(line.strategy) == "bound"), None)
    if bound is not None and bound.to_reference is not None:
        x = place(bound.to_reference.value)
        yield _line(x, HEAD, x, bottom, NEUTRALS[0], 'stroke-dasharray="4 3"')
    for number, line in enumerate(lines):
        yield from _mark(line, HEAD + ROW * number + ROW / 2, place)


def _role(strategy: str) -> CandidateRole:
    entry = ENTRIES.get(strategy.partition(":")[0])
    return "candidate" if entry is None else entry.role


def _mark(line: Line, y: float, place: _Scale) -> Iterator[str]:
    ratio = line.to_reference
    assert ratio is not None
    colour = COLOURS.get(line.strategy.partition(":")[0], NEUTRALS[2])
    kind = "" if _role(line.strategy) == "candidate" else ' class="bound"'
    yield f'<text{kind} x="{NAMES - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(_name(line.strategy))}</text>'
    if ratio.low is not None and ratio.high is not None:
        yield _line(place(ratio.low), y, place(ratio.high), y, colour, 'stroke-width="3" opacity=".45"')
    yield f'<circle cx="{place(ratio.value):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'
    figure = f"{ratio.value:.2f}{interval(ratio)}"
    yield f'<text class="figure" x="{WIDTH}" y="{y + 4:.1f}" text-anchor="end">{figure}</text>'


def interval(estimate: Estimate) -> str:
    """Return the interval as text to follow a ratio; empty if it is unknown, or if a strategy is its own reference."""
    unknown = estimate.low is None or estimate.high is None
    return "" if unknown or estimate.low == estimate.high else f" ({estimate.low:.2f}–{estimate.high:.2f})"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def _name(strategy: str) -> str:
    """Return the name of a strategy, short enough for its column."""
    name, _, options = strategy.partition(":")
    return f"{name}, asynchronous" if options == "asynchronous=true" else strategy


class _Scale:
    """Horizontal scale: logarithmic, so that twice as fast and twice as slow are equally far from 1."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self._first, self._span = math.log(low), math.log(high / low)

    def __call__(self, ratio: float) -> float:
        share = (math.log(min(max(ratio, self.low), self.high)) - self._first) / self._span
        return NAMES + 8 + share * (WIDTH - NAMES - FIGURES - 16)


def _scale(lines: Sequence[Line]) -> _Scale:
    """Return a scale that contains all values. Intervals are cut off at 1.5 times the range of the values."""
    ratios = [line.to_reference for line in lines if line.to_reference is not None]
    least, most = min(ratio.value for ratio in ratios) / 1.5, max(ratio.value for ratio in ratios) * 1.5
    low = min(0.8, *[max(least, ratio.low or ratio.value) for ratio in ratios])
    high = max(1.25, *[min(most, ratio.high or ratio.value) for ratio in ratios])
    return _Scale(low / 1.08, high * 1.08)


def _ticks(lines: Sequence[Line]) -> list[float]:
    scale = _scale(lines)
    return [tick for tick in TICKS if scale.low < tick < scale.high]
