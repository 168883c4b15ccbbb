"""Whole numbers of options: digits and nothing else, few enough for 64 bits."""

from __future__ import annotations

import pytest

from paceline.config.whole_number import whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_digits_are_a_number(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", " 1", "+1", "-1", "1.0", "1_000", "²", "٣", "x", "9" * 19, "9" * 5_000])
def test_other_text_is_none(text: str) -> None:
    assert whole_number(text) is None
