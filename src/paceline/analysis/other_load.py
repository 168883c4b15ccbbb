"""Load of other programs on the machine while runs were trained, and how much of the spread of step times it explains.

The load of a run is the CPU time of the host's cores that was not idle, minus that of the run's ranks. The model is a
linear regression of the logarithm of the step time on that load, with one intercept per candidate and one slope for
all: a candidate is compared only with itself in other repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.analysis.record_set import RecordSet
from paceline.analysis.resources import mean_over_time, training_time, usage_between
from paceline.analysis.steps.timing import step_time, windows_of
from paceline.formatting import TENTHS, format_cores
from paceline.records import RunRecord
from paceline.records.resources import Resources

NOTABLE_SHARE = 0.05
"""Share of the cores from which the load of other programs is reported: 0.1 of 2 cores."""
MIN_TIME_S = 0.2
"""Shortest time over which the load is computed: the kernel counts the use of a core in steps of 10 ms."""
MIN_FREEDOM = 6
"""Fewest degrees of freedom (runs − candidates) from which the load is related to step times."""
ERROR_RATE = 0.05
"""Probability of relating step times to a load that has no effect on them."""


@dataclass(frozen=True)
class OtherLoad:
    """Load of other programs during the runs of an experiment, in cores."""

    least: float
    """Mean over the run during which it was lowest."""
    most: float
    cores: float
    """Cores that the load refers to."""
    runs: int
    explained: float | None
    """Share of the variance of a candidate's log step times between repeats that the load explains (adjusted R²); 0 if
    they do not measurably grow with it, None if there are too few runs to say."""

    @property
    def is_notable(self) -> bool:
        """Whether it was large enough to have an effect."""
        return is_notable(self.most, self.cores)


def is_notable(load: float, cores: float) -> bool:
    """Return whether the load of other programs on some cores is large enough to have an effect."""
    return load > NOTABLE_SHARE * cores


def format_load(load: OtherLoad) -> str:
    """Return the range of the load over the runs, and the cores that it refers to."""
    least, most = TENTHS.text(load.least), TENTHS.text(load.most)
    return f"{most if least == most else f'{least}–{most}'} of {format_cores(load.cores)}"


class LoadedRun(NamedTuple):
    """Run with the load of other programs beside it, in cores, and the logarithm of its step time."""

    candidate: str
    load: float
    log_step_s: float


def other_load(record_set: RecordSet) -> OtherLoad | None:
    """Return the load of other programs during the runs; None if it was not measured."""
    loads = {id(r): load for r in record_set.runs if (load := load_of_run(r.run)) is not None}
    if not loads:
        return None
    timed = [
        LoadedRun(recorded.candidate, loads[id(recorded)], math.log(step_s))
        for recorded in record_set.runs
        if id(recorded) in loads and (step_s := step_time(windows_of(recorded.run)))
    ]
    return OtherLoad(
        least=min(loads.values()),
        most=max(loads.values()),
        cores=max(_cores(r.run) for r in record_set.runs if id(r) in loads),
        runs=len(loads),
        explained=explained_share(timed),
    )


def load_of_run(run: RunRecord) -> float | None:
    """Return the cores that processes other than the ranks used on the busiest machine; None if it was not measured."""
    found = [load for ranks in _machines(run) if (load := _load(run, ranks)) is not None]
    return max(found, default=None)


def _machines(run: RunRecord) -> Iterator[list[int]]:
    """Yield the ranks of each machine that have samples; emulated hosts are all on one machine."""
    ranks = sorted(rank for rank, samples in run.resources.items() if len(samples) > 1)
    hosts = {rank: 0 if run.topology.emulated else rank // run.topology.ranks_per_host for rank in ranks}
    for host in dict.fromkeys(hosts.values()):
        yield [rank for rank in ranks if hosts[rank] == host]


def _cores(run: RunRecord) -> float:
    """Return the cores that the samples of a host cover: on emulated hosts, those of the machine they share."""
    return float(run.provenance.cpu_count or run.topology.cores) if run.topology.emulated else run.topology.cores


def _load(run: RunRecord, ranks: list[int]) -> float | None:
    samples = run.resources[ranks[0]]  # Only the first rank of a host samples the host.
    first_s, last_s = _sampled_time(samples, *training_time(samples, run.steps.get(ranks[0])))
    busy = mean_over_time(samples["time_s"], samples["host_busy"], [(first_s, last_s)])
    shares = [usage_between(rank, run.resources[rank], first_s, last_s).cpu_share for rank in ranks]
    if busy is None or last_s - first_s < MIN_TIME_S or None in shares:
        return None
    return max(0.0, busy * _cores(run) - sum(share for share in shares if share is not None))


def _sampled_time(samples: Resources, first_s: float, last_s: float) -> tuple[float, float]:
    """Return the times of the last sample before training and of the first one after it.

    Between samples, only the mean is known: a time in between would mix the use of the ranks before and after it.
    """
    times = samples["time_s"]
    before, after = times[times <= first_s], times[times >= last_s]
    return float(before[-1] if len(before) else times[0]), float(after[0] if len(after) else times[-1])


def explained_share(runs: list[LoadedRun]) -> float | None:
    """Return the share of the variance within candidates that the load explains; see `OtherLoad.explained`."""
    by_candidate: dict[str, list[LoadedRun]] = {}
    for run in runs:
        by_candidate.setdefault(run.candidate, []).append(run)
    freedom = sum(len(own) - 1 for own in by_candidate.values())
    if freedom < MIN_FREEDOM:
        return None
    loads = np.concatenate([_centred([run.load for run in own]) for own in by_candidate.values()])
    times = np.concatenate([_centred([run.log_step_s for run in own]) for own in by_candidate.values()])
    products = float(loads @ times)
    total = float(loads @ loads) * float(times @ times)
    if products <= 0 or total <= 0:
        return 0.0
    unexplained = max(0.0, 1 - products**2 / total)
    if _chance_of_slope(unexplained, freedom - 1) > ERROR_RATE:
        return 0.0
    return max(0.0, 1 - unexplained * freedom / (freedom - 1))


def _chance_of_slope(unexplained: float, freedom: int) -> float:
    """Return the probability of such a positive slope without any effect of the load (one-sided t test)."""
    if unexplained == 0:
        return 0.0
    from scipy.special import stdtr  # Imported here because scipy takes 0.2 s, and commands that fail need none of it.

    return float(stdtr(freedom, -math.sqrt((1 - unexplained) / unexplained * freedom)))


def _centred(values: list[float]) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64) - float(np.mean(values))
