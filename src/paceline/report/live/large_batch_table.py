"""Live display of an experiment with large batches: accuracies so far, in the order of batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.formatting import percent
from paceline.records.events import RUN_EVENTS, EvaluationEvent
from paceline.records.schema import EVENTS_FILE, FINISHED_FILE
from paceline.report.live.live_table import POLL_S, LiveTable, ShownRun
from paceline.report.live.run import Display, EventTail, format_evaluation


class LargeBatchLiveTable(LiveTable):
    """Live display of an experiment with large batches; where the console is not a terminal, one line per run."""

    shown = ("test_accuracy", "test_loss", "noise_scale")

    def rows_to_show(self, comparison: Comparison) -> list[CandidateRow]:
        """Return the rows in the order of the experiment, not by speed."""
        return [comparison.row(candidate.name) for candidate in comparison.record_set.candidates]

    def result_of(self, row: CandidateRow) -> str:
        """Return the test accuracy of a candidate so far; `diverged` if no run has one."""
        if row.test_accuracy is not None:
            return percent(row.test_accuracy.value)
        return "diverged" if row.diverged else ""

    @contextmanager
    def launch(self, stage: str, schedule: Sequence[ShownRun], steps: int | None) -> Iterator[None]:
        """Show the progress of the runs of one launch while the context is open: a run may take many minutes."""
        if self._console.is_terminal:
            with super().launch(stage, schedule, steps):
                yield
            return
        self._display = Display(partial(self._report_runs, f"{stage} of {self._repeats}", schedule))
        with self._display:
            yield

    def _report_runs(self, title: str, schedule: Sequence[ShownRun], stop: threading.Event) -> None:
        """Print the result of each run as soon as it has finished; those of one launch train in their order."""
        for run in schedule:
            stopped = False
            while not (finished := (run.folder / FINISHED_FILE).exists()) and not stopped:
                stopped = stop.wait(POLL_S)
            tests = [
                e for e in EventTail(run.folder / EVENTS_FILE).new_events(RUN_EVENTS) if type(e) is EvaluationEvent
            ]
            if finished and tests:
                self._print(f"{title}: {run.name}: {format_evaluation(tests[-1].test)}")
