"""Utilisation, power and energy of the GPUs of a run, and whether power or heat limited their clocks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from paceline.analysis.record_set import RecordSet
from paceline.analysis.resources import usage
from paceline.formatting import join_names, percent, whole
from paceline.records.summary import RankSummary, Summary

NOTABLE = 0.1
"""Share of samples with a limited clock from which a run has a warning."""
CAUSES = {
    "gpu_limited_by_power": (
        "the power limit",
        "Their times follow the power that is left for a step; a higher limit (nvidia-smi --power-limit) may make them "
        "shorter.",
    ),
    "gpu_limited_by_heat": (
        "heat",
        "Their times depend on the temperature, and later runs may be slower than earlier ones; improve the cooling, "
        "or measure at a fixed lower clock (nvidia-smi --lock-gpu-clocks).",
    ),
}
"""Words for the reasons of a lower clock, and what follows from each, by the column of the samples."""


def gpu_busy(summary: Summary) -> float | None:
    """Return the mean use of the GPUs of a run; None if it is unknown of one of them."""
    shares = [rank.gpu_busy for rank in _one_rank_per_gpu(summary)]
    known = [share for share in shares if share is not None]
    return statistics.fmean(known) if known and len(known) == len(shares) else None


def gpu_power_w(summary: Summary) -> float | None:
    """Return the power of all GPUs of a run; None if it is unknown of one of them."""
    watts = [rank.gpu_power_w for rank in _one_rank_per_gpu(summary)]
    known = [power for power in watts if power is not None]
    return sum(known) if known and len(known) == len(watts) else None


def gpu_j_per_sample(summary: Summary) -> float | None:
    """Return the energy of all GPUs of a run per sample; None if it is unknown, or not positive."""
    power_w = gpu_power_w(summary)
    return power_w / summary.samples_per_s if power_w and summary.samples_per_s else None


def _one_rank_per_gpu(summary: Summary) -> Sequence[RankSummary]:
    """Return the first rank on each GPU: ranks that share a GPU have sampled the same figures."""
    return list({rank.gpu or rank.rank: rank for rank in reversed(summary.ranks)}.values())


def limited_clocks(record_set: RecordSet) -> Iterator[str]:
    """Yield a warning if power or heat lowered the clocks of GPUs, with the candidates that were affected."""
    for column, (cause, consequence) in CAUSES.items():
        found: dict[str, float] = {}
        clocks: list[float] = []
        for candidate in record_set.candidates:
            for run in record_set.runs_of(candidate.name).values():
                for used in usage(run):
                    share = getattr(used, column)
                    if share is not None and share >= NOTABLE:
                        found[candidate.name] = max(share, found.get(candidate.name, 0.0))
                        clocks += [used.gpu_clock_mhz] if used.gpu_clock_mhz else []
        if found:
            clock = f", to {whole(statistics.median(clocks))} MHz" if clocks else ""
            yield (
                f"{join_names(list(found))}: {cause} lowered the clock of a GPU in up to "
                f"{percent(max(found.values()), 0)} of the samples{clock}. {consequence}"
            )
