"""Attacks by a stranger who can connect to the ports of a launch: nothing is executed, nobody joins, no run ends.

The stranger uses torch's own client, which reads, overwrites and deletes any key. Most attacks are against launchers
that run in threads of the test; two are against whole commands.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import barrier

from commands import forked, paceline, wait_until
from launch.test_leader import free_master
from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog import reporter
from paceline.config import LaunchConfig, RunConfig, Script
from paceline.errors import LaunchError, PacelineError
from paceline.launch import follower, rendezvous
from paceline.launch.channel import control_store, handshake, heartbeat
from paceline.launch.channel.handshake import CHALLENGE, RESULT, own_launcher_info, run_handshake
from paceline.launch.channel.heartbeat import HeartbeatMonitor
from paceline.launch.channel.own_command import OwnCommand
from paceline.launch.channel.store_channel import StoreChannel
from paceline.launch.channel.token import TokenSource
from paceline.launch.faults import process_states
from paceline.launch.faults.hang_watch import HangWatch
from paceline.launch.follower import END, JobOutcome, LaunchEnd, PostedJob, failed_key, follow, job_key, outcome_key
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherProcess, RankRange
from paceline.records import RunFolder, read_run
from paceline.signing import TOKEN_VARIABLE, Signer

pytestmark = pytest.mark.takes(25)

STORE_S = timedelta(seconds=10)
TOKEN = Signer(b"token that the stranger does not know").derive("handshake", "2")
GUESS = Signer(b"guess")
GARBAGE = [b"", b"\0", b"x" * 7_000_000, b"{}", b"[" * 100_000, b'{"nonce": 1}', GUESS.sign(END, b"{}")]


class Stranger:
    """A program without the token, connected to a store."""

    def __init__(self, endpoint: str) -> None:
        self.raw: TCPStore = rendezvous.open_store(*rendezvous.parse_master(endpoint), None, STORE_S)
        self.store = PrefixStore("paceline-launch", self.raw)

    def write(self, key: str, message: bytes) -> None:
        self.store.set(key, message)  # type: ignore[arg-type]

    def read(self, key: str) -> bytes:
        return bytes(self.store.get(key))

    def forge(self, key: str, message: Any) -> None:
        """Write a well-formed message, signed with a guessed key."""
        self.write(key, GUESS.sign(key, json.dumps(message).encode()))


class Launch:
    """A control store, its launchers' channels, and what they report."""

    def __init__(self, token: Signer = TOKEN) -> None:
        listener = rendezvous.bind()
        self.endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        self.server = rendezvous.open_store(*rendezvous.parse_master(self.endpoint), listener, STORE_S)
        self.reported: list[str] = []
        self.channels = [self.channel(token) for _ in range(2)]
        self.stranger = Stranger(self.endpoint)

    def channel(self, signer: Signer) -> StoreChannel:
        client = rendezvous.open_store(*rendezvous.parse_master(self.endpoint), None, STORE_S)
        return StoreChannel(client, self.endpoint, signer, self.reported.append)

    def join(self, number: int, timeout_s: float = 5.0) -> Any:
        launcher = LauncherProcess(number=number, launchers=2, node=number)
        own = own_launcher_info(launcher, "127.0.0.1", {"batch": 8})
        try:
            return run_handshake(self.channels[number], launcher, own, timeout_s, lambda _: None)
        except PacelineError as error:
            return error

    def join_all(self) -> list[Any]:
        with ThreadPoolExecutor() as hosts:
            return list(hosts.map(self.join, range(2)))


@pytest.fixture
def launch() -> Launch:
    return Launch()


@pytest.fixture
def joined(launch: Launch) -> Launch:
    """A launch after its handshake."""
    assert [len(infos) for infos in launch.join_all()] == [2, 2]
    return launch


# Handshake


def test_a_stranger_who_takes_a_number_first_does_not_join(launch: Launch) -> None:
    launch.stranger.forge("hello-1", {"nonce": "0" * 32, "info": {"launcher": 1, "host": "evil"}})
    first, second = launch.join_all()
    assert first == second
    assert [info.host for info in first] == [os.uname().nodename] * 2
    assert any("'hello-1'" in text and "not signed with the token" in text for text in launch.reported)


