"""Order of samples and their split over ranks; it depends only on seed and epoch, never on the world size.

Every sample is trained once per epoch, except those of a last batch that is too small to split. Global batch i has the
same samples on 1 rank and on 7. Ranks take contiguous ranges whose sizes differ by at most one. (`DistributedSampler`
pads instead, and repeats the same order in every epoch without a call of `set_epoch`: pytorch#25162, #31771.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Sampler:
    """Division of each epoch into global batches."""

    size: int
    """Samples in the data set."""
    batch: int
    """Samples in a global batch."""
    seed: int
    shuffle: bool = True
    """False keeps the order of the data set, for evaluation."""
    reshuffle: bool = True
    """Whether each epoch has a new order."""
    smallest: int = 1
    """A last batch with fewer samples than this is dropped, since a rank would have no samples."""

    @property
    def steps(self) -> int:
        """Global batches per epoch."""
        whole, rest = divmod(self.size, self.batch)
        return whole + (rest >= self.smallest and rest > 0)

    @property
    def dropped(self) -> int:
        """Samples dropped per epoch."""
        return max(0, self.size - self.steps * self.batch)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the samples in an epoch."""
        if not self.shuffle:
            return torch.arange(self.size)
        key = epoch_key(self.seed, epoch if self.reshuffle else 0)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(key))

    def batches(self, epoch: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """Yield the global batches of an epoch as indices; with a device, all of them are moved there at once.

        Moving a few in each step would make the host wait for the GPU, which would then run out of work.
        """
        order = self.order(epoch).to(device)
        for step in range(self.steps):
            yield order[step * self.batch : (step + 1) * self.batch]
