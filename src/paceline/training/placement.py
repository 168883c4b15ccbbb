"""Where and with what a rank computes, from what was asked for and what is there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.comm import World
from paceline.config import RunConfig
from paceline.measure.cores import core_share, threads_per_rank
from paceline.strategies.base.strategy import Role

NO_GPU = bytes(16)
"""The mark of a rank that has none to itself."""


@dataclass(frozen=True)
class Placement:
    """A rank's device, who moves its bytes, and its CPU threads."""

    device: torch.device
    backend: str
    threads: int
    core_share: float = 1.0
    """The part of a core that each thread has while all ranks of the host compute."""

    @classmethod
    def choose(cls, config: RunConfig, world: World, roles: list[Role], threads: int | None) -> Placement:
        """The device, backend and threads for a rank, from what was asked for and what is there; called on all."""
        use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        gpus = torch.cuda.device_count() if use_cuda else 0
        device = torch.device("cuda", world.local_rank % gpus) if use_cuda else torch.device("cpu")
        backend = _choose_backend(config, device) if config.backend == "auto" else config.backend
        first = world.rank - world.local_rank
        busy = sum(role is not Role.IDLE for role in roles[first : first + world.local_size])
        together = max(1, min(busy, world.sharing))
        threads = threads or threads_per_rank(together)
        return cls(device, backend, threads, core_share(together, threads))

    @property
    def device_name(self) -> str:
        """The device as a person would call it."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def apply(self, config: RunConfig) -> None:
        """Sets torch up for a run; another run in the same process may have left it otherwise."""
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(config.deterministic)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high" if config.precision == "bf16" else "highest")


def _choose_backend(config: RunConfig, device: torch.device) -> str:
    """NCCL where every rank has a GPU of its own. Ranks ask each other: a launcher may show each only the one it gives.

    What is asked before is the same on all ranks, so that all of them ask, or none.
    """
    if config.device == "cpu" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if one_gpu_each(gather_gpu_ids(_gpu_id(device))) else "gloo"


def _gpu_id(device: torch.device) -> bytes:
    """What tells a GPU from all others, whatever it is called here; nothing for a slice of one, which NCCL refuses."""
    if device.type != "cuda" or " MIG " in torch.cuda.get_device_name(device):
        return NO_GPU
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[: len(NO_GPU)]


def gather_gpu_ids(own: bytes) -> list[bytes]:
    """Every rank's mark, on every rank."""
    everyone = [torch.empty(len(own), dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.frombuffer(bytearray(own), dtype=torch.uint8))
    return [bytes(gpu_id.tolist()) for gpu_id in everyone]


def one_gpu_each(gpu_ids: Sequence[bytes]) -> bool:
    """Whether all ranks have a GPU, and no two the same."""
    return NO_GPU not in gpu_ids and len(set(gpu_ids)) == len(gpu_ids)
