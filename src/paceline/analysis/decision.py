"""Decide whether the fastest candidate is faster than the second, with an interval corrected for interim analyses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.analysis.costs import CostTable
from paceline.analysis.statistics import Estimate, median_time
from paceline.records.experiment.design import Candidate

ERROR_RATE = 0.05
"""Probability that an experiment names a winner although there is none, over all its interim analyses."""
NO_DIFFERENCE = 0.01
"""Relative differences below this are treated as equal."""

DecisionOutcome = Literal["winner", "equal", "undecided", "single_candidate", "no_candidate"]


@dataclass(frozen=True)
class Decision:
    """Decision between the two fastest candidates."""

    outcome: DecisionOutcome
    """`winner`: the first is faster. `equal`: the interval shows that they differ by less than 1%. `undecided`: the
    interval shows neither, or there are too few repeats for one. `single_candidate`, `no_candidate`: there is only one
    candidate, or none."""
    first: str | None = None
    second: str | None = None
    ratio: Estimate | None = None
    """Time per sample of the second ÷ that of the first, with an interval widened for the number of interim analyses.
    `repeats` counts common repeats: 0 if the two were not measured together."""
    level: float | None = None
    """Confidence level of that interval."""

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON values."""
        ratio = None if self.ratio is None else self.ratio.to_dict()
        return {
            "outcome": self.outcome,
            "first": self.first,
            "second": self.second,
            "ratio": ratio,
            "level": self.level,
        }


def decide(
    candidates: Sequence[Candidate],
    costs: CostTable,
    interim_analyses: int,
    failed: Collection[str] = (),
) -> Decision:
    """Decide whether the fastest candidate is faster than the second, given seconds per sample by candidate and repeat.

    Failed candidates are excluded, however fast they were before they failed. Fewer than three common repeats have no
    interval, so they decide nothing; `ratio` has what each repeat showed.

    An experiment that is repeated until a difference appears finds one by chance sooner or later. Each of the
    `interim_analyses` therefore gets an equal part of the total error rate (Bonferroni correction).
    """
    eligible = [c.name for c in candidates if c.role == "candidate" and c.name not in failed and costs[c.name]]
    eligible.sort(key=lambda name: median_time(costs[name].values()))
    if len(eligible) < 2:
        return Decision("single_candidate", eligible[0]) if eligible else Decision("no_candidate")
    first, second = eligible[:2]
    level = 1 - ERROR_RATE / interim_analyses
    ratio = costs.ratio(second, first, level)
    assert ratio is not None
    if ratio.low is not None and ratio.low > 1 + NO_DIFFERENCE:
        return Decision("winner", first, second, ratio, level)
    outcome: DecisionOutcome = "equal" if ratio.within(1 - NO_DIFFERENCE, 1 + NO_DIFFERENCE) else "undecided"
    return Decision(outcome, first, second, ratio, level)
