"""Live display of an experiment with large batches: accuracies so far, in the order of batches."""

from __future__ import annotations

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.formatting import percent
from paceline.report.live.live_table import LiveTable


class LargeBatchLiveTable(LiveTable):
    """Live display of an experiment with large batches."""

    shown = ("test_accuracy", "test_loss", "noise_scale")

    def rows_to_show(self, comparison: Comparison) -> list[CandidateRow]:
        """Return the rows in the order of the experiment, not by speed."""
        return [comparison.row(candidate.name) for candidate in comparison.record_set.candidates]

    def result_of(self, row: CandidateRow) -> str:
        """Return the test accuracy of a candidate so far; `diverged` if no run has one."""
        if row.test_accuracy is not None:
            return percent(row.test_accuracy.value)
        return "diverged" if row.diverged else ""
