"""`data_parallel`: one process splits each batch over the GPUs of its host, with PyTorch's DataParallel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.amp import GradScaler

from paceline.errors import UsageError
from paceline.strategies.base.scaling import scaler_argument
from paceline.strategies.base.strategy import Role, Strategy

FEWEST_GPUS = 2


class DataParallel(Strategy):
    """One process trains on all GPUs of its host; all other ranks are idle.

    Idea
        In every step, the process copies the weights to the other GPUs, gives each GPU its part of the batch, and runs
        the forward passes in one thread per GPU. The outputs are gathered on the first GPU, which computes the loss of
        the whole batch. Backward sums the gradients there, and the optimiser runs there alone.

    Who sends what to whom (one process, three GPUs)
        GPU 0 ──weights, inputs──> GPU 1        GPU 1 ──outputs, then gradients──> GPU 0 -> step
        GPU 0 ──weights, inputs──> GPU 2        GPU 2 ──outputs, then gradients──> GPU 0 -> step

    Cost
        No messages between ranks, so traffic counts none. Between the GPUs, over PCIe or NVLink, per step: the weights
        and buffers to each other GPU, and all gradients back to the first, about 2(p−1)(α + Mβ) through GPU 0 for p
        GPUs and M bytes. The threads of one process share Python's GIL, so kernels are launched one after the other.

    When to use it
        To reproduce older results, or for a quick try in one process, without ranks to launch.

    When not to use it
        For speed: PyTorch's documentation recommends `ddp`, also on one host. It needs two or more GPUs that the
        process sees. With BatchNorm, each GPU normalises by its own part of the batch, and the running statistics are
        those of the first GPU. So the gradient is not exactly that of one process, and no parity is claimed.

    Source
        torch.nn.DataParallel. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
        VLDB 2020, section 2, compares it with `ddp`.
    """

    name: ClassVar[str] = "data_parallel"
    lossless = False

    def roles(self, world_size: int) -> list[Role]:
        return [Role.WORKER] + [Role.IDLE] * (world_size - 1)

    def check_gpus(self, gpus: int) -> None:
        """Raise a UsageError with fewer than two GPUs, over which there is nothing to split."""
        if gpus < FEWEST_GPUS:
            found = f"only {gpus}" if gpus else "none"
            raise UsageError(
                f"{self.name} splits each batch over the GPUs of one host and needs at least {FEWEST_GPUS}; "
                f"this run has {found}.",
                hint="use single on one device, or ddp, which trains on several ranks and also on CPUs",
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        first = self.comm.device
        gpus = torch.cuda.device_count() if first.type == "cuda" else 0
        self.check_gpus(gpus)
        assert first.index is not None, "ranks have a numbered GPU"
        others = [number for number in range(gpus) if number != first.index]
        return nn.DataParallel(model, device_ids=[first.index, *others], output_device=first.index)

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        self._check_all_used()
        self.update(max_norm, **scaler_argument(scaler))
