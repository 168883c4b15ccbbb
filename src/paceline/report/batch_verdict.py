"""Verdict of an experiment over batch sizes: a few sentences, each with the figures that support it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from paceline.analysis.batch.points import BUSY, WITHIN, BatchCurve, BatchPoint, BatchSizes, Limit, counted_points
from paceline.analysis.chance import chance_of
from paceline.analysis.exclusions import ALTERNATIVES
from paceline.analysis.noise_scale import epochs_factor
from paceline.analysis.statistics import Estimate
from paceline.formatting import (
    ACCURACY,
    WHOLE,
    factor,
    format_cores,
    interval,
    join_names,
    number,
    percent,
    plural,
    seconds,
    size,
    whole,
)
from paceline.report.run_description import outcome
from paceline.report.verdict.headline import REMARKS, alternative_sentence
from paceline.report.verdict.next_command import train_command
from paceline.report.verdict.phrases import format_ratio, pairing, spans_one, without_intervals

EXTRAPOLATED = (
    "Times per epoch are extrapolated: the time per step × the steps of an epoch. Use --epochs to measure whole epochs."
)
LIMITS: dict[Limit, str] = {
    "compute": "computing takes {} of its step",
    "communication": "exposed communication takes {} of its step",
    "data": "loading data takes {} of its step",
    "other": "neither computing nor communication takes {} of its step",
}


def sentences(found: BatchSizes) -> list[str]:
    """Return the whole verdict: the fastest point, then each number of ranks, then remarks on the experiment."""
    beside = alternative_sentences(found)
    return [headline_sentence(found), *beside, *curve_sentences(found), *closing_sentences(found)]


def headline_sentence(found: BatchSizes) -> str:
    """Return the fastest point of all."""
    best = found.best
    if best is None:
        diverged = any(point.row.diverged for point in found.points)
        return "No point can be recommended: all have diverged or failed." if diverged else "No step was timed."
    time = "" if best.epoch_s is None else f", an epoch in {seconds(best.epoch_s.value)}"
    price = _certain_price(found, _curve_of(found, best))
    cost = ""
    if price is not None:
        points, other = ACCURACY.write(price.difference.value), whole(price.accurate.batch)
        below = f"{points} percentage points below that of batch {other} {length_phrase(found)}"
        cost = f"; its test accuracy is {below}{price.pairing}"
    elif _is_at_chance(found, best):
        cost = "; its test accuracy is at chance level"
    figures = f"{_rate(best)}{time}{cost}{_next_fastest(found, best)}"
    what = f"atch {whole(best.batch)} on {format_place(best, threads=found.threads_differ)}"
    if best.row.exclusion is not None:
        return f"No point can be recommended; b{what}, {REMARKS[best.row.exclusion]}, trains fastest: {figures}."
    if any(point.rate > best.rate and point.row.exclusion in ALTERNATIVES for point in found.points):
        return f"B{what} is the fastest that computes the same as one process: {figures}."
    return f"B{what} trains fastest: {figures}."


def alternative_sentences(found: BatchSizes) -> list[str]:
    """Return the points that are faster than the fastest, but do not compute the same, with their price."""
    return [alternative_sentence(found.comparison, alternative) for alternative in found.alternatives]


def _next_fastest(found: BatchSizes, best: BatchPoint) -> str:
    """Return a clause on the next fastest point if it may be as fast; empty if it is slower beyond doubt."""
    counted = counted_points(found.points)
    second = max((point for point in counted if point is not best), key=lambda point: point.rate, default=None)
    ratio = None if second is None else found.ratio_of_chosen(best, second, len(counted))
    if second is None or ratio is None or not spans_one(ratio):
        return ""
    where = f"batch {whole(second.batch)} on {format_place(second, threads=found.threads_differ)}"
    return f"; no measurable difference in speed from {where}, {format_ratio(ratio)}"


def curve_sentences(found: BatchSizes) -> list[str]:
    """Return, for each strategy and number of ranks: the fastest size, where it stops paying, limits and accuracy."""
    return [
        f"{format_curve(curve)}: {sentence}"
        for curve in found.curves
        for sentence in (
            *_fastest(found, curve),
            *_limits(curve),
            *_accuracy_price(found, curve),
            *_noise_prediction(curve),
            *_at_equal_time(found, curve),
        )
    ]


def closing_sentences(found: BatchSizes) -> list[str]:
    """Return remarks on the experiment as a whole."""
    remarks = []
    if found.epochs_are_extrapolated:
        remarks.append(EXTRAPOLATED)
    remarks += without_intervals(found.comparison)
    if found.comparison.interrupted:
        remarks.append("This experiment was interrupted: it covers only the runs that had finished by then.")
    return remarks


def length_phrase(found: BatchSizes) -> str:
    """Return at which point runs of different sizes are compared when they end: at equal epochs, or at equal time."""
    config = found.record_set.config
    if config.get("seconds") is None:
        return "at equal epochs"
    return "at equal time" if config.get("epochs") is None else "at the end"


def format_place(point: BatchPoint, *, threads: bool = False) -> str:
    """Format the ranks of a point and its strategy, as "2 ranks (ddp)"; with `threads`, "2 ranks × 1 thread (ddp)"."""
    over = f" over {plural(point.hosts, 'host')}" if point.hosts > 1 else ""
    each = f" × {plural(point.threads, 'thread')}" if threads and point.threads is not None else ""
    return f"{plural(point.ranks, 'rank')}{each}{over} ({point.strategy})"


def format_curve(curve: BatchCurve) -> str:
    """Format the strategy and the ranks of a curve."""
    over = f" over {plural(curve.hosts, 'host')}" if curve.hosts > 1 else ""
    return f"{curve.strategy} on {plural(curve.ranks, 'rank')}{over}"


def memory_sentence(point: BatchPoint) -> str:
    """Return the error of a point that ran out of memory, or failed in another way."""
    what = {True: "ran out of memory", "probably": "was killed", False: "failed"}[point.out_of_memory]
    return f"Batch {whole(point.batch)} on {format_place(point)} {what}: {point.row.failure}"


def point_outcome(point: BatchPoint) -> str:
    """Return a remark on a point that failed or has diverged; empty for others."""
    return {True: "out of memory", "probably": "killed", False: outcome(point.row)}[point.out_of_memory]


def next_command(found: BatchSizes) -> str | None:
    """Return the command that trains with the size from which larger ones no longer pay, on the fastest ranks.

    If the fastest size certainly costs accuracy, or has learnt nothing, it is the most accurate size.
    """
    best = found.best
    if best is None:
        return None
    curve = _curve_of(found, best)
    price = _certain_price(found, curve)
    chosen = price.accurate if price is not None else curve.enough or best
    if _is_at_chance(found, chosen):
        chosen = found.most_accurate(curve) or chosen
    design = msgspec.structs.replace(found.design, ranks=chosen.ranks, hosts=chosen.hosts)
    settings = {"strategy": chosen.strategy, "batch": chosen.batch}
    return train_command(found.record_set.config, design, settings)


@dataclass(frozen=True)
class _Price:
    """Price of the fastest size of a curve in test accuracy."""

    accurate: BatchPoint
    """Most accurate size."""
    difference: Estimate
    """Test accuracy of the most accurate size minus that of the fastest."""
    pairing: str
    """Clause on a difference that is not that of the medians in the table; empty if it is."""


def _certain_price(found: BatchSizes, curve: BatchCurve) -> _Price | None:
    """Return the price of the fastest size if it exceeds the spread between seeds; None otherwise."""
    best, accurate = curve.best, found.most_accurate(curve)
    if best is None or accurate is None or accurate is best:
        return None
    difference = found.accuracy_difference(accurate, best)
    if difference is None or difference.low is None or difference.spans(0):
        return None
    medians = accurate.row.test_accuracy, best.row.test_accuracy
    values = [own.value for own in medians if own is not None]
    return _Price(accurate, difference, pairing(difference, values, ACCURACY))


def _is_at_chance(found: BatchSizes, point: BatchPoint) -> bool:
    """Whether the test accuracy of a point is one that guessing explains."""
    chance = chance_of(entry.run for entry in found.record_set.runs)
    accuracy = point.row.test_accuracy
    return chance is not None and accuracy is not None and accuracy.value <= chance.most


def _curve_of(found: BatchSizes, point: BatchPoint) -> BatchCurve:
    return next(curve for curve in found.curves if point in curve.points)


def _fastest(found: BatchSizes, curve: BatchCurve) -> Iterator[str]:
    """Yield the fastest size, and the smallest that is nearly as fast."""
    best, enough = curve.best, curve.enough
    if best is None or enough is None:
        return
    rate = f"batch {whole(best.batch)} trains fastest, {_rate(best)}"
    if len(curve.measured) == 1:
        yield f"only batch {whole(best.batch)} was measured, {_rate(best)}."
    elif enough is best:
        before = [point for point in curve.measured if point.size < best.size][-1:]
        after = [point for point in curve.measured if point.size > best.size][:1]
        gained = "".join(_gain(found, best, point) for point in before or after)
        largest = "; it is the largest that was measured" if best is curve.measured[-1] else ""
        yield f"{rate}{gained}{largest}."
    else:
        share = percent(WITHIN, 0)
        yield f"{rate}; batch {whole(enough.batch)} is within {share} of that, so larger ones no longer pay."


def _gain(found: BatchSizes, best: BatchPoint, other: BatchPoint) -> str:
    ratio = found.rate_ratio(best, other)
    if ratio is None:
        return ""
    if spans_one(ratio):
        return f", with no measurable difference from batch {whole(other.batch)} ({format_ratio(ratio)})"
    return f", {format_ratio(ratio)} as fast as batch {whole(other.batch)}"


def _limits(curve: BatchCurve) -> Iterator[str]:
    """Yield what limits the fastest size: memory of larger ones, the processor, communication or data."""
    best, failed = curve.best, curve.first_without_memory
    if failed is not None:
        largest = curve.measured[-1] if curve.measured else None
        needs = ""
        if largest is not None and largest.row.peak_bytes is not None:
            needs = f", after {size(largest.row.peak_bytes)} on a rank at batch {whole(largest.batch)}"
        if failed.out_of_memory == "probably":
            yield f"memory probably limits the batch: a rank was killed at {whole(failed.batch)}{needs}."
        else:
            yield f"memory limits the batch: {whole(failed.batch)} ran out of memory{needs}."
    if best is None:
        return
    clauses = []
    limit, share = best.limit or (None, 0.0)
    if limit is not None:
        clauses.append(LIMITS[limit].format(percent(share, 0)))
    if best.cpu_share is not None and best.cpu_cores is not None:
        busy, used = percent(best.cpu_share.value, 0), format_cores(round(best.cpu_cores.value, 1))
        full = ", so the processor is the limit" if best.cpu_share.value >= BUSY and limit == "compute" else ""
        clauses.append(f"its ranks keep {used} busy ({busy} of the usable ones){full}")
    if best.mfu is not None:
        clauses.append(f"the model uses {percent(best.mfu.value)} of the peak")
    if clauses:
        yield f"at batch {whole(best.batch)} {'; '.join(clauses)}."


def _accuracy_price(found: BatchSizes, curve: BatchCurve) -> Iterator[str]:
    """Yield the test accuracy of the fastest size, compared with the most accurate one."""
    best, accurate = curve.best, found.most_accurate(curve)
    if best is None or accurate is None or best.row.test_accuracy is None or accurate.row.test_accuracy is None:
        return
    own, when = percent(best.row.test_accuracy.value), length_phrase(found)
    if accurate is best:
        if len([point for point in curve.counted if point.row.test_accuracy]) > 1:
            yield f"{when}, batch {whole(best.batch)} also has the highest test accuracy, {own}."
        return
    other = percent(accurate.row.test_accuracy.value)
    compared = f"batch {whole(best.batch)} reaches a test accuracy of {own}, batch {whole(accurate.batch)} {other}"
    price, difference = _certain_price(found, curve), found.accuracy_difference(accurate, best)
    if price is not None:
        ends = interval(price.difference.low, price.difference.high, ACCURACY)
        points = ACCURACY.write(price.difference.value)
        yield f"{when}, {compared}: the speed costs {points} percentage points ({ends}){price.pairing}."
    elif difference is None:
        yield f"{when}, {compared}; too few repeats to tell whether that is more than chance."
    else:
        yield f"{when}, {compared}: no measurable difference."


def _noise_prediction(curve: BatchCurve) -> Iterator[str]:
    """Yield where larger batches stop paying, as the gradient noise scale of the smallest one predicts."""
    known = [(point, noise) for point in curve.measured if (noise := point.row.noise_scale) is not None]
    if not known:
        return
    reference, noise = known[0]
    larger = [point for point in curve.measured if point.batch > reference.batch]
    if not larger:
        return
    epochs = {point.batch: epochs_factor(noise.value, point.batch, reference.batch) for point in larger}
    times = {point.batch: epochs[point.batch] * reference.rate / point.rate for point in larger}
    costs = [
        f"{factor(epochs[own])} the epochs and {factor(times[own])} the time at batch {whole(own)}" for own in times
    ]
    shortest = min(times, key=lambda own: times[own])
    pays = f"batch {whole(shortest)} is the fastest to it" if times[shortest] < 1 else "no larger batch pays"
    ends = interval(noise.low, noise.high, WHOLE)
    value = whole(noise.value) + (f" ({ends})" if ends else "")
    yield (
        f"the gradient noise scale at batch {whole(reference.batch)} is {value} samples. For the same loss, at "
        f"learning rates that suit each batch, it predicts {join_names(costs)}, so {pays}."
    )


def _at_equal_time(found: BatchSizes, curve: BatchCurve) -> Iterator[str]:
    """Yield the size with the highest accuracy, or the lowest training loss, when the first run ended.

    It is the test accuracy if runs were tested while they trained, else the training accuracy.
    """
    if found.equal_time_s is None or len(curve.measured) < 2:
        return
    when = f"when the first run of all ended (after {seconds(found.equal_time_s.value)})"
    accuracies = [(own.value, point) for point in curve.measured if (own := point.equal_time_accuracy) is not None]
    losses = [(own.value, point) for point in curve.measured if (own := point.equal_time_loss) is not None]
    tests = [(own.value, point) for point in curve.measured if (own := point.equal_time_test_accuracy) is not None]
    if tests:
        value, point = max(tests, key=lambda pair: pair[0])
        yield f"{when}, batch {whole(point.batch)} had the highest test accuracy, {percent(value)}."
    elif accuracies:
        value, point = max(accuracies, key=lambda pair: pair[0])
        yield f"{when}, batch {whole(point.batch)} had the highest training accuracy, {percent(value)}."
    elif losses:
        value, point = min(losses, key=lambda pair: pair[0])
        yield f"{when}, batch {whole(point.batch)} had the lowest training loss, {number(value)}."


def format_facts_of_sizes(found: BatchSizes) -> str:
    """Format the sizes of an experiment."""
    kind = "batches per rank" if found.design.per_rank else "global batches"
    return f"{kind} {join_names([whole(own) for own in found.design.sizes])}"


def _rate(point: BatchPoint) -> str:
    return f"{whole(point.rate)} samples per second"
