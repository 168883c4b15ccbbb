"""File names and columns of a record. A change that an older reader would misread raises `SCHEMA_VERSION`.

The models of the JSON files are in the other modules of this folder, and `decoder.py` reads all of them by one rule: a
key that the model declares must fit, and must exist unless the model has a default for it. Keys and events that are
unknown are ignored, so that a later version may add some without raising the schema version.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEMA_VERSION = 3

COMPARE_KIND, SCALE_KIND, BATCH_KIND = "compare", "scale", "batch"
LARGE_BATCH_KIND, RACE_KIND = "large-batch", "race"
"""Kinds of experiments."""

RUN_FILE = "run.json"
"""Written before the first step: schema version, configuration, topology, provenance."""
EVENTS_FILE = "events.jsonl"
"""Events written by rank 0, one JSON object per line, each with `event` and `time_s` since the start of the run."""
SUMMARY_FILE = "summary.json"
"""Written once, at the end: the results that `paceline train` prints."""
READY_FILE = "ready"
"""In the folder of a launch: exists once its ranks are connected."""
FINISHED_FILE = "finished"
"""Exists only if the run completed."""
STEP_COUNT_FILE = "steps-done"
"""Number of steps that the run has done: 8 bytes, little-endian, up to date at any time (`step_counter.py`)."""
PARITY_FILE = "parity.json"
"""In the folder of a parity proof: distance of a strategy's gradients from those of one process."""
EXPERIMENT_FILE = "experiment.json"
"""In the folder of an experiment, written before the first run: its kind, candidates, configuration, provenance."""
DOCTOR_FILE = "doctor.json"
"""Measurements of `paceline doctor` on machines and links; in its own folder, or in that of an experiment."""
PRECISION_FILE = "precision.json"
"""Choice of `--precision auto`; in the folder of a run, an experiment or an examination."""
LOCK_FILE = ".lock"
"""In the folder of an experiment or a run; locked while a process measures or trains."""
INCOMPLETE_FOLDER = "incomplete-{}"
"""In the folder of an experiment that was continued: runs that were cut off, by the number of the continuation."""
REPORT_FILE = "report.html"
TRACE_FILE = "trace.json"
"""The run as a Perfetto trace. It is derived from the timelines, so it can be written again."""
LOGS_FOLDER = "logs"
TENSORBOARD_FOLDER = "tensorboard"
"""Contains one folder per rank, written with `--tensorboard`."""
ERRORS_FOLDER = "errors"
CHECKPOINTS_FOLDER = "checkpoints"
"""Contains one folder per checkpoint (`records/checkpoint.py`)."""


def attempt_folder(number: int) -> str:
    """Return the name of the folder, inside a run's, for files of an attempt at a run that resumed.

    Logs and errors of the first attempt are in the run's folder, as are the records of the last one.
    """
    return f"attempt-{number}"


def steps_file(rank: int) -> str:
    """Return the name of the file with one rank's steps."""
    return f"rank-{rank}.csv"


def resources_file(rank: int) -> str:
    """Return the name of the file with CPU and memory samples of one rank's process."""
    return f"resources-{rank}.csv"


def marks_file(rank: int) -> str:
    """Return the name of the file with one rank's evaluations, epoch ends and garbage collections."""
    return f"marks-{rank}.csv"


def profile_file(rank: int) -> str:
    """Return the name of the file with the results of torch's profiler on one rank, by operator."""
    return f"profile-{rank}.json"


def profile_trace_file(rank: int) -> str:
    """Return the name of one rank's profiler trace, which Chrome's tracing page and Perfetto open."""
    return f"profile-{rank}.trace.json.gz"


STEP_DECIMALS, SAMPLE_DECIMALS = 6, 4
"""Decimals of the times of a step and of a sample of resources, in seconds. Summaries are computed from rounded times,
so that they equal what a reader computes from the files."""


