"""Where hosts meet: a store that listens on the one address needed, and not on all of them as torch's own does."""

from __future__ import annotations

import errno
import os
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
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


class BoundRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, on a socket that host 0 has already bound."""

    def __init__(self, params: RendezvousParameters, listener: socket.socket | None) -> None:
        address, port = parse_rendezvous_endpoint(params.endpoint, -1)
        super().__init__(
            address, port, int(params.config["rank"]), params.max_nodes, params.run_id, int(params.config["timeout"])
        )
        self._listener = listener

    def get_backend(self) -> str:
        """The name it is registered under."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store on host 0, connects to it on the others."""
        if self._store is None:
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                is_master=self._listener is not None,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
                # The store closes the descriptor it is given; ours is closed by Python.
                master_listen_fd=None if self._listener is None else self._listener.detach(),
            )
        store = PrefixStore(self.run_id, self._store)
        return RendezvousInfo(
            store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )


def bind(master: str | None) -> socket.socket:
    """Binds the address of `ADDRESS:PORT`, or a free port on the loopback address, before anything is started."""
    address, port = parse_master(master) if master else (LOOPBACK, 0)
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


def register(listener: socket.socket | None) -> None:
    """Makes `BACKEND` known to the elastic launcher, on this socket (host 0) or on none (the others)."""

    def create(params: RendezvousParameters) -> RendezvousHandler:
        return BoundRendezvous(params, listener)

    rendezvous_handler_registry._registry.pop(BACKEND, None)
    rendezvous_handler_registry.register(BACKEND, create)
