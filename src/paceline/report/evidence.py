"""Proofs of parity and loss_differences of lossless runs, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.analysis.comparison import Comparison, Proof
from paceline.analysis.loss_difference import VISIBLE, LossDifference, identical_groups
from paceline.report.formatting import listed, percent, plural

CAUSES = {
    "none": "None: the losses are the same to the last bit.",
    "rounding": "Rounding: the same numbers are added in another order, and training amplifies the difference.",
    "batch_norm": "BatchNorm: its statistics are taken over other shards, so the loss differs before any update.",
    "random_layers": "Dropout: each rank drops at random, so on other ranks the same samples lose other parts.",
    "setting": "The settings: the two do not train under the same ones, so nothing else was to be expected.",
    "unknown": "Unknown: the first loss, at equal weights, is further off than rounding explains.",
}

MOST_NAMED = 5
"""More names than this make no sentence; the table has them all."""


def proof_verdict(proof: Proof) -> str:
    """What a proof says about a strategy."""
    if proof.error == 0:
        return "The mean gradient, to the last bit."
    if proof.holds:
        return "The mean gradient, up to rounding."
    if proof.lossless:
        return "Not the mean gradient, though it promises it."
    return "Not the mean gradient, and it does not promise it."


def scientific(value: float) -> str:
    """A small relative figure."""
    if value == 0:
        return "0"
    if value >= 0.01:
        return "∞" if math.isinf(value) else f"{value:.2f}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


@dataclass(frozen=True)
class LossDifferenceRow:
    """A row of the table of loss_differences."""

    candidate: str
    first: str
    visible: str
    at_start: str
    at_end: str
    cause: str


def loss_difference_row(loss_difference: LossDifference) -> LossDifferenceRow:
    """When two runs part, how far, and why."""
    return LossDifferenceRow(
        candidate=loss_difference.candidate,
        first="never" if loss_difference.first_step is None else f"step {loss_difference.first_step}",
        visible="never" if loss_difference.visible_step is None else f"step {loss_difference.visible_step}",
        at_start=apart(loss_difference.first_difference),
        at_end=apart(loss_difference.last_difference),
        cause=CAUSES[loss_difference.cause],
    )


def apart(difference: float) -> str:
    """A relative difference: as per cent where that can be read, else in powers of ten."""
    return percent(difference) if VISIBLE <= difference < math.inf else scientific(difference)


def loss_difference_sentences(comparison: Comparison) -> Iterator[str]:
    """What the table of loss_differences comes down to."""
    if not comparison.loss_differences:
        yield "There are no two lossless runs of the same seed to compare."
        return
    steps = plural(min(loss_difference.steps for loss_difference in comparison.loss_differences), "step")
    for names in identical_groups(comparison.record_set):
        yield f"{_few(names)} have the same losses to the last bit, in all {steps}."
    differing = [loss_difference for loss_difference in comparison.loss_differences if loss_difference.cause != "none"]
    visible = [loss_difference for loss_difference in differing if loss_difference.visible_step is not None]
    for loss_difference in visible[:MOST_NAMED]:
        yield (
            f"{loss_difference.candidate} visibly parts from {loss_difference.reference} "
            f"at step {loss_difference.visible_step} "
            f"and ends {apart(loss_difference.last_difference)} away."
        )
    if differing and not visible:
        parted = _few([loss_difference.candidate for loss_difference in differing])
        verb = "parts" if len(differing) == 1 else "part"
        yield f"{parted} {verb} from {differing[0].reference}, but nowhere by {percent(VISIBLE)} or more."


def _few(names: list[str]) -> str:
    """Names as a sentence has them, the first ones of many."""
    if len(names) <= MOST_NAMED:
        return listed(names)
    return listed([*names[:2], f"{len(names) - 2} others"])
