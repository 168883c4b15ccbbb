"""Live display of a race: a table with a row per evaluation, as runs train."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from paceline.analysis.comparison import Comparison
from paceline.analysis.race.race import race
from paceline.config import RunConfig
from paceline.formatting import NOTHING, number, percent, race_seconds, short
from paceline.records.events import RUN_EVENTS, CompilingEvent, EvaluationEvent, LogEvent, StartEvent
from paceline.records.experiment.design import Design, RaceDesign
from paceline.records.schema import EVENTS_FILE, steps_file
from paceline.report.live.live_table import POLL_S, LiveTable, ShownRun, make_progress
from paceline.report.live.run import Display, EventTail, Tail
from paceline.report.race_verdict import format_accuracy, format_run

HEADINGS = ("epoch", "rank", "validation loss", "validation accuracy", "learning rate", "wall time")
ALL_RANKS = "all"
"""Entry of the rank column for the synchronised weights, which all ranks test together."""


class RaceLiveTable(LiveTable):
    """Live display of a race: a line per evaluation. A terminal also has a bar below them, with the steps so far."""

    _target = 0.0
    _runs = 0

    def plan(self, design: Design, candidates: Sequence[str], config: RunConfig) -> None:
        """Print the planned runs and their target."""
        assert isinstance(design, RaceDesign)
        self._target, self._runs = design.target_accuracy, design.repeats
        super().plan(design, candidates, config)
        self._print(f"target: {format_accuracy(self._target)} test accuracy; a run ends as soon as it is reached")

    def refresh(self, comparison: Comparison, repeats: int) -> None:
        """Print the result of a run."""
        last = next((run for run in race(comparison.record_set).runs if run.number == repeats), None)
        if last is not None:
            self._print(f"run {repeats} of {self._runs}: {format_run(last, self._target)}{self._to_go()}")

    @contextmanager
    def launch(self, stage: str, schedule: Sequence[ShownRun], steps: int | None) -> Iterator[None]:
        """Print the evaluations of a run while the context is open."""
        self._display = Display(partial(self._follow_run, stage, schedule[0], steps))
        with self._display:
            yield

    def _follow_run(self, stage: str, run: ShownRun, total: int | None, stop: threading.Event) -> None:
        title = f"{stage.replace('repeat', 'run')} of {self._runs}"
        self._print(title)
        self._print("  ".join(HEADINGS))
        rows = EvaluationRows()
        events, steps = EventTail(run.folder / EVENTS_FILE), Tail(run.folder / steps_file(0))
        with make_progress(self._console, transient=True) as progress:
            bar = progress.add_task(f"{title}: starting ranks", total=total, unit="steps")
            stopped = False
            while not stopped:
                stopped = stop.wait(POLL_S)
                for event in events.new_events(RUN_EVENTS):
                    if isinstance(event, CompilingEvent):
                        progress.update(bar, description=f"{title}: compiling")
                    elif isinstance(event, StartEvent):
                        progress.update(bar, description=f"{title}: training", total=event.steps or total)
                    for row in rows.rows_of(event):
                        self._print(_format_row(row))
                progress.advance(bar, sum(not line.startswith("step") for line in steps.new_lines()))


def _format_row(row: Sequence[str]) -> str:
    return "  ".join(f"{text:>{len(heading)}}" for text, heading in zip(row, HEADINGS, strict=True))


class EvaluationRows:
    """Rows of the table of a run's evaluations, from its events."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._epoch_steps: int | None = None
        self._before_s = 0.0
        """Time before the clock of the record started."""
        self._tested_step: int | None = None

    def rows_of(self, event: object) -> list[tuple[str, ...]]:
        """Return the rows that an event adds: of the synchronised weights, then of each rank's replica if tested."""
        match event:
            case StartEvent():
                self._epoch_steps = event.steps_per_epoch
                self._before_s = 0.0 if event.start_up_s is None else event.start_up_s - event.time_s
            case LogEvent():
                self._rate = event.lr
            case EvaluationEvent():
                return self._rows(event)
        return []

    def _rows(self, event: EvaluationEvent) -> list[tuple[str, ...]]:
        epoch = NOTHING if event.epoch is None else str(event.epoch + 1)
        if event.step is not None and self._epoch_steps:
            epoch = short(event.step / self._epoch_steps, 3)
        rate = NOTHING if self._rate is None else short(self._rate, 3)
        end = (rate, race_seconds(self._before_s + event.time_s))
        accuracy = percent(event.test.accuracy, 2)
        rows: list[tuple[str, ...]] = [(epoch, ALL_RANKS, number(event.test.loss), accuracy, *end)]
        if event.step is not None and event.step == self._tested_step:  # With --eval-ranks, the last is there twice.
            rows = []
        self._tested_step = event.step
        return rows + [
            (epoch, str(rank), number(own.loss), percent(own.accuracy, 2), *end)
            for rank, own in enumerate(event.test_by_rank)
        ]
