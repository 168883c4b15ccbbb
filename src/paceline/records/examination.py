"""Record of `paceline doctor` on disk: machine of every rank, links, contention, needs of the workload."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.records.decode import DecodeError, build
from paceline.records.reader import check_schema, read_json
from paceline.records.schema import DOCTOR_FILE, SCHEMA_VERSION
from paceline.records.writer import write_json

LARGE_BYTES = 1 << 20
"""Size from which buffers on the way no longer inflate a measured bandwidth."""
MAX_BYTES_PER_S = 1e18
"""Upper limit of a plausible bandwidth."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank and its machine."""

    rank: int
    host: int
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
    device_index: int | None
    backend: str
    threads: int
    """Compute threads of torch."""
    cpu_count: int
    """Cores of the machine."""
    affinity: int
    """Number of cores in the CPU affinity mask of the process."""
    cpu_quota: float | None
    """CPU quota of its cgroups, in cores; None if there is no quota."""
    cores: float
    """Usable cores: the smaller of affinity and quota."""
    busy_cores: float
    """Cores of the machine that other programs used while the ranks were idle."""
    memory_available_bytes: int
    """Memory available before the workload: free memory of the machine, or what the tightest cgroup leaves."""
    memory_limit_bytes: int | None
    """Memory limit of the tightest cgroup; None if there is no limit."""
    resident_bytes: int
    """Resident memory of the rank's process before the workload: Python, torch, process groups."""
    device_memory_bytes: int | None
    """Memory of the GPU; None on a CPU."""
    device_free_bytes: int | None
    folder: str
    """Folder of the records."""
    disk_free_bytes: int
    versions: dict[str, str | None]
    clock_offset_s: float
    """Time of day on its clock minus that of rank 0."""
    clock_error_s: float
    """Uncertainty of the offset."""


@dataclass(frozen=True)
class PairPoint:
    """Time of messages of one size between two ranks."""

    bytes: int
    one_way_s: float
    """Half of the median round-trip time."""
    repeats: int


@dataclass(frozen=True, kw_only=True)
class PairLink:
    """Measured link between two ranks."""

    ranks: list[int]
    hosts: list[int]
    """Hosts of the two ranks; equal for a link within a host."""
    alpha_s: float
    """Latency: half of the median round-trip time of one-element messages."""
    beta_s_per_byte: float
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


@dataclass(frozen=True)
class AllReducePoint:
    """Time and bandwidth of an all-reduce of one size."""

    bytes: int
    time_s: float
    """Median over repeats of the slowest rank's time."""
    algbw_bytes_per_s: float
    """Size ÷ time."""
    busbw_bytes_per_s: float
    """algbw × 2(n − 1)/n: rate on every rank's link in each direction."""
    repeats: int


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """All-reduces over some ranks, smallest size first."""

    ranks: list[int]
    hosts: list[int]
    """Hosts of these ranks, without duplicates."""
    points: list[AllReducePoint]

    @property
    def within_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.hosts) == 1

    @property
    def best(self) -> AllReducePoint:
        """Point of highest busbw among sizes of at least `LARGE_BYTES`; the largest size if there are none."""
        large = [point for point in self.points if point.bytes >= LARGE_BYTES]
        return max(large, key=lambda point: point.busbw_bytes_per_s, default=self.points[-1])


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured links of all pairs, and all-reduces."""

    pairs: list[PairLink]
    all_reduces: list[AllReduceTimes]
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


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Slow-down of communication and compute when both run at the same time."""

    flop: int
    """Floating-point operations of one matrix product."""
    matmul_alone_s: float
    matmul_contended_s: float
    """Time of a matrix product while an all-reduce is always in progress."""
    bytes: int
    """Size of the all-reduce."""
    all_reduce_alone_s: float
    all_reduce_contended_s: float
    """Time of an all-reduce while all ranks compute."""

    @property
    def compute_factor(self) -> float:
        """Time of compute during communication ÷ time of compute alone."""
        return self.matmul_contended_s / self.matmul_alone_s

    @property
    def communication_factor(self) -> float:
        """Time of communication during compute ÷ time of communication alone."""
        return self.all_reduce_contended_s / self.all_reduce_alone_s


