"""`paceline.attach`: any strategy in a user's training loop."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm import close_comm, open_comm, share_world
from paceline.comm.watchdog.own_watch import start_own_watch
from paceline.config import DEFAULT_STRATEGY, HANG_TIMEOUT_S, BatchNormMode, ReplicaGuardMode, group_timeout_s
from paceline.config.specs import Spec
from paceline.errors import UsageError
from paceline.measure.activity import ACTIVITY
from paceline.strategies.base.strategy import MakeOptimizer, Role
from paceline.strategies.registry import create
from paceline.training.checks.attach_arguments import check_arguments
from paceline.training.checks.loop import check_not_attached
from paceline.training.placement import choose_backend
from paceline.training.scripts.script_task import script_task
from paceline.training.sync import Sync


def attach(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    strategy: str | None = None,
    *,
    bn: BatchNormMode = "broadcast",
    allow_unused: bool = False,
    replica_guard: ReplicaGuardMode = "stop",
    hang_timeout: float = HANG_TIMEOUT_S,
    timeout: float | None = None,
    check_collectives: bool = False,
    **options: Any,
) -> Sync:
    """Attach a strategy to a model. Then call `sync.model`, `backward()` on the loss, and `sync.step()`.

    The loss is the mean over this rank's samples. If ranks (or micro-batches) have different numbers of samples,
    multiply the loss by `sync.weight(samples, batch)`, so that the mean over ranks is the mean over the global batch.

    `make_optimizer` receives (name, parameter) pairs, which torch's optimisers accept. Keyword arguments are options of
    the strategy: `attach(model, make_optimizer, "ddp", bucket_mb=1)`. The ranks are those of the process group that the
    program has initialised, or those that torchrun started, or this process alone. Every rank starts with rank 0's
    weights.

    While the program trains, ranks compare checksums of their weights, for about 0.1% of the time of a long run. If
    these differ, `replica_guard` says what happens: "stop" raises a ReplicaError, "warn" warns once, "off" compares
    nothing.

    If ranks wait for others and no rank goes on for `hang_timeout` seconds, the program ends with an error that names
    what each rank waits in (0: never). An operation fails after `timeout` seconds, by default 60 more. With
    `check_collectives`, ranks compare every operation of the strategy before it runs, which is slow.

    The default strategy is `ddp`. Under `paceline compare --script` it is the strategy that is being measured.
    """
    check_arguments(
        model,
        make_optimizer,
        strategy,
        bn=bn,
        allow_unused=allow_unused,
        replica_guard=replica_guard,
        hang_timeout=hang_timeout,
        timeout=timeout,
        check_collectives=check_collectives,
    )
    check_not_attached(model)
    task = script_task()
    if task is None:
        spec = Spec.parse(strategy or DEFAULT_STRATEGY)
        spec = Spec(spec.name, spec.options | {key: str(value) for key, value in options.items()})
        chosen = create(str(spec))
    else:
        task.check_attach_arguments(strategy, options)
        chosen, timeout = task.make_strategy(), task.config.timeout_s
        check_collectives = task.config.check_collectives
    timeout = timeout or group_timeout_s(hang_timeout)
    chosen.allow_unused = allow_unused
    with ExitStack() as undo:
        undo.callback(share_world(timeout_s=timeout))
        roles = chosen.roles(dist.get_world_size())
        if set(roles) != {Role.WORKER}:
            raise UsageError(
                f"{chosen.name} does not train on all {len(roles)} ranks, which attach() requires.",
                hint="start one process, or choose a strategy that trains on every rank",
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        comm = open_comm(
            range(len(roles)),
            device=device,
            backend=choose_backend(device),
            timeout_s=timeout,
            check_collectives=check_collectives,
            stopwatch=None if task is None else task.stopwatch(device),
        )
        assert comm is not None
        undo.callback(close_comm, comm)
        open_sync = Sync if task is None else task.attach
        sync = open_sync(model, make_optimizer, chosen, comm, bn)
        sync.guard_replicas(replica_guard)
        if task is None:  # Otherwise the launcher watches.
            attached = weakref.ref(sync)
            ACTIVITY.follow_count(lambda: 0 if (found := attached()) is None else found.steps)
            undo.callback(start_own_watch(hang_timeout, timeout, checks_collectives=check_collectives))
        sync.on_close(undo.pop_all().close)
    return sync
