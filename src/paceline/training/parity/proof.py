"""Proof that a strategy computes the mean gradient: compares it with one process that trains the same shards in turn.

A probe optimiser stores each gradient instead of stepping. So the proof is the same for every strategy, whichever rank
steps which part of the model.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed, receive_json_message, send_json_message
from paceline.config import RunConfig
from paceline.records.parity import Parity
from paceline.strategies.base.abilities import ServesParameters, UpdatesInParts
from paceline.strategies.base.strategy import NamedParameters, Strategy
from paceline.training.parity.difference import GradientDifference, Gradients, as_vector, measure_difference, worst
from paceline.training.parity.oracle import (
    TOLERANCE,
    Shards,
    backward,
    clip_norm_of,
    draw_shards,
    inconclusive_reason,
    normalises_over_ranks,
    oracle,
    without_dropout,
)
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload


class ProbeOptimizer(torch.optim.Optimizer):
    """Optimiser that stores the gradients it receives and changes no weights."""

    def __init__(self, parameters: NamedParameters, strategy: Strategy) -> None:
        super().__init__(list(parameters), {})
        self.captured = CapturedGradients(strategy)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Store the gradients of this step, or of a part of it."""
        pairs = [
            pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)
        ]
        self.captured.add({name: p.grad.detach().clone() for name, p in pairs if p.grad is not None})


class CapturedGradients:
    """Gradients of each step, merged if the strategy steps its optimiser in parts."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._last: int | None = None
        self.steps: list[Gradients] = []

    def add(self, gradients: Gradients) -> None:
        """Add the gradients that the optimiser has just received."""
        step = self._strategy.partial_update_step() if isinstance(self._strategy, UpdatesInParts) else None
        if step is None or step != self._last:
            self.steps.append({})
        self.steps[-1] |= gradients
        self._last = step

    def add_skipped(self) -> None:
        """Add a step that was skipped because gradients were not finite."""
        parameters = self._strategy.parameters
        self.steps.append({name: torch.full_like(parameter, math.nan) for name, parameter in parameters})


def prove(
    strategy: Strategy,
    workload: Workload,
    share: Share,
    config: RunConfig,
    comm: Comm,
    steps: int = 3,
    shards: Shards | None = None,
    expected: list[Gradients] | None = None,
    scaler: GradScaler | None = None,
) -> Parity:
    """Run a few steps under the strategy and compare the gradients with the oracle's, which only rank 0 needs.

    With a scaler, the strategy must also unscale the gradients; the oracle needs none.
    If they differ because the workload itself is not repeatable, the result is marked as unproven. The strategy is
    closed; the process groups stay open.
    """
    shards = shards or take_shards(workload, share, config, comm, steps)
    gradients = _with_servers(_train_under(strategy, workload, share, config, comm, shards, scaler), comm)
    if comm.rank == 0 and expected is None:
        expected = oracle(workload, shards.all_ranks, share, config)
    right = gradients if expected is None else expected
    tolerance = TOLERANCE[share.dtype]
    found = worst(
        compare_gradients(one, other, workload.model, comm, tolerance)
        for one, other in zip(gradients, right, strict=True)
    )
    parity = parity_of(strategy, comm.world_size, found, tolerance, steps)
    if parity.holds or not strategy.lossless:
        return parity
    reason = inconclusive_reason(workload, shards.all_ranks, share, config, right) if comm.rank == 0 else ""
    return msgspec.structs.replace(parity, unproven=gather_typed(reason, str, comm.control)[0])


def parity_of(strategy: Strategy, ranks: int, difference: GradientDifference, tolerance: float, steps: int) -> Parity:
    """Return the entry for the record of a proof."""
    return Parity(
        strategy.name,
        ranks,
        difference.error,
        difference.factor,
        tolerance,
        strategy.lossless,
        steps,
        parameter=difference.parameter,
        parameter_error=difference.parameter_error,
        parameter_factor=difference.parameter_factor,
    )


def serve_proof(strategy: Strategy, workload: Workload, comm: Comm) -> None:
    """Serve during `prove`, on a server, and send the captured gradients to rank 0."""
    assert isinstance(strategy, ServesParameters)
    strategy.attach(copy.deepcopy(workload.model), lambda parameters: ProbeOptimizer(parameters, strategy), comm)
    strategy.serve()
    assert isinstance(strategy.optimizer, ProbeOptimizer)
    gradients = strategy.optimizer.captured.steps
    strategy.close()
    send_json_message({str(step): step_gradients for step, step_gradients in enumerate(gradients)}, 0, comm.full_group)


def _with_servers(gradients: list[Gradients], comm: Comm) -> list[Gradients]:
    """Return the gradients, on rank 0 together with those of servers on separate ranks."""
    for server in range(comm.servers if comm.rank == 0 else 0):
        received = receive_json_message(comm.world_size + server, comm.full_group)
        gradients = [own | received.get(str(step), {}) for step, own in enumerate(gradients)]
    return gradients


def take_shards(workload: Workload, share: Share, config: RunConfig, comm: Comm, steps: int) -> Shards:
    """Return the samples that the ranks and the oracle train on."""
    batch = config.global_batch(comm.world_size)
    source = make_source(workload.train, share, batch=batch, seed=config.seed, reshuffle=config.reshuffle)
    return draw_shards(source, comm, steps)


def _train_under(
    strategy: Strategy,
    workload: Workload,
    share: Share,
    config: RunConfig,
    comm: Comm,
    shards: Shards,
    scaler: GradScaler | None,
) -> list[Gradients]:
    """Train under the strategy; return the gradients of each step that this rank's optimiser received."""
    model = copy.deepcopy(workload.model)
    if normalises_over_ranks(model, config, comm.world_size):
        without_dropout(model)
    sync = Sync(model, lambda parameters: ProbeOptimizer(parameters, strategy), strategy, comm, config.bn)
    assert isinstance(sync.optimizer, ProbeOptimizer)
    captured = sync.optimizer.captured
    for step, micro_batches in enumerate(shards.own):
        for number, micro_batch in enumerate(micro_batches):
            with sync.microbatch(last=number == len(micro_batches) - 1):
                backward(sync.model, workload, share, config, micro_batch, (step, comm.rank, number), scaler)
        skipped = sync.skipped_steps
        sync.step(clip_norm_of(step, len(shards.own), config.clip_norm), scaler)
        if sync.skipped_steps > skipped:
            captured.add_skipped()
    sync.strategy.finish()
    gradients = captured.steps
    sync.detach()
    return gradients


