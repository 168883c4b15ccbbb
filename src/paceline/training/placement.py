"""Where and with what a rank computes, from what was asked for and what is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.comm import World
from paceline.config import RunConfig
from paceline.measure.cores import threads_per_rank
from paceline.strategies.base import Role


@dataclass(frozen=True)
class Placement:
    """A rank's device, who moves its bytes, and its CPU threads."""

    device: torch.device
    backend: str
    threads: int

    @classmethod
    def choose(cls, config: RunConfig, world: World, roles: list[Role], threads: int | None) -> Placement:
        """The device, backend and threads for a rank, from what was asked for and what is there."""
        use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        gpus = torch.cuda.device_count() if use_cuda else 0
        device = torch.device("cuda", world.local_rank % gpus) if use_cuda else torch.device("cpu")
        one_gpu_each = use_cuda and world.local_size <= gpus and dist.is_nccl_available()
        backend = config.backend if config.backend != "auto" else "nccl" if one_gpu_each else "gloo"
        first = world.rank - world.local_rank
        busy = sum(role is not Role.IDLE for role in roles[first : first + world.local_size])
        return cls(device, backend, threads or threads_per_rank(max(1, min(busy, world.sharing))))

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
