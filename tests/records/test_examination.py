"""An examination survives a round trip to disk; a damaged one raises an error that names the bad value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from examinations import NEEDS, examination, on_two_hosts
from experiments_on_disk import read_comparison, write_experiment
from paceline.analysis.record_set import collect_records
from paceline.errors import RecordError
from paceline.records.examination import (
    Examination,
    find_examination,
    read_examination,
    write_examination,
)
from paceline.records.experiment.record import read_experiment
from paceline.records.find import find_records


@pytest.mark.parametrize(
    "found",
    [
        examination(),
        on_two_hosts(),
        examination(link=None, contention=None, workload=None, failure="it broke.", failure_hint="fix it"),
        examination(workload=replace(NEEDS, batch=None, peak_bytes=[None, 7])),
    ],
    ids=["one host", "two hosts", "no link", "unknowns"],
)
def test_round_trip(tmp_path: Path, found: Examination) -> None:
    assert find_examination(tmp_path) is None
    write_examination(tmp_path, found)
    assert read_examination(tmp_path) == found
    assert find_examination(tmp_path) == found


Damage = Callable[[dict[str, Any]], Any]


def drop(content: dict[str, Any], *path: str | int) -> None:
    *outer, last = path
    for key in outer:
        content = content[key]  # type: ignore[index]
    del content[last]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: drop(c, "ranks"), "doctor has no ranks"),
        (lambda c: drop(c, "ranks", 0, "cores"), r"doctor\.ranks\[0\] has no cores"),
        (lambda c: c["ranks"][1].update(cores="two"), r"doctor\.ranks\[1\]\.cores is text, not a number"),
        (lambda c: c["ranks"][1].update(threads=1.5), r"ranks\[1\]\.threads is a number, not a whole number"),
        (lambda c: c["ranks"][1].update(threads=True), r"threads is true or false, not a whole number"),
        (lambda c: c["ranks"][1].update(rank=5), "doctor.ranks are not numbered from 0"),
        (lambda c: c["ranks"].clear(), "doctor.ranks are not numbered from 0"),
        (lambda c: c["ranks"][0].update(versions=["2.13"]), r"versions is a list, not a JSON object"),
        (lambda c: c.update(link=[]), r"doctor\.link is a list, not a JSON object or null"),
        (lambda c: c["link"].update(pairs=None), r"doctor\.link\.pairs is null, not a list"),
        (lambda c: c["link"].update(pairs=[]), r"doctor\.link\.pairs is a list of a wrong length: it needs 1 or more"),
        (lambda c: c["link"]["pairs"][0].update(beta_s_per_byte=0), r"beta_s_per_byte is not a number above 1e-18"),
        (lambda c: c["link"]["pairs"][0].update(ranks=[0]), r"pairs\[0\]\.ranks is a list of a wrong length"),
        (
            lambda c: c["link"]["all_reduces"][0].update(points=[]),
            r"\.points is a list of a wrong length",
        ),
        (lambda c: c["contention"].update(matmul_alone_s=0), r"contention\.matmul_alone_s is not a number above 0"),
        (lambda c: c["contention"].update(all_reduce_contended_s=-1), "is not a number above 0"),
        (lambda c: c["contention"].update(matmul_contended_s=float("inf")), "cannot be read: it is not valid JSON"),
        (lambda c: c["link"]["pairs"][0].update(beta_s_per_byte=float("inf")), "it is not valid JSON"),
        (lambda c: c["link"]["pairs"][0].update(beta_s_per_byte=1e-320), "is not a number above 1e-18"),
        (
            lambda c: c["link"]["pairs"][0].update(ranks=[0, 9]),
            r"link\.pairs\[0\] names a rank that there is",
        ),
        (
            lambda c: c["link"]["all_reduces"][0]["points"][0].update(bytes=0),
            r"\.bytes is not a whole number, 1 or more",
        ),
        (
            lambda c: c["link"]["all_reduces"][0]["points"][0].update(busbw_bytes_per_s=0),
            r"busbw_bytes_per_s is not a number above 0",
        ),
        (
            lambda c: c["link"]["all_reduces"][0]["points"][0].update(busbw_bytes_per_s=float("nan")),
            "it is not valid JSON",
        ),
        (lambda c: c["workload"].update(step_s=0), r"doctor\.workload\.step_s is not a number above 0"),
        (lambda c: c["ranks"][0].update(cores=0), r"doctor\.ranks\[0\]\.cores is not a number above 0"),
        (lambda c: c["workload"].update(peak_bytes=[1]), "does not have one value per rank"),
        (lambda c: c.update(schema=1), "has record schema 1;"),
    ],
)
def test_damage_is_refused_with_its_path(tmp_path: Path, damage: Damage, message: str) -> None:
    write_examination(tmp_path, examination())
    file = tmp_path / "doctor.json"
    content = json.loads(file.read_text())
    damage(content)
    file.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=message) as caught:
        read_examination(tmp_path)
    assert str(file) in caught.value.message


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    write_examination(tmp_path, examination())
    file = tmp_path / "doctor.json"
    content = json.loads(file.read_text())
    content["ranks"][1]["more"] = content["more"] = {"of a": ["later version"]}
    file.write_text(json.dumps(content))
    assert read_examination(tmp_path) == examination()


def test_values_with_a_default_may_be_missing(tmp_path: Path) -> None:
    write_examination(tmp_path, examination())
    file = tmp_path / "doctor.json"
    content = json.loads(file.read_text())
    for name in ("measuring_cost", "failure", "failure_hint"):
        del content[name]
    file.write_text(json.dumps(content))
    assert read_examination(tmp_path) == examination()


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000])
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "doctor.json").write_text(text)
    with pytest.raises(RecordError):
        read_examination(tmp_path)


def test_an_experiment_and_its_comparison_include_it(tmp_path: Path) -> None:
    write_experiment(tmp_path / "without", repeats=1)
    path = write_experiment(tmp_path / "with", repeats=1)
    write_examination(path, examination())
    assert read_experiment(tmp_path / "without").examination is None
    assert read_comparison(tmp_path / "without").examination is None
    assert read_comparison(path).examination == examination()
    assert collect_records(*find_records([tmp_path / "without", path])).examination == examination()


def test_an_unreadable_examination_does_not_affect_the_rest_of_an_experiment(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=1)
    (path / "doctor.json").write_text("{}")
    comparison = read_comparison(path)
    assert comparison.examination is None
    assert comparison.row("ddp").step_s is not None
    (warning,) = [warning for warning in comparison.warnings if "doctor" in warning]
    assert warning.startswith(f"{path / 'doctor.json'} has record schema None")
    assert warning.endswith("The report omits the examination by `paceline doctor`.")
