"""Tests of number formatting."""

from __future__ import annotations

import pytest

from paceline.formatting import count, number, percent, plural, seconds


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.0, "0.0000"), (2.302585, "2.3026"), (float("nan"), "nan")])
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "decimals", "text"),
    [(None, 1, "–"), (0.0, 1, "0.0%"), (1.0, 1, "100.0%"), (0.98765, 1, "98.8%"), (0.00012, 3, "0.012%")],
)
def test_percent(share: float | None, decimals: int, text: str) -> None:
    assert percent(share, decimals) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0.00 ms"),
        (0.0123, "12.30 ms"),
        (0.999, "999.00 ms"),
        (1.0, "1.00 s"),
        (119.0, "119.00 s"),
        (120.0, "2.0 min"),
        (90 * 60 - 1800, "1 h 0 min"),
        (59 * 60, "59.0 min"),
        (2 * 3600 + 61 * 30, "2 h 30 min"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (53_762, "53.8 k"), (9_231_114, "9.2 M"), (11_173_962, "11.2 M")],
)
def test_count(value: int, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1234567, "1,234,567 steps")]
)
def test_plural(value: int, text: str) -> None:
    assert plural(value, "step") == text
