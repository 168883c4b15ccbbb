"""Restarts after ranks and hosts that really fail, and the decision whether a restart can help."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from commands import command, forked, paceline, wait_until
from launch.test_leader import free_master, hide
from paceline.config import LaunchConfig, RunConfig
from paceline.errors import (
    DataError,
    DivergenceError,
    LaunchError,
    PacelineError,
    PreemptedError,
    RankError,
    ReplicaError,
    UsageError,
    WorkloadError,
)
from paceline.launch.emulation.hosts import emulated_hosts
from paceline.launch.faults.restarts import RestartingLeader, last_step
from paceline.launch.faults.stop_signals import EarlyStop
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherInfo, Shape
from paceline.records import RunFolder, read_run
from paceline.records.events import ResumedEvent
from paceline.records.schema import CSV_HEADER, steps_file
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load

pytestmark = pytest.mark.takes(15)

RUN = ("--batch", "16", "--steps", "50", "--checkpoint-every", "20", "--checkpoint", "sync")


@pytest.mark.parametrize(
    ("fault", "found"), [("killed", "rank 1 was killed by SIGKILL"), ("memory", "rank 1 ran out of memory")]
)
def test_a_run_goes_on_from_its_checkpoint_after_a_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, found: str
) -> None:
    monkeypatch.setenv("PACELINE_TEST_FAULT", f"{fault} {tmp_path / 'once'}")
    out = tmp_path / "run"
    restarts = ("--max-restarts", "3", "--master", free_master())  # A port that every attempt listens on.
    done = paceline("train", "user_workloads:fails_once", *RUN, *restarts, "--out", str(out))
    (line,) = [line for line in done.stderr.splitlines() if "restart" in line]
    assert line.startswith(found)
    assert line.endswith("; restart 1 of 3 from the checkpoint of step 20")
    record = read_run(out)
    assert record.finished
    (resumed,) = record.events_of(ResumedEvent)
    assert resumed.step == 20
    assert resumed.is_restart
    assert {len(steps) for steps in record.steps.values()} == {30}
    assert "Traceback" not in done.stderr
    if fault == "memory":  # Rank 0 may be ended before it finds that rank 1 was killed.
        assert list((out / "errors").iterdir())
    assert not list((out / "attempt-2" / "errors").iterdir())
    assert (out / "attempt-2" / "logs" / "rank-1.log").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with checkpoints of steps 10, 20 and 30, which fails at no step."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_TEST_FAULT", f"killed {out.parent}")  # The path exists: it counts as having failed.
        options = ("--batch", "16", "--steps", "30", "--checkpoint-every", "10", "--keep", "9")
        paceline("train", "user_workloads:fails_once", *options, "--out", str(out))
    return out


def test_a_finished_run_that_cannot_go_on_fails(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workload fails before the record of the earlier attempt is set aside."""
    monkeypatch.delenv("PACELINE_TEST_FAULT", raising=False)
    done = paceline("train", "--resume", "--steps", "40", "--out", str(trained), expect=4)
    assert "PACELINE_TEST_FAULT" in done.stderr
    assert done.stdout == ""
    assert read_run(trained).finished, "the record of the first attempt is as it was"


def test_the_folder_of_another_process_or_of_another_run_is_refused(trained: Path, tmp_path: Path) -> None:
    with RunFolder.locked(trained):
        done = paceline("train", "--resume", "--steps", "40", "--out", str(trained), expect=8, ranks=0)
    assert f"error: another process is training in {trained}." in done.stderr
    (tmp_path / "events.jsonl").touch()
    done = paceline("train", "--resume", str(trained), "--steps", "40", "--out", str(tmp_path), expect=8, ranks=0)
    assert f"error: {tmp_path} already contains the record of another run than {trained}." in done.stderr


