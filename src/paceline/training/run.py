"""One run on one rank, from a configuration to a record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.analysis.summary import summarise_rank
from paceline.comm import Comm, World, open_comm
from paceline.config import RunConfig
from paceline.measure.cores import threads_per_rank
from paceline.measure.steps import step_clock
from paceline.records import EventWriter, RunFolder, StepWriter, provenance
from paceline.records.reader import read_steps
from paceline.records.schema import steps_file
from paceline.strategies.base import MakeOptimizer, Role, Strategy
from paceline.strategies.registry import create
from paceline.training.batchnorm import spread
from paceline.training.check import check_gradients
from paceline.training.evaluate import evaluate
from paceline.training.ledger import Ledger
from paceline.training.loop import Loop, Report, silent
from paceline.training.precision import make_deterministic, storage_dtype
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, Source, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.workload import Workload

LARGEST_TEST_BATCH = 256


@dataclass(frozen=True)
class Placement:
    """Where and with what this rank computes."""

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
        return cls(device, backend, threads or threads_per_rank(max(1, busy)))


def run(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    *,
    threads: int | None,
    number: int = 0,
    listen: Report = silent,
) -> None:
    """Trains, tests, and leaves a record; idle ranks wait until the others are done.

    `number` tells the runs of one job apart. `listen` hears, on every rank, what rank 0 writes to the record's events.
    """
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    roles = strategy.roles(world.size)
    placement = Placement.choose(config, world, roles, threads)
    active = [rank for rank, role in enumerate(roles) if role is not Role.IDLE]
    _prepare_torch(config, placement)
    comm = open_comm(active, device=placement.device, backend=placement.backend, timeout_s=config.timeout)
    if comm is None:
        world.wait_for(f"run-{number}")
        return
    _run_as_worker(config, strategy, world, placement, comm, folder, listen)
    if comm.rank == 0:
        world.announce(f"run-{number}")


def _run_as_worker(
    config: RunConfig,
    strategy: Strategy,
    world: World,
    placement: Placement,
    comm: Comm,
    folder: RunFolder,
    listen: Report,
) -> None:
    batch = config.global_batch(comm.world_size)
    workload = load_workload(config)
    torch.manual_seed(config.seed * 1_000_003 + comm.rank + 1)  # What is random from here on differs between ranks.
    dtype = storage_dtype(config.precision)
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model = workload.model.to(placement.device, dtype, memory_format=layout)  # type: ignore[call-overload]
    share = Share(comm.rank, comm.world_size, config.accumulate, placement.device, dtype, config.channels_last)
    source = make_source(workload.train, share, batch=batch, seed=config.seed, reshuffle=config.reshuffle)
    check_gradients(model, workload, source, config, comm.rank)

    events = EventWriter(folder) if comm.rank == 0 else None

    def report(event: str, **values: Any) -> None:
        if events is not None:
            events.write(event, **values)
        listen(event, **values)

    if comm.rank == 0:
        topology = _topology(config, workload, source.batch, world, placement, comm)
        folder.write_run(config=dataclasses.asdict(config), topology=topology, provenance=provenance())
        report("config", **topology)
    steps = StepWriter(folder, comm.rank)
    sync = Sync(model, _optimizer_factory(config, workload), strategy, comm, config.bn)
    clock = step_clock(placement.device)
    loop = Loop(config, workload, sync, source, clock, Ledger(clock, workload, steps), report)
    try:
        train_s = loop.train()
        tests = _test(config, workload, sync, share, report)
        summary = _summarise(config, sync, source, folder, train_s) | tests
        if comm.rank == 0:
            folder.write_summary(summary)
            report("end")
            folder.mark_finished()
    finally:
        steps.close()
        if events:
            events.close()
    sync.close()


def _prepare_torch(config: RunConfig, placement: Placement) -> None:
    torch.set_num_threads(placement.threads)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
        torch.set_float32_matmul_precision("high" if config.precision == "bf16" else "highest")
    if config.deterministic:
        make_deterministic()


def _optimizer_factory(config: RunConfig, workload: Workload) -> MakeOptimizer:
    if workload.optimizer is not None:
        return workload.optimizer
    # Fused: one pass over each parameter instead of four; a third of the time of the default on a CPU.
    return lambda parameters: torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
    )


def _topology(
    config: RunConfig, workload: Workload, batch: int | None, world: World, placement: Placement, comm: Comm
) -> dict[str, Any]:
    """What was chosen for the run: printed as its configuration line, kept in its record."""
    each = [] if batch is None else sorted({batch // comm.world_size, -(-batch // comm.world_size)})
    return {
        "workload": workload.name,
        "strategy": config.strategy,
        "world_size": world.size,
        "workers": comm.world_size,
        "ranks_per_host": world.local_size,
        "batch": batch,
        "batch_per_rank": each,
        "device": _device_name(placement.device),
        "backend": placement.backend,
        "interface": world.interface,
        "threads": placement.threads,
        "parameters": sum(p.numel() for p in workload.model.parameters()),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in workload.model.parameters() if p.requires_grad),
        "own_optimizer": workload.optimizer is not None,
        "lr": config.lr,
        "log_every": config.log_every,
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _test(config: RunConfig, workload: Workload, sync: Sync, share: Share, report: Report) -> dict[str, Any]:
    """Tests the agreed weights, shared among the ranks, and every rank's own replica where asked for."""
    if workload.test is None or not config.evaluate:
        return {}
    share = dataclasses.replace(share, micro_batches=1)
    source = _test_source(workload, share, config)
    with sync.agreed() as model:
        agreed = evaluate(model, workload, source, config, sync.comm).to_dict()
    tests: dict[str, Any] = {"test": agreed | {"available": source.samples}}
    if config.eval_ranks:
        alone = _test_source(workload, dataclasses.replace(share, rank=0, workers=1), config)
        own = evaluate(sync.strategy.model, workload, alone, config, comm=None)
        accuracy = float("nan") if own.accuracy is None else own.accuracy
        replicas = sync.comm.gather(torch.tensor([own.loss, accuracy], dtype=torch.float64))
        tests["test_ranks"] = [
            {"loss": loss, "accuracy": accuracy} for loss, accuracy in (r.tolist() for r in replicas)
        ]
    report("evaluation", **tests)
    return tests


