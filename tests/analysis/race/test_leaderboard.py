"""Leaderboard of races: groups, order and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.analysis.race.leaderboard import read_leaderboard
from paceline.errors import RecordError
from races_on_disk import FLAT, write_race


def test_races_are_ranked_by_score_and_say_what_distinguishes_them(tmp_path: Path) -> None:
    write_race(tmp_path / "slow", [2.0], settings={"batch": 64})
    write_race(tmp_path / "nested" / "fast", [1.0], settings={"batch": 128})
    (group,) = read_leaderboard(tmp_path).groups
    assert [(one.place, one.path.name) for one in group.entries] == [(1, "fast"), (2, "slow")]
    assert [one.differing for one in group.entries] == [{"batch": 128}, {"batch": 64}]


@pytest.mark.parametrize(
    "other",
    [
        {"cpu": "another processor"},
        {"ranks": 3},
        {"target": 0.8},
        {"settings": {"data": "synthetic"}},
        {"settings": {"workload": "vgg11"}},
        {"settings": {"tta": "mirror"}},
    ],
    ids=str,
)
def test_races_of_another_task_or_on_other_hardware_are_in_another_group(
    tmp_path: Path, other: dict[str, object]
) -> None:
    write_race(tmp_path / "one", [2.0])
    write_race(tmp_path / "other", [1.0], **other)  # type: ignore[arg-type]
    found = read_leaderboard(tmp_path)
    assert [[one.place for one in group.entries] for group in found.groups] == [[1], [1]]


def test_a_workload_of_the_user_may_race_on_several_data_sets(tmp_path: Path) -> None:
    for name, settings in {"own": {}, "cifar10": {"data": "cifar10"}, "svhn": {"data": "svhn"}}.items():
        write_race(tmp_path / name, [1.0], settings={"workload": "mine:make_workload", **settings})
    assert [group.task.data for group in read_leaderboard(tmp_path).groups] == ["", "cifar10", "svhn"]


def test_versions_are_shown_where_they_differ_within_a_group(tmp_path: Path) -> None:
    write_race(tmp_path / "new", [1.0], torch="2.14.0")
    write_race(tmp_path / "old", [2.0])
    (group,) = read_leaderboard(tmp_path).groups
    assert [one.software for one in group.entries] == [{"torch": "2.14.0"}, {"torch": "2.13.0"}]
    write_race(tmp_path / "alone" / "elsewhere", [1.0], torch="2.15.0", cpu="another processor")
    assert not read_leaderboard(tmp_path / "alone").entries[0].software


def test_races_without_a_score_and_unfinished_ones_have_no_place(tmp_path: Path) -> None:
    write_race(tmp_path / "a-missed", [1.0], [FLAT])
    write_race(tmp_path / "b-unfinished", [1.0], planned=3, interrupted=True)
    write_race(tmp_path / "c-slow", [9.0])
    (group,) = read_leaderboard(tmp_path).groups
    places = [(one.place, one.path.name) for one in group.entries]
    assert places == [(1, "c-slow"), (None, "a-missed"), (None, "b-unfinished")]


def test_a_damaged_race_is_named_and_a_folder_without_races_is_refused(tmp_path: Path) -> None:
    write_race(tmp_path / "good", [1.0])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "experiment.json").write_text("{")
    found = read_leaderboard(tmp_path)
    assert len(found.entries) == 1
    assert any("bad" in warning for warning in found.warnings)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RecordError, match="contains no race"):
        read_leaderboard(empty)
