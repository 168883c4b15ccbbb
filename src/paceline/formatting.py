"""Formatting of numbers, the only one: units, decimals, intervals, counts, lists of names, and text of others.

A figure has two decimals in the unit that suits it, wherever it is shown; microseconds and bytes are whole numbers. A
table column shares one unit, and has more decimals where its smallest figure is less than one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

NOTHING = "–"
DECIMALS = 2
"""Decimals of a figure in its own unit."""
MOST_DECIMALS = 4
LARGEST_WRITTEN = 1e7
"""Least figure with decimals that is written as a power of ten."""
MOST_CHARACTERS = 4_000
"""Most characters of a message; a longer one quotes a whole file or list."""


@dataclass(frozen=True)
class Unit:
    """Number format of one column, or of one figure."""

    scale: float
    name: str
    """Unit as the heading of a column shows it; empty for none."""
    decimals: int
    suffix: str | None = None
    """Text after a figure that stands alone; None for a space and the unit's name."""

    def write(self, value: float) -> str:
        """Format a figure without its unit, which is in the heading; a huge one as a power of ten."""
        scaled = value / self.scale
        if self.decimals and LARGEST_WRITTEN <= abs(scaled) < math.inf:  # The loss of a run that diverged.
            return _signed(f"{scaled:.1e}").replace("e+0", "e+")
        return _signed(f"{scaled:,.{self.decimals}f}")

    def write_end(self, value: float) -> str:
        """Format an end of an interval; in thousands or millions where it is too far off for its digits to matter."""
        for limit, scale, name in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
            if abs(value / self.scale) >= limit and self.decimals:
                return f"{replace(self, scale=self.scale * scale, decimals=0).write(value)} {name}"
        return self.write(value)

    @property
    def ending(self) -> str:
        """Text after a figure that stands alone."""
        return self.suffix if self.suffix is not None else f" {self.name}" if self.name else ""

    def text(self, value: float) -> str:
        """Format a figure with its unit."""
        return self.write(value) + self.ending

    @property
    def plotly_format(self) -> str:
        """Format of the figure without its unit for plotly, which formats the numbers of tooltips in the browser."""
        return f",.{self.decimals}f"


