"""Control store of a launch: the key-value store through which launcher processes communicate.

Host 0 opens it, or torchrun does. A host's own name may resolve to a loopback address on that host (Debian writes
127.0.1.1 into /etc/hosts). A store that listens on a loopback address cannot be reached from other hosts
(pytorch#15592).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, Queue

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.network import LOOPBACK, addresses_of_name, is_loopback, reachable_addresses, source_address
from paceline.errors import LaunchError
from paceline.launch import rendezvous
from paceline.launch.channel.store_channel import StoreChannel
from paceline.launch.channel.token import NO_TOKEN, TokenSource
from paceline.launch.launcher_process import LauncherProcess, Notify
from paceline.signing import Signer

RETRY_S = 0.2
CONNECT_S = 5.0


@dataclass(frozen=True)
class ControlStore:
    """An open control store."""

    store: Store
    endpoint: str
    """ADDRESS:PORT."""
    own_address: str
    """Address of this host on the route to it."""


def open_channel(
    launcher: LauncherProcess, token: TokenSource, timeout_s: float, notify: Notify
) -> tuple[StoreChannel, str]:
    """Open or connect to the control store; return its channel and this host's address on the route to it.

    Launchers on one host find the token of the launch that listens on the port: the leader makes it before it listens,
    and a follower looks for it once it can connect.
    """
    if launcher.is_leader:
        token.find()
    opened = _open_torchrun_store(timeout_s) if launcher.master is None else _open_store(launcher, timeout_s, notify)
    secret = token.find()
    if secret is None and (launcher.is_leader or launcher.started_by == "paceline"):
        notify(NO_TOKEN.format(endpoint=opened.endpoint))
    # Without a token, signatures only tell apart launches and jobs: anyone can make them.
    signer = Signer((secret or "").encode()).derive("handshake")
    return StoreChannel(opened.store, opened.endpoint, signer, notify), opened.own_address


def _open_store(launcher: LauncherProcess, timeout_s: float, notify: Notify) -> ControlStore:
    name, port = rendezvous.parse_master(launcher.master or "")
    if launcher.is_leader:
        address = leader_address(name, notify)
        listener = rendezvous.bind(address, port)
        store: Store = rendezvous.open_store(address, port, listener, timedelta(seconds=timeout_s))
    else:
        address = _reachable_leader_address(name, port, launcher, timeout_s)
        store = _connect(address, port, timeout_s)
    return ControlStore(store, rendezvous.format_endpoint(address, port), source_address(address))


def _connect(address: str, port: int, timeout_s: float) -> Store:
    """Return a client of the store of host 0; raise `LaunchError` if another program listens there.

    torch waits for the first answer without a time-out, so a thread does that.
    """
    answers: Queue[Store | RuntimeError] = Queue()

    def connect() -> None:
        try:
            answers.put(rendezvous.open_store(address, port, None, timedelta(seconds=timeout_s)))
        except RuntimeError as error:
            answers.put(error)

    threading.Thread(target=connect, daemon=True, name="paceline-connect").start()
    with suppress(Empty):
        answer = answers.get(timeout=timeout_s + CONNECT_S)
        if isinstance(answer, Store):
            return answer
    raise LaunchError(
        f"a program accepts connections at {rendezvous.format_endpoint(address, port)}, but it is not host 0 of a "
        "launch.",
        hint="find out which program uses the port on host 0, or choose another port in --master on all hosts",
    )


def leader_address(master: str, notify: Notify) -> str:
    """Return the address on which host 0, which is this host, listens for the other hosts.

    Raise `LaunchError` if the name resolves to a loopback address and this host has no or several other addresses.
    """
    addresses = addresses_of_name(master)
    outer = [address for address in addresses if not is_loopback(address)]
    if outer or not _resolves_to_loopback(master, addresses):
        return outer[0] if outer else LOOPBACK if LOOPBACK in addresses else master
    reachable = reachable_addresses()
    found = f"{master} resolves to {addresses[0]}, a loopback address that other hosts cannot reach"
    if len(reachable) != 1:
        choice = (
            f"use an address in --master: one of {', '.join(reachable)}"
            if reachable
            else "this host has no other address; connect it to the network of the other hosts"
        )
        raise LaunchError(f"--master: {found}.", hint=choice)
    notify(f"{found}; listening on {reachable[0]} instead")
    return reachable[0]


def _reachable_leader_address(name: str, port: int, launcher: LauncherProcess, timeout_s: float) -> str:
    """Return the address at which host 0 accepts connections; retry until the time-out, since it may start later."""
    addresses = addresses_of_name(name)
    if not addresses:
        raise LaunchError(
            f"the host name {name!r} in --master cannot be resolved.", hint="use the IP address of host 0 in --master"
        )
    if _resolves_to_loopback(name, addresses):  # Host 0 is then this machine too, and listens on another address.
        addresses += reachable_addresses()
    deadline = time.monotonic() + timeout_s
    while True:
        for address in addresses:
            try:
                with socket.create_connection((address, port), timeout=CONNECT_S):
                    return address
            except OSError as error:
                found = error.strerror or str(error)
        if time.monotonic() > deadline:
            break
        time.sleep(RETRY_S)
    loopback_only = all(map(is_loopback, addresses_of_name(name))) and not is_loopback(name) and name != "localhost"
    raise LaunchError(
        f"host {launcher.number} cannot reach host 0 at {name}:{port}: {found}.",
        hint=f"{name} resolves to this host itself: use the IP address of host 0 in --master"
        if loopback_only
        else f"start the same command on all {launcher.launchers} hosts, including host 0, and open port {port} in "
        "the firewall of host 0",
    )


def _resolves_to_loopback(name: str, addresses: list[str]) -> bool:
    """Return whether a host name resolves to loopback addresses only. False for `localhost` and for addresses."""
    return name != "localhost" and name not in addresses and bool(addresses) and all(map(is_loopback, addresses))


def _open_torchrun_store(timeout_s: float) -> ControlStore:
    from torch.distributed.rendezvous import rendezvous as env_rendezvous

    master, port = os.environ.get("MASTER_ADDR", LOOPBACK), os.environ.get("MASTER_PORT", "")
    try:
        store: Store
        store, _, _ = next(env_rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:  # ValueError: a variable is missing or invalid.
        found = str(error).splitlines()[0]
        raise LaunchError(
            f"cannot connect to torchrun's store at {master}:{port}: {found}",
            hint="RANK and WORLD_SIZE are set, so torchrun must have started this process; if it did not, unset both",
        ) from None
    return ControlStore(store, f"{master}:{port}", source_address(master))
