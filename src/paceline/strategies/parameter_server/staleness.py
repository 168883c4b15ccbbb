"""Staleness of gradients: statistics, and the limit above which a gradient is damped or dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.records.summary import StalenessSummary


@dataclass
class Staleness:
    """Statistics of gradient staleness at a server.

    The staleness of a gradient is the number of updates that the server made after it sent the weights that the
    gradient was computed with.
    """

    counts: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness."""
    damped: int = 0
    dropped: int = 0

    def add(self, other: Staleness) -> None:
        """Add the counts of another server."""
        self.counts.update(other.counts)
        self.damped += other.damped
        self.dropped += other.dropped

    def summary(self, max_allowed: int | None) -> StalenessSummary:
        """Return the values for the summary of a record; `max_allowed` is the bound, None if there is none."""
        staleness = sorted(self.counts.elements())
        return StalenessSummary(
            gradients=len(staleness),
            mean=sum(staleness) / len(staleness) if staleness else None,
            median=staleness[len(staleness) // 2] if staleness else None,
            max=staleness[-1] if staleness else None,
            max_allowed=max_allowed,
            damped=self.damped,
            dropped=self.dropped,
            counts=[(staleness, self.counts[staleness]) for staleness in sorted(self.counts)],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as values that can be written as JSON."""
        return {
            "counts": {str(staleness): n for staleness, n in self.counts.items()},
            "damped": self.damped,
            "dropped": self.dropped,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Staleness:
        """Return the statistics from the values of `to_dict`."""
        return cls(
            Counter({int(staleness): n for staleness, n in values["counts"].items()}),
            values["damped"],
            values["dropped"],
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
