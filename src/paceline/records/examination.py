"""What `paceline doctor` found, as it stands on disk: facts of every rank's machine, the link, a workload's needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.records.decode import WrongValue, build
from paceline.records.reader import check_schema, read_json
from paceline.records.schema import DOCTOR_FILE, SCHEMA_VERSION
from paceline.records.writer import write_json

LARGE_BYTES = 1 << 20
FASTEST_BYTES_PER_S = 1e18
"""No link comes near it."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank, and the machine that it is on."""

    rank: int
    host: int
    """Which host it is on, from 0: ranks of one host reach each other without leaving it; an emulated host is one."""
    host_name: str
    boot_id: str
    """The same on all hosts that are really one machine, and share its cores, memory and clock."""
    interface: str
    """The network interface that its messages take."""
    address: str | None
    """This host's on it; None where it has none."""
    name_addresses: list[str]
    """What the host's own name resolves to: where software that does not choose an interface listens."""
    bind_error: str | None
    """Why no port can be had on the address; None where one can."""
    device: str
    """cpu, or the GPU's name."""
    device_index: int | None
    backend: str
    threads: int
    """What torch computes with."""
    cpu_count: int
    """Of the machine."""
    affinity: int
    """Cores that this process may run on."""
    cpu_quota: float | None
    """Cores' worth of time that its cgroups allow; None where they do not limit it."""
    cores: float
    """Usable: the lesser of the two."""
    busy_cores: float
    """What other programs took of the machine's while the ranks did nothing."""
    memory_available_bytes: int
    """Before the workload: what the machine has free, or what the tightest cgroup leaves."""
    memory_limit_bytes: int | None
    """Of the tightest cgroup; None where there is none."""
    resident_bytes: int
    """What the rank's process had taken by then: Python, torch, the groups."""
    device_memory_bytes: int | None
    """Of the GPU; None on a CPU."""
    device_free_bytes: int | None
    folder: str
    """Where records go."""
    disk_free_bytes: int
    versions: dict[str, str | None]
    clock_offset_s: float
    """Its time of day less rank 0's."""
    clock_error_s: float
    """By how much that may be wrong."""


@dataclass(frozen=True)
class PairPoint:
    """Messages of one size between two ranks."""

    bytes: int
    one_way_s: float
    """Half of the median round trip."""
    repeats: int


@dataclass(frozen=True, kw_only=True)
class PairLink:
    """The link between two ranks."""

    ranks: list[int]
    hosts: list[int]
    """Theirs; the same twice for a link within a host."""
    alpha_s: float
    """Latency: half of the median round trip of messages of one number."""
    beta_s_per_byte: float
    """The slope of the one-way time over the size, by least squares."""
    points: list[PairPoint]

    @property
    def within_host(self) -> bool:
        """Whether both ranks are on one host."""
        return self.hosts[0] == self.hosts[1]

    @property
    def bytes_per_s(self) -> float:
        """Point-to-point bandwidth: 1 ÷ beta."""
        return 1 / self.beta_s_per_byte


@dataclass(frozen=True)
class AllReducePoint:
    """All-reduces of one size."""

    bytes: int
    time_s: float
    """Median over repeats of the slowest rank's time."""
    algbw_bytes_per_s: float
    """Size ÷ time."""
    busbw_bytes_per_s: float
    """algbw × 2(n − 1)/n: what every rank's link had to carry in each direction."""
    repeats: int


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """All-reduces over some ranks, small to large."""

    ranks: list[int]
    hosts: list[int]
    """The hosts that these ranks are on, each once."""
    points: list[AllReducePoint]

    @property
    def within_host(self) -> bool:
        """Whether nothing of it leaves a host."""
        return len(self.hosts) == 1

    @property
    def best(self) -> AllReducePoint:
        """The highest bandwidth of sizes that are too large for buffers on the way to flatter it; else the largest."""
        large = [point for point in self.points if point.bytes >= LARGE_BYTES]
        return max(large, key=lambda point: point.busbw_bytes_per_s, default=self.points[-1])


