"""Result of a parity proof, written to `parity.json`: difference between a strategy's gradients and the oracle's."""

from __future__ import annotations

import math

from msgspec import Struct

from paceline.errors import ParityError
from paceline.formatting import plural, scientific, short
from paceline.records.value_types import Count, Positive

PARAMETER_TOLERANCE_RATIO = 1000.0
LARGEST_PARAMETER_TOLERANCE = 0.5


def parameter_tolerance(tolerance: float) -> float:
    """Return the largest error of a single parameter, given that of all parameters together.

    It is much larger, since rounding errors that are small relative to the whole gradient may be large relative to a
    small part of it. A part that is wrong, and not rounded, is off by about its norm.
    """
    return min(PARAMETER_TOLERANCE_RATIO * tolerance, LARGEST_PARAMETER_TOLERANCE)


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
    parameter: str = ""
    """Name of the parameter with the largest error of its own; empty if none has an error."""
    parameter_error: float | None = 0.0
    """Error of that parameter, relative to its norm (`training/parity/difference.py`); None if it is infinite."""
    parameter_factor: float | None = 1.0
    """Factor between the oracle's gradient of that parameter and the strategy's."""

    @property
    def relative_error(self) -> float:
        """The error; infinite if it is not finite."""
        return math.inf if self.error is None else self.error

    @property
    def parameter_relative_error(self) -> float:
        """The error of the worst parameter; infinite if it is not finite."""
        return math.inf if self.parameter_error is None else self.parameter_error

    @property
    def holds(self) -> bool:
        """Whether the gradients are equal up to rounding, all together and for each parameter."""
        return self.relative_error < self.tolerance and self.parameters_hold

    @property
    def parameters_hold(self) -> bool:
        """Whether the gradient of each parameter is equal up to rounding."""
        return self.parameter_relative_error < parameter_tolerance(self.tolerance)

    def check(self) -> None:
        """Raise `ParityError` with the kind of the difference, unless the proof holds or is not valid."""
        if self.holds or self.unproven:
            return
        if self.relative_error < self.tolerance:
            error, allowed = self.parameter_relative_error, parameter_tolerance(self.tolerance)
            found = f"the gradient of {self.parameter} is {self._describe(error, self.parameter_factor, allowed)}"
        else:
            found = f"the gradient is {self._describe(self.relative_error, self.factor, self.tolerance)}"
            if self.parameter and not self._is_sum(self.factor):
                error, allowed = self.parameter_relative_error, parameter_tolerance(self.tolerance)
                own = self._describe(error, self.parameter_factor, allowed)
                found += f"; the parameter with the largest error is {self.parameter}, {own}"
        raise ParityError(
            f"{self.strategy} on {plural(self.ranks, 'rank')}: {found}.",
            hint="correct the strategy, or set lossless = False if it does not promise the mean gradient",
        )

    def _is_sum(self, factor: float | None) -> bool:
        return self.ranks > 1 and factor is not None and math.isclose(factor, self.ranks, rel_tol=1e-3)

    def _describe(self, error: float, factor: float | None, allowed: float) -> str:
        if self._is_sum(factor):
            return f"{self.ranks} times the mean over the ranks: it sums instead of averaging"
        if not math.isfinite(error):
            return "not finite, or missing"
        if factor is not None and abs(factor - 1) > 1e-3:
            return f"off by a factor of {short(factor, 4)} (relative error {scientific(error)})"
        return f"off by {scientific(error)} of its norm, where at most {scientific(allowed)} is allowed"
