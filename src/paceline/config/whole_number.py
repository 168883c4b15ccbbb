"""Parse whole numbers of options and variables."""

from __future__ import annotations

MOST_DIGITS = 18
"""Most digits of a number: with more, it would not fit into 64 bits, and Python refuses to convert thousands."""


def whole_number(text: str) -> int | None:
    """Return the number that up to 18 digits, 0 to 9, make; None for any other text, so also for signs and spaces."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None
