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
from paceline.launch.mail import POLL_S, Mail
from paceline.launch.seat import Hello, Say, Seat
from paceline.measure.host import network_id
from paceline.records.provenance import version_of

PATIENCE_S = 2.0
"""How long a host waits before it says for whom."""
HEARING_S = 3.0
NOT_OPTIONS = {
    "command": "command",
    "workload": "workload",
    "script_args": "script's arguments",
    "own_code": "user's code",
}
"""What settings are called that are not options."""


def hello_of(seat: Seat, address: str, settings: Mapping[str, Any]) -> Hello:
    """What this process says of itself."""
    return Hello(
        seat=seat.number,
        node=seat.node,
        local_rank=seat.local_rank,
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


def meet(mail: Mail, seat: Seat, own: Hello, timeout_s: float, say: Say) -> list[Hello]:
    """Waits for all the others; all of them, in order, once they are known to fit. Raises, on every host, if not."""
    if mail.count(_taken(seat)) > 1:
        mail.count(_taken(seat), by=-1)
        raise LaunchError(
            f"another host was started with --node-rank {seat.number}.",
            hint=f"each of the {seat.seats} hosts has a number of its own, from 0 to {seat.seats - 1}",
        )
    try:
        mail.post(f"hello-{seat.number}", asdict(own))
        return _welcome(mail, seat, own, timeout_s, say) if seat.leads else _hear_the_verdict(mail, seat, timeout_s)
    except BaseException:
        with suppress(LaunchError):
            mail.count(_taken(seat), by=-1)  # Who comes back finds the number free.
        raise


def _taken(seat: Seat) -> str:
    return f"taken-{seat.number}"


def _welcome(mail: Mail, seat: Seat, own: Hello, timeout_s: float, say: Say) -> list[Hello]:
    hellos = _hear_all(mail, seat, own, timeout_s, say)
    reason = misfit(hellos)
    refusal = None if reason is None else {"message": reason.message, "hint": reason.hint}
    mail.post("welcome", {"refusal": refusal, "hellos": [asdict(hello) for hello in hellos]})
    if reason is not None:
        for hello in hellos[1:]:  # With us goes the store: they have to have heard it.
            mail.wait(f"heard-{hello.seat}", within_s=HEARING_S)
        raise reason
    return hellos


def read_hello(said: Mapping[str, Any]) -> Hello:
    """What another host said, in the words of its own version: what it leaves out is empty, the rest is not ours."""
    empty = Hello(0, 0, 0, "unknown", "", "", {}, [], {})
    return Hello(**{field.name: said.get(field.name, getattr(empty, field.name)) for field in fields(Hello)})


def misfit(hellos: Sequence[Hello]) -> LaunchError | None:
    """Why these hosts cannot work together, if they cannot."""
    first = hellos[0]
    for other in hellos[1:]:
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


def _hear_all(mail: Mail, seat: Seat, own: Hello, timeout_s: float, say: Say) -> list[Hello]:
    began = time.monotonic()
    said = False
    waiting = set(range(seat.seats)) - {seat.number}
    found = {seat.number: own}
    while waiting:
        for number in sorted(waiting):
            if mail.has(f"hello-{number}"):
                found[number] = read_hello(mail.read(f"hello-{number}"))
        waiting -= found.keys()
        waited_s = time.monotonic() - began
        if waiting and waited_s > timeout_s:
            raise LaunchError(
                f"{_listed(waiting)} of {seat.seats} did not come to {mail.where} within {timeout_s:g} s.",
                hint=f"start the same command on all {seat.seats} hosts, each with its own --node-rank; "
                "--timeout waits longer",
            )
        if waiting and waited_s > PATIENCE_S and not said:
            say(f"waiting at {mail.where} for {_listed(waiting)} of {seat.seats} …")
            said = True
        time.sleep(POLL_S)
    return [found[number] for number in sorted(found)]


def _hear_the_verdict(mail: Mail, seat: Seat, timeout_s: float) -> list[Hello]:
    if not mail.wait("welcome", within_s=timeout_s + 5):
        raise LaunchError(f"host 0 at {mail.where} did not answer host {seat.number} within {timeout_s:g} s.")
    verdict = mail.read("welcome")
    mail.post(f"heard-{seat.number}", None)
    if verdict["refusal"] is not None:
        raise LaunchError(verdict["refusal"]["message"], hint=verdict["refusal"]["hint"])
    return [read_hello(entry) for entry in verdict["hellos"]]


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
