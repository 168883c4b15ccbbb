"""`FixedRepeats`: settings of experiments on accuracies, which have as many repeats as the user asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod


class FixedRepeats(ABC):
    """Base of the settings of an experiment that neither determines a winner nor compares strategies."""

    __slots__ = ()

    @property
    @abstractmethod
    def repeats(self) -> int:
        """Number of runs of each candidate, as the engine of experiments calls it."""

    @property
    def max_repeats(self) -> int:
        """Largest number of runs: the same."""
        return self.repeats

    @property
    def proof(self) -> bool:
        """Whether to prove parity first: no, all candidates have the same strategy."""
        return False

    @property
    def doctor(self) -> bool:
        """Whether to examine the machine first: no."""
        return False
