"""Events of runs, experiments and examinations, one JSON object per line of `events.jsonl`.

The key `event` of a line names its type. The writer sets `time_s`, the seconds since the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from paceline.errors import OutOfMemory, RecordError
from paceline.records.decoder import ModelError, decode, exists, read_bytes
from paceline.records.description import Topology
from paceline.records.parity import Parity
from paceline.records.provenance import Provenance
from paceline.records.summary import EvaluationResult, ReplicaEvaluation
from paceline.records.value_types import Count, PositiveCount, PositiveSeconds, Seconds


class ConfigEvent(Topology, frozen=True, kw_only=True, tag_field="event", tag="config"):
    """The run is set up: its topology."""

    time_s: Seconds = 0.0


class CompilingEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="compiling"):
    """The model is compiled, before training starts."""

    time_s: Seconds = 0.0


class StartEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """Training starts."""

    steps: Count | None
    """Steps of the whole run; None if unknown."""
    steps_per_epoch: Count | None
    dropped: Count | None
    """Samples per epoch that are not trained, because the last batch has fewer samples than ranks."""
    start_up_s: Seconds | None = None
    """Seconds from the launch of the ranks, or from the end of the run before it in the same processes: starting
    processes, importing torch, reading data, building and checking the model; None if it was not measured."""
    compile_s: Seconds | None = None
    """Seconds of `start_up_s` in which the model was compiled or its kernels were prepared; None if nothing was."""
    start_up_parts_s: dict[str, Seconds] | None = None
    """Seconds of `start_up_s` by part, on rank 0, in order; None if it was not measured."""
    time_s: Seconds = 0.0


class NoiseFigures(Struct, frozen=True, kw_only=True):
    """Gradient noise of a window of steps, measured in some of them: unbiased, so single values may be negative."""

    steps: PositiveCount
    """Measured steps."""
    gradient_sq: float
    """Squared norm of the exact gradient, mean over these steps."""
    trace: float
    """Variance of the gradient of one sample, summed over all parameters, mean over these steps."""
    cost_s: Seconds
    """Seconds that a rank spent on measuring, mean over the ranks."""


class LogEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="log"):
    """A window of steps has ended."""

    epoch: Count
    """Epoch of the last step."""
    step: Count
    """Steps done."""
    wall_s: PositiveSeconds
    """Wall time of the window, on the slowest rank."""
    losses: Annotated[list[float | None], Meta(min_length=1)]
    """Global mean loss of each step; None if it is not finite or was not reported."""
    samples: Count
    """Samples of the window over all ranks."""
    correct: Count | None
    """Correct predictions; None for a workload that does not define them."""
    epochs: list[Count] | None = None
    """Epoch of each step; None if all are in `epoch`."""
    profiled: bool = False
    """Whether torch's profiler slowed the window down; its time does not count then."""
    warm_up: bool = False
    """Whether it is part of a warm-up that evaluations divide, after the first window; its time does not count then."""
    lr: float | None = None
    """Learning rate of the first parameter group in the last step; None if it was not recorded."""
    skipped: list[Count] = []
    """Steps of the window, from 0, without an update, because a gradient was not finite on some rank."""
    lrs: list[float] | None = None
    """Learning rate of each step, or a single one that all steps have; None if only that of the last is known."""
    noise: NoiseFigures | None = None
    """Gradient noise; None if it was not measured in this window."""
    time_s: Seconds = 0.0


class EpochEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="epoch"):
    """An epoch has ended."""

    epoch: Count
    step: Count
    buffer_divergence: float | None
    """Largest distance of any rank's buffers from rank 0's, relative to their norm; None without buffers."""
    time_s: Seconds = 0.0


class EvaluationEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="evaluation"):
    """The weights were tested, while training or at its end."""

    test: EvaluationResult
    step: Count | None = None
    """Steps done; None in a record of an earlier version, which tested at the end only."""
    epoch: Count | None = None
    """Epoch of the last step."""
    test_by_rank: list[ReplicaEvaluation] = []
    time_s: Seconds = 0.0


class CheckpointEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="checkpoint"):
    """A checkpoint was written, or could not be."""

    step: Count
    """Steps done."""
    started_s: Seconds
    """Time at which training stopped for it."""
    stall_s: Seconds
    """Seconds for which training waited, on rank 0."""
    write_s: Seconds | None
    """Seconds until it was on disk; None if it could not be written."""
    bytes: Count = 0
    """Size on disk."""
    is_async: bool = False
    """Whether training went on while it was written."""
    is_best: bool = False
    """Whether its weights have the best test result so far."""
    error: str | None = None
    """Reason why it could not be written."""
    time_s: Seconds = 0.0


class ResumedEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="resumed"):
    """The run goes on from a checkpoint; earlier events of later steps do not count, since those are done again."""

    step: Count
    """Steps done, at the checkpoint."""
    redone: Count
    """Steps that had been trained after the checkpoint and are lost."""
    checkpoint: str
    """Path of the checkpoint."""
    ranks_before: Count
    """Ranks of the run that wrote the checkpoint."""
    strategy_before: str
    """Strategy of that run."""
    lost: list[str] = []
    """Descriptions of the parts of the checkpoint that could not be used."""
    warnings: list[str] = []
    """A sentence for each newer checkpoint that is damaged."""
    is_restart: bool = False
    """Whether the launcher restarted the run after a fault."""
    time_s: Seconds = 0.0


class CudaGraphEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="cuda_graph"):
    """It was decided whether steps are replayed from CUDA graphs; only on GPUs, and not with `--cuda-graph off`."""

    used: bool
    reason: str = ""
    """Reason why they are not used, or only for some steps, as the end of a sentence."""
    is_expected: bool = False
    """Whether the strategy or the settings rule graphs out, and `--cuda-graph` was not given: nothing to report."""
    took_s: Seconds = 0.0
    """Seconds to capture and to try them."""
    time_s: Seconds = 0.0


class EndEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="end"):
    """The run, experiment or examination has completed."""

    time_s: Seconds = 0.0


class ParityEvent(Parity, frozen=True, kw_only=True, tag_field="event", tag="parity"):
    """The parity of a candidate was tested."""

    candidate: str
    time_s: Seconds = 0.0


class UnprovenEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="unproven"):
    """Parity could not be proven."""

    reason: str
    candidates: list[str] = []
    """Candidates without a proof; empty if it is all of them."""
    time_s: Seconds = 0.0


class UnexaminedEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="unexamined"):
    """The examination of the machine failed."""

    reason: str
    hint: str | None
    time_s: Seconds = 0.0


class ScheduledEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="run"):
    """A run of an experiment is scheduled."""

    candidate: str
    repeat: Count
    """Number of the repeat, from 0."""
    folder: str
    """Folder of the run's record, relative to that of the experiment."""
    time_s: Seconds = 0.0


class FailureEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="failure"):
    """A candidate failed and is left out from now on."""

    candidate: str
    stage: str
    """`proof`, or the repeat, as in `repeat 1`."""
    kind: str
    """Class of the error."""
    message: str
    hint: str | None
    out_of_memory: OutOfMemory = False
    time_s: Seconds = 0.0


class InterruptedEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="interrupted"):
    """The user interrupted the experiment."""

    time_s: Seconds = 0.0


class ContinuedEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="continued"):
    """The same command continues the experiment; what came before is kept."""

    provenance: Provenance
    kept: list[str]
    """Folders of the complete runs, relative to that of the experiment. All other runs are measured after this."""
    retried: list[str] = []
    """Candidates that had failed and are tried again."""
    time_s: Seconds = 0.0


class EstimateEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="estimate"):
    """Estimate of the time until the end of the experiment, after a stage or a repeat."""

    low_s: Seconds
    high_s: Seconds
    """`low_s` to `high_s` is the range for the least number of repeats."""
    most_s: Seconds
    """Upper end for the largest number of repeats."""
    time_s: Seconds = 0.0


class StageEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag="stage"):
    """An examination enters a stage."""

    stage: str
    time_s: Seconds = 0.0


RunEvent = (
    ConfigEvent
    | CompilingEvent
    | StartEvent
    | LogEvent
    | EpochEvent
    | EvaluationEvent
    | CheckpointEvent
    | ResumedEvent
    | CudaGraphEvent
    | EndEvent
)
"""An event of a run."""
CandidateEvent = ParityEvent | ScheduledEvent | FailureEvent
"""An event of an experiment that names a candidate."""
ExperimentEvent = (
    CandidateEvent | UnprovenEvent | UnexaminedEvent | EstimateEvent | EndEvent | InterruptedEvent | ContinuedEvent
)
"""An event of an experiment."""
Event = RunEvent | ExperimentEvent | StageEvent
EventT = TypeVar("EventT", bound=Struct)


def _by_name(kinds: Any) -> dict[str, type[Any]]:
    return {kind.__struct_config__.tag: kind for kind in kinds.__args__}


RUN_EVENTS, EXPERIMENT_EVENTS = _by_name(RunEvent), _by_name(ExperimentEvent)
"""Types of events by name."""
EXAMINATION_EVENTS: dict[str, type[Any]] = {"stage": StageEvent}


class _Named(Struct):
    event: str


def read_events(file: Path, kinds: Mapping[str, type[Any]]) -> list[Any]:
    """Read the events that were written so far, without unknown ones; return an empty list if there is no file.

    Raise `RecordError` for a line that is damaged.
    """
    events, damaged = read_undamaged_events(file, kinds)
    if damaged:
        raise RecordError(f"{file} is damaged: {damaged[0]}.")
    return events


def read_undamaged_events(file: Path, kinds: Mapping[str, type[Any]]) -> tuple[list[Any], list[str]]:
    """Read the events of all lines that are not damaged; return them and, as a clause, what is wrong with each other.

    Raise `RecordError` only if the file cannot be read.
    """
    if not exists(file):
        return [], []
    content = read_bytes(file)
    events, damaged = list[Any](), list[str]()
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]  # A truncated last line is ignored.
    for number, line in enumerate(lines, start=1):
        try:
            event = decode_event(line, kinds, f"line {number}")
        except ValueError as error:
            damaged.append(str(error))
        else:
            events += [] if event is None else [event]
    return events, damaged


def decode_event(line: bytes, kinds: Mapping[str, type[Any]], name: str = "event") -> Any:
    """Return the event of a line; None if its type is unknown. Raise `ValueError` if it does not fit its type."""
    try:
        kind = kinds.get(decode(line, _Named, name).event)
        return None if kind is None else decode(line, kind, f"{name}, {kind.__struct_config__.tag}")
    except ModelError:
        raise
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def events_of(events: Iterable[Any], kind: type[EventT]) -> list[EventT]:
    """Return the events of one type, in order."""
    return [event for event in events if isinstance(event, kind)]
