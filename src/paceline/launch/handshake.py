"""Handshake of the launcher processes before any rank starts: all must be present, with equal versions and settings.

A host with another version of Paceline or torch, or with other settings, would make the others hang or change what is
measured. The launch is refused with an error that names the host.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from paceline.errors import LaunchError
from paceline.formatting import short_seconds
from paceline.launch.failures import error_from_info, error_to_info
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Notify
from paceline.launch.store_channel import POLL_S, StoreChannel
from paceline.measure.host import network_id
from paceline.records.failure import ErrorInfo
from paceline.records.provenance import version_of
from paceline.user_code import sources_digest

NOTIFY_AFTER_S = 2.0
"""Seconds of waiting after which the leader shows which hosts are missing."""
RESULT_READ_S = 3.0
"""Seconds that the leader waits for each follower to read why the launch is refused."""
RESULT = "handshake-result"
"""Key of the leader's `HandshakeResult`, for all followers."""
NOT_OPTIONS = {
    "command": "command",
    "workload": "workload",
    "script_args": "script's arguments",
    "user_code": "user's code with digests",
}
"""Names, in messages, of the settings that are not options."""


class HandshakeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the handshake."""

    refusal: ErrorInfo | None
    """Why the launch is refused; None if it is not."""
    launcher_infos: list[LauncherInfo]
    """Info of every launcher, ordered by number."""


def own_launcher_info(launcher: LauncherProcess, address: str, settings: Mapping[str, Any]) -> LauncherInfo:
    """Return the info of this process."""
    return LauncherInfo(
        launcher=launcher.number,
        node=launcher.node,
        local_rank=launcher.local_rank,
        host=platform.node(),
        network=network_id(),
        address=address,
        versions={
            "Paceline": f"{version_of('paceline') or 'from sources'} ({sources_digest()})",
            "torch": version_of("torch") or "unknown",
        },
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        settings=dict(settings),
    )


def run_handshake(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    """Wait for all launchers; return their infos, ordered by number. Raise `LaunchError` on every host if one differs.

    Also raise `LaunchError` if a launcher is missing after `timeout_s`, or if two have the same number.
    """
    if channel.add(_claim_key(launcher), 1) > 1:
        channel.add(_claim_key(launcher), -1)
        raise LaunchError(
            f"another host was started with --node-rank {launcher.number}.",
            hint=f"give each of the {launcher.launchers} hosts a different --node-rank, from 0 to "
            f"{launcher.launchers - 1}",
        )
    try:
        channel.post(_info_key(launcher.number), own)
        return (
            _lead_handshake(channel, launcher, own, timeout_s, notify)
            if launcher.is_leader
            else _wait_for_result(channel, launcher, timeout_s)
        )
    except BaseException:
        with suppress(LaunchError):
            channel.add(_claim_key(launcher), -1)  # A host that is started again can use the number.
        raise


def _claim_key(launcher: LauncherProcess) -> str:
    return f"claim-{launcher.number}"


def _info_key(launcher: int) -> str:
    return f"launcher-info-{launcher}"


def _result_read_key(launcher: int) -> str:
    return f"{RESULT}-read-{launcher}"


def _lead_handshake(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    launcher_infos = _collect_launcher_infos(channel, launcher, own, timeout_s, notify)
    error = find_mismatch(launcher_infos)
    refusal = None if error is None else error_to_info(error)
    channel.post(RESULT, HandshakeResult(refusal=refusal, launcher_infos=launcher_infos))
    if error is not None:
        for launcher_info in launcher_infos[1:]:  # The store ends with this process, so followers must read it first.
            channel.wait(_result_read_key(launcher_info.launcher), within_s=RESULT_READ_S)
        raise error
    return launcher_infos


def find_mismatch(launcher_infos: Sequence[LauncherInfo]) -> LaunchError | None:
    """Return an error for the first version or setting that differs between hosts; None if all are equal."""
    first = launcher_infos[0]
    for other in launcher_infos[1:]:
        for package, version in first.versions.items():
            if other.versions.get(package) != version:
                return LaunchError(
                    f"{other.name} runs {package} {other.versions.get(package)}, but {first.name} runs {version}.",
                    hint=f"install the same version of {package} on all hosts",
                )
        differing = [name for name in first.settings if other.settings.get(name) != first.settings[name]]
        if differing:
            name = differing[0]
            return LaunchError(
                f"{other.name} was started with {_format_setting(name, other.settings.get(name))}, but {first.name} "
                f"with {_format_setting(name, first.settings[name])}.",
                hint="start the same command on all hosts, each with a different --node-rank",
            )
    return None


def _collect_launcher_infos(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    start_s = time.monotonic()
    notified = False
    missing = set(range(launcher.launchers)) - {launcher.number}
    found = {launcher.number: own}
    while missing:
        for number in sorted(missing):
            if channel.has(_info_key(number)):
                found[number] = channel.read(_info_key(number), LauncherInfo)
        missing -= found.keys()
        waited_s = time.monotonic() - start_s
        if missing and waited_s > timeout_s:
            raise LaunchError(
                f"{_format_hosts(missing)} of {launcher.launchers} did not connect to {channel.endpoint} within "
                f"{short_seconds(timeout_s)}.",
                hint=f"start the same command on all {launcher.launchers} hosts, each with a different --node-rank; "
                "increase --timeout if they start slowly",
            )
        if missing and waited_s > NOTIFY_AFTER_S and not notified:
            notify(f"waiting at {channel.endpoint} for {_format_hosts(missing)} of {launcher.launchers} …")
            notified = True
        time.sleep(POLL_S)
    return [found[number] for number in sorted(found)]


def _wait_for_result(channel: StoreChannel, launcher: LauncherProcess, timeout_s: float) -> list[LauncherInfo]:
    if not channel.wait(RESULT, within_s=timeout_s + 5):
        raise LaunchError(
            f"host 0 at {channel.endpoint} did not answer host {launcher.number} within {short_seconds(timeout_s)}.",
            hint="see the output of the command on host 0; increase --timeout if other hosts start slowly",
        )
    result = channel.read(RESULT, HandshakeResult)
    channel.post(_result_read_key(launcher.number), None)
    if result.refusal is not None:
        raise error_from_info(result.refusal)
    return result.launcher_infos


def _format_hosts(numbers: set[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)))
    return f"host {listed}" if len(numbers) == 1 else f"hosts {listed}"


def _format_setting(name: str, value: Any) -> str:
    if name in NOT_OPTIONS:
        return f"the {NOT_OPTIONS[name]} {value}"
    return f"--{name.replace('_', '-')} {value}"
