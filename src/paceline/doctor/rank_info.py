"""What a rank knows of its machine: the doctor has every rank tell it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.comm import Comm, World
from paceline.comm.clocks import ReadClock, measure_offsets
from paceline.comm.network import address_of, addresses_of_name, listen
from paceline.comm.texts import gather_json
from paceline.measure.capacity import available_memory_bytes, free_disk_bytes, memory_limits
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP
from paceline.measure.cores import affine_cores, cgroup_quota, usable_cores
from paceline.measure.host import boot_id, network_id
from paceline.records import provenance
from paceline.records.decode import build
from paceline.records.examination import RankInfo
from paceline.training.placement import Placement

REST_S = 0.3


def gather_rank_info(
    world: World, placement: Placement, comm: Comm, folder: Path, now: ReadClock = time.time
) -> list[RankInfo]:
    """The facts of every rank, on every rank, with their clocks compared."""
    own = {"network": network_id(), **own_rank_info(world, placement, folder)}
    comm.smallest(0)  # All ranks are at rest while they look at what others do.
    everyone = gather_json(own | {"busy_cores": busy_cores()}, comm)
    offsets = measure_offsets(comm, now)
    networks = list(dict.fromkeys(rank_info["network"] for rank_info in everyone))
    found = []
    for rank, (rank_info, offset) in enumerate(zip(everyone, offsets, strict=True)):
        host = networks.index(rank_info.pop("network"))
        clock = {"clock_offset_s": offset.offset_s, "clock_error_s": offset.error_s}
        found.append(build(RankInfo, rank_info | clock | {"rank": rank, "host": host}))
    return found


def busy_cores() -> float:
    """Cores' worth of time that is taken while this process sleeps."""
    return psutil.cpu_percent(REST_S) / 100 * (psutil.cpu_count() or 1)


def own_rank_info(world: World, placement: Placement, folder: Path) -> dict[str, Any]:
    """What this rank can tell without asking another."""
    address = address_of(world.interface)
    about = provenance()
    return {
        "host_name": platform.node(),
        "boot_id": boot_id(),
        "interface": world.interface,
        "address": address,
        "host_name_addresses": addresses_of_name(platform.node()),
        "bind_error": "it has no address" if address is None else _bind_error(address),
        "device": placement.device_name,
        "device_index": placement.device.index,
        "backend": placement.backend,
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count() or 1,
        "affinity": affine_cores(),
        "cpu_quota": cgroup_quota(SELF_CGROUP, CGROUP_ROOT),
        "cores": usable_cores(),
        "folder": str(folder.resolve()),
        "disk_free_bytes": free_disk_bytes(folder),
        "versions": {"python": about["python"], **about["versions"]},
        **_memory(placement.device),
    }


def _memory(device: torch.device) -> dict[str, int | None]:
    limits = memory_limits()
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    return {
        "memory_available_bytes": available_memory_bytes(limits, psutil.virtual_memory().available),
        "memory_limit_bytes": min([limit.limit_bytes for limit in limits], default=None),
        "resident_bytes": psutil.Process().memory_info().rss,
        "device_memory_bytes": total,
        "device_free_bytes": free,
    }


def _bind_error(address: str) -> str | None:
    try:
        listen(address).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
