"""Base class of strategies that send gradients during backward: hooks fill buckets, full buckets are sent in order."""

from __future__ import annotations

import math
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
from paceline.strategies.base.strategy import SendMode, Strategy, sparse_gradient_error

__all__ = ["Bucket", "Overlapped", "Slot"]

_ACCUMULATE_HINT = "put `with sync.accumulate():` around all backward passes of a step but the last"
_CHANGED_HINT = (
    "clip with sync.step(max_norm=…), change gradients in a parameter.register_hook(…), "
    "or use ddp, which waits for the gradients before backward returns"
)
_SAMPLE_ITEMS = 4096
"""Largest gradient that is read back to detect changes, in numbers; reading this many takes a few microseconds."""


class Overlapped(Strategy):
    """Base class of strategies that reduce each bucket of gradients as soon as backward has filled it.

    Subclasses write `launch`, which starts to sum a full bucket over the ranks, and `wait`, which waits for the sum.
    Gradients are divided by the number of ranks when they are copied into the bucket, so the sum is the mean. Buckets
    are launched in the order of their numbers on every rank. From the second step on, this is the order in which
    backward fills them, as recorded on rank 0 in the first step.
    """

    sends: ClassVar[SendMode] = "overlapped"
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    """Size of the first bucket. It is small, so that communication starts early."""

    @abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """Start to sum a full bucket over the ranks; called in the same order on all of them."""

    @abstractmethod
    def wait(self, bucket: Bucket) -> None:
        """Wait until the bucket holds the sum."""

    # A step: hooks fill buckets during backward, then `step` waits for the sums.

    def wrap(self, model: nn.Module) -> nn.Module:
        self._is_last_microbatch = True
        """Whether the current micro-batch is the last of its step."""
        self._order: list[int] | None = []
        """Positions of parameters in the order of their gradients in the first backward pass; None after that step."""
        self._hooks: list[RemovableHandle] = []
        self.buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        """One slot for each parameter, in the order of the parameters."""
        self._sample: tuple[Slot, float] | None = None
        """A small gradient of this step, and its largest absolute value when it was put into its bucket."""
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
            if self._is_last_microbatch:
                assert parameter.grad is not None
                self._add_gradient(self._slots[position], parameter.grad)
                if self._order is not None:
                    self._order.append(position)

        return on_gradient

    @torch.no_grad()  # backward(create_graph=True) records operations for second derivatives.
    def _add_gradient(self, slot: Slot, gradient: Tensor) -> None:
        if slot.gradient is not None:
            raise WorkloadError(
                f"{slot.name} got a gradient twice in one step; the first one has already been sent.",
                hint=_ACCUMULATE_HINT,
            )
        if gradient.is_sparse:
            raise sparse_gradient_error(slot.name)
        self.copy_in(slot, gradient)
        slot.gradient, slot.version = gradient, gradient._version
        if self._sample is None and 0 < gradient.numel() <= _SAMPLE_ITEMS and gradient.device.type == "cpu":
            self._sample = slot, slot.max_abs
        self._count_gradient(slot.bucket)

    def _count_gradient(self, bucket: Bucket) -> None:
        """Count one more gradient in a bucket, and launch all full buckets whose predecessors have been launched."""
        bucket.missing -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.launch(self.buckets[self._next])
            self._next += 1

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if self.comm.world_size > 1:
            used = self._complete_buckets()
            for bucket in self.buckets:
                self.wait(bucket)
            for slot, is_used in zip(self._slots, used, strict=True):
                slot.parameter.grad = slot.sum_view if is_used else None
            self._reset_buckets()
        else:
            self._check_all_used()
        self.update(max_norm, scaler)
        if self._order is not None and self.comm.world_size > 1:
            self._rebuild_in_order(self._order)
        self._order = None

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
        return [bool(flag) for flag in self.comm.control.any_of(torch.tensor(filled, dtype=torch.uint8)).tolist()]

    def _check_unchanged(self) -> None:
        """Raise if a gradient was changed after it was sent: the change would be lost silently."""
        changed = [slot for slot in self._slots if not slot.is_unchanged]
        if self._sample is not None and not changed:
            # GradScaler changes all gradients without moving PyTorch's version counters, so one value is compared.
            slot, before = self._sample
            changed = [slot] if slot.max_abs != before and not math.isnan(before) else []
        if changed:
            name = changed[0].name
            raise WorkloadError(f"the gradient of {name} was changed after backward had sent it.", hint=_CHANGED_HINT)

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
        self._sample = None
        for slot in self._slots:
            slot.gradient = None
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
