"""`ScaleConfig`: the world sizes that `paceline scale` measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.setting import POSITIVE, check_values, setting
from paceline.errors import UsageError, wrong_choice

SCALING_MODES = ("strong", "weak")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig:
    """World sizes, strategies and kinds of scaling to measure, and how often."""

    strategies: str = ""
    """Strategies to scale, as in ddp,p2p; `single` is always measured too, `none` (the bound) if named [default:
    gather_scatter,p2p,allreduce,ddp]."""
    ranks: str = setting("", numbers=True)
    """World sizes, as in 1,2,4; 1 is always measured [default: powers of two up to the cores or GPUs available]."""
    ranks_per_host: str = setting("", numbers=True)
    """Ranks per host; 1,2 measures each world size on more and on fewer hosts [default: as few as possible]."""
    mode: str = "strong"
    """Kind of scaling: strong (fixed global batch), weak (fixed batch per rank), or strong,weak for both."""
    batch: int | None = setting(None, bound=POSITIVE)
    """Global batch of strong scaling [default: 256; with --batch-per-rank: that × the largest world size]."""
    batch_per_rank: int | None = setting(None, bound=POSITIVE)
    """Batch per rank of weak scaling [default: --batch ÷ the largest world size]."""
    repeats: int = setting(3, bound=POSITIVE)
    """Repeats of each point, interleaved; each repeat has its own seed."""
    proof: bool = True
    """First prove that every strategy computes the same mean gradient, at the largest world size."""
    doctor: bool = True
    """First examine the machine and the link, as `paceline doctor` does, at the largest world size."""

    def __post_init__(self) -> None:
        check_values(self)
        for mode in self.modes:
            if mode not in SCALING_MODES:
                raise wrong_choice("--mode", mode, SCALING_MODES)
        if not self.modes:
            raise UsageError("--mode names no kind of scaling.", hint="use strong, weak, or strong,weak")
        _ = self.rank_counts, self.per_host

    @property
    def modes(self) -> tuple[str, ...]:
        """Kinds of scaling, strong first."""
        given = [mode.strip() for mode in self.mode.split(",") if mode.strip()]
        return tuple(sorted(dict.fromkeys(given)))

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


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Parse a list of numbers, written 1,2,4; return each once, ascending."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), None)
    if wrong is not None:
        raise UsageError(f"{option} {text} is not a list of positive numbers: {wrong!r}.", hint="write it as 1,2,4")
    return tuple(sorted({int(word) for word in words}))
