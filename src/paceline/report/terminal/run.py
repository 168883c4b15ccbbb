"""Terminal summary of a training run: a row per rank, the time split, the test results and the time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from paceline.analysis.caveats import over_subscription
from paceline.analysis.checkpoints import CheckpointCost, checkpoint_cost
from paceline.analysis.divergence import divergence_cause, divergence_of, divergence_place
from paceline.analysis.noise_scale import NoiseScale, noise_scale
from paceline.analysis.race.runs import race_run
from paceline.analysis.ranks import UNEVEN, rank_rows
from paceline.analysis.resources import host_usage
from paceline.analysis.steps.candidate_split import splits_of
from paceline.analysis.steps.split import PARTS
from paceline.analysis.steps.timing import includes_warm_up
from paceline.analysis.summary import summarise
from paceline.analysis.traffic.payload import payload_of
from paceline.formatting import (
    NOTHING,
    TENTHS,
    TIMES,
    format_cores,
    number,
    percent,
    plural,
    seconds,
    size,
    whole,
)
from paceline.records import RunRecord
from paceline.records.events import ResumedEvent
from paceline.records.summary import BestEvaluation, ReplicaComparisons, StalenessSummary, Summary
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.figures.figure import Figure
from paceline.report.figures.ranks import RANK_FIGURES
from paceline.report.figures.steps import SHARE_FIGURES, SPLIT_FIGURES
from paceline.report.race_verdict import format_accuracy, format_run
from paceline.report.run_description import WARM_UP_COUNTS
from paceline.report.tables.payload import payload_sentence
from paceline.report.tables.profile import profile_sentences
from paceline.report.tables.steps import SplitRow
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.profile import profile_table
from paceline.report.terminal.table import figure_table

SPLIT_WIDE = 100
"""Terminal width from which the time split shows times beside shares."""


def print_run(record: RunRecord, console: Console) -> None:
    """Print the summary of one run."""
    summary = summarise(record)
    ranks = rank_rows([record])
    numbers = text_column("rank", [str(rank.rank) for rank in ranks])
    columns = [numbers, *terminal_columns(RANK_FIGURES, ranks)]
    console.print(figure_table(columns, console.width, name_side="right"))
    split = split_table(record, console.width)
    if split is not None:
        console.print(split)
    if includes_warm_up(record):
        print_line(console, WARM_UP_COUNTS)
    profile = profile_table(record, console.width)
    if profile is not None:
        console.print(profile)
    for sentence in sentences(summary, record):
        print_line(console, sentence)


def noise_sentence(noise: NoiseScale) -> str:
    """Return the gradient noise scale of a run as an estimate of the critical batch, with its interval."""
    if noise.low is None or noise.high is None:
        spread = "too few windows for an interval"
    else:
        spread = (
            f"at least {whole(noise.low)}" if math.isinf(noise.high) else f"{whole(noise.low)} to {whole(noise.high)}"
        )
    return (
        f"gradient noise scale: {whole(noise.value)} samples ({spread}), over the last half of the run; a batch well "
        "below it profits from doubling, one well above it hardly does"
    )


def staleness_sentence(staleness: StalenessSummary) -> str:
    """Return the staleness of gradients under an asynchronous strategy."""
    if not staleness.gradients:
        return "no gradient reached a server"
    counts = {"damped": staleness.damped, "dropped": staleness.dropped}
    late = [f"{plural(count, 'gradient')} {what}" for what, count in counts.items() if count]
    bound = "" if staleness.max_allowed is None else f" (allowed: {staleness.max_allowed})"
    mean = NOTHING if staleness.mean is None else TENTHS.text(staleness.mean)
    return (
        f"staleness of gradients: {mean} updates on average, {staleness.max} at most{bound}"
        f", {' and '.join(late) or 'no late gradients'}"
    )


def replicas_sentence(replicas: ReplicaComparisons) -> str:
    """Return the result of comparing the replicas while training, and its cost."""
    difference = replicas.difference
    found = "identical on all ranks"
    if difference is not None:
        found = "equal on all ranks up to rounding" if difference.by_rounding else "not equal on all ranks"
    share = "" if replicas.share is None else f", {percent(replicas.share, 2)} of the training time"
    return f"replicas: {found} in {plural(replicas.checks, 'check')} ({seconds(replicas.seconds)}{share})"


def checkpoints_sentence(cost: CheckpointCost) -> str:
    """Return the number of checkpoints and what they cost."""
    failed = f", {cost.failed} could not be written" if cost.failed else ""
    sizes = f" of {size(cost.bytes)}" if cost.written else ""
    slowed = f", and steps took {seconds(cost.slowed_s)} longer beside them" if cost.slowed_s else ""
    return (
        f"checkpoints: {cost.written}{sizes}{failed}; training waited {seconds(cost.stall_s)} for them{slowed}: "
        f"{percent(cost.share, 2)} of the run's time"
    )


def best_sentence(best: BestEvaluation) -> str:
    """Return the best evaluation while training."""
    epoch = "" if best.epoch is None else f" (epoch {best.epoch + 1})"
    figure = f"lowest test loss {number(best.loss)}"
    if best.accuracy is not None:
        figure = f"best accuracy {percent(best.accuracy)}, at test loss {number(best.loss)}"
    return f"{figure}: after step {best.step}{epoch}"


def split_table(record: RunRecord, width: int) -> Table | None:
    """Return the time split of each rank, in a narrow terminal without times; None where no events were recorded."""
    rows = [SplitRow("", rank, split, wait_s=None, waited_for=None) for rank, split in splits_of(record).items()]
    if not rows:
        return None
    numbers = text_column("rank", [str(row.rank) for row in rows])
    columns = [numbers, *terminal_columns(split_figures(width), rows)]
    return figure_table(columns, width, name_side="right", title="time split of the mean step")


def split_figures(width: int) -> list[Figure[SplitRow]]:
    """Return the figures of the time split: times with the shares of the main parts, or shares alone."""
    if width >= SPLIT_WIDE:
        return [*SPLIT_FIGURES, *SHARE_FIGURES[: len(PARTS)]]
    return [*SHARE_FIGURES, *[figure for figure in SPLIT_FIGURES if figure.format is not TIMES]]


def _target_sentence(record: RunRecord) -> str:
    """Return whether the run reached its target accuracy, and when."""
    target = record.config["target"]
    run = race_run(record, 1, target)
    found = format_run(run, target)
    return f"target: {found}" if run.outcome == "reached" else f"target of {format_accuracy(target)} {found}"


def sentences(summary: Summary, record: RunRecord) -> Iterator[str]:
    """Yield the results that are not in the tables."""
    test = summary.test
    if test:
        available = "" if test.available is None else f"/{test.available}"
        accuracy = "" if test.accuracy is None else f", accuracy {percent(test.accuracy)}"
        yield f"test loss {number(test.loss)}{accuracy}: evaluated {test.samples}{available} unique samples"
        if test.loss is None and test.samples:
            yield "the test loss is not finite: the test data or the model's outputs contain NaN or infinity"
    if record.config.get("target") and test:
        yield _target_sentence(record)
    if summary.best and summary.best.step < summary.steps:
        yield best_sentence(summary.best)
    for rank, replica in enumerate(summary.test_by_rank):
        yield f"  replica of rank {rank}: loss {number(replica.loss)}, accuracy {percent(replica.accuracy)}"
    payload = payload_of(record)
    if payload is not None and len(payload.ranks) > 1:
        yield payload_sentence(payload)
    divergence = summary.buffer_divergence
    if divergence is not None:
        apart = f"differ by {percent(divergence, 3)} of their norm" if divergence else "identical on all ranks"
        yield f"BatchNorm buffers (--bn {record.config['bn']}): {apart}"
    if summary.replicas:
        yield replicas_sentence(summary.replicas)
    if record.first_step:
        resumes = plural(len(record.events_of(ResumedEvent)), "time")
        yield f"the run resumed {resumes}; the tables above are of the steps since step {whole(record.first_step)}"
    cost = checkpoint_cost(record)
    if cost is not None:
        yield checkpoints_sentence(cost)
    times = [rank.step_s for rank in summary.ranks if rank.step_s]
    together = record.topology.exchanges and record.lockstep
    if together and times and max(times) > (1 + UNEVEN) * min(times):
        apart = percent(max(times) / min(times) - 1)
        yield f"step times differ by {apart} between ranks, although they step together; {_uneven_cause(record)}"
    sharing = over_subscription(record)
    if sharing:
        yield f"note: {sharing}"
    if summary.staleness:
        yield staleness_sentence(summary.staleness)
    if summary.train_s is not None:
        rate = summary.samples_per_s
        speed = f", {whole(rate)} samples/s in the median window" if rate else ""
        yield f"trained {plural(summary.steps, 'step')} in {seconds(summary.train_s)}{speed}"
    noise = noise_scale(record)
    if noise is not None:
        yield noise_sentence(noise)
    if summary.skipped_steps:
        yield f"skipped the update of {plural(summary.skipped_steps, 'step')} because gradients were not finite"
    yield from _hosts(record)
    yield from profile_sentences(record)
    estimate = summary.estimate
    if estimate:
        yield f"{plural(estimate.epochs, 'epoch')} would take about {seconds(estimate.seconds)}"
    diverged = summary.divergence or divergence_of(record)  # Older records lack it.
    if diverged is not None:
        place = divergence_place(diverged.step, record.config.get("seed"))
        yield f"the run diverged at {place}: {divergence_cause(diverged)}"
    if diverged is not None and record.finished:  # Otherwise the error that stopped it has a hint.
        # The batches of an iterable have no size that is known, and cannot be examined for NaN afterwards.
        data = "check the data for NaN, or " if record.topology.batch is None else ""
        yield f"hint: {data}use a lower --lr, a longer --warmup-epochs or --clip-norm 1"
    state = "" if record.finished else " (stopped)" if diverged is not None else " (interrupted)"
    yield f"record: {record.path}{state}"


def _uneven_cause(record: RunRecord) -> str:
    """Return the probable cause of uneven step times, with the ranks and cores of a host where they are known."""
    if record.topology.device != "cpu":
        return "the GPUs or hosts differ in speed, or other programs use them"
    ranks, cores = record.topology.ranks_per_host, record.topology.cores
    placed = f" ({plural(ranks, 'rank')} on {format_cores(cores)})"
    return f"ranks probably share cores with each other or with other programs{placed}"


def _hosts(record: RunRecord) -> Iterator[str]:
    """Yield how busy the cores of each host were, with all processes counted."""
    hosts = host_usage(record)
    for host in hosts:
        if host.busy is not None:
            name = "the host's" if len(hosts) == 1 else f"host {host.host}'s"
            used = f"{size(host.used_bytes)} of memory in use"
            yield f"{name} cores were busy {percent(host.busy, 0)} of the time, {used}"
