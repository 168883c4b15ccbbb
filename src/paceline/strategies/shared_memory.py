"""`shared_memory`: ranks of one host sum gradients in shared memory; the first rank of each host joins a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm.shared_memory.buckets import SharedBuckets
from paceline.config.specs import check_positive
from paceline.errors import WorkloadError
from paceline.plans.buckets import MIB
from paceline.strategies.base.overlapped import Bucket, Overlapped, Slot


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions:
    """Bucket sizes, and how buckets are summed and read."""

    bucket_mb: float = 1.0
    """Bucket size in MiB: a bucket is closed once it holds at least this much."""
    first_mb: float = 0.25
    """Size of the first bucket in MiB. A model that is smaller than this has a single bucket, which saves overhead."""
    thread: bool = False
    """Sum gradients in a separate thread. Use it if each rank has a spare core."""
    copy: bool = False
    """Pass copies of the gradients to the optimiser, for one that writes into them, but not in its first step."""

    def __post_init__(self) -> None:
        check_positive("shared_memory", self, "bucket_mb", "first_mb")


class SharedMemory(Overlapped):
    """Ranks of one host sum their gradients in shared memory, during backward.

    Idea
        Between ranks of one host, a message is a copy into the kernel and a copy out of it, and a ring has 2(p−1) such
        steps. Here, every rank copies its gradients into memory that the others can read. One copy is needed because
        autograd allocates gradients elsewhere. Then each rank sums one shard of them over all ranks. The optimisers of
        all ranks read the same sum in place, so no copy out is needed, and gradients cannot differ between ranks.
        Between two layers of backward, a rank sums the buckets that all ranks have filled by then. It waits only for
        the last bucket.

    Who sends what to whom (two ranks of one host)
        rank 0   writes [bucket 0][bucket 1]            rank 1   writes [bucket 0][bucket 1]
                      │  ╲                                     ╱  │
                      ▼    ╲ reads                     reads ╱    ▼
        rank 0   sums the first half                    rank 1   sums the second half
                      ╲_________________      _____________________╱
                                        ▼    ▼
                               [ one sum for both ranks ] ──> both optimisers read it

        With several hosts, the first rank of each host all-reduces the host's sum in a ring with those of other hosts:
        host A {0, 1} ── rank 0 ══ring══ rank 2 ── host B {2, 3}

    Cost
        No messages within a host. For a bucket of m bytes, a rank writes m bytes, reads m and writes m/p: about mγ, and
        ranks wait for each other twice. Measured with four ranks on two cores and 37 MB: 0.15 to 0.18 of the time of
        Gloo's all-reduce if the gradients are already in shared memory, 0.33 to 0.40 with the copy into it. Between h
        hosts, per bucket: 2(h−1)α + 2(h−1)/h·mβ + (h−1)/h·mγ for the ring.

    When to use it
        With several ranks per host, on CPUs: there, messages use cores that backward needs.

    When not to use it
        On GPUs, which have faster paths to each other than main memory. With one rank per host it is only a ring. For
        training loops that change gradients between backward and `step`: `step` raises an error. An optimiser that
        keeps gradients after its step must copy them, because the next step overwrites the memory.

    Source
        Shared memory, one rank per host in a ring: Graham and Shipman, "MPI Support for Multi-core Architectures:
        Optimized Shared Memory Collectives", EuroPVM/MPI 2008. Hierarchical all-reduce: Goyal et al., "Accurate, Large
        Minibatch SGD", 2017, section 4. Waiting: Drepper, "Futexes Are Tricky", 2011.
    """

    name: ClassVar[str] = "shared_memory"
    Options: ClassVar[type] = SharedMemoryOptions

    _shared: SharedBuckets | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self.bucket_bytes = int(self.options.bucket_mb * MIB)
        self.first_bucket_bytes = int(self.options.first_mb * MIB)
        self._in_place = self.comm.device.type == "cpu"
        self._only_reads = False
        """Whether the optimiser did not write into the gradients when this was checked."""
        self._copies = self.options.copy
        return super().wrap(model)

    def allocate(self, items: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        self._release()
        self._uncopied: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in items]
        """For each bucket, the gradients that are not copied into it yet: their target views, and the gradients."""
        self._shared = SharedBuckets(items, [one.dtype for one in like], self.comm, thread=self.options.thread)
        return self._shared.rows if self._in_place else super().allocate(items, like)

    def sums_of(self, memory: list[Tensor]) -> list[Tensor]:
        return self._shared_buckets.means if self._in_place else memory

    def copy_in(self, slot: Slot, gradient: Tensor) -> None:
        """Remember the gradient for `launch`, which copies a whole bucket in one call; summing divides by the ranks."""
        views, gradients = self._uncopied[slot.bucket.number]
        views.append(slot.view)
        gradients.append(gradient)

    def launch(self, bucket: Bucket) -> None:
        shared = self._shared_buckets
        self._copy_gradients(bucket)
        if not self._in_place:
            shared.rows[bucket.number].copy_(bucket.flat)
        shared.mark_ready(bucket.number)
        shared.progress()

    def wait(self, bucket: Bucket) -> None:
        shared = self._shared_buckets
        shared.wait(bucket.number)
        if not self._in_place:
            bucket.flat.copy_(shared.means[bucket.number])

    def update(self, max_norm: float | None, scaler: GradScaler | None = None) -> None:
        """Step the optimiser on the sums in shared memory.

        All ranks read the same sums, so an optimiser that writes into gradients gets copies.
        """
        if not self._in_place or self._shared is None:
            super().update(max_norm, scaler)
        elif max_norm is not None or scaler is not None or self._copies:
            self._replace_by_copies()
            super().update(max_norm, scaler)
        elif not self._only_reads:
            self._update_and_check()
        else:
            before = self._shared.write_count
            super().update(None)
            if self._shared.write_count != before:
                raise WorkloadError(
                    "the optimiser wrote into gradients that all ranks share, which it did not do in its first step.",
                    hint="pass it copies of the gradients: shared_memory:copy=true",
                )

    def close(self) -> None:
        super().close()
        self._release()

    def _copy_gradients(self, bucket: Bucket) -> None:
        """Copy the gradients of a bucket into shared memory, and free them where possible.

        Autograd can then use their memory, which is still in the cache, for the next layer's gradient. Code that reads
        a gradient before `step` gets a view of this rank's row. The view is a separate tensor, so that its version
        counter shows writes by that code.
        """
        views, gradients = self._uncopied[bucket.number]
        if views:
            torch._foreach_copy_(views, gradients)
        self._uncopied[bucket.number] = ([], [])
        if self._in_place and self._shared_buckets.keeps_row(bucket.number):
            for slot in bucket.slots:
                if slot.gradient is not None and slot.is_unchanged:
                    slot.parameter.grad = slot.gradient = slot.view.data
                    slot.version = slot.gradient._version

    def _update_and_check(self) -> None:
        """Step the optimiser on copies of the gradients, and check whether it writes into them."""
        replaced = self._replace_by_copies()
        before = [copy._version for _, copy in replaced]
        super().update(None)
        self._only_reads = before == [copy._version for _, copy in replaced] and all(
            torch.equal(total, copy) for total, copy in replaced
        )
        self._copies = not self._only_reads

    def _replace_by_copies(self) -> list[tuple[Tensor, Tensor]]:
        """Replace the gradients by copies; return pairs of the sum in shared memory and its copy."""
        replaced = []
        for _, parameter in self.parameters:
            if parameter.grad is not None:
                replaced.append((parameter.grad, parameter.grad.clone()))
                parameter.grad = replaced[-1][1]
        return replaced

    @property
    def _shared_buckets(self) -> SharedBuckets:
        assert self._shared is not None, "shared buckets exist only with more than one rank"
        return self._shared

    def _release(self) -> None:
        """Release the shared memory."""
        if self._shared is not None:
            self._shared.close()
            self._shared, self._uncopied = None, []
