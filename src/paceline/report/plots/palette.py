"""Colours of candidates and of parts of a step; the same on a whole page and, for built-in strategies, on all pages."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Iterable, Iterator, Sequence

from paceline.records.experiment.design import Candidate
from paceline.strategies.registry import ENTRIES, StrategyEntry

HUES = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009a70",
    "pink": "#bf6797",
    "ochre": "#b07d00",
    "sky": "#2f96cf",
    "violet": "#8a63d2",
    "red": "#c94f4f",
    "olive": "#6f8c00",
    "teal": "#0c97a3",
    "brown": "#a0694b",
    "magenta": "#b04fc0",
}
"""Okabe and Ito's colours, which are distinct for colour-blind readers, darkened until a thin line of each has a
contrast of 3 or more on white and on a dark background; then others in the same range."""
COLOURS = tuple(HUES.values())
NEUTRALS = ("#858b93", "#8a6f52", "#5f7690")
"""Muted colours of bounds and baselines, which cannot be picked."""
HUES_OF_STRATEGIES = (
    *("green", "pink", "vermilion", "blue", "sky", "ochre"),
    *("olive", "violet", "red", "teal", "magenta", "brown"),
)
"""Colours of built-in strategies in the order of the registry."""
NEUTRALS_BY_ROLE = {"bound": NEUTRALS[0], "baseline": NEUTRALS[1]}

PARTS = {"compute": "#0072b2", "overlapped": "#7f58c9", "exposed": "#c65300", "other": "#6f757d"}
"""Colours of the time split: cold for computing, warm for communication, between them for both at once, grey for
neither. White text is readable on each of them."""
PHASES = {
    "data": NEUTRALS[0],
    "forward": "#2f96cf",
    "backward": "#0072b2",
    "optimiser": "#0c97a3",
    "waiting": PARTS["exposed"],
}
OPERATIONS = {
    "all_reduce": "#d55e00",
    "broadcast": "#b04fc0",
    "gather": "#b07d00",
    "scatter": "#c94f4f",
    "all_gather": "#bf6797",
    "reduce_scatter": "#a0694b",
    "reduce": "#8a6f52",
    "all_to_all": "#8a63d2",
    "send": "#b07d00",
    "recv": "#c94f4f",
    "barrier": "#5f7690",
    "shared_reduce": "#c87800",
}
"""Colours of the timeline, in the same sense: cold for phases, warm for operations."""


def colours_of_strategies(entries: Iterable[StrategyEntry]) -> dict[str, str]:
    """Return the colour of each built-in strategy by name: distinct hues in the order of the registry, or neutral."""
    hues = itertools.chain((HUES[name] for name in HUES_OF_STRATEGIES), _more_hues())
    return {entry.name: NEUTRALS_BY_ROLE.get(entry.role) or next(hues) for entry in entries}


def colours(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return a distinct colour for every candidate, by name; it does not depend on the results."""
    given: dict[str, str] = {}
    favourites = colours_of_strategies(ENTRIES.values())
    for candidate in candidates:
        favourite = favourites.get(candidate.strategy)
        if favourite and favourite not in given.values():
            given[candidate.name] = favourite
    for candidate in candidates:
        if candidate.name not in given:
            given[candidate.name] = next(colour for colour in _preferred(candidate) if colour not in given.values())
    return {candidate.name: given[candidate.name] for candidate in candidates}


def _preferred(candidate: Candidate) -> Iterator[str]:
    """Yield the colours that suit a candidate, preferred ones first, without end."""
    first, later = (COLOURS, ()) if candidate.role == "candidate" else (NEUTRALS, COLOURS)
    return itertools.chain(first, later, _more_hues())


def _more_hues() -> Iterator[str]:
    """Yield new hues of similar luminance, a golden angle apart, for comparisons of more than a dozen candidates."""
    for number in itertools.count(1):
        hue = (0.05 + number * 0.618034) % 1
        for lightness in (value / 100 for value in range(60, 20, -1)):
            colour = _hex(colorsys.hls_to_rgb(hue, lightness, 0.55))
            if luminance(colour) <= 0.27:
                yield colour
                break


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _hex(channels: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
