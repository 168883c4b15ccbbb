"""Sentences on test accuracy: differences beyond the spread between seeds, and the price of a faster alternative."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.chance import Chance, chance_of, epochs_of, is_trained_enough
from paceline.analysis.comparison import Alternative, CandidateRow, Comparison
from paceline.analysis.learning import SMALL_DIFFERENCE, Learning
from paceline.analysis.statistics import Estimate
from paceline.formatting import ACCURACY, LOSS, factor, interval, number, percent, plural, short
from paceline.report.verdict.phrases import pairing

POINTS = "percentage points"


def accuracy_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield differences in test accuracy that exceed the spread between seeds, or that all are at chance level."""
    chance = _level_of_chance(comparison)
    if chance is not None:
        yield _all_at_chance(comparison, chance)
        return
    learning = comparison.learning
    is_in_headline = comparison.better_learned is not None and comparison.decision.outcome == "winner"
    if learning is not None and not is_in_headline:
        yield f"{learning_clause(comparison, learning)}."
    priced = {alternative.row.candidate.name for alternative in comparison.alternatives}
    said = set() if learning is None else {learning.best, learning.other}
    for row in _tested(comparison):
        gain = row.accuracy_gain
        name, is_said = row.candidate.name, {row.candidate.name, comparison.reference} == said
        if gain is not None and not gain.spans(0) and name not in priced and not is_said:
            yield (
                f"{row.candidate.name}: the test accuracy is {_difference(gain)} than "
                f"that of {comparison.reference}, which exceeds the spread between seeds."
            )


def learning_clause(comparison: Comparison, learning: Learning) -> str:
    """Return which setting has learned best, and by how much against the spread between seeds, as a clause."""
    best, other, difference = learning.best, learning.other, learning.difference
    if learning.measure == "accuracy":
        measure, direction, unit = "test accuracy", ("highest", "higher", "more"), f" {POINTS}"
        values = percent(learning.best_value), percent(learning.other_value)
    else:
        measure, direction, unit = "test loss", ("lowest", "lower", "less"), ""
        values = number(learning.best_value), number(learning.other_value)
    if difference is None or difference.low is None or difference.high is None:
        seeds = plural(learning.seeds, "seed")
        reached = f"{best} reached a {measure} of {values[0]}, {other} {values[1]}"
        return f"{reached}, with {seeds}: too few to say which is better"
    shown = ACCURACY if learning.measure == "accuracy" else LOSS
    if learning.is_clear:
        length = "" if best == comparison.decision.first else f"; {_longer(comparison, best)}"
        low, high = sorted((abs(difference.low), abs(difference.high)))
        amount = f"{shown.write(abs(difference.value))}{unit} {direction[2]} ({interval(low, high, shown)})"
        how = pairing(difference, (learning.best_value, learning.other_value), shown)
        return (
            f"{best} reaches a {direction[1]} {measure} than {other}, {values[0]} instead of {values[1]}: {amount}, "
            f"which exceeds the spread between seeds{how}{length}"
        )
    ends = f"{shown.write(difference.value)}{unit} ({interval(difference.low, difference.high, shown)})"
    return (
        f"{best} reached the {direction[0]} {measure}, {values[0]}, {other} {values[1]}; the difference of {ends} is "
        "within the spread between seeds"
    )


def _longer(comparison: Comparison, best: str) -> str:
    """Return the time of a sample under the best setting against the fastest one, as a clause."""
    assert comparison.decision.first is not None
    ratio = comparison.speed_up(comparison.decision.first, best)
    return "" if ratio is None else f"it takes {factor(ratio.value)} the time per sample"


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
    if gain.within(-SMALL_DIFFERENCE, SMALL_DIFFERENCE):
        return f"It shows no measurable difference in test accuracy from {best.candidate.name}: {seen}."
    if gain.spans(0):
        return (
            f"Its price in accuracy is not certain: its test accuracy was {percent(own.test_accuracy.value)}, that of "
            f"{best.candidate.name} {percent(best.test_accuracy.value)}; paired by seed, the difference is {seen}."
        )
    how = pairing(gain, (own.test_accuracy.value, best.test_accuracy.value), ACCURACY)
    return f"Its test accuracy is {_difference(gain)} than that of {best.candidate.name} ({ends}){how}."


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
