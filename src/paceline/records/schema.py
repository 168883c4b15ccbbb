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
"""In the folder of an experiment, written before the first run: its kind, candidates, configuration, provenance."""
DOCTOR_FILE = "doctor.json"
"""What `paceline doctor` found about machines and the link; in its own folder, or in that of an experiment."""
REPORT_FILE = "report.html"
TRACE_FILE = "trace.json"
"""The run as a trace that Perfetto opens; made from the timelines, so it can be made again."""
LOGS_FOLDER = "logs"
TENSORBOARD_FOLDER = "tensorboard"
"""With a folder per rank of what `--tensorboard` writes."""
ERRORS_FOLDER = "errors"


def steps_file(rank: int) -> str:
    """The file of one rank's steps."""
    return f"rank-{rank}.csv"


def resources_file(rank: int) -> str:
    """The file of what one rank's process used while it went on."""
    return f"resources-{rank}.csv"


def marks_file(rank: int) -> str:
    """The file of what happened on one rank beside its steps: evaluations, epochs, garbage collections."""
    return f"marks-{rank}.csv"


def profile_file(rank: int) -> str:
    """The file of what torch's profiler found on one rank, by operator."""
    return f"profile-{rank}.json"


def profile_trace_file(rank: int) -> str:
    """The file of the same, event by event, as torch's profiler writes it for Chrome's tracing and Perfetto."""
    return f"profile-{rank}.trace.json.gz"


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


class ResourceRow(NamedTuple):
    """What one rank's process has used by some moment; the columns of its CSV file. An empty field: not measured."""

    time_s: float
    """When, on the clock that `start_s` of the steps is on."""
    cpu_s: float
    """CPU time of all threads of the process, in user and in system mode, since it was started."""
    resident_bytes: int
    threads: int
    sampler_s: float
    """CPU time that this sampling itself has cost since it began."""
    device_bytes: int | None
    """What tensors take on the GPU of the rank."""
    device_used_bytes: int | None
    """What is taken of that GPU's memory in all, by whomever."""
    host_busy: float | None
    """On the first rank of a host: the share of its usable cores' time, since the row before, that was not idle."""
    host_used_bytes: int | None
    host_available_bytes: int | None
    """Memory of the host that could be had without swapping."""

    def to_csv(self) -> str:
        """One line."""
        times = f"{self.time_s:.4f},{self.cpu_s:.4f},{self.resident_bytes},{self.threads},{self.sampler_s:.6f}"
        device = f"{_cell(self.device_bytes)},{_cell(self.device_used_bytes)}"
        busy = "" if self.host_busy is None else f"{self.host_busy:.4f}"
        return f"{times},{device},{busy},{_cell(self.host_used_bytes)},{_cell(self.host_available_bytes)}\n"


RESOURCES_HEADER = ",".join(ResourceRow._fields) + "\n"


class MarkRow(NamedTuple):
    """Something that happened on one rank from one moment to another; the columns of its CSV file."""

    kind: str
    """`evaluation`, `checkpoint`, `epoch` (its end, a moment) or `gc` (a garbage collection)."""
    start_s: float
    end_s: float
    """The same as the start for a moment."""
    detail: str
    """Which epoch, which generation of objects."""

    def without_drift(self, rate: float) -> MarkRow:
        """The same by the clock of rank 0, where this rank's went faster by so many seconds a second."""
        return self._replace(start_s=self.start_s * (1 - rate), end_s=self.end_s * (1 - rate))

    def to_csv(self) -> str:
        """One line; commas and line ends in a detail would make more of it."""
        return f"{self.kind},{self.start_s:.6f},{self.end_s:.6f},{' '.join(self.detail.replace(',', ' ').split())}\n"


MARKS_HEADER = ",".join(MarkRow._fields) + "\n"


def _cell(value: int | None) -> str:
    return "" if value is None else str(value)
