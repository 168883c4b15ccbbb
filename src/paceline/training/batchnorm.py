"""BatchNorm over ranks: synchronise running statistics, or normalise by the statistics of all ranks.

There are three modes. `broadcast`: before each step every rank receives rank 0's buffers, as under DDP. `local`: every
rank keeps its own buffers, and the result of the run has rank 0's. `sync`: every rank normalises by the mean and
variance of the *global* batch, so that sharding does not change the result. PyTorch's SyncBatchNorm does not support
CPUs; this one runs on any device and is exact in forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.comm.group import Comm, broadcast_from_rank_0, from_rank_0
from paceline.comm.timed_group import carrying
from paceline.errors import WorkloadError
from paceline.records.timeline import Purpose

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class UpdatedBuffers:
    """Floating-point buffers that training updates: running statistics, and any others that a model changes.

    Constant buffers (masks, position tables) are never sent. To find the updated ones, the ranks compare values after
    the first step and at the end of each epoch. Version counters would not do: BatchNorm's kernels write running
    statistics without changing them.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._comm = comm
        self._slots = [
            _Slot(module._buffers, name, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        self._searched = False

    @property
    def may_exist(self) -> bool:
        """Whether the model has any floating-point buffer, which training may update."""
        return bool(self._slots)

    @property
    def message_bytes(self) -> list[int]:
        """Bytes of each message of a broadcast of the known updated buffers: one message per dtype."""
        by_type = Counter[torch.dtype]()
        for tensor in self._tensors():
            by_type[tensor.dtype] += tensor.nbytes
        return list(by_type.values())

    def broadcast(self) -> None:
        """Broadcast rank 0's updated buffers to every rank."""
        if not self._searched:
            self._find_updated()
        tensors = self._tensors()
        if tensors and self._comm.world_size > 1:
            with self._comm.carrying(Purpose.BUFFERS):
                broadcast_from_rank_0(tensors, self._comm)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Replace the updated buffers by rank 0's inside the `with` block, then restore them."""
        self._find_updated()
        if self._comm.world_size == 1:
            yield
            return
        with from_rank_0(self._tensors(), self._comm):
            yield

    def divergence(self) -> float | None:
        """Return the largest distance of any rank's buffers from rank 0's, relative to their norm; None without any."""
        self._find_updated()
        tensors = self._tensors()
        return relative_divergence(tensors, self._comm) if tensors else None

    def _tensors(self) -> list[Tensor]:
        return [slot.tensor.detach() for slot in self._slots if slot.before is None]

    def _find_updated(self) -> None:
        """Find the buffers that have changed on any rank."""
        self._searched = True
        candidates = [slot for slot in self._slots if slot.before is not None]
        if not candidates:
            return
        changed = torch.tensor([not torch.equal(slot.tensor, slot.before) for slot in candidates], dtype=torch.int32)
        for slot, ranks_changed in zip(candidates, self._comm.control.sum(changed).tolist(), strict=True):
            if ranks_changed:
                slot.before = None


@dataclass
class _Slot:
    """Dictionary entry of a buffer, looked up at each use, since a model may replace the tensor."""

    owner: dict[str, Tensor | None]
    name: str
    before: Any
    """Value at the start; None once the buffer is known to change."""

    @property
    def tensor(self) -> Tensor:
        tensor = self.owner[self.name]
        assert tensor is not None
        return tensor


def relative_divergence(tensors: Sequence[Tensor], comm: Comm) -> float:
    """Return the largest distance of any rank's tensors from rank 0's, relative to their norm; 0 only if identical."""
    own = torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors])
    first = own.clone()
    dist.broadcast(first, group_src=0, group=comm.control.group)
    distances = comm.control.gather((own - first).norm().reshape(1))
    return max(float(distance) for distance in distances) / (float(first.norm()) or 1.0)


@contextmanager
def sync_batchnorm(model: nn.Module, comm: Comm) -> Iterator[None]:
    """Make the model's BatchNorm layers normalise over all ranks inside the `with` block; the objects stay the same."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    own = [type(layer).__name__ for layer in layers if type(layer).forward is not nn.BatchNorm2d.forward]
    if own:
        raise WorkloadError(
            f"--bn sync cannot replace {own[0]}: its forward pass is not that of torch's BatchNorm.",
            hint="use --bn broadcast or --bn local",
        )
    kinds = [type(layer) for layer in layers]
    for layer in layers:
        layer.kind, layer.__class__ = type(layer), SyncedBatchNorm
        layer.group = comm.group
    try:
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            del layer.group, layer.kind


class SyncedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm layer that normalises over the batches of all ranks of `group`."""

    group: dist.ProcessGroup
    kind: type[nn.modules.batchnorm._BatchNorm]
    """Class that the layer had before; copies and files of the model have it again, and no group."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key not in ("group", "kind")}
        return self.kind.__new__, (self.kind,), state

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape with channels in the second dimension."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the global batch in training, by the running statistics in evaluation."""
        if not self.training:
            return super().forward(input)
        normalise: Any = _SyncedNormalise.apply
        output, mean, variance = normalise(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats:
            self._track(mean, variance)
        assert isinstance(output, Tensor)
        return output

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _SyncedNormalise(torch.autograd.Function):
    """Autograd function y = (x − mean)/√(variance + ε)·weight + bias, with mean and variance over all ranks' x.

    Forward gathers every rank's (mean, sum of squared distances, count) in one message and merges them with the
    parallel formula of Chan et al. (1979), which avoids the cancellation of a difference of squares. Backward sums Σdy
    and Σdy·(x − mean) over the ranks, again in one message.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // x.shape[1]
        local_variance, local_mean = torch.var_mean(precise, dims, correction=0)
        own = torch.cat([local_mean, local_variance * count, local_mean.new_tensor([count])])
        everyone = own.new_empty(group.size(), own.numel())
        with carrying(group, Purpose.STATISTICS):
            dist.all_gather(list(everyone.unbind()), own, group=group)
        means, squares, counts = everyone.split([x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        square = (squares + counts * (means - mean).square()).sum(0)
        inverse_deviation = torch.rsqrt(square / total + eps)
        ctx.save_for_backward(x, weight, mean, inverse_deviation, total)
        ctx.group = group
        ctx.has_bias = bias is not None
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        output = torch.addcmul(_per_channel(shift, x), precise, _per_channel(scale, x)).to(x.dtype)
        unbiased = square / (total - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean, unbiased)
        return output, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation, total = ctx.saved_tensors
        precise, dy_precise = x.to(mean.dtype), dy.to(mean.dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = precise - _per_channel(mean, x)
        own = torch.stack([dy_precise.sum(dims), (dy_precise * centred).sum(dims)])
        grad_weight = own[1] * inverse_deviation if weight is not None else None
        grad_bias = own[0].clone() if ctx.has_bias else None
        with carrying(ctx.group, Purpose.STATISTICS):
            dist.all_reduce(own, group=ctx.group)
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        sum_dy, sum_dy_centred = own / total
        grad_x = dy_precise - _per_channel(sum_dy, x)
        grad_x -= centred * _per_channel(inverse_deviation.square() * sum_dy_centred, x)
        return (grad_x * _per_channel(scale, x)).to(x.dtype), grad_weight, grad_bias, None, None


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