class StepRow(NamedTuple):
    """One step on one rank: the columns of its CSV file. Times are seconds; the loss is the mean over the samples."""

    step: int
    """Number of the step, from 0 over the whole run."""
    epoch: int
    samples: int
    """Samples that this rank trained on in this step; ranks may differ by one."""
    start_s: float
    """Start of the step, in seconds since the start of the run on this rank."""
    data_s: float
    """Loading the batch: gathering, augmenting, moving it to the device."""
    forward_s: float
    backward_s: float
    """Includes waits for other ranks inside the backward pass (as under DDP)."""
    update_s: float
    """Synchronising gradients where that follows backward, clipping, and the optimiser."""
    loss: float | None
    """None, written as an empty field, if a user's script does not report it."""
    correct: int
    """Correct predictions, or -1 for a workload that does not define them."""

    @property
    def total_s(self) -> float:
        """Duration of the whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.update_s

    def to_csv(self) -> str:
        """Return the CSV line. Times are rounded to microseconds, far below the noise of a step."""
        loss = "" if self.loss is None else f"{self.loss:.9g}"
        return (
            f"{self.step},{self.epoch},{self.samples},{self.start_s:.6f},{self.data_s:.6f},{self.forward_s:.6f},"
            f"{self.backward_s:.6f},{self.update_s:.6f},{loss},{self.correct}\n"
        )


CSV_HEADER = ",".join(StepRow._fields) + "\n"


class ResourceRow(NamedTuple):
    """One sample of a rank's process: the columns of its CSV file. An empty field was not measured."""

    time_s: float
    """Time of the sample, on the same clock as `start_s` of the steps."""
    cpu_s: float
    """CPU time of all threads of the process, user and system, since the process started."""
    resident_bytes: int
    threads: int
    sampler_cpu_s: float
    """CPU time that the sampler itself has used so far."""
    device_bytes: int | None
    """Memory that tensors occupy on the rank's GPU."""
    device_used_bytes: int | None
    """Total memory in use on that GPU, by all processes."""
    host_busy: float | None
    """Share of the usable cores' time that was not idle since the previous row; only on the first rank of a host."""
    host_used_bytes: int | None
    host_available_bytes: int | None
    """Memory of the host that can be allocated without swapping."""
    gpu_busy: float | None = None
    """Share of the time in which the rank's GPU ran a kernel, of any process, over a fraction of a second before the
    row."""
    gpu_power_w: float | None = None
    """Power that the GPU draws, whatever processes use it, as the figures below."""
    gpu_energy_j: float | None = None
    """Energy that it has used since its driver was loaded."""
    gpu_clock_mhz: int | None = None
    """Clock of its multiprocessors."""
    gpu_limited_by_power: int | None = None
    """1 if the power limit lowers its clock, else 0."""
    gpu_limited_by_heat: int | None = None

    def to_csv(self) -> str:
        """Return the CSV line."""
        times = f"{self.time_s:.4f},{self.cpu_s:.4f},{self.resident_bytes},{self.threads},{self.sampler_cpu_s:.6f}"
        device = f"{_cell(self.device_bytes)},{_cell(self.device_used_bytes)}"
        busy = "" if self.host_busy is None else f"{self.host_busy:.4f}"
        host = f"{busy},{_cell(self.host_used_bytes)},{_cell(self.host_available_bytes)}"
        return ",".join([times, device, host, *map(_cell, self[len(ResourceRow._fields) - GPU_COLUMNS :])]) + "\n"


GPU_COLUMNS = len(ResourceRow._field_defaults)
"""Last columns, which records of older versions do not have."""
RESOURCES_HEADER = ",".join(ResourceRow._fields) + "\n"


GRAPHS = "graphs"
"""Kind of a mark: CUDA graphs were tried or captured, which does not count as training."""


class MarkRow(NamedTuple):
    """An interval or instant on one rank other than a step: the columns of its CSV file."""

    kind: str
    """`evaluation`, `epoch` (the instant it ended), `gc` (a garbage collection) or `GRAPHS`."""
    start_s: float
    end_s: float
    """Equal to the start for an instant."""
    detail: str
    """Number of the epoch, or generation of a garbage collection."""

    def without_drift(self, rate: float) -> MarkRow:
        """Return the mark on rank 0's clock; `rate` is this rank's drift in seconds per second."""
        return self._replace(start_s=self.start_s * (1 - rate), end_s=self.end_s * (1 - rate))

    def to_csv(self) -> str:
        """Return the CSV line. Commas and line breaks in `detail` become spaces, so that it stays one line."""
        return f"{self.kind},{self.start_s:.6f},{self.end_s:.6f},{' '.join(self.detail.replace(',', ' ').split())}\n"


MARKS_HEADER = ",".join(MarkRow._fields) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else str(value)
