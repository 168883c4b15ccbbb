"""How numbers are written, the same everywhere."""

from __future__ import annotations


def number(value: float | None) -> str:
    """A loss or another plain figure."""
    return "–" if value is None else f"{value:.4f}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share of one."""
    return "–" if share is None else f"{100 * share:.{decimals}f}%"


def seconds(value: float | None) -> str:
    """A duration, with the unit that suits it."""
    if value is None:
        return "–"
    if value < 0.999995:  # What rounds to a second is one.
        return f"{1000 * value:.2f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min" if value >= 3600 else f"{value / 60:.1f} min"


def count(value: int) -> str:
    """A large count, rounded."""
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= 0.99995 * limit:  # What rounds to the next unit has it.
            return f"{value / limit:.1f} {unit}"
    return str(value)


def plural(value: int, noun: str) -> str:
    """A count with its noun."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")
