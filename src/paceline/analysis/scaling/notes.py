"""Notes shown above a scaling experiment: speed-ups that are not reported, placement of ranks, outliers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.analysis.scaling.machines import placement_notes
from paceline.analysis.superlinear import SUPERLINEAR, least
from paceline.records.experiment.design import ScaleDesign

if TYPE_CHECKING:
    from paceline.analysis.scaling.curves import ScalingCurve


def scaling_notes(curves: Sequence[ScalingCurve], design: ScaleDesign, in_doubt: Collection[str]) -> Iterator[str]:
    """Yield all notes, as sentences; the gains of the candidates `in_doubt` have a note of their own."""
    yield from _oversubscription(curves)
    shapes = [(point.hosts, point.ranks_per_host) for curve in curves for point in curve.points]
    yield from placement_notes(design, shapes)
    yield from _missing_efficiency(curves, in_doubt)
    yield from _superlinear(curves, in_doubt)


def _oversubscription(curves: Sequence[ScalingCurve]) -> Iterator[str]:
    """Yield one note per way in which ranks share cores or GPUs."""
    for reason in dict.fromkeys(
        point.oversubscribed for curve in curves for point in curve.points if point.oversubscribed
    ):
        yield (
            f"{reason}, so no speed-up or efficiency is reported for them. "
            + (
                "Use at most one rank per GPU."
                if "GPU" in reason
                else "Use fewer ranks, or give every host a fixed CPU quota with --emulate and --host-cpus."
            )
        )


def _missing_efficiency(curves: Sequence[ScalingCurve], in_doubt: Collection[str]) -> Iterator[str]:
    """Yield one note per reason for which a speed-up has no efficiency."""
    points = [point for curve in curves for point in curve.points if point.candidate.name not in in_doubt]
    gains = [gain for point in points for gain in point.gains.values() if gain is not None]
    for reason in dict.fromkeys(gain.no_efficiency_reason for gain in gains if gain.no_efficiency_reason):
        yield (f"{reason}: the speed-up is valid, but no efficiency is reported. Set --threads to get one.")


def _superlinear(curves: Sequence[ScalingCurve], in_doubt: Collection[str]) -> Iterator[str]:
    """Yield a note on points whose efficiency is above 1."""
    names = []
    for point in {point.candidate.name: point for curve in curves for point in curve.points}.values():
        known = [gain.efficiency for gain in point.gains.values() if gain is not None and gain.efficiency is not None]
        if point.candidate.name not in in_doubt and any(least(estimate) > SUPERLINEAR for estimate in known):
            names.append(point.candidate.name)
    if names:
        yield (
            f"Efficiency above 100%: {'; '.join(names)}. Smaller shares of the batch may fit into a cache, or other "
            "programs slowed the baseline down; repeat the experiment on an idle machine to find out."
        )
