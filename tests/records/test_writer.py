"""Records are written completely, never overwrite others, and stay readable if the process is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.errors import RecordError
from paceline.records import EventWriter, RunDescription, RunFolder, StepRow, StepWriter, read_run
from paceline.records.events import EXPERIMENT_EVENTS, RUN_EVENTS, EndEvent, LogEvent, UnprovenEvent, read_events
from paceline.records.reader import read_steps
from paceline.records.schema import CSV_HEADER
from records.rows import ROWS, write_record
from run_models import PROVENANCE, rank_summary, recorded_settings, summary, topology

KILLS = 6

WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from paceline.records import EventWriter, RunFolder, StepRow, StepWriter
from paceline.records.events import LogEvent

folder = RunFolder(Path(sys.argv[1]))
steps, events = StepWriter(folder, 0), EventWriter(folder)
print("ready", flush=True)
for first in itertools.count(0, 50):
    rows = [StepRow(step, step // 100, 7, step / 8, 0.25, 0.5, 0.75, 1.0, 2.5, 3) for step in range(first, first + 50)]
    steps.write(rows)
    losses = [step / 7 for step in range(first, first + 50)]
    events.write(LogEvent(epoch=0, step=first, wall_s=0.5, losses=losses, samples=350, correct=None))
"""


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b")
    assert folder.log_file(3).parent.is_dir()
    assert folder.error_file(3).parent.is_dir()
    assert folder.log_file(3) != folder.log_file(4)
    assert folder.error_file(3) != folder.error_file(4)


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    write_record(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RecordError, match="already contains a record") as caught:
        RunFolder.create(tmp_path)
    assert "--out" in (caught.value.hint or "")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    RunFolder.create(tmp_path)
    assert RunFolder.create(tmp_path).path == tmp_path


def test_a_file_in_the_way_is_a_record_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecordError, match="cannot write to"):
        RunFolder.create(tmp_path / "file" / "run")


def test_a_row_is_one_line_below_the_header(tmp_path: Path) -> None:
    writer = StepWriter(RunFolder.create(tmp_path), 5)
    file = tmp_path / "rank-5.csv"
    assert file.read_text() == CSV_HEADER
    writer.write(ROWS[:2])
    assert file.read_text() == (
        "step,epoch,samples,start_s,data_s,forward_s,backward_s,update_s,loss,correct\n"
        "0,0,22,0.001000,0.000500,0.010000,0.020000,0.003000,2.30258509,3\n"
        "1,0,21,0.035000,0.000400,0.011000,0.021000,0.004000,2.25,5\n"
    )
    writer.close()


def test_a_row_knows_its_total() -> None:
    assert StepRow(0, 0, 1, 100.0, 1.0, 2.0, 4.0, 8.0, 0.5, 0).total_s == 15.0


def test_each_event_has_a_time_and_takes_one_line(tmp_path: Path) -> None:
    writer = EventWriter(RunFolder.create(tmp_path))
    reason = 'two\nlines, é "quoted" and \u2028'
    writer.write(UnprovenEvent(reason=reason))
    time.sleep(0.01)
    writer.write(EndEvent())
    lines = (tmp_path / "events.jsonl").read_text().split("\n")[:-1]
    first, second = (json.loads(line) for line in lines)
    assert (first["event"], first["reason"], second["event"]) == ("unproven", reason, "end")
    assert [event.time_s for event in read_events(tmp_path / "events.jsonl", EXPERIMENT_EVENTS)] == [
        first["time_s"],
        second["time_s"],
    ]
    assert second["time_s"] - first["time_s"] >= 0.01
    writer.close()


def test_whole_files_leave_nothing_else_behind(tmp_path: Path) -> None:
    write_record(tmp_path)
    files = {file.name for file in tmp_path.iterdir() if file.is_file()}
    assert files == {"run.json", "events.jsonl", "summary.json", "finished", "rank-0.csv", "rank-1.csv"}


def test_a_whole_file_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        folder.write_summary(summary())
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_kill_at_any_time_leaves_consecutive_rows(tmp_path: Path, attempt: int) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_run(RunDescription(config=recorded_settings(), topology=topology(), provenance=PROVENANCE))
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    while (
        attempt and (tmp_path / "rank-0.csv").stat().st_size < 10_000
    ):  # The first attempt is killed right at the start.
        time.sleep(0.001)
    time.sleep(random.Random(os.urandom(8)).uniform(0.0, 0.05))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    record = read_run(tmp_path)
    assert not record.finished
    assert record.summary is None
    steps = record.steps[0]["step"].tolist()
    assert steps == list(range(len(steps)))
    assert [event.step for event in record.events_of(LogEvent)] == list(range(0, 50 * len(record.events), 50))
    # Rows flushed before an event was written survive the kill.
    assert len(steps) >= 50 * len(record.events)
    assert attempt == 0 or steps


def test_rows_are_readable_before_the_file_is_closed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    steps, events = StepWriter(folder, 0), EventWriter(folder)
    steps.write(ROWS)
    events.write(EndEvent())
    assert len(read_steps(tmp_path / "rank-0.csv")) == len(ROWS)
    assert len(read_events(tmp_path / "events.jsonl", RUN_EVENTS)) == 1
    steps.close()
    events.close()


def test_non_finite_numbers_are_null_in_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    ranks = [rank_summary(0, average_loss=float("inf")), rank_summary(1, average_loss=1.5)]
    folder.write_summary(summary(average_loss=float("nan"), ranks=ranks))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    content = json.loads((folder.path / "summary.json").read_text(), parse_constant=refuse)
    assert content["average_loss"] is None
    assert [rank["average_loss"] for rank in content["ranks"]] == [None, 1.5]


def test_figures_of_a_strategy_may_have_types_of_numpy(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_summary(summary(metrics={"ratio": np.float32(0.5), "rounds": np.int64(3), "share": np.array(0.75)}))
    assert json.loads((folder.path / "summary.json").read_text())["metrics"] == {
        "ratio": 0.5,
        "rounds": 3,
        "share": 0.75,
    }
    with pytest.raises(TypeError, match="object cannot be written to a record"):
        folder.write_summary(summary(metrics={"what": object()}))


def test_text_that_is_not_unicode_stays_readable(tmp_path: Path) -> None:
    """Arguments and paths may have any bytes, which Python shows as lone surrogates."""
    about = msgspec.structs.replace(PROVENANCE, command="paceline train --out a\udc80b")
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run(RunDescription(config=recorded_settings(), topology=topology(), provenance=about))
    assert read_run(folder.path).provenance.command == "paceline train --out a?b"


def test_values_that_are_not_set_are_left_out_where_older_readers_do_not_expect_null(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_summary(summary())
    content = json.loads((folder.path / "summary.json").read_text())
    assert content["sockets"] is None
    assert "split" not in content["ranks"][0]