def _test_source(workload: Workload, share: Share, config: RunConfig) -> Source:
    # Twice a training micro-batch needs less memory than training it, since nothing is kept for backward.
    each = min(LARGEST_TEST_BATCH, 2 * config.global_batch(share.workers) // (share.workers * config.accumulate))
    return make_source(workload.test, share, batch=each * share.workers, seed=config.seed, train=False)


def _summarise(config: RunConfig, sync: Sync, source: Source, folder: RunFolder, train_s: float) -> dict[str, Any]:
    """The figures of the run, the same on every rank: each sums up its own steps, which may be on another host."""
    own = summarise_rank(sync.rank, read_steps(folder.path / steps_file(sync.rank))).to_dict()
    names = list(own)
    values = [float("nan") if own[name] is None else float(own[name]) for name in names]
    gathered = sync.comm.gather(torch.tensor(values, dtype=torch.float64))
    ranks = [_from_floats(names, everyone.tolist()) for everyone in gathered]
    step_times = [rank["step_s"] for rank in ranks if rank["step_s"] is not None]
    step_s = sum(step_times) / len(step_times) if step_times else None
    samples = sum(rank["samples"] for rank in ranks) / (ranks[0]["steps"] or 1)
    per_epoch = source.expected_steps
    estimate = None
    if config.steps is not None and config.epochs is not None and per_epoch and step_s:
        estimate = {"epochs": config.epochs, "seconds": step_s * per_epoch * config.epochs}
    return {
        "strategy": config.strategy,
        "steps": ranks[0]["steps"],
        "train_s": train_s,
        "step_s": step_s,
        "samples_per_s": samples / step_s if step_s else None,
        "average_loss": _weighted([(rank["average_loss"], rank["samples"]) for rank in ranks]),
        "train_accuracy": _weighted([(rank["accuracy"], rank["samples"]) for rank in ranks]),
        "estimate": estimate,
        "ranks": ranks,
        "dropped_per_epoch": source.dropped,
        "buffer_divergence": sync.buffers.divergence(),
        "weight_divergence": spread(_weights(sync.strategy.model), sync.comm),
    }


def _weighted(figures: list[tuple[float | None, int]]) -> float | None:
    """The mean over all samples of a figure that each rank has for its own."""
    known = [(value, samples) for value, samples in figures if value is not None]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total else None


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def _from_floats(names: list[str], values: list[float]) -> dict[str, Any]:
    counts = {"rank", "steps", "samples", "diverged_step"}
    return {n: None if v != v else int(v) if n in counts else v for n, v in zip(names, values, strict=True)}
