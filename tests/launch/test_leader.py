"""Launches on several hosts: one command per host, connected by the loopback address or by emulated networks."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from commands import LIMIT_S, USER_CODE, Forked, command, forked, paceline, wait_until
from paceline.launch.emulation.hosts import emulated_hosts
from paceline.records import read_run
from paceline.records.events import FailureEvent
from paceline.records.experiment import CompareDesign, ExperimentRecord, read_experiment

pytestmark = pytest.mark.takes(60)

QUICK = ("--batch", "16", "--repeats", "1", "--max-repeats", "1", "--no-doctor", "--no-proof")


def free_master() -> str:
    """Return an address for `--master`, with a free port outside of the kernel's ephemeral ports."""
    with ExitStack() as closing:
        for port in random.sample(range(29_000, 32_000), 100):
            with suppress(OSError):
                closing.enter_context(socket.create_server(("127.0.0.1", port)))
                return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


def on_two_hosts(*arguments: str, expect: int = 0) -> list[subprocess.CompletedProcess[str]]:
    """Run the same command on two hosts; return the output of each."""
    options = (*arguments, "--hosts", "2", "--ranks", "2", "--master", free_master())
    with ThreadPoolExecutor() as hosts:
        return list(hosts.map(lambda number: paceline(*options, "--node-rank", str(number), expect=expect), range(2)))


