"""Grid of panels with a line per rank, one block per candidate: its limits, and the headings of the blocks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.plots.drawing import Json, Panel, heading, plain, side_note

POINTS = 12_000
"""Most points of all curves together."""
MOST_RANKS = 8
"""Most ranks that are drawn per candidate."""
COLUMNS = 3


def ranks_to_draw(ordered: Sequence[int]) -> list[int]:
    """Return the ranks to draw; of many ranks, the first and the last of their order."""
    half = MOST_RANKS // 2
    return sorted(ordered if len(ordered) <= MOST_RANKS else [*ordered[:half], *ordered[-half:]])


def block_headings(name: str, note: str, place: Panel) -> list[Json]:
    """Return the candidate's name and, at the right, a note; no note if it is empty."""
    notes = [side_note(note, place, raised=4)] if note else []
    return [heading(plain(name), place, raised=4), *notes]
