"""Values of the wrong type in a record raise a one-sentence error, never a traceback: records may be untrusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments_on_disk import read_comparison, write_experiment
from paceline.errors import RecordError
from paceline.records import read_run
from paceline.records.reader import parse_json
from paceline.records.timeline import HEADER, ROW

RUN = "repeat-1/4"
SPLIT = {"step_s": 1.0, "compute_s": 0.5, "overlapped_s": 0, "exposed_s": 0.2, "other_s": 0.3, "data_s": 0.1}
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with timelines and complete summaries."""
    path = write_experiment(tmp_path_factory.mktemp("kinds") / "e", repeats=1, events=True)
    file = path / RUN / "summary.json"
    summary = json.loads(file.read_text())
    for rank in summary["ranks"]:
        rank["split"] = SPLIT | {"descheduled_s": None}
    file.write_text(json.dumps(summary | {"clock": {"measured_at_s": 2.0, "drift_s": [0.0, 1e-6]}}))
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of that experiment, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "e"))


def change(file: Path, *place: str | int, value: Any) -> None:
    """Replace one value of a JSON file."""
    content = inner = json.loads(file.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    file.write_text(json.dumps(content))


def test_the_undamaged_experiment_is_read(copied: Path) -> None:
    assert read_comparison(copied).row("ddp").split is not None


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("ranks",), ["a"], "ranks of the summary is not a list, each a JSON object"),
        (("ranks",), {}, "ranks of the summary is not a list"),
        (("ranks", 0, "rank"), "a", "rank of a rank is not a whole number"),
        (("ranks", 0, "peak_bytes"), "a", "peak_bytes of a rank is not a number or null"),
        (("ranks", 0, "split"), "a", "split of a rank is not a JSON object"),
        (("ranks", 0, "split"), None, "split of a rank is not a JSON object"),
        (
            ("ranks", 0, "split"),
            {},
            "a rank's split has no compute_s, data_s, exposed_s, other_s, overlapped_s, step_s",
        ),
        (("ranks", 0, "split", "step_s"), 0, "step_s of a rank's split is not a number above 0"),
        (("ranks", 0, "split", "step_s"), float("inf"), "Infinity is not a number"),
        (("ranks", 0, "split", "compute_s"), None, "compute_s of a rank's split is not a number"),
        (("clock",), "x", "clock of the summary is not a JSON object"),
        (("clock", "drift_s"), 5, "drift_s of its clock is not a list"),
        (("clock", "drift_s"), ["a", "b"], "drift_s of its clock is not a list, each a time"),
        (("clock", "drift_s"), [0.0, 1e308], "drift_s of its clock is not a list, each a time"),
        (("clock", "drift_s"), [0.0, 2.0], "the drift of a clock is not below the elapsed time"),
        (("clock", "measured_at_s"), "1", "measured_at_s of its clock is not a time"),
        (("clock", "measured_at_s"), 1e-300, "the drift of a clock is not below the elapsed time"),
        (("clock", "measured_at_s"), -1, "the drift of a clock is not below the elapsed time"),
        (("traffic", "sent_bytes"), ["a"], "sent_bytes of its traffic"),
        (("traffic", "links"), [[]], "links of its traffic is not a list, each a JSON object"),
        (("traffic", "links", 0, "framing_bytes"), -1, "framing_bytes of a link of its traffic is not a whole number"),
        (("traffic", "links", 0, "target"), 9, "a link of its traffic names a rank that the run did not have"),
        (("sockets",), [], "sockets of the summary is not a JSON object or null"),
        (("sockets",), {"steps": 1}, "its sockets has no interfaces, links"),
        (("sockets", "steps"), 0, "steps of its sockets is not a whole number, 1 or more"),
        (
            ("sockets", "links", 0),
            {"source": 0},
            "a link of its sockets has no received_bytes, retransmitted_bytes, sent_byt",
        ),
        (("sockets", "links", 0, "source"), 2, "a link of its sockets names a rank that the run did not have"),
        (("sockets", "links", 0, "received_bytes"), 1.5, "received_bytes of a link of its sockets is not a whole"),
        (("sockets", "interfaces", 0, "name"), 1, "name of an interface of its sockets is not text"),
        (("sockets", "interfaces", 0, "ranks"), ["a"], "ranks of an interface of its sockets is not a list"),
        (("test", "accuracy"), "good", "accuracy of its test is not a number"),
        (("average_loss",), [], "average_loss of the summary is not a number"),
    ],
)
def test_a_damaged_summary(copied: Path, place: tuple[str | int, ...], value: Any, message: str) -> None:
    change(copied / RUN / "summary.json", *place, value=value)
    with pytest.raises(RecordError, match=message):
        read_comparison(copied)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("topology", "threads"), "x", "threads of its topology is not a whole number"),
        (("topology", "cores"), "x", "cores of its topology is not a number above 0"),
        (("topology", "cores"), 0, "cores of its topology is not a number above 0"),
        (("topology", "ranks_per_host"), "x", "ranks_per_host of its topology"),
        (("topology", "gradient_bytes"), "x", "gradient_bytes of its topology"),
        (("topology", "workers"), 0, "workers of its topology"),
        (("topology", "world_size"), True, "world_size of its topology"),
        (("config", "strategy"), ["ddp"], "strategy of its config is not text"),
        (("config", "seed"), "x", "seed of its config"),
        (("provenance", "versions"), "2", "versions of its provenance"),
        (("provenance", "host"), [], "host of its provenance"),
    ],
)
def test_a_damaged_run(copied: Path, place: tuple[str, ...], value: Any, message: str) -> None:
    change(copied / RUN / "run.json", *place, value=value)
    with pytest.raises(RecordError, match=message):
        read_run(copied / RUN)


