"""Handshake of launcher processes, the files they send each other, and the address of the leader."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.comm import network
from paceline.errors import LaunchError, PacelineError
from paceline.launch import rendezvous
from paceline.launch.channel import control_store
from paceline.launch.channel.handshake import find_mismatch, own_launcher_info, run_handshake
from paceline.launch.channel.store_channel import CHUNK_BYTES, StoreChannel
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Notify
from paceline.signing import Signer

STORE_S = timedelta(seconds=10)
TOKEN = Signer(b"token of the launch")


@pytest.fixture
def channel() -> StoreChannel:
    listener = rendezvous.bind()
    port = listener.getsockname()[1]
    store = rendezvous.open_store("127.0.0.1", port, listener, STORE_S)
    return StoreChannel(store, f"127.0.0.1:{port}", TOKEN, pytest.fail)


@pytest.fixture
def channels(channel: StoreChannel) -> list[StoreChannel]:
    """Channels of three launchers to the same store."""
    return [channel_to(channel.endpoint, TOKEN) for _ in range(3)]


def channel_to(endpoint: str, signer: Signer, notify: Notify = pytest.fail) -> StoreChannel:
    """Return another channel to a store."""
    return StoreChannel(
        rendezvous.open_store(*rendezvous.parse_master(endpoint), None, STORE_S), endpoint, signer, notify
    )


def join(
    channel: StoreChannel, number: int, settings: dict[str, Any], launchers: int = 2, timeout_s: float = 5.0
) -> Any:
    """Return the infos of all launchers, or the error that refuses this one."""
    launcher = LauncherProcess(number=number, launchers=launchers, node=number)
    try:
        return run_handshake(
            channel, launcher, own_launcher_info(launcher, "127.0.0.1", settings), timeout_s, lambda _: None
        )
    except PacelineError as error:
        return error


def both(channels: list[StoreChannel], *settings: dict[str, Any]) -> list[Any]:
    with ThreadPoolExecutor() as hosts:
        return list(hosts.map(lambda number: join(channels[number], number, settings[number]), range(2)))


def test_all_hosts_get_the_info_of_all(channels: list[StoreChannel]) -> None:
    first, second = both(channels, {"batch": 8}, {"batch": 8})
    assert first == second
    assert [launcher_info.launcher for launcher_info in first] == [0, 1]
    assert first[0].versions.keys() == {"Paceline", "torch"}


def test_another_configuration_is_refused_by_name_on_every_host(channels: list[StoreChannel]) -> None:
    for error in both(channels, {"batch": 8, "batch_per_rank": None}, {"batch": 16, "batch_per_rank": None}):
        assert isinstance(error, LaunchError)
        assert "was started with --batch 16, but host 0" in error.message
        assert error.message.startswith(f"host 1 ({socket.gethostname()})")


@pytest.mark.parametrize("what", ["Paceline", "torch"])
def test_another_version_is_refused_by_name(what: str) -> None:
    own = own_launcher_info(LauncherProcess(), "127.0.0.1", {})
    other = replace(own, launcher=1, node=1, host="n2", versions=own.versions | {what: "0.0.9"})
    error = find_mismatch([own, own, other])
    assert error is not None
    assert error.message.startswith(f"host 1 (n2) runs {what} 0.0.9, but host 0 ({own.host}) runs {own.versions[what]}")
    assert find_mismatch([own, own]) is None


def test_a_node_rank_can_be_used_once(channels: list[StoreChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.channel.handshake.SAME_NUMBER_S", 0.2)
    both(channels, {}, {})
    again = join(channels[2], 1, {})
    assert isinstance(again, LaunchError)
    assert "another host was started with --node-rank 1" in again.message


def test_missing_hosts_are_named(channel: StoreChannel) -> None:
    error = join(channel, 0, {}, launchers=4, timeout_s=0.2)
    assert isinstance(error, LaunchError)
    assert f"hosts 1, 2, 3 of 4 did not connect to {channel.endpoint} within 0.2 s" in error.message


def test_a_waiting_leader_shows_the_missing_hosts(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.channel.handshake.NOTIFY_AFTER_S", 0.0)
    messages: list[str] = []
    launcher = LauncherProcess(launchers=3)
    with pytest.raises(LaunchError, match="hosts 1, 2 of 3 did not connect"):
        run_handshake(channel, launcher, own_launcher_info(launcher, "127.0.0.1", {}), 0.2, messages.append)
    assert messages == [f"waiting at {channel.endpoint} for hosts 1, 2 of 3 …"]


def test_files_are_sent_whole_and_nothing_is_overwritten(channel: StoreChannel, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    contents = {
        "run/rank-1.csv": b"",
        "run/timeline-1.bin": bytes(range(256)) * (CHUNK_BYTES // 100),
        "run/run.json": b"{}",
    }
    for name, content in contents.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    (there / "run" / "link").symlink_to("/etc/passwd")
    (here / "run").mkdir(parents=True)
    (here / "run" / "run.json").write_text("mine")
    channel.send_files("files", there)
    channel.receive_files("files", here, [here / "run"])
    assert (here / "run" / "run.json").read_text() == "mine"
    assert sorted(path.name for path in (here / "run").iterdir()) == ["rank-1.csv", "run.json", "timeline-1.bin"]
    assert (here / "run" / "timeline-1.bin").read_bytes() == contents["run/timeline-1.bin"]


@pytest.mark.parametrize("path", ["../outside", "elsewhere/file", "/etc/paceline", "run/../../up"])
def test_a_host_cannot_write_outside_of_the_record(channel: StoreChannel, tmp_path: Path, path: str) -> None:
    channel.post("files", [{"path": path, "chunks": 0, "bytes": 0}])
    with pytest.raises(LaunchError, match="which is outside of the record's folders"):
        channel.receive_files("files", tmp_path, [tmp_path / "run"])
    assert list(tmp_path.iterdir()) == []


def test_a_master_whose_name_is_loopback_listens_on_a_reachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts maps the host's own name to 127.0.1.1."""
    messages: list[str] = []
    monkeypatch.setattr(control_store, "addresses_of_name", lambda name: ["127.0.1.1"] if name == "n1" else [name])
    monkeypatch.setattr(control_store, "reachable_addresses", lambda: ["198.18.0.7"])
    assert control_store.leader_address("n1", messages.append) == "198.18.0.7"
    assert messages == [
        "n1 resolves to 127.0.1.1, a loopback address that other hosts cannot reach; listening on 198.18.0.7 instead"
    ]
    assert control_store.leader_address("127.0.0.1", messages.append) == "127.0.0.1", (
        "a loopback address that the user gives is used"
    )
    monkeypatch.setattr(control_store, "reachable_addresses", lambda: ["198.18.0.7", "198.19.0.7"])
    with pytest.raises(
        LaunchError, match=r"n1 resolves to 127.0.1.1, a loopback address that other hosts cannot reach"
    ) as refused:
        control_store.leader_address("n1", messages.append)
    assert refused.value.hint == "use an address in --master: one of 198.18.0.7, 198.19.0.7"


