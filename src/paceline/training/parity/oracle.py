"""Oracle of a parity proof: one process that trains the shards of all ranks in turn, on the same samples as the ranks.

The ranks fetch samples once and send them to the oracle. Fetching twice would give other samples: generators run only
once, and workers of a DataLoader augment differently each time. Each shard has its own replica of the model, which
shares only the weights, so that buffers and other state change as they do on that rank.

For a model with BatchNorm the undivided batch would be the wrong oracle, since sharding alone changes the gradient.
Under `--bn sync` it is the right one: there a micro-batch is normalised over all ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm.group import Comm
from paceline.comm.messages.nested import NestedMessage, receive_nested
from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.training.parity.difference import Gradients, repeats
from paceline.training.precision import autocast
from paceline.workloads.batches import MicroBatch, Share, Source
from paceline.workloads.random_state import seed_everything
from paceline.workloads.workload import Workload

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error of a lossless strategy, relative to the norm of the gradient."""

ShardStep = list[list[MicroBatch]]
"""Micro-batches of every rank in one step, with the fetched batches as content."""


@dataclass(frozen=True)
class Shards:
    """Samples of a proof."""

    own: list[list[MicroBatch]]
    """This rank's micro-batches of each step."""
    all_ranks: list[ShardStep]
    """All ranks' micro-batches of each step on rank 0; empty on other ranks."""


_BATCH_HINT = (
    "return tensors, arrays, numbers and strings, in lists, tuples or dicts; or leave out the proof of strategies, "
    "which needs the batches of all ranks: --no-proof"
)


def draw_shards(source: Source, comm: Comm, steps: int) -> Shards:
    """Fetch the samples of all ranks for the given number of steps; shorter data is repeated."""
    drawn = list(itertools.islice(_batches(source, comm), steps))
    if not drawn:
        raise WorkloadError(
            "the training data has no batch.", hint="provide at least one batch with a sample for every rank"
        )
    own = list(itertools.islice(itertools.cycle(drawn), steps))
    all_ranks = [list(step) for step in zip(*_gather_drawn(drawn, comm), strict=True)]
    return Shards(own, list(itertools.islice(itertools.cycle(all_ranks), steps)))


def _gather_drawn(drawn: list[list[MicroBatch]], comm: Comm) -> list[list[list[MicroBatch]]]:
    """Return the micro-batches of each step of every rank, on rank 0; empty on other ranks."""
    own = [[[one.samples, one.weight, one.epoch, one.content] for one in step] for step in drawn]
    message, group = NestedMessage(own, "a batch", _BATCH_HINT), comm.control.group
    if comm.rank != 0:
        message.send(0, group)
        return []
    received = [receive_nested(rank, group, own) for rank in range(1, comm.world_size)]
    return [drawn, *([[MicroBatch(*one) for one in step] for step in rank] for rank in received)]


def _batches(source: Source, comm: Comm) -> Iterator[list[MicroBatch]]:
    """Yield epoch after epoch, each until the data ends on any rank; stop at an empty epoch."""
    host = replace(source.share, device=torch.device("cpu"))
    for epoch in itertools.count():
        trained = False
        steps = source.epoch(epoch)
        while comm.control.smallest(int((micro_batches := next(steps, None)) is not None)):
            assert micro_batches is not None
            trained = True
            # Copied, since a slice would send the whole global batch with it.
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
    """Return the mean gradient of each step."""
    if normalises_over_ranks(workload.model, config, share.workers):
        merged = _merge_ranks(shards)
        if merged is not None:
            return _gradients(workload, merged, share, config)
    return _gradients(workload, shards, share, config)