@pytest.mark.parametrize("name", ["workers", "device", "exchanges", "batch", "lossless", "threads"])
def test_values_that_a_comparison_needs_must_exist(copied: Path, name: str) -> None:
    file = copied / RUN / "run.json"
    content = json.loads(file.read_text())
    del content["topology"][name]
    file.write_text(json.dumps(content))
    read_run(copied / RUN)
    with pytest.raises(RecordError, match=rf"run\.json is damaged: its topology has no {name}\."):
        read_comparison(copied)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"losses": ["a"], "wall_s": 1, "samples": 1}, "losses of an event 'log'"),
        ({"losses": [], "wall_s": 1, "samples": 1}, "an event 'log' has no losses"),
        ({"losses": [1], "wall_s": 1, "samples": "a"}, "samples of an event 'log'"),
        ({"losses": [1], "wall_s": 1}, "an event 'log' has no samples"),
    ],
)
def test_a_damaged_window(copied: Path, event: dict[str, Any], message: str) -> None:
    with (copied / RUN / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "log"} | event) + "\n")
    with pytest.raises(RecordError, match=message):
        read_comparison(copied)


def rows_with(name: str, value: float) -> Callable[[Path], None]:
    """Return a function that sets one field of all rows of a timeline."""

    def damage(file: Path) -> None:
        rows = np.frombuffer(file.read_bytes()[len(HEADER) :], dtype=ROW).copy()
        rows[name] = value
        file.write_bytes(HEADER + rows.tobytes())

    return damage


def as_folder(file: Path) -> None:
    """Replace a file by a folder."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rows_with("peer", 500), "names a rank that the run did not have"),
        (rows_with("peer", 2), "names a rank that the run did not have"),
        (rows_with("peer", -9), "names a rank that the run did not have"),
        (rows_with("wait_start_s", np.inf), "a time that is out of range"),
        (rows_with("cpu_s", -np.inf), "a time that is out of range"),
        (rows_with("end_s", 1e308), "does not end after it starts"),
        (as_folder, r"timeline-1\.bin cannot be read: Is a directory"),
        (
            lambda file: shutil.copy(file, file.with_name("timeline-7.bin")),
            "belongs to a rank that the run did not have",
        ),
    ],
)
def test_a_damaged_timeline(copied: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copied / RUN / "timeline-1.bin")
    with pytest.raises(RecordError, match=message):
        _ = read_run(copied / RUN).timelines


@pytest.mark.parametrize("name", ["summary.json", "run.json", "events.jsonl"])
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, '{"event": "x", "a": ' + "[" * 200 + "]" * 200 + "}"])
def test_json_that_is_nested_too_deeply(copied: Path, name: str, text: str) -> None:
    (copied / RUN / name).write_text(text + "\n")
    with pytest.raises(RecordError, match="nested too deeply"):
        read_run(copied / RUN)


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e400", "9" * 400, "9" * 5000, r'"\ud800"', '"', "[" * 60])
def test_invalid_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_valid_json() -> None:
    assert parse_json(r'{"a": [1, 2.5, null, "\ud83d\ude00 é"], "b": 1e300}') == {
        "a": [1, 2.5, None, "😀 é"],
        "b": 1e300,
    }


@pytest.mark.parametrize("cells", ["nan," * 8 + "1,1", "1,1,inf,1,1,1,1,1,1,1"])
def test_a_step_without_valid_numbers(copied: Path, cells: str) -> None:
    with (copied / RUN / "rank-0.csv").open("a") as file:
        file.write(cells + "\n")
    with pytest.raises(RecordError, match="a step has a value that is missing or out of range"):
        read_run(copied / RUN)
