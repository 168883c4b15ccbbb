"""Rendezvous of a job's ranks: a store that listens on one address only, unlike torch's, which listens on all."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from paceline.comm.stores.signed import SignedStore
from paceline.config.whole_number import whole_number
from paceline.errors import LaunchError
from paceline.formatting import short_seconds
from paceline.signing import Signer

BACKEND = "paceline"
POLL_S = 0.1

FailureCheck = Callable[[], float | None]
"""Function that returns None until ranks of another launcher fail, then the seconds in which this launcher's ranks may
detect that by themselves."""


class FailureAwareStore(PrefixStore):
    """Store for torch's launcher whose waits end when ranks of another launcher fail.

    Counters are values of the launchers, each of which adds once: values are signed, a counter of torch's store is not.
    """

    def __init__(self, prefix: str, store: Store, rank: int, launchers: int, remote_failed: FailureCheck) -> None:
        super().__init__(prefix, store)
        self._rank, self._launchers = rank, launchers
        self._remote_failed = remote_failed

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum so far. The last launcher to add sees the values of all."""
        self.set(f"{key}-{self._rank}", str(amount))
        keys = [f"{key}-{launcher}" for launcher in range(self._launchers)]
        return sum(int(self.get(one)) for one in keys if self.check([one]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raise `RuntimeError` on time-out, or if ranks of another launcher failed."""
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if self._remote_failed() is not None:
                raise RuntimeError("ranks of another launcher failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no process set {', '.join(keys)} within {short_seconds(limit.total_seconds())}")
            time.sleep(POLL_S)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        self.wait([key])
        return bytes(super().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several keys; return their values."""
        self.wait(keys)
        return list(super().multi_get(keys))


class BoundRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, with a store that the leader has already opened."""

    def __init__(
        self, params: RendezvousParameters, store: Store | None, signer: Signer, remote_failed: FailureCheck
    ) -> None:
        address, port = parse_rendezvous_endpoint(params.endpoint, -1)
        super().__init__(
            address, port, int(params.config["rank"]), params.max_nodes, params.run_id, int(params.config["timeout"])
        )
        self._store, self._signer = store, signer
        self._remote_failed = remote_failed

    def get_backend(self) -> str:
        """Return the name under which it is registered."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rendezvous; connect to the store unless this process opened it."""
        if self._store is None:
            client = open_store(self.master_addr, self.master_port, None, self.timeout)
            self._store = SignedStore(client, self._signer)
        store = FailureAwareStore(self.run_id, self._store, self.rank, self.world_size, self._remote_failed)
        return RendezvousInfo(
            store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )


def open_store(address: str, port: int, listener: socket.socket | None, timeout: timedelta) -> TCPStore:
    """Return a store that listens on a socket, or without a socket a client of the store at the address."""
    return TCPStore(
        address,
        port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        # The store closes the descriptor, so Python must not.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def bind(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that listens on an address; by default a free port of the loopback address."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=512)
    except socket.gaierror as error:
        raise LaunchError(
            f"the host name {address!r} in --master cannot be resolved: {error.strerror}.",
            hint="use the IP address of host 0 in --master",
        ) from None
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {address}:{port}: {os.strerror(error.errno or 0)}.",
            hint="another program uses the port: choose another port in --master"
            if error.errno == errno.EADDRINUSE
            else "--master must name an address of host 0",
        ) from None


def parse_master(master: str) -> tuple[str, int]:
    """Split ADDRESS:PORT into address and port."""
    address, _, written = master.rpartition(":")
    port = whole_number(written)
    if not address.strip("[]") or port is None or not 0 < port < 65536:
        raise LaunchError(f"--master {master!r} is not ADDRESS:PORT.", hint="write it as 198.18.0.1:29500")
    return address.strip("[]"), port


def format_endpoint(address: str, port: int) -> str:
    """Return ADDRESS:PORT; an IPv6 address gets brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@contextmanager
def registered(store: Store | None, signer: Signer, remote_failed: FailureCheck) -> Iterator[None]:
    """Register `BACKEND` with the elastic launcher for the duration of a `with` block.

    `store` is the leader's open store, or None on followers. The registry does not keep it: its port must be free for
    the next job. `signer` signs what launchers write to the store.
    """

    def create(params: RendezvousParameters) -> RendezvousHandler:
        return BoundRendezvous(params, store, signer, remote_failed)

    rendezvous_handler_registry.register(BACKEND, create)
    try:
        yield
    finally:
        rendezvous_handler_registry._registry.pop(BACKEND, None)
