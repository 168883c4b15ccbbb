"""`RaceConfig`: the rules of a race to a test accuracy that `paceline race` leaves to the user."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.fixed_repeats import FixedRepeats
from paceline.config.run import ACCURACY, EPOCH
from paceline.config.setting import POSITIVE, check_values, setting
from paceline.errors import UsageError

DEFAULT_EPOCHS = 20
"""Epochs after which a run of a race has missed its target, if no length is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceConfig(FixedRepeats):
    """Target of a race, how often it is looked for, and the number of runs."""

    target: float | None = setting(None, bound=ACCURACY)
    """Test accuracy to reach, as in 0.94 for 94%."""
    runs: int = setting(5, bound=POSITIVE)
    """Number of runs, with the seeds from --seed on. The fastest and the slowest are left out of the score."""
    eval_every: str = setting(EPOCH, numbers=True)
    """Test after every N steps, or after every epoch (epoch). A run can only end at a test, so a long interval makes
    its training time longer."""

    def __post_init__(self) -> None:
        check_values(self)
        if not self.eval_every:
            raise UsageError("--eval-every is empty.", hint="write a number of steps, or epoch")

    @property
    def target_accuracy(self) -> float:
        """Test accuracy to reach; raise if none was given."""
        if self.target is None:
            raise UsageError("a race needs a target accuracy.", hint="give it with --target, as in --target 0.94")
        return self.target

    @property
    def repeats(self) -> int:
        """Number of runs, as the engine of experiments calls it."""
        return self.runs
