"""Sentences on parity proofs and on loss differences between lossless runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.analysis.comparison import Comparison, Proof
from paceline.analysis.loss_difference import VISIBLE, LossDifference, identical_groups
from paceline.formatting import join_names, percent, plural, scientific

CAUSES = {
    "none": "None: the losses are identical to the last bit.",
    "rounding": "Rounding: the same numbers are added in a different order, and training amplifies the difference.",
    "batch_norm": "BatchNorm: its statistics are computed over different shards, so the first loss already differs.",
    "random_layers": "Dropout: each rank draws its own mask, so the same samples get other masks on other ranks.",
    "setting": "The settings: the two runs train under different settings, so different losses are expected.",
    "unknown": "Unknown: the first loss, at equal weights, differs by more than rounding explains.",
}

MOST_NAMED = 5
"""Most names in one sentence; the table lists them all."""


def proof_verdict(proof: Proof) -> str:
    """Return the result of a parity proof as a sentence."""
    if proof.error == 0:
        return "The mean gradient, identical to the last bit."
    if proof.holds:
        return "The mean gradient, up to rounding."
    if proof.lossless:
        return "Not the mean gradient, although the strategy promises it."
    return "Not the mean gradient; the strategy does not promise it."


@dataclass(frozen=True)
class LossDifferenceRow:
    """Row of the table of loss differences, formatted."""

    candidate: str
    first: str
    visible: str
    at_start: str
    at_end: str
    cause: str


def loss_difference_row(loss_difference: LossDifference) -> LossDifferenceRow:
    """Format the step at which two runs begin to differ, by how much, and the cause."""
    return LossDifferenceRow(
        candidate=loss_difference.candidate,
        first="never" if loss_difference.first_step is None else f"step {loss_difference.first_step}",
        visible="never" if loss_difference.visible_step is None else f"step {loss_difference.visible_step}",
        at_start=format_difference(loss_difference.first_difference),
        at_end=format_difference(loss_difference.last_difference),
        cause=CAUSES[loss_difference.cause],
    )


def format_difference(difference: float) -> str:
    """Format a relative difference: as per cent where it is visible in a plot, else in powers of ten."""
    return percent(difference) if VISIBLE <= difference < math.inf else scientific(difference)


def loss_difference_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield a summary of the table of loss differences."""
    if not comparison.loss_differences:
        yield "There are no two lossless runs with the same seed to compare."
        return
    steps = plural(min(loss_difference.steps for loss_difference in comparison.loss_differences), "step")
    for names in identical_groups(comparison.record_set):
        yield f"{_first_names(names)} have identical losses, to the last bit, in all {steps}."
    differing = [loss_difference for loss_difference in comparison.loss_differences if loss_difference.cause != "none"]
    visible = [loss_difference for loss_difference in differing if loss_difference.visible_step is not None]
    for loss_difference in visible[:MOST_NAMED]:
        yield (
            f"The loss of {loss_difference.candidate} visibly differs from that of {loss_difference.reference}, "
            f"first at step {loss_difference.visible_step}; "
            f"the last losses differ by {format_difference(loss_difference.last_difference)}."
        )
    if differing and not visible:
        candidates = _first_names([loss_difference.candidate for loss_difference in differing])
        losses = "The loss" if len(differing) == 1 else "The losses"
        verb = "differs" if len(differing) == 1 else "differ"
        reference = differing[0].reference
        yield f"{losses} of {candidates} {verb} from that of {reference} by less than {percent(VISIBLE)} in every step."


def _first_names(names: list[str]) -> str:
    """Join names for a sentence; of many, the first two and the number of the others."""
    if len(names) <= MOST_NAMED:
        return join_names(names)
    return join_names([*names[:2], f"{len(names) - 2} others"])
