"""`BatchConfig`: the batch sizes and world sizes that `paceline batch` measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.scale import parse_counts
from paceline.config.setting import POSITIVE, check_values, setting
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch sizes, world sizes and strategies to measure, and how often."""

    sizes: str = setting("32,64,128,256,512", numbers=True)
    """Global batches to measure, as in 32,64,128."""
    per_rank: bool = False
    """Take --sizes as batches per rank: the global batch is the size × the ranks."""
    ranks: str = setting("", numbers=True)
    """World sizes, as in 1,2,4 [default: powers of two up to the cores or GPUs available]."""
    ranks_per_host: str = setting("", numbers=True)
    """Ranks per host; 1,2 measures each world size on more and on fewer hosts [default: as few as possible]."""
    strategies: str = ""
    """Strategies to measure on several ranks, as in ddp,ring [default: that of --strategy]. One rank trains as
    `single`."""
    repeats: int = setting(3, bound=POSITIVE)
    """Repeats of each point, interleaved; each repeat has its own seed."""
    proof: bool = True
    """First prove that every strategy computes the same mean gradient, at the largest world size."""
    doctor: bool = True
    """First examine the machine and the link, as `paceline doctor` does, at the largest world size."""

    def __post_init__(self) -> None:
        check_values(self)
        if not self.batch_sizes:
            raise UsageError("--sizes names no batch size.", hint="write it as 32,64,128")
        _ = self.rank_counts, self.per_host

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes given by the user, ascending."""
        return parse_counts(self.sizes, "--sizes")

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """World sizes given by the user, ascending."""
        return parse_counts(self.ranks, "--ranks")

    @property
    def per_host(self) -> tuple[int, ...]:
        """Numbers of ranks per host given by the user, ascending."""
        return parse_counts(self.ranks_per_host, "--ranks-per-host")

    @property
    def max_repeats(self) -> int:
        """Most repeats; equal to `repeats`, since no winner is determined."""
        return self.repeats

    def global_batch(self, size: int, ranks: int) -> int:
        """Return the global batch of a size on some ranks."""
        return size * ranks if self.per_rank else size