def test_localhost_stays_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_store, "addresses_of_name", lambda _: ["::1", "127.0.0.1"])
    assert control_store.leader_address("localhost", pytest.fail) == "127.0.0.1"


def test_a_host_that_failed_can_join_again_with_its_node_rank(channels: list[StoreChannel]) -> None:
    with ThreadPoolExecutor() as hosts:
        leader = hosts.submit(join, channels[0], 0, {}, launchers=3, timeout_s=3.0)
        error = join(channels[1], 1, {}, launchers=3, timeout_s=-4.5)
        assert isinstance(error, LaunchError), "host 0 waits for host 2, so host 1 fails"
        others = [hosts.submit(join, channels[number], number, {}, launchers=3) for number in (1, 2)]
        assert [info.launcher for info in others[0].result()] == [0, 1, 2]
        assert leader.result() == others[1].result()


def test_an_info_with_other_fields_is_refused_for_its_version(channel: StoreChannel) -> None:
    own = own_launcher_info(LauncherProcess(), "127.0.0.1", {"batch": 8})
    message = {"launcher": 1, "node": 1, "host": "n2", "versions": own.versions | {"Paceline": "9"}, "gpus": 8}
    channel.post("info", message)
    error = find_mismatch([own, channel.read("info", LauncherInfo)])
    assert error is not None
    assert error.message.startswith("host 1 (n2) runs Paceline 9, but host 0")


def test_a_message_of_another_type_is_refused(channel: StoreChannel) -> None:
    channel.post("info", {"launcher": "first"})
    with pytest.raises(LaunchError, match=r"'info' that does not fit: Expected `int`, got `str` - at `\$.launcher`"):
        channel.read("info", LauncherInfo)


def test_reachable_addresses_are_not_loopback() -> None:
    found = network.reachable_addresses()
    assert not any(network.is_loopback(address) for address in found)
