"""The names and columns of a record. A change that an old reader would misread raises `SCHEMA_VERSION`."""

from __future__ import annotations

from typing import NamedTuple

SCHEMA_VERSION = 2

RUN_FILE = "run.json"
"""Written before the first step: schema version, configuration, topology, provenance."""
EVENTS_FILE = "events.jsonl"
"""Rank 0's account of the run, one JSON object a line, each with `event` and `time_s` since the run began."""
SUMMARY_FILE = "summary.json"
"""Written once, at the end: the figures that `paceline train` prints."""
FINISHED_FILE = "finished"
"""Its presence says that the run did all it set out to do."""
PARITY_FILE = "parity.json"
"""In the folder of a proof: how far a strategy's gradients are from one process's."""
EXPERIMENT_FILE = "experiment.json"
"""In the folder of an experiment, written before the first run: its kind, contenders, configuration, provenance."""
REPORT_FILE = "report.html"
LOGS_FOLDER = "logs"
ERRORS_FOLDER = "errors"


def steps_file(rank: int) -> str:
    """The file of one rank's steps."""
    return f"rank-{rank}.csv"


class StepRow(NamedTuple):
    """One step on one rank; the columns of its CSV file. Times are seconds, the loss is the mean over its samples."""

    step: int
    """Counts from 0 over the whole run."""
    epoch: int
    samples: int
    """What this rank trained on in this step; ranks may differ by one."""
    start_s: float
    """When the step began, since the run's start on this rank."""
    data_s: float
    """Getting the batch: gathering, augmenting, moving it to the device."""
    forward_s: float
    backward_s: float
    """Includes the waits for other ranks that happen inside it (DDP's)."""
    update_s: float
    """Agreeing on gradients where that follows backward, clipping, and the optimiser."""
    loss: float | None
    """None, an empty field, where a script of the user's own does not tell it."""
    correct: int
    """Samples predicted right, or -1 for a workload without a notion of right."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.update_s

    def to_csv(self) -> str:
        """One line, with microseconds: a step's own noise is far above that."""
        loss = "" if self.loss is None else f"{self.loss:.9g}"
        return (
            f"{self.step},{self.epoch},{self.samples},{self.start_s:.6f},{self.data_s:.6f},{self.forward_s:.6f},"
            f"{self.backward_s:.6f},{self.update_s:.6f},{loss},{self.correct}\n"
        )


CSV_HEADER = ",".join(StepRow._fields) + "\n"
