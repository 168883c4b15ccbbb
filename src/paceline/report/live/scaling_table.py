"""Shows a scaling experiment while it goes on, as a comparison is shown; it has a point per strategy and shape."""

from __future__ import annotations

from typing import Any

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.scaling.machines import (
    format_cores,
    is_packed,
    machines_of,
    max_ranks_sharing_cores,
    placement_notes,
)
from paceline.config import RunConfig
from paceline.report.formatting import listed, plural, roughly, run_length
from paceline.report.live.live_table import LiveTable


class ScalingLiveTable(LiveTable):
    """What the user sees of it; a line per repeat where there is no terminal."""

    def plan(self, design: dict[str, Any], config: RunConfig) -> None:
        """What will be done, and how long it will take."""
        self._least = design["repeats"]
        self._repeats = str(self._least)
        self._print(plan_in_words(design, config))
        for sentence in placement_notes(design, _shapes(design)):
            self._print(sentence)
        together = max(max_ranks_sharing_cores(design, *shape) for shape in _shapes(design))
        cores = design["machine_cores"]
        if design["host_cpus"] is None and not design["gpus"] and together > max(1, cores):
            hosts = len(set(machines_of(design, design["hosts"]))) < design["hosts"]
            which = "the hosts share a machine, which" if hosts else "this machine"
            there = format_cores(cores)
            self._print(f"no speed-up will be claimed from more ranks than cores: {which} has {there}")

    def look(self, comparison: Comparison, repeats: int) -> None:
        """A repeat is done, and this is what is known; every point in one line would be too much."""
        self._comparison = comparison
        self._left = self._what_is_left(repeats)
        if not self._console.is_terminal:
            measured = sum(row.step_s is not None for row in comparison.rows)
            self._print(f"after {plural(repeats, 'repeat')}{self._left}: {plural(measured, 'point')} measured")

    def rows_to_show(self, comparison: Comparison) -> list[CandidateRow]:
        """Of so many points those on the most ranks."""
        ranks = {row.candidate.name: (row.candidate.point or {}).get("ranks", 1) for row in comparison.rows}
        return [row for row in comparison.rows if ranks[row.candidate.name] == max(ranks.values())]


def plan_in_words(design: dict[str, Any], config: RunConfig) -> str:
    """What the experiment will do, in one line: the batches are part of it."""
    length = run_length(config)
    shapes = sorted(_shapes(design), key=lambda shape: shape[0] * shape[1])
    counts = dict.fromkeys(f"{hosts * number}{_packed(design, hosts, number)}" for hosts, number in shapes)
    batches = {"strong": f"global batch {design['batch']:,}", "weak": f"batch {design['batch_per_rank']:,} per rank"}
    modes = [f"{mode} ({batches[mode]})" for mode in design["modes"]]
    parts = [
        f"{design['target']}: {', '.join(design['strategies'])}",
        f"{' and '.join(modes)} scaling",
        f"{listed(list(counts))} ranks × {plural(design['threads'], 'thread')}",
        f"{length} × {plural(design['repeats'], 'repeat')}",
        *([] if design["estimate_s"] is None else [f"about {roughly(design['estimate_s'])}"]),
    ]
    return " · ".join(parts)


def _shapes(design: dict[str, Any]) -> list[tuple[int, int]]:
    return [(shape["hosts"], shape["ranks_per_host"]) for shape in design["shapes"]]


def _packed(design: dict[str, Any], hosts: int, ranks_per_host: int) -> str:
    """Where ranks are, if they are on fewer hosts than one might think."""
    return f" (on {plural(hosts, 'host')})" if is_packed(design, hosts, ranks_per_host) else ""
