"""Topology of a run: its strategy, ranks, batch, device and model, for its configuration line and its record."""

from __future__ import annotations

import os

from torch import nn

from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.config.emulation import emulation_info
from paceline.measure.cores import usable_cores
from paceline.records import Topology
from paceline.records.description import RecordedEmulation, RecordedRecipe
from paceline.records.precision import PrecisionChoice
from paceline.strategies.base.strategy import Strategy
from paceline.training.placement import Placement


def topology_of(
    config: RunConfig,
    strategy: Strategy,
    model: nn.Module,
    comm: Comm,
    placement: Placement,
    *,
    workload: str,
    interface: str,
    world_size: int,
    ranks_per_host: int,
    ranks_sharing_cores: int | None = None,
    batch: int | None = None,
    flop_per_sample: float | None = None,
    classes: int | None = None,
    lr: float | None = None,
    recipe: RecordedRecipe | None = None,
    precision: str | None = None,
    precision_choice: PrecisionChoice | None = None,
    user_optimizer: bool = True,
) -> Topology:
    """Return the topology of a run; the batch, classes, learning rate and precision of a script are unknown."""
    workers = comm.world_size
    parameters, layers = list(model.parameters()), list(model.modules())
    return Topology(
        workload=workload,
        strategy=config.strategy,
        lossless=strategy.lossless,
        exchanges=strategy.exchanges,
        lockstep=strategy.lockstep,
        sends=strategy.sends,
        world_size=world_size,
        workers=workers,
        servers=comm.servers,
        ranks_per_host=ranks_per_host,
        ranks_sharing_cores=ranks_sharing_cores,
        batch=batch,
        batch_per_rank=[] if batch is None else sorted({batch // workers, -(-batch // workers)}),
        device=placement.device_name,
        backend=placement.backend,
        interface=interface,
        threads=placement.threads,
        cores=usable_cores(),
        parameters=sum(p.numel() for p in parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        flop_per_sample=flop_per_sample,
        batch_norm_layers=sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers),
        random_layers=sum(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in layers),
        classes=classes,
        user_optimizer=user_optimizer,
        lr=lr,
        recipe=recipe,
        precision=precision,
        precision_choice=precision_choice,
        log_every=config.log_every,
        slow_rank=config.slow_rank,
        emulated=recorded_emulation(),
    )


def recorded_emulation() -> RecordedEmulation | None:
    """Return the emulated hosts that this process runs on one of; None on a real host."""
    info = emulation_info(os.environ)
    return None if info is None else RecordedEmulation(spec=info.spec, host_cpus=info.host_cpus)
