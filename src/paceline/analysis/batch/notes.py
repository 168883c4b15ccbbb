"""Sentences on an experiment over batch sizes: what its figures do not show, and what may mislead."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.batch.points import BatchPoint
from paceline.analysis.other_load import is_notable
from paceline.analysis.record_set import RecordSet
from paceline.analysis.scaling.machines import placement_notes
from paceline.formatting import TENTHS, format_cores, join_names, short, whole
from paceline.records.experiment.design import BatchDesign

REACHED = 0.9
"""Share of the peak learning rate below which a run counts as too short for its warm-up: the last step of a warm-up is
slightly below the peak."""


def notes_on(points: Sequence[BatchPoint], design: BatchDesign, record_set: RecordSet) -> list[str]:
    """Return sentences on sizes that were left out, ranks that share cores, placement, and the learning rate."""
    shared = dict.fromkeys(point.oversubscribed for point in points if point.oversubscribed)
    notes = [*design.left_out, *[f"{reason}, so no speed-up is reported for them." for reason in shared]]
    gains = [point.over_fewest for point in points if point.over_fewest is not None]
    notes += [
        f"{reason}: the speed-up is one over different cores per rank. Set --threads to give every rank as many."
        for reason in dict.fromkeys(gain.unequal_cores for gain in gains if gain.unequal_cores)
    ]
    notes += _peak_beside_load(points, design)
    notes += placement_notes(design, [(point.hosts, point.ranks_per_host) for point in points])
    return [*notes, *_learning_rate_notes(points, record_set), *_short_runs(points, record_set)]


def _peak_beside_load(points: Sequence[BatchPoint], design: BatchDesign) -> list[str]:
    """Return a sentence on MFU if other programs used the cores while the peak was measured."""
    load, cores = design.core_other_load, design.machine_cores
    if load is None or not is_notable(load, cores) or all(point.mfu is None for point in points):
        return []
    return [
        f"Other programs used {TENTHS.text(load)} of {format_cores(cores)} while the peak of the processor was "
        "measured, so that it may be too low, and MFU too high. Repeat on a quiet machine for the MFU."
    ]


def _short_runs(points: Sequence[BatchPoint], record_set: RecordSet) -> list[str]:
    """Return a sentence on sizes whose runs are too short for the peak learning rate of the recipe."""
    found: dict[int, str] = {}
    for point in points:
        planned = next((run.topology.lr for run in record_set.runs_of(point.candidate.name).values()), None)
        if point.lr is not None and planned is not None and point.lr < REACHED * planned:
            found[point.batch] = f"{short(point.lr, 3)} in place of {short(planned, 3)} at batch {whole(point.batch)}"
    if not found:
        return []
    return [
        f"Runs are too short for their warm-up, so the learning rate reaches only {join_names(list(found.values()))}. "
        "Train for more epochs to compare accuracies."
    ]


def _learning_rate_notes(points: Sequence[BatchPoint], record_set: RecordSet) -> list[str]:
    """Return a sentence on how the peak learning rate depends on the batch; none if it was not recorded."""
    rates = {point.batch: point.lr for point in points if point.lr is not None}
    if not rates:
        return []
    first, last = min(rates), max(rates)
    if len(set(rates.values())) == 1:
        rate = short(rates[first])
        return [f"The learning rate is {rate} at every batch size: another one may suit larger batches better."]
    rules = {recipe.scale_lr for entry in record_set.runs if (recipe := entry.run.topology.recipe) is not None}
    by = f" by {rules.pop()}" if len(rules) == 1 else ""
    ends = f"from {short(rates[first], 3)} at batch {whole(first)} to {short(rates[last], 3)} at batch {whole(last)}"
    return [f"The learning rate was scaled{by}, {ends}."]
