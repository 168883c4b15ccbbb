"""Stripes of curves that coincide: dashes that fill each other's gaps, so that each of the curves is visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.analysis.curves import relative_difference
from paceline.analysis.loss_difference import VISIBLE


def stripes(curves: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return the dashes of curves that coincide with others, by name; a curve that coincides with none has none."""
    dashes = {}
    for names in _coincident(curves):
        length = 10 if len(names) <= 6 else 5
        for place, name in enumerate(names):
            before, after = length * place, length * (len(names) - place - 1)
            dashes[name] = f"0px,{before}px,{length}px,{after}px"
    return dashes


def _coincident(curves: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return groups of two or more names whose curves coincide in a plot."""
    groups: list[list[str]] = []
    for name, values in curves.items():
        alike = [group for group in groups if _coincide(curves[group[0]], values)]
        if alike:
            alike[0].append(name)
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def _coincide(ones: Sequence[float], others: Sequence[float]) -> bool:
    return len(ones) == len(others) and all(map(_is_close, ones, others))


def _is_close(one: float, other: float) -> bool:
    return relative_difference(one, other) < VISIBLE
