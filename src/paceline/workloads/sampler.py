"""Which samples each rank trains on: an order that depends on seed and epoch only, never on the world size.

Every sample is trained once an epoch, but for a last batch that is too small to share. Global batch i is the same set
of samples on 1 rank or on 7; ranks share it in contiguous pieces whose sizes differ by at most one.
(`DistributedSampler` pads instead, and repeats the same order every epoch unless one remembers `set_epoch`:
pytorch#25162, #31771.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def split(total: int, parts: int) -> list[range]:
    """Contiguous pieces of `range(total)`, the first ones larger by one where they cannot be equal."""
    size, extra = divmod(total, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def epoch_key(seed: int, epoch: int) -> int:
    """The seed of what is random in one epoch.

    Mixed (splitmix64, Steele et al. 2014), since torch's CPU generator looks at the lower 32 bits alone.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 1) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) % 2**63


@dataclass(frozen=True)
class Sampler:
    """Cuts each epoch into global batches."""

    size: int
    """Samples in the data set."""
    batch: int
    """Samples in a global batch."""
    seed: int
    shuffle: bool = True
    """False keeps the order of the data set: evaluation."""
    reshuffle: bool = True
    """A new order each epoch."""
    smallest: int = 1
    """A last batch with fewer samples than this is dropped: it would leave a rank without any."""

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        whole, rest = divmod(self.size, self.batch)
        return whole + (rest >= self.smallest and rest > 0)

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out."""
        return max(0, self.size - self.steps * self.batch)

    def order(self, epoch: int) -> Tensor:
        """The order of the samples in an epoch."""
        if not self.shuffle:
            return torch.arange(self.size)
        key = epoch_key(self.seed, epoch if self.reshuffle else 0)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(key))

    def batches(self, epoch: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """The global batches of an epoch, as indices; on a device, all of them are moved there at once.

        Moving a few each step would make the host wait for the GPU, which then runs out of work.
        """
        order = self.order(epoch).to(device)
        for step in range(self.steps):
            yield order[step * self.batch : (step + 1) * self.batch]
