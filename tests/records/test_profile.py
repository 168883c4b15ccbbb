"""A profile survives a round trip to disk; damage raises an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecordError
from paceline.records import RunFolder, read_run
from paceline.records.profile import Operator, Profile, read_profile, write_profile
from records.rows import write_record

PROFILE = Profile(
    20, 22, 0.01, [Operator("aten::mm", 4, 0.002, 0.003, 0, 0)], Operator("7 others", 9, 0.001, None, 0, None)
)


def test_a_profile_reads_as_it_was_written(tmp_path: Path) -> None:
    folder = write_record(tmp_path)
    assert read_run(tmp_path).profiles == {}
    for rank in (0, 10):
        write_profile(PROFILE, folder, rank)
    (tmp_path / "profile-0.trace.json.gz").write_bytes(b"")
    assert read_run(tmp_path).profiles == {0: PROFILE, 10: PROFILE}


@pytest.mark.parametrize(
    "damage",
    [
        {"operators": None},
        {"operators": [{}]},
        {"rest": 3},
        {"step_s": "soon"},
        {"step_s": 0},
        {"first_step": None},
        {"first_step": -1},
        {"first_step": 23},
        {"last_step": 10**20},
    ],
)
def test_a_damaged_profile_is_an_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    write_profile(PROFILE, RunFolder(tmp_path), 0)
    file = tmp_path / "profile-0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(RecordError, match=r"profile-0.json is damaged"):
        read_profile(file)


def test_a_number_that_is_missing_is_an_error(tmp_path: Path) -> None:
    write_profile(PROFILE, RunFolder(tmp_path), 0)
    file = tmp_path / "profile-0.json"
    file.write_text(file.read_text().replace('"self_cpu_s": 0.002', '"self_cpu_s": null'))
    with pytest.raises(RecordError, match=r"profile-0.json is damaged"):
        read_profile(file)
