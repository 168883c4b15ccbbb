"""`ScaleConfig`: the strategies and kinds of scaling that `paceline scale` measures at several world sizes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.points import PointsConfig
from paceline.config.setting import POSITIVE, setting
from paceline.errors import UsageError, wrong_choice

SCALING_MODES = ("strong", "weak")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig(PointsConfig):
    """World sizes, strategies and kinds of scaling to measure, and how often."""

    strategies: str = ""
    """Strategies to scale, as in ddp,p2p; `single` is always measured too, `none` (the bound) if named [default:
    gather_scatter,p2p,allreduce,ddp]."""
    mode: str = "strong"
    """Kind of scaling: strong (fixed global batch), weak (fixed batch per rank), or strong,weak for both."""
    batch: int | None = setting(None, bound=POSITIVE)
    """Global batch of strong scaling [default: 256; with --batch-per-rank: that × the largest world size]."""
    batch_per_rank: int | None = setting(None, bound=POSITIVE)
    """Batch per rank of weak scaling [default: --batch ÷ the largest world size]."""

    def check(self) -> None:
        for mode in self.modes:
            if mode not in SCALING_MODES:
                raise wrong_choice("--mode", mode, SCALING_MODES)
        if not self.modes:
            raise UsageError("--mode names no kind of scaling.", hint="use strong, weak, or strong,weak")

    @property
    def modes(self) -> tuple[str, ...]:
        """Kinds of scaling, strong first."""
        given = [mode.strip() for mode in self.mode.split(",") if mode.strip()]
        return tuple(sorted(dict.fromkeys(given)))