def test_a_restart_keeps_the_checkpoint_that_was_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed before the run has written a checkpoint to its own folder."""
    monkeypatch.setenv("PACELINE_TEST_FAULT", f"killed {tmp_path / 'once'}")
    options = (
        "--resume",
        str(trained / "checkpoints" / "step-00000010"),
        "--steps",
        "45",
        "--out",
        str(tmp_path / "b"),
    )
    done = paceline("train", *options, "--checkpoint-every", "1000", "--max-restarts", "1")
    assert "; restart 1 of 1 from the checkpoint of step 10\n" in done.stderr
    record = read_run(tmp_path / "b")
    assert record.finished
    assert [resumed.step for resumed in record.events_of(ResumedEvent)] == [10, 10]


def test_an_error_that_repeats_at_the_same_step_ends_the_run_early(tmp_path: Path) -> None:
    """Without checkpoints, a restart begins the run again."""
    options = ("user_workloads:fails_on_rank_1", "--batch", "16", "--max-restarts", "5", "--out", str(tmp_path / "run"))
    done = paceline("train", *options, expect=6, ranks=6)
    restarts = [line for line in done.stderr.splitlines() if line.endswith("of 5 from the beginning")]
    assert restarts == [
        f"rank 1 failed: RuntimeError: sample 17 is damaged; restart {number} of 5 from the beginning"
        for number in (1, 2)
    ]
    assert "2 restarts ended with the same error at the same step; restart 3 of 5 would, too" in done.stderr
    assert "error: rank 1 failed: RuntimeError: sample 17 is damaged" in done.stderr
    assert f"hint: the output of rank 1 is in {tmp_path / 'run' / 'attempt-3' / 'logs' / 'rank-1.log'}" in done.stderr


def test_hosts_without_a_shared_disk_resume_from_what_rank_0_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of the second host, which sees none of the first one's files, is killed."""
    monkeypatch.setenv("PACELINE_TEST_FAULT", f"killed {tmp_path / 'once'}")
    out, temporary = tmp_path / "shared" / "run", tmp_path / "temporary"
    out.parent.mkdir()
    temporary.mkdir()
    hosts = ("--hosts", "2", "--ranks", "2", "--master", free_master(), "--max-restarts", "1", "--out", str(out))
    words = ("train", "user_workloads:fails_once", *RUN, *hosts)
    with forked(*words, "--node-rank", "1", setup=partial(hide, out.parent, temporary)) as other:
        done = paceline(*words, "--node-rank", "0")
        follower = other.wait()
    assert follower.returncode == 0, follower.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "restart 1 of 1 from the checkpoint of step 20" in done.stderr
    assert "resumed at step 20, " in done.stderr
    record = read_run(out)
    assert record.finished
    assert record.events_of(ResumedEvent)[0].step == 20
    assert {len(steps) for steps in record.steps.values()} == {30}
    assert list(temporary.glob("paceline-*")) == [], "the follower leaves no files"


@pytest.mark.timing
def test_a_run_goes_on_with_the_hosts_that_are_left(tmp_path: Path) -> None:
    """The launcher of one of three emulated hosts is killed, and its ranks with it."""
    out = tmp_path / "run"
    options = ("--ranks-per-host", "1", "--batch-per-rank", "8", "--steps", "120", "--checkpoint-every", "20")
    launch = ("--emulate", "3", "--max-restarts", "2", "--min-hosts", "2", "--out", str(out))
    with forked("train", "user_workloads:slow", *options, *launch) as process:
        wait_until(lambda: (last_step(out) or 0) >= 20, "three hosts train")
        hosts = [host for host in psutil.Process(process.pid).children() if "paceline" in host.cmdline()]
        assert len(hosts) == 3
        killed_s = time.monotonic()
        hosts[2].kill()
        wait_until(lambda: (out / "attempt-2" / "job.json").exists() or not process.process.is_alive(), "a restart")
        taken_s = time.monotonic() - killed_s
        done = process.wait()
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "lost contact with host 2 (host2); restart 1 of 2 on 2 hosts with 2 ranks from the checkpoint of " in output
    assert taken_s < 8
    record = read_run(out)
    assert record.finished
    assert (record.topology.world_size, record.topology.batch) == (2, 24)
    (resumed,) = record.events_of(ResumedEvent)
    assert resumed.step >= 20
    assert resumed.ranks_before == 3


