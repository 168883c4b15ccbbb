"""Sentence on the choice of `--precision auto`."""

from __future__ import annotations

from paceline.formatting import FACTOR, percent, plural, seconds
from paceline.records.precision import PrecisionChoice


def choice_sentence(choice: PrecisionChoice) -> str:
    """Return what `--precision auto` has chosen, and why, without a full stop."""
    layout = " with channels-last images" if choice.channels_last else ""
    return f"--precision auto: {choice.precision}{layout}, because {_reason(choice)}"


def _reason(choice: PrecisionChoice) -> str:
    if choice.reason == "no_instructions":
        return "the processor of a rank lists no instructions for bf16"
    if choice.reason == "gpu":
        return "every GPU has matrix units for bf16"
    if choice.reason == "old_gpu":
        return "a GPU has no matrix units for bf16"
    if choice.reason == "unmeasured":
        return f"passes could not be measured ({choice.error})"
    if choice.reason == "bf16_failed":
        return f"a pass in bf16 failed ({choice.error})"
    measured = f"measured on {plural(choice.samples or 0, 'sample')} per rank in {seconds(choice.measured_s)}"
    if choice.reason == "losses_differ":
        by = "is not finite" if choice.loss_difference is None else f"differs by {percent(choice.loss_difference)}"
        return f"the loss in bf16 {by} ({measured})"
    speedup = "" if choice.speedup is None else FACTOR.text(choice.speedup)
    clearly = "" if choice.reason == "faster" else ", less than the 1.1 that counts as faster"
    return f"a pass in bf16 is {speedup} as fast as in fp32{clearly} ({measured})"
