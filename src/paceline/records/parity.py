"""Result of a parity proof, written to `parity.json`: difference between a strategy's gradients and the oracle's."""

from __future__ import annotations

import math

from msgspec import Struct

from paceline.errors import ParityError
from paceline.formatting import plural, scientific, short
from paceline.records.value_types import Count, Positive


class Parity(Struct, frozen=True, omit_defaults=True):
    """Difference between a strategy's gradients and the oracle's."""

    strategy: str
    ranks: Count
    error: float | None
    """‖g − g₀‖ ÷ ‖g₀‖ over all parameters, the largest over ranks and steps; None in a file if it is infinite."""
    factor: float | None
    """Factor between the oracle's gradient and the strategy's, on the rank and step with the largest error."""
    tolerance: Positive
    lossless: bool
    """Whether the strategy promises the mean gradient."""
    steps: Count
    """Steps over which the gradients were compared."""
    unproven: str = ""
    """Reason why the error proves nothing about the strategy, and what to do; empty if the proof is valid."""
    caveat: str = ""
    """Reason why the strategy trains differently from `ddp` although the proof is valid, and what to do; or empty."""

    @property
    def relative_error(self) -> float:
        """The error; infinite if it is not finite."""
        return math.inf if self.error is None else self.error

    @property
    def holds(self) -> bool:
        """Whether the gradients are equal up to rounding."""
        return self.relative_error < self.tolerance

    def check(self) -> None:
        """Raise `ParityError` with the kind of the difference, unless the proof holds or is not valid."""
        if self.holds or self.unproven:
            return
        error, factor = self.relative_error, math.nan if self.factor is None else self.factor
        if self.ranks > 1 and math.isclose(factor, self.ranks, rel_tol=1e-3):
            found = f"{self.ranks} times the mean over the ranks: it sums instead of averaging"
        elif not math.isfinite(error):
            found = "not finite, or missing for some parameters"
        elif abs(factor - 1) > 1e-3:
            found = f"off by a factor of {short(factor, 4)} (relative error {scientific(error)})"
        else:
            found = f"off by {scientific(error)} of its norm, where at most {scientific(self.tolerance)} is allowed"
        raise ParityError(
            f"{self.strategy} on {plural(self.ranks, 'rank')}: the gradient is {found}.",
            hint="correct the strategy, or set lossless = False if it does not promise the mean gradient",
        )
