"""Where runs that should compute the same part from each other, and why: BatchNorm, dropout, rounding, or else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.analysis.curves import relative_differences
from paceline.analysis.record_set import RecordSet
from paceline.analysis.steps.timing import losses_of
from paceline.records import RunRecord
from paceline.records.writer import strict

VISIBLE = 1e-3
"""A relative difference of the loss that a plot would show."""
ROUNDING = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2}
"""How far apart the first loss may be, at equal weights, from adding the same numbers up in another order."""

DifferenceCause = Literal["none", "rounding", "batch_norm", "random_layers", "setting", "unknown"]


@dataclass(frozen=True)
class LossDifference:
    """How one lossless run's losses part from another's of the same seed."""

    candidate: str
    reference: str
    steps: int
    """Steps that both have."""
    first_step: int | None
    """The first whose losses differ at all, from 0; None if all are equal to the last bit."""
    visible_step: int | None
    """The first whose losses differ by 0.1% or more."""
    at_start: float
    """The relative difference of the first loss, at equal weights."""
    at_end: float
    cause: DifferenceCause

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: null for a difference that is infinite, since one of the two has diverged."""
        values: dict[str, Any] = strict(asdict(self))
        return values


def loss_differences(record_set: RecordSet, reference: str | None) -> list[LossDifference]:
    """Every lossless candidate against the reference (or the first lossless one), in the first repeat both have."""
    names = [c.name for c in record_set.candidates if c.lossless and record_set.entries_of(c.name)]
    base = reference if reference in names else next(iter(names), None)
    if base is None:
        return []
    found = []
    for name in names:
        pair = _first_pair(record_set, name, base)
        if name != base and pair is not None and _comparable(*pair):
            found.append(_part(name, base, *pair))
    return found


def _comparable(one: RunRecord, other: RunRecord) -> bool:
    """Whether both have losses, of the same samples: a script on other ranks may train on others."""
    same = "script" not in one.config or one.topology["workers"] == other.topology["workers"]
    return same and bool(losses_of(one)) and bool(losses_of(other))


def identical_groups(record_set: RecordSet) -> list[list[str]]:
    """Lossless candidates whose losses are equal to the last bit, in the first repeat; groups of two or more."""
    groups: dict[tuple[float, ...], list[str]] = {}
    first = min((entry.repeat for entry in record_set.entries), default=None)
    lossless = {candidate.name for candidate in record_set.candidates if candidate.lossless}
    for entry in record_set.entries:
        losses = losses_of(entry.run)
        if entry.repeat == first and entry.candidate in lossless and losses:
            groups.setdefault(tuple(losses), []).append(entry.candidate)
    return [names for names in groups.values() if len(names) > 1]


def _first_pair(record_set: RecordSet, one: str, other: str) -> tuple[RunRecord, RunRecord] | None:
    ones, others = record_set.runs_of(one), record_set.runs_of(other)
    common = sorted(repeat for repeat in ones if repeat in others)
    return (ones[common[0]], others[common[0]]) if common else None


def _part(name: str, base: str, run: RunRecord, reference: RunRecord) -> LossDifference:
    apart = relative_differences(run, reference)
    return LossDifference(
        candidate=name,
        reference=base,
        steps=len(apart),
        first_step=next((step for step, difference in enumerate(apart) if difference > 0), None),
        visible_step=next((step for step, difference in enumerate(apart) if difference >= VISIBLE), None),
        at_start=apart[0] if apart else 0.0,
        at_end=apart[-1] if apart else 0.0,
        cause=_cause(run, reference, apart),
    )


def _cause(run: RunRecord, reference: RunRecord, apart: Sequence[float]) -> DifferenceCause:
    """Before any update the weights are equal, so what differs in the first loss is the forward pass alone."""
    if not any(apart):
        return "none"
    differing = {k for k in run.config if run.config[k] != reference.config.get(k)} - {"strategy"}
    if differing - {"bn"}:
        return "setting"
    if run.topology.get("batch_norm_layers") and _normalised_over(run) != _normalised_over(reference):
        return "batch_norm"
    rounding = ROUNDING[run.config.get("precision", "fp32")]  # A script does not say.
    if apart[0] <= rounding:
        return "rounding"
    # Every rank draws its own masks, so on another number of them the same samples meet other ones.
    drawn_apart = run.topology["workers"] != reference.topology["workers"]
    return "random_layers" if run.topology.get("random_layers") and drawn_apart else "unknown"


def _normalised_over(run: RunRecord) -> int:
    """Into how many shards a batch falls whose statistics BatchNorm takes apart."""
    return 1 if run.config["bn"] == "sync" else int(run.topology["workers"])