@pytest.mark.soak  # The heartbeats of a host that falls silent are judged after 12 s.
@pytest.mark.parametrize("cut", [0, 1])
def test_a_host_whose_link_is_cut(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "run"
    options = ("--ranks-per-host", "1", "--batch", "16", "--steps", "200", "--checkpoint-every", "20", "--emulate", "2")
    words = command("train", "user_workloads:slow", *options, "--max-restarts", "1", "--min-hosts", "1")
    with emulated_hosts("2") as hosts:
        outputs = [tmp_path / f"host-{number}" for number in range(2)]
        processes = []
        for host, output in zip(hosts, outputs, strict=True):
            with output.open("w") as stream:
                cwd = Path(__file__).parent.parent / "user_code"
                processes.append(host.popen(*words, "--out", str(out), cwd=cwd, stdout=stream, stderr=stream))
        try:
            wait_until(lambda: (last_step(out) or 0) >= 20, "two hosts train")
            hosts[cut].run("ip", "link", "set", "eth0", "down")
            codes = [process.wait(60) for process in processes[: 1 if cut else 2]]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == ([0] if cut else [0, 5])
    assert "restart 1 of 1 on 1 host with 1 rank from the checkpoint of step" in outputs[0].read_text()
    if not cut:
        assert (
            "lost the connection to host 0 at 198.18.0.1:29500: it has not answered for 12 s" in outputs[1].read_text()
        )
        assert "start the command on all hosts with --resume" in outputs[1].read_text()


@dataclass
class FailingLeader:
    """Leader whose jobs end with given errors; then they succeed."""

    errors: list[PacelineError]
    lost: list[list[int]] = field(default_factory=list)
    """Numbers of the hosts that each failure leaves lost."""
    hosts: int = 3
    stop_requested: bool = False
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    jobs: list[tuple[Job, Shape]] = field(default_factory=list)

    def run(self, job: Job, shape: Shape) -> None:
        self.jobs.append((job, shape))
        if len(self.jobs) <= len(self.errors):
            raise self.errors[len(self.jobs) - 1]

    @property
    def lost_hosts(self) -> list[LauncherInfo]:
        lost = self.lost[len(self.jobs) - 1] if len(self.jobs) <= len(self.lost) else []
        return [LauncherInfo(launcher=number, node=number) for number in lost]

    def drop_lost_hosts(self) -> int:
        self.hosts -= len(self.lost_hosts)
        return self.hosts


LOST = LaunchError("lost contact with host 2 (c).", hint="see the output of the command on that host")
KILLED = RankError("rank 1 was killed by SIGKILL.")


def run_failing(
    folder: Path,
    leader: FailingLeader,
    launch: LaunchConfig,
    config_for: Callable[[Shape], RunConfig] = lambda _: RunConfig(batch=24),
    resume: str = "",
    checkpoint_every: str = "",
) -> list[str]:
    """Run a job on three hosts; return what was announced."""
    notices: list[str] = []
    job = Job.single(
        RunConfig(batch_per_rank=8, checkpoint_every=checkpoint_every),
        RunFolder.create(folder),
        iface=None,
        threads=None,
    )
    job = replace(job, resume=resume)
    RestartingLeader(leader, launch, config_for, notices.append).run(job, Shape(3, 1))  # type: ignore[arg-type]
    return notices


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no."),
        DataError("no."),
        WorkloadError("no."),
        DivergenceError("no."),
        ReplicaError("no."),
        LaunchError("host 1 runs torch 2.11."),
    ],
)
def test_errors_that_a_restart_cannot_cure(tmp_path: Path, error: PacelineError) -> None:
    leader = FailingLeader([error])
    with pytest.raises(type(error)):
        run_failing(tmp_path, leader, LaunchConfig(max_restarts=3))
    assert len(leader.jobs) == 1


def test_without_restarts_the_first_error_is_raised(tmp_path: Path) -> None:
    leader = FailingLeader([KILLED])
    with pytest.raises(RankError) as raised:
        run_failing(tmp_path, leader, LaunchConfig())
    assert raised.value is KILLED


def test_a_run_that_was_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    leader = FailingLeader([KILLED], stop_requested=True)
    with pytest.raises(RankError):
        run_failing(tmp_path, leader, LaunchConfig(max_restarts=3))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_between_two_attempts_ends_the_run_as_preempted(tmp_path: Path, number: signal.Signals) -> None:
    class Signalled(FailingLeader):
        def run(self, job: Job, shape: Shape) -> None:
            signal.raise_signal(number)  # The ranks have ended, and those of other hosts are waited for.
            super().run(job, shape)

    leader = Signalled([KILLED])
    with pytest.raises(PreemptedError) as raised:
        run_failing(tmp_path, leader, LaunchConfig(max_restarts=3), checkpoint_every="10")
    assert raised.value.exit_code == 75
    assert raised.value.message == (
        f"rank 1 was killed by SIGKILL; {number.name} asked to stop, so the run is not restarted from the beginning."
    )
    assert len(leader.jobs) == 1


