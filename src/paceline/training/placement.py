"""Choice of a rank's device, backend, CPU threads and cores, from the configuration and the hardware."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import World
from paceline.config import RunConfig
from paceline.measure.cores import core_share, threads_per_rank
from paceline.strategies.base.strategy import Role
from paceline.training.core_binding import cores_of_rank, shared_cores, usable_cores_in_order

NO_GPU = bytes(16)
"""GPU id of a rank that has no GPU to itself."""


@dataclass(frozen=True)
class Placement:
    """Device of a rank, backend that communicates for it, and number of its CPU threads."""

    device: torch.device
    backend: str
    threads: int
    core_share: float = 1.0
    """Share of a core per thread while all ranks of the host compute."""
    cores: frozenset[int] | None = None
    """Cores that the rank's threads are bound to; None if they are not bound."""

    @classmethod
    def choose(cls, config: RunConfig, world: World, roles: list[Role], threads: int | None) -> Placement:
        """Choose device, backend and threads of a rank from the configuration and the hardware; called on all ranks."""
        use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        gpus = torch.cuda.device_count() if use_cuda else 0
        device = torch.device("cuda", world.local_rank % gpus) if use_cuda else torch.device("cpu")
        backend: str = config.backend
        if backend == "auto":
            backend = "gloo" if config.device == "cpu" else choose_backend(device)
        first = world.rank - world.local_rank
        is_busy = [role is not Role.IDLE for role in roles]
        ranks_sharing = max(1, min(sum(is_busy[first : first + world.local_size]), world.ranks_sharing_cores))
        threads = threads or threads_per_rank(ranks_sharing)
        cores = None
        if config.bind_to == "core":
            number, ranks = shared_cores(is_busy, world.rank)
            cores = cores_of_rank(number, ranks, usable_cores_in_order()) if is_busy[world.rank] else None
        return cls(device, backend, threads, core_share(ranks_sharing, threads), cores)

    @property
    def device_name(self) -> str:
        """Name of the device, such as the GPU's model."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def apply(self, config: RunConfig) -> None:
        """Set torch's threads, determinism and device; an earlier run may have left other values."""
        torch.set_num_threads(self.threads)
        if torch.are_deterministic_algorithms_enabled() != config.deterministic:
            torch.use_deterministic_algorithms(config.deterministic)  # Imports torch's compiler, which takes 1 s.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def choose_backend(device: torch.device) -> str:
    """Return NCCL if every rank has a GPU to itself, else Gloo; called on all ranks, each with its device.

    Ranks exchange the ids of their GPUs, since a launcher may make only one GPU visible to each, and hosts may have
    several. The conditions before the exchange are the same on all ranks, so that either all or none participate.
    """
    if not dist.is_nccl_available():
        return "gloo"
    own = torch.frombuffer(bytearray(_gpu_id(device)), dtype=torch.uint8)
    if not _sends_from_cpu():  # The user's program created a group of NCCL alone.
        if device.type == "cpu":
            return "gloo"
        own = own.to(device)
    return "nccl" if one_gpu_each(gather_gpu_ids(own)) else "gloo"


def _sends_from_cpu() -> bool:
    """Return whether the default group has a backend for tensors in main memory."""
    try:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _gpu_id(device: torch.device) -> bytes:
    """Return a GPU's id, unique over all hosts; `NO_GPU` for a CPU or a MIG slice, which NCCL does not support."""
    if device.type != "cuda" or " MIG " in torch.cuda.get_device_name(device):
        return NO_GPU
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[: len(NO_GPU)]


def gather_gpu_ids(own: Tensor) -> list[bytes]:
    """Return the GPU id of every rank, on every rank."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [bytes(gpu_id.tolist()) for gpu_id in gathered]


def one_gpu_each(gpu_ids: Sequence[bytes]) -> bool:
    """Whether every rank has a GPU and no two ranks share one."""
    return NO_GPU not in gpu_ids and len(set(gpu_ids)) == len(gpu_ids)
