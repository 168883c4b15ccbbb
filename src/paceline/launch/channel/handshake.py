"""Handshake of the launcher processes before any rank starts: all must be present, with equal versions and settings.

A host with another version of Paceline or torch, or with other settings, would make the others hang or change what is
measured. The launch is refused with an error that names the host.

Every message is signed with the token, which itself is never sent, and nonces prove that it is not a recorded one:

    leader      challenge       its nonce
    follower    hello           its nonce and info, signed for the challenge
    leader      result          all nonces and infos, signed for the challenge

A follower accepts the result that contains its own nonce. All nonces together give the key of the launch, with which
later messages are signed. A process without the token can neither join nor answer as the leader; it can only make the
processes wait.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.errors import LaunchError
from paceline.formatting import short_seconds
from paceline.launch.channel.store_channel import POLL_S, StoreChannel
from paceline.launch.faults.failures import error_from_info, error_to_info
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Notify
from paceline.measure.host import network_id
from paceline.records.failure import ErrorInfo
from paceline.records.provenance import version_of
from paceline.signing import Signer, new_nonce
from paceline.user_code import sources_digest

CHALLENGE = "handshake-challenge"
"""Key of the leader's nonce."""
SAME_NUMBER_S = 2.0
"""Seconds after which another process with this launcher's number is not a message that someone repeats: the leader
would have replaced the challenge."""
NOTIFY_AFTER_S = 2.0
"""Seconds of waiting after which the leader shows which hosts are missing."""
RESULT_READ_S = 10.0
"""Seconds that the leader waits for each follower to read the result, and posts it again if someone destroys it. A busy
host takes seconds; only a follower that ended in the meantime takes longer."""
RESULT = "handshake-result"
"""Key of the leader's `HandshakeResult`, for all followers."""
SAME_TOKEN_HINT = "give all hosts the same token, in a --token-file that is copied to each or in PACELINE_TOKEN"
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
    nonces: list[str]
    """Nonce of every launcher, ordered by number."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a follower to the challenge."""

    nonce: str
    info: LauncherInfo


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

    Also raise `LaunchError` if a launcher is missing after `timeout_s`, or if two have the same number. Afterwards the
    channel signs with the key of the launch.
    """
    if launcher.is_leader:
        return _lead_handshake(channel, launcher, own, timeout_s, notify)
    return _Answer(channel, launcher, Hello(nonce=new_nonce(), info=own)).wait(timeout_s)


def _hello_key(launcher: int) -> str:
    return f"hello-{launcher}"


def _result_read_key(launcher: int) -> str:
    return f"{RESULT}-read-{launcher}"


def _signers(channel: StoreChannel, challenge: str) -> tuple[Signer, Signer]:
    """Return the signers of hellos and of the result in answer to a challenge."""
    return channel.signer.derive("hello", challenge), channel.signer.derive("result", challenge)


def _lead_handshake(
    channel: StoreChannel, launcher: LauncherProcess, own: LauncherInfo, timeout_s: float, notify: Notify
) -> list[LauncherInfo]:
    challenge = new_nonce()
    _, signer = _signers(channel, challenge)
    hellos = _collect_hellos(channel, launcher, Hello(nonce=challenge, info=own), timeout_s, notify)
    launcher_infos, nonces = [hello.info for hello in hellos], [hello.nonce for hello in hellos]
    error = find_mismatch(launcher_infos)
    refusal = None if error is None else error_to_info(error)
    result = HandshakeResult(refusal=refusal, launcher_infos=launcher_infos, nonces=nonces)
    key_of_launch = channel.signer.derive("launch", *nonces)
    for follower in range(1, launcher.launchers):  # If there is an error, the store ends with this process.
        deadline = time.monotonic() + RESULT_READ_S
        while not channel.find(_result_read_key(follower), bool, key_of_launch) and time.monotonic() < deadline:
            _post_unless_there(channel, CHALLENGE, challenge)
            _post_unless_there(channel, RESULT, result, signer)
            time.sleep(POLL_S)
    channel.signer = key_of_launch
    if error is not None:
        raise error
    return launcher_infos


def _post_unless_there(channel: StoreChannel, key: str, message: Any, signer: Signer | None = None) -> None:
    """Post a message, at first and if another program has overwritten or deleted it."""
    if channel.find(key, type(message), signer) != message:
        channel.post(key, message, signer)


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


def _collect_hellos(
    channel: StoreChannel, launcher: LauncherProcess, own: Hello, timeout_s: float, notify: Notify
) -> list[Hello]:
    """Return the hellos of all launchers, ordered by number; `own` is the leader's, whose nonce is the challenge."""
    start_s = time.monotonic()
    notified = False
    signer, _ = _signers(channel, own.nonce)
    missing = set(range(launcher.launchers)) - {launcher.number}
    found = {launcher.number: own}
    while missing:
        _post_unless_there(channel, CHALLENGE, own.nonce)
        for number in range(1, launcher.launchers):  # A host that was started again has another nonce than before.
            hello = channel.find(_hello_key(number), Hello, signer)
            if hello is not None:
                found[number] = hello
        missing -= found.keys()
        waited_s = time.monotonic() - start_s
        if missing and waited_s > timeout_s:
            raise _missing_hosts(channel, missing, launcher.launchers, timeout_s)
        if missing and waited_s > NOTIFY_AFTER_S and not notified:
            notify(f"waiting at {channel.endpoint} for {_format_hosts(missing)} of {launcher.launchers} …")
            notified = True
        time.sleep(POLL_S)
    return [found[number] for number in sorted(found)]


