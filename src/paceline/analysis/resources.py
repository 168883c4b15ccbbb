"""CPU and memory use and garbage collections of a run's processes and hosts during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.records.reader import RunRecord, Steps
from paceline.records.resources import Resources
from paceline.records.schema import GRAPHS, MarkRow

FloatColumn = npt.NDArray[np.float64]
TimeSpan = tuple[float, float]
"""Two times."""

MIN_INTERVAL_S = 0.05
"""Shortest time between two samples from which CPU use is computed."""


@dataclass(frozen=True)
class RankUsage:
    """Resource use of one rank's process during training. A value is None if nothing was measured."""

    rank: int
    host: int
    """Number of its host, from 0."""
    cpu_share: float | None
    """CPU time ÷ wall time, from the start of the first step to the end of the last, without captures of CUDA graphs:
    1 means one core fully used."""
    resident_bytes: float | None
    """Median of its resident memory."""
    device_bytes: float | None
    """Median of the memory of tensors on its GPU."""
    device_used_bytes: float | None
    """Peak of the total memory in use on that GPU, by all processes."""
    collections: int
    """Number of full garbage collections (generation 2) and of others longer than 1 ms."""
    collection_s: float
    sampler_share: float | None
    """CPU time of the sampler ÷ wall time."""
    gpu_busy: float | None
    """Mean share of the time in which its GPU ran a kernel, of any process."""
    gpu_power_w: float | None
    """Mean power of its GPU."""
    gpu_clock_mhz: float | None
    """Median clock of its GPU."""
    gpu_limited_by_power: float | None
    """Share of the samples in which the power limit lowered the clock of its GPU."""
    gpu_limited_by_heat: float | None


@dataclass(frozen=True)
class HostUsage:
    """Resource use of one host: sums over its ranks, and totals over all processes."""

    host: int
    ranks: list[int]
    cpu_share: float | None
    """Sum over its ranks, in cores."""
    resident_bytes: float | None
    """Sum over its ranks; shared pages count once per rank."""
    busy: float | None
    """Mean share of its usable cores' time that was not idle."""
    used_bytes: float | None
    """Peak of the memory in use."""
    available_bytes: float | None
    """Minimum of the available memory."""


def usage(run: RunRecord) -> list[RankUsage]:
    """Return the resource use of every rank that has samples in this record."""
    return [
        rank_usage(rank, samples, run.steps.get(rank), run.marks.get(rank, ()), host=_host_of(rank, run))
        for rank, samples in sorted(run.resources.items())
    ]


def host_usage(run: RunRecord) -> list[HostUsage]:
    """Return the resource use of every host whose ranks have samples in this record."""
    by_host: dict[int, list[RankUsage]] = {}
    for rank in usage(run):
        by_host.setdefault(rank.host, []).append(rank)
    return [_host_usage(host, ranks, run) for host, ranks in by_host.items()]


def rank_usage(
    rank: int, samples: Resources, steps: Steps | None, marks: Sequence[MarkRow] = (), *, host: int = 0
) -> RankUsage:
    """Return one rank's resource use from its samples, while it trained these steps."""
    return usage_between(rank, samples, *training_time(samples, steps), marks, host=host)


def usage_between(
    rank: int, samples: Resources, first_s: float, last_s: float, marks: Sequence[MarkRow] = (), *, host: int = 0
) -> RankUsage:
    """Return one rank's resource use from its samples, between two times, without captures of CUDA graphs."""
    parts = training_parts(first_s, last_s, marks)
    during = _during(samples, parts)
    collections = [
        mark for mark in marks if mark.kind == "gc" and any(start <= mark.start_s <= end for start, end in parts)
    ]
    return RankUsage(
        rank=rank,
        host=host,
        cpu_share=_rate(samples, "cpu_s", parts),
        resident_bytes=_of(np.median, samples["resident_bytes"][during]),
        device_bytes=_of(np.median, samples["device_bytes"][during]),
        device_used_bytes=_of(np.max, samples["device_used_bytes"][during]),
        collections=len(collections),
        collection_s=sum(mark.end_s - mark.start_s for mark in collections),
        sampler_share=_rate(samples, "sampler_cpu_s", parts),
        gpu_busy=mean_over_time(samples["time_s"], samples["gpu_busy"], parts),
        gpu_power_w=_mean_power_w(samples, parts),
        gpu_clock_mhz=_of(np.median, samples["gpu_clock_mhz"][during]),
        gpu_limited_by_power=_of(np.mean, samples["gpu_limited_by_power"][during]),
        gpu_limited_by_heat=_of(np.mean, samples["gpu_limited_by_heat"][during]),
    )


