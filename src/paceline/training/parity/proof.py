"""The proof that a strategy computes the mean gradient: against one process that goes through the same shards in turn.

A probe takes the optimiser's place and keeps each gradient instead of stepping, so the proof is the same for every
strategy, whichever rank steps whatever part of the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.config import RunConfig
from paceline.errors import ParityError
from paceline.strategies.base.strategy import NamedParameters, Strategy
from paceline.training.parity.oracle import (
    TOLERANCE,
    Gradients,
    Shards,
    backward,
    clip_norm_of,
    doubts,
    draw_shards,
    flat,
    oracle,
    relative,
    trains_jointly,
    without_dropout,
)
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload


@dataclass(frozen=True)
class Parity:
    """How far a strategy's gradients are from the oracle's."""

    strategy: str
    ranks: int
    error: float
    """‖g − g₀‖ ÷ ‖g₀‖ over all parameters, the worst of all ranks and steps."""
    factor: float
    """By which number the oracle's gradient would have to be multiplied, at that worst place."""
    tolerance: float
    unproven: str = ""
    """Why the error says nothing about the strategy, and what to do; empty where it does."""

    @property
    def holds(self) -> bool:
        """Whether the gradients are the same up to rounding."""
        return self.error < self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: value for name, value in asdict(self).items() if name != "unproven" or value}

    def check(self) -> None:
        """Raises where it is wrong, saying what the gradient is instead."""
        if self.holds or self.unproven:
            return
        if self.ranks > 1 and math.isclose(self.factor, self.ranks, rel_tol=1e-3):
            found = f"{self.ranks} times the mean over the ranks: it sums instead of averaging"
        elif not math.isfinite(self.error):
            found = "not finite, or missing for some parameters"
        elif abs(self.factor - 1) > 1e-3:
            found = f"off by a factor of {self.factor:.4g} (relative error {self.error:.2g})"
        else:
            found = f"off by {self.error:.2g} of its norm, where {self.tolerance:.0e} is allowed"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        raise ParityError(f"{self.strategy} on {ranks}: the gradient is {found}.")


class ProbeOptimizer(torch.optim.Optimizer):
    """An optimiser that keeps the gradients it is given and changes nothing."""

    def __init__(self, parameters: NamedParameters, strategy: Strategy) -> None:
        super().__init__(list(parameters), {})
        self.seen = SeenSteps(strategy)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Keeps the gradients of this step, or of a part of it."""
        pairs = [
            pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)
        ]
        self.seen.add({name: p.grad.detach().clone() for name, p in pairs if p.grad is not None})


class SeenSteps:
    """The gradients of each step, put together where a strategy has its optimiser step part by part."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._last: int | None = None
        self.steps: list[Gradients] = []

    def add(self, gradients: Gradients) -> None:
        """What the optimiser was just given."""
        step = self._strategy.partial_update_step
        if step is None or step != self._last:
            self.steps.append({})
        self.steps[-1] |= gradients
        self._last = step


def prove(
    strategy: Strategy,
    workload: Workload,
    share: Share,
    config: RunConfig,
    comm: Comm,
    steps: int = 3,
    shards: Shards | None = None,
    expected: list[Gradients] | None = None,
) -> Parity:
    """Runs a few steps under the strategy and compares them with the oracle's, which only rank 0 needs to have.

    Where they differ and it is the workload that does not repeat itself, nothing is said about the strategy. It ends
    the strategy, but not the groups.
    """
    shards = shards or take_shards(workload, share, config, comm, steps)
    seen = _with_servers(_under(strategy, workload, share, config, comm, shards), comm)
    if comm.rank == 0 and expected is None:
        expected = oracle(workload, shards.everyones, share, config)
    right = seen if expected is None else expected
    found = worst(compare_gradients(one, other, workload.model, comm) for one, other in zip(seen, right, strict=True))
    parity = Parity(strategy.name, comm.world_size, *found, TOLERANCE[share.dtype])
    if parity.holds or not strategy.lossless:
        return parity
    doubt = [doubts(workload, shards.everyones, share, config, right) if comm.rank == 0 else ""]
    dist.broadcast_object_list(doubt, group_src=0, group=comm.control)
    return replace(parity, unproven=doubt[0])


