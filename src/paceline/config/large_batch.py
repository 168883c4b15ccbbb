"""`LargeBatchConfig`: the batches that `paceline large-batch` trains with, and the remedies that it tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.config.fixed_repeats import FixedRepeats
from paceline.config.points import parse_counts
from paceline.config.run import NoiseScaleMode
from paceline.config.setting import NOT_NEGATIVE, POSITIVE, check_values, setting
from paceline.config.specs import split_list
from paceline.errors import UsageError, unknown_name

Remedy = Literal["linear", "sqrt", "warmup", "zero-gamma", "lars"]
Variant = tuple[Remedy, ...]
"""Remedies of one candidate; none for plain training."""
REMEDIES: tuple[Remedy, ...] = ("linear", "sqrt", "warmup", "zero-gamma", "lars")
"""All remedies, in the order in which the name of a combination has them."""
OF_THE_RATE: frozenset[Remedy] = frozenset({"linear", "sqrt", "lars"})
"""Remedies that determine the learning rate, so that they exclude each other."""
DEFAULT_REMEDIES: tuple[Remedy, ...] = ("linear", "warmup", "zero-gamma", "lars")
DEFAULT_FACTORS = (8, 64)
"""Large batches by default, as multiples of the reference."""
DEFAULT_EPOCHS = 30
WARMUP_EPOCHS = 5.0
"""Length of the remedy `warmup` by default, that of Goyal et al. (2017): 5 of 90 epochs."""
WARMUP_SHARE = 0.25
"""Largest share of a run that it takes by default."""
ALL = "all"
"""Word of `--remedies` for the remedies that it names, together."""
PLAIN = "plain"
"""Name of training without any remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeBatchConfig(FixedRepeats):
    """Reference batch, large batches, remedies, and the number of runs."""

    reference: int = setting(128, bound=POSITIVE)
    """Global batch of the reference, for which the recipe's learning rate is meant."""
    large: str = setting("", numbers=True)
    """Large global batches, as in 8192,32768 [default: 8 and 64 times the reference, as far as the training data has so
    many samples]."""
    remedies: str = ""
    """Remedies: linear or sqrt (scale the learning rate with the batch), warmup, zero-gamma, lars; a combination as in
    linear+warmup; all: those that are named, together [default: linear,warmup,zero-gamma,lars,all, without zero-gamma
    if the model has no residual block that ends in a BatchNorm]."""
    leave_one_out: bool = False
    """Also train each combination without each of its remedies, which shows what that remedy adds to the others."""
    warmup_epochs: float | None = setting(None, bound=NOT_NEGATIVE)
    """Epochs of the remedy warmup [default: 5, but at most a quarter of --epochs]."""
    seeds: int = setting(3, bound=POSITIVE)
    """Runs of each candidate, with the seeds from --seed on."""
    micro_batch: int | None = setting(None, bound=POSITIVE)
    """Most samples in a forward pass on a rank; a larger share of the batch is accumulated over several passes
    [default: 8192 on a GPU, 1024 on a CPU]."""
    noise_scale: NoiseScaleMode = "auto"
    """Measure the gradient noise scale, which estimates where larger batches stop paying: in as many steps as 0.4% of
    the training time allows, and every 200th at least (auto), in all steps (all), or not (off). On one rank, the
    reference is then accumulated over two micro-batches."""

    def __post_init__(self) -> None:
        check_values(self)
        too_small = [size for size in self.sizes if size <= self.reference]
        if too_small:
            raise UsageError(
                f"--large names {too_small[0]}, which is not more than the reference batch of {self.reference}.",
                hint="name batches that are larger than --reference",
            )
        _ = self.variants(DEFAULT_REMEDIES)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Large batches given by the user, ascending; empty for the default ones."""
        return parse_counts(self.large, "--large")

    @property
    def repeats(self) -> int:
        """Number of runs of each candidate, as the engine of experiments calls it."""
        return self.seeds

    def warmup_length(self, epochs: int) -> float:
        """Return the epochs of the remedy `warmup` in a run of so many epochs."""
        return min(WARMUP_EPOCHS, WARMUP_SHARE * epochs) if self.warmup_epochs is None else self.warmup_epochs

    def variants(self, default: tuple[Remedy, ...]) -> tuple[Variant, ...]:
        """Return the remedies of each candidate at a large batch, plain training first.

        `default` are the remedies to take if the user named none.
        """
        words = split_list(self.remedies) or [*default, ALL]
        named = [_parse(word) for word in words if word != ALL]
        singles = [variant[0] for variant in named if len(variant) == 1]
        if ALL in words:
            named += _together(singles)
        found: dict[Variant, None] = {(): None}
        for variant in named:
            found[variant] = None
        if self.leave_one_out:
            for variant in [one for one in found if len(one) > 1]:
                found |= dict.fromkeys(tuple(other for other in variant if other != one) for one in variant)
        return tuple(sorted(found, key=_order))


def variant_name(variant: Sequence[str]) -> str:
    """Return the name of a candidate's remedies, as in `linear+warmup`."""
    return "+".join(variant) or PLAIN


def _parse(word: str) -> Variant:
    """Return the remedies of one word of `--remedies`, in the order of names."""
    given = [part.strip() for part in word.split("+")]
    if given == [PLAIN]:
        return ()
    for name in given:
        if name not in REMEDIES:
            raise unknown_name("remedy", name, [*REMEDIES, ALL])
    variant = tuple(remedy for remedy in REMEDIES if remedy in given)
    of_rate = [remedy for remedy in variant if remedy in OF_THE_RATE]
    if len(of_rate) > 1:
        raise UsageError(
            f"--remedies {word} combines {of_rate[0]} and {of_rate[1]}, which both determine the learning rate.",
            hint=f"name them apart, as in {of_rate[0]},{of_rate[1]}; lars scales its own learning rate",
        )
    return variant


def _together(singles: list[Remedy]) -> Iterator[Variant]:
    """Yield the combinations of all remedies that go together: one for each that determines the learning rate."""
    others = [remedy for remedy in singles if remedy not in OF_THE_RATE]
    for rate in [[remedy] for remedy in singles if remedy in OF_THE_RATE] or [[]]:
        yield tuple(remedy for remedy in REMEDIES if remedy in [*others, *rate])


def _order(variant: Variant) -> tuple[int, list[int]]:
    """Return the key that sorts variants: by the number of remedies, then by their order."""
    return len(variant), [REMEDIES.index(remedy) for remedy in variant]
