"""Record of `paceline doctor` on disk: machine of every rank, links, contention, needs of the workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from paceline.errors import RecordError
from paceline.records.decoder import VersionedFile, exists, read_model
from paceline.records.description import RecordedEmulation
from paceline.records.provenance import Provenance
from paceline.records.schema import DOCTOR_FILE
from paceline.records.value_types import Count, Positive, PositiveCount, WholeNumber
from paceline.records.writer import write_json

LARGE_BYTES = 1 << 20
"""Size from which buffers on the way no longer inflate a measured bandwidth."""
MAX_BYTES_PER_S = 1e18
"""Upper limit of a plausible bandwidth."""
Latency = Annotated[float, Meta(ge=0)]
SecondsPerByte = Annotated[float, Meta(gt=1 / MAX_BYTES_PER_S)]
TwoRanks = Annotated[list[Count], Meta(min_length=2, max_length=2)]
NumberedRanks = Annotated[list[Count], Meta(min_length=1)]


class RankInfo(Struct, frozen=True, kw_only=True):
    """One rank and its machine."""

    rank: Count
    host: Count
    """Number of its host, from 0. Ranks on one host communicate without leaving it; emulated hosts count separately."""
    host_name: str
    boot_id: str
    """Identifier of the booted machine. Emulated hosts on one machine have the same one, and share its cores."""
    interface: str
    """Network interface that carries its messages."""
    address: str | None
    """Address of the host on that interface; None if there is none."""
    host_name_addresses: list[str]
    """Addresses that the host name resolves to. Software that does not choose an interface listens on them."""
    bind_error: str | None
    """Error when opening a port on the address; None on success."""
    device: str
    """`cpu`, or the name of the GPU."""
    device_index: Count | None
    backend: str
    threads: PositiveCount
    """Compute threads of torch."""
    cpu_count: Count
    """Cores of the machine."""
    affinity: Count
    """Number of cores in the CPU affinity mask of the process."""
    cpu_quota: float | None
    """CPU quota of its cgroups, in cores; None if there is no quota."""
    cores: Positive
    """Usable cores: the smaller of affinity and quota."""
    busy_cores: float
    """Cores of the machine that other programs used while the ranks were idle."""
    memory_available_bytes: WholeNumber
    """Memory available before the workload: free memory of the machine, or what the tightest cgroup leaves."""
    memory_limit_bytes: Count | None
    """Memory limit of the tightest cgroup; None if there is no limit."""
    resident_bytes: Count
    """Resident memory of the rank's process before the workload: Python, torch, process groups."""
    device_memory_bytes: Count | None
    """Memory of the GPU; None on a CPU."""
    device_free_bytes: Count | None
    folder: str
    """Folder of the records."""
    disk_free_bytes: Count
    versions: dict[str, str | None]
    has_bf16: bool | None = None
    """Whether the processor has instructions for bf16; None in records of older versions, and on a GPU."""
    fp32_flop_per_s: Positive | None = None
    """FLOP per second in a matrix product on the threads of the rank, while all ranks compute; None on a GPU."""
    bf16_flop_per_s: Positive | None = None
    """The same in bf16; None without instructions for it."""
    without_gpu_readings: str | None = None
    """Reason why utilisation and power of its GPU are not recorded, as a clause; None if they are, and on a CPU."""
    clock_offset_s: float
    """Time of day on its clock minus that of rank 0."""
    clock_error_s: float
    """Uncertainty of the offset."""


class PairPoint(Struct, frozen=True):
    """Time of messages of one size between two ranks."""

    bytes: Count
    one_way_s: float
    """Half of the median round-trip time."""
    repeats: Count


class PairLink(Struct, frozen=True, kw_only=True):
    """Measured link between two ranks."""

    ranks: TwoRanks
    hosts: TwoRanks
    """Hosts of the two ranks; equal for a link within a host."""
    alpha_s: Latency
    """Latency: half of the median round-trip time of one-element messages."""
    beta_s_per_byte: SecondsPerByte
    """Slope of one-way time over size, by least squares."""
    points: list[PairPoint]

    @property
    def within_host(self) -> bool:
        """Whether both ranks are on the same host."""
        return self.hosts[0] == self.hosts[1]

    @property
    def bytes_per_s(self) -> float:
        """Point-to-point bandwidth: 1 ÷ beta."""
        return 1 / self.beta_s_per_byte


class AllReducePoint(Struct, frozen=True):
    """Time and bandwidth of an all-reduce of one size."""

    bytes: PositiveCount
    time_s: Positive
    """Median over repeats of the slowest rank's time."""
    algbw_bytes_per_s: Positive
    """Size ÷ time."""
    busbw_bytes_per_s: Positive
    """algbw × 2(n − 1)/n: rate on every rank's link in each direction."""
    repeats: Count


class AllReduceTimes(Struct, frozen=True, kw_only=True):
    """All-reduces over some ranks, smallest size first."""

    ranks: NumberedRanks
    hosts: NumberedRanks
    """Hosts of these ranks, without duplicates."""
    points: Annotated[list[AllReducePoint], Meta(min_length=1)]

    @property
    def within_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.hosts) == 1

    @property
    def best(self) -> AllReducePoint:
        """Point of highest busbw among sizes of at least `LARGE_BYTES`; the largest size if there are none."""
        large = [point for point in self.points if point.bytes >= LARGE_BYTES]
        return max(large, key=lambda point: point.busbw_bytes_per_s, default=self.points[-1])


