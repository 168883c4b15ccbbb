"""BatchNorm over ranks: synchronise running statistics, or normalise by the statistics of all ranks.

There are three modes. `broadcast`: before each step every rank receives rank 0's buffers, as under DDP. `local`: every
rank keeps its own buffers, and the result of the run has rank 0's. `sync`: every rank normalises by the mean and
variance of the *global* batch, so that sharding does not change the result. PyTorch's SyncBatchNorm does not support
CPUs; this one runs on any device and is exact in forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.comm.group import Comm, from_rank_0, pack_bytes, unpack_bytes
from paceline.comm.groups.timed import carrying
from paceline.comm.messages.json_messages import gather_typed
from paceline.comm.messages.tensor_layout import TensorLayout, first_difference, layout_of
from paceline.errors import WorkloadError
from paceline.records.timeline import Purpose

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


_BUFFERS_HINT = (
    "create buffers with the same shape on every rank, or use --bn local, which does not broadcast them "
    '(in your own training loop: attach(…, bn="local"))'
)
_Kind = tuple[str, torch.dtype, torch.Size]
_HEADER_BYTES = 8
"""Bytes before the buffers in a broadcast: the first is 1 if rank 0's layout has changed, else 0. Eight keep the
buffers aligned."""


class UpdatedBuffers:
    """Buffers that training updates: running statistics and their counts, and any others that a model changes.

    Constant buffers (masks, position tables) are never sent. To find the updated ones, the ranks compare values after
    the first step and at the end of each epoch. Version counters would not do: BatchNorm's kernels write running
    statistics without changing them.

    The ranks also compare the layout of all buffers then, and every message has the size of that layout. A model may
    replace buffers by others of another shape, such as a cache that grows. A rank that finds its own layout changed
    never sends or receives into it: either all ranks agree on the new layout, or training is refused.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._comm = comm
        self._owners = [(f"{path}." if path else "", module._buffers) for path, module in model.named_modules()]
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        """Values at the start, of buffers that are not known to change."""
        self._layout: list[TensorLayout] | None = None
        """Layout of all buffers of this rank at the last search; None before the first."""
        self._kinds: list[_Kind] = []
        """The same in a form that each step compares with the present buffers in less time."""
        self._updated: list[str] = []
        """Names of the buffers that change and have the same layout on all ranks."""
        self._updated_bytes = 0
        self._kept: dict[str, Tensor] = {}
        """Copies of the buffers, made by `keep`, which uses their memory again in each step."""
        self._difference = ""
        """First difference between the ranks' layouts at the last search; empty if there was none."""

    @property
    def may_exist(self) -> bool:
        """Whether the model has any buffer, which training may update; it may be None at first."""
        return any(buffers for _, buffers in self._owners)

    @property
    def message_bytes(self) -> list[int]:
        """Bytes of each message of a broadcast of the known updated buffers: one message, or none."""
        return [_HEADER_BYTES + self._updated_bytes] if self._updated else []

    def broadcast(self) -> None:
        """Broadcast rank 0's updated buffers to every rank."""
        if self._comm.world_size == 1:
            return
        if self._layout is None:
            self._find_updated()
        self._check_layout()
        while self._updated and not self._broadcast_in_layout():
            self._find_updated()
            self._check_layout()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Replace the updated buffers by rank 0's inside the `with` block, then restore them.

        A buffer whose layout differs between ranks stays each rank's own. The search for updated buffers leaves no
        trace: training goes on as if nothing had been evaluated.
        """
        found = self._before, self._layout, self._kinds, self._updated, self._updated_bytes, self._difference
        self._before = dict(self._before)
        try:
            self._find_updated()
            if self._comm.world_size == 1:
                yield
                return
            with from_rank_0(self._tensors(), self._comm):
                yield
        finally:
            self._before, self._layout, self._kinds, self._updated, self._updated_bytes, self._difference = found

    def keep(self) -> None:
        """Copy all buffers of this rank, so that `restore` can undo a step."""
        present, before = self._buffers(), self._kept
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # One kernel copies those of one dtype.
        self._kept = {}
        for name, buffer in present.items():
            kept = before.get(name)
            if kept is None or not _are_alike(kept, buffer):
                self._kept[name] = buffer.detach().clone()
                continue
            self._kept[name] = kept
            copies, buffers = by_dtype.setdefault(buffer.dtype, ([], []))
            copies.append(kept)
            buffers.append(buffer)
        with torch.no_grad():
            for copies, buffers in by_dtype.values():
                torch._foreach_copy_(copies, buffers)

    def restore(self) -> None:
        """Give the buffers of this rank the values that they had when `keep` was called.

        A step on a batch with NaN makes running statistics NaN for ever, although the update of weights is skipped.
        Buffers that the model has replaced by some of another layout since then stay as they are.
        """
        for name, buffer in self._buffers().items():
            kept = self._kept.get(name)
            if kept is None or not _are_alike(kept, buffer):
                continue
            if not torch.equal(kept, buffer):
                buffer.detach().copy_(kept)
                self._before.pop(name, None)  # Training changes it, even if its value is now that of the start.

    def divergence(self) -> float | None:
        """Return the largest distance of any rank's buffers from rank 0's, relative to their norm; None without any.

        Only floating-point buffers of the same layout on all ranks are compared.
        """
        self._find_updated()
        tensors = [tensor for tensor in self._tensors() if tensor.is_floating_point()]
        return relative_divergence(tensors, self._comm) if tensors else None

    def _broadcast_in_layout(self) -> bool:
        """Broadcast the updated buffers in the layout of the last search; return False if rank 0's has changed.

        If only this rank's layout has changed, it raises: then rank 0's bytes have no place here. On a GPU reading
        rank 0's header would make every step wait for the device, so there any change of the layout is refused.
        """
        assert self._layout is not None
        buffers, comm = self._buffers(), self._comm
        is_changed, on_host = _kinds(buffers) != self._kinds, comm.device.type == "cpu"
        found = layout_of(buffers.items()) if is_changed else self._layout
        if is_changed and not on_host:
            name = min(one.name for one in {*found}.symmetric_difference(self._layout))
            raise WorkloadError(
                f"the buffer {name} of rank {comm.rank} was added or removed, or its shape or type changed, after the "
                "first step; on a GPU --bn broadcast needs buffers of constant shape.",
                hint=_BUFFERS_HINT,
            )
        size = _HEADER_BYTES + self._updated_bytes
        message = torch.zeros(size, dtype=torch.uint8, device=comm.device)
        if comm.rank == 0 and is_changed:
            message[0] = 1
        elif comm.rank == 0:
            pack_bytes([buffers[name].detach() for name in self._updated], message[_HEADER_BYTES:])
        with comm.carrying(Purpose.BUFFERS):
            dist.broadcast(message, group_src=0, group=comm.group)
        if on_host and message[0]:
            return False
        if is_changed:
            raise _layout_error(first_difference({0: self._layout, comm.rank: found}))
        if comm.rank != 0:
            unpack_bytes(message[_HEADER_BYTES:], [buffers[name].detach() for name in self._updated])
        return True

    def _check_layout(self) -> None:
        """Raise, on all ranks, if the layouts differed at the last search."""
        if self._difference:
            raise _layout_error(self._difference)

    def _find_updated(self) -> None:
        """Find the buffers that have changed on any rank, and compare the layouts of all ranks."""
        buffers = self._buffers()
        own = [_BufferState(one, self._is_changed(one.name, buffers)) for one in layout_of(buffers.items())]
        ranks = gather_typed(own, list[_BufferState], self._comm.control)
        layouts = {rank: [state.layout for state in states] for rank, states in enumerate(ranks)}
        shared = set(layouts[0]).intersection(*layouts.values())
        changed = {state.layout.name for states in ranks for state in states if state.is_changed}
        self._layout, self._difference = layouts[self._comm.rank], first_difference(layouts)
        self._kinds = _kinds(buffers)
        self._updated = [one.name for one in layouts[0] if one in shared and one.name in changed]
        self._updated_bytes = sum(tensor.nbytes for tensor in self._tensors())
        for name in changed:
            self._before.pop(name, None)

    def _is_changed(self, name: str, buffers: Mapping[str, Tensor]) -> bool:
        before, now = self._before.get(name), buffers[name]
        return before is None or not _are_alike(before, now) or not torch.equal(before, now)

    def _tensors(self) -> list[Tensor]:
        buffers = self._buffers()
        return [buffers[name].detach() for name in self._updated]

    def _buffers(self) -> dict[str, Tensor]:
        """Return all buffers by name, looked up at each use, since a model may replace them; a shared one once."""
        found: dict[int, tuple[str, Tensor]] = {}
        for path, buffers in self._owners:
            for name, buffer in buffers.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (path + name, buffer))
        return dict(found.values())


class _BufferState(msgspec.Struct, frozen=True, array_like=True):
    """Layout of a buffer of one rank, and whether its value has changed since the start."""

    layout: TensorLayout
    is_changed: bool


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _kinds(buffers: Mapping[str, Tensor]) -> list[_Kind]:
    return [(name, buffer.dtype, buffer.shape) for name, buffer in buffers.items()]


def _layout_error(difference: str) -> WorkloadError:
    return WorkloadError(
        f"the buffers of the ranks differ, so rank 0's cannot be broadcast: {difference}.", hint=_BUFFERS_HINT
    )


def relative_divergence(tensors: Sequence[Tensor], comm: Comm) -> float:
    """Return the largest distance of any rank's tensors from rank 0's, relative to their norm; 0 only if identical."""
    own = torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors])
    first = own.clone()
    dist.broadcast(first, group_src=0, group=comm.control.group)
    distances = comm.control.gather((own - first).norm().reshape(1))
    return max(float(distance) for distance in distances) / (float(first.norm()) or 1.0)


@contextmanager
def sync_batchnorm(model: nn.Module, comm: Comm) -> Iterator[None]:
    """Make the model's BatchNorm layers normalise over all ranks inside the `with` block; the objects stay the same.

    Every rank calls this. The statistics have a group of their own: strategies send gradients during backward, and on
    one group the order of both kinds of messages would have to be the same on all ranks.
    """
    named: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)}
    layers = list(named.values())
    own = [type(layer).__name__ for layer in layers if type(layer).forward is not nn.BatchNorm2d.forward]
    if own:
        raise WorkloadError(
            f"--bn sync cannot replace {own[0]}: its forward pass is not that of torch's BatchNorm.",
            hint="use --bn broadcast or --bn local",
        )
    kinds = [type(layer) for layer in layers]
    if comm.control.largest(len(layers)):  # The same decision on all ranks, even if their models differ.
        exchange = StatisticsExchange(comm.subgroup(range(comm.world_size)), list(named))
    for number, layer in enumerate(layers):
        layer.kind, layer.__class__ = type(layer), SyncedBatchNorm
        layer.exchange, layer.number = exchange, number
    try:
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            del layer.exchange, layer.number, layer.kind


class StatisticsExchange:
    """Messages between the ranks' BatchNorm layers. Each carries the number of its layer, to find ranks that differ.

    Where a branch is used on some ranks only, its layers would exchange statistics with other layers elsewhere.
    """

    def __init__(self, group: dist.ProcessGroup, names: Sequence[str]) -> None:
        self._group = group
        self._names = names

    def gather(self, own: Tensor, number: int) -> Tensor:
        """Return the statistics of a layer of every rank, one row for each."""
        # `new_full` fills on the device; `new_tensor` would copy from the host, and wait for all earlier kernels.
        own = torch.cat([own, own.new_full((1,), number)])
        everyone = own.new_empty(self._group.size(), own.numel())
        with carrying(self._group, Purpose.STATISTICS):
            dist.all_gather(list(everyone.unbind()), own, group=self._group)
        self._check_layer(everyone[:, -1], number)
        return everyone[:, :-1]

    def sum(self, own: Tensor, number: int) -> Tensor:
        """Return the sum of a layer's statistics over the ranks."""
        total = torch.cat([own, own.new_full((1,), number)])
        with carrying(self._group, Purpose.STATISTICS):
            dist.all_reduce(total, group=self._group)
        self._check_layer(total[-1:] / self._group.size(), number)
        return total[:-1]

    def _check_layer(self, numbers: Tensor, number: int) -> None:
        """Raise unless all ranks are in the layer with this number."""
        if numbers.device.type != "cpu":  # Reading the numbers would make every layer wait for the device.
            torch._assert_async((numbers == number).all(), "ranks are in different BatchNorm layers under --bn sync")
        elif bool((numbers != number).any()):
            raise WorkloadError(
                f"under --bn sync all ranks must use the same BatchNorm layers in the same order, but while rank "
                f"{self._group.rank()} is in {self._names[number]}, another rank is in another layer.",
                hint="use --bn broadcast or --bn local, or let every rank run the same layers",
            )


class SyncedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm layer that normalises over the batches of all ranks."""

    exchange: StatisticsExchange
    number: int
    """Number of the layer in the model."""
    kind: type[nn.modules.batchnorm._BatchNorm]
    """Class that the layer had before; copies and files of the model have it again, and exchange nothing."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key not in ("exchange", "number", "kind")}
        return self.kind.__new__, (self.kind,), state

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape with channels in the second dimension."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the global batch in training, by the running statistics in evaluation."""
        if not self.training:
            return super().forward(input)
        normalise: Any = _SyncedNormalise.apply
        output, mean, variance = normalise(input, self.weight, self.bias, self.eps, self.exchange, self.number)
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
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        exchange: StatisticsExchange,
        number: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // x.shape[1]
        local_variance, local_mean = torch.var_mean(precise, dims, correction=0)
        own = torch.cat([local_mean, local_variance * count, local_mean.new_full((1,), count)])
        means, squares, counts = exchange.gather(own, number).split([x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        square = (squares + counts * (means - mean).square()).sum(0)
        inverse_deviation = torch.rsqrt(square / total + eps)
        ctx.save_for_backward(x, weight, mean, inverse_deviation, total)
        ctx.exchange, ctx.number = exchange, number
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
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        sum_dy, sum_dy_centred = ctx.exchange.sum(own.flatten(), ctx.number).view_as(own) / total
        grad_x = dy_precise - _per_channel(sum_dy, x)
        grad_x -= centred * _per_channel(inverse_deviation.square() * sum_dy_centred, x)
        return (grad_x * _per_channel(scale, x)).to(x.dtype), grad_weight, grad_bias, None, None, None


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
