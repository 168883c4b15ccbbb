"""Tests of the tables and sentences of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from paceline.records import RunDescription, RunFolder, RunRecord, read_run
from paceline.records.profile import Operator, Profile, write_profile
from paceline.report.figures.columns import page_columns
from paceline.report.figures.machine import OPERATOR_FIGURES
from paceline.report.tables.profile import profile_rows, profile_sentences
from paceline.report.terminal.profile import profile_table
from run_models import PROVENANCE, recorded_settings, topology

CONV = Operator("aten::convolution", 2, 0.006, 0.008, 0, 0)
ADD = Operator("[bold]aten::add[/]", 4, 0.003, 0.003, 0, 0)
REST = Operator("7 others", 9, 0.001, None, 0, None)
PROFILE = Profile(8, 9, 0.012, [CONV, ADD], REST)


def run_with(tmp_path: Path, profile: Profile | None, asked: str = "8-9") -> RunRecord:
    folder = RunFolder.create(tmp_path)
    config = recorded_settings(profile=asked)
    folder.write_run(RunDescription(config=config, topology=topology(), provenance=PROVENANCE))
    if profile is not None:
        write_profile(profile, folder, 1)
    return read_run(tmp_path)


def test_rows_have_their_share_of_all_operators(tmp_path: Path) -> None:
    rows = profile_rows(run_with(tmp_path, PROFILE))
    assert [row.share for row in rows] == [pytest.approx(share) for share in (0.6, 0.3, 0.1)]
    assert [row.self_device_s for row in rows] == [None] * 3
    assert rows[2].cpu_s is None
    assert [column.key for column in page_columns(OPERATOR_FIGURES, rows)] == [
        "calls",
        "share",
        "self_cpu_s",
        "cpu_s",
    ]
    assert [cell.text for cell in page_columns(OPERATOR_FIGURES, rows)[3].cells] == ["8.00", "3.00", "–"]


def test_on_a_gpu_shares_are_of_its_time(tmp_path: Path) -> None:
    operators = [replace(ADD, self_device_s=0.004, device_s=0.004), replace(CONV, self_device_s=0.001, device_s=0.002)]
    rows = profile_rows(run_with(tmp_path, replace(PROFILE, operators=operators)))
    assert [row.share for row in rows] == [0.8, 0.2, 0]
    assert "self_device_s" in [column.key for column in page_columns(OPERATOR_FIGURES, rows)]


def test_the_terminal_shows_names_without_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = profile_table(run_with(tmp_path, PROFILE), 120)
    assert table is not None
    Console(width=120).print(table)
    printed = capsys.readouterr().out
    assert "[bold]aten::add[/]" in printed
    assert "60.0%" in printed


def test_a_narrow_terminal_shortens_names_and_keeps_the_times(tmp_path: Path) -> None:
    long = replace(PROFILE, operators=[replace(CONV, name="aten::" + "x" * 80), ADD])
    table = profile_table(run_with(tmp_path, long), 80)
    assert table is not None
    assert [column.header for column in table.columns] == ["operator", "calls/step", "share", "self CPU", "total CPU"]
    assert Console(width=80).measure(table).minimum <= 80


def test_profiled_and_missing_steps_are_reported(tmp_path: Path) -> None:
    (sentence,) = profile_sentences(run_with(tmp_path / "all", PROFILE))
    assert "steps 8–9 of rank 1 ran under torch's profiler, 12.00 ms each, which no other figure counts" in sentence
    said = list(profile_sentences(run_with(tmp_path / "part", PROFILE, asked="8-12")))
    assert said[1] == "steps 10–12 could not be profiled: the run ended before that"
    assert list(profile_sentences(run_with(tmp_path / "none", None, asked="30"))) == [
        "step 30 could not be profiled: the run ended before that"
    ]
    assert list(profile_sentences(run_with(tmp_path / "old", None, asked=""))) == []
    assert profile_table(run_with(tmp_path / "empty", None), 120) is None
