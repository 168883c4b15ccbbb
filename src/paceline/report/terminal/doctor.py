"""Terminal output of the doctor: findings, a table of the link, and progress while the examination runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from paceline.analysis.findings import findings, problems
from paceline.analysis.findings.finding import Finding
from paceline.formatting import binary_size, plural
from paceline.records.events import EXAMINATION_EVENTS
from paceline.records.examination import AllReduceTimes, Examination, MeasuredLinks, PairLink
from paceline.records.schema import DOCTOR_FILE, EVENTS_FILE
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.figures.link import ALL_REDUCE_FIGURES, LINK_FIGURES
from paceline.report.live.run import EventTail, FolderFollower
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.table import figure_table

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
STAGES = {
    "machines": "collecting facts about every rank's machine",
    "link": "measuring latency and bandwidth between ranks",
    "all-reduce": "measuring all-reduces, small to large",
    "contention": "measuring communication during computation",
    "workload": "training a few steps of the workload",
    "cost": "measuring the cost of measuring",
}
BLOCKS = "▁▂▃▄▅▆▇█"


class FindingRow(NamedTuple):
    """Finding as a table row."""

    level: str
    topic: str
    message: str
    fix: str


def finding_rows(examination: Examination) -> list[FindingRow]:
    """Return every finding of an examination: problems first, then notes, then passed checks."""
    order = ["problem", "note", "ok"]
    found = sorted(findings(examination), key=lambda finding: order.index(finding.level))
    return [FindingRow(finding.level, finding.topic, finding.message, finding.fix) for finding in found]


def print_examination(examination: Examination, console: Console) -> None:
    """Print the findings in the order of the checks, the link, and the verdict."""
    found = findings(examination)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.topic, _sentences(finding))
    console.print(table)
    if examination.link is not None:
        console.print()
        console.print(_pairs(examination.link, console.width))
        console.print()
        for measured in examination.link.all_reduces:
            print_line(console, _title(measured))
            console.print(_all_reduce(measured, console.width))
            console.print()
    print_line(console, verdict(found))


def to_json(examination: Examination, folder: Path) -> dict[str, Any]:
    """Return the findings and all measurements as JSON data."""
    found = findings(examination)
    return {
        "record": str(folder / DOCTOR_FILE),
        "problems": len(problems(found)),
        "findings": [finding.to_dict() for finding in found],
        "examination": examination.to_dict(),
    }


def verdict(found: Sequence[Finding]) -> str:
    """Return the result of the examination in one sentence."""
    bad, notes = len(problems(found)), sum(finding.level == "note" for finding in found)
    if bad:
        return f"{plural(bad, 'problem')} to fix" + (f", {plural(notes, 'note')}." if notes else ".")
    return f"No problems found, {plural(notes, 'note')}." if notes else "No problems found."


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve as one block character per value, scaled to the highest value."""
    top = max(values)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(len(BLOCKS) * value / top))] for value in values)


def _sentences(finding: Finding) -> Text:
    text = Text(finding.message)
    if finding.fix:
        text.append(f"\nfix: {finding.fix}", style="dim")
    return text


def _pairs(link: MeasuredLinks, width: int) -> Table:
    columns = [
        text_column("link", [_format_hosts(pair) for pair in link.pairs]),
        text_column("ranks", [f"{pair.ranks[0]} ↔ {pair.ranks[1]}" for pair in link.pairs]),
        *terminal_columns(LINK_FIGURES, link.pairs),
    ]
    return figure_table(columns, width, names=2)


def _format_hosts(pair: PairLink) -> str:
    return f"within host {pair.hosts[0]}" if pair.within_host else f"host {pair.hosts[0]} to {pair.hosts[1]}"


def _title(measured: AllReduceTimes) -> str:
    hosts = (
        f"within host {measured.hosts[0]}" if measured.within_host else f"over {plural(len(measured.hosts), 'host')}"
    )
    curve = sparkline([point.busbw_bytes_per_s for point in measured.points])
    return f"all-reduce on {plural(len(measured.ranks), 'rank')} {hosts}, busbw from small to large: {curve}"


def _all_reduce(measured: AllReduceTimes, width: int) -> Table:
    sizes = text_column("size", [binary_size(point.bytes) for point in measured.points])
    columns = [sizes, *terminal_columns(ALL_REDUCE_FIGURES, measured.points)]
    return figure_table(columns, width, name_side="right")


class LiveExamination(FolderFollower):
    """Progress display of an examination, which follows its events.

    Where the console is not a terminal, it prints one line per stage, or nothing if `quiet`.
    """

    def __init__(self, folder: Path, console: Console, *, quiet: bool = False) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        super().__init__(folder, progress)
        self._events = EventTail(folder / EVENTS_FILE)
        self._console = console
        self._quiet = quiet
        self._task = self._progress.add_task("starting ranks", total=None)

    def catch_up(self) -> None:
        for event in self._events.new_events(EXAMINATION_EVENTS):
            stage = STAGES.get(event.stage)
            if stage is None:
                continue
            self._progress.update(self._task, description=stage)
            if not self._console.is_terminal and not self._quiet:
                print_line(self._console, stage)
