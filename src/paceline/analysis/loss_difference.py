"""Differences between the losses of lossless runs, and their cause: BatchNorm, dropout, rounding or a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.analysis.curves import relative_differences
from paceline.analysis.record_set import RecordSet
from paceline.analysis.steps.timing import losses_of
from paceline.records import RunRecord
from paceline.records.writer import json_safe

VISIBLE = 1e-3
"""Relative difference of the loss from which it is visible in a plot."""
ROUNDING = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
"""Largest relative difference of the first loss, at equal weights, that summing in another order explains."""

DifferenceCause = Literal["none", "rounding", "batch_norm", "random_layers", "setting", "unknown"]


@dataclass(frozen=True)
class LossDifference:
    """Difference between the losses of a lossless run and of a reference run with the same seed."""

    candidate: str
    reference: str
    steps: int
    """Number of steps that both runs have."""
    first_step: int | None
    """First step, from 0, whose losses differ; None if all are bitwise equal."""
    visible_step: int | None
    """First step whose losses differ by 0.1% or more; None if there is none."""
    first_difference: float
    """Relative difference of the first loss, at equal weights."""
    last_difference: float
    """Relative difference of the last loss that both runs have."""
    cause: DifferenceCause

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with None for an infinite difference (exactly one of the runs has diverged)."""
        values: dict[str, Any] = json_safe(asdict(self))
        return values


def loss_differences(record_set: RecordSet, reference: str | None) -> list[LossDifference]:
    """Compare every lossless candidate with the reference, in the first common repeat.

    If the reference is not lossless or was not measured, the first lossless candidate takes its place.
    """
    names = [c.name for c in record_set.candidates if c.lossless and record_set.recorded_runs_of(c.name)]
    base = reference if reference in names else next(iter(names), None)
    if base is None:
        return []
    found = []
    for name in names:
        pair = _first_pair(record_set, name, base)
        if name != base and pair is not None and _comparable(*pair):
            found.append(_difference(name, base, *pair))
    return found


def _comparable(one: RunRecord, other: RunRecord) -> bool:
    """Return whether both runs have losses of the same samples; scripts on different rank counts may not."""
    same_samples = "script" not in one.config or one.topology.workers == other.topology.workers
    return same_samples and bool(losses_of(one)) and bool(losses_of(other))


def identical_groups(record_set: RecordSet) -> list[list[str]]:
    """Return groups of two or more lossless candidates whose losses are bitwise equal in the first repeat."""
    groups: dict[tuple[float, ...], list[str]] = {}
    first = min((recorded.repeat for recorded in record_set.runs), default=None)
    lossless = {candidate.name for candidate in record_set.candidates if candidate.lossless}
    for recorded in record_set.runs:
        losses = losses_of(recorded.run)
        if recorded.repeat == first and recorded.candidate in lossless and losses:
            groups.setdefault(tuple(losses), []).append(recorded.candidate)
    return [names for names in groups.values() if len(names) > 1]


def _first_pair(record_set: RecordSet, one: str, other: str) -> tuple[RunRecord, RunRecord] | None:
    ones, others = record_set.runs_of(one), record_set.runs_of(other)
    common = sorted(repeat for repeat in ones if repeat in others)
    return (ones[common[0]], others[common[0]]) if common else None


def _difference(name: str, base: str, run: RunRecord, reference: RunRecord) -> LossDifference:
    differences = relative_differences(run, reference)
    return LossDifference(
        candidate=name,
        reference=base,
        steps=len(differences),
        first_step=next((step for step, difference in enumerate(differences) if difference > 0), None),
        visible_step=next((step for step, difference in enumerate(differences) if difference >= VISIBLE), None),
        first_difference=differences[0] if differences else 0.0,
        last_difference=differences[-1] if differences else 0.0,
        cause=_cause(run, reference, differences),
    )


def _cause(run: RunRecord, reference: RunRecord, differences: Sequence[float]) -> DifferenceCause:
    """Return the cause. Before any update weights are equal, so only the forward pass can change the first loss."""
    if not any(differences):
        return "none"
    differing = {k for k in run.config if run.config[k] != reference.config.get(k)} - {"strategy"}
    if differing - {"bn"}:
        return "setting"
    if run.topology.batch_norm_layers and _batch_norm_shards(run) != _batch_norm_shards(reference):
        return "batch_norm"
    rounding = ROUNDING[run.config.get("precision") or "fp32"]  # Records of scripts lack the precision.
    if differences[0] <= rounding:
        return "rounding"
    # Every rank draws its own dropout masks, so another number of ranks applies other masks to the same samples.
    draws_differ = run.topology.workers != reference.topology.workers
    return "random_layers" if run.topology.random_layers and draws_differ else "unknown"


def _batch_norm_shards(run: RunRecord) -> int:
    """Return the number of shards of a batch that BatchNorm normalises separately."""
    return 1 if run.config["bn"] == "sync" else int(run.topology.workers)
