"""`shared_memory`: ranks of one host add gradients up in memory that they share; across hosts their leaders ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.comm.shared_memory.buckets import SharedBuckets
from paceline.config.specs import check_positive
from paceline.errors import WorkloadError
from paceline.plans.buckets import MIB
from paceline.strategies.base.overlapped import Bucket, Overlapped, Slot


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions:
    """How large the buckets are, and who does what with them."""

    bucket_mb: float = 1.0
    """Bucket size in MiB: a bucket is closed once it holds as much."""
    first_mb: float = 0.25
    """The same of the first bucket: what is smaller than this as a whole has one, and what more would cost is saved."""
    thread: bool = False
    """Let a thread of its own add gradients up, for ranks that have a core to spare for it."""
    copy: bool = False
    """Give the optimiser copies: for one that writes into gradients, and did not in the first step."""

    def __post_init__(self) -> None:
        check_positive("shared_memory", self, "bucket_mb", "first_mb")


class SharedMemory(Overlapped):
    """Ranks of one host add their gradients up in memory that they share, while backward computes.

    Idea
        Between ranks of one host a message is a copy into the kernel and a copy out of it, and a ring makes 2(p−1)
        steps of that. Here every rank copies its gradients to where the others can read them: one copy in, as autograd
        makes gradients in memory of its own. Then each adds up one shard of them, over all ranks, and the optimisers of
        all ranks read the one sum that there is: no copy out, and no two ranks can hold different gradients. A rank
        adds up between two layers of its backward pass whatever the others have ready by then; only for the last
        bucket has it to wait.

    Who sends what to whom (two ranks of one host)
        rank 0   writes [bucket 0][bucket 1]            rank 1   writes [bucket 0][bucket 1]
                      │  ╲                                     ╱  │
                      ▼    ╲ reads                     reads ╱    ▼
        rank 0   adds up the first half,                rank 1   the second
                      ╲_________________      _____________________╱
                                        ▼    ▼
                               [ the sum: one for both ] ──> the optimisers of both read it

        With several hosts the first rank of each, its leader, takes the host's sum around a ring of the leaders:
        host A {0, 1} ── rank 0 ══ring══ rank 2 ── host B {2, 3}

    Cost
        On a host no message at all. A rank writes m bytes, reads m and writes m/p; with γ for the adding of a byte that
        is about mγ, and two moments at which ranks wait for each other. On two cores, 37 MB of four ranks take 0.15 to
        0.18 of the time of Gloo's all-reduce where they are in the shared memory already, 0.33 to 0.40 with the copy
        into it. Between h hosts, per bucket, the ring of their leaders: 2(h−1)α + 2(h−1)/h·mβ + (h−1)/h·mγ.

    When to use it
        With several ranks on a host, on CPUs: there messages cost cores which backward needs.

    When not
        On GPUs, which have better ways to each other than main memory. With one rank per host it is a ring. For loops
        that change gradients between backward and `step`, which refuses it. Optimisers that keep gradients beyond their
        step have to copy what they keep, since the next step fills the same memory.

    Source
        Shared memory and leaders: Graham and Shipman, "MPI Support for Multi-core Architectures: Optimized Shared
        Memory Collectives", EuroPVM/MPI 2008. Hierarchies: Goyal et al., "Accurate, Large Minibatch SGD", 2017,
        section 4. Waiting: Drepper, "Futexes Are Tricky", 2011.
    """

    name: ClassVar[str] = "shared_memory"
    Options: ClassVar[type] = SharedMemoryOptions

    _shared: SharedBuckets | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self.bucket_bytes = int(self.options.bucket_mb * MIB)
        self.first_bucket_bytes = int(self.options.first_mb * MIB)
        self._in_place = self.comm.device.type == "cpu"
        self._trusted = False
        """Whether the optimiser was seen to leave gradients as they are."""
        self._copies = self.options.copy
        return super().wrap(model)

    def memory(self, items: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        self._let_go()
        self._there: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in items]
        """Of each bucket, where its gradients go and those that are there."""
        self._shared = SharedBuckets(items, [one.dtype for one in like], self.comm, thread=self.options.thread)
        return self._shared.rows if self._in_place else super().memory(items, like)

    def sums(self, memory: list[Tensor]) -> list[Tensor]:
        return self._buckets.means if self._in_place else memory

    def put(self, slot: Slot, gradient: Tensor) -> None:
        """Leaves it to `launch`, and the division to the adding up: one call for a bucket is cheaper than many."""
        views, gradients = self._there[slot.bucket.number]
        views.append(slot.view)
        gradients.append(gradient)

    def launch(self, bucket: Bucket) -> None:
        shared = self._buckets
        self._copy_in(bucket)
        if not self._in_place:
            shared.rows[bucket.number].copy_(bucket.flat)
        shared.mark_ready(bucket.number)
        shared.progress()

    def arrive(self, bucket: Bucket) -> None:
        shared = self._buckets
        shared.wait(bucket.number)
        if not self._in_place:
            bucket.flat.copy_(shared.means[bucket.number])

    def update(self, max_norm: float | None) -> None:
        """Lets the optimiser read the sums where they are: what it wrote there, the others would read."""
        if not self._in_place or self._shared is None:
            super().update(max_norm)
        elif max_norm is not None or self._copies:
            self._give_copies()
            super().update(max_norm)
        elif not self._trusted:
            self._find_out()
        else:
            before = self._shared.write_count
            super().update(None)
            if self._shared.write_count != before:
                raise WorkloadError(
                    "the optimiser wrote into gradients, which it did not in its first step.",
                    hint="give it copies: shared_memory:copy=true",
                )

    def close(self) -> None:
        super().close()
        self._let_go()

    def _copy_in(self, bucket: Bucket) -> None:
        """Copies the gradients that are there into their bucket, and lets go of them where it can.

        The next layer's gradient will then be in their memory, which is in the cache still. Who looks at a gradient
        before `step` finds it in this rank's row, through a tensor of its own, so that a write by it is noticed.
        """
        views, gradients = self._there[bucket.number]
        if views:
            torch._foreach_copy_(views, gradients)
        self._there[bucket.number] = ([], [])
        if self._in_place and self._buckets.keeps_row(bucket.number):
            for slot in bucket.slots:
                if slot.gradient is not None and slot.is_unchanged:
                    slot.parameter.grad = slot.gradient = slot.view.data
                    slot.version = slot.gradient._version

    def _find_out(self) -> None:
        """A step with copies, which tells whether the optimiser writes into what it is given."""
        given = self._give_copies()
        before = [copy._version for _, copy in given]
        super().update(None)
        self._trusted = before == [copy._version for _, copy in given] and all(
            torch.equal(total, copy) for total, copy in given
        )
        self._copies = not self._trusted

    def _give_copies(self) -> list[tuple[Tensor, Tensor]]:
        """Sums, and the copies of them that are the gradients now."""
        given = []
        for _, parameter in self.parameters:
            if parameter.grad is not None:
                given.append((parameter.grad, parameter.grad.clone()))
                parameter.grad = given[-1][1]
        return given

    @property
    def _buckets(self) -> SharedBuckets:
        assert self._shared is not None, "there are buckets where there is more than one rank"
        return self._shared

    def _let_go(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared, self._there = None, []
