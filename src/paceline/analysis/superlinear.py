"""Speed-ups over one process that exceed the number of ranks: pointed out, and no result beside other programs.

N ranks compute at most N times as fast as one process, apart from what smaller shares of the batch save. The threads of
one process wait for each other in each operation, so programs that take one of their cores slow all of them, many times
over; ranks with one thread each wait only where they exchange gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from paceline.analysis.costs import CostTable
from paceline.analysis.other_load import OtherLoad, format_load, other_load
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import Estimate
from paceline.formatting import factor, join_names, plural

SUPERLINEAR = 1.05
"""Speed-up ÷ ranks from which, if the whole interval is above, a note is shown."""
BY_CACHES = 1.5
"""Largest speed-up ÷ ranks that caches are taken to explain beside other programs. Measured with one thread: of a model
whose elementwise operations hardly compute and only move memory, a sample takes 1.42 times the CPU time at batch 1,024
as at batch 16; of convolutions, up to 1.17 times at batch 128 as at half of it."""


@dataclass(frozen=True)
class SuperlinearGain:
    """Speed-up of a candidate over one process that exceeds its number of ranks."""

    candidate: str
    baseline: str
    ranks: int
    speed_up: Estimate
    load: OtherLoad | None
    """Load of other programs during the runs; None if it was not measured, or too small to have an effect."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is more than caches explain, and other programs used the cores."""
        return self.load is not None and self.speed_up.value > BY_CACHES * self.ranks


def superlinear_gains(
    record_set: RecordSet, costs: CostTable, measured: Iterable[tuple[str, int, str]]
) -> Iterator[SuperlinearGain]:
    """Yield the speed-ups that exceed the number of ranks; `measured` has candidates, their ranks and baselines."""
    load = cache(lambda: other_load(record_set))
    for name, ranks, baseline in measured:
        speed_up = costs.ratio(baseline, name)
        if speed_up is None or speed_up.value <= SUPERLINEAR * ranks:
            continue
        found = load()
        notable = found if found is not None and found.is_notable else None
        gain = SuperlinearGain(name, baseline, ranks, speed_up, notable)
        if gain.is_in_doubt or least(speed_up) > SUPERLINEAR * ranks:
            yield gain


def superlinear_notes(gains: Iterable[SuperlinearGain], record_set: RecordSet) -> Iterator[str]:
    """Yield a note on the speed-ups over each baseline that are in doubt, and one on the others."""
    groups: dict[tuple[str, int, bool], list[SuperlinearGain]] = {}
    for gain in gains:
        groups.setdefault((gain.baseline, gain.ranks, gain.is_in_doubt), []).append(gain)
    for (baseline, ranks, in_doubt), found in groups.items():
        names = join_names([f"{gain.candidate} ({factor(gain.speed_up.value)})" for gain in found])
        load = found[0].load
        if in_doubt and load is not None:
            threads = _cpu_threads(record_set, baseline)
            waiting = f": its {threads} threads wait for each other" if threads > 1 else ""
            instead = ", or with --threads 1," if threads > 1 else ""
            yield (
                f"{names}: the speed-up over {baseline} is more than {plural(ranks, 'rank')} can gain. Other programs "
                f"used {format_load(load)} during the runs, which probably slowed {baseline} down more than the "
                f"ranks{waiting}. Repeat on a quiet machine{instead} to measure the speed-up."
            )
        else:
            cause = "something that was not measured" if load is None else "other programs"
            yield (
                f"{names}: the speed-up over {baseline} exceeds the number of ranks, {ranks}; smaller shares of the "
                f"batch may fit into a cache or be allocated faster, or {cause} slowed {baseline} down: repeat on an "
                "idle machine to find out."
            )


def least(estimate: Estimate) -> float:
    """Return the lower end of an interval; without one, the lowest of the repeats."""
    return min(estimate.each, default=estimate.value) if estimate.low is None else estimate.low


def _cpu_threads(record_set: RecordSet, name: str) -> int:
    """Return the most threads that compute in a run of a candidate on CPUs; 0 if there is none."""
    topologies = [run.topology for run in record_set.runs_of(name).values()]
    return max((topology.threads for topology in topologies if topology.device == "cpu"), default=0)
