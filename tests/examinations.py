"""Hand-made examinations, with changes that a test names."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from paceline.records.examination import (
    AllReducePoint,
    AllReduceTimes,
    Contention,
    Examination,
    MeasuredLinks,
    PairLink,
    PairPoint,
    RankInfo,
    WorkloadNeeds,
)
from run_models import PROVENANCE

GB = 1_000_000_000
MB = 1_000_000


def rank_info(rank: int, host: int = 0, **changes: Any) -> RankInfo:
    """Return a rank with one of the two cores of its host."""
    values: dict[str, Any] = {
        "rank": rank,
        "host": host,
        "host_name": f"node{host}",
        "boot_id": f"boot{host}",
        "interface": "eth0",
        "address": f"198.18.0.{host + 1}",
        "host_name_addresses": [f"198.18.0.{host + 1}"],
        "bind_error": None,
        "device": "cpu",
        "device_index": None,
        "backend": "gloo",
        "threads": 1,
        "cpu_count": 2,
        "affinity": 2,
        "cpu_quota": None,
        "cores": 2.0,
        "busy_cores": 0.1,
        "memory_available_bytes": 8 * GB,
        "memory_limit_bytes": None,
        "resident_bytes": 300 * MB,
        "device_memory_bytes": None,
        "device_free_bytes": None,
        "folder": "/data/runs",
        "disk_free_bytes": 100 * GB,
        "versions": {"python": "3.11.7", "paceline": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        "clock_offset_s": 0.0,
        "clock_error_s": 0.0,
    }
    return RankInfo(**(values | changes))


def pair(one: int, other: int, hosts: tuple[int, int] = (0, 0), rate: float = 2e9, alpha_s: float = 5e-5) -> PairLink:
    """Return a link with a bandwidth in bytes per second."""
    points = [PairPoint(size, alpha_s + size / rate, 3) for size in (32 << 10, 32 << 20)]
    return PairLink(ranks=[one, other], hosts=list(hosts), alpha_s=alpha_s, beta_s_per_byte=1 / rate, points=points)


def all_reduce(ranks: list[int], hosts: list[int], rate: float = 1e9) -> AllReduceTimes:
    """Return all-reduces whose bus bandwidth approaches `rate` with growing size."""
    factor = 2 * (len(ranks) - 1) / len(ranks)
    times = {size: 1e-4 + factor * size / rate for size in [1024 * 4**power for power in range(9)]}
    points = [AllReducePoint(size, t, size / t, factor * size / t, 5) for size, t in times.items()]
    return AllReduceTimes(ranks=ranks, hosts=hosts, points=points)


LINK = MeasuredLinks([pair(0, 1)], [all_reduce([0, 1], [0])])
CONTENTION = Contention(
    flop=10**8,
    matmul_alone_s=0.002,
    matmul_contended_s=0.0021,
    bytes=4 << 20,
    all_reduce_alone_s=0.004,
    all_reduce_contended_s=0.006,
)
NEEDS = WorkloadNeeds(
    name="cnn on digits",
    strategy="ddp",
    batch=64,
    workers=2,
    parameters=50_000,
    gradient_bytes=200_000,
    steps=4,
    step_s=0.02,
    peak_bytes=[400 * MB, 400 * MB],
)


def examination(*ranks: RankInfo, **changes: Any) -> Examination:
    """Return an examination without problems, of two ranks on one host or of the given ranks."""
    whole = Examination(
        provenance=PROVENANCE,
        ranks=list(ranks) or [rank_info(0), rank_info(1)],
        link=LINK,
        contention=CONTENTION,
        workload=NEEDS,
        measured_s=5.0,
    )
    return replace(whole, **changes)


def on_two_hosts(**second: Any) -> Examination:
    """Return an examination of two ranks on each of two hosts; `second` has the changes on the second host."""
    ranks = [rank_info(0), rank_info(1), rank_info(2, 1, **second), rank_info(3, 1, **second)]
    between = pair(0, 2, (0, 1), rate=1e9, alpha_s=2e-4)
    link = MeasuredLinks(
        [pair(0, 1), pair(2, 3, (1, 1)), between],
        [
            all_reduce([0, 1, 2, 3], [0, 1], 5e8),
            all_reduce([0, 1], [0]),
            all_reduce([2, 3], [1]),
            all_reduce([0, 2], [0, 1], 8e8),
        ],
    )
    return examination(*ranks, link=link, workload=replace(NEEDS, workers=4, peak_bytes=[400 * MB] * 4))