def _missing_hosts(channel: StoreChannel, missing: set[int], launchers: int, timeout_s: float) -> LaunchError:
    refused = {number for number in missing if _hello_key(number) in channel.ignored}
    found = f"{_format_hosts(missing)} of {launchers} did not connect to {channel.endpoint} within "
    found += short_seconds(timeout_s)
    if refused:
        return LaunchError(
            f"{found}; a process without the token of this launch tried to connect as {_format_hosts(refused)}.",
            hint=SAME_TOKEN_HINT,
        )
    return LaunchError(
        f"{found}.",
        hint=f"start the same command on all {launchers} hosts, each with a different --node-rank; "
        "increase --timeout if they start slowly",
    )


@dataclass
class _Answer:
    """Answer of a follower to the challenge, and its wait for the result."""

    channel: StoreChannel
    launcher: LauncherProcess
    own: Hello
    _same_number_since: tuple[str, float] | None = None
    """Challenge under which another process has this launcher's number, and since when."""

    def wait(self, timeout_s: float) -> list[LauncherInfo]:
        """Answer each challenge until a result contains the nonce of this process; return the infos of all."""
        deadline = time.monotonic() + timeout_s + 5
        try:
            while (result := self._result()) is None:
                if time.monotonic() > deadline:
                    raise self._no_answer(timeout_s)
                time.sleep(POLL_S)
        except BaseException:
            with suppress(LaunchError):
                self._withdraw()  # A host that is started again can use the number.
            raise
        self.channel.signer = self.channel.signer.derive("launch", *result.nonces)
        self.channel.post(_result_read_key(self.launcher.number), True)
        if result.refusal is not None:
            raise error_from_info(result.refusal)
        return result.launcher_infos

    def _result(self) -> HandshakeResult | None:
        """Return the result, if it is an answer to this process; otherwise answer the challenge, if that is needed."""
        challenge = self.channel.find(CHALLENGE, str)
        if challenge is None:
            return None
        hello_signer, result_signer = _signers(self.channel, challenge)
        number, own = self.launcher.number, self.own.nonce
        result = self.channel.find(RESULT, HandshakeResult, result_signer)
        hello = self.channel.find(_hello_key(number), Hello, hello_signer)
        if result is not None and result.nonces[number : number + 1] == [own]:
            return result
        if result is not None or (hello is not None and hello.nonce != own):
            self._wait_for_other(challenge)
        elif hello is None:
            self._same_number_since = None
            self.channel.post(_hello_key(number), self.own, hello_signer)
        return None

    def _wait_for_other(self, challenge: str) -> None:
        """Raise `LaunchError` if another process has had this launcher's number for some time."""
        if self._same_number_since is None or self._same_number_since[0] != challenge:
            self._same_number_since = challenge, time.monotonic()
        if time.monotonic() > self._same_number_since[1] + SAME_NUMBER_S:
            raise LaunchError(
                f"another host was started with --node-rank {self.launcher.number}.",
                hint=f"give each of the {self.launcher.launchers} hosts a different --node-rank, from 0 to "
                f"{self.launcher.launchers - 1}",
            )

    def _withdraw(self) -> None:
        challenge, key = self.channel.find(CHALLENGE, str), _hello_key(self.launcher.number)
        if challenge is not None:
            hello = self.channel.find(key, Hello, _signers(self.channel, challenge)[0])
            if hello is not None and hello.nonce == self.own.nonce:
                self.channel.withdraw(key)

    def _no_answer(self, timeout_s: float) -> LaunchError:
        found = f"host 0 at {self.channel.endpoint} did not answer host {self.launcher.number} within "
        found += short_seconds(timeout_s)
        if {CHALLENGE, RESULT} & self.channel.ignored:
            return LaunchError(f"{found} with the token of this launch.", hint=SAME_TOKEN_HINT)
        return LaunchError(
            f"{found}.", hint="see the output of the command on host 0; increase --timeout if other hosts start slowly"
        )


def _format_hosts(numbers: set[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)))
    return f"host {listed}" if len(numbers) == 1 else f"hosts {listed}"


def _format_setting(name: str, value: Any) -> str:
    if name in NOT_OPTIONS:
        return f"the {NOT_OPTIONS[name]} {value}"
    return f"--{name.replace('_', '-')} {value}"
