"""Base class of strategies that send gradients during backward: hooks fill buckets, full buckets are sent in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from paceline.errors import WorkloadError
from paceline.plans.buckets import MIB, assign_buckets
from paceline.strategies.base.buckets import Bucket, Slot, make_buckets
from paceline.strategies.base.scaling import scaler_argument
from paceline.strategies.base.strategy import SendMode, Strategy, sparse_gradient_error

__all__ = ["Bucket", "Overlapped", "Slot"]

_TWICE_HINT = (
    "put `with sync.accumulate():` around all backward passes of a step but the last, "
    "and checkpoint with use_reentrant=False"
)
_CHANGED_HINT = (
    "clip with sync.step(max_norm=…), unscale with sync.step(scaler=…), change gradients in a "
    "parameter.register_hook(…), or use ddp, which waits for the gradients before backward returns"
)
_REMOVED_HINT = (
    "sync.step() clears gradients itself; to leave out a parameter, fill its gradient with zeros, "
    "or attach(…, allow_unused=True)"
)


class Overlapped(Strategy):
    """Base class of strategies that reduce each bucket of gradients as soon as backward has filled it.

    Subclasses write `launch`, which starts to sum a full bucket over the ranks, and `wait`, which waits for the sum.
    Gradients are divided by the number of ranks when they are copied into the bucket, so the sum is the mean. Buckets
    are launched in the order of their numbers on every rank. From the second step on, this is the order in which
    backward fills them, as recorded on rank 0 in the first step.

    As under DDP, `backward()` of the last micro-batch returns with the mean in `.grad`, so code between backward and
    `step` may read and change it, in the same way on all ranks. A further backward pass before `step` adds to the mean,
    and what it adds is averaged at its end.
    """

    sends: ClassVar[SendMode] = "overlapped"
    agrees_in_backward: ClassVar[bool] = True
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    """Size of the first bucket. It is small, so that communication starts early."""

    @abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """Start to sum a full bucket over the ranks; called in the same order on all of them."""

    @abstractmethod
    def wait(self, bucket: Bucket) -> None:
        """Wait until the bucket holds the sum."""

    def leave_incomplete(self) -> None:
        """Prepare gradients that were sent for other code: the pass has ended, and another one fills the rest."""

    # A step: hooks fill buckets during backward, the end of backward waits for the sums, `step` updates.

    def wrap(self, model: nn.Module) -> nn.Module:
        self._is_last_microbatch = True
        """Whether the current micro-batch is the last of its step."""
        self._has_mean = False
        """Whether the gradients hold the mean over the ranks, and no backward pass has added to them since."""
        self._step_number = 0
        self._averages = 0
        """Number of times that the gradients of this step were averaged: once, unless several passes need it."""
        self._pass = -1
        """Number of the backward pass whose end will call `_on_backward_end`, as the autograd engine counts them."""
        self._order: list[int] | None = []
        """Positions of parameters in the order of their gradients in the first backward pass; None after that step."""
        self._hooks: list[RemovableHandle] = []
        self.buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        """One slot for each parameter, in the order of the parameters."""
        if self.comm.world_size > 1:
            self._build_buckets(range(len(self.parameters) - 1, -1, -1))
            for position, (_, parameter) in enumerate(self.parameters):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_hook(position)))
        return model

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        before, self._is_last_microbatch = self._is_last_microbatch, last
        try:
            yield
        finally:
            self._is_last_microbatch = before

    def _make_hook(self, position: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if self._has_mean:  # This pass adds to the mean of an earlier one.
                self._has_mean = False
                if self._order is not None:
                    self._order.clear()
            if self._is_last_microbatch:
                assert parameter.grad is not None
                if self.agrees_in_backward:
                    self._watch_end_of_backward()
                self._add_gradient(self._slots[position], parameter.grad)
                if self._order is not None:
                    self._order.append(position)

        return on_gradient

    @torch.no_grad()  # backward(create_graph=True) records operations for second derivatives.
    def _add_gradient(self, slot: Slot, gradient: Tensor) -> None:
        if slot.gradient is not None:
            raise WorkloadError(
                f"{slot.name} got a gradient twice in one step; the first one has already been sent.",
                hint=_TWICE_HINT,
            )
        if gradient.is_sparse:
            raise sparse_gradient_error(slot.name)
        self.copy_in(slot, gradient)
        if not gradient.requires_grad:
            # The gradients of concatenated parameters are views of one tensor and share its version counter. `.data`
            # has its own, which only changes to this gradient move.
            gradient = slot.parameter.grad = gradient.data
        slot.gradient, slot.version = gradient, gradient._version
        self._count_gradient(slot.bucket)

    def _count_gradient(self, bucket: Bucket) -> None:
        """Count one more gradient in a bucket, and launch all full buckets whose predecessors have been launched."""
        bucket.missing -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.launch(self.buckets[self._next])
            self._next += 1

    def _watch_end_of_backward(self) -> None:
        """Call `_on_backward_end` at the end of the current backward pass."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        """Wait for the means, unless further backward passes have to fill the buckets first.

        A backward pass inside another one (checkpointing with use_reentrant=True) ends before the outer pass, which may
        still compute gradients. If the inner pass is the last to compute one, no hook runs in the outer pass.
        """
        is_inner = torch._C._current_autograd_node() is not None
        if is_inner:
            is_complete = all(slot.gradient is not None for slot in self._slots)
        else:
            is_complete = self.allow_unused or all(parameter.grad is not None for _, parameter in self.parameters)
        if not is_complete:
            self.leave_incomplete()
        elif not self._has_mean:
            self._agree()

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if self._has_mean:
            self._check_kept()
        elif self.comm.world_size > 1:
            self._agree()  # No backward pass has filled all buckets, outside `accumulate`.
        else:
            self._check_all_used()
        self._has_mean = False
        self._step_number, self._averages = self._step_number + 1, 0
        self.update(max_norm, **scaler_argument(scaler))
        if self._order is not None and self.comm.world_size > 1:
            self._rebuild_in_order(self._order)
        self._order = None

    @torch.no_grad()
    def _agree(self) -> None:
        """Wait for all buckets, and make the means the gradients."""
        used = self._complete_buckets()
        for bucket in self.buckets:
            self.wait(bucket)
        for slot, is_used in zip(self._slots, used, strict=True):
            slot.parameter.grad = slot.sum_view if is_used else None
        self._reset_buckets()
        self._has_mean = True
        self._averages += 1

    def _complete_buckets(self) -> list[bool]:
        """Fill the slots that the last backward pass did not reach.

        Return, for each parameter, whether any rank has a gradient for it.
        """
        self._check_unchanged()
        self._check_all_used()
        for slot in self._slots:
            if slot.gradient is None and slot.parameter.grad is not None:  # From an earlier micro-batch.
                self._add_gradient(slot, slot.parameter.grad)
        filled = [slot.gradient is not None for slot in self._slots]
        if not self.allow_unused:
            return filled
        for slot in self._slots:
            if slot.gradient is None:
                slot.view.zero_()
                self._count_gradient(slot.bucket)
        return self._used_on_any_rank(filled)

    def _used_on_any_rank(self, filled: Sequence[bool]) -> list[bool]:
        """Return for each parameter whether any rank has a gradient; raise on all ranks if they average other passes.

        A rank on which a backward pass reaches no parameter cannot average then. Its next average would be combined
        with the wrong one of the other ranks, so the exchange also compares the place of this average.
        """
        place = self._step_number % 16 * 16 + self._averages % 16
        flags = torch.tensor([*filled, place, 255 - place], dtype=torch.uint8)
        *used, largest, complement = self.comm.control.any_of(flags).tolist()
        if largest != 255 - complement:
            raise WorkloadError(
                "a backward pass reached parameters on some ranks only, and another pass followed it in the same step.",
                hint=_TWICE_HINT,
            )
        return [bool(flag) for flag in used]

    def _check_unchanged(self) -> None:
        """Raise if a gradient was changed after it was sent: the change would be lost silently."""
        for slot in self._slots:
            if not slot.is_unchanged:
                raise changed_gradient_error(slot)

    def _check_kept(self) -> None:
        """Raise if a gradient that backward has averaged was removed."""
        removed = [name for name, parameter in self.parameters if parameter.grad is None]
        if removed and not self.allow_unused:
            raise WorkloadError(f"{removed[0]} lost its gradient between backward and sync.step().", hint=_REMOVED_HINT)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._drop_buckets()
        super().close()

    # Buckets: which gradients each holds, and in which memory. A subclass may provide its own memory.

    def copy_in(self, slot: Slot, gradient: Tensor) -> None:
        """Copy a gradient into its bucket, divided by the number of ranks."""
        torch.mul(gradient, self._inverse_ranks, out=slot.view)

    def assign_buckets(self, sizes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
        """Return, for each bucket, the indices of its gradients.

        `sizes` (in bytes) and `kinds` (data type and device) are in the order in which backward fills the buckets.
        """
        return assign_buckets(sizes, kinds, self.first_bucket_bytes, self.bucket_bytes)

    def allocate(self, items: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Return a flat tensor for each bucket, with `items` numbers, of the type and device of `like`."""
        return [torch.zeros(count, dtype=one.dtype, device=one.device) for count, one in zip(items, like, strict=True)]

    def sums_of(self, memory: list[Tensor]) -> list[Tensor]:
        """Return the flat tensors that will hold the sums: by default the buckets themselves."""
        return memory

    def _rebuild_in_order(self, seen: Sequence[int]) -> None:
        """Rebuild the buckets in the order of rank 0's first backward pass; parameters it did not reach come last."""
        rest = [position for position in range(len(self.parameters) - 1, -1, -1) if position not in seen]
        order = torch.tensor([*seen, *rest])
        dist.broadcast(order, group_src=0, group=self.comm.control.group)
        self._build_buckets(order.tolist())

    def _build_buckets(self, order: Sequence[int]) -> None:
        """Assign the parameters to buckets, in the given order of positions."""
        self._drop_buckets()
        parameters = [self.parameters[position] for position in order]
        kinds = [(parameter.dtype, parameter.device) for _, parameter in parameters]
        assigned = self.assign_buckets([parameter.nbytes for _, parameter in parameters], kinds)
        members = [[parameters[index] for index in bucket] for bucket in assigned]
        items = [sum(parameter.numel() for _, parameter in bucket) for bucket in members]
        memory = self.allocate(items, [bucket[0][1] for bucket in members])
        self.buckets = make_buckets(members, memory, self.sums_of(memory))
        slots = {slot.name: slot for bucket in self.buckets for slot in bucket.slots}
        self._slots = [slots[name] for name, _ in self.parameters]
        self._inverse_ranks = 1 / self.comm.world_size
        self._reset_buckets()

    def _drop_buckets(self) -> None:
        """Drop the buckets and free their memory at once: buckets and slots reference each other."""
        for bucket in self.buckets:
            bucket.slots.clear()
        self.buckets, self._slots = [], []

    def _reset_buckets(self) -> None:
        """Mark all buckets as empty, for the next step."""
        self._next = 0
        for slot in self._slots:
            slot.gradient = None
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)


def changed_gradient_error(slot: Slot) -> WorkloadError:
    """Return the error for a gradient that was changed after it was sent."""
    return WorkloadError(f"the gradient of {slot.name} was changed after backward had sent it.", hint=_CHANGED_HINT)
