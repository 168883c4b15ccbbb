"""Records are found in the folders that a user names; errors say what these contain instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments_on_disk import write_experiment
from paceline.errors import RecordError
from paceline.records import SCHEMA_VERSION
from paceline.records.experiment.design import Candidate, CompareDescription
from paceline.records.experiment.folder import ExperimentFolder
from paceline.records.experiment.record import ExperimentRecord, read_experiment
from paceline.records.find import find_records
from run_models import PROVENANCE, compare_design


def test_an_experiment_a_parent_and_the_same_twice(tmp_path: Path) -> None:
    one = write_experiment(tmp_path / "all" / "one")
    write_experiment(tmp_path / "all" / "two")
    (found,), warnings = find_records([one])
    assert warnings == []
    assert isinstance(found, ExperimentRecord)
    assert [record.path.name for record in find_records([tmp_path / "all", one])[0]] == ["one", "two"]


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="contains no record"):
        find_records([tmp_path])
    with pytest.raises(RecordError, match="is not a folder"):
        find_records([tmp_path / "nowhere"])


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    with pytest.raises(RecordError, match="already contains a record"):
        ExperimentFolder.create(
            path,
            CompareDescription(
                kind="compare", candidates=[], config={}, design=compare_design(), provenance=PROVENANCE
            ),
        )


def test_damage_is_named(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    file = path / "experiment.json"
    whole = file.read_text()
    file.write_text(whole.replace(f'"schema": {SCHEMA_VERSION}', '"schema": 99'))
    with pytest.raises(RecordError, match="has record schema 99"):
        read_experiment(path)
    file.write_text(whole.replace('"design"', '"desing"'))
    with pytest.raises(RecordError, match="has no design"):
        read_experiment(path)
    file.write_text(whole.replace('"strategy"', '"strategie"'))
    with pytest.raises(RecordError, match=r"experiment.json is damaged: experiment\.candidates\[0\] has no strategy"):
        read_experiment(path)


def test_runs_that_never_started_are_omitted(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [Candidate("a", "ddp"), Candidate("b", "ddp")], repeats=1)
    (path / "repeat-1" / "2" / "run.json").unlink()
    assert [measured.candidate.name for measured in read_experiment(path).runs] == ["a"]
