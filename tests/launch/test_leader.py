"""Launches on several hosts: one command per host, connected by the loopback address or by emulated networks."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import USER_CODE, Forked, forked, paceline, torchrun, wait_until
from paceline.launch import leader
from paceline.launch.channel import heartbeat
from paceline.launch.emulation.hosts import emulated_hosts
from paceline.records import read_run
from paceline.records.events import FailureEvent
from paceline.records.experiment.design import CompareDesign
from paceline.records.experiment.record import ExperimentRecord, read_experiment

pytestmark = pytest.mark.takes(40)

QUICK = ("--batch", "16", "--repeats", "1", "--max-repeats", "1", "--no-doctor", "--no-proof")


CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
"""Constants of `unshare` and `mount`."""


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


def hide(folder: Path, temporary: Path) -> None:
    """Make `folder` empty for this process, as on a host with a separate disk."""
    call_libc("unshare", CLONE_NEWNS)
    call_libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call_libc("mount", b"none", os.fsencode(folder), b"tmpfs", 0, None)
    os.environ["TMPDIR"] = str(temporary)


def call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert getattr(libc, name)(*arguments) == 0, f"{name}: {os.strerror(ctypes.get_errno())}"


class Compared:
    """Comparison on two hosts without a shared disk."""

    def __init__(self, folder: Path, *arguments: str, expect: int) -> None:
        out = folder / "shared" / "compared"
        self.temporary = folder / "temporary"
        out.parent.mkdir()
        self.temporary.mkdir()
        options = (*arguments, "--hosts", "2", "--ranks", "2", "--master", free_master(), "--out", str(out))
        without_shared_disk = partial(hide, out.parent, self.temporary)
        with forked(*options, "--node-rank", "1", setup=without_shared_disk) as other:
            self.leader = paceline(*options, "--node-rank", "0", expect=expect)
            done = other.wait()
        assert done.returncode == expect, done.stderr
        self.out, self.error = done.stdout, done.stderr
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
    first, other = on_two_hosts(
        "train", "user_workloads:plain", "--batch", "16", "--epochs", "2", "--out", str(tmp_path / "run")
    )
    record = read_run(tmp_path / "run")
    assert record.summary is not None
    assert [rank.samples for rank in record.summary.ranks] == [64, 64]
    assert "unique samples" in first.stdout
    assert other.stdout == ""


def test_a_follower_without_a_leader_fails_after_the_timeout(tmp_path: Path) -> None:
    options = ("--hosts", "2", "--ranks", "2", "--master", "127.0.0.1:9", "--timeout", "1", "--node-rank", "1")
    done = paceline("train", "user_workloads:plain", *options, "--out", str(tmp_path / "run"), expect=5)
    assert "host 1 cannot reach host 0 at 127.0.0.1:9" in done.stderr
    assert "start the same command on all 2 hosts" in done.stderr
    assert "frame #" not in done.stderr


def leave_before_ranks_end() -> None:
    """Make a leader end as soon as its followers have read that it does, while their ranks run."""
    leader.FOLLOWERS_FINISH_S = 0.0
    heartbeat.LOST_AFTER_S = 100.0


@contextmanager
def two_hosts_comparing(
    out: Path, workload: str = "user_workloads:slow", setup: Callable[[], None] | None = None
) -> Iterator[list[Forked]]:
    """Start a comparison on two hosts that would take days; yield once both ranks train."""
    options = (workload, "--strategies", "ddp,allreduce", "--steps", "1000000", *QUICK, "--out", str(out))
    launch = ("--hosts", "2", "--ranks", "2", "--master", free_master())
    commands = [("compare", *options, *launch, "--node-rank", str(number)) for number in range(2)]
    with forked(*commands[0], setup=setup) as first, forked(*commands[1]) as second:
        wait_until(lambda: len(list(out.glob("repeat-1/1-ddp/rank-*.csv"))) == 2, "both ranks train")
        yield [first, second]


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
    """The leader waits until a follower that does not run at first has read the end, but not for the hung rank."""
    workload = "user_workloads:hangs_on_rank_1"
    with two_hosts_comparing(tmp_path / "compared", workload, leave_before_ranks_end) as hosts:
        os.kill(hosts[1].pid, signal.SIGSTOP)
        os.kill(hosts[0].pid, signal.SIGINT)
        time.sleep(2)  # Longer than a leader takes to end that does not wait.
        os.kill(hosts[1].pid, signal.SIGCONT)
        ended = [host.wait() for host in hosts]
    assert [one.returncode for one in ended] == [130, 130], ended


def test_compare_under_torchrun(tmp_path: Path) -> None:
    options = ("--strategies", "single,ddp", "--steps", "10", *QUICK, "--out", str(tmp_path))
    done = torchrun("-m", "paceline", "compare", "user_workloads:plain", *options)
    record = read_experiment(tmp_path)
    assert (record.design.hosts, record.design.ranks) == (1, 2)
    assert all(measured.run.finished for measured in record.runs)
    assert done.stdout.count("report: ") == 1


def enter(host: dict[str, str], namespaces: Sequence[Path], hosts_file: Path) -> None:
    """Move this process to an emulated host with the given variables and its own /etc/hosts."""
    os.environ.update(host)
    for namespace in namespaces:
        with namespace.open() as file:
            call_libc("setns", file.fileno(), 0)
    call_libc("unshare", CLONE_NEWNS)
    call_libc("umount", b"/etc/hosts")
    call_libc("mount", os.fsencode(hosts_file), b"/etc/hosts", None, MS_BIND, None)
    os.chdir(USER_CODE)  # Entering a mount namespace changes to its root folder.


def test_a_master_name_that_is_loopback_on_host_0_works(tmp_path: Path) -> None:
    """Host 0's /etc/hosts maps its own name to 127.0.1.1, as on Debian; on host 1 the name has the real address."""
    with emulated_hosts("2") as hosts, ExitStack() as running:
        processes = []
        for host, address in zip(hosts, ("127.0.1.1", hosts[0].address), strict=True):
            number = host.emulation.host
            own = tmp_path / f"hosts-{number}"
            own.write_text(f"127.0.0.1 localhost\n{address} n0\n")
            namespaces = [Path(f"/proc/{os.getpid()}/fd/{own}") for own in host.namespace.descriptors.values()]
            arguments = ("train", "user_workloads:plain", "--batch", "16", "--hosts", "2", "--node-rank", str(number))
            arguments += ("--ranks", "2", "--master", "n0:29511", "--out", str(tmp_path / "run"))
            on_host = partial(enter, host.emulation.variables(), namespaces, own)
            processes.append(running.enter_context(forked(*arguments, setup=on_host)))
        ended = [process.wait() for process in processes]
    assert [one.returncode for one in ended] == [0, 0], ended
    for one in ended:
        assert (
            "warning: this launch has no token, so any program that can connect to 198.18.0.1:29511 can" in one.stderr
        )
    assert read_run(tmp_path / "run").topology.interface == "eth0"
