"""How hosts get to know each other before anything starts: who is there, and whether all have the same in mind.

A host with another version of Paceline or torch, or another configuration, would hang the others or, worse, change what
is measured: it is refused by name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import LaunchError
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Notify
from paceline.launch.store_channel import POLL_S, StoreChannel
from paceline.measure.host import network_id
from paceline.records.provenance import version_of

NOTIFY_AFTER_S = 2.0
"""How long a host waits before it says for whom."""
VERDICT_S = 3.0
NOT_OPTIONS = {
    "command": "command",
    "workload": "workload",
    "script_args": "script's arguments",
    "own_code": "user's code",
}
"""What settings are called that are not options."""


def own_launcher_info(launcher: LauncherProcess, address: str, settings: Mapping[str, Any]) -> LauncherInfo:
    """What this process says of itself."""
    return LauncherInfo(
        launcher=launcher.number,
        node=launcher.node,
        local_rank=launcher.local_rank,
        host=platform.node(),
        network=network_id(),
        address=address,
        versions={
            "Paceline": f"{version_of('paceline') or 'from sources'} ({_sources()})",
            "torch": version_of("torch") or "unknown",
        },
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        settings=dict(settings),
    )


def shake_hands(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    """Waits for all the others; all of them, in order, once they are known to fit. Raises, on every host, if not."""
    if channel.count(_taken(launcher)) > 1:
        channel.count(_taken(launcher), by=-1)
        raise LaunchError(
            f"another host was started with --node-rank {launcher.number}.",
            hint=f"each of the {launcher.launchers} hosts has a number of its own, from 0 to {launcher.launchers - 1}",
        )
    try:
        channel.post(f"hello-{launcher.number}", asdict(own))
        return (
            _welcome(channel, launcher, own, timeout_s, notify)
            if launcher.leads
            else _hear_the_verdict(channel, launcher, timeout_s)
        )
    except BaseException:
        with suppress(LaunchError):
            channel.count(_taken(launcher), by=-1)  # Who comes back finds the number free.
        raise


def _taken(launcher: LauncherProcess) -> str:
    return f"taken-{launcher.number}"


def _welcome(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    infos = _hear_all(channel, launcher, own, timeout_s, notify)
    reason = mismatch(infos)
    refusal = None if reason is None else {"message": reason.message, "hint": reason.hint}
    channel.post("welcome", {"refusal": refusal, "hellos": [asdict(info) for info in infos]})
    if reason is not None:
        for info in infos[1:]:  # With us goes the store: they have to have heard it.
            channel.wait(f"heard-{info.launcher}", within_s=VERDICT_S)
        raise reason
    return infos


def read_launcher_info(said: Mapping[str, Any]) -> LauncherInfo:
    """What another host said, in the words of its own version: what it leaves out is empty, the rest is not ours."""
    empty = LauncherInfo(0, 0, 0, "unknown", "", "", {}, [], {})
    return LauncherInfo(
        **{field.name: said.get(field.name, getattr(empty, field.name)) for field in fields(LauncherInfo)}
    )


def mismatch(infos: Sequence[LauncherInfo]) -> LaunchError | None:
    """Why these hosts cannot work together, if they cannot."""
    first = infos[0]
    for other in infos[1:]:
        for what, version in first.versions.items():
            if other.versions.get(what) != version:
                return LaunchError(
                    f"{other.name} runs {what} {other.versions.get(what)}, but {first.name} runs {version}.",
                    hint="install the same on all hosts",
                )
        differing = [name for name in first.settings if other.settings.get(name) != first.settings[name]]
        if differing:
            name = differing[0]
            return LaunchError(
                f"{other.name} was started with {_shown(name, other.settings.get(name))}, but {first.name} with "
                f"{_shown(name, first.settings[name])}.",
                hint="start the same command on all hosts, each with its own --node-rank",
            )
    return None


def _hear_all(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    began = time.monotonic()
    said = False
    waiting = set(range(launcher.launchers)) - {launcher.number}
    found = {launcher.number: own}
    while waiting:
        for number in sorted(waiting):
            if channel.has(f"hello-{number}"):
                found[number] = read_launcher_info(channel.read(f"hello-{number}"))
        waiting -= found.keys()
        waited_s = time.monotonic() - began
        if waiting and waited_s > timeout_s:
            raise LaunchError(
                f"{_listed(waiting)} of {launcher.launchers} did not come to {channel.where} within {timeout_s:g} s.",
                hint=f"start the same command on all {launcher.launchers} hosts, each with its own --node-rank; "
                "--timeout waits longer",
            )
        if waiting and waited_s > NOTIFY_AFTER_S and not said:
            notify(f"waiting at {channel.where} for {_listed(waiting)} of {launcher.launchers} …")
            said = True
        time.sleep(POLL_S)
    return [found[number] for number in sorted(found)]


def _hear_the_verdict(channel: StoreChannel, launcher: LauncherProcess, timeout_s: float) -> list[LauncherInfo]:
    if not channel.wait("welcome", within_s=timeout_s + 5):
        raise LaunchError(f"host 0 at {channel.where} did not answer host {launcher.number} within {timeout_s:g} s.")
    verdict = channel.read("welcome")
    channel.post(f"heard-{launcher.number}", None)
    if verdict["refusal"] is not None:
        raise LaunchError(verdict["refusal"]["message"], hint=verdict["refusal"]["hint"])
    return [read_launcher_info(entry) for entry in verdict["hellos"]]


def _listed(numbers: set[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)))
    return f"host {listed}" if len(numbers) == 1 else f"hosts {listed}"


def _shown(name: str, value: Any) -> str:
    if name in NOT_OPTIONS:
        return f"the {NOT_OPTIONS[name]} {value}"
    return f"--{name.replace('_', '-')} {value}"


def _sources() -> str:
    """Tells our own sources apart where two of them have the same version, as in a checkout."""
    digest = hashlib.sha256()
    folder = Path(paceline.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
