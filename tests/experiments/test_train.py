"""Where records go when the user does not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.errors import RecordError
from paceline.experiments.train import new_folder


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(workload="my.module:make", strategy="ddp:bucket_mb=1")
    folders = [new_folder(config) for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() for folder in folders)
    assert "my.module-make-ddp-bucket_mb=1" in folders[0].name


def test_a_place_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(RecordError, match="cannot write to runs/"):
        new_folder(RunConfig())