def test_a_stranger_alone_is_named_but_not_accepted(launch: Launch) -> None:
    launch.stranger.forge("hello-1", {"nonce": "0" * 32, "info": {"launcher": 1}})
    error = launch.join(0, timeout_s=0.3)
    assert isinstance(error, LaunchError)
    assert "a process without the token of this launch tried to connect as host 1" in error.message
    assert "--token-file" in (error.hint or "")


@pytest.mark.parametrize("message", GARBAGE, ids=lambda message: f"{len(message)} bytes")
def test_garbage_in_the_handshake_is_ignored(launch: Launch, message: bytes) -> None:
    for key in (CHALLENGE, RESULT, "hello-1", "hello-0"):
        launch.stranger.write(key, message)
    assert [len(infos) for infos in launch.join_all()] == [2, 2]


def test_a_stranger_cannot_answer_as_the_leader(launch: Launch) -> None:
    launch.stranger.forge(CHALLENGE, "0" * 32)
    launch.stranger.forge(RESULT, {"refusal": None, "launcher_infos": [], "nonces": ["0" * 32] * 2})
    error = launch.join(1, timeout_s=-4.7)
    assert isinstance(error, LaunchError)
    assert "did not answer host 1" in error.message
    assert "with the token of this launch" in error.message


def test_a_stranger_cannot_refuse_a_host(launch: Launch) -> None:
    refusal = {"kind": "LaunchError", "message": "go away", "hint": None, "detail": None}
    launch.stranger.forge(RESULT, {"refusal": refusal, "launcher_infos": [], "nonces": []})
    assert [len(infos) for infos in launch.join_all()] == [2, 2]


@pytest.mark.parametrize("attacked", [[RESULT], [CHALLENGE], [CHALLENGE, RESULT]], ids="-".join)
@pytest.mark.parametrize("message", [b"garbage", None], ids=["overwritten", "deleted"])
def test_a_result_that_is_destroyed_before_it_was_read_is_posted_again(
    launch: Launch, attacked: list[str], message: bytes | None
) -> None:
    def destroy() -> None:
        wait_until(lambda: launch.stranger.store.check([RESULT]), "the leader posts the result")
        for key in attacked:
            if message is None:
                launch.stranger.store.delete_key(key)
            else:
                launch.stranger.write(key, message)

    with ThreadPoolExecutor() as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake._Answer, "_result", slow_to_read(handshake._Answer._result))
        done = threads.submit(destroy)
        assert [len(infos) for infos in threads.map(launch.join, range(2), [2.0, -3.0])] == [2, 2]
        done.result()


