"""`paceline report` on damaged records: it names the file that is damaged and reports the rest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments_on_disk import write_experiment
from fuzzing.records import RUN, write_whole_experiment
from paceline.cli.main import run

pytestmark = pytest.mark.takes(15)

Damage = Callable[[Path], object]


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 0x40
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def fill_with_garbage(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 8)


def put_another_type(file: Path) -> None:
    file.write_text('["a list"]\n')


def put_a_later_schema(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 987}))


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_a_link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def make_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


REPLACED = (empty, fill_with_garbage, put_another_type, make_a_folder, make_a_link_to_itself, make_a_pipe)
NEEDED = [
    *(("run.json", damage) for damage in (*REPLACED, cut_short, flip_a_bit, put_a_later_schema)),
    *(("summary.json", damage) for damage in (*REPLACED, cut_short, flip_a_bit)),
    *(("events.jsonl", damage) for damage in (*REPLACED[1:], flip_a_bit)),
    *(("rank-0.csv", damage) for damage in (*REPLACED[1:], flip_a_bit)),
]
OPTIONAL = [
    ("timeline-0.bin", flip_a_bit),
    ("timeline-1.bin", make_a_folder),
    ("resources-0.csv", fill_with_garbage),
    ("marks-0.csv", put_another_type),
    ("profile-0.json", cut_short),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with two runs of each candidate."""
    path = tmp_path_factory.mktemp("report") / "e"
    write_whole_experiment(path)
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of that experiment, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "e"))


def report(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, int], list[str]]:
    """Return the number of repeats by candidate, and the warnings of the report."""
    assert run(["report", str(path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    return {row["name"]: row["repeats"] for row in written["rows"]}, written["warnings"]


def named(warnings: list[str], file: str | Path) -> list[str]:
    return [warning for warning in warnings if str(file) in warning]


@pytest.mark.parametrize(("name", "damage"), NEEDED, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_run_is_named_and_left_out(
    copied: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Damage
) -> None:
    damage(copied / RUN / name)
    repeats, warnings = report(copied, capsys)
    assert repeats == {"single": 2, "none": 2, "allreduce": 2, "ddp": 1}
    (warning,) = named(warnings, copied / RUN / name)
    assert warning.endswith("The report omits this run of ddp.")
    assert warning.isprintable()


@pytest.mark.parametrize(("name", "damage"), OPTIONAL, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_optional_file_is_named_and_the_run_is_kept(
    copied: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Damage
) -> None:
    damage(copied / RUN / name)
    repeats, warnings = report(copied, capsys)
    assert repeats == {"single": 2, "none": 2, "allreduce": 2, "ddp": 2}
    (warning,) = named(warnings, copied / RUN / name)
    assert re.search(r"The report omits the [\w ]+ of this run", warning)


def test_a_run_without_its_description_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / RUN / "run.json").unlink()
    repeats, warnings = report(copied, capsys)
    assert repeats["ddp"] == 1
    assert named(warnings, copied / RUN) == [
        f"{copied / RUN} is damaged: run.json is missing. The report omits this run of ddp."
    ]


def test_a_damaged_line_of_the_experiment_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copied / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if b'"run"' in line and b'"ddp"' in line)
    file.write_bytes(b"".join([*lines[:place], lines[place][:-9] + b"\n", *lines[place + 1 :]]))
    repeats, warnings = report(copied, capsys)
    assert repeats == {"single": 2, "none": 2, "allreduce": 2, "ddp": 1}
    (warning,) = named(warnings, file)
    assert f"is damaged: line {place + 1}: it is not valid JSON" in warning


@pytest.mark.parametrize("damage", [empty, put_another_type, make_a_folder, put_a_later_schema])
def test_nothing_is_left_of_an_experiment_without_its_description(
    copied: Path, capsys: pytest.CaptureFixture[str], damage: Damage
) -> None:
    damage(copied / "experiment.json")
    assert run(["report", str(copied)]) == 8
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert str(copied / "experiment.json") in line


def test_one_of_several_records_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder of records, and as one of several folders that were named."""
    for name in ("one", "two"):
        write_experiment(tmp_path / "all" / name, repeats=1)
    cut_short(tmp_path / "all" / "one" / "experiment.json")
    damaged = tmp_path / "all" / "one" / "experiment.json"
    for folders in ([tmp_path / "all"], [tmp_path / "all" / "one", tmp_path / "all" / "two"]):
        assert run(["report", *map(str, folders), "--json", "--out", str(tmp_path / "page.html")]) == 0
        written = json.loads(capsys.readouterr().out)
        assert [row["repeats"] for row in written["rows"]] == [1, 1, 1, 1]
        (warning,) = named(written["warnings"], damaged)
        assert warning.endswith("The report omits this record.")
