"""Where the processes that start ranks meet: at a store of host 0's, or at torchrun's.

A host name may resolve to a loopback address on the host that has it (Debian writes 127.0.1.1 into /etc/hosts): what
listens there hears nobody else (pytorch#15592).
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.network import LOOPBACK, addresses_of_name, is_loopback, reachable_addresses, source_address
from paceline.errors import LaunchError
from paceline.launch import rendezvous
from paceline.launch.launcher_process import LauncherProcess, Notify
from paceline.launch.store_channel import StoreChannel

RETRY_S = 0.2
CONNECT_S = 5.0


def open_channel(launcher: LauncherProcess, timeout_s: float, notify: Notify) -> tuple[StoreChannel, str]:
    """The store that all seats meet at, and this host's address on the way to it."""
    if launcher.master is None:
        return _torchrun_channel(timeout_s)
    name, port = rendezvous.parse_master(launcher.master)
    if launcher.leads:
        address = own_address(name, notify)
        listener: socket.socket | None = rendezvous.bind(address, port)
    else:
        address, listener = _reach(name, port, launcher, timeout_s), None
    store = rendezvous.open_store(address, port, listener, timedelta(seconds=timeout_s))
    return StoreChannel(store, rendezvous.endpoint(address, port)), source_address(address)


def own_address(master: str, notify: Notify) -> str:
    """The address of this host that others reach when they look for the master, which this host is."""
    addresses = addresses_of_name(master)
    outer = [address for address in addresses if not is_loopback(address)]
    if outer or not _leads_home(master, addresses):
        return outer[0] if outer else LOOPBACK if LOOPBACK in addresses else master
    reachable = reachable_addresses()
    found = f"{master} resolves to {addresses[0]}, which other hosts cannot reach"
    if len(reachable) != 1:
        choice = f"give the address itself, one of {', '.join(reachable)}" if reachable else "this host has no other"
        raise LaunchError(f"--master: {found}.", hint=choice)
    notify(f"{found}: this host listens on {reachable[0]}")
    return reachable[0]


def _reach(name: str, port: int, launcher: LauncherProcess, timeout_s: float) -> str:
    """The address at which host 0 answers; it may not have started yet."""
    addresses = addresses_of_name(name)
    if not addresses:
        raise LaunchError(f"there is no address for the master {name!r}.", hint="give its address in --master")
    if _leads_home(name, addresses):  # Then host 0, which is this machine too, listens elsewhere.
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
    home = all(map(is_loopback, addresses_of_name(name))) and not is_loopback(name) and name != "localhost"
    raise LaunchError(
        f"host {launcher.number} cannot reach host 0 at {name}:{port}: {found}.",
        hint=f"{name} leads to this host itself: give host 0's address in --master"
        if home
        else f"start the same command on all {launcher.launchers} hosts, host 0 too, and open the port between them",
    )


def _leads_home(name: str, addresses: list[str]) -> bool:
    """Whether a host's own name is a loopback address to it; what the user writes as one is taken at its word."""
    return name != "localhost" and name not in addresses and bool(addresses) and all(map(is_loopback, addresses))


def _torchrun_channel(timeout_s: float) -> tuple[StoreChannel, str]:
    from torch.distributed.rendezvous import rendezvous as env_rendezvous

    master, port = os.environ.get("MASTER_ADDR", LOOPBACK), os.environ.get("MASTER_PORT", "")
    try:
        store: Store
        store, _, _ = next(env_rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:  # ValueError: a variable is missing, or is not what it should be.
        found = str(error).splitlines()[0]
        raise LaunchError(
            f"the launcher's ranks cannot meet at {master}:{port}: {found}",
            hint="RANK and WORLD_SIZE are set, as torchrun does; unset them for a launch of Paceline's own",
        ) from None
    return StoreChannel(store, f"{master}:{port}"), source_address(master)
