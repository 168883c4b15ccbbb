"""Description of a run, written to `run.json` before its first step."""

from __future__ import annotations

from msgspec import Struct

from paceline.records.decoder import VersionedFile
from paceline.records.precision import PrecisionChoice
from paceline.records.provenance import Provenance
from paceline.records.settings import Settings
from paceline.records.value_types import Count, Positive, PositiveCount


class RecordedEmulation(Struct, frozen=True, kw_only=True):
    """Emulated hosts of a run."""

    spec: str
    """Value of `--emulate`, as in `4@200mbit`."""
    host_cpus: Positive | None
    """Cores that the ranks of one host share; None for no limit."""


class RecordedRecipe(Struct, frozen=True, kw_only=True):
    """Recipe of a run, as far as a reader needs it to understand the learning rate; `config` has all settings."""

    optimizer: str
    """Empty if the workload defines its own optimiser."""
    schedule: str
    """Empty if the workload defines its own scheduler."""
    warmup_epochs: float
    warmup_steps: Count = 0
    """Least number of steps of warm-up."""
    lr: float
    """Peak learning rate at the reference batch."""
    reference_batch: PositiveCount
    scale_lr: str


class Topology(Struct, frozen=True, kw_only=True):
    """Choices that were made for a run: strategy, ranks, batch, device, model."""

    workload: str
    strategy: str
    """Strategy with its options, as the user wrote it."""
    lossless: bool
    """Whether its gradient equals that of one process on the same batch, up to rounding."""
    exchanges: bool
    """Whether ranks exchange anything while they train."""
    lockstep: bool
    """Whether ranks step together; otherwise they have different numbers of steps."""
    sends: str
    """Way that gradients are sent: `singly`, `packed` into few messages, `overlapped` with backward, or
    `overlapped_forward`: with backward and the next forward."""
    world_size: PositiveCount
    workers: PositiveCount
    """Ranks that train."""
    servers: Count = 0
    """Ranks that only keep parameters."""
    ranks_per_host: PositiveCount
    ranks_sharing_cores: PositiveCount | None = None
    """Ranks of a host that share its cores: 1 if a launcher bound each to its own; None for all of them."""
    batch: PositiveCount | None
    """Global batch; None if the workload's data or the script sets it."""
    batch_per_rank: list[Count]
    """Smallest and largest share of a rank, without duplicates; empty if the batch is unknown."""
    device: str
    """`cpu`, or the name of the GPU."""
    backend: str
    interface: str
    """Network interface that carries the messages of rank 0."""
    threads: PositiveCount
    """Compute threads per rank."""
    cores: Positive
    """Usable cores of rank 0's host."""
    parameters: Count
    gradient_bytes: Count
    flop_per_sample: Positive | None = None
    """Floating-point operations of the forward and backward pass of one sample; None if they could not be counted."""
    batch_norm_layers: Count
    random_layers: Count
    """Dropout layers that draw random numbers."""
    classes: Count | None
    """Classes of the data; None if it has none."""
    user_optimizer: bool
    lr: float | None
    """Peak learning rate, scaled to the batch; None if a script or the workload's own optimiser sets it."""
    precision: str | None = None
    """Number format that was used, as in `--precision`; None if a script sets it."""
    precision_choice: PrecisionChoice | None = None
    """Choice of `--precision auto`; None if the number format was given."""
    log_every: PositiveCount
    slow_rank: str = ""
    """Value of `--slow-rank`."""
    recipe: RecordedRecipe | None = None
    """None for a script."""
    emulated: RecordedEmulation | None = None
    """None on real hosts."""


class RunDescription(VersionedFile, frozen=True, kw_only=True):
    """Content of `run.json`."""

    config: Settings
    topology: Topology
    provenance: Provenance
