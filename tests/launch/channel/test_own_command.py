"""Jobs that a follower accepts: those of the command that it was started with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import LaunchConfig, RunConfig, Script
from paceline.errors import LaunchError
from paceline.launch.channel.own_command import PROVING, TRAINING, OwnCommand
from paceline.launch.follower import PostedJob, check_paths, sees_file
from paceline.launch.job import Job
from paceline.records import RunFolder

OWN = RunConfig(workload="my_model:make", strategy="ddp", data_dir="/here", seed=3)
COMMAND = OwnCommand(configs=(OWN, replace(OWN, strategy="ring")))
SCRIPT = Script(path="train.py", args=("--lr", "0.1"))


def job_of(config: RunConfig, folder: Path = Path("/runs/one"), **others: Any) -> Job:
    return Job(folder=RunFolder(folder), runs=((config, RunFolder(folder)),), timeout=10.0, **others)


@pytest.mark.parametrize("changed", [{}, {"seed": 7}, {"batch": 64}, {"strategy": "ring"}, {"data_dir": "/there"}])
def test_what_the_leader_decides_is_accepted(changed: dict[str, Any]) -> None:
    job = COMMAND.adopt(job_of(replace(OWN, **changed), iface="lo"), LaunchConfig(iface="eth1"))
    ((config, _),) = job.runs
    assert config == replace(OWN, **{**changed, "data_dir": "/here"}), "this host's own folder"
    assert job.iface == "eth1", "this host's own interface"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"workload": "evil:make"}, "WORKLOAD 'evil:make'"),
        ({"strategy": "evil:Strategy"}, "--strategy 'evil:Strategy'"),
        ({"recipe": "/evil.toml"}, "--recipe '/evil.toml'"),
        ({"save": "/other/model.safetensors"}, "--save '/other/model.safetensors'"),
        ({"epochs": 10**6}, "--epochs 1000000"),
    ],
)
def test_a_run_with_other_settings_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(LaunchError, match="which is not part of the command that it was started with") as refused:
        COMMAND.adopt(job_of(replace(OWN, **changed)), LaunchConfig())
    assert refused.value.message.startswith(f"a follower refused a job with {named}")


@pytest.mark.parametrize("task", ["prove", "oracle", "examine"])
def test_another_task_is_refused(task: Any) -> None:
    with pytest.raises(LaunchError, match=f"refused a job with the task '{task}'"):
        COMMAND.adopt(job_of(OWN, task=task), LaunchConfig())


@pytest.mark.parametrize(
    "script",
    [None, Script(path="/tmp/evil.py"), replace(SCRIPT, args=("--lr", "9")), replace(SCRIPT, path="./train.py")],
)
def test_another_script_is_refused(script: Script | None) -> None:
    command = replace(COMMAND, script=SCRIPT, tasks=(*TRAINING, *PROVING))
    command.adopt(job_of(OWN, script=replace(SCRIPT, settings=("bn",)), task="oracle"), LaunchConfig())
    with pytest.raises(LaunchError, match="refused a job with"):
        command.adopt(job_of(OWN, script=script), LaunchConfig())


def test_a_script_is_refused_where_there_is_none() -> None:
    with pytest.raises(LaunchError, match="refused a job with a script"):
        COMMAND.adopt(job_of(OWN, script=Script(path="/tmp/evil.py")), LaunchConfig())


@pytest.mark.parametrize("path", ["/runs/../etc/cron.d", "runs/one"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    for job in (job_of(OWN, Path(path)), job_of(OWN, oracle=path), job_of(OWN, resume=path)):
        with pytest.raises(LaunchError, match="which is not absolute or contains"):
            check_paths(job)
    check_paths(job_of(OWN))


def test_a_job_whose_file_is_another_one_does_not_share_the_disk(tmp_path: Path) -> None:
    """A sender who knows the content of some file must not make a follower write to the folders that it names."""
    folder = RunFolder.create(tmp_path / "run")
    job = job_of(OWN, folder.path)
    posted = PostedJob(rank_ranges=[], endpoint="", file=job.file, job=job.to_json())
    assert not sees_file(posted, job)
    job.write()
    assert sees_file(posted, job)
    known = tmp_path / "known.json"
    known.write_text(job.to_json())
    assert not sees_file(PostedJob(rank_ranges=[], endpoint="", file=known, job=job.to_json()), job)
    job.file.unlink()
    job.file.symlink_to(known)
    assert not sees_file(posted, job)
