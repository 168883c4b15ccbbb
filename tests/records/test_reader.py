"""Reading returns what was written, all complete lines after a kill, and an error for any other damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.records import SCHEMA_VERSION, StepRow, Steps, StepWriter, read_run
from paceline.records.events import RUN_EVENTS, EndEvent, LogEvent, StartEvent, read_events
from paceline.records.reader import read_steps
from records.rows import ROWS, write_record
from run_models import PROVENANCE, recorded_settings, summary, topology

SECONDS = st.floats(0, 1e5).map(lambda value: round(value, 6))
ANY_ROW = st.builds(
    StepRow,
    *[st.integers(0, 10**6)] * 3,
    *[SECONDS] * 5,
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.integers(-1, 10**6),
)


def rows_of(steps: Steps) -> list[tuple[float, ...]]:
    return [tuple(steps[name][index] for name in StepRow._fields) for index in range(len(steps))]


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path)
    record = read_run(tmp_path)
    assert record.config == recorded_settings(batch=64)
    assert (record.topology, record.provenance) == (topology(world_size=11), PROVENANCE)
    assert record.steps.keys() == {0, 1}
    assert rows_of(record.steps[1])[:2] == [pytest.approx(tuple(row)) for row in ROWS[:2]]
    assert np.isnan(record.steps[1]["loss"][2])
    assert [type(event) for event in record.events] == [StartEvent, LogEvent, EndEvent]
    assert record.events_of(LogEvent) == [record.events[1]]
    assert record.events_of(LogEvent)[0].losses == [1.5, 2.5]
    assert record.summary == summary(steps=3)
    assert record.finished


def test_an_unfinished_record_says_so(tmp_path: Path) -> None:
    write_record(tmp_path, finished=False)
    record = read_run(tmp_path)
    assert record.summary is None
    assert not record.finished


def test_ranks_are_sorted_as_numbers(tmp_path: Path) -> None:
    folder = write_record(tmp_path)
    StepWriter(folder, 10).close()
    assert sorted(read_run(tmp_path).steps) == [0, 1, 10]
    assert len(read_run(tmp_path).steps[10]) == 0


def test_a_steps_total_is_the_sum_of_its_phases(tmp_path: Path) -> None:
    write_record(tmp_path)
    np.testing.assert_allclose(read_run(tmp_path).steps[0].total_s, [row.total_s for row in ROWS])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ANY_ROW, max_size=6))
def test_rows_survive_a_round_trip(tmp_path: Path, rows: list[StepRow]) -> None:
    file = tmp_path / "rank-0.csv"
    file.write_text(",".join(StepRow._fields) + "\n" + "".join(row.to_csv() for row in rows))
    read = rows_of(read_steps(file))
    np.testing.assert_allclose(np.array(read).reshape(-1, 10), np.array(rows, dtype=float).reshape(-1, 10), rtol=1e-8)


def test_steps_truncated_at_any_byte_give_whole_rows_only(tmp_path: Path) -> None:
    write_record(tmp_path)
    whole = (tmp_path / "rank-0.csv").read_bytes()
    file = tmp_path / "rank-1.csv"
    complete = [tuple(map(float, line.split(","))) for line in whole.decode().splitlines()[1:]]
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        rows = rows_of(read_run(tmp_path).steps[1])
        expected = max(0, whole[:length].count(b"\n") - 1)
        assert len(rows) == expected, length
        np.testing.assert_equal(rows, complete[:expected])


def test_events_truncated_at_any_byte_give_whole_events_only(tmp_path: Path) -> None:
    write_record(tmp_path)
    file = tmp_path / "events.jsonl"
    whole, complete = file.read_bytes(), read_events(file, RUN_EVENTS)
    assert len(complete) == 3
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        assert read_run(tmp_path).events == complete[: whole[:length].count(b"\n")], length


def test_the_event_file_may_not_exist_yet(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl", RUN_EVENTS) == []


@pytest.mark.parametrize(
    "damage", ["1,0,21\n", "1,0,x,0,0,0,0,0,0,0\n", "\n", "1,0,21,0,0,0,0,0,0,0,9\n", "\0\0\0\n", "é\n"]
)
def test_a_damaged_line_among_the_steps_is_an_error(tmp_path: Path, damage: str) -> None:
    write_record(tmp_path)
    file = tmp_path / "rank-1.csv"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], damage, *lines[3:]]), encoding="latin-1")
    with pytest.raises(RecordError, match=r"rank-1.csv is damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize("damage", [b"{\n", b'{"event": "lo\n', b"\n", b"\xff\xff\n", b"\0\0\0\n"])
def test_a_damaged_line_among_the_events_is_an_error(tmp_path: Path, damage: bytes) -> None:
    write_record(tmp_path)
    file = tmp_path / "events.jsonl"
    first, _, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + damage + last)
    with pytest.raises(RecordError, match=r"events.jsonl is damaged"):
        read_run(tmp_path)


def test_another_schema_is_an_error_that_names_both(tmp_path: Path) -> None:
    write_record(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 987}))
    with pytest.raises(
        RecordError, match=rf"has record schema 987; this version of Paceline reads only schema {SCHEMA_VERSION}\."
    ):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{", "run.json cannot be read"),
        ("run.json", "[]", "run.json is damaged: run is a list, not a JSON object"),
        ("summary.json", "", "summary.json cannot be read"),
    ],
)
def test_damage_to_a_whole_file_is_an_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    write_record(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordError, match=message):
        read_run(tmp_path)


def test_a_folder_without_a_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"contains no record: run.json is missing"):
        read_run(tmp_path)


READ_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # Makes an import of torch raise.
from pathlib import Path
from paceline.analysis.summary import summarise
from paceline.records import read_run
from paceline.report.terminal.run import print_run
from rich.console import Console
record = read_run(Path(sys.argv[1]))
print_run(record, Console())
print(len(record.steps[1]), summarise(record).steps)
"""


def test_records_are_read_and_shown_without_torch(tmp_path: Path) -> None:
    write_record(tmp_path, finished=False)
    done = subprocess.run(
        [sys.executable, "-c", READ_WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 3"
