"""Join the world of ranks that a launcher (Paceline's, torchrun, Slurm) describes in the environment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d, rendezvous  # type: ignore[attr-defined]

from paceline.comm.network import LOOPBACK, choose_interface
from paceline.comm.stores.rank_handshake import shake_hands
from paceline.comm.stores.signed import SignedStore
from paceline.config import launched
from paceline.errors import LaunchError
from paceline.measure.activity import ACTIVITY, IDLE
from paceline.signing import TOKEN_VARIABLE, Signer, job_signer


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks of the launch."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    interface: str
    """Network interface that Gloo uses."""
    ranks_sharing_cores: int
    """Ranks that share this rank's cores: all ranks of its host, unless each is bound to separate cores."""
    store: Store
    """Store for messages between ranks without a collective operation; idle ranks wait on it."""

    def announce(self, key: str, value: str = "done") -> None:
        """Publish a value to all ranks."""
        self.store.set(key, value)

    def wait_for(self, key: str, poll_s: float = 0.1) -> str:
        """Wait for an announced value and return it. There is no time-out: on a failure the launcher ends this rank."""
        with ACTIVITY.doing(IDLE):
            while not self.store.check([key]):
                time.sleep(poll_s)
        value: bytes = self.store.get(key)
        return value.decode()


BeforeConnect = Callable[[Store, int, int, str], None]
"""Called when the store is reachable, before ranks connect to each other: store, rank, world size, interface."""


def join_world(*, timeout_s: float, iface: str | None = None, before_connect: BeforeConnect | None = None) -> World:
    """Create the default process group: Gloo over all ranks, for coordination. Each run creates its own groups later.

    Without a launcher, this is a world of one rank, which needs no network.
    """
    timeout = timedelta(seconds=timeout_s)
    if not launched():
        # Even a group of one rank binds an address. Gloo's default, that of the host name, may not exist.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", iface or "lo")
        store: Store = HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        return World(
            0,
            1,
            local_rank=0,
            local_size=1,
            interface=os.environ["GLOO_SOCKET_IFNAME"],
            ranks_sharing_cores=1,
            store=store,
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    given = iface or os.environ.get("GLOO_SOCKET_IFNAME")
    interface = given or choose_interface(master, all_on_this_host=local_size == size).name
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    store = _launch_store(rank, size, timeout)
    if before_connect is not None:
        before_connect(PrefixStore("before_connect", store), rank, size, interface)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return World(
        rank,
        size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=local_size,
        interface=interface,
        ranks_sharing_cores=ranks_sharing_cores(size),
        store=PrefixStore("paceline", store),
    )


def ranks_sharing_cores(world_size: int) -> int:
    """Return the number of ranks that share this rank's cores, as the launcher tells it."""
    return int(os.environ.get("PACELINE_SHARING", os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def leave_world() -> None:
    """Destroy all process groups of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class _LaunchStore:
    """Store of the launcher, which this process keeps until it ends: it may leave the world and join it again."""

    store: Store
    joins: int = field(default=0)


_launch_stores: dict[tuple[str | None, ...], _LaunchStore] = {}
"""Stores by the values of the environment that describe the launch."""


def _launch_store(rank: int, size: int, timeout: timedelta) -> Store:
    """Return the launcher's store, in each world with another prefix: the keys of an earlier world are still in it.

    All ranks join the same worlds in the same order, so they count alike. With a key or a token, its values are signed.
    """
    launch = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    if launch not in _launch_stores:
        try:
            opened = next(rendezvous("env://", timeout=timeout))[0]
        except dist.DistNetworkError as error:
            where = f"{os.environ.get('MASTER_ADDR', LOOPBACK)}:{os.environ.get('MASTER_PORT')}"
            raise LaunchError(
                f"rank {rank} cannot reach the master at {where}: {error}",
                hint="check that the command runs on the master, too, and that no firewall blocks the port",
            ) from None
        _launch_stores[launch] = _LaunchStore(_signed(opened, rank, size, timeout))
    launched_store = _launch_stores[launch]
    launched_store.store.set_timeout(timeout)
    launched_store.joins += 1
    return PrefixStore(f"world-{launched_store.joins}", launched_store.store)


def _signed(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a store whose values are signed, so that nobody else can take a rank's place in it.

    The key is that of the job, or follows from the token that the user gives to torchrun's ranks. Without both, values
    are not signed.
    """
    signer, token = job_signer(), os.environ.pop(TOKEN_VARIABLE, "")
    if signer is not None:
        while isinstance(
            store, PrefixStore
        ):  # The launcher, which signs with the same key, knows no prefix of torch's.
            store = store.underlying_store
    elif token:
        signer = shake_hands(store, Signer(token.encode()), rank, size, timeout.total_seconds())
    return store if signer is None else SignedStore(store, signer, lambda text: print(text, file=sys.stderr))


@dataclass
class _SharedWorld:
    """World that `share_world` has joined, and the number of its users."""

    group: dist.ProcessGroup
    users: int = 0


_shared_worlds: list[_SharedWorld] = []
"""The world that `share_world` has joined, if any; the program may have left it since."""


def share_world(*, timeout_s: float) -> Callable[[], None]:
    """Join the world, unless this process has; return the function to call when it is not needed any more.

    The last of several users leaves the world. A world that the program itself has joined is never left.
    """
    if not dist.is_initialized():
        join_world(timeout_s=timeout_s)
        _shared_worlds[:] = [_SharedWorld(distributed_c10d._get_default_group())]
    shared = next((world for world in _shared_worlds if _is_current(world)), None)
    if shared is None:
        return lambda: None
    shared.users += 1

    def stop_sharing() -> None:
        shared.users -= 1
        if not shared.users and _is_current(shared):
            leave_world()

    return stop_sharing


def _is_current(world: _SharedWorld) -> bool:
    return dist.is_initialized() and distributed_c10d._get_default_group() is world.group
