"""`BatchConfig`: the batch sizes and strategies that `paceline batch` measures at several world sizes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.points import PointsConfig, parse_counts
from paceline.config.setting import setting
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig(PointsConfig):
    """Batch sizes, world sizes and strategies to measure, and how often."""

    sizes: str = setting("32,64,128,256,512", numbers=True)
    """Global batches to measure, as in 32,64,128."""
    per_rank: bool = False
    """Take --sizes as batches per rank: the global batch is the size × the ranks."""
    strategies: str = ""
    """Strategies to measure on several ranks, as in ddp,ring [default: that of --strategy]. One rank trains as
    `single`."""

    def check(self) -> None:
        if not self.batch_sizes:
            raise UsageError("--sizes names no batch size.", hint="write it as 32,64,128")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes given by the user, ascending."""
        return parse_counts(self.sizes, "--sizes")

    def global_batch(self, size: int, ranks: int) -> int:
        """Return the global batch of a size on some ranks."""
        return size * ranks if self.per_rank else size