def inconclusive_reason(
    workload: Workload, shards: Sequence[ShardStep], share: Share, config: RunConfig, expected: Sequence[Gradients]
) -> str:
    """Return why the oracle proves nothing about strategies on this workload, and what to do; empty if it does."""
    if not all(gradient.isfinite().all() for step in expected for gradient in step.values()):
        return (
            "the gradients of one process are not finite, so there is nothing to compare with; train the workload on "
            "one rank to find the cause."
        )
    tolerance = TOLERANCE[share.dtype]
    if not repeats(oracle(workload, shards, share, config), expected, tolerance):
        return (
            "one process computes different gradients when it repeats the same steps; seed every random number in the "
            "model, the loss and the step."
        )
    if not normalises_over_ranks(workload.model, config, share.workers):
        return ""
    # With BatchNorm in evaluation mode, merging the shards must not change the gradient.
    model = without_dropout(copy.deepcopy(workload.model))
    still = replace(workload, model=_set_eval(model, nn.modules.batchnorm._BatchNorm))
    merged = _merge_ranks(shards)
    one_by_one = _gradients(still, shards, share, config)
    if merged is None or not repeats(_gradients(still, merged, share, config), one_by_one, tolerance):
        return (
            "under --bn sync the proof merges the shards of all ranks into one batch, and this model or loss computes "
            "something else on the merged batch (functional dropout, a loss that is not a mean over samples, batches "
            "that cannot be merged); use --bn broadcast to prove the strategy."
        )
    return ""


def normalises_over_ranks(model: nn.Module, config: RunConfig, workers: int) -> bool:
    """Whether BatchNorm layers normalise over all ranks, so that a shard cannot be trained alone."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return config.bn == "sync" and workers > 1 and any(layer.training for layer in layers)


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch dropout off: for a merged batch it would draw other masks than for each rank's batch."""
    return _set_eval(model, nn.modules.dropout._DropoutNd)


def clip_norm_of(step: int, steps: int, clip_norm: float | None) -> float | None:
    """Return the norm to clip a step to, set for the last step only: clipping would hide a sum in place of a mean."""
    return clip_norm if 0 < step == steps - 1 else None


def backward(
    model: nn.Module,
    workload: Workload,
    share: Share,
    config: RunConfig,
    micro_batch: MicroBatch,
    place: Sequence[int],
    scaler: GradScaler | None = None,
) -> None:
    """Run forward and backward of one micro-batch; `place` (step, rank, micro-batch) seeds its random numbers."""
    seed_everything(hash(tuple(place)) % 2**31)
    batch = share.to_device(copy.deepcopy(micro_batch.content))  # Copied, since a model may change its input.
    with autocast(config.precision, share.device):
        loss = workload.forward(model, batch).loss
    weighted = loss * micro_batch.weight
    (weighted if scaler is None else scaler.scale(weighted)).backward()


def _gradients(workload: Workload, shards: Sequence[ShardStep], share: Share, config: RunConfig) -> list[Gradients]:
    """Train the shards one after the other, each on its replica; return the mean gradient of each step."""
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
    """Copy the first replica's buffers to the others, as ranks receive rank 0's before each step."""
    first = dict(replicas[0].named_buffers())
    for replica in replicas[1:]:
        for name, buffer in replica.named_buffers():
            if name in first and buffer.shape == first[name].shape:
                buffer.detach().copy_(first[name].detach())


def _set_eval(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Put the model's layers of a type into evaluation mode."""
    for module in model.modules():
        if isinstance(module, kind):
            module.eval()
    return model


def _merge_ranks(shards: Sequence[ShardStep]) -> list[ShardStep] | None:
    """Merge micro-batch m of all ranks into one, for a single rank; None if the batches cannot be concatenated."""
    try:
        return [[[_merge_micro_batches(parts) for parts in zip(*step, strict=True)]] for step in shards]
    except (KeyError, RuntimeError, TypeError, ValueError):  # For example, shards padded to different lengths.
        return None


def _merge_micro_batches(parts: Sequence[MicroBatch]) -> MicroBatch:
    sizes = [part.samples for part in parts]
    content = _concatenate([part.content for part in parts], sizes)
    return replace(parts[0], samples=sum(sizes), weight=sum(part.weight for part in parts), content=content)


def _concatenate(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate batches; a value without one row per sample is taken from the first batch."""
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
