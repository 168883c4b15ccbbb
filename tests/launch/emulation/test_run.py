"""Real emulated hosts: link rates, CPU limits, training on them, signals, and removal of everything at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from commands import Forked, command, forked, wait_until
from paceline.cli.main import run
from paceline.config import LaunchConfig
from paceline.config.emulation import EMULATION_VARIABLE
from paceline.errors import DataError, LaunchError, UsageError
from paceline.launch.emulation import run as emulate
from paceline.launch.emulation.cgroup import find_parent_cgroup
from paceline.launch.emulation.hosts import EmulatedHost, emulated_hosts
from paceline.launch.emulation.run import run_emulated, run_on_all
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP
from paceline.records import read_run
from paceline.records.description import RecordedEmulation
from paceline.workloads.data import cifar10
from paceline.workloads.data.download import Remote
from tries import eventually
from workloads.data.published import Server

pytestmark = pytest.mark.takes(25)

PAYLOAD = 1448 / 1514
"""Fraction of the rate for payload; the rest is headers of Ethernet, IP and TCP."""
IPERF3_PORT = 5201
CGROUPS = find_parent_cgroup(SELF_CGROUP, CGROUP_ROOT)
RUN = ("user_workloads:plain", "--ranks-per-host", "1", "--batch", "16")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[EmulatedHost]]:
    """One slow and two fast hosts, each with half a core."""
    with emulated_hosts("1@100mbit,2@1gbit", 0.5) as created:
        yield created


def cgroups_of(pid: int) -> list[Path]:
    return list(CGROUPS.glob(f"paceline-*-{pid}-*-host*"))


def processes_on_hosts(master_pid: int) -> list[psutil.Process]:
    """Return all processes on the emulated hosts that a process created."""
    try:
        return psutil.Process(master_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def listens(host: EmulatedHost, port: int) -> bool:
    """Return whether a socket of a host is in state LISTEN; closed connections to the port stay listed for a minute."""
    sockets = host.run("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout
    return re.search(rf":{port:04X} \S+ 0A ", sockets) is not None


def rate_bit_s(sender: EmulatedHost, receiver: EmulatedHost, expected: float) -> float:
    """Return the rate that iperf3 measures in one second: the best of 12 trials, since a busy machine lowers it."""
    best = 0.0
    for _ in range(12):
        with receiver.popen("iperf3", "-s", "-1", stdout=subprocess.DEVNULL) as server:
            wait_until(lambda: listens(receiver, IPERF3_PORT), "iperf3")
            done = sender.run("iperf3", "-c", receiver.address, "-t", "1", "-J")
            server.terminate()
        result = json.loads(done.stdout)
        assert "error" not in result, result["error"]
        best = max(best, result["end"]["sum_received"]["bits_per_second"])
        if best > 0.97 * expected:
            break
    return best


@pytest.mark.timing
@pytest.mark.parametrize(("sender", "receiver", "rate"), [(0, 1, 100e6), (1, 0, 100e6), (1, 2, 1e9), (2, 1, 1e9)])
def test_links_have_their_rate_in_both_directions(
    hosts: Sequence[EmulatedHost], sender: int, receiver: int, rate: float
) -> None:
    expected = rate * PAYLOAD
    assert rate_bit_s(hosts[sender], hosts[receiver], expected) == pytest.approx(expected, rel=0.03)


def test_hosts_have_names_and_separate_networks(hosts: Sequence[EmulatedHost]) -> None:
    ask = "from socket import *; print(gethostname(), gethostbyname('host2'), gethostbyaddr('198.18.0.1')[0])"
    assert hosts[1].run(sys.executable, "-c", ask).stdout.split() == ["host1", "198.18.0.3", "host0"]
    names = re.findall(r"^ *(\w+):", hosts[1].run("cat", "/proc/net/dev").stdout, re.MULTILINE)
    assert set(names) == {"lo", "eth0"}
    assert hosts[1].run("pwd").stdout.strip() == os.getcwd()  # noqa: PTH109


BUSY = """
import os, sys, time
from pathlib import Path
from paceline.launch.emulation.cgroup import enter
folder = Path(sys.argv[1])
enter(folder)
begin, used = time.monotonic(), time.process_time()
while time.monotonic() < begin + 2:
    pass
