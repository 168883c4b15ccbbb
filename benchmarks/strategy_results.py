"""Results of `strategies.py`, from the records of its rounds alone: figures, tables for a page, and its picture."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strategy_picture import draw, interval

from paceline.analysis.costs import cost_per_sample
from paceline.analysis.record_set import collect_records
from paceline.analysis.statistics import Estimate, estimate_times, paired_ratio
from paceline.formatting import TIMES, seconds
from paceline.formatting import interval as format_interval
from paceline.records.events import FailureEvent
from paceline.records.experiment.record import ExperimentRecord, read_experiment
from paceline.report.run_description import on_hosts

REFERENCE, BOUND = "ddp", "none"
BEGIN, END = "<!-- made by benchmarks/strategies.py: begin -->", "<!-- made by benchmarks/strategies.py: end -->"
PAGE_WIDTH = 118
"""Longest line of prose in the page."""
FRAME = f"# Results\n\n{BEGIN}\n{END}\n"


@dataclass(frozen=True)
class Line:
    """Results of one strategy under one condition."""

    strategy: str
    step_s: Estimate | None
    """Time for a global batch; None if it failed in every round."""
    to_reference: Estimate | None
    to_bound: Estimate | None
    failure: str | None


@dataclass(frozen=True)
class Figures:
    """Results of one condition."""

    title: str
    conditions: str
    """One sentence: batch, precision, ranks, n, machine, versions, date."""
    lines: list[Line]
    """Fastest first."""

    def line(self, strategy: str) -> Line | None:
        """Return the results of a strategy; None if it was not measured."""
        return next((line for line in self.lines if line.strategy == strategy), None)

    def as_text(self) -> str:
        """Return the results as text for a terminal."""
        width = max(len(line.strategy) for line in self.lines)
        rows = [("", "time/step", f"÷ {REFERENCE}", f"÷ {BOUND}")]
        rows += [(line.strategy, _step(line), _ratio(line.to_reference), _ratio(line.to_bound)) for line in self.lines]
        shown = [f"  {name:{width}}  {step:>28}  {one:>20}  {other:>20}" for name, step, one, other in rows]
        return "\n".join([f"{self.title}: {self.conditions}", *shown, ""])


def figures_of(title: str, folders: Sequence[Path]) -> Figures:
    """Return the results of the rounds of one condition; ratios are paired by round."""
    records = [read_experiment(folder) for folder in folders]
    costs: dict[str, dict[int, float]] = {}
    failures: dict[str, str] = {}
    for number, record in enumerate(records):
        pooled = collect_records([record])
        failures |= {event.candidate: event.message for event in record.events_of(FailureEvent)}
        for candidate in pooled.candidates:
            costs.setdefault(candidate.name, {})
            for cost in cost_per_sample(pooled, candidate.name).values():
                costs[candidate.name][number] = cost
    batch = records[0].design.batch or 0
    lines = [
        Line(
            strategy=name,
            step_s=estimate_times([cost * batch for cost in own.values()]),
            to_reference=paired_ratio(own, costs.get(REFERENCE, {})),
            to_bound=paired_ratio(own, costs.get(BOUND, {})),
            failure=failures.get(name),
        )
        for name, own in costs.items()
    ]
    lines.sort(key=lambda line: float("inf") if line.step_s is None else line.step_s.value)
    return Figures(title, _conditions(records), lines)


def _conditions(records: Sequence[ExperimentRecord]) -> str:
    first = records[0]
    design, config = first.design, first.config
    run = next(measured.run for measured in first.runs if measured.candidate.role != "baseline")
    precision = (run.config["precision"] or "fp32") + (", channels-last" if config["channels_last"] else "")
    ranks = design.ranks
    machines = sorted({f"{r.provenance.cpu_count} cores of an {r.provenance.cpu}" for r in records})
    versions = sorted({str(r.provenance.versions["torch"]).partition("+")[0] for r in records})
    days = sorted({r.provenance.time[:10] for r in records})
    batch = f"{ranks} ranks × {(design.batch or 0) // ranks} images of {config['data'].partition(':')[0]}"
    place = f"{run.topology.threads} thread each, {run.topology.backend}{on_hosts(design)}"
    return (
        f"{batch}, {precision}, {place}; {config['steps']} steps a run, n = {len(records)}; "
        f"{', '.join(machines)}, torch {', '.join(versions)}, {'–'.join(dict.fromkeys([days[0], days[-1]]))}"
    )


def write_results(found: Sequence[Figures], page: Path) -> Path:
    """Write the tables into a page, between two marks, and the picture beside it; return the path of the picture.

    A page without the marks gets them at its end.
    """
    picture = page.with_name("results.svg")
    picture.write_text(draw(found))
    text = page.read_text() if page.exists() else FRAME
    if BEGIN not in text or END not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{as_markdown(found, picture.name)}{END}{after}")
    return picture


def as_markdown(found: Sequence[Figures], picture: str) -> str:
    """Return the picture, one table of all conditions, then one table per condition."""
    strategies = _in_order(found)
    alt = f"Step times of {len(strategies)} strategies relative to {REFERENCE}, under {len(found)} conditions"
    parts = [f"![{alt}]({picture})", _overview(found, strategies), *[_details(figures) for figures in found]]
    return "\n\n".join(parts) + "\n"


def _in_order(found: Sequence[Figures]) -> list[str]:
    """Return all strategies: the bound first, then by their mean place among the strategies measured with them."""
    places: dict[str, list[float]] = {}
    for figures in found:
        for place, line in enumerate(figures.lines):
            places.setdefault(line.strategy, []).append(place / len(figures.lines))
    return sorted(places, key=lambda name: (name != BOUND, sum(places[name]) / len(places[name])))


def _overview(found: Sequence[Figures], strategies: Sequence[str]) -> str:
    titles = [figures.title for figures in found]
    rows = []
    for name in strategies:
        lines = [figures.line(name) for figures in found]
        cells = ["–" if line is None else _short(line) for line in lines]
        rows.append(_row([f"`{name}`" + (" (bound)" if name == BOUND else ""), *cells]))
    explained = (
        f"Time per step ÷ that of `{REFERENCE}`, paired by round, median over the rounds. Bold: certainly faster, "
        "because the whole 95% interval is below 1."
    )
    return "\n".join([_wrapped(explained), "", _row(["strategy", *titles]), _row(["---"] * (1 + len(titles))), *rows])


def _details(figures: Figures) -> str:
    rows = [
        _row([f"`{line.strategy}`", _step(line), _ratio(line.to_reference), _ratio(line.to_bound)])
        for line in figures.lines
    ]
    head = [_row(["strategy", "time per step", f"÷ `{REFERENCE}`", f"÷ `{BOUND}`"]), _row(["---"] * 4)]
    return "\n".join([f"### {figures.title}", "", _wrapped(f"{figures.conditions}."), "", *head, *rows])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(line: Line) -> str:
    ratio = line.to_reference
    if ratio is None:
        return "failed" if line.failure else "–"
    faster = ratio.high is not None and ratio.high < 1
    return f"**{ratio.value:.2f}**" if faster else f"{ratio.value:.2f}"


def _step(line: Line) -> str:
    if line.step_s is None:
        return "failed: " + re.sub(r"\s+", " ", line.failure or "no step was timed")[:80]
    estimate = line.step_s
    unit = TIMES.own_unit(estimate.value)
    between = format_interval(estimate.low, estimate.high, unit)
    return seconds(estimate.value) + (f" ({between} {unit.name})" if between else "")


def _ratio(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:.2f}{interval(estimate)}"
