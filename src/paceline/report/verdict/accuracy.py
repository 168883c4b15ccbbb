"""Sentences on test accuracy: differences beyond the spread between seeds, and the price of a faster alternative."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.chance import Chance, chance_of, epochs_of, is_trained_enough
from paceline.analysis.comparison import Alternative, CandidateRow, Comparison
from paceline.analysis.statistics import Estimate
from paceline.formatting import ACCURACY, interval, number, percent, plural, short

POINTS = "percentage points"
NO_DIFFERENCE = 0.02
"""Difference in test accuracy that is treated as none if the whole interval is smaller."""


def accuracy_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield differences in test accuracy that exceed the spread between seeds, or that all are at chance level."""
    chance = _level_of_chance(comparison)
    if chance is not None:
        yield _all_at_chance(comparison, chance)
        return
    priced = {alternative.row.candidate.name for alternative in comparison.alternatives}
    for row in _tested(comparison):
        gain = row.accuracy_gain
        if gain is not None and not gain.spans(0) and row.candidate.name not in priced:
            yield (
                f"{row.candidate.name}: the test accuracy is {_difference(gain)} than "
                f"that of {comparison.reference}, which exceeds the spread between seeds."
            )


def price(comparison: Comparison, alternative: Alternative) -> str:
    """Return the price of an alternative in accuracy, as a sentence: with an interval where there are enough seeds."""
    own, best = alternative.row, comparison.row(alternative.instead_of)
    if own.test_accuracy is None or best.test_accuracy is None:
        return _price_without_accuracy(own, best)
    if _level_of_chance(comparison) is not None:
        return "Its price in accuracy is not known yet: the test accuracies are at chance level."
    gain = alternative.accuracy_gain
    if gain is None or gain.low is None or gain.high is None:
        seeds = plural(min(own.test_accuracy.repeats, best.test_accuracy.repeats), "seed")
        return (
            f"Its test accuracy was {percent(own.test_accuracy.value)}, that of {best.candidate.name} "
            f"{percent(best.test_accuracy.value)}, with {seeds}: too few to say what that costs."
        )
    ends = interval(gain.low, gain.high, ACCURACY)
    seen = f"{ACCURACY.write(gain.value)} {POINTS} ({ends})"
    if gain.within(-NO_DIFFERENCE, NO_DIFFERENCE):
        return f"It shows no measurable difference in test accuracy from {best.candidate.name}: {seen}."
    if gain.spans(0):
        return (
            f"Its price in accuracy is not certain: its test accuracy was {percent(own.test_accuracy.value)}, that of "
            f"{best.candidate.name} {percent(best.test_accuracy.value)}; paired by seed, the difference is {seen}."
        )
    return f"Its test accuracy is {_difference(gain)} than that of {best.candidate.name} ({ends})."


def _price_without_accuracy(own: CandidateRow, best: CandidateRow) -> str:
    """Return the price in test loss, where the workload defines no accuracy."""
    if own.test_loss is None or best.test_loss is None:
        return "Its price in accuracy was not measured."
    losses = f"{number(own.test_loss.value)}, that of {best.candidate.name} {number(best.test_loss.value)}"
    return f"Its test loss was {losses}; the workload defines no accuracy."


def _difference(gain: Estimate) -> str:
    return f"{ACCURACY.write(abs(gain.value))} {POINTS} {'higher' if gain.value > 0 else 'lower'}"


def _tested(comparison: Comparison) -> list[CandidateRow]:
    return [row for row in comparison.rows if row.test_accuracy is not None and row.candidate.role != "bound"]


def _level_of_chance(comparison: Comparison) -> Chance | None:
    """Return the accuracy of random guessing, if no accuracy is clearly above it; otherwise None."""
    chance, rows = chance_of(entry.run for entry in comparison.record_set.runs), _tested(comparison)
    at_chance = chance is not None and all(row.test_accuracy and row.test_accuracy.value <= chance.most for row in rows)
    return chance if rows and at_chance else None


def _all_at_chance(comparison: Comparison, chance: Chance) -> str:
    """Return why all accuracies are at chance level: too few steps, or a learning rate that does not fit."""
    level = f"All test accuracies are at chance level ({percent(chance.share, 0)})"
    runs = [entry.run for entry in comparison.record_set.runs if entry.run.summary]
    epochs = [epochs for run in runs if (epochs := epochs_of(run)) is not None]
    if not epochs or not all(map(is_trained_enough, runs)):
        return f"{level}: too few steps were trained to compare them. Train longer with --steps or --epochs."
    return (
        f"{level} after {short(min(epochs), 2)} epochs: the learning rate is probably too high or too low. Try another "
        "--lr, or a longer --warmup-epochs."
    )
