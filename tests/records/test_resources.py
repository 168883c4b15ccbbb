"""Samples survive a round trip to disk; damage raises an error; records may have no samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RecordError
from paceline.records import RunFolder, read_run
from paceline.records.resources import read_marks, read_resources
from paceline.records.schema import MarkRow, ResourceRow
from paceline.records.summary import ClockDrift
from paceline.records.writer import MarkWriter, ResourceWriter
from records.rows import write_record
from run_models import summary

FULL = ResourceRow(0.5, 1.25, 400_000_000, 7, 0.0002, 10, 20, 0.75, 30, 40)
BARE = ResourceRow(1.0, 2.5, 400_000_001, 7, 0.0003, None, None, None, None, None)


def write_samples(folder: RunFolder, rank: int) -> None:
    writer = ResourceWriter(folder, rank)
    writer.write([FULL])
    writer.write([BARE])
    writer.close()
    marks = MarkWriter(folder, rank)
    marks.write([MarkRow("epoch", 1, 1, "0")])
    marks.close()


def test_samples_read_as_they_were_written(tmp_path: Path) -> None:
    folder = write_record(tmp_path)
    for rank in (0, 10):
        write_samples(folder, rank)
    record = read_run(tmp_path)
    assert list(record.resources) == [0, 10]
    for name, full, bare in zip(ResourceRow._fields, FULL, BARE, strict=True):
        expected = np.array([full, np.nan if bare is None else bare], dtype=float)
        np.testing.assert_allclose(record.resources[10][name], expected)
    assert record.marks == {0: [MarkRow("epoch", 1, 1, "0")], 10: [MarkRow("epoch", 1, 1, "0")]}
    assert record.resources is record.resources, "a file is read once"


def test_a_record_without_samples_has_none(tmp_path: Path) -> None:
    write_record(tmp_path)
    record = read_run(tmp_path)
    assert (record.resources, record.marks) == ({}, {})


def test_samples_truncated_at_any_byte_give_whole_rows_only(tmp_path: Path) -> None:
    write_samples(RunFolder(tmp_path), 0)
    file = tmp_path / "resources-0.csv"
    whole = file.read_bytes()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        assert len(read_resources(file)) == max(0, whole[:length].count(b"\n") - 1)


@pytest.mark.parametrize("damage", ["1,2\n", "x" + ",1" * 9 + "\n", "\0\n", "é\n"])
def test_a_damaged_line_is_an_error(tmp_path: Path, damage: str) -> None:
    write_samples(RunFolder(tmp_path), 0)
    for name, read in (("resources-0.csv", read_resources), ("marks-0.csv", read_marks)):
        file = tmp_path / name
        file.write_text(file.read_text() + damage, encoding="latin-1")
        with pytest.raises(RecordError, match=f"{name} is damaged"):
            read(file)


@pytest.mark.parametrize("damage", ["nan,1,1,1,1", "1,inf,1,1,1", "1,1,1,,1", "1e300,1,1,1,1", "1,1,1e200,1,1", ",,,,"])
def test_a_sample_without_valid_numbers_is_an_error(tmp_path: Path, damage: str) -> None:
    write_samples(RunFolder(tmp_path), 0)
    file = tmp_path / "resources-0.csv"
    file.write_text(file.read_text() + damage + "," * (len(ResourceRow._fields) - 5) + "\n")
    with pytest.raises(RecordError, match=r"resources-0.csv is damaged: a sample"):
        read_resources(file)


@pytest.mark.parametrize("times", ["nan,nan", "0,inf", "2,1", "1e300,1e300"])
def test_a_mark_without_valid_times_is_an_error(tmp_path: Path, times: str) -> None:
    write_samples(RunFolder(tmp_path), 0)
    file = tmp_path / "marks-0.csv"
    file.write_text(file.read_text() + f"gc,{times},x\n")
    with pytest.raises(RecordError, match=r"marks-0.csv is damaged: a mark"):
        read_marks(file)


def test_clock_drift_is_corrected(tmp_path: Path) -> None:
    folder = write_record(tmp_path)
    for rank in (0, 1):
        write_samples(folder, rank)
    folder.write_summary(summary(clock=ClockDrift(measured_at_s=10.0, drift_s=[0.0, 1.0])))
    record = read_run(tmp_path)
    assert record.resources[0]["time_s"].tolist() == [0.5, 1.0]
    assert record.resources[1]["time_s"].tolist() == pytest.approx([0.45, 0.9])
    assert record.resources[1]["cpu_s"].tolist() == [1.25, 2.5]
    assert record.marks == {0: [MarkRow("epoch", 1, 1, "0")], 1: [MarkRow("epoch", 0.9, 0.9, "0")]}


def test_missing_columns_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "resources-0.csv").write_text("time_s,cpu_s\n1,2\n")
    with pytest.raises(RecordError, match="the header line lacks columns"):
        read_resources(tmp_path / "resources-0.csv")


def test_records_of_older_versions_have_no_readings_of_gpus(tmp_path: Path) -> None:
    write_samples(RunFolder(tmp_path), 0)
    file = tmp_path / "resources-0.csv"
    older = [",".join(line.split(",")[:10]) for line in file.read_text().splitlines()]
    file.write_text("\n".join(older) + "\n")
    samples = read_resources(file)
    assert samples["host_available_bytes"][0] == FULL.host_available_bytes
    assert np.isnan(samples["gpu_busy"]).all()
