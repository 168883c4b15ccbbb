"""Shows a comparison while it goes on: what runs, what is left, the figures so far. It follows the records."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.findings import Finding, problems
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.records.schema import EVENTS_FILE, FINISHED_FILE, steps_file
from paceline.report.formatting import factor, on_hosts, percent, plural, roughly, run_length, seconds
from paceline.report.live.run import Display, Tail
from paceline.report.terminal.doctor import LiveExamination

POLL_S = 0.2


class ShownRun(Protocol):
    """A candidate's turn, and the folder its run grows in."""

    @property
    def name(self) -> str:
        """What the candidate is called."""

    @property
    def folder(self) -> Path:
        """The folder of its run."""


class LiveTable:
    """What the user sees of an experiment; quiet on anything but a terminal, where it prints a line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._comparison: Comparison | None = None
        self._repeats = "?"
        self._least = 0
        self._left = ""
        self._measuring_since: float | None = None
        self._display: Display | None = None

    def plan(self, design: dict[str, Any], config: RunConfig) -> None:
        """What will be done, and how long it will take."""
        least, most = design["repeats"], max(design["repeats"], design["max_repeats"])
        self._repeats = str(least) if least == most else f"{least}–{most}"
        self._least = least
        self._print(plan_in_words(design, config, self._repeats))

    def proved(self, name: str, parity: dict[str, Any]) -> None:
        """A proof is done."""
        self._print(f"  {name}: {proof_in_words(parity)}")

    def unproven(self, reason: str) -> None:
        """Nothing can be proven."""
        self._print(f"  {reason}")

    def examine(self, folder: Path) -> LiveExamination:
        """Follows the examination of the machine for the length of a `with`."""
        self._display = display = LiveExamination(folder, self._console, quiet=True)
        return display

    def examined(self, found: Sequence[Finding]) -> None:
        """What has to be mended; the report has the rest."""
        for problem in problems(found):
            self._print(f"doctor: {problem.message}" + (f" fix: {problem.fix}" if problem.fix else ""))

    def unexamined(self, reason: str) -> None:
        """Nothing could be found out about the machine."""
        self._print(f"doctor: the machine could not be examined: {reason}")

    def failed(self, name: str, error: PacelineError) -> None:
        """A candidate is out."""
        self._print(f"{name} failed and is left out: {error.message}")
        if error.detail:
            self._print(error.detail)
        if error.hint:
            self._print(f"hint: {error.hint}")

    def look(self, comparison: Comparison, repeats: int) -> None:
        """A repeat is done, and this is what is known."""
        self._comparison = comparison
        self._left = self._what_is_left(repeats)
        if not self._console.is_terminal:
            known = [row for row in comparison.rows if row.step_s is not None]
            times = " · ".join(f"{row.candidate.name} {seconds(row.step_s.value)}" for row in known if row.step_s)
            self._print(f"after {plural(repeats, 'repeat')}{self._left}: {times}")

    def _what_is_left(self, repeats: int) -> str:
        """How long the repeats that have to come will take, going by those that are done."""
        if self._measuring_since is None or repeats >= self._least:
            return ""
        each_s = (time.perf_counter() - self._measuring_since) / repeats
        return f", about {roughly(each_s * (self._least - repeats))} to go"

    @contextmanager
    def launch(self, stage: str, schedule: Sequence[ShownRun], steps: int | None) -> Iterator[None]:
        """Follows the turns of one launch for the length of a `with`."""
        if stage != "proof" and self._measuring_since is None:
            self._measuring_since = time.perf_counter()
        if not self._console.is_terminal:
            yield
            return
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        proving = stage == "proof"
        self._current = progress.add_task("starting ranks", total=None if proving else steps, unit="steps")
        title = stage if proving else f"{stage} of {self._repeats}{self._left}"
        self._overall = progress.add_task(title, total=len(schedule), unit="runs")
        self._display = Display(partial(self._draw, progress, schedule))
        with self._display:
            yield

    def close(self) -> None:
        """Close the display if Ctrl-C interrupted closing it."""
        if self._display is not None:
            self._display.close()

    def _draw(self, progress: Progress, schedule: Sequence[ShownRun], stop: threading.Event) -> None:
        shown = Group(self._figures(), progress)
        with Live(shown, console=self._console, refresh_per_second=8, transient=True):
            self._follow(progress, schedule, stop)

    def _follow(self, progress: Progress, schedule: Sequence[ShownRun], stop: threading.Event) -> None:
        steps = [Tail(scheduled.folder / steps_file(0)) for scheduled in schedule]
        events = [Tail(scheduled.folder / EVENTS_FILE) for scheduled in schedule]
        trained = [0] * len(schedule)
        while not stop.wait(POLL_S):
            done = sum((scheduled.folder / FINISHED_FILE).exists() for scheduled in schedule)
            progress.update(self._overall, completed=done)
            if done == len(schedule):
                continue
            for event in map(json.loads, events[done].new_lines()):
                if event["event"] == "start" and event["steps"]:
                    progress.update(self._current, total=event["steps"])
            trained[done] += sum(not line.startswith("step") for line in steps[done].new_lines())
            progress.update(self._current, description=escape(schedule[done].name), completed=trained[done])

    def _figures(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        if self._comparison is None:
            return table
        for heading in ("so far", "time/iteration", "", "exposed"):
            table.add_column(heading, justify="right" if heading != "so far" else "left")
        for row in self.rows_to_show(self._comparison):
            if row.step_s is not None:
                exposed = percent(row.exposed.value, 0) if row.exposed else "–"
                ratio = factor(row.ratio.value) if row.ratio else "–"
                table.add_row(escape(row.candidate.name), seconds(row.step_s.value), ratio, exposed)
        return table

    def rows_to_show(self, comparison: Comparison) -> list[CandidateRow]:
        """Whose figures so far are shown: as many as fit on a screen."""
        return comparison.rows

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def plan_in_words(design: dict[str, Any], config: RunConfig, repeats: str) -> str:
    """What an experiment will do, in one line."""
    length = run_length(config)
    names = design["candidates"]
    batch = "" if design["batch"] is None else f", global batch {design['batch']}"
    expected = design["estimate_s"]
    parts = [
        f"{design['target']}: {', '.join(names)}",
        f"{plural(design['ranks'], 'rank')} × {plural(design['threads'], 'thread')}{on_hosts(design)}{batch}",
        f"{length} × {repeats} repeat" + ("" if repeats == "1" else "s"),
        *([] if expected is None else [f"about {roughly(expected)}" + (", more if it is close" * ("–" in repeats))]),
    ]
    return " · ".join(parts)


def proof_in_words(parity: dict[str, Any]) -> str:
    """How a proof went."""
    error = parity["error"]
    off = "infinitely far" if error is None else f"{error:.1e} of its norm"
    if parity["lossless"] and error is not None and error < parity["tolerance"]:
        return f"the mean gradient, off by {off} (allowed: {parity['tolerance']:.0e})"
    return f"off by {off}" + ("" if parity["lossless"] else ", which it does not promise to avoid")
