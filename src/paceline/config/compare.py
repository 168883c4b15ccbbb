"""`CompareConfig`: what `paceline compare` compares, and how often it measures it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config.setting import POSITIVE, check_values, setting

MAX_REPEATS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """Candidates of a comparison, and how often they are measured."""

    strategies: str = ""
    """Strategies to compare, as in single,ddp,ddp:bucket_mb=1, or a set, which `paceline strategies` lists: usual,
    classic, fast, or all [default: usual; with --vary: ddp]."""
    vary: tuple[str, ...] = ()
    """Compare the values of a setting: KEY=A,B, where KEY is an option of `paceline train`; may be repeated."""
    repeats: int = setting(3, bound=POSITIVE)
    """Repeats of each candidate, interleaved, but no more than --max-repeats; each repeat has its own seed."""
    max_repeats: int = setting(MAX_REPEATS, bound=POSITIVE)
    """Most repeats: used while the two fastest show no clear difference."""
    proof: bool = True
    """First prove that every strategy computes the same mean gradient."""
    doctor: bool = True
    """First examine the machine and the link, as `paceline doctor` does; takes about ten seconds."""
    script: str = ""
    """Train with your own script, which calls paceline.attach; its arguments follow `--`."""

    def __post_init__(self) -> None:
        check_values(self)

    def with_consistent_repeats(self) -> CompareConfig:
        """Return the config with at least as many `max_repeats` as `repeats`.

        `--max-repeats 1` alone means one repeat, and `--repeats 20` alone means 20.
        """
        if self.max_repeats >= self.repeats:
            return self
        if self.max_repeats == MAX_REPEATS:
            return replace(self, max_repeats=self.repeats)
        return replace(self, repeats=self.max_repeats)

    @property
    def varied(self) -> list[tuple[str, str]]:
        """Names of the varied settings, each with its values as text: ("batch", "32,64")."""
        texts = (text.partition("=") for text in self.vary)
        return [(name.strip().lstrip("-").replace("-", "_"), values) for name, _, values in texts]

    @property
    def interim_analyses(self) -> int:
        """Number of times the experiment checks for a winner."""
        return max(1, self.max_repeats - self.repeats + 1)
