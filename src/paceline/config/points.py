"""`PointsConfig`: the settings that experiments over several world sizes share: which ones, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.setting import POSITIVE, check_values, setting
from paceline.config.whole_number import whole_number
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class PointsConfig:
    """World sizes to measure, and how often. Subclasses add what varies at each of them."""

    ranks: str = setting("", numbers=True)
    """World sizes, as in 1,2,4 [default: powers of two up to the cores or GPUs available]."""
    ranks_per_host: str = setting("", numbers=True)
    """Ranks per host; 1,2 measures each world size on more and on fewer hosts [default: as few as possible]."""
    repeats: int = setting(3, bound=POSITIVE)
    """Repeats of each point, interleaved; each repeat has its own seed."""
    proof: bool = True
    """First prove that every strategy computes the same mean gradient, at the largest world size."""
    doctor: bool = True
    """First examine the machine and the link, as `paceline doctor` does, at the largest world size."""

    def __post_init__(self) -> None:
        check_values(self)
        self.check()
        _ = self.rank_counts, self.per_host

    def check(self) -> None:
        """Raise for values of a subclass that name nothing to measure."""

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
    numbers = {word: whole_number(word) for word in words}
    wrong = next((word for word, number in numbers.items() if not number), None)
    if wrong is not None:
        raise UsageError(f"{option} {text!r} is not a list of positive numbers: {wrong!r}.", hint="write it as 1,2,4")
    return tuple(sorted({number for number in numbers.values() if number}))
