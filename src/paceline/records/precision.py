"""Choice of `--precision auto`, which is a part of a run's topology."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from paceline.records.value_types import Count, NotNegative, Positive, PositiveCount

PrecisionReason = Literal[
    "faster", "not_faster", "losses_differ", "bf16_failed", "unmeasured", "no_instructions", "gpu", "old_gpu"
]
"""Reason of a choice.

`faster` and `not_faster`: bf16 is, or is not, clearly faster. `losses_differ` and `bf16_failed`: bf16 computes another
loss, or fails. `unmeasured`: there were no samples to measure with, or float32 failed, too.
`no_instructions`: a rank's processor has none for bf16. `gpu` and `old_gpu`: every GPU, or not every one, has matrix
units for bf16, which needs no measurement.
"""


class PrecisionChoice(Struct, frozen=True, kw_only=True):
    """Number format that `--precision auto` has chosen, the same on all ranks, and why."""

    precision: str
    """`fp32` or `bf16`."""
    channels_last: bool
    """Whether the run uses the channels-last memory format."""
    reason: PrecisionReason
    speedup: Positive | None = None
    """CPU time of a forward and backward pass in fp32 ÷ that in bf16, each on the rank that is slowest in it; None if
    it was not measured."""
    loss_difference: NotNegative | None = None
    """Largest difference of a rank's losses in bf16 from those in fp32 ÷ those in fp32; None if it was not measured,
    or not finite."""
    samples: PositiveCount | None = None
    """Samples per rank in a measured pass."""
    passes: Count = 0
    """Measured passes in each number format."""
    measured_s: NotNegative = 0.0
    """Seconds that the choice has taken."""
    error: str = ""
    """Error of a pass that failed."""
