"""Live display of a scaling experiment, with one point per strategy and number of ranks and hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.scaling.machines import is_packed, placement_notes, planned_oversubscription
from paceline.config import RunConfig
from paceline.formatting import join_names, plural, whole
from paceline.records.experiment.design import Design, PointsDesign, ScaleDesign
from paceline.report.live.live_table import LiveTable
from paceline.report.run_description import run_length
from paceline.strategies.registry import BASELINE_STRATEGIES


class ScalingLiveTable(LiveTable):
    """Live display of a scaling experiment; where the console is not a terminal, one line per repeat."""

    def plan(self, design: Design, candidates: Sequence[str], config: RunConfig) -> None:  # noqa: ARG002
        """Print the planned points, and where ranks will share cores."""
        assert isinstance(design, PointsDesign)
        self._repeats = str(design.repeats)
        self._print(self.format_points(design, config))
        for sentence in placement_notes(design, _shapes(design)):
            self._print(sentence)
        sharing = planned_oversubscription(design)
        if sharing:
            self._print(f"{sharing}: they take turns, so no speed-up will be claimed where ranks share cores")

    def format_points(self, design: PointsDesign, config: RunConfig) -> str:
        """Format the planned points as one line."""
        assert isinstance(design, ScaleDesign)
        return format_scaling_plan(design, config)

    def refresh(self, comparison: Comparison, repeats: int) -> None:
        """Show the results after a repeat; without a terminal, only the number of points measured."""
        self._comparison = comparison
        if not self._console.is_terminal:
            measured = sum(row.step_s is not None for row in comparison.rows)
            self._print(f"after {plural(repeats, 'repeat')}{self._to_go()}: {plural(measured, 'point')} measured")

    def rows_to_show(self, comparison: Comparison) -> list[CandidateRow]:
        """Return the rows of the points on the most ranks."""
        ranks = {row.candidate.name: row.candidate.point.ranks if row.candidate.point else 1 for row in comparison.rows}
        return [row for row in comparison.rows if ranks[row.candidate.name] == max(ranks.values())]


def format_scaling_plan(design: ScaleDesign, config: RunConfig) -> str:
    """Format the planned points of an experiment, with their batches, as one line."""
    sizes = {"strong": (design.batch, "global batch {}"), "weak": (design.batch_per_rank, "batch {} per rank")}
    batches = {mode: text.format(whole(batch)) for mode, (batch, text) in sizes.items() if batch is not None}
    modes = [f"{mode} ({batches[mode]})" for mode in design.modes]
    return format_points_plan(design, f"{' and '.join(modes)} scaling", config)


def format_points_plan(design: PointsDesign, what: str, config: RunConfig) -> str:
    """Format the planned points of an experiment as one line; `what` is what varies between them besides ranks."""
    shapes = sorted(_shapes(design), key=lambda shape: shape[0] * shape[1])
    counts = dict.fromkeys(f"{hosts * number}{_packed(design, hosts, number)}" for hosts, number in shapes)
    ranks = "rank" if list(counts) == ["1"] else "ranks"
    parts = [
        f"{design.target}: {', '.join(design.strategies)}",
        what,
        f"{join_names(list(counts))} {ranks} × {plural(design.threads, 'thread')}{_single_threads(design)}",
        f"{run_length(config)} × {plural(design.repeats, 'repeat')}",
    ]
    return " · ".join(parts)


def _single_threads(design: PointsDesign) -> str:
    """Return the threads of `single` where it has others than each of several ranks, and is measured."""
    baselines = [name for name in design.strategies if name in BASELINE_STRATEGIES]
    if design.single_threads in (None, design.threads) or not baselines:
        return ""
    return f" ({join_names(baselines)}: {plural(design.single_threads, 'thread')})"


def _shapes(design: PointsDesign) -> list[tuple[int, int]]:
    return [(shape.hosts, shape.ranks_per_host) for shape in design.shapes]


def _packed(design: PointsDesign, hosts: int, ranks_per_host: int) -> str:
    """Return the hosts of the ranks, where they are on fewer hosts than there could be."""
    return f" (on {plural(hosts, 'host')})" if is_packed(design, hosts, ranks_per_host) else ""