@dataclass(frozen=True, kw_only=True)
class WorkloadNeeds:
    """Step time and memory of the workload, measured by training a few steps."""

    name: str
    strategy: str
    batch: int | None
    """Global batch; None if the workload's data sets it."""
    workers: int
    parameters: int
    gradient_bytes: int
    steps: int
    step_s: float
    """Median step time of the slowest rank, without the first step."""
    peak_bytes: list[int | None]
    """Peak memory by rank: resident memory on a CPU, tensor memory on a GPU. None for a rank that did not train, and if
    the system does not report it."""


@dataclass(frozen=True, kw_only=True)
class MeasuringCost:
    """Overhead of collecting events: alternating blocks of steps with and without it, on the same data."""

    workload: str
    strategy: str
    share: float
    """CPU time of a step with events ÷ CPU time without events, minus 1; median over pairs of blocks."""
    low: float
    high: float
    """`low` to `high` is the 95% interval of the share."""
    pairs: int
    """Pairs of blocks, one with events and one without."""
    steps: int
    """Steps per block."""
    step_cpu_s: float
    """CPU time of a step without events, over all threads of one rank."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All results of `paceline doctor`."""

    provenance: dict[str, Any]
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
        """Return the examination as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Any) -> Examination:
        """Build an examination from JSON values; raise `DecodeError` if they are invalid."""
        found = build(cls, content)
        _check(found)
        return found


def _check(found: Examination) -> None:
    """Raise `DecodeError` for values that readers cannot use as divisors or indices."""
    if [rank.rank for rank in found.ranks] != list(range(len(found.ranks))) or not found.ranks:
        raise DecodeError("its ranks are not numbered from 0")
    if found.workload is not None and len(found.workload.peak_bytes) != len(found.ranks):
        raise DecodeError("it.workload.peak_bytes does not have one value per rank")
    if not all(rank.cores > 0 and rank.threads > 0 for rank in found.ranks):
        raise DecodeError("it.ranks has a rank without cores or threads")
    if found.workload is not None and not (found.workload.step_s > 0 and found.workload.workers > 0):
        raise DecodeError("it.workload has a step time that is not above 0, or no workers")
    if found.link is not None:
        _check_link(found.link, len(found.ranks))
    if found.contention is not None:
        both = found.contention
        times = (both.matmul_alone_s, both.matmul_contended_s, both.all_reduce_alone_s, both.all_reduce_contended_s)
        if not min(times) > 0:
            raise DecodeError("it.contention has a time that is not above 0")


def _check_link(link: MeasuredLinks, ranks: int) -> None:
    for pair in link.pairs:
        between = len(pair.ranks) == 2 and len(pair.hosts) == 2 and set(pair.ranks) <= set(range(ranks))
        if not between or pair.alpha_s < 0 or not pair.beta_s_per_byte > 1 / MAX_BYTES_PER_S:
            raise DecodeError(
                "it.link.pairs has a link that is not between two ranks, or has an impossible latency or bandwidth"
            )
    if not link.pairs or not link.all_reduces:
        raise DecodeError("it.link has no pair or no all-reduce")
    if not all(group.points and group.hosts and group.ranks for group in link.all_reduces):
        raise DecodeError("it.link.all_reduces has an entry without points")
    for point in (point for group in link.all_reduces for point in group.points):
        if not min(point.bytes, point.time_s, point.algbw_bytes_per_s, point.busbw_bytes_per_s) > 0:
            raise DecodeError("it.link.all_reduces has a size, time or bandwidth that is not above 0")


def write_examination(folder: Path, examination: Examination) -> None:
    """Write an examination to a folder."""
    write_json(folder / DOCTOR_FILE, {"schema": SCHEMA_VERSION, **examination.to_dict()})


def read_examination(folder: Path) -> Examination:
    """Read the examination in a folder."""
    file = folder / DOCTOR_FILE
    content = read_json(file)
    check_schema(content, file, set())
    del content["schema"]
    try:
        return Examination.from_dict(content)
    except DecodeError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None


def find_examination(folder: Path) -> Examination | None:
    """Return the examination in a folder, or None if there is none."""
    return read_examination(folder) if has_examination(folder) else None


def has_examination(folder: Path) -> bool:
    """Return whether a folder contains an examination."""
    return (folder / DOCTOR_FILE).is_file()
