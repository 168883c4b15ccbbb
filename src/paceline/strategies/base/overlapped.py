"""What strategies share whose gradients travel while backward computes: hooks that fill buckets, and their order."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import WorkloadError
from paceline.plans.buckets import MIB, assign_buckets
from paceline.strategies.base.buckets import Bucket, Slot, make_buckets
from paceline.strategies.base.strategy import Strategy, no_gradient, sparse_gradient

__all__ = ["Bucket", "Overlapped", "Slot"]

_TWICE = "put `with sync.accumulate():` around all backward passes of a step but the last"
_LATE = "clip by sync.step(max_norm=…), change gradients in a parameter.register_hook(…), or use ddp, which waits first"
_SMALL = 4096
"""So many numbers are looked at in a few microseconds."""


class Overlapped(Strategy):
    """Each gradient goes into its bucket as soon as backward has it; a full bucket sets out at once.

    Write `launch`, which starts adding up a full bucket over the ranks, and `arrive`, which waits for its end.
    Gradients are divided by the number of ranks on their way into the bucket, so that the sum is the mean. Buckets set
    out in the order of their numbers on every rank; from the second step on that is the order in which backward fills
    them, as rank 0 saw it.
    """

    travel = "overlapped"
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    """The first bucket is small, so that the wire has something to do early."""

    @abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """Starts adding up a full bucket over the ranks; called in the same order on all of them."""

    @abstractmethod
    def arrive(self, bucket: Bucket) -> None:
        """Returns when the bucket holds the sum."""

    # A step: hooks fill buckets while backward runs, then `step` waits for them.

    def wrap(self, model: nn.Module) -> nn.Module:
        self._travels = True
        """Whether the micro-batch is the last one of its step."""
        self._order: list[int] | None = []
        """Parameters in the order in which the first backward pass had their gradients; None when that is known."""
        self._hooks: list[RemovableHandle] = []
        self.buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        """One for each parameter, as those are ordered."""
        self._sample: tuple[Slot, float] | None = None
        """A small gradient of this step, and the largest number in it when it was put in."""
        if self.comm.world_size > 1:
            self._pack(range(len(self.parameters) - 1, -1, -1))
            for position, (_, parameter) in enumerate(self.parameters):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(position)))
        return model

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        before, self._travels = self._travels, last
        try:
            yield
        finally:
            self._travels = before

    def _hook(self, position: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if self._travels:
                assert parameter.grad is not None
                self._fill(self._slots[position], parameter.grad)
                if self._order is not None:
                    self._order.append(position)

        return ready

    @torch.no_grad()  # Backward can be told to note what it does, for second derivatives.
    def _fill(self, slot: Slot, gradient: Tensor) -> None:
        if slot.gradient is not None:
            raise WorkloadError(f"{slot.name} got a gradient twice in one step, the first is on its way.", hint=_TWICE)
        if gradient.is_sparse:
            raise sparse_gradient(slot.name)
        self.put(slot, gradient)
        slot.gradient, slot.version = gradient, gradient._version
        if self._sample is None and gradient.numel() <= _SMALL and gradient.device.type == "cpu":
            self._sample = slot, slot.largest
        self._count(slot.bucket)

    def _count(self, bucket: Bucket) -> None:
        """One gradient more is in a bucket: it, and full ones that had to wait for it, set out."""
        bucket.missing -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.launch(self.buckets[self._next])
            self._next += 1

    def step(self, max_norm: float | None = None) -> None:
        if self.comm.world_size > 1:
            used = self._complete()
            for bucket in self.buckets:
                self.arrive(bucket)
            for slot, is_used in zip(self._slots, used, strict=True):
                slot.parameter.grad = slot.total if is_used else None
            self._expect_all()
        elif not self.allow_unused:
            self._refuse_unused()
        self.update(max_norm)
        if self._order is not None and self.comm.world_size > 1:
            self._reorder(self._order)
        self._order = None

    def _complete(self) -> list[bool]:
        """Sees to parameters that the last backward pass did not reach; returns which have a gradient on any rank."""
        self._refuse_changed()
        if not self.allow_unused:
            self._refuse_unused()
        for slot in self._slots:
            if slot.gradient is None and slot.parameter.grad is not None:  # Of an earlier micro-batch.
                self._fill(slot, slot.parameter.grad)
        filled = [slot.gradient is not None for slot in self._slots]
        if not self.allow_unused:
            return filled
        for slot in self._slots:
            if slot.gradient is None:
                slot.view.zero_()
                self._count(slot.bucket)
        return [bool(flag) for flag in self.comm.any_of(torch.tensor(filled, dtype=torch.uint8)).tolist()]

    def _refuse_changed(self) -> None:
        """A gradient that was changed after it had set out would be lost without a word."""
        changed = [slot for slot in self._slots if not slot.is_unchanged]
        if self._sample is not None and not changed:  # Torch does not count what its GradScaler writes, into all.
            slot, before = self._sample
            changed = [slot] if slot.largest != before and not math.isnan(before) else []
        if changed:
            name = changed[0].name
            raise WorkloadError(f"the gradient of {name} was changed after backward had sent it.", hint=_LATE)

    def _refuse_unused(self) -> None:
        unused = [name for name, parameter in self.parameters if parameter.grad is None]
        if unused:
            raise no_gradient(unused, self.comm.rank)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._unpack()
        super().close()

    # Buckets: which gradients are in which, and where. A scheme may have its own memory for them.

    def put(self, slot: Slot, gradient: Tensor) -> None:
        """Puts a gradient into its bucket, divided by the number of ranks."""
        torch.mul(gradient, self._share, out=slot.view)

    def packed(self, sizes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
        """The places of the gradients that each bucket holds; they come in the order in which backward fills them."""
        return assign_buckets(sizes, kinds, self.first_bucket_bytes, self.bucket_bytes)

    def memory(self, items: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """A flat tensor for each bucket, of so many items, of the kind of a parameter in it."""
        return [torch.zeros(count, dtype=one.dtype, device=one.device) for count, one in zip(items, like, strict=True)]

    def sums(self, memory: list[Tensor]) -> list[Tensor]:
        """Where each bucket's sum will be: in the bucket itself, unless told otherwise."""
        return memory

    def _reorder(self, seen: Sequence[int]) -> None:
        """Packs anew in the order that rank 0's first backward pass had; what it did not reach comes last."""
        rest = [position for position in range(len(self.parameters) - 1, -1, -1) if position not in seen]
        order = torch.tensor([*seen, *rest])
        dist.broadcast(order, group_src=0, group=self.comm.control)
        self._pack(order.tolist())

    def _pack(self, order: Sequence[int]) -> None:
        """Shares the parameters out over buckets, in an order."""
        self._unpack()
        parameters = [self.parameters[position] for position in order]
        kinds = [(parameter.dtype, parameter.device) for _, parameter in parameters]
        packed = self.packed([parameter.nbytes for _, parameter in parameters], kinds)
        members = [[parameters[place] for place in bucket] for bucket in packed]
        items = [sum(parameter.numel() for _, parameter in bucket) for bucket in members]
        memory = self.memory(items, [bucket[0][1] for bucket in members])
        self.buckets = make_buckets(members, memory, self.sums(memory))
        slots = {slot.name: slot for bucket in self.buckets for slot in bucket.slots}
        self._slots = [slots[name] for name, _ in self.parameters]
        self._share = 1 / self.comm.world_size
        self._expect_all()

    def _unpack(self) -> None:
        """Lets go of the buckets and, at once, of their memory: they and their slots hold each other."""
        for bucket in self.buckets:
            bucket.slots.clear()
        self.buckets, self._slots = [], []

    def _expect_all(self) -> None:
        """A step begins."""
        self._next = 0
        self._sample = None
        for slot in self._slots:
            slot.gradient = None
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
