"""Joins the world of ranks that a launcher (ours, torchrun, Slurm) described in the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from paceline.comm.network import LOOPBACK, choose_interface
from paceline.config import launched
from paceline.errors import LaunchError


@dataclass(frozen=True)
class World:
    """Who this rank is among all ranks of the launch."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    interface: str
    """The network interface Gloo uses."""
    sharing: int
    """Ranks that share this one's cores: all of its host, unless each is bound to cores of its own."""
    store: Store
    """Where ranks leave word for each other without a collective: idle ones wait here."""

    def announce(self, key: str, word: str = "done") -> None:
        """Says something to all ranks."""
        self.store.set(key, word)

    def wait_for(self, key: str, poll_s: float = 0.1) -> str:
        """What was announced; waits as long as it takes. The launcher ends us if the rank that would say so dies."""
        while not self.store.check([key]):
            time.sleep(poll_s)
        word: bytes = self.store.get(key)
        return word.decode()


Meet = Callable[[Store, int, int, str], None]
"""What ranks do when they can leave word for each other, and before they connect: store, rank, size, interface."""


def join_world(*, timeout_s: float, iface: str | None = None, meet: Meet | None = None) -> World:
    """Creates the default process group: Gloo over all ranks, for coordination; a run's own groups come on top.

    Without a launcher this is a world of one, which needs no network at all.
    """
    timeout = timedelta(seconds=timeout_s)
    if not launched():
        # Even a group of one binds an address, and Gloo's choice, the host name's, may not exist.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", iface or "lo")
        store: Store = HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        return World(
            0, 1, local_rank=0, local_size=1, interface=os.environ["GLOO_SOCKET_IFNAME"], sharing=1, store=store
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    given = iface or os.environ.get("GLOO_SOCKET_IFNAME")
    interface = given or choose_interface(master, all_on_this_host=local_size == size).name
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        where = f"{master}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(f"rank {rank} cannot reach the master at {where}: {error}") from None
    if meet is not None:
        meet(PrefixStore("meet", store), rank, size, interface)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return World(
        rank,
        size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=local_size,
        interface=interface,
        sharing=int(os.environ.get("PACELINE_SHARING", local_size)),
        store=PrefixStore("paceline", store),
    )


def leave_world() -> None:
    """Tears down every process group of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