@dataclass(frozen=True)
class MeasuredLinks:
    """What joins the ranks."""

    pairs: list[PairLink]
    all_reduces: list[AllReduceTimes]
    """First the one over all ranks, which training uses; on several hosts then those within one and between them."""

    def of(self, *, within_host: bool) -> list[PairLink]:
        """The links within hosts, or those between them."""
        return [pair for pair in self.pairs if pair.within_host == within_host]

    @property
    def narrowest(self) -> PairLink:
        """The slowest of the links that traffic over all ranks has to cross: between hosts where there are several."""
        return max(self.of(within_host=False) or self.pairs, key=lambda pair: pair.beta_s_per_byte)

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth that the utilisation of training's messages is relative to: that of the narrowest link."""
        return self.narrowest.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What communication and computation do to each other when both go on."""

    flop: int
    """Work of one matrix product."""
    product_alone_s: float
    product_beside_s: float
    """While an all-reduce is always under way."""
    bytes: int
    """Size of the all-reduce."""
    all_reduce_alone_s: float
    all_reduce_beside_s: float
    """While all ranks compute."""

    @property
    def compute_factor(self) -> float:
        """How many times as long computing takes beside communication."""
        return self.product_beside_s / self.product_alone_s

    @property
    def communication_factor(self) -> float:
        """How many times as long communication takes beside computing."""
        return self.all_reduce_beside_s / self.all_reduce_alone_s


@dataclass(frozen=True, kw_only=True)
class WorkloadNeeds:
    """What the workload took, really trained for a few steps."""

    name: str
    strategy: str
    batch: int | None
    """The global one; None where the data decides."""
    workers: int
    parameters: int
    gradient_bytes: int
    steps: int
    step_s: float
    """Median over the steps but the first, of the slowest rank."""
    peak_bytes: list[int | None]
    """By rank: the most resident memory on a CPU, the most that tensors took on a GPU; None for a rank that did not
    train, and where the system does not tell."""


@dataclass(frozen=True, kw_only=True)
class MeasuringCost:
    """What collecting events costs: steps with it against steps without it, in turn, on the same data."""

    workload: str
    strategy: str
    share: float
    """Processor time of a step with it over that of a step without, less one; the median of pairs of blocks."""
    low: float
    high: float
    """The 95% interval of the share."""
    pairs: int
    """Blocks with events, each beside one without."""
    steps: int
    """Of one block."""
    step_cpu_s: float
    """Processor time of a step without events, of all threads, on one rank."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All of it."""

    provenance: dict[str, Any]
    ranks: list[RankInfo]
    link: MeasuredLinks | None
    """None for a single rank."""
    contention: Contention | None
    workload: WorkloadNeeds | None
    """None where none was asked for, or where it failed."""
    measuring_cost: MeasuringCost | None = None
    """None where no workload was tried, or where the cost could not be measured."""
    failure: str | None = None
    """Why the workload could not be trained."""
    failure_hint: str | None = None
    measured_s: float = 0.0
    """How long the examination took, without starting the ranks."""

    @property
    def hosts(self) -> dict[int, list[RankInfo]]:
        """The ranks by host."""
        found: dict[int, list[RankInfo]] = {}
        for rank in self.ranks:
            found.setdefault(rank.host, []).append(rank)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Any) -> Examination:
        """The other way; raises `WrongValue` for what is not one."""
        found = build(cls, content)
        _check(found)
        return found


def _check(found: Examination) -> None:
    """Refuses what has the right types and still cannot be: figures are divided by, ranks are looked up."""
    if [rank.rank for rank in found.ranks] != list(range(len(found.ranks))) or not found.ranks:
        raise WrongValue("it does not count its ranks from 0")
    if found.workload is not None and len(found.workload.peak_bytes) != len(found.ranks):
        raise WrongValue("it.workload.peak_bytes is not one figure per rank")
    if not all(rank.cores > 0 and rank.threads > 0 for rank in found.ranks):
        raise WrongValue("it.ranks has one without cores or threads")
    if found.workload is not None and not (found.workload.step_s > 0 and found.workload.workers > 0):
        raise WrongValue("it.workload has a step that takes no time, or no ranks")
    if found.link is not None:
        _check_link(found.link, len(found.ranks))
    if found.contention is not None:
        both = found.contention
        times = (both.product_alone_s, both.product_beside_s, both.all_reduce_alone_s, both.all_reduce_beside_s)
        if not min(times) > 0:
            raise WrongValue("it.contention has something that takes no time")


def _check_link(link: MeasuredLinks, ranks: int) -> None:
    for pair in link.pairs:
        between = len(pair.ranks) == 2 and len(pair.hosts) == 2 and set(pair.ranks) <= set(range(ranks))
        if not between or pair.alpha_s < 0 or not pair.beta_s_per_byte > 1 / FASTEST_BYTES_PER_S:
            raise WrongValue("it.link.pairs has a link that is not between two ranks, or takes no time")
    if not link.pairs or not link.all_reduces:
        raise WrongValue("it.link has no pair, or no all-reduce")
    if not all(group.points and group.hosts and group.ranks for group in link.all_reduces):
        raise WrongValue("it.link.all_reduces has one without points")
    for point in (point for group in link.all_reduces for point in group.points):
        if not min(point.bytes, point.time_s, point.algbw_bytes_per_s, point.busbw_bytes_per_s) > 0:
            raise WrongValue("it.link.all_reduces has one of no bytes, or one that takes no time")


def write_examination(folder: Path, examination: Examination) -> None:
    """Leaves it in a folder."""
    write_json(folder / DOCTOR_FILE, {"schema": SCHEMA_VERSION, **examination.to_dict()})


def read_examination(folder: Path) -> Examination:
    """The examination in a folder."""
    file = folder / DOCTOR_FILE
    content = read_json(file)
    check_schema(content, file, set())
    del content["schema"]
    try:
        return Examination.from_dict(content)
    except WrongValue as misfit:
        raise RecordError(f"{file} is damaged: {misfit}.") from None


def find_examination(folder: Path) -> Examination | None:
    """The examination in a folder, if there is one."""
    return read_examination(folder) if has_examination(folder) else None


def has_examination(folder: Path) -> bool:
    """Whether the doctor has left something in a folder."""
    return (folder / DOCTOR_FILE).is_file()