def compare_gradients(
    found: Gradients, expected: Gradients, model: nn.Module, comm: Comm, tolerance: float
) -> GradientDifference:
    """Return the difference on the worst rank, the same on every rank; `expected` is used on rank 0 only.

    A rank is compared on the parameters that it steps itself. The error is infinite if no rank steps a parameter that
    has a gradient in the oracle.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    vectors = {name: as_vector(expected.get(name, torch.zeros_like(p))) for name, p in parameters}
    names, sizes = list(vectors), {name: len(vector) for name, vector in vectors.items()}
    right = torch.cat(list(vectors.values()))
    dist.broadcast(right, group_src=0, group=comm.control.group)
    parts = dict(zip(names, right.split(list(sizes.values())), strict=True))
    own = {name: found[name] for name in names if name in found}
    difference = measure_difference(own, parts, sizes, tolerance)
    stepped = comm.control.sum(torch.tensor([name in found for name in names], dtype=torch.int32)).tolist()
    missing = [name for name, ranks in zip(names, stepped, strict=True) if name in expected and not ranks]
    if comm.rank == 0 and missing:
        difference = GradientDifference(math.inf, 1.0, missing[0], math.inf, 1.0)
    whole, factor, parameter, *of_parameter = difference
    index = names.index(parameter) if parameter else -1
    ranks = comm.control.gather(torch.tensor([whole, factor, index, *of_parameter], dtype=torch.float64))
    return worst(_received(rank.tolist(), names) for rank in ranks)


def _received(values: list[float], names: list[str]) -> GradientDifference:
    whole, factor, index, *of_parameter = values
    return GradientDifference(whole, factor, names[int(index)] if index >= 0 else "", *of_parameter)
