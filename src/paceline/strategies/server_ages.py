"""How old gradients are when they come to a server, and what becomes of those that are too old."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ages:
    """How old gradients were when they came, in updates of the server since the weights they were computed with."""

    counts: Counter[int] = field(default_factory=Counter)
    damped: int = 0
    dropped: int = 0

    def add(self, other: Ages) -> None:
        """Counts another server's too."""
        self.counts.update(other.counts)
        self.damped += other.damped
        self.dropped += other.dropped

    def summary(self) -> dict[str, Any]:
        """For a record."""
        ages = sorted(self.counts.elements())
        return {
            "gradients": len(ages),
            "mean": sum(ages) / len(ages) if ages else None,
            "median": ages[len(ages) // 2] if ages else None,
            "max": ages[-1] if ages else None,
            "damped": self.damped,
            "dropped": self.dropped,
            "counts": [[age, self.counts[age]] for age in sorted(self.counts)],
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "counts": {str(age): n for age, n in self.counts.items()},
            "damped": self.damped,
            "dropped": self.dropped,
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> Ages:
        """The other way."""
        return cls(Counter({int(age): n for age, n in values["counts"].items()}), values["damped"], values["dropped"])


@dataclass(frozen=True)
class Bound:
    """What becomes of gradients that are too old."""

    max_age: int
    """In versions; 0 is no bound."""
    drops: bool

    def factor(self, age: int) -> float:
        """What a gradient is multiplied by: less the older it is beyond the bound, or nothing then."""
        if not self.max_age or age <= self.max_age:
            return 1.0
        return 0.0 if self.drops else self.max_age / age
