"""A damaged or malicious record of an experiment raises an error that names the bad value; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import write_experiment
from paceline.errors import RecordError
from paceline.records.experiment import read_experiment


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
    "escape", ["../other/repeat-1/1", "{absolute}", "repeat-1/../../other/repeat-1/1", "link/1", "."]
)
def test_a_run_outside_of_the_experiment_is_refused(tmp_path: Path, escape: str) -> None:
    other = write_experiment(tmp_path / "other")
    path = write_experiment(tmp_path / "e")
    (path / "link").symlink_to(other / "repeat-1")
    folder = escape.format(absolute=other / "repeat-1" / "1")
    with_event(path, event="run", candidate="ddp", repeat=7, folder=folder)
    with pytest.raises(RecordError, match="names a run outside the experiment"):
        read_experiment(path)


def test_an_experiment_may_be_reached_by_a_link(tmp_path: Path) -> None:
    write_experiment(tmp_path / "e", repeats=1)
    (tmp_path / "link").symlink_to(tmp_path / "e")
    assert len(read_experiment(tmp_path / "link").runs) == 4


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"event": "run", "candidate": "dpd", "repeat": 0, "folder": "x"}, "does not list the candidate 'dpd'"),
        ({"event": "run", "candidate": ["ddp"], "repeat": 0, "folder": "x"}, "candidate of an event 'run' is not text"),
        ({"event": "run", "candidate": "ddp", "folder": "x"}, "an event 'run' has no repeat"),
        (
            {"event": "run", "candidate": "ddp", "repeat": "0", "folder": "x"},
            "repeat of an event 'run' is not a whole number",
        ),
        ({"event": "run", "candidate": "ddp", "repeat": 0, "folder": None}, "folder of an event 'run' is not text"),
        ({"event": "failure", "candidate": "ddp"}, "an event 'failure' has no message"),
        ({"event": "failure", "candidate": "dpd", "message": "x"}, "does not list the candidate 'dpd'"),
        ({"event": "parity", "candidate": "ddp", "error": 0.0}, "has no lossless, ranks, steps, tolerance"),
        ({"event": "unproven"}, "has no reason"),
        ({"time_s": 0.0}, "does not name its event"),
        ({"event": ["run"]}, "does not name its event"),
    ],
)
def test_an_invalid_event_is_an_error(tmp_path: Path, event: dict[str, Any], message: str) -> None:
    path = write_experiment(tmp_path / "e")
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(RecordError, match=message):
        read_experiment(path)


def test_an_event_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    path = with_event(write_experiment(tmp_path / "e"), event="applause", candidate="audience")
    assert len(read_experiment(path).events_of("applause")) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "spectator"}, "'spectator' is not a role"),
        ({"role": ["candidate"]}, "is not a role"),
        ({"name": "ddp"}, "two candidates have the same name"),
        ({"name": 3}, "has a wrong type"),
        ({"settings": []}, "has a wrong type"),
        ({"lossless": "yes"}, "has a wrong type"),
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
    with pytest.raises(RecordError, match=rf"its {section} (is|are) not a"):
        read_experiment(path)


POINT = {"mode": "strong", "ranks": 4, "hosts": 2, "ranks_per_host": 2, "batch": 256, "batch_per_rank": 64}


def test_a_candidate_may_be_a_point_of_a_scaling_experiment(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=0)
    assert "point" not in json.loads((path / "experiment.json").read_text())["candidates"][0], (
        "only scaling experiments have points"
    )
    assert read_experiment(with_candidate(path, point=POINT)).candidates[0].point == POINT


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("4 ranks", "the point of a candidate is not a JSON object"),
        ({"ranks": 4}, "the point of a candidate has no batch, batch_per_rank, hosts, mode, ranks_per_host"),
        (POINT | {"mode": "stronger"}, "mode of the point of a candidate is not one of strong, weak, both"),
        (POINT | {"mode": ["strong"]}, "mode of the point of a candidate is not one of"),
        (POINT | {"ranks": True}, "ranks of the point of a candidate is not a whole number"),
        (POINT | {"batch_per_rank": 0}, "batch_per_rank of the point of a candidate is not a number above 0"),
        (POINT | {"hosts": 3}, "the ranks of a point are not hosts × ranks_per_host"),
        (POINT | {"batch": 3}, "or exceed its batch"),
    ],
)
def test_a_damaged_point_is_refused(tmp_path: Path, point: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_experiment(with_candidate(write_experiment(tmp_path / "e", repeats=0), point=point))
