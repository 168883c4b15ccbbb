"""Position of a run in its training data, where it starts or resumes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Number of steps and samples that all ranks together have trained; independent of the world size."""

    step: int = 0
    """Steps done."""
    epoch: int = 0
    """Epoch of the next step."""
    epoch_samples: int = 0
    """Samples of that epoch that have been trained."""
    epoch_batches: int = 0
    """Batches of that epoch that have been read from an iterable, also those too small for the ranks to train; 0 if the
    data has a length, and in checkpoints of older versions."""
    epoch_ends: tuple[int, ...] = ()
    """Step at which each finished epoch ended."""


START = Position()
"""Beginning of a run."""
