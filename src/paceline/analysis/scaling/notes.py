"""What to know before believing a scaling experiment: what is not claimed, and where ranks were put."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.analysis.scaling.machines import placements

if TYPE_CHECKING:
    from paceline.analysis.scaling.curves import ScalingCurve

BEYOND = 1.05
"""Efficiencies that are higher, for certain, are worth a word."""


def notes(curves: Sequence[ScalingCurve], design: Mapping[str, Any]) -> Iterator[str]:
    """All of it, in sentences."""
    yield from _crowding(curves)
    yield from placements(design, [(point.hosts, point.ranks_per_host) for curve in curves for point in curve.points])
    yield from _unclaimed(curves)
    yield from _beyond(curves)


def _crowding(curves: Sequence[ScalingCurve]) -> Iterator[str]:
    """What is said where ranks have not got a core each: once for each reason."""
    for reason in dict.fromkeys(point.crowded for curve in curves for point in curve.points if point.crowded):
        yield (
            f"{reason}, so no speed-up or efficiency is claimed there"
            + ("." if "GPU" in reason else ": --emulate with --host-cpus gives every host its share of the machine.")
        )


def _unclaimed(curves: Sequence[ScalingCurve]) -> Iterator[str]:
    """The same where a speed-up counts, but says nothing about what was added."""
    gains = [gain for curve in curves for point in curve.points for gain in point.gains.values() if gain is not None]
    for reason in dict.fromkeys(gain.unclaimed for gain in gains if gain.unclaimed):
        yield f"{reason}: the speed-up over it counts, but no efficiency is claimed."


def _beyond(curves: Sequence[ScalingCurve]) -> Iterator[str]:
    """Points that are faster than adding ranks explains."""
    names = []
    for point in {point.candidate.name: point for curve in curves for point in curve.points}.values():
        known = [gain.efficiency for gain in point.gains.values() if gain is not None and gain.efficiency is not None]
        if any((own.value if own.low is None else own.low) > BEYOND for own in known):
            names.append(point.candidate.name)
    if names:
        yield (
            f"More than ideal: {'; '.join(names)}. A smaller share may fit into a cache, or the machine was busier "
            "while the baseline ran."
        )
