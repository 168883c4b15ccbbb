"""A value that does not fit raises a one-sentence error that names its place, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments_on_disk import read_comparison, write_experiment
from paceline.errors import RecordError
from paceline.records import read_run
from paceline.records.decoder import decode, describe
from paceline.records.timeline import HEADER, ROW

pytestmark = pytest.mark.takes(6)

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
        (("ranks",), ["a"], r"summary\.ranks\[0\] is text, not a JSON object"),
        (("ranks",), {}, r"summary\.ranks is a JSON object, not a list"),
        (("ranks", 0, "rank"), "a", r"summary\.ranks\[0\]\.rank is text, not a whole number"),
        (("ranks", 1), {"rank": 1}, r"summary\.ranks\[1\] has no steps"),
        (("ranks", 1, "samples"), None, r"summary\.ranks\[1\]\.samples is null, not a whole number"),
        (("ranks", 1, "step_s"), "soon", r"summary\.ranks\[1\]\.step_s is text, not a number or null"),
        (("ranks", 0, "peak_bytes"), "a", r"summary\.ranks\[0\]\.peak_bytes is text, not a whole number or null"),
        (("ranks", 0, "peak_bytes"), 10**400, r"ranks\[0\]\.peak_bytes is not a whole number, 9.22337e\+18 or less"),
        (("ranks", 0, "split"), "a", r"summary\.ranks\[0\]\.split is text, not a JSON object or null"),
        (("ranks", 0, "split"), {}, r"summary\.ranks\[0\]\.split has no step_s"),
        (("ranks", 0, "split", "step_s"), 0, r"summary\.ranks\[0\]\.split\.step_s is not a number above 0"),
        (("ranks", 0, "split", "step_s"), float("inf"), r"cannot be read: it is not valid JSON: invalid character"),
        (("ranks", 0, "split", "compute_s"), None, r"summary\.ranks\[0\]\.split\.compute_s is null, not a number"),
        (("ranks", 0, "split", "compute_s"), 10**400, r"summary\.ranks\[0\]\.split\.compute_s is too large"),
        (("train_s",), 1e9, r"summary\.train_s is not a number below 1e\+09"),
        (("clock",), "x", r"summary\.clock is text, not a JSON object or null"),
        (("clock", "drift_s"), 5, r"summary\.clock\.drift_s is a whole number, not a list"),
        (("clock", "drift_s"), ["a", "b"], r"summary\.clock\.drift_s\[0\] is text, not a number"),
        (("clock", "drift_s"), [0.0, 1e308], r"summary\.clock\.drift_s\[1\] is not a number below 1e\+09"),
        (("clock", "drift_s"), [0.0, 2.0], r"summary\.clock\.drift_s\[1\] is not below the elapsed time"),
        (("clock", "measured_at_s"), "1", r"summary\.clock\.measured_at_s is text, not a number"),
        (("clock", "measured_at_s"), 1e-300, r"summary\.clock\.drift_s\[1\] is not below the elapsed time"),
        (("clock", "measured_at_s"), -1, r"summary\.clock\.measured_at_s is not a time, 0 or more"),
        (("traffic", "sent_bytes"), ["a"], r"summary\.traffic\.sent_bytes\[0\] is text"),
        (("traffic", "links"), [[]], r"summary\.traffic\.links\[0\] is a list, not a JSON object"),
        (("traffic", "links", 0, "framing_bytes"), -1, r"links\[0\]\.framing_bytes is not a whole number, 0 or more"),
        (("traffic", "links", 0, "target"), 9, r"summary\.traffic\.links\[0\] names a rank that the run did not have"),
        (("sockets",), [], r"summary\.sockets is a list, not a JSON object or null"),
        (("sockets",), {"steps": 1}, r"summary\.sockets has no links"),
        (("sockets", "steps"), 0, r"summary\.sockets\.steps is not a whole number, 1 or more"),
        (("sockets", "links", 0), {"source": 0}, r"summary\.sockets\.links\[0\] has no target"),
        (("sockets", "links", 0, "source"), 2, r"summary\.sockets\.links\[0\] names a rank that the run did not have"),
        (("sockets", "links", 0, "received_bytes"), 1.5, r"received_bytes is a number, not a whole number"),
        (
            ("sockets", "interfaces", 0, "name"),
            1,
            r"sockets\.interfaces\[0\]\.name is a whole number, not text",
        ),
        (("sockets", "interfaces", 0, "ranks"), ["a"], r"sockets\.interfaces\[0\]\.ranks\[0\] is text"),
        (("test", "accuracy"), "good", r"summary\.test\.accuracy is text, not a number or null"),
        (("test",), 0.5, r"summary\.test is a number, not a JSON object or null"),
        (("test_by_rank",), [{"loss": 1}], r"summary\.test_by_rank\[0\] has no accuracy"),
        (("estimate",), {"epochs": 2}, r"summary\.estimate has no seconds"),
        (("staleness",), {}, r"summary\.staleness has no gradients"),
        (("average_loss",), [], r"summary\.average_loss is a list, not a number or null"),
        (("metrics",), {"a": json.loads("[" * 60 + "]" * 60)}, r"summary\.metrics is nested too deeply"),
    ],
)
def test_a_damaged_summary(copied: Path, place: tuple[str | int, ...], value: Any, message: str) -> None:
    change(copied / RUN / "summary.json", *place, value=value)
    with pytest.raises(RecordError, match=message):
        read_run(copied / RUN)
    assert not read_comparison(copied).row("ddp").repeats, "the other runs are compared"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("topology", "threads"), "x", r"run\.topology\.threads is text, not a whole number"),
        (("topology", "cores"), "x", r"run\.topology\.cores is text, not a number"),
        (("topology", "cores"), 0, r"run\.topology\.cores is not a number above 0"),
        (("topology", "ranks_per_host"), "x", r"run\.topology\.ranks_per_host"),
        (("topology", "gradient_bytes"), "x", r"run\.topology\.gradient_bytes"),
        (("topology", "workers"), 0, r"run\.topology\.workers is not a whole number, 1 or more"),
        (("topology", "world_size"), True, r"run\.topology\.world_size is true or false, not a whole number"),
        (("topology",), [], r"run\.topology is a list, not a JSON object"),
        (("config", "strategy"), ["ddp"], r"run\.config\.strategy is a list, not text"),
        (("config", "seed"), "x", r"run\.config\.seed is text, not a whole number"),
        (("config", "bn"), "global", r"run\.config\.bn is 'global', which is unknown"),
        (("config", "later"), {"a": 1}, r"run\.config\.later is a JSON object, not "),
        (("provenance", "versions"), "2", r"run\.provenance\.versions is text, not a JSON object"),
        (("provenance", "host"), [], r"run\.provenance\.host is a list, not text or null"),
    ],
)
def test_a_damaged_run(copied: Path, place: tuple[str, ...], value: Any, message: str) -> None:
    change(copied / RUN / "run.json", *place, value=value)
    with pytest.raises(RecordError, match=message):
        read_run(copied / RUN)


@pytest.mark.parametrize("name", ["workers", "device", "exchanges", "batch", "lossless", "threads"])
def test_values_without_a_default_must_exist(copied: Path, name: str) -> None:
    file = copied / RUN / "run.json"
    content = json.loads(file.read_text())
    del content["topology"][name]
    file.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=rf"run\.json is damaged: run\.topology has no {name}\."):
        read_run(copied / RUN)


@pytest.mark.parametrize("name", ["strategy", "bn"])
def test_settings_that_readers_need_must_exist(copied: Path, name: str) -> None:
    file = copied / RUN / "run.json"
    content = json.loads(file.read_text())
    del content["config"][name]
    file.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=rf"run\.json is damaged: run\.config has no {name}\."):
        read_run(copied / RUN)


def test_unknown_keys_are_ignored(copied: Path) -> None:
    before = read_run(copied / RUN)
    for place in (("later",), ("topology", "later"), ("provenance", "later")):
        change(copied / RUN / "run.json", *place, value={"of a": ["later version"]})
    change(copied / RUN / "summary.json", "ranks", 0, "later", value=[[1]])
    after = read_run(copied / RUN)
    assert (after.topology, after.provenance, after.summary) == (before.topology, before.provenance, before.summary)


LOG = {"epoch": 0, "step": 1, "losses": [1], "wall_s": 1, "samples": 1, "correct": None}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (LOG | {"losses": ["a"]}, r"line 7, log\.losses\[0\] is text, not a number or null"),
        (LOG | {"losses": []}, r"line 7, log\.losses is a list of a wrong length: it needs 1 or more"),
        (LOG | {"samples": "a"}, r"line 7, log\.samples is text, not a whole number"),
        (LOG | {"wall_s": 0}, r"line 7, log\.wall_s is not a number above 0"),
        ({"losses": [1], "wall_s": 1}, "line 7, log has no epoch"),
    ],
)
def test_a_damaged_window(copied: Path, event: dict[str, Any], message: str) -> None:
    with (copied / RUN / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "log"} | event) + "\n")
    with pytest.raises(RecordError, match=rf"events\.jsonl is damaged: {message}"):
        read_run(copied / RUN)


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
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, '{"event": "x", "a": ' + DEEP])
def test_json_that_is_nested_too_deeply(copied: Path, name: str, text: str) -> None:
    (copied / RUN / name).write_text(text + "\n")
    with pytest.raises(RecordError, match=r"nested too deeply|is a list, not a JSON object"):
        read_run(copied / RUN)


class Anything(msgspec.Struct):
    """A model that accepts every value."""

    a: Any


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e400", "9" * 5000, r'"\ud800"', '"', "[" * 60, "\0", "1 2"])
def test_invalid_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(f'{{"a": {text}}}'.encode(), Anything, "it")


def test_invalid_utf_8() -> None:
    with pytest.raises(ValueError, match="can't decode byte 0xff"):
        decode(b'{"a": "\xff"}', Anything, "it")


def test_valid_json() -> None:
    content = r'{"a": [1, 2.5, null, "\ud83d\ude00 é", 1e300]}'
    assert decode(content.encode(), Anything, "it") == Anything([1, 2.5, None, "😀 é", 1e300])


@pytest.mark.parametrize(
    ("message", "clause"),
    [
        ("Expected `int | null`, got `str` - at `$.a[0]`", "it.a[0] is text, not a whole number or null"),
        ("Object missing required field `b`", "it has no b"),
        ("Expected `float` <= 2.5 - at `$.a[...]`", "it.a[...] is not a number, 2.5 or less"),
        ("Expected `array` of length 2 - at `$`", "it is a list of a wrong length: it needs 2"),
        ("Invalid value 'x' - at `$.event`", "it.event is 'x', which is unknown"),
        ("Something New - at `$.a`", "it.a does not fit: something New"),
    ],
)
def test_messages_are_plain_clauses(message: str, clause: str) -> None:
    assert describe(message, "it") == clause


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def places_in(content: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of all values in a JSON document."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from places_in(value, (*place, key))


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_is_read_or_refused(copied: Path, data: st.DataObject) -> None:
    """If any value is replaced by any other, the record is compared or refused; no other error is raised."""
    file = copied / RUN / data.draw(st.sampled_from(["run.json", "summary.json"]))
    whole = file.read_text()
    change(file, *data.draw(st.sampled_from(list(places_in(json.loads(whole))))), value=data.draw(VALUES))
    with suppress(RecordError):
        read_comparison(copied)
    file.write_text(whole)


@pytest.mark.parametrize("cells", ["nan," * 8 + "1,1", "1,1,inf,1,1,1,1,1,1,1"])
def test_a_step_without_valid_numbers(copied: Path, cells: str) -> None:
    with (copied / RUN / "rank-0.csv").open("a") as file:
        file.write(cells + "\n")
    with pytest.raises(RecordError, match="a step has a value that is missing or out of range"):
        read_run(copied / RUN)
