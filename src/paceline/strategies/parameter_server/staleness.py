"""Staleness of gradients: statistics, and the limit above which a gradient is damped or dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.records.summary import StalenessSummary


@dataclass
class Staleness:
    """Statistics of gradient staleness at a server.

    The staleness of a gradient is the number of updates that the server made after it sent the weights that the
    gradient was computed with.
    """

    counts: dict[int, int] = field(default_factory=dict)
    """Number of gradients by staleness."""
    damped: int = 0
    dropped: int = 0

    def count(self, staleness: int, gradients: int = 1) -> None:
        """Count gradients of a staleness."""
        self.counts[staleness] = self.counts.get(staleness, 0) + gradients

    def add(self, other: Staleness) -> None:
        """Add the counts of another server."""
        for staleness, gradients in other.counts.items():
            self.count(staleness, gradients)
        self.damped += other.damped
        self.dropped += other.dropped

    def summary(self, max_allowed: int | None) -> StalenessSummary:
        """Return the values for the summary of a record; `max_allowed` is the bound, None if there is none."""
        staleness = sorted(Counter(self.counts).elements())
        return StalenessSummary(
            gradients=len(staleness),
            mean=sum(staleness) / len(staleness) if staleness else None,
            median=staleness[len(staleness) // 2] if staleness else None,
            max=staleness[-1] if staleness else None,
            max_allowed=max_allowed,
            damped=self.damped,
            dropped=self.dropped,
            counts=sorted(self.counts.items()),
        )


@dataclass(frozen=True)
class StalenessLimit:
    """Limit on the staleness of gradients, and the treatment of those above it."""

    max_staleness: int
    """Largest staleness without damping, in updates; 0 for no limit."""
    drops: bool
    """Whether a gradient above the limit is dropped, not damped."""

    def factor(self, staleness: int) -> float:
        """Return the factor for a gradient of this staleness: 1 within the limit, above it smaller, or 0 if dropped."""
        if not self.max_staleness or staleness <= self.max_staleness:
            return 1.0
        return 0.0 if self.drops else self.max_staleness / staleness