def start_without_shared_disk(folder: Path, temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command for which `folder` is empty, as on a host with a separate disk."""
    hidden = f'mount -t tmpfs none {folder} && exec "$@"'
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", hidden, "sh", *command(*arguments)],
        cwd=USER_CODE,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Compared:
    """Comparison on two hosts without a shared disk."""

    def __init__(self, folder: Path, *arguments: str, expect: int) -> None:
        out = folder / "shared" / "compared"
        self.temporary = folder / "temporary"
        out.parent.mkdir()
        self.temporary.mkdir()
        options = (*arguments, "--hosts", "2", "--ranks", "2", "--master", free_master(), "--out", str(out))
        other = start_without_shared_disk(out.parent, self.temporary, *options, "--node-rank", "1")
        self.leader = paceline(*options, "--node-rank", "0", expect=expect)
        self.out, self.error = other.communicate(timeout=LIMIT_S)
        assert other.returncode == expect, self.error
        self.record: ExperimentRecord = read_experiment(out)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    arguments = ("compare", "user_workloads:plain", "--strategies", "ddp,gather_scatter", "--steps", "10", *QUICK)
    return Compared(tmp_path_factory.mktemp("compared"), *arguments, expect=0)


def test_the_leader_has_the_records_of_all_ranks(compared: Compared) -> None:
    runs = [measured.run for measured in compared.record.runs]
    assert [measured.candidate.name for measured in compared.record.runs] == ["ddp", "gather_scatter"]
    for run in runs:
        assert run.finished
        assert sorted(run.steps) == [0, 1]
        assert [len(steps) for steps in run.steps.values()] == [10, 10]
        assert sorted(run.timelines) == [0, 1]
        assert run.topology.ranks_per_host == 1
    job = runs[0].path.parent
    assert (job / "logs" / "rank-1.log").exists()


def test_the_record_and_the_output_state_the_number_of_hosts(compared: Compared) -> None:
    design = compared.record.design
    assert isinstance(design, CompareDesign)
    assert (design.hosts, design.ranks_per_host, design.ranks, design.emulated) == (2, 1, 2, None)
    assert "2 ranks × " in compared.leader.stderr
    assert " on 2 hosts" in compared.leader.stderr
    assert "--hosts 2 --node-rank R --master ADDRESS:PORT" in compared.leader.stdout


def test_a_follower_names_the_leader_and_leaves_no_files(compared: Compared) -> None:
    assert compared.out == ""
    assert (
        compared.error
        == f"host 1 of 2: connected; host 0 ({socket.gethostname()}) is the leader and shows the progress\n"
    )
    assert list(compared.temporary.glob("paceline-*")) == []


def test_a_rank_that_fails_on_a_follower_is_the_root_cause_on_all_hosts(tmp_path: Path) -> None:
    arguments = ("compare", "user_workloads:fails_on_rank_1", "--strategies", "ddp", "--steps", "10", *QUICK)
    failed = Compared(tmp_path, *arguments, expect=6)
    for output in (failed.leader.stderr, failed.error):
        assert "RuntimeError: sample 17 is damaged" in output
        assert "error: rank 1 failed: RuntimeError: sample 17 is damaged" in output
    log = next(tmp_path.rglob("logs/rank-1.log"))
    assert "sample 17 is damaged" in log.read_text()


def test_hosts_with_different_settings_are_refused(tmp_path: Path) -> None:
    options = (
        "train",
        "user_workloads:plain",
        "--hosts",
        "2",
        "--ranks",
        "2",
        "--master",
        free_master(),
        "--out",
        str(tmp_path),
    )
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(paceline, *options, "--node-rank", "1", "--lr", "0.5", expect=5)
        leader = paceline(*options, "--node-rank", "0", expect=5)
    for output in (leader.stderr, other.result().stderr):
        assert "was started with --lr 0.5, but host 0" in output
    assert list(tmp_path.iterdir()) == []


def test_one_run_on_two_hosts(tmp_path: Path) -> None:
    leader, other = on_two_hosts(
        "train", "user_workloads:plain", "--batch", "16", "--epochs", "2", "--out", str(tmp_path / "run")
    )
    record = read_run(tmp_path / "run")
    assert record.summary is not None
    assert [rank.samples for rank in record.summary.ranks] == [64, 64]
    assert "unique samples" in leader.stdout
    assert other.stdout == ""


def test_a_follower_without_a_leader_fails_after_the_timeout(tmp_path: Path) -> None:
    options = ("--hosts", "2", "--ranks", "2", "--master", "127.0.0.1:9", "--timeout", "1", "--node-rank", "1")
    done = paceline("train", "user_workloads:plain", *options, "--out", str(tmp_path / "run"), expect=5)
    assert "host 1 cannot reach host 0 at 127.0.0.1:9" in done.stderr
    assert "start the same command on all 2 hosts" in done.stderr
    assert "frame #" not in done.stderr


@contextmanager
def two_hosts_comparing(out: Path, workload: str = "user_workloads:slow") -> Iterator[list[Forked]]:
    """Start a comparison on two hosts that would take days; yield once both ranks train."""
    options = (workload, "--strategies", "ddp,allreduce", "--steps", "1000000", *QUICK, "--out", str(out))
    launch = ("--hosts", "2", "--ranks", "2", "--master", free_master())
    commands = [("compare", *options, *launch, "--node-rank", str(number)) for number in range(2)]
    with forked(*commands[0]) as leader, forked(*commands[1]) as other:
        wait_until(lambda: len(list(out.glob("repeat-1/1-ddp/rank-*.csv"))) == 2, "both ranks train")
        yield [leader, other]


@pytest.mark.parametrize(
    ("killed", "other"), [(1, "lost contact with host 1 ("), (0, "lost the connection to host 0 at")]
)
def test_a_host_that_dies_is_named_and_no_strategy_counts_as_failed(tmp_path: Path, killed: int, other: str) -> None:
    with two_hosts_comparing(tmp_path / "compared") as hosts:
        ranks = [rank for host in hosts for rank in psutil.Process(host.pid).children(recursive=True)]
        os.kill(hosts[killed].pid, signal.SIGKILL)
        left = hosts[1 - killed].wait()
        assert left.returncode == 5, left.stderr
        assert other in left.stderr
        assert "Traceback" not in left.stderr
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
    assert read_experiment(tmp_path / "compared").events_of(FailureEvent) == []


def test_a_busy_rank_is_stopped_after_a_failure_on_another_host(tmp_path: Path) -> None:
    options = ("user_workloads:fails_while_rank_0_is_busy", "--batch", "16", "--out", str(tmp_path / "run"))
    for output in on_two_hosts("train", *options, expect=6):
        assert "error: rank 1 failed: RuntimeError: sample 17 is damaged" in output.stderr


def test_ctrl_c_on_the_leader_ends_followers_whose_ranks_hang(tmp_path: Path) -> None:
    with two_hosts_comparing(tmp_path / "compared", "user_workloads:hangs_on_rank_1") as hosts:
        os.kill(hosts[0].pid, signal.SIGINT)
        assert [host.wait().returncode for host in hosts] == [130, 130]


def test_compare_under_torchrun(tmp_path: Path) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "paceline",
    ]
    arguments = [
        "compare",
        "user_workloads:plain",
        "--strategies",
        "single,ddp",
        "--steps",
        "10",
        *QUICK,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*launcher, *arguments], cwd=USER_CODE, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_experiment(tmp_path)
    assert (record.design.hosts, record.design.ranks) == (1, 2)
    assert all(measured.run.finished for measured in record.runs)
    assert done.stdout.count("report: ") == 1


def test_a_master_name_that_is_loopback_on_host_0_works(tmp_path: Path) -> None:
    """Host 0's /etc/hosts maps its own name to 127.0.1.1, as on Debian; on host 1 the name has the real address."""
    with emulated_hosts("2") as hosts:
        processes = []
        for host, address in zip(hosts, ("127.0.1.1", hosts[0].address), strict=True):
            own = tmp_path / f"hosts-{host.emulation.host}"
            own.write_text(f"127.0.0.1 localhost\n{address} n0\n")
            arguments = (
                "train",
                "user_workloads:plain",
                "--batch",
                "16",
                "--hosts",
                "2",
                "--node-rank",
                str(host.emulation.host),
            )
            program = command(*arguments, "--ranks", "2", "--master", "n0:29511", "--out", str(tmp_path / "run"))
            with_own_hosts_file = f'umount /etc/hosts; mount --bind {own} /etc/hosts && exec "$@"'
            processes.append(
                host.popen(
                    *["unshare", "--mount", "sh", "-c", with_own_hosts_file, "sh", *program],
                    env={name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
                    cwd=USER_CODE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        output = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], output
    assert read_run(tmp_path / "run").topology.interface == "eth0"
