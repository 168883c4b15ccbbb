"""Verdict on large batches: what they lose, which remedy repairs it, and whether the noise scale predicted it."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.large_batch.results import REPAIRED, LargeBatches, LargeBatchRow
from paceline.analysis.statistics import MIN_REPEATS, Estimate
from paceline.config.large_batch import PLAIN, REMEDIES, variant_name
from paceline.formatting import POINTS, WHOLE, factor, interval, join_names, percent, plural, short, whole

WIDE = 4.0
"""Ratio of the ends of the noise scale's interval from which its predictions are called rough."""
DESCRIPTIONS = {
    "linear": "learning rate × batch ÷ reference batch",
    "sqrt": "learning rate × the square root of batch ÷ reference batch",
    "warmup": "the learning rate rises linearly in the first epochs",
    "zero-gamma": "the last BatchNorm of each residual block starts with weight 0",
    "lars": "the optimiser LARS, with its own learning rate",
}
"""Changes that remedies make, by name."""


def sentences(found: LargeBatches) -> list[str]:
    """Return the whole verdict, the most important sentence first."""
    return [headline(found), *size_sentences(found), *noise_sentences(found), *closing_sentences(found)]


def headline(found: LargeBatches) -> str:
    """Return the result at the largest batch that was trained: what it loses, and what repairs it."""
    reference = found.reference
    if reference.accuracy is None:
        if reference.diverged_runs:
            return f"No conclusion: the reference batch of {whole(reference.batch)} has diverged. Use a lower --lr."
        return "The reference has not been tested yet."
    trained = [size for size in found.by_size if found.best(size) is not None or _all_diverged(found, size)]
    if not trained:
        return "No large batch has been trained yet."
    size = max(trained)
    if reference.is_at_chance:
        return f"No conclusion: the reference batch of {whole(reference.batch)} is at chance level."
    plain, best = found.plain(size), found.best(size)
    result = _result(found, size, plain, best)
    is_complete = all(row.runs or row_outcome(row) for row in found.by_size[size])
    return result if is_complete else f"So far: {result[0].lower()}{result[1:]}"


def _result(found: LargeBatches, size: int, plain: LargeBatchRow | None, best: LargeBatchRow | None) -> str:
    """Return the result at a batch of which a candidate was trained."""
    at = f"a batch of {whole(size)}"
    if plain is not None and plain.is_repaired:
        return f"Nothing to repair at {at}: {_reached(plain)}, {_against(found)}."
    if best is None:
        return f"Nothing trains at {at}: all candidates have diverged."
    if best.is_plain and not any(row.remedies for row in found.by_size[size]):
        return f"No remedy was tried at {at}: plain training reaches {_reached(best)}, {_against(found)}."
    if best.is_plain:
        return f"No remedy helps at {at}: plain training reaches the most, {_reached(best)}, {_against(found)}."
    without = "" if plain is None else f"; {_plain_clause(plain)}"
    if best.is_repaired:
        return f"{_capitalised(best)} repairs {at}: {_reached(best)}, {_against(found)}{without}."
    most = f"{row_name(best)} reaches the most, {_reached(best)}"
    return f"Nothing repairs {at} fully: {most}, {_against(found)}{without}."


def size_sentences(found: LargeBatches) -> Iterator[str]:
    """Yield, for each large batch, what plain training loses, and which remedies are better."""
    for size, rows in found.by_size.items():
        plain = found.plain(size)
        if plain is None or (plain.accuracy is None and not plain.diverged_runs):
            continue
        gains = [(row_name(row), row.gained) for row in rows if row.gained is not None]
        ended = [f"{row_name(row)} {_diverged_clause(row)}" for row in rows if row.remedies and row.diverged_runs]
        parts = [f"{_plain_clause(plain)}{_loss_clause(plain)}"]
        if gains:
            parts += _grouped(gains, "over it, in percentage points", "below it")
        elif plain.accuracy is None:
            reached = [f"{row_name(row)} {_reached(row)}" for row in rows if row.accuracy is not None]
            parts += [f"reached with remedies: {', '.join(reached)}"] if reached else []
        if ended:
            parts.append(join_names(ended))
        yield f"Batch {whole(size)}: {'; '.join(parts)}."
        yield from _added_sentences(size, rows)


def _added_sentences(size: int, rows: list[LargeBatchRow]) -> Iterator[str]:
    """Yield what each remedy adds to the others of a combination."""
    for row in rows:
        if row.added:
            gains = [(one.remedy, one.added) for one in row.added]
            parts = _grouped(gains, "added to the others, in percentage points", "taken from the others")
            yield f"Batch {whole(size)}, within {row_name(row)}: {'; '.join(parts)}."


def _grouped(gains: list[tuple[str, Estimate]], above: str, below: str) -> Iterator[str]:
    """Yield a list of gains, one of losses and one of those that may be either; without intervals, only the first."""
    unclear = [name for name, gain in gains if gain.low is not None and gain.spans(0)]
    clear = [(name, gain) for name, gain in gains if name not in unclear]
    losses = [(name, gain) for name, gain in clear if gain.low is not None and gain.value < 0]
    for words, group in ((above, [one for one in clear if one not in losses]), (below, losses)):
        if group:
            yield f"{words}: {', '.join(f'{name} {_signed(gain.value)}' for name, gain in group)}"
    if unclear:
        yield f"no clear difference: {', '.join(unclear)}"


def _signed(difference: float) -> str:
    """Format a difference of accuracies in percentage points, with its sign and without the unit."""
    return ("+" if difference > 0 else "") + POINTS.write(difference)