print((time.process_time() - used) / (time.monotonic() - begin))
"""


def test_the_cpu_limit_holds(hosts: Sequence[EmulatedHost]) -> None:
    folder = hosts[1].cgroup
    assert folder is not None
    # The highest weight, so that other programs on this machine do not reduce the share.
    weight, most = ("cpu.shares", "262144") if (folder / "cpu.shares").exists() else ("cpu.weight", "10000")
    (folder / weight).write_text(most)

    def check(_: int) -> None:
        done = hosts[1].run(sys.executable, "-c", BUSY, str(folder))
        assert float(done.stdout) == pytest.approx(0.5, rel=0.1), done.stderr

    eventually(check)


def test_two_emulations_are_isolated(hosts: Sequence[EmulatedHost]) -> None:
    connect = "import socket; socket.create_connection(('198.18.0.1', 8000), timeout=2)"
    with (
        emulated_hosts("2", 0.5) as others,
        hosts[0].popen(
            sys.executable, "-m", "http.server", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server,
    ):
        wait_until(lambda: hosts[1].run(sys.executable, "-c", connect).returncode == 0, "a server on host 0")
        assert others[0].address == hosts[0].address
        assert "ConnectionRefusedError" in others[1].run(sys.executable, "-c", connect).stderr
        assert {host.cgroup for host in others}.isdisjoint({host.cgroup for host in hosts})
        server.kill()
    assert not any(host.cgroup.exists() for host in others if host.cgroup)
    assert all(host.cgroup.exists() for host in hosts if host.cgroup)


def test_packets_are_delayed_or_netem_is_missing() -> None:
    connect = (
        "import socket, time; b = time.time(); socket.create_connection(('198.18.0.1', 8000)); print(time.time() - b)"
    )
    listen = "import socket, time; s = socket.create_server(('198.18.0.1', 8000)); print(flush=True); time.sleep(60)"
    try:
        with emulated_hosts("2@100mbit+20ms") as (first, second):
            server = first.popen(sys.executable, "-c", listen, stdout=subprocess.PIPE)
            server.stdout.readline()
            taken_s = float(second.run(sys.executable, "-c", connect).stdout)
            server.kill()
            server.communicate()
            assert 0.04 < taken_s < 0.2  # A round trip, and one more for ARP.
    except LaunchError as error:
        refusal = error
    else:
        return
    assert "this kernel cannot delay packets, since netem is missing" in refusal.message
    assert "modprobe sch_netem" in (refusal.hint or "")


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_hosts_with_rates_and_cpu_limits(tmp_path: Path, each: int) -> None:
    out = tmp_path / "run"
    spec, hosts = f"{each}@1gbit,{each}@200mbit", 2 * each
    options = ("--emulate", spec, "--host-cpus", "0.5", "--steps", "12", "--out", str(out), "--json")
    with forked("train", *RUN, *options) as process:
        done = process.wait()
    assert done.returncode == 0, done
    rates = f"{each} at 1 Gbit/s each way; {each} at 200 Mbit/s each way"
    assert f"{hosts} emulated hosts: {rates}, 0.5 cores each, 198.18.0.1–{hosts}" in done.stderr
    record = read_run(out)
    assert record.finished
    assert record.topology.emulated == RecordedEmulation(spec=spec, host_cpus=0.5)
    assert (record.topology.world_size, record.topology.ranks_per_host) == (hosts, 1)
    assert (record.topology.interface, record.topology.cores, record.topology.threads) == ("eth0", 0.5, 1)
    assert [len(steps) for steps in record.steps.values()] == [12] * hosts
    assert not cgroups_of(process.pid)


def test_two_hosts_from_a_config_file_end_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('emulate = "2"\nhost-cpus = 1.5\n')
    with long_run(tmp_path, "--config", str(tmp_path / "run.toml")) as (process, out):
        launchers = psutil.Process(process.pid).children()
        shares = cgroups_of(process.pid)
        inside = [int(pid) for folder in shares for pid in (folder / "cgroup.procs").read_text().split()]
        assert len(shares) == len(inside) == len(launchers) == 2  # Only ranks, not the launchers.
        ranks = [child for child in processes_on_hosts(process.pid) if child.pid in inside]
        assert len({*ranks, *launchers}) == 4
        os.killpg(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130, done
    assert f"interrupted; the record so far is in {out}" in done.stderr.replace("\n", "")
    assert "warning: 2 hosts with 1.5 cores each share" in done.stderr
    assert not [one for one in (*launchers, *ranks) if one.is_running()]
    assert not cgroups_of(process.pid)


def test_cgroups_of_a_killed_emulation_are_removed_by_the_next(tmp_path: Path) -> None:
    with long_run(tmp_path, "--emulate", "2", "--host-cpus", "0.5") as (process, _), ExitStack() as held:
        running = processes_on_hosts(process.pid)
        # While these files are open, no other network gets the same number.
        files = [held.enter_context(Path(f"/proc/{child.pid}/ns/net").open()) for child in running]
        networks = {os.readlink(f"/proc/self/fd/{file.fileno()}") for file in files}  # noqa: PTH115
        assert len(networks) == 2
        stale = cgroups_of(process.pid)
        assert [folder.exists() for folder in stale] == [True, True]
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not [child for child in running if child.is_running()], "the processes on the hosts end")
        assert not [p.pid for p in psutil.process_iter() if network_of(p.pid) in networks]
    with emulated_hosts("1", 0.5):
        assert not [folder for folder in stale if folder.exists()]


@contextmanager
def long_run(tmp_path: Path, *options: str) -> Iterator[tuple[Forked, Path]]:
    """Start a long run on emulated hosts, and yield once it trains."""
    out = tmp_path / "run"
    arguments = ("train", *RUN, "--steps", "100000", "--out", str(out), *options)
    with forked(*arguments, ranks=2) as process:  # Two hosts, so that no preloaded process stays outside.
        wait_until(lambda: trains(out), "a run on emulated hosts")
        yield process, out


def trains(out: Path) -> bool:
    events = out / "events.jsonl"
    return events.exists() and '"log"' in events.read_text()


def network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115
    except OSError:
        return None


def on_each(
    hosts: Sequence[EmulatedHost], monkeypatch: pytest.MonkeyPatch, *scripts: str
) -> tuple[int, list[str], float]:
    """Run a script per host in place of `paceline`; return the exit code, the messages and the duration in seconds."""
    monkeypatch.setattr(emulate, "LEADER_EXIT_S", 0.5)
    monkeypatch.setattr(emulate, "FOLLOWERS_EXIT_S", 0.5)
    cases = " ".join(f"*'\"host\": {number}'*) {script} ;;" for number, script in enumerate(scripts))
    messages: list[str] = []
    begin_s = time.monotonic()
    code = run_on_all(
        hosts[: len(scripts)], ["sh", "-c", f"case ${EMULATION_VARIABLE} in {cases} esac"], messages.append
    )
    return code, messages, time.monotonic() - begin_s


def test_the_exit_code_is_that_of_host_0(hosts: Sequence[EmulatedHost], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_each(hosts, monkeypatch, "exit 7", "exit 0")[:2] == (7, [])
    assert on_each(hosts, monkeypatch, "exit 7", "echo the same; exit 7")[:2] == (7, [])


class SignalRecorder:
    """Process that records the signals it was sent."""

    returncode = None

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(
    ("received", "forwarded"),
    [
        ([signal.SIGINT] * 3, [signal.SIGINT] * 3),
        ([signal.SIGTERM] * 2, [signal.SIGTERM, signal.SIGKILL]),
        ([signal.SIGINT, signal.SIGTERM], [signal.SIGINT, signal.SIGKILL]),
        ([signal.SIGUSR1, signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]),
    ],
    ids=["Ctrl-C", "SIGTERM", "both", "SIGUSR1"],
)
def test_repeated_ctrl_c_does_not_kill_hosts(received: list[signal.Signals], forwarded: list[signal.Signals]) -> None:
    process = SignalRecorder()
    host_process = emulate._HostProcess(None, process, None)  # type: ignore[arg-type]
    running = emulate._HostProcesses([host_process], frozenset(received))
    for number in received:
        running._interrupt(number)
    assert process.signals == forwarded


def test_the_output_of_a_host_that_fails_unexplained_is_shown(
    hosts: Sequence[EmulatedHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, messages, took_s = on_each(hosts, monkeypatch, "exec sleep 60", "exit 0", "echo no room >&2; exit 5")
    assert code == 128 + signal.SIGTERM  # Host 0 waited for a host that had ended.
    assert messages == ["host2 ended with exit code 5:", "  host2: no room"]
    assert took_s < 50, "it does not wait for the hosts that sleep"


def test_hosts_that_outlive_host_0_are_terminated(
    hosts: Sequence[EmulatedHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, messages, took_s = on_each(hosts, monkeypatch, "exit 0", "exec sleep 60")
    assert (code, messages) == (0, [])
    assert took_s < 50, "it does not wait for the hosts that sleep"


def test_a_closed_terminal_ends_all_hosts_unless_it_is_ignored(
    hosts: Sequence[EmulatedHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    closes = "kill -HUP $PPID; sleep 0.2; kill -HUP $PPID; sleep 0.2; exit 7"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert on_each(hosts, monkeypatch, closes, "exec sleep 60")[:2] == (128 + signal.SIGHUP, [])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does.
        assert on_each(hosts, monkeypatch, closes, "kill -HUP $$; sleep 1; exit 0")[:2] == (7, [])
    finally:
        signal.signal(signal.SIGHUP, before)


def test_data_are_downloaded_before_the_command_runs_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        monkeypatch.setattr(cifar10, "ARCHIVE", Remote(url=server.url("gone"), md5=""))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        options = ["--data", "cifar10", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run")]
        code = run(["train", "--emulate", "2", *options])
        server.shutdown()
        thread.join()
    assert server.requests == ["gone"]
    assert code == DataError.exit_code
    assert "answered with status 404" in capsys.readouterr().err


def test_emulate_is_refused_under_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="torchrun or another launcher started this process"):
        run_emulated(LaunchConfig(emulate="2"), [], print)


@pytest.mark.parametrize("missing", ["-sys_admin", "-net_admin"])
def test_without_root_the_hint_says_what_to_do(missing: str) -> None:
    line = ["setpriv", f"--bounding-set={missing}", *command("train", "--emulate", "2")]
    done = subprocess.run(line, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == LaunchError.exit_code, done.stderr
    assert "error: emulated hosts have separate networks, which only root can create." in done.stderr
    assert "hint: run the command with sudo" in done.stderr
    assert len(done.stderr.splitlines()) == 2
