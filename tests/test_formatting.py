"""Tests of number formatting."""

from __future__ import annotations

import pytest

from paceline.formatting import (
    BYTE_COST,
    COUNTS,
    FACTOR,
    LOSS,
    MOST_CHARACTERS,
    SHARE,
    SIZES,
    TIMES,
    WHOLE,
    Ladder,
    binary_size,
    bit_rate,
    confidence,
    core_count,
    count,
    format_cores,
    half_width,
    interval,
    number,
    percent,
    plural,
    printable,
    rate,
    scientific,
    seconds,
    short,
    short_factor,
    short_seconds,
    significant,
    size,
    tick_label,
    unit_for,
)


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.0, "0.0000"), (2.302585, "2.3026"), (float("nan"), "nan")])
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "decimals", "text"),
    [
        (None, 1, "–"),
        (0.0, 1, "0.0%"),
        (1.0, 1, "100.0%"),
        (0.98765, 1, "98.8%"),
        (0.00012, 3, "0.012%"),
        (-0.004, 1, "−0.4%"),
    ],
)
def test_percent(share: float | None, decimals: int, text: str) -> None:
    assert percent(share, decimals) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (5.4e-05, "54 µs"),
        (0.0009996, "1.00 ms"),
        (0.0123, "12.30 ms"),
        (0.999, "999.00 ms"),
        (0.999996, "1.00 s"),
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (12, "12 B"),
        (999.7, "1.00 kB"),
        (215_000, "215.00 kB"),
        (24e6, "24.00 MB"),
        (2.9e9, "2.90 GB"),
    ],
)
def test_size(value: float | None, text: str) -> None:
    assert size(value) == text


def test_other_units() -> None:
    assert rate(1.5e9) == "1.50 GB/s"
    assert BYTE_COST.text(6.7e-10) == "0.67 ns/B"
    assert [binary_size(value) for value in (64 << 20, 1024, 12)] == ["64 MiB", "1 KiB", "12 B"]
    assert [format_cores(value) for value in (0.5, 1, 2, 1.333, 1024)] == [
        "0.5 cores",
        "1 core",
        "2 cores",
        "1.33 cores",
        "1024 cores",
    ]
    assert [scientific(value) for value in (0, 1.5e-7, 1e-5, 0.25, float("inf"))] == [
        "0",
        "1.5e-7",
        "1e-5",
        "0.25",
        "∞",
    ]


def test_numbers_that_a_user_gave() -> None:
    assert [short(value) for value in (0.1, 3.0, 1e-5, 2.5)] == ["0.1", "3", "1e-05", "2.5"]
    assert [short_seconds(value) for value in (120.0, 0.5)] == ["120 s", "0.5 s"]
    assert [short_factor(value) for value in (3.0, 1.5)] == ["3×", "1.5×"]
    rates = [bit_rate(value) for value in (2e8, 1e9, 2.5e9, 5e5)]
    assert rates == ["200 Mbit/s", "1 Gbit/s", "2.5 Gbit/s", "500 kbit/s"]
    assert [core_count(value) for value in (0.5, 3.0, 4 / 3)] == ["0.5", "3", "1.33"]
    assert [confidence(level) for level in (0.95, 0.975, 1 - 0.05 / 3)] == ["95%", "97.5%", "98.3%"]


def test_numbers_of_plots() -> None:
    assert [tick_label(value) for value in (0.5, 20, 1e5, 1e-4)] == ["0.5", "20", "1e+5", "1e-4"]
    assert [significant(value, 3) for value in (0.0123456, 98765.0)] == [0.0123, 98800.0]
    assert (FACTOR.plotly_format, SHARE.plotly_format) == (",.2f", ",.0f")


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([0.01887, 0.03063], ["18.87", "30.63"]),
        ([0.5855, 0.6979], ["585.50", "697.90"]),
        ([1.2, 14.0], ["1.20", "14.00"]),
        ([0.000123], ["123"]),
        ([0.0123, 1.5, 2.0], ["0.0123", "1.5000", "2.0000"]),
        ([], []),
    ],
)
def test_a_column_has_one_unit_and_its_decimals(values: list[float], written: list[str]) -> None:
    unit = unit_for(values, TIMES)
    assert [unit.write(value) for value in values] == written


@pytest.mark.parametrize("ladder", [TIMES, SIZES])
@pytest.mark.parametrize("digits", [1.0, 1.234567, 9.999, 12.3456, 99.994, 123.456, 999.4])
def test_a_figure_reads_the_same_alone_and_in_a_column_of_its_unit(ladder: Ladder, digits: float) -> None:
    for unit in ladder.units:
        value = digits * unit.scale
        assert ladder.text(value) == unit_for([value, 2 * unit.scale, 3 * unit.scale], ladder).text(value)


def test_counts_have_a_decimal_where_they_need_one() -> None:
    assert unit_for([32, 64], COUNTS).write(32) == "32"
    assert unit_for([32, 21.33], COUNTS).write(32) == "32.0"


def test_intervals() -> None:
    assert interval(0.0345, 0.05, unit_for([0.04], TIMES)) == "34.50–50.00"
    assert interval(None, 0.05, FACTOR) == ""
    assert interval(-0.1, 0.2, SHARE) == "−10 to 20"
    assert interval(0.5, 123_456, FACTOR) == "0.50–123 k"
    assert interval(0.9, 1.1, TIMES.own_unit(0.98)) == "900.00–1,100.00"


def test_half_of_an_interval() -> None:
    assert half_width(0.9, 1.1, FACTOR, 1.0) == "±10%"
    assert half_width(0.1, 5.0, FACTOR, 1.0) == ">±100%"
    assert half_width(-0.1, 0.1, FACTOR, 0.0) == ">±100%"
    assert half_width(0.1, 0.3, SHARE, 0.2) == "±10", "percentage points"
    assert half_width(None, None, FACTOR, 1.0) == ""


def test_text_of_others_is_printable_and_has_a_bound() -> None:
    assert printable("rank 1 × é 😀\n\tline") == "rank 1 × é 😀\n\tline"
    assert printable("\x1b[31mred\0\ud800\u202e") == r"\x1b[31mred\x00\ud800\u202e"
    long = printable("a" * 10_000 + "b" * 10_000)
    assert (len(long), long[0], long[-1]) == (MOST_CHARACTERS + 3, "a", "b")
    assert " … " in long


def test_huge_losses_are_powers_of_ten() -> None:
    assert [LOSS.write(value) for value in (2.3, 9_999_999.0, 7.44e13, -2e7)] == [
        "2.3000",
        "9,999,999.0000",
        "7.4e+13",
        "−2.0e+7",
    ]
    assert WHOLE.write(1e12) == "1,000,000,000,000", "counts are exact"
