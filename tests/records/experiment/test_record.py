"""A damaged or malicious record of an experiment raises an error that names the bad value; never a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import write_experiment
from paceline.errors import RecordError
from paceline.records.experiment.design import CandidatePoint
from paceline.records.experiment.record import read_experiment


def with_event(path: Path, **event: Any) -> Path:
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    return path


def with_candidate(path: Path, **changes: Any) -> Path:
    file = path / "experiment.json"
    content = json.loads(file.read_text())
    content["candidates"][0] |= changes
    file.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "escape",
    ["../other/repeat-1/1", "{absolute}", "repeat-1/../../other/repeat-1/1", "link/1", ".", "loop/1", "null\0byte"],
)
def test_a_run_outside_of_the_experiment_is_refused(tmp_path: Path, escape: str) -> None:
    other = write_experiment(tmp_path / "other")
    path = write_experiment(tmp_path / "e")
    (path / "link").symlink_to(other / "repeat-1")
    (path / "loop").symlink_to("loop")
    folder = escape.format(absolute=other / "repeat-1" / "1")
    runs = len(read_experiment(path).runs)
    record = read_experiment(with_event(path, event="run", candidate="ddp", repeat=7, folder=folder))
    (warning,) = record.read_warnings
    assert warning.startswith(f"{path / 'events.jsonl'} names a run outside the experiment: {folder!r}.")
    assert len(record.runs) == runs


def test_an_experiment_may_be_reached_by_a_link(tmp_path: Path) -> None:
    write_experiment(tmp_path / "e", repeats=1)
    (tmp_path / "link").symlink_to(tmp_path / "e")
    assert len(read_experiment(tmp_path / "link").runs) == 4


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"event": "run", "candidate": "dpd", "repeat": 0, "folder": "x"}, "does not list the candidate 'dpd'"),
        (
            {"event": "run", "candidate": ["ddp"], "repeat": 0, "folder": "x"},
            "run.candidate is a list, not text",
        ),
        ({"event": "run", "candidate": "ddp", "folder": "x"}, "run has no repeat"),
        (
            {"event": "run", "candidate": "ddp", "repeat": "0", "folder": "x"},
            "run.repeat is text, not a whole number",
        ),
        ({"event": "run", "candidate": "ddp", "repeat": 0, "folder": None}, "run.folder is null, not text"),
        ({"event": "failure", "candidate": "ddp", "stage": "proof", "kind": "x"}, "failure has no message"),
        (
            {"event": "failure", "candidate": "dpd", "stage": "x", "kind": "x", "message": "x", "hint": None},
            "does not list the candidate 'dpd'",
        ),
        ({"event": "parity", "candidate": "ddp", "error": 0.0}, "parity has no strategy"),
        ({"event": "unproven"}, "has no reason"),
        ({"time_s": 0.0}, r"line \d+ has no event"),
        ({"event": ["run"]}, r"line \d+.event is a list, not text"),
    ],
)
def test_an_invalid_event_is_named_and_omitted(tmp_path: Path, event: dict[str, Any], message: str) -> None:
    path = write_experiment(tmp_path / "e")
    whole = read_experiment(path)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    found = read_experiment(path)
    (warning,) = found.read_warnings
    assert re.search(message, warning)
    assert warning.endswith("The report omits what is damaged.")
    assert (found.events, len(found.runs)) == (whole.events, len(whole.runs))


def test_an_event_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    events = read_experiment(path).events
    assert read_experiment(with_event(path, event="applause", candidate="audience")).events == events


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "spectator"}, r"experiment\.candidates\[0\]\.role is 'spectator', which is unknown"),
        ({"role": ["candidate"]}, "role is a list, not text"),
        ({"name": "ddp"}, "two of experiment.candidates have the same name"),
        ({"name": 3}, r"candidates\[0\]\.name is a whole number, not text"),
        ({"settings": []}, r"candidates\[0\]\.settings is a list, not a JSON object"),
        ({"lossless": "yes"}, "lossless is text, not true or false"),
        ({"settings": {"batch": "x"}}, r"settings\.batch is text, not a whole number or null"),
        ({"settings": {"new": {"deep": 1}}}, r"settings\.new is a JSON object, not "),
    ],
)
def test_an_invalid_candidate_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_experiment(with_candidate(write_experiment(tmp_path / "e"), **changes))


@pytest.mark.parametrize("section", ["candidates", "config", "design", "provenance"])
def test_a_section_of_another_kind_is_an_error(tmp_path: Path, section: str) -> None:
    path = write_experiment(tmp_path / "e")
    file = path / "experiment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {section: "text"}))
    with pytest.raises(RecordError, match=rf"experiment.{section} is text, not a "):
        read_experiment(path)


POINT: dict[str, Any] = {
    "mode": "strong",
    "ranks": 4,
    "hosts": 2,
    "ranks_per_host": 2,
    "batch": 256,
    "batch_per_rank": 64,
}


def test_a_candidate_may_be_a_point_of_a_scaling_experiment(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=0)
    assert read_experiment(path).candidates[0].point is None, "only scaling experiments have points"
    assert read_experiment(with_candidate(path, point=POINT)).candidates[0].point == CandidatePoint(**POINT)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("4 ranks", r"candidates\[0\]\.point is text, not a JSON object or null"),
        ({"ranks": 4}, "point has no mode"),
        (POINT | {"mode": "stronger"}, "point.mode is 'stronger', which is unknown"),
        (POINT | {"mode": ["strong"]}, "point.mode is a list, not text"),
        (POINT | {"ranks": True}, "point.ranks is true or false, not a whole number"),
        (POINT | {"batch_per_rank": 0}, "point.batch_per_rank is not a "),
        (POINT | {"hosts": 3}, "point has ranks that are not hosts × ranks_per_host"),
        (POINT | {"batch": 3}, "or exceed its batch"),
    ],
)
def test_a_damaged_point_is_refused(tmp_path: Path, point: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_experiment(with_candidate(write_experiment(tmp_path / "e", repeats=0), point=point))
