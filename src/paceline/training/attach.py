"""`paceline.attach`: any strategy in a training loop of the user's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm import join_world, leave_world, open_comm
from paceline.config import BatchNormMode
from paceline.config.specs import Spec
from paceline.errors import UsageError
from paceline.strategies.base.strategy import MakeOptimizer, Role
from paceline.strategies.registry import create
from paceline.training.scripts.script_task import script_task
from paceline.training.sync import Sync

DEFAULT_STRATEGY = "ddp"


def attach(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    strategy: str | None = None,
    *,
    bn: BatchNormMode = "broadcast",
    allow_unused: bool = False,
    timeout: float = 120.0,
    **options: Any,
) -> Sync:
    """Puts a model under a strategy: call `sync.model`, then `backward()` on a loss, then `sync.step()`.

    The loss is the mean over this rank's samples; where ranks (or micro-batches) do not have equally many, multiply it
    by `sync.weight(samples, batch)`, so that the ranks' mean is the mean over the whole batch.

    `make_optimizer` gets (name, parameter) pairs, as torch's optimisers accept them. The strategy's options are keyword
    arguments: `attach(model, make, "ddp", bucket_mb=1)`. Ranks are those of the process group that the program has
    made, else those that torchrun started, else this process alone. Every rank takes rank 0's weights.

    Without a strategy it is `ddp`; under `paceline compare --script` the one whose turn it is.
    """
    task = script_task()
    if task is None:
        spec = Spec.parse(strategy or DEFAULT_STRATEGY)
        spec = Spec(spec.name, spec.options | {key: str(value) for key, value in options.items()})
        chosen = create(str(spec))
    else:
        task.check_attach_arguments(strategy, options)
        chosen, timeout = task.make_strategy(), task.config.timeout
    chosen.allow_unused = allow_unused
    joined_here = not dist.is_initialized()
    if joined_here:
        join_world(timeout_s=timeout)
    roles = chosen.roles(dist.get_world_size())
    if set(roles) != {Role.WORKER}:
        if joined_here:
            leave_world()
        raise UsageError(
            f"{chosen.name} does not train on every one of {len(roles)} ranks.",
            hint="start one process, or choose a strategy that uses all ranks",
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    comm = open_comm(
        range(len(roles)),
        device=device,
        backend=_backend_for(device),
        timeout_s=timeout,
        stopwatch=None if task is None else task.stopwatch(device),
    )
    assert comm is not None
    open_sync = Sync if task is None else task.attach
    sync = open_sync(model, make_optimizer, chosen, comm, bn)
    if joined_here:
        sync.on_close(leave_world)
    return sync


def _backend_for(device: torch.device) -> str:
    shared = dist.get_world_size() > torch.cuda.device_count() if device.type == "cuda" else True
    return "gloo" if shared or not dist.is_nccl_available() else "nccl"