def slow_to_read(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the stranger always be faster than the follower."""

    def read_later(answer: Any) -> Any:
        time.sleep(0.3)
        return read(answer)

    return read_later


def test_a_recorded_handshake_of_an_earlier_launch_is_worthless(joined: Launch) -> None:
    """The same token serves for many launches: it is in a file."""
    recorded = {key: joined.stranger.read(key) for key in (CHALLENGE, "hello-1", RESULT)}
    later = Launch()
    for key, message in recorded.items():
        later.stranger.write(key, message)
    error = later.join(1, timeout_s=-4.7)
    assert isinstance(error, LaunchError), "the recorded leader does not know the nonce of this follower"
    for key, message in recorded.items():
        later.stranger.write(key, message)
    assert later.join(0, timeout_s=0.3).message.startswith("host 1 of 2 did not connect"), "nor the recorded follower"
    for key, message in recorded.items():
        later.stranger.write(key, message)
    assert [len(infos) for infos in later.join_all()] == [2, 2], "the genuine ones find each other"


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", None], ids=["silent", "other", "closes"])
def test_a_program_that_took_the_port_of_host_0_first_is_named(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_store, "CONNECT_S", 0.5)
    accepted: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # The test has ended.
            while True:
                accepted.append(listener.accept()[0])
                with suppress(OSError):  # The client has ended.
                    accepted[-1].sendall(answer) if answer is not None else accepted[-1].close()

    with rendezvous.bind() as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        host = LauncherProcess(number=1, launchers=2, node=1, master=f"127.0.0.1:{listener.getsockname()[1]}")
        token = TokenSource(host, LaunchConfig(), 1.0, print, {TOKEN_VARIABLE: "0" * 32})
        with pytest.raises(LaunchError, match="it is not host 0 of a launch"):
            control_store.open_channel(host, token, 1.0, print)
        listener.shutdown(socket.SHUT_RDWR)  # Ends `accept`.
        server.join()
    for connection in accepted:
        connection.close()


# Messages


MESSAGES: dict[str, Any] = {
    END: {"interrupted": True},
    job_key(1): {"rank_ranges": []},
    failed_key(1): 1,
    follower.stop_key(1): 1,
    outcome_key(1, 1): {"codes": {"1": 9}, "error": None, "sends_files": True},
    follower.files_key(1, 1): [{"path": "/etc/cron.d/evil", "chunks": 1, "bytes": 1}],
    follower.end_read_key(1): True,
    follower.finished_key(1): True,
    heartbeat._aborted_key(1): True,
    heartbeat._heartbeat_key(1): 10**9,
}


@pytest.mark.parametrize("key", MESSAGES)
def test_a_forged_message_counts_as_missing(joined: Launch, key: str) -> None:
    for message in (GUESS.sign(key, json.dumps(MESSAGES[key]).encode()), json.dumps(MESSAGES[key]).encode(), *GARBAGE):
        joined.stranger.write(key, message)
        assert not joined.channels[0].has(key)
        assert joined.channels[0].find(key, dict) is None
    assert len([text for text in joined.reported if f"'{key}'" in text]) == 1, "reported once"


def test_a_recorded_message_fits_no_other_key_job_or_launch(joined: Launch) -> None:
    leader, other = joined.channels
    leader.post(failed_key(1), 0)
    recorded = joined.stranger.read(failed_key(1))
    joined.stranger.write(failed_key(2), recorded)
    joined.stranger.write(END, recorded)
    assert [other.has(key) for key in (failed_key(1), failed_key(2), END)] == [True, False, False]
    later = Launch()
    later.join_all()
    later.stranger.write(failed_key(1), recorded)
    assert not later.channels[1].has(failed_key(1)), "the same token, another launch"


def test_a_message_from_the_handshake_cannot_be_used_afterwards(joined: Launch) -> None:
    recorded = joined.stranger.read("hello-1")
    joined.stranger.write(job_key(1), recorded)
    assert not joined.channels[1].has(job_key(1))


def test_heartbeats_cannot_be_forged_nor_repeated(joined: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.0)
    now_s = 100.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now_s))  # A busy machine has no effect.
    leader, other = joined.channels
    monitor, key = HeartbeatMonitor(leader, [1]), heartbeat._heartbeat_key(1)
    other.post(key, 1)
    recorded = joined.stranger.read(key)
    other.post(key, 2)
    assert monitor.lost() == set()
    joined.stranger.forge(heartbeat._aborted_key(1), True)
    assert monitor.lost() == set(), "a stranger cannot report that a host is gone"
    for _ in range(4):  # The host is gone, and the stranger pretends that it is not.
        now_s += 0.3 * heartbeat.LOST_AFTER_S
        joined.stranger.forge(key, 10**6)
        monitor.lost()
        joined.stranger.write(key, recorded)
        monitor.lost()
    assert monitor.lost() == {1}


def test_repeated_reports_do_not_make_a_silent_rank_look_busy(tmp_path: Path) -> None:
    """A rank that its launcher sees computing is not hung: old reports in turn would show that it always computes."""
    launch, key = Launch(), Signer(b"key of the job")
    address, port = rendezvous.parse_master(launch.endpoint)
    job = Job(folder=RunFolder(tmp_path), runs=(), timeout=5.0, hang_timeout=0.2)
    watch = HangWatch(job, posted(tmp_path).rank_ranges, {})
    launcher, leader = (reporter.connect(address, port, key) for _ in range(2))
    stranger, recorded = PrefixStore("paceline-watchdog-0", launch.stranger.raw), []
    for number in (1, 2):
        state = process_states.ProcessState("R", number, 0.0)
        launcher.set("states-0", process_states.encode(number, {100: state}))
        launcher.get("states-0")  # Only reading waits for an answer of the store.
        assert watch._recent_states(leader, 0) == {100: state}
        recorded.append(stranger.get("states-0"))
    seen, deadline = [], time.monotonic() + 0.5
    while time.monotonic() < deadline:  # The host is gone.
        for message in recorded:
            stranger.set("states-0", message)  # type: ignore[arg-type]
            stranger.get("states-0")
            seen.append(watch._recent_states(leader, 0))
    assert {100: process_states.ProcessState("R", 1, 0.0)} not in seen, "an old report does not count"
    assert seen[-1] == {}, "nor does the last one for ever"


@pytest.mark.parametrize("attack", ["change", "delete", "swap"])
def test_files_that_were_changed_on_the_way_are_not_written(joined: Launch, tmp_path: Path, attack: str) -> None:
    leader, other = joined.channels
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "run").mkdir(parents=True)
    for name in ("a", "b"):
        (there / "run" / name).write_text(name)
    key = follower.files_key(1, 1)
    other.send_files(key, there)
    if attack == "change":
        joined.stranger.write(f"{key}-0-0", joined.stranger.read(f"{key}-0-0")[:-1] + b"x")
    elif attack == "delete":
        joined.stranger.store.delete_key(f"{key}-0-0")
    else:
        joined.stranger.write(f"{key}-0-0", joined.stranger.read(f"{key}-1-0"))
    with pytest.raises(LaunchError, match="was deleted or overwritten by another program"):
        leader.receive_files(key, here, [here / "run"])
    assert not here.exists()


@pytest.mark.parametrize("message", [b"", b"garbage", None], ids=["empty", "garbage", "deleted"])
def test_a_message_that_was_overwritten_or_deleted_is_posted_again(joined: Launch, message: bytes | None) -> None:
    leader, other = joined.channels
    leader.keep(job_key(1), "run")
    if message is None:
        joined.stranger.store.delete_key(job_key(1))
    else:
        joined.stranger.write(job_key(1), message)
    assert other.find(job_key(1), str) is None
    leader.restore()
    assert other.find(job_key(1), str) == "run"
    other.post(job_key(1), "run it")
    leader.restore()
    assert other.find(job_key(1), str) == "run it", "another launcher may post under the same key"


def test_lists_of_files_with_impossible_sizes_are_refused(joined: Launch, tmp_path: Path) -> None:
    for sizes in ({"chunks": 10**12, "bytes": 1}, {"chunks": 0, "bytes": -(2**40)}, {"chunks": 0, "bytes": 5}):
        joined.channels[1].post("files", [{"path": "run/a", **sizes}])
        with pytest.raises(LaunchError, match="impossible sizes"):
            joined.channels[0].receive_files("files", tmp_path, [tmp_path / "run"])


@pytest.mark.parametrize("path", ["run/a\0b", "run/" + "a" * 300, "run/\ud800"], ids=["null", "long", "surrogate"])
def test_paths_of_files_that_no_disk_can_have_are_refused(joined: Launch, tmp_path: Path, path: str) -> None:
    joined.channels[1].post("files", [{"path": path, "chunks": 0, "bytes": 0}])
    with pytest.raises(LaunchError, match="cannot be written"):
        joined.channels[0].receive_files("files", tmp_path, [tmp_path / "run"])


def test_a_stranger_cannot_count_launchers_that_have_ended() -> None:
    """torch's launchers wait at the end of a job until all have ended: for five minutes if the number is wrong."""
    launch, key = Launch(), Signer(b"key of the job")
    address = rendezvous.parse_master(launch.endpoint)
    for counted in (1, 5):
        PrefixStore("run", launch.stranger.raw).add("ended/num_members", counted)

    def end(rank: int) -> None:
        signed = SignedStore(rendezvous.open_store(*address, None, STORE_S), key)
        store = rendezvous.FailureAwareStore("run", signed, rank, 3, lambda: None)
        barrier(store, 3, "ended", barrier_timeout=2)

    with ThreadPoolExecutor() as hosts:
        ended = [hosts.submit(end, rank) for rank in range(2)]
        time.sleep(0.3)
        assert not any(one.done() for one in ended), "one launcher still has ranks"
        for one in (*ended, hosts.submit(end, 2)):
            one.result()


# A follower and the jobs that it runs


@contextmanager
def following(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """Run a follower in a thread; yield the jobs of which it starts ranks."""
    started: list[Job] = []

    def start(job: Job, *_: Any, **__: Any) -> dict[int, int]:
        started.append(job)
        return {}

    monkeypatch.setattr(follower, "start_ranks", start)
    launcher = LauncherProcess(number=1, launchers=2, node=1)
    command = OwnCommand(configs=(RunConfig(workload="my_model:make"),))
    thread = threading.Thread(target=follow, args=(launch.channels[1], launcher, LaunchConfig(), command))
    thread.start()
    try:
        yield started
    finally:
        with suppress(LaunchError):
            launch.channels[0].post(END, LaunchEnd())
        thread.join(10)
        assert not thread.is_alive()


def posted(folder: Path, config: RunConfig | None = None, **others: Any) -> PostedJob:
    config = config or RunConfig(workload="my_model:make")
    job = Job(folder=RunFolder(folder), runs=((config, RunFolder(folder)),), timeout=5.0, **others)
    own = RankRange(launcher=1, group_rank=0, group_world_size=1, ranks=1, local_rank=0, local_size=1, ranks_on_cores=1)
    return PostedJob(rank_ranges=[own], endpoint="127.0.0.1:1", file=job.file, job=job.to_json())


def test_a_follower_runs_only_signed_jobs(joined: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = posted(tmp_path)
    evil = posted(tmp_path, script=Script(path=str(tmp_path / "evil.py")))
    with following(joined, monkeypatch) as started:
        stranger_channel = joined.channel(GUESS)
        for job in (evil, genuine):
            stranger_channel.post(job_key(1), job)
            time.sleep(0.15)
        assert started == []
        joined.channels[0].post(job_key(1), genuine)
        wait_until(lambda: joined.channels[0].has(outcome_key(1, 1)), "the follower reports the genuine job")
        assert len(started) == 1
        joined.stranger.write(job_key(2), joined.stranger.read(job_key(1)))  # The same job once more, as the next one.
        time.sleep(0.15)
        assert len(started) == 1
    assert any("'job-1'" in text for text in joined.reported)


@pytest.mark.parametrize(
    "evil",
    [
        posted(Path("/runs"), script=Script(path="/tmp/evil.py")),
        posted(Path("/runs"), RunConfig(workload="evil:make")),
        posted(Path("/runs"), RunConfig(workload="my_model:make", strategy="evil:Strategy")),
        posted(Path("/runs"), task="examine"),
        posted(Path("/runs/../../etc")),
        PostedJob(rank_ranges=posted(Path("/runs")).rank_ranges, endpoint="", file=Path("/a"), job="["),
        PostedJob(rank_ranges=posted(Path("/runs")).rank_ranges, endpoint="", file=Path("/a"), job="[" * 100_000),
    ],
    ids=["script", "workload", "strategy", "task", "path", "text", "nesting"],
)
def test_a_follower_refuses_what_is_not_its_command_even_without_a_token(
    joined: Launch, monkeypatch: pytest.MonkeyPatch, evil: PostedJob
) -> None:
    """Without a token, anyone can sign: the messages are then the leader's for all that a follower knows."""
    with following(joined, monkeypatch) as started:
        joined.channels[0].post(job_key(1), evil)
        outcome = joined.channels[0].wait(outcome_key(1, 1), JobOutcome, within_s=10)
        assert outcome is not None
        assert outcome.error is not None
        assert started == []


# Whole commands


def test_a_follower_obeys_no_leader_without_the_token(tmp_path: Path) -> None:
    """The stranger is there before the leader, listens on its port, and sends a script: the attack that once worked."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    master = free_master()
    port = rendezvous.parse_master(master)[1]
    store = rendezvous.open_store("127.0.0.1", port, rendezvous.bind("127.0.0.1", port), STORE_S)
    evil = posted(tmp_path, RunConfig(workload="evil.py"), script=Script(path=str(tmp_path / "evil.py")))
    job = json.loads(json.dumps({"rank_ranges": [], "endpoint": "", "file": str(evil.file), "job": evil.job}))
    stranger = PrefixStore("paceline-launch", store)
    result = {"refusal": None, "launcher_infos": [{}, {}], "nonces": ["0" * 32] * 2}
    for key, message in {CHALLENGE: "0" * 32, RESULT: result, "job-1": job}.items():
        text = json.dumps(message).encode()
        for signed in (text, GUESS.sign(key, text)):
            stranger.set(key, signed)  # type: ignore[arg-type]
    options = ("--hosts", "2", "--ranks", "2", "--master", master, "--node-rank", "1", "--timeout", "1")
    done = paceline("train", "user_workloads:plain", *options, "--out", str(tmp_path / "run"), expect=5)
    assert "did not answer host 1 within 1 s with the token of this launch" in done.stderr
    assert "hint: give all hosts the same token" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "executed").exists()


def listening_ports(process: psutil.Process) -> set[int]:
    found = process.net_connections(kind="tcp")
    assert {one.laddr.ip for one in found if one.status == "LISTEN"} <= {"127.0.0.1"}, "nothing listens on the network"
    return {one.laddr.port for one in found if one.status == "LISTEN"}


def attack(port: int) -> None:
    """Forge all that a launch may obey, in the control store or in the store of a job, and read what is there."""
    stranger = Stranger(f"127.0.0.1:{port}")
    for key, message in MESSAGES.items():
        stranger.forge(key, message)
    stranger.forge(job_key(2), {"rank_ranges": []})
    for key in ("stop-requested", "stop-step"):
        stranger.raw.set(f"paceline-stop/{key}", "1")
        stranger.raw.set(f"world-1/paceline/{key}", "1")


def test_a_run_goes_on_under_attack_and_keeps_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "0123456789abcdef" * 4
    monkeypatch.setenv("PACELINE_TOKEN", token)
    out = tmp_path / "run"
    options = ("user_workloads:slow", "--batch", "16", "--steps", "120", "--checkpoint-every", "50", "--out", str(out))
    launch = ("--hosts", "2", "--ranks", "2", "--master", free_master())
    commands = [("train", *options, *launch, "--node-rank", str(number)) for number in range(2)]
    with forked(*commands[0]) as first, forked(*commands[1]) as second:
        wait_until(lambda: len(list(out.glob("rank-*.csv"))) == 2, "both ranks train")
        leader = psutil.Process(first.pid)
        ranks = [rank for host in (first, second) for rank in psutil.Process(host.pid).children()]
        ports = listening_ports(leader)
        assert len(ports) == 2, "the control store and the store of the job"
        for port in ports:
            attack(port)
        for rank in ranks:
            listening_ports(rank)  # Gloo's.
            assert token not in " ".join(rank.cmdline())
        ended = [host.wait() for host in (first, second)]
    assert [one.returncode for one in ended] == [0, 0], ended
    assert "warning: ignored a message 'failed-1' at 127.0.0.1:" in ended[0].stderr
    record = read_run(out)
    assert record.finished
    assert [len(steps) for steps in record.steps.values()] == [120, 120]
    texts = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    texts += [text.encode() for one in ended for text in (one.stdout, one.stderr)]
    assert not any(token.encode() in text for text in texts)
    assert not any(b"PACELINE_JOB_KEY" in text for text in texts)
