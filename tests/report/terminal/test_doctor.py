"""Tests of the doctor's terminal output, its progress display, and the plot of the link."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examinations import examination, on_two_hosts, rank_info
from experiments_on_disk import read_comparison, write_experiment
from paceline.analysis.findings import findings
from paceline.records.examination import Examination, write_examination
from paceline.report.plots.link import link
from paceline.report.terminal.doctor import LiveExamination, finding_rows, print_examination, sparkline, verdict


def printed(found: Examination, width: int = 150) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_examination(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_findings_are_printed() -> None:
    text = " ".join(printed(on_two_hosts()).split())
    for finding in findings(on_two_hosts()):
        assert finding.message.split(":")[0] in text
    assert "host 0 to 1 0 ↔ 2 200 µs 1.00 ns/B 1.00 GB/s" in text
    assert "all-reduce on 4 ranks over 2 hosts" in text
    assert "all-reduce on 2 ranks within host 1" in text
    assert "64 MiB" in text
    assert "No problems found." in text


def test_a_fix_follows_its_finding_and_markup_is_only_text() -> None:
    text = printed(examination(rank_info(0), rank_info(1, bind_error="[bold]denied[/bold]")))
    lines = [line.strip() for line in text.splitlines()]
    place = next(index for index, line in enumerate(lines) if "[bold]denied[/bold]" in line)
    assert lines[place].startswith("problem  ports")
    assert lines[place + 1].startswith("fix: allow this user")
    assert "1 problem to fix." in text


def test_a_narrow_screen_folds_lines() -> None:
    assert max(map(len, printed(on_two_hosts(), width=60).splitlines())) <= 100


def test_rows_have_problems_first() -> None:
    ranks = [rank_info(rank, host_name_addresses=["127.0.1.1"]) for rank in range(4)]
    rows = finding_rows(examination(*ranks, workload=None))
    levels = [row.level for row in rows]
    assert levels == sorted(levels, key=["problem", "note", "ok"].index)
    assert rows[0].topic == "cores"
    assert rows[0].fix
    assert len(rows) == len(findings(examination(*ranks, workload=None)))


def test_the_verdict_counts() -> None:
    assert verdict(findings(examination())) == "No problems found."
    ranks = [rank_info(rank, host_name_addresses=["127.0.1.1"]) for rank in range(4)]
    assert verdict(findings(examination(*ranks, workload=None))) == "1 problem to fix, 1 note."


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 4, 8]) == "▁▂▃▅█"
    assert sparkline([3.0]) == "█"


class Events:
    """Writer of a rank's events."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "events.jsonl"

    def stage(self, name: str) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"event": "stage", "time_s": 0.0, "stage": name}) + "\n")


def test_progress_is_a_line_per_stage_where_there_is_no_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    assert isinstance(console.file, io.StringIO)
    events = Events(tmp_path)
    with LiveExamination(tmp_path, console):
        events.stage("machines")
        deadline_s = time.monotonic() + 60
        while not console.file.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert console.file.getvalue(), "printed while the examination runs"
        events.stage("workload")
    assert console.file.getvalue().splitlines() == [
        "collecting facts about every rank's machine",
        "training a few steps of the workload",
    ]


def test_progress_can_be_quiet(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    with LiveExamination(tmp_path, console, quiet=True):
        Events(tmp_path).stage("link")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def drawn(tmp_path: Path, found: Examination) -> Any:
    path = write_experiment(tmp_path / "e", repeats=1)
    write_examination(path, found)
    return link(read_comparison(path))


def test_the_figure_has_busbw_over_size_and_the_link_as_a_line(tmp_path: Path) -> None:
    found = examination()
    assert found.link is not None
    figure = drawn(tmp_path, found)
    (curve,) = figure["data"]
    points = found.link.all_reduces[0].points
    assert curve["x"] == [point.bytes for point in points]
    assert curve["y"] == pytest.approx([point.busbw_bytes_per_s / 1e6 for point in points], rel=1e-4)
    assert figure["layout"]["yaxis"]["title"]["text"] == "busbw, MB/s"
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert figure["layout"]["xaxis"]["ticktext"] == ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"]
    (line,) = figure["layout"]["shapes"]
    assert line["y0"] == line["y1"] == pytest.approx(2000)
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < math.log10(1024) < math.log10(64 << 20) < high
    assert figure["layout"]["yaxis"]["range"][1] > 2000
    json.dumps(figure, allow_nan=False)


def test_links_within_and_between_hosts_have_separate_curves(tmp_path: Path) -> None:
    figure = drawn(tmp_path, on_two_hosts())
    assert [curve["meta"] for curve in figure["data"]] == ["all-reduce, 4 ranks", "within a host", "one rank per host"]
    assert len({curve["line"]["color"] for curve in figure["data"]}) == 3
    texts = [note["text"] for note in figure["layout"]["annotations"]]
    assert texts == ["point to point", "point to point between hosts"]
    assert figure["layout"]["showlegend"]


def test_without_a_link_there_is_no_figure(tmp_path: Path) -> None:
    assert drawn(tmp_path, examination(link=None)) is None
    assert link(read_comparison(write_experiment(tmp_path / "other", repeats=1))) is None
