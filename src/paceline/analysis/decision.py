"""Is there a clear winner? Decided between the two fastest eligible, by an interval that allows for looking often."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.analysis.statistics import Estimate, median_time, paired_ratio
from paceline.records.experiment import Candidate

ERROR_RATE = 0.05
"""How often an experiment may name a winner where there is none, all its looks taken together."""
NO_DIFFERENCE = 0.01
"""Less than this is no difference that anyone should act on."""

DecisionOutcome = Literal["winner", "same", "open", "alone", "nothing"]


@dataclass(frozen=True)
class Decision:
    """What can be said about the two fastest eligible."""

    outcome: DecisionOutcome
    """`winner`: the first is faster. `same`: they are within 1% of each other, for certain. `open`: neither is certain.
    `alone`: there is one candidate only. `nothing`: there is none."""
    first: str | None = None
    second: str | None = None
    ratio: Estimate | None = None
    """The second's time per sample ÷ the first's; the interval is as wide as the number of looks demands. Its repeats
    are those that both have: none where the two were not measured together."""
    level: float | None = None
    """The confidence of that interval."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
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
    costs: Mapping[str, Mapping[Any, float]],
    looks: int,
    failed: Collection[str] = (),
) -> Decision:
    """Whether the fastest candidate is faster than the next, given seconds per sample by candidate and repeat.

    Candidates that failed are left out, however fast they were until then: nobody can train with them.

    An experiment that measures until it sees a difference finds one by chance sooner or later. Each of its `looks`
    therefore gets its part of the error that is allowed in all (Bonferroni).
    """
    eligible = [c.name for c in candidates if c.role == "candidate" and c.name not in failed and costs[c.name]]
    eligible.sort(key=lambda name: median_time(costs[name].values()))
    if len(eligible) < 2:
        return Decision("alone", eligible[0]) if eligible else Decision("nothing")
    first, second = eligible[:2]
    level = 1 - ERROR_RATE / looks
    ratio = paired_ratio(costs[second], costs[first], level)
    assert ratio is not None
    if ratio.low is not None and ratio.low > 1 + NO_DIFFERENCE:
        return Decision("winner", first, second, ratio, level)
    outcome: DecisionOutcome = "same" if ratio.within(1 - NO_DIFFERENCE, 1 + NO_DIFFERENCE) else "open"
    return Decision(outcome, first, second, ratio, level)
