"""Where ranks meet: a store that listens on the one address needed, and not on all of them as torch's own does."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.comm.network import LOOPBACK
from paceline.errors import LaunchError

BACKEND = "paceline"
POLL_S = 0.1

Failed = Callable[[], bool]
"""Whether a host has said that its ranks failed."""


class WatchfulStore(PrefixStore):
    """A store for torch's launcher that does not let it wait for the end of hosts that have failed."""

    def __init__(self, prefix: str, store: Store, failed: Failed) -> None:
        super().__init__(prefix, store)
        self._failed = failed

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there, or a host has failed."""
        patience: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + patience.total_seconds()
        while not self.check(keys):
            if self._failed():
                raise RuntimeError("another host has failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody has set {', '.join(keys)}")
            time.sleep(POLL_S)

    def get(self, key: str) -> bytes:
        """What was set under a key, once it is."""
        self.wait([key])
        return bytes(super().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The same for several."""
        self.wait(keys)
        return list(super().multi_get(keys))


class BoundRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, at a store that host 0 has already opened."""

    def __init__(self, params: RendezvousParameters, store: Store | None, failed: Failed) -> None:
        address, port = parse_rendezvous_endpoint(params.endpoint, -1)
        super().__init__(
            address, port, int(params.config["rank"]), params.max_nodes, params.run_id, int(params.config["timeout"])
        )
        self._store = store
        self._failed = failed

    def get_backend(self) -> str:
        """The name it is registered under."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Connects to the store, but on host 0, which has it."""
        if self._store is None:
            self._store = open_store(self.master_addr, self.master_port, None, self.timeout)
        store = WatchfulStore(self.run_id, self._store, self._failed)
        return RendezvousInfo(
            store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )


def open_store(address: str, port: int, listener: socket.socket | None, timeout: timedelta) -> TCPStore:
    """The store that listens on a socket, or, without one, a client of it."""
    return TCPStore(
        address,
        port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        # The store closes the descriptor it is given; ours is closed by Python.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def bind(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Binds an address, or a free port on the loopback one, before anything is started."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=512)
    except socket.gaierror as error:
        raise LaunchError(
            f"there is no address for the master {address!r}: {error.strerror}.", hint="give its address in --master"
        ) from None
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {address}:{port}: {os.strerror(error.errno or 0)}.",
            hint="another program has the port: choose another with --master"
            if error.errno == errno.EADDRINUSE
            else "host 0 has to have the address that --master names",
        ) from None


def parse_master(master: str) -> tuple[str, int]:
    """Splits ADDRESS:PORT."""
    address, _, port = master.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"--master {master!r} is not ADDRESS:PORT.", hint="write it as 198.18.0.1:29500")
    return address.strip("[]"), int(port)


def endpoint(address: str, port: int) -> str:
    """As ADDRESS:PORT, of either kind of address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def register(store: Store | None, failed: Failed) -> None:
    """Makes `BACKEND` known to the elastic launcher, with the store that host 0 has opened, or none on the others."""

    def create(params: RendezvousParameters) -> RendezvousHandler:
        return BoundRendezvous(params, store, failed)

    rendezvous_handler_registry._registry.pop(BACKEND, None)
    rendezvous_handler_registry.register(BACKEND, create)
