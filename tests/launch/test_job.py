"""Job in its file: the ranks read what the launcher wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.config import RunConfig, Script
from paceline.launch.job import JOB_FILE, Job
from paceline.records import RunFolder

NOT_UTF8 = os.fsdecode(b"caf\xe9")


def script_job(folder: Path) -> Job:
    """Return a job with a value for each field."""
    return Job(
        folder=RunFolder(folder),
        runs=(
            (RunConfig(strategy="local_sgd:every=4", batch=8, slow_rank="1:3"), RunFolder(folder / "repeat-0")),
            (RunConfig(seconds=1.5, bn="sync"), RunFolder(folder / NOT_UTF8)),
        ),
        task="prove_oracle",
        script=Script(path=f"{NOT_UTF8}.py", args=("--lr", "0.1"), settings=("batch",)),
        oracle="gradients.bin",
        timeout=60,
        iface="lo",
        threads=2,
        command=f"paceline train {NOT_UTF8}.py",
    )


def test_ranks_read_the_job_that_was_written(tmp_path: Path) -> None:
    job = script_job(tmp_path)
    assert job.write() == tmp_path / JOB_FILE
    assert Job.read(tmp_path / JOB_FILE) == job


def test_a_job_without_a_script(tmp_path: Path) -> None:
    job = Job.single(RunConfig(steps=8), RunFolder(tmp_path), iface=None, threads=None)
    assert Job.from_json(job.to_json()) == job


def test_a_job_of_other_types_is_refused(tmp_path: Path) -> None:
    content = json.loads(script_job(tmp_path).to_json())
    with pytest.raises(ValueError, match=r"Expected `float`, got `str` - at `\$.timeout`"):
        Job.from_json(json.dumps(content | {"timeout": "60"}))