def training_time(samples: Resources, steps: Steps | None) -> tuple[float, float]:
    """Return the start of a rank's first step and the end of its last; without steps, the first and last samples."""
    if steps is not None and len(steps):
        return float(steps["start_s"][0]), float(steps["start_s"][-1] + steps.total_s[-1])
    return (float(samples["time_s"][0]), float(samples["time_s"][-1])) if len(samples) else (0.0, 0.0)


def training_parts(first_s: float, last_s: float, marks: Sequence[MarkRow] = ()) -> list[TimeSpan]:
    """Return the time between two times without that in which CUDA graphs were tried or captured, in order."""
    captures = sorted((mark.start_s, mark.end_s) for mark in marks if mark.kind == GRAPHS)
    inside = [capture for capture in captures if first_s <= capture[0] and capture[1] <= last_s]
    starts, ends = [first_s, *[end for _, end in inside]], [*[start for start, _ in inside], last_s]
    return list(zip(starts, ends, strict=True))


def cpu_shares(samples: Resources) -> tuple[FloatColumn, FloatColumn]:
    """Return the end and the CPU time ÷ wall time of each interval between samples.

    Samples less than `MIN_INTERVAL_S` after another are skipped: CPU time over a few milliseconds is mostly noise.
    """
    kept: list[int] = []
    for index, time_s in enumerate(samples["time_s"]):
        if not kept or time_s - samples["time_s"][kept[-1]] >= MIN_INTERVAL_S:
            kept.append(index)
    times, cpu_s = samples["time_s"][kept], samples["cpu_s"][kept]
    return times[1:], np.diff(cpu_s) / np.diff(times)


def _host_of(rank: int, run: RunRecord) -> int:
    return rank // run.topology.ranks_per_host


def _host_usage(host: int, ranks: Sequence[RankUsage], run: RunRecord) -> HostUsage:
    first = run.resources[ranks[0].rank]
    rank = ranks[0].rank
    parts = training_parts(*training_time(first, run.steps.get(rank)), run.marks.get(rank, ()))
    during = _during(first, parts)
    return HostUsage(
        host=host,
        ranks=[rank.rank for rank in ranks],
        cpu_share=_sum([rank.cpu_share for rank in ranks]),
        resident_bytes=_sum([rank.resident_bytes for rank in ranks]),
        busy=mean_over_time(first["time_s"], first["host_busy"], parts),
        used_bytes=_of(np.max, first["host_used_bytes"][during]),
        available_bytes=_of(np.min, first["host_available_bytes"][during]),
    )


def _during(samples: Resources, parts: Sequence[TimeSpan]) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples during training; if there are none, of the sample nearest to its end."""
    times = samples["time_s"]
    inside: npt.NDArray[np.bool_] = np.any(
        [(times >= first_s) & (times <= last_s) for first_s, last_s in parts], axis=0
    )
    if not inside.any() and len(times):
        inside[np.argmin(np.abs(times - parts[-1][1]))] = True
    return inside


def _rate(samples: Resources, counter: str, parts: Sequence[TimeSpan]) -> float | None:
    """Return the growth of a counter per second of training, interpolated linearly between samples."""
    length_s = sum(last_s - first_s for first_s, last_s in parts)
    if len(samples) < 2 or length_s <= 0:
        return None
    return float(np.diff(np.interp(parts, samples["time_s"], samples[counter])).sum() / length_s)


def _mean_power_w(samples: Resources, parts: Sequence[TimeSpan]) -> float | None:
    """Return the mean power by the GPU's counter of energy; where it has none, the mean of the sampled power."""
    counted = np.isfinite(samples["gpu_energy_j"])
    if counted.sum() < 2:
        return mean_over_time(samples["time_s"], samples["gpu_power_w"], parts)
    return _rate(Resources({name: values[counted] for name, values in samples.columns.items()}), "gpu_energy_j", parts)


def mean_over_time(times: FloatColumn, shares: FloatColumn, parts: Sequence[TimeSpan]) -> float | None:
    """Return the mean of shares over some intervals; each share covers the time since the previous sample."""
    covered = np.sum([np.diff(times.clip(first_s, last_s)) for first_s, last_s in parts], axis=0)
    lengths = np.where(np.isfinite(shares[1:]), covered, 0.0)
    return float(np.average(np.nan_to_num(shares[1:]), weights=lengths)) if lengths.sum() > 0 else None


def _of(figure: Callable[[FloatColumn], Any], values: FloatColumn) -> float | None:
    known = values[np.isfinite(values)]
    return float(figure(known)) if len(known) else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