@dataclass(frozen=True)
class Ladder:
    """Units of one kind of figure, from the largest to the smallest."""

    units: tuple[Unit, ...]

    @property
    def base(self) -> Unit:
        """Unit of scale one, in which figures are recorded."""
        return next(unit for unit in self.units if unit.scale == 1)

    def own_unit(self, value: float) -> Unit:
        """Return the largest unit that the value reaches; a value that rounds up to a unit is written in it."""
        for unit, smaller in itertools.pairwise(self.units):
            if round(abs(value) / smaller.scale, smaller.decimals) * smaller.scale >= unit.scale * (1 - 1e-9):
                return unit
        return self.units[-1]

    def column_unit(self, values: Iterable[float]) -> Unit:
        """Return the unit that suits the median of a column, with as many decimals as its smallest figure needs."""
        positive = sorted(value for value in values if value > 0 and math.isfinite(value))
        if not positive:
            return replace(self.base, decimals=0)
        unit = self.own_unit(positive[len(positive) // 2])
        missing = -math.floor(math.log10(positive[0] / unit.scale))
        return replace(unit, decimals=max(unit.decimals, min(MOST_DECIMALS, unit.decimals + missing)))

    def text(self, value: float) -> str:
        """Format a figure in its own unit."""
        return self.own_unit(value).text(value) if value else f"0 {self.base.name}"


class Counts:
    """Format of counts, or of their means: whole numbers, or one decimal where some of a column are not whole."""

    def column_unit(self, values: Iterable[float]) -> Unit:
        """Return the unit of a column."""
        return WHOLE if all(value == round(value) for value in values) else TENTHS


Format = Unit | Ladder | Counts


def unit_for(values: Iterable[float], how: Format) -> Unit:
    """Return the unit of a column of values."""
    return how if isinstance(how, Unit) else how.column_unit(values)


def percent_unit(decimals: int) -> Unit:
    """Return the unit that writes shares of one as per cent."""
    return Unit(0.01, "%", decimals, suffix="%")


TIMES = Ladder((Unit(1.0, "s", DECIMALS), Unit(1e-3, "ms", DECIMALS), Unit(1e-6, "µs", 0)))
SIZES = Ladder((Unit(1e9, "GB", DECIMALS), Unit(1e6, "MB", DECIMALS), Unit(1e3, "kB", DECIMALS), Unit(1.0, "B", 0)))
"""Decimal units, as is usual for networks."""
SECONDS = Unit(1.0, "s", DECIMALS)
"""Times that are compared with each other from one table to the next, as those of races: all have one unit."""
RATES = Ladder(tuple(replace(unit, name=f"{unit.name}/s") for unit in SIZES.units))
FLOP_RATES = Ladder(
    (
        Unit(1e12, "TFLOP/s", DECIMALS),
        Unit(1e9, "GFLOP/s", DECIMALS),
        Unit(1e6, "MFLOP/s", DECIMALS),
        Unit(1.0, "FLOP/s", 0),
    )
)
"""Floating-point operations per second."""
WATTS = Unit(1.0, "W", 0)
ENERGIES = Ladder(
    (Unit(1e3, "kJ", DECIMALS), Unit(1.0, "J", DECIMALS), Unit(1e-3, "mJ", DECIMALS), Unit(1e-6, "µJ", 0))
)
BYTE_COST = Unit(1e-9, "ns/B", DECIMALS)
"""Time that a byte takes on a link."""
LOSS = Unit(1, "", 4)
FACTOR = Unit(1, "", DECIMALS, suffix="×")
RATIO = Unit(1, "", 4)
"""Ratio that should be one."""
WHOLE = Unit(1, "", 0)
TENTHS = Unit(1, "", 1)
COUNTS = Counts()
SHARE = percent_unit(0)
"""Share of a step or of a resource."""
ACCURACY = percent_unit(1)
RACE_ACCURACY = percent_unit(2)
"""Accuracy beside a target: a near miss must not look like a hit."""
POINTS = Unit(0.01, "points", 1, suffix="")
"""Difference of two accuracies, in percentage points."""
SHORT_IN_PLOTLY = ".3~g"
"""Format of `short` with three digits in plotly's notation."""
SCIENTIFIC_IN_PLOTLY = ".1e"
"""Format of small relative figures for plotly."""


def _signed(text: str) -> str:
    """Replace the hyphen by a minus sign, which is as wide as a digit."""
    return text.replace("-", "−")


def number(value: float | None) -> str:
    """Format a loss."""
    return NOTHING if value is None else LOSS.text(value)


def whole(value: float) -> str:
    """Format a count, or a rate of which decimals do not matter."""
    return WHOLE.text(value)


def percent(share: float | None, decimals: int = 1) -> str:
    """Format a share of one as per cent."""
    return NOTHING if share is None else percent_unit(decimals).text(share)


def factor(value: float | None) -> str:
    """Format a ratio."""
    return NOTHING if value is None else FACTOR.text(value)


def seconds(value: float | None) -> str:
    """Format a duration, with a unit that suits it."""
    if value is None:
        return NOTHING
    if value < 120:
        return TIMES.text(value)
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min" if value >= 3600 else f"{value / 60:.1f} min"


def race_seconds(value: float | None) -> str:
    """Format a time of a race, always in seconds."""
    return NOTHING if value is None else SECONDS.text(value)


def rough_range(low: float, high: float) -> str:
    """Format a range of an estimated duration, rounded outwards, as "20–40 s" or "up to 5 s"."""
    ends = []
    for value, outwards in ((low, math.floor), (high, math.ceil)):
        step, scale, unit = (5, 1, "s") if value < 90 else (1, 60, "min") if value < 5400 else (0.5, 3600, "h")
        ends.append((short(step * outwards(value / scale / step)), unit))
    (first, first_unit), (last, last_unit) = ends
    if first == "0":
        return f"up to {last} {last_unit}"
    if ends[0] == ends[1]:
        return f"{last} {last_unit}"
    return f"{first}–{last} {last_unit}" if first_unit == last_unit else f"{first} {first_unit}–{last} {last_unit}"


def short(value: float, digits: int = 6) -> str:
    """Format a number that a user gave, or a ratio, without trailing zeros."""
    return f"{value:.{digits}g}"


def short_seconds(value: float) -> str:
    """Format a duration that a user gave, such as a time-out, as "120 s"."""
    return f"{short(value)} s"


def short_factor(value: float) -> str:
    """Format a factor that a user gave, as "3×"."""
    return f"{short(value)}×"


def confidence(level: float) -> str:
    """Format the level of a confidence interval, as "97.5%"."""
    return f"{short(100 * level, 3)}%"


def significant(value: float, digits: int) -> float:
    """Return a value rounded to significant digits."""
    return float(short(value, digits))


def size(value: float | None) -> str:
    """Format a number of bytes in decimal units."""
    return NOTHING if value is None else SIZES.text(value)


def binary_size(value: int) -> str:
    """Format a power of two of bytes in binary units, as "64 MiB"."""
    for limit, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{short(value / limit)} {unit}"
    return f"{value} B"


def rate(bytes_per_s: float) -> str:
    """Format a bandwidth."""
    return RATES.text(bytes_per_s)


def bit_rate(bits_per_s: float) -> str:
    """Format the rate of a link that a user gave, as "200 Mbit/s"."""
    for limit, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_s >= limit:
            return f"{short(bits_per_s / limit)} {unit}"
    return f"{short(bits_per_s / 1e3)} kbit/s"


def count(value: int) -> str:
    """Format a large count, rounded."""
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= 0.99995 * limit:  # A value that rounds up to the next unit is written in it.
            return f"{value / limit:.1f} {unit}"
    return str(value)


def plural(value: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def core_count(value: float) -> str:
    """Format a number of cores without the noun; a quota may be a fraction."""
    return short(round(value, 2))


def format_cores(value: float, noun: str = "core") -> str:
    """Format a number of cores, as "0.5 cores" or "1 core"."""
    return f"{core_count(value)} {noun}" + ("" if value == 1 else "s")


def scientific(value: float) -> str:
    """Format a small relative figure."""
    if value == 0:
        return "0"
    if value >= 0.01:
        return "∞" if math.isinf(value) else f"{value:.2f}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def tick_label(value: float) -> str:
    """Format a tick label of a logarithmic axis."""
    written = short(value) if 0.001 < value < 1e5 else f"{value:.0e}"
    return written.replace("e-0", "e-").replace("e+0", "e+")


def interval(low: float | None, high: float | None, unit: Unit) -> str:
    """Format an interval without its unit; empty where there is none.

    "to" replaces the dash where minus signs would make it hard to read.
    """
    if low is None or high is None:
        return ""
    ends = unit.write_end(low), unit.write_end(high)
    return " to ".join(ends) if ends[0].startswith("−") else "–".join(ends)


def each_repeat(values: Sequence[float], unit: Unit) -> str:
    """Format the values of two repeats without their unit; empty for one, which is the figure itself, and for none."""
    return "" if len(values) < 2 else ", ".join(unit.write(value) for value in values)


def factors_of_repeats(values: Sequence[float]) -> str:
    """Format the ratios of one or two repeats for a sentence, as "1.08× and 1.12×"; of equal ones, one."""
    return " and ".join(dict.fromkeys(factor(value) for value in values))


def half_width(low: float | None, high: float | None, unit: Unit, value: float) -> str:
    """Format half of an interval: of a share in percentage points, else relative to the value."""
    if low is None or high is None:
        return ""
    if unit.scale == SHARE.scale:
        return f"±{unit.write((high - low) / 2)}"
    half = 0.0 if high == low else (high - low) / 2 / value if value else math.inf
    return f"±{percent(half, 0)}" if half < 1 else ">±100%"


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Join names for a sentence: a, b and c; or with another word before the last."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def printable(text: str) -> str:
    """Return a text for a terminal: other control characters than line breaks and tabs escaped, the middle cut out."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS // 2]} … {text[-MOST_CHARACTERS // 2 :]}"
    return escape_controls(text)


def escape_controls(text: str) -> str:
    """Return a text with other control characters than line breaks and tabs escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
