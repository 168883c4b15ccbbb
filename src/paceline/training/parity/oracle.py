"""The other side of a proof: one process that trains every rank's shard in turn, on the very samples the ranks had.

Samples are fetched once and handed over, not drawn again: generators run once, and workers of a DataLoader augment
differently each time. Each shard has a replica of its own, of which all but the weights are its own: buffers, and
whatever else a forward pass changes, then go through what they go through on a rank.

The undivided batch would be the wrong oracle for a model with BatchNorm, where sharding alone changes the gradient; it
is the right one under `--bn sync`, where each micro-batch is that of all ranks together.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.strategies.base.strategy import NamedParameters
from paceline.training.precision import autocast
from paceline.workloads.batches import MicroBatch, Share, Source
from paceline.workloads.workload import Workload

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""How far a lossless strategy may be off, relative to the norm of the gradient."""

Gradients = dict[str, Tensor]
ShardStep = list[list[MicroBatch]]
"""Each rank's micro_batches of one step; what they hold is the batch itself."""


@dataclass(frozen=True)
class Shards:
    """What a proof trains on."""

    own: list[list[MicroBatch]]
    """This rank's micro_batches of each step."""
    all_ranks: list[ShardStep]
    """All ranks', on rank 0; nothing elsewhere."""


def draw_shards(source: Source, comm: Comm, steps: int) -> Shards:
    """Fetches what all ranks train on in so many steps, over and over where the data is shorter than that."""
    drawn = list(itertools.islice(_batches(source, comm), steps))
    if not drawn:
        raise WorkloadError("the training data gave no batch.", hint="give some, or batches of more samples")
    own = list(itertools.islice(itertools.cycle(drawn), steps))
    gathered: list[Any] | None = [None] * comm.world_size if comm.rank == 0 else None
    dist.gather_object(drawn, gathered, group_dst=0, group=comm.control)
    all_ranks = [list(step) for step in zip(*(gathered or []), strict=True)]
    return Shards(own, list(itertools.islice(itertools.cycle(all_ranks), steps)))


def _batches(source: Source, comm: Comm) -> Iterator[list[MicroBatch]]:
    """Epoch after epoch, each as long as the data lasts on all ranks, until one has nothing."""
    host = replace(source.share, device=torch.device("cpu"))
    for epoch in itertools.count():
        trained = False
        steps = source.epoch(epoch)
        while comm.smallest(int((micro_batches := next(steps, None)) is not None)):
            assert micro_batches is not None
            trained = True
            # Copies: a slice would bring the whole global batch along.
            yield [
                replace(
                    micro_batch,
                    content=_concatenate([host.to_device(source.fetch(micro_batch))], [micro_batch.samples]),
                )
                for micro_batch in micro_batches
            ]
        if not trained:
            return


def oracle(workload: Workload, shards: Sequence[ShardStep], share: Share, config: RunConfig) -> list[Gradients]:
    """The mean gradient of each step."""
    if normalises_over_ranks(workload.model, config, share.workers):
        merged = _merge_ranks(shards)
        if merged is not None:
            return _gradients(workload, merged, share, config)
    return _gradients(workload, shards, share, config)


def inconclusive_reason(
    workload: Workload, shards: Sequence[ShardStep], share: Share, config: RunConfig, expected: Sequence[Gradients]
) -> str:
    """Why the oracle says nothing about strategies on this workload; empty where it does."""
    if not all(gradient.isfinite().all() for step in expected for gradient in step.values()):
        return "one process's own gradients are not finite, so there is nothing to compare with: train it on one rank."
    tolerance = TOLERANCE[share.dtype]
    if not difference(oracle(workload, shards, share, config), expected) < tolerance:
        return (
            "one process does not compute the same twice: seed all that is random in the model, the loss or the step."
        )
    if not normalises_over_ranks(workload.model, config, share.workers):
        return ""
    # With BatchNorm out of the way it must not matter whether shards are trained together.
    model = without_dropout(copy.deepcopy(workload.model))
    still = replace(workload, model=_set_eval(model, nn.modules.batchnorm._BatchNorm))
    merged = _merge_ranks(shards)
    one_by_one = _gradients(still, shards, share, config)
    if merged is None or not difference(_gradients(still, merged, share, config), one_by_one) < tolerance:
        return (
            "under --bn sync its proof puts the shards of all ranks into one batch, and on that this model or loss "
            "computes something else than on each (dropout by a function, a loss that is no mean over samples, batches "
            "that cannot be joined): prove it with --bn broadcast."
        )
    return ""