class MeasuredLinks(Struct, frozen=True):
    """Measured links of all pairs, and all-reduces."""

    pairs: Annotated[list[PairLink], Meta(min_length=1)]
    all_reduces: Annotated[list[AllReduceTimes], Meta(min_length=1)]
    """The first is over all ranks, as in training. With several hosts, others follow: within a host, between hosts."""

    def of(self, *, within_host: bool) -> list[PairLink]:
        """Return the links within hosts, or those between hosts."""
        return [pair for pair in self.pairs if pair.within_host == within_host]

    @property
    def slowest(self) -> PairLink:
        """Slowest link that traffic over all ranks crosses: a link between hosts if there are several hosts."""
        return max(self.of(within_host=False) or self.pairs, key=lambda pair: pair.beta_s_per_byte)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the slowest link, to which the link utilisation in training is relative."""
        return self.slowest.bytes_per_s


class Contention(Struct, frozen=True, kw_only=True):
    """Slow-down of communication and compute when both run at the same time."""

    flop: Count
    """Floating-point operations of one matrix product."""
    matmul_alone_s: Positive
    matmul_contended_s: Positive
    """Time of a matrix product while an all-reduce is always in progress."""
    bytes: Count
    """Size of the all-reduce."""
    all_reduce_alone_s: Positive
    all_reduce_contended_s: Positive
    """Time of an all-reduce while all ranks compute."""

    @property
    def compute_factor(self) -> float:
        """Time of compute during communication ÷ time of compute alone."""
        return self.matmul_contended_s / self.matmul_alone_s

    @property
    def communication_factor(self) -> float:
        """Time of communication during compute ÷ time of communication alone."""
        return self.all_reduce_contended_s / self.all_reduce_alone_s


class WorkloadNeeds(Struct, frozen=True, kw_only=True):
    """Step time and memory of the workload, measured by training a few steps."""

    name: str
    strategy: str
    batch: PositiveCount | None
    """Global batch; None if the workload's data sets it."""
    workers: PositiveCount
    parameters: Count
    gradient_bytes: Count
    steps: Count
    step_s: Positive
    """Median step time of the slowest rank, without the first step."""
    peak_bytes: list[Count | None]
    """Peak memory by rank: resident memory on a CPU, tensor memory on a GPU. None for a rank that did not train, and if
    the system does not report it."""
    precision: str | None = None
    """Number format; None in records of older versions."""
    is_precision_chosen: bool = False
    """Whether `--precision auto` has chosen it."""


class MeasuringCost(Struct, frozen=True, kw_only=True):
    """Overhead of collecting events: alternating blocks of steps with and without it, on the same data."""

    workload: str
    strategy: str
    share: float
    """CPU time of a step with events ÷ CPU time without events, minus 1; median over pairs of blocks."""
    low: float
    high: float
    """`low` to `high` is the 95% interval of the share."""
    pairs: Count
    """Pairs of blocks, one with events and one without."""
    steps: Count
    """Steps per block."""
    step_cpu_s: float
    """CPU time of a step without events, over all threads of one rank."""


class Examination(VersionedFile, frozen=True, kw_only=True):
    """All results of `paceline doctor`."""

    provenance: Provenance
    ranks: list[RankInfo]
    link: MeasuredLinks | None
    """None for a single rank."""
    contention: Contention | None
    workload: WorkloadNeeds | None
    """None if no workload was trained, or if training failed."""
    measuring_cost: MeasuringCost | None = None
    """None if no workload was trained, or if the overhead could not be measured."""
    failure: str | None = None
    """Error of the workload; None if it trained."""
    failure_hint: str | None = None
    emulated: RecordedEmulation | None = None
    """Emulated hosts of the launch; None on real hosts."""
    measured_s: float = 0.0
    """Duration of the examination, without the start of the ranks."""

    @property
    def hosts(self) -> dict[int, list[RankInfo]]:
        """Ranks by host."""
        found: dict[int, list[RankInfo]] = {}
        for rank in self.ranks:
            found.setdefault(rank.host, []).append(rank)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as JSON values, without the schema version."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["schema"]
        return values


def check_examination(found: Examination) -> None:
    """Raise `ValueError` for values that fit one by one and contradict each other."""
    ranks = len(found.ranks)
    if [rank.rank for rank in found.ranks] != list(range(ranks)) or not found.ranks:
        raise ValueError("doctor.ranks are not numbered from 0")
    if found.workload is not None and len(found.workload.peak_bytes) != ranks:
        raise ValueError("doctor.workload.peak_bytes does not have one value per rank")
    for number, pair in enumerate(found.link.pairs if found.link else []):
        if max(pair.ranks) >= ranks:
            raise ValueError(f"doctor.link.pairs[{number}] names a rank that there is not")


def write_examination(folder: Path, examination: Examination) -> None:
    """Write an examination to a folder."""
    write_json(folder / DOCTOR_FILE, examination)


def read_examination(folder: Path) -> Examination:
    """Read the examination in a folder."""
    file = folder / DOCTOR_FILE
    found = read_model(file, Examination, "doctor")
    try:
        check_examination(found)
    except ValueError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    return found


def find_examination(folder: Path) -> Examination | None:
    """Return the examination in a folder, or None if there is none."""
    return read_examination(folder) if has_examination(folder) else None


def has_examination(folder: Path) -> bool:
    """Return whether a folder contains an examination."""
    return exists(folder / DOCTOR_FILE)