def serve_proof(strategy: Strategy, workload: Workload, comm: Comm) -> None:
    """What a rank does in `prove` which does not train: it serves, and tells rank 0 what it would have stepped."""
    strategy.attach(copy.deepcopy(workload.model), lambda parameters: ProbeOptimizer(parameters, strategy), comm)
    strategy.serve()
    assert isinstance(strategy.optimizer, ProbeOptimizer)
    seen = strategy.optimizer.seen.steps
    strategy.close()
    send_json_message({str(step): gradients for step, gradients in enumerate(seen)}, 0, comm.everyone)


def _with_servers(seen: list[Gradients], comm: Comm) -> list[Gradients]:
    """On rank 0, also what servers on ranks of their own have stepped."""
    for server in range(comm.servers if comm.rank == 0 else 0):
        told = receive_json_message(comm.world_size + server, comm.everyone)
        seen = [own | told.get(str(step), {}) for step, own in enumerate(seen)]
    return seen


def take_shards(workload: Workload, share: Share, config: RunConfig, comm: Comm, steps: int) -> Shards:
    """What the ranks and the oracle train on."""
    batch = config.global_batch(comm.world_size)
    source = make_source(workload.train, share, batch=batch, seed=config.seed, reshuffle=config.reshuffle)
    return draw_shards(source, comm, steps)


def _under(
    strategy: Strategy, workload: Workload, share: Share, config: RunConfig, comm: Comm, shards: Shards
) -> list[Gradients]:
    """Each step's gradients, as this rank would have stepped them."""
    model = copy.deepcopy(workload.model)
    if trains_jointly(model, config, comm.world_size):
        without_dropout(model)
    sync = Sync(model, lambda parameters: ProbeOptimizer(parameters, strategy), strategy, comm, config.bn)
    for step, pieces in enumerate(shards.own):
        for number, piece in enumerate(pieces):
            with sync.microbatch(last=number == len(pieces) - 1):
                backward(sync.model, workload, share, config, piece, (step, comm.rank, number))
        sync.step(clip_norm_of(step, len(shards.own), config.clip_norm))
    sync.strategy.finish()
    assert isinstance(sync.optimizer, ProbeOptimizer)
    seen = sync.optimizer.seen.steps
    sync.detach()
    return seen


def compare_gradients(found: Gradients, expected: Gradients, model: nn.Module, comm: Comm) -> tuple[float, float]:
    """The relative error of the worst rank, and the factor there; `expected` counts on rank 0 alone.

    A rank is compared on the parameters it steps itself; those that no rank steps, or that only the oracle knows, are
    infinitely wrong.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    own = torch.tensor([name in found for name, _ in parameters])
    right = flat(expected, parameters)
    dist.broadcast(right, group_src=0, group=comm.control)
    mask = torch.cat([kept.expand(p.numel()) for kept, (_, p) in zip(own, parameters, strict=True)])
    off = (flat(found, parameters) - right)[mask]
    share = right[mask]
    error = relative(off, right)
    factor = 1 + float(off @ share / (share @ share))
    if not math.isfinite(factor):  # Nothing of it is this rank's, or all of that is zero, or the gradient is broken.
        factor = 1.0
    stepped = comm.sum(own.int())
    if comm.rank == 0 and any(name in expected and not n for (name, _), n in zip(parameters, stepped, strict=True)):
        error = math.inf
    everyone = comm.gather(torch.tensor([error, factor], dtype=torch.float64))
    return worst((float(rank[0]), float(rank[1])) for rank in everyone)


def worst(errors: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The pair of the largest error, and what is no number is larger than any: `max` would pass a nan over."""
    return max((error if math.isfinite(error) else math.inf, factor) for error, factor in errors)