def normalises_over_ranks(model: nn.Module, config: RunConfig, workers: int) -> bool:
    """Whether ranks normalise over all of them, so that no shard can be trained by itself."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return config.bn == "sync" and workers > 1 and any(layer.training for layer in layers)


def without_dropout(model: nn.Module) -> nn.Module:
    """Switches dropout off: for a batch of all ranks it would draw other masks than for each of theirs."""
    return _set_eval(model, nn.modules.dropout._DropoutNd)


def clip_norm_of(step: int, steps: int, clip_norm: float | None) -> float | None:
    """What a proof clips to: only the last step is clipped, since clipping makes a mean out of a sum."""
    return clip_norm if 0 < step == steps - 1 else None


def backward(
    model: nn.Module, workload: Workload, share: Share, config: RunConfig, micro_batch: MicroBatch, place: Sequence[int]
) -> None:
    """Forward and backward of one micro_batch; what is random depends on its place alone: (step, rank, micro-batch)."""
    seed = hash(tuple(place)) % 2**31
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    batch = share.to_device(copy.deepcopy(micro_batch.content))  # A model may change its input.
    with autocast(config.precision, share.device):
        loss = workload.forward(model, batch).loss
    (loss * micro_batch.weight).backward()


def difference(found: Sequence[Gradients], expected: Sequence[Gradients]) -> float:
    """The relative error of the worst step."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        parameters = [(name, other.get(name, one.get(name))) for name in {**one, **other}]
        right = flatten(other, parameters)
        errors.append(relative_error(flatten(one, parameters) - right, right))
    return max(errors)


def relative_error(off: Tensor, right: Tensor) -> float:
    """‖off‖ ÷ ‖right‖; infinite where that is no number, but 0 where both are."""
    if not off.norm():
        return 0.0
    error = float(off.norm() / right.norm())
    return error if math.isfinite(error) else math.inf


def flatten(gradients: Gradients, parameters: NamedParameters | Sequence[tuple[str, Any]]) -> Tensor:
    """All gradients in one vector, zeros for those that are not there."""
    return torch.cat(
        [gradients.get(name, torch.zeros_like(p)).detach().double().cpu().reshape(-1) for name, p in parameters]
    )


def _gradients(workload: Workload, shards: Sequence[ShardStep], share: Share, config: RunConfig) -> list[Gradients]:
    first = copy.deepcopy(workload.model)
    if normalises_over_ranks(workload.model, config, share.workers):
        without_dropout(first)
    weights: dict[int, Any] = {id(parameter): parameter for parameter in first.parameters()}
    replicas = [first, *(copy.deepcopy(first, dict(weights)) for _ in shards[0][1:])]
    found: list[Gradients] = []
    for step, ranks in enumerate(shards):
        if config.bn == "broadcast":
            _share_buffers(replicas)
        for rank, (replica, micro_batches) in enumerate(zip(replicas, ranks, strict=True)):
            for number, micro_batch in enumerate(micro_batches):
                scaled = replace(micro_batch, weight=micro_batch.weight / share.workers)
                backward(replica, workload, share, config, scaled, (step, rank, number))
        max_norm = clip_norm_of(step, len(shards), config.clip_norm)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(first.parameters(), max_norm)
        found.append({name: p.grad.clone() for name, p in first.named_parameters() if p.grad is not None})
        first.zero_grad(set_to_none=True)
    return found


def _share_buffers(replicas: Sequence[nn.Module]) -> None:
    """Gives every replica the first one's, as ranks get rank 0's before each step."""
    first = dict(replicas[0].named_buffers())
    for replica in replicas[1:]:
        for name, buffer in replica.named_buffers():
            if buffer.is_floating_point() and name in first:
                buffer.detach().copy_(first[name].detach())


def _set_eval(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Puts the model's layers of a kind into evaluation mode."""
    for module in model.modules():
        if isinstance(module, kind):
            module.eval()
    return model


def _merge_ranks(shards: Sequence[ShardStep]) -> list[ShardStep] | None:
    """One rank's micro_batches instead of all ranks': micro-batch m is that of all of them; None where it cannot be made."""
    try:
        return [[[_merge_micro_batches(parts) for parts in zip(*step, strict=True)]] for step in shards]
    except (KeyError, RuntimeError, TypeError, ValueError):  # Shards padded to other lengths, say.
        return None


def _merge_micro_batches(parts: Sequence[MicroBatch]) -> MicroBatch:
    sizes = [part.samples for part in parts]
    content = _concatenate([part.content for part in parts], sizes)
    return replace(parts[0], samples=sum(sizes), weight=sum(part.weight for part in parts), content=content)


def _concatenate(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Batches one after the other in one batch; what does not have a row for each sample is the first one's."""
    first = parts[0]
    if isinstance(first, Tensor):
        by_sample = all(part.dim() and len(part) == size for part, size in zip(parts, sizes, strict=True))
        return torch.cat(list(parts)) if by_sample else first.clone()
    if isinstance(first, Mapping):
        return {key: _concatenate([part[key] for part in parts], sizes) for key in first}
    if isinstance(first, list | tuple):
        members = [_concatenate(member, sizes) for member in zip(*parts, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    return first