def test_failures_at_other_steps_use_all_restarts(tmp_path: Path) -> None:
    class Progressing(FailingLeader):
        def run(self, job: Job, shape: Shape) -> None:
            (tmp_path / steps_file(0)).write_text(f"{CSV_HEADER}{len(self.jobs)},0,8\n9")
            super().run(job, shape)

    leader = Progressing([KILLED] * 9)
    with pytest.raises(RankError):
        run_failing(tmp_path, leader, LaunchConfig(max_restarts=5))
    assert len(leader.jobs) == 6
    assert [job.resume for job, _ in leader.jobs] == ["", *[str(tmp_path)] * 5]
    assert len({job.folder.path for job, _ in leader.jobs}) == 6


def test_a_restart_goes_on_from_the_newest_valid_checkpoint_of_this_command(trained: Path, tmp_path: Path) -> None:
    """The run resumes from step 10, although its folder has newer checkpoints, of which the last is damaged."""
    checkpoints = shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    (checkpoints / "step-00000030" / "model.safetensors").unlink()
    named = checkpoints / "step-00000010"

    class Writing(FailingLeader):
        def run(self, job: Job, shape: Shape) -> None:
            if len(self.jobs) == 1:
                one = load(named)
                info = msgspec.structs.replace(one.info, step=15, time=one.info.time + 1)
                CheckpointFolder(checkpoints, keep=9).write(one.state, one.param_groups, info)
            super().run(job, shape)

    leader = Writing([KILLED] * 2)
    notices = run_failing(tmp_path, leader, LaunchConfig(max_restarts=2), resume=str(named))
    assert [job.resume for job, _ in leader.jobs] == [str(named), str(named), str(tmp_path)]
    assert [notice.rpartition("step ")[2] for notice in notices] == ["10", "15"]
    newest = run_failing(tmp_path, FailingLeader([KILLED]), LaunchConfig(max_restarts=1))
    assert newest == ["rank 1 was killed by SIGKILL; restart 1 of 1 from the checkpoint of step 15"]
    shutil.rmtree(checkpoints / "step-00000015")
    newest = run_failing(tmp_path, FailingLeader([KILLED]), LaunchConfig(max_restarts=1))
    assert newest == ["rank 1 was killed by SIGKILL; restart 1 of 1 from the checkpoint of step 20"]


def test_a_lost_host_is_left_out_and_the_global_batch_stays(tmp_path: Path) -> None:
    leader = FailingLeader([LOST], [[2]])
    notices = run_failing(tmp_path, leader, LaunchConfig(max_restarts=1, min_hosts=2, ranks_per_host=1))
    assert notices == [
        "lost contact with host 2 (c); restart 1 of 1 on 2 hosts with 2 ranks from the beginning",
    ]
    (job, shape) = leader.jobs[1]
    assert shape == Shape(2, 1)
    assert (job.runs[0][0].batch, job.runs[0][0].batch_per_rank) == (24, None)


@pytest.mark.parametrize(
    ("lost", "least", "message"),
    [
        ([2], None, "lost contact with host 2 (c)."),
        ([1, 2], 2, "lost contact with host 2 (c): 1 host is left, fewer than --min-hosts 2."),
        ([2], 3, "lost contact with host 2 (c): 2 hosts are left, fewer than --min-hosts 3."),
        ([0], 1, "lost contact with host 2 (c)."),
    ],
)
def test_too_few_hosts_end_the_run(tmp_path: Path, lost: list[int], least: int | None, message: str) -> None:
    leader = FailingLeader([LOST], [lost])
    with pytest.raises(LaunchError) as raised:
        run_failing(tmp_path, leader, LaunchConfig(max_restarts=3, min_hosts=least, ranks_per_host=1))
    assert raised.value.message == message
    assert len(leader.jobs) == 1


def test_a_run_that_cannot_have_fewer_ranks_says_why(tmp_path: Path) -> None:
    def refuse(_: Shape) -> RunConfig:
        raise UsageError("--slow-rank names rank 2, but there are 2 ranks.", hint="leave it out")

    launch = LaunchConfig(max_restarts=3, min_hosts=1, ranks_per_host=1)
    with pytest.raises(LaunchError) as raised:
        run_failing(tmp_path, FailingLeader([LOST], [[2]]), launch, refuse)
    assert raised.value.message == (
        "lost contact with host 2 (c), and the run cannot go on with 2 ranks: "
        "--slow-rank names rank 2, but there are 2 ranks."
    )


def test_the_last_step_of_a_truncated_record(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    (tmp_path / steps_file(0)).write_text(CSV_HEADER)
    assert last_step(tmp_path) is None
    (tmp_path / steps_file(0)).write_text(f"{CSV_HEADER}0,0,8\n1,0,8\n2,0")
    assert last_step(tmp_path) == 1
