"""Live display of a comparison: the current run, the remaining time and the results so far, read from the records."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.core_sharing import sharing_sentence
from paceline.analysis.findings import Finding, problems
from paceline.analysis.remaining_time import TimeEstimator
from paceline.analysis.scaling.machines import planned_oversubscription
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.formatting import join_names, plural, scientific, seconds
from paceline.records.events import RUN_EVENTS, CompilingEvent, EvaluationEvent, StartEvent
from paceline.records.experiment.design import Design
from paceline.records.parity import Parity
from paceline.records.schema import EVENTS_FILE, FINISHED_FILE, resources_file, steps_file
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import column_of
from paceline.report.live.run import Display, EventTail, GpuTail, Tail, format_evaluation
from paceline.report.run_description import format_remaining, on_hosts, run_length
from paceline.report.terminal.doctor import LiveExamination
from paceline.report.terminal.lines import print_line

POLL_S = 0.2


class ShownRun(Protocol):
    """Run of a candidate that the display follows."""

    @property
    def name(self) -> str:
        """Name of the candidate."""

    @property
    def folder(self) -> Path:
        """Folder of the run's record."""


class LiveTable:
    """Live display of an experiment; where the console is not a terminal, one line per stage."""

    shown: tuple[str, ...] = ("step_s", "ratio", "exposed")
    """Figures of the results so far."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._comparison: Comparison | None = None
        self._repeats = "?"
        self._estimator: TimeEstimator | None = None
        self._display: Display | None = None

    def plan(self, design: Design, candidates: Sequence[str], config: RunConfig) -> None:
        """Print the planned runs, and a warning if ranks share cores."""
        least, most = design.repeats, max(design.repeats, design.max_repeats)
        self._repeats = str(least) if least == most else f"{least}–{most}"
        self._print(format_plan(design, candidates, config, self._repeats))
        sharing = planned_oversubscription(design)
        if sharing:
            self._print(f"warning: {sharing_sentence(sharing)}")

    def follow_time(self, estimator: TimeEstimator) -> None:
        """Print the estimated time of the experiment, and show the remaining time from now on."""
        self._estimator = estimator
        expected = estimator.remaining()
        if expected is None:
            self._print("time: unknown until the first runs have finished")
            return
        text = format_remaining(expected)
        about = "" if text.startswith("up to") else "about "
        self._print(f"time: {about}{text}; this range is refined as runs finish")

    def continued(self, folder: Path, runs: int, planned: int, failed: Sequence[str], repeats: int) -> None:
        """Print that an experiment goes on, and what is there."""
        del repeats
        again = f"; tried again: {join_names(list(failed))}, which failed" if failed else ""
        self._print(f"goes on in {folder}: {runs} of {planned} runs are there{again}")

    def proved(self, name: str, parity: Parity) -> None:
        """Print the result of a parity proof."""
        self._print(f"  {name}: {format_proof(parity)}")

    def unproven(self, reason: str) -> None:
        """Print why there is no parity proof."""
        self._print(f"  {reason}")

    def examine(self, folder: Path) -> LiveExamination:
        """Return a context manager that shows the progress of the doctor's examination."""
        self._display = display = LiveExamination(folder, self._console, quiet=True)
        return display

    def examined(self, found: Sequence[Finding]) -> None:
        """Print the problems that the doctor found; the report has the other findings."""
        for problem in problems(found):
            self._print(f"doctor: {problem.message}" + (f" fix: {problem.fix}" if problem.fix else ""))

    def unexamined(self, reason: str) -> None:
        """Print why the machine could not be examined."""
        self._print(f"doctor: the machine could not be examined: {reason}")

    def failed(self, name: str, error: PacelineError, *, left_out: bool) -> None:
        """Print why a candidate failed, and whether it is left out of further repeats."""
        outcome = "failed and is left out" if left_out else "failed with this seed"
        self._print(f"{name} {outcome}: {error.message}")
        if error.detail:
            self._print(error.detail)
        if error.hint and left_out:
            self._print(f"hint: {error.hint}")

    def refresh(self, comparison: Comparison, repeats: int) -> None:
        """Show the results after a repeat."""
        self._comparison = comparison
        if not self._console.is_terminal:
            known = [(row.candidate.name, self.result_of(row)) for row in self.rows_to_show(comparison)]
            results = " · ".join(f"{name} {result}" for name, result in known if result)
            self._print(f"after {plural(repeats, 'repeat')}{self._to_go()}: {results}")

    def _to_go(self) -> str:
        """Return the remaining time as a suffix; empty if it is unknown, and at the end."""
        remaining = None if self._estimator is None else self._estimator.remaining()
        return f", {format_remaining(remaining)} to go" if remaining is not None and remaining.most_s > 0 else ""

    @contextmanager
    def launch(self, stage: str, schedule: Sequence[ShownRun], steps: int | None) -> Iterator[None]:
        """Show the progress of the runs of one launch while the context is open."""
        if not self._console.is_terminal:
            yield
            return
        progress = make_progress(self._console)
        proving = stage == "proof"
        self._current = progress.add_task("starting ranks", total=None if proving else steps, unit="steps")
        title = stage if proving else f"{stage} of {self._repeats}"
        self._overall = progress.add_task(title + self._to_go(), total=len(schedule), unit="runs")
        self._display = Display(partial(self._draw, progress, schedule, title))
        with self._display:
            yield

    def close(self) -> None:
        """Close the display if Ctrl-C interrupted closing it."""
        if self._display is not None:
            self._display.close()

    def _draw(self, progress: Progress, schedule: Sequence[ShownRun], title: str, stop: threading.Event) -> None:
        shown = Group(self._figures(), progress)
        with Live(shown, console=self._console, refresh_per_second=8, transient=True):
            self._follow(progress, schedule, title, stop)

    def _follow(self, progress: Progress, schedule: Sequence[ShownRun], title: str, stop: threading.Event) -> None:
        steps = [Tail(scheduled.folder / steps_file(0)) for scheduled in schedule]
        gpus = [GpuTail(scheduled.folder / resources_file(0)) for scheduled in schedule]
        events = [EventTail(scheduled.folder / EVENTS_FILE) for scheduled in schedule]
        trained = [0] * len(schedule)
        tested = [""] * len(schedule)
        while not stop.wait(POLL_S):
            done = sum((scheduled.folder / FINISHED_FILE).exists() for scheduled in schedule)
            progress.update(self._overall, completed=done, description=title + self._to_go())
            if done == len(schedule):
                continue
            for event in events[done].new_events(RUN_EVENTS):
                if isinstance(event, StartEvent):
                    tested[done] = ""  # It has been compiled.
                    if event.steps:
                        progress.update(self._current, total=event.steps)
                elif isinstance(event, CompilingEvent):
                    tested[done] = " (compiling)"
                elif isinstance(event, EvaluationEvent):
                    tested[done] = f" ({format_evaluation(event.test)})"
            trained[done] += sum(not line.startswith("step") for line in steps[done].new_lines())
            description = escape(schedule[done].name) + tested[done]
            gpu = gpus[done].latest()
            description += f" ({gpu})" if gpu else ""
            progress.update(self._current, description=description, completed=trained[done])

    def _figures(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        if self._comparison is None:
            return table
        rows = [row for row in self.rows_to_show(self._comparison) if row.step_s is not None]
        columns = [column_of(CANDIDATE_FIGURES, key, rows) for key in self.shown]
        for heading in ("so far", *[column.heading for column in columns]):
            table.add_column(heading, justify="right" if heading != "so far" else "left")
        for row, *texts in zip(rows, *[column.texts for column in columns], strict=True):
            table.add_row(escape(row.candidate.name), *texts)
        return table

    def rows_to_show(self, comparison: Comparison) -> list[CandidateRow]:
        """Return the rows whose results so far are shown."""
        return comparison.rows

    def result_of(self, row: CandidateRow) -> str:
        """Return the most important result of a candidate; empty if there is none yet."""
        return "" if row.step_s is None else seconds(row.step_s.value)

    def _print(self, text: str) -> None:
        print_line(self._console, text)


def make_progress(console: Console, *, transient: bool = False) -> Progress:
    """Return the progress bars of runs and steps; where the console is not a terminal, they show nothing."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


def format_plan(design: Design, candidates: Sequence[str], config: RunConfig, repeats: str) -> str:
    """Format the planned runs of an experiment as one line."""
    length = run_length(config)
    batch = "" if design.batch is None else f", global batch {design.batch}"
    parts = [
        f"{design.target}: {', '.join(candidates)}",
        f"{plural(design.ranks, 'rank')} × {plural(design.threads, 'thread')}{on_hosts(design)}{batch}",
        f"{length} × {repeats} repeat" + ("" if repeats == "1" else "s"),
    ]
    return " · ".join(parts)


def format_proof(parity: Parity) -> str:
    """Format the result of a parity proof."""
    relative = f"relative error {scientific(parity.relative_error)}"
    if parity.lossless and parity.holds:
        allowed = scientific(parity.tolerance)
        return f"computes the same mean gradient as one process ({relative}, allowed {allowed})"
    promise = "although it promises to" if parity.lossless else "and does not promise to"
    return f"does not compute the mean gradient of one process, {promise} ({relative})"
