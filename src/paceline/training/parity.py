"""The proof that a strategy computes the mean gradient: against one process that goes through the same shards in turn.

The undivided batch would be the wrong oracle for a model with BatchNorm, where sharding alone changes the gradient; it
is the right one under `--bn sync`. A probe takes the optimiser's place and keeps each gradient instead of stepping, so
the proof is the same for every strategy, whichever rank steps whatever part of the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.config import RunConfig
from paceline.errors import ParityError
from paceline.strategies.base import NamedParameters, Strategy
from paceline.training.precision import autocast
from paceline.training.sync import Sync
from paceline.workloads.batches import Piece, Share, Source, make_source
from paceline.workloads.workload import Workload

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""How far a lossless strategy may be off, relative to the norm of the gradient."""

Gradients = dict[str, Tensor]


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

    @property
    def holds(self) -> bool:
        """Whether the gradients are the same up to rounding."""
        return self.error < self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def check(self) -> None:
        """Raises unless it holds, saying what the gradient is instead."""
        if self.holds:
            return
        if self.ranks > 1 and math.isclose(self.factor, self.ranks, rel_tol=1e-3):
            found = f"{self.ranks} times the mean over the ranks: it sums instead of averaging"
        elif abs(self.factor - 1) > 1e-3:
            found = f"off by a factor of {self.factor:.4g} (relative error {self.error:.2g})"
        else:
            found = f"off by {self.error:.2g} of its norm, where {self.tolerance:.0e} is allowed"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        raise ParityError(f"{self.strategy} on {ranks}: the gradient is {found}.")


class Probe(torch.optim.Optimizer):
    """An optimiser that keeps the gradients it is given and changes nothing."""

    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__(list(parameters), {})
        self.seen: list[Gradients] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Keeps the gradients of this step."""
        pairs = [
            pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)
        ]
        self.seen.append({name: p.grad.detach().clone() for name, p in pairs if p.grad is not None})


def prove(
    strategy: Strategy,
    workload: Workload,
    share: Share,
    config: RunConfig,
    comm: Comm,
    steps: int = 3,
    expected: list[Gradients] | None = None,
) -> Parity:
    """Runs a few steps under the strategy and compares them with the oracle's, which only rank 0 needs to have.

    It ends the strategy, but not the groups.
    """
    source = make_source(workload.train, share, batch=config.global_batch(comm.world_size), seed=config.seed)
    model = copy.deepcopy(workload.model)
    sync = Sync(model, Probe, strategy, comm, config.bn)
    for step, pieces in zip(range(steps), source.epoch(0), strict=False):
        for number, piece in enumerate(pieces):
            with sync.microbatch(last=number == len(pieces) - 1):
                _backward(sync.model, workload, source, config, piece, (step, comm.rank, number))
        sync.step(config.clip_norm)
    sync.strategy.finish()
    assert isinstance(sync.optimizer, Probe)
    seen = sync.optimizer.seen
    sync.detach()
    if comm.rank == 0 and expected is None:
        expected = oracle(workload.model, workload, share, config, steps)
    pairs = zip(seen, seen if expected is None else expected, strict=True)
    worst = max(compare_gradients(found, step, workload.model, comm) for found, step in pairs)
    return Parity(strategy.name, comm.world_size, *worst, TOLERANCE[share.dtype])


def oracle(model: nn.Module, workload: Workload, share: Share, config: RunConfig, steps: int) -> list[Gradients]:
    """The mean gradient of each step, by one process that trains every rank's pieces one after the other."""
    model = copy.deepcopy(model)
    workers = 1 if config.bn == "sync" else share.workers
    batch = config.global_batch(share.workers)
    sources = [
        make_source(workload.train, replace(share, rank=rank, workers=workers), batch=batch, seed=config.seed)
        for rank in range(workers)
    ]
    found: list[Gradients] = []
    for step, shards in zip(range(steps), zip(*[source.epoch(0) for source in sources], strict=True), strict=False):
        for rank, (source, pieces) in enumerate(zip(sources, shards, strict=True)):
            for number, piece in enumerate(pieces):
                scaled = replace(piece, weight=piece.weight / workers)
                _backward(model, workload, source, config, scaled, (step, rank, number))
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    return found


def _backward(
    model: nn.Module, workload: Workload, source: Source, config: RunConfig, piece: Piece, place: Sequence[int]
) -> None:
    torch.manual_seed(hash(tuple(place)) % 2**31)  # Dropout then drops the same on both sides.
    with autocast(config.precision, source.share.device):
        loss = workload.evaluate(model, source.fetch(piece)).loss
    (loss * piece.weight).backward()


def compare_gradients(found: Gradients, expected: Gradients, model: nn.Module, comm: Comm) -> tuple[float, float]:
    """The relative error of the worst rank, and the factor there; `expected` counts on rank 0 alone.

    A rank is compared on the parameters it steps itself; those that no rank steps, or that only the oracle knows, are
    infinitely wrong.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    own = torch.tensor([name in found for name, _ in parameters])
    right = _flat(expected, parameters)
    dist.broadcast(right, group_src=0, group=comm.control)
    mask = torch.cat([kept.expand(p.numel()) for kept, (_, p) in zip(own, parameters, strict=True)])
    off = (_flat(found, parameters) - right)[mask]
    share = right[mask]
    error = float(off.norm() / right.norm())
    factor = 1 + float(off @ share / (share @ share)) if len(share) else 1.0
    stepped = comm.sum(own.int())
    if comm.rank == 0 and any(name in expected and not n for (name, _), n in zip(parameters, stepped, strict=True)):
        error = math.inf
    everyone = comm.gather(torch.tensor([error, factor], dtype=torch.float64))
    return max((float(rank[0]), float(rank[1])) for rank in everyone)


def _flat(gradients: Gradients, parameters: NamedParameters) -> Tensor:
    """All gradients in one vector, zeros for those that are not there."""
    return torch.cat(
        [gradients.get(name, torch.zeros_like(p)).detach().double().cpu().reshape(-1) for name, p in parameters]
    )
