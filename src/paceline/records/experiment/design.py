"""Description of an experiment: its candidates, the design of the measurement, and the file that has both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.decoder import VersionedFile, exists, read_model
from paceline.records.provenance import Provenance
from paceline.records.settings import Settings, check_settings
from paceline.records.value_types import Count, NotNegative, Positive, PositiveCount

CandidateRole = Literal["candidate", "bound", "baseline"]
PointMode = Literal["strong", "weak", "both", "batch"]


class CandidatePoint(Struct, frozen=True, kw_only=True):
    """Position of a candidate in an experiment over ranks or batch sizes."""

    mode: PointMode
    """Scaling mode; `both` if the two modes share the run, `batch` in an experiment over batch sizes."""
    ranks: PositiveCount
    hosts: PositiveCount
    ranks_per_host: PositiveCount
    batch: PositiveCount
    """Global batch."""
    batch_per_rank: PositiveCount | Positive
    """Batch ÷ ranks; not whole if the shares are uneven."""


class LargeBatchVariant(Struct, frozen=True, kw_only=True):
    """Batch of a candidate in an experiment with large batches, and the remedies that it is trained with."""

    batch: PositiveCount
    """Global batch."""
    remedies: list[str] = []
    """Names of the remedies, as in `linear`; none for the reference, and for plain training."""


class Candidate(Struct, frozen=True):
    """A strategy with one set of settings, compared with others in an experiment."""

    name: str
    """Name in tables; unique within an experiment."""
    strategy: str
    settings: Settings = {}
    """Settings from `--vary`."""
    role: CandidateRole = "candidate"
    """`bound` exchanges nothing, so it is never recommended; `baseline` trains in one process; else `candidate`."""
    lossless: bool = True
    point: CandidatePoint | None = None
    """None except in an experiment over ranks or batch sizes."""
    variant: LargeBatchVariant | None = None
    """None except in an experiment with large batches."""

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as JSON values, without those of other kinds of experiments."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in values.items() if key not in ("point", "variant") or value is not None}


class Design(Struct, frozen=True, kw_only=True):
    """Design of the measurements of an experiment."""

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"repeats", "max_repeats", "interim_analyses", "reference", "target", "requested_threads"}
    )
    """Fields that may differ when an experiment goes on: more repeats, estimates, and what follows from the rest."""
    option_names: ClassVar[Mapping[str, str]] = {"emulated": "--emulate"}
    """Options whose name differs from that of the field."""
    compares_times: ClassVar[bool] = True
    """Whether the times of candidates are compared: what disturbs times then calls for a warning."""

    ranks: PositiveCount
    """Largest world size."""
    hosts: PositiveCount
    threads: PositiveCount
    """Compute threads per rank."""
    requested_threads: PositiveCount | None
    """Value of `--threads`; None if it was not given."""
    repeats: Count
    """Least number of repeats."""
    max_repeats: Count
    interim_analyses: Count
    """Number of times that the experiment may check for a winner."""
    reference: str | None
    """Candidate that ratios are relative to."""
    proof: bool
    """Whether parity is tested first."""
    target: str = ""
    """Name of the workload, or the command line of the script."""
    batch: PositiveCount | None
    """Global batch (of strong scaling); None if it varies or a script sets it."""
    emulated: str | None
    """Value of `--emulate`; None on real hosts."""
    host_cpus: Positive | None
    """Cores that the ranks of one emulated host share; None for no limit."""


class CompareDesign(Design, frozen=True, kw_only=True):
    """Design of a comparison."""

    ranks_per_host: PositiveCount
    machine_cores: Positive | None = None
    """Cores of this machine that may be used; None in records of older versions."""
    machines: list[Count] = []
    """Number of the machine of each host: hosts on one machine share its cores."""
    ranks_pinned: bool = False
    """Whether a launcher bound ranks to cores."""
    gpus: Count = 0
    """GPUs of this host that ranks may use; 0 on CPUs."""


class RaceDesign(CompareDesign, frozen=True, kw_only=True):
    """Design of a race: its rules."""

    option_names: ClassVar[Mapping[str, str]] = {
        **Design.option_names,
        "repeats": "--runs",
        "max_repeats": "--runs",
        "target_accuracy": "--target",
    }

    target_accuracy: Annotated[float, Meta(gt=0, le=1)]
    """Test accuracy that ends a run."""
    eval_every: str
    """Interval of evaluations: a number of steps, or `epoch`."""
    tta: str
    """Test-time augmentation: `none`, `mirror` or `mirror+shift`."""
    seed: Count
    """Seed of the first run; the others have the following ones."""


class LargeBatchDesign(CompareDesign, frozen=True, kw_only=True):
    """Design of an experiment with large batches."""

    option_names: ClassVar[Mapping[str, str]] = {
        **Design.option_names,
        "repeats": "--seeds",
        "max_repeats": "--seeds",
        "reference_batch": "--reference",
        "sizes": "--large",
    }
    compares_times: ClassVar[bool] = False

    reference_batch: PositiveCount
    """Global batch of the reference."""
    sizes: list[PositiveCount]
    """Large global batches, ascending."""
    epochs: PositiveCount
    warmup_epochs: NotNegative
    """Epochs of the remedy `warmup`."""
    micro_batch: PositiveCount
    """Most samples in a forward pass on a rank."""
    left_out: list[str] = []
    """Sentences on batches and remedies that are not tried."""


class ScaleShape(Struct, frozen=True, kw_only=True):
    """Ranks and hosts of some points."""

    hosts: PositiveCount
    ranks_per_host: PositiveCount


class PointsDesign(Design, frozen=True, kw_only=True):
    """Design of an experiment whose candidates are points: strategies on several shapes of ranks."""

    may_change: ClassVar[frozenset[str]] = Design.may_change | {"requested_ranks_per_host", "single_threads"}

    shapes: list[ScaleShape]
    strategies: list[str]
    requested_ranks_per_host: list[PositiveCount]
    """Value of `--ranks-per-host`; empty if it was not given."""
    single_threads: PositiveCount | None = None
    """Compute threads of `single`, which has what one host has; None in records of older versions."""
    machines: list[Count]
    """Number of the machine of each host: hosts on one machine share its cores."""
    machine_cores: Positive
    ranks_pinned: bool
    """Whether a launcher bound ranks to cores."""
    gpus: Count
    """GPUs of this host that ranks may use; 0 on CPUs."""


class ScaleDesign(PointsDesign, frozen=True, kw_only=True):
    """Design of a scaling experiment."""

    modes: list[str]
    """`strong`, `weak` or both."""
    batch_per_rank: PositiveCount
    """Batch per rank of weak scaling."""


class BatchDesign(PointsDesign, frozen=True, kw_only=True):
    """Design of an experiment over batch sizes."""

    may_change: ClassVar[frozenset[str]] = PointsDesign.may_change | {
        "core_flop_per_s",
        "core_bf16_flop_per_s",
        "core_other_load",
    }

    sizes: list[PositiveCount]
    """Batch sizes, ascending."""
    per_rank: bool
    """Whether the sizes are per rank; otherwise they are global batches."""
    trains: bool
    """Whether runs train for whole epochs or a time, so that their losses and accuracies are compared."""
    core_flop_per_s: Positive | None
    """FLOP per second of one core in a matrix product, in the number format of the runs; None if it was not measured,
    as on a GPU."""
    core_bf16_flop_per_s: Positive | None = None
    """The same in bf16, which `--precision auto` may choose; None if the number format was given."""
    core_other_load: NotNegative | None = None
    """Cores that other programs used while `core_flop_per_s` was measured; None if it is unknown."""
    left_out: list[str] = []
    """Sentences on sizes that do not fit some ranks or the data, so that they are not measured."""


class ExperimentDescription(VersionedFile, frozen=True, kw_only=True):
    """Content of `experiment.json`."""

    kind: str
    """`compare`, `scale`, `batch`, `large-batch` or `race`."""
    candidates: list[Candidate]
    config: Settings
    """Settings that all runs share."""
    design: Design
    provenance: Provenance
    user_code: dict[str, str | None] = msgspec.field(default_factory=dict)
    """Digest by file of the user's code: modules, and the script."""


class CompareDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of a comparison."""

    design: CompareDesign


class ScaleDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of a scaling experiment."""

    design: ScaleDesign


class BatchDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of an experiment over batch sizes."""

    design: BatchDesign


class LargeBatchDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of an experiment with large batches."""

    design: LargeBatchDesign


class RaceDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of a race."""

    design: RaceDesign


DESCRIPTIONS: dict[str, type[ExperimentDescription]] = {
    schema.COMPARE_KIND: CompareDescription,
    schema.SCALE_KIND: ScaleDescription,
    schema.BATCH_KIND: BatchDescription,
    schema.LARGE_BATCH_KIND: LargeBatchDescription,
    schema.RACE_KIND: RaceDescription,
}


class _KindOnly(VersionedFile, frozen=True, kw_only=True):
    kind: str


def is_experiment(path: Path) -> bool:
    """Return whether a folder contains an experiment."""
    return exists(path / schema.EXPERIMENT_FILE)


def read_description(file: Path) -> ExperimentDescription:
    """Read `experiment.json`; its kind determines the type of its design."""
    kind = read_model(file, _KindOnly, "experiment").kind
    found = read_model(file, DESCRIPTIONS.get(kind, ExperimentDescription), "experiment")
    check_settings(found.config, "experiment.config", file)
    if len({candidate.name for candidate in found.candidates}) < len(found.candidates):
        raise RecordError(f"{file} is damaged: two of experiment.candidates have the same name.")
    for number, candidate in enumerate(found.candidates):
        place = f"experiment.candidates[{number}]"
        check_settings(candidate.settings, f"{place}.settings", file)
        point = candidate.point
        if point is not None and (point.ranks != point.hosts * point.ranks_per_host or point.batch < point.ranks):
            raise RecordError(
                f"{file} is damaged: {place}.point has ranks that are not hosts × ranks_per_host, or exceed its batch."
            )
    return found