def noise_sentences(found: LargeBatches) -> Iterator[str]:
    """Yield the noise scale of the reference, and whether what it predicts for each batch came true."""
    noise = found.noise_scale
    if found.reference.accuracy is None or found.reference.is_at_chance:
        return
    if noise is None:
        if found.record_set.config.get("noise_scale") != "off":
            yield "The gradient noise scale of the reference is not known: its mean gradient is smaller than its noise."
        return
    ends = interval(noise.low, noise.high, WHOLE)
    value = whole(noise.value) + (f" ({ends})" if ends else "")
    samples = "sample" if round(noise.value) == 1 and not ends else "samples"
    yield (
        f"The gradient noise scale of the reference is {value} {samples}: it predicts that larger batches need more "
        "epochs for the same loss, even at the best learning rate."
    )
    if noise.low is not None and noise.high is not None and noise.high > WIDE * noise.low:
        yield "Its interval is wide, so these predictions are rough. More seeds or --noise-scale all may narrow it."
    for size in found.by_size:
        best = found.best(size)
        if best is not None and best.epochs_factor is not None:
            yield _prediction(found, size, best, best.epochs_factor)


def _prediction(found: LargeBatches, size: int, best: LargeBatchRow, needed: float) -> str:
    """Compare the best result at a batch with what the noise scale predicts for it."""
    epochs = f"{factor(needed)} the epochs of the reference"
    reached = f"the best of it is {_reached(best)}"
    if best.predicted_accuracy is None or best.accuracy is None or found.reference.accuracy is None:
        return f"Batch {whole(size)}: predicted to need {epochs}; {reached}."
    expected = f"so {percent(best.predicted_accuracy)} at equal epochs"
    off = best.accuracy - best.predicted_accuracy
    if abs(off) <= REPAIRED:
        verdict = "as predicted"
    else:
        verdict = f"{POINTS.write(abs(off))} percentage points {'more' if off > 0 else 'less'} than predicted"
    return f"Batch {whole(size)}: predicted to need {epochs}, {expected}; {reached}, {verdict}."


def closing_sentences(found: LargeBatches) -> Iterator[str]:
    """Yield remarks on the experiment as a whole."""
    runs = {row.runs for row in found.rows}
    if runs and max(runs) < MIN_REPEATS:
        too_few = f"Fewer than {MIN_REPEATS} seeds give no interval, so no difference here is certain."
        yield f"{too_few} Use --seeds {MIN_REPEATS}."
    elif any(row.gained is not None and row.gained.spans(0) for row in found.rows):
        goes_on = f"the same command with --seeds {2 * found.design.repeats} and --out {found.record_set.sources[0]}"
        yield f"Where no difference is clear, more seeds may show one: {goes_on} goes on."
    if found.comparison.interrupted:
        yield "This experiment was interrupted: it covers only the runs that had ended by then."


def remedy_notes(found: LargeBatches) -> list[tuple[str, str]]:
    """Return name and description of each remedy that was tried, in the order of names."""
    tried = {remedy for row in found.rows for remedy in row.remedies}
    epochs = found.design.warmup_epochs
    length = f" ({'one epoch' if epochs == 1 else f'{short(epochs)} epochs'})"
    return [(name, DESCRIPTIONS[name] + (length if name == "warmup" else "")) for name in REMEDIES if name in tried]


def row_name(row: LargeBatchRow) -> str:
    """Return the name of a candidate within its batch."""
    return "reference" if row.is_reference else variant_name(row.remedies)


def row_outcome(row: LargeBatchRow) -> str:
    """Return a remark on a candidate that failed, diverged or learned nothing; empty for others."""
    if row.row.failure is not None and not row.row.is_stopped_by_divergence:
        return "failed"
    if row.diverged_runs:
        return _diverged_clause(row)
    return "at chance level" if row.is_at_chance else ""


def facts(found: LargeBatches) -> list[str]:
    """Return what was trained: batches, epochs and ranks."""
    sizes = join_names([whole(size) for size in found.design.sizes])
    return [
        f"reference batch {whole(found.design.reference_batch)}, large {sizes}",
        plural(found.design.epochs, "epoch"),
        plural(found.design.ranks, "rank"),
    ]


def _capitalised(row: LargeBatchRow) -> str:
    return row_name(row)[0].upper() + row_name(row)[1:]


def _reached(row: LargeBatchRow) -> str:
    return f"{percent(row.accuracy)} test accuracy"


def _against(found: LargeBatches) -> str:
    reference = found.reference
    some = f" ({_diverged_clause(reference)})" if reference.diverged_runs else ""
    return f"against {percent(reference.accuracy)} of the reference batch of {whole(reference.batch)}{some}"


def _plain_clause(plain: LargeBatchRow) -> str:
    if plain.accuracy is None:
        return f"{PLAIN} training {_diverged_clause(plain)}"
    some = f" ({_diverged_clause(plain)})" if plain.diverged_runs else ""
    return f"{PLAIN} training reaches {percent(plain.accuracy)}{some}"


def _loss_clause(plain: LargeBatchRow) -> str:
    if plain.lost is None:
        return ""
    word = "less" if plain.lost.value < 0 else "more"
    return f", {POINTS.write(abs(plain.lost.value))} percentage points {word} than the reference"


def _diverged_clause(row: LargeBatchRow) -> str:
    return (
        "diverged" if row.diverged_runs >= row.runs else f"diverged in {row.diverged_runs} of {plural(row.runs, 'run')}"
    )


def _all_diverged(found: LargeBatches, size: int) -> bool:
    rows = found.by_size[size]
    return bool(rows) and all(row.diverged_runs for row in rows)
