"""Order of samples and their split over ranks; it depends only on seed and epoch, never on the world size.

Every sample is trained once per epoch, except those of a last batch that is too small to split. Global batch i has the
same samples on 1 rank and on 7. Ranks take contiguous ranges whose sizes differ by at most one. (`DistributedSampler`
pads instead, and repeats the same order in every epoch without a call of `set_epoch`: pytorch#25162, #31771.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WorkloadError
from paceline.formatting import whole
from paceline.workloads.gpu_copy import copy_to_gpu
from paceline.workloads.random_state import seeded


def split(total: int, parts: int) -> list[range]:
    """Split `range(total)` into contiguous ranges; if they cannot be equal, the first ones are larger by one."""
    size, extra = divmod(total, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def epoch_key(seed: int, epoch: int) -> int:
    """Return the seed of the random numbers of one epoch.

    It is mixed by splitmix64 (Steele et al. 2014), since torch's CPU generator uses only the lower 32 bits.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 1) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) % 2**63


@dataclass(frozen=True, eq=False)
class Sampler:
    """Division of each epoch into global batches."""

    size: int
    """Samples in an epoch."""
    batch: int
    """Samples in a global batch."""
    seed: int
    shuffle: bool = True
    """False keeps the order of the data set, for evaluation."""
    reshuffle: bool = True
    """Whether each epoch has a new order."""
    smallest: int = 1
    """A last batch with fewer samples than this is dropped: a rank would have no samples, or the user drops it."""
    subset: Tensor | None = None
    """Indices of the samples to take, as many as `size`; None: all of the data set."""

    @property
    def steps(self) -> int:
        """Global batches per epoch."""
        return self.steps_after(0)

    def steps_after(self, skip: int) -> int:
        """Return the global batches of an epoch that follow its first `skip` samples."""
        whole, rest = divmod(max(0, self.size - skip), self.batch)
        return whole + (rest >= self.smallest and rest > 0)

    @property
    def dropped(self) -> int:
        """Samples dropped per epoch."""
        return max(0, self.size - self.steps * self.batch)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the samples in an epoch."""
        if not self.shuffle:
            return self.first(self.size)
        key = epoch_key(self.seed, epoch if self.reshuffle else 0)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(key))
        return order if self.subset is None else self.subset[order]

    def first(self, count: int) -> Tensor:
        """Return the indices of a few samples, for checks: the first ones that are not shuffled."""
        count = min(count, self.size)
        return torch.arange(count) if self.subset is None else self.subset[:count]

    def batches(self, epoch: int, device: torch.device | None = None, skip: int = 0) -> Iterator[Tensor]:
        """Yield the global batches of an epoch as indices, without its first `skip` samples.

        With a device, all of them are moved there at once: moving a few in each step would make the host wait for the
        GPU, which would then run out of work.
        """
        order = self.order(epoch)[skip:]
        order = copy_to_gpu(order, device) if device is not None and device.type == "cuda" else order.to(device)
        for step in range(self.steps_after(skip)):
            yield order[step * self.batch : (step + 1) * self.batch]


@dataclass(frozen=True, eq=False)
class DrawnSampler(Sampler):
    """Division of epochs whose samples a user's sampler draws, on every rank with the same random state.

    A sampler with a generator of its own draws equally too, if the generator has the same state on all ranks, because
    every rank draws each epoch once. A run that resumes draws the epochs before its own too, so that the generator has
    the state that it would have without the stop.
    """

    drawn_by: Iterable[int] = ()
    """Sampler of the user."""
    available: int = 0
    """Samples in the data set."""
    _last: dict[int, Tensor] = field(default_factory=dict)
    """Order of the epoch that was drawn last."""

    def order(self, epoch: int) -> Tensor:
        epoch = epoch if self.reshuffle else 0
        if epoch not in self._last:
            following = max(self._last, default=-1) + 1
            for drawn in range(min(following, epoch), epoch + 1):
                self._draw(drawn)
        return self._last[epoch]

    def _draw(self, epoch: int) -> None:
        drawn = draw_epoch(self.drawn_by, self.available, self.seed, epoch)
        if self.size and len(drawn) != self.size:
            raise WorkloadError(
                f"the sampler of a DataLoader drew {whole(len(drawn))} samples in epoch {epoch + 1} and "
                f"{whole(self.size)} in the first.",
                hint="draw the same number in every epoch, or provide an iterable of global batches",
            )
        self._last.clear()
        self._last[epoch] = drawn

    def first(self, count: int) -> Tensor:
        return self.order(0)[:count]


@dataclass(frozen=True)
class EpochPlan:
    """Batch, seed and order of the epochs, whatever the data."""

    batch: int
    seed: int
    train: bool
    """Whether to shuffle."""
    reshuffle: bool
    smallest: int
    """Samples that a last batch needs at least."""


def sampler_of_size(
    size: int, plan: EpochPlan, kind: type[Sampler] = Sampler, *, drop_last: bool = False, **fields: Any
) -> Sampler:
    """Return the sampler for so many samples; `drop_last` drops a smaller last batch, in training only."""
    batch = min(plan.batch, size) or 1
    smallest = batch if drop_last and plan.train else plan.smallest
    return kind(size, batch, plan.seed, shuffle=plan.train, reshuffle=plan.reshuffle, smallest=smallest, **fields)


def draw_epoch(drawn_by: Iterable[int], available: int, seed: int, epoch: int) -> Tensor:
    """Return the indices that a user's sampler draws in an epoch, with random numbers of this seed and epoch."""
    if hasattr(drawn_by, "set_epoch"):
        drawn_by.set_epoch(epoch)
    most = len(drawn_by) if isinstance(drawn_by, Sized) else max(MOST_DRAWN, 10 * available)
    with seeded(epoch_key(seed, epoch)):
        drawn = list(itertools.islice(drawn_by, most + 1))
    if len(drawn) > most:
        raise WorkloadError(
            f"the sampler of a DataLoader draws more than {whole(most)} samples in an epoch of {whole(available)}.",
            hint="give the sampler an end and the right length, or provide an iterable of global batches",
        )
    indices = torch.tensor([int(index) for index in drawn], dtype=torch.int64)
    check_indices(indices, available)
    return indices


MOST_DRAWN = 1_000_000
"""Most samples that a sampler without a length may draw in an epoch of a small data set: it may never end."""


def check_indices(indices: Tensor, available: int) -> None:
    """Raise for an index that the data set does not have."""
    outside = indices[(indices < -available) | (indices >= available)]
    if len(outside):
        raise WorkloadError(
            f"the sampler of a DataLoader draws sample {int(outside[0])}, but the data set has {whole(available)}.",
            hint="make the sampler for this data set: indices run from 0 to its length − 1",
        )
