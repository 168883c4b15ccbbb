"""Gather each rank's information about its machine: addresses, device, cores, memory, disk, versions."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import msgspec
import psutil
import torch

from paceline.comm import Comm, World
from paceline.comm.clocks import ReadClock, measure_offsets
from paceline.comm.messages.json_messages import gather_typed
from paceline.comm.network import address_of, addresses_of_name, listen
from paceline.measure.bf16_instructions import has_bf16_instructions
from paceline.measure.capacity import available_memory_bytes, free_disk_bytes, memory_limits
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP
from paceline.measure.cores import affine_cores, cgroup_quota, usable_cores
from paceline.measure.gpu_readings import why_no_readings
from paceline.measure.host import boot_id, network_id
from paceline.measure.matrix_product import FLOP, fastest_products_s
from paceline.records import provenance
from paceline.records.examination import RankInfo
from paceline.training.placement import Placement

IDLE_SAMPLE_S = 0.3
PRODUCTS_S = 0.3
"""Seconds in which matrix products are measured."""


def gather_rank_info(
    world: World, placement: Placement, comm: Comm, folder: Path, now: ReadClock = time.time
) -> list[RankInfo]:
    """Return the information of every rank, with its clock offset; the same on every rank."""
    own = own_rank_info(comm.rank, world, placement, folder)
    comm.control.barrier()  # All ranks are idle while each measures the load of other programs.
    own = msgspec.structs.replace(own, busy_cores=busy_cores())
    comm.control.barrier()  # All ranks compute while each measures its products.
    own = _with_products(own) if comm.device.type == "cpu" else own
    all_info = gather_typed(own, RankInfo, comm.control)
    networks = gather_typed(network_id(), str, comm.control)
    hosts = list(dict.fromkeys(networks))
    return [
        msgspec.structs.replace(
            rank_info, host=hosts.index(network), clock_offset_s=offset.offset_s, clock_error_s=offset.error_s
        )
        for rank_info, network, offset in zip(all_info, networks, measure_offsets(comm, now), strict=True)
    ]


def _with_products(own: RankInfo) -> RankInfo:
    """Return the information with the speed of matrix products in fp32 and, where there are instructions, in bf16."""
    has_bf16 = has_bf16_instructions()
    dtypes = [torch.float32, torch.bfloat16] if has_bf16 else [torch.float32]
    rates = [FLOP / product_s for product_s in fastest_products_s(dtypes, PRODUCTS_S)]
    return msgspec.structs.replace(
        own, has_bf16=has_bf16, fp32_flop_per_s=rates[0], bf16_flop_per_s=rates[1] if has_bf16 else None
    )


def busy_cores() -> float:
    """Return the number of cores that other programs use, measured while this process sleeps."""
    return psutil.cpu_percent(IDLE_SAMPLE_S) / 100 * (psutil.cpu_count() or 1)


def own_rank_info(rank: int, world: World, placement: Placement, folder: Path) -> RankInfo:
    """Return the information that this rank finds alone. Its host, clock and load are measured with the others."""
    address = address_of(world.interface)
    about = provenance()
    limits, device = memory_limits(), placement.device
    device_free, device_total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    return RankInfo(
        rank=rank,
        host=0,
        host_name=platform.node(),
        boot_id=boot_id(),
        interface=world.interface,
        address=address,
        host_name_addresses=addresses_of_name(platform.node()),
        bind_error="it has no address" if address is None else _bind_error(address),
        device=placement.device_name,
        device_index=device.index,
        backend=placement.backend,
        threads=torch.get_num_threads(),
        cpu_count=os.cpu_count() or 1,
        affinity=affine_cores(),
        cpu_quota=cgroup_quota(SELF_CGROUP, CGROUP_ROOT),
        cores=usable_cores(),
        busy_cores=0.0,
        memory_available_bytes=available_memory_bytes(limits, psutil.virtual_memory().available),
        memory_limit_bytes=min([limit.limit_bytes for limit in limits], default=None),
        resident_bytes=psutil.Process().memory_info().rss,
        device_memory_bytes=device_total,
        device_free_bytes=device_free,
        folder=str(folder.resolve()),
        disk_free_bytes=free_disk_bytes(folder),
        versions={"python": about.python, **about.versions},
        without_gpu_readings=why_no_readings(device),
        clock_offset_s=0.0,
        clock_error_s=0.0,
    )


def _bind_error(address: str) -> str | None:
    """Return the reason why a socket cannot listen on the address; None if it can."""
    try:
        listen(address).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
