"""Figures of what the doctor measures between ranks: links, and all-reduces of several sizes.

The JSON output is the record itself, so the figures that it has are fields of the record.
"""

from __future__ import annotations

from paceline.formatting import BYTE_COST, RATES, TIMES, WHOLE
from paceline.records.examination import AllReducePoint, PairLink
from paceline.report.figures.figure import Figure, InTerminal

LINK_FIGURES: tuple[Figure[PairLink], ...] = (
    Figure(
        key="alpha_s",
        heading="Latency",
        format=TIMES,
        definition="Half of the median round-trip time of one-element messages.",
        terminal=InTerminal("latency α", 10),
        page=False,
        csv=False,
        has_own_units=True,
    ),
    Figure(
        key="beta_s_per_byte",
        heading="Cost of a byte",
        format=BYTE_COST,
        definition="Slope of one-way time over size, by least squares.",
        terminal=InTerminal("cost β", 8),
        page=False,
        csv=False,
    ),
    Figure(
        key="bytes_per_s",
        heading="Bandwidth",
        format=RATES,
        definition="Point-to-point bandwidth: 1 ÷ the cost of a byte.",
        terminal=InTerminal("bandwidth 1/β", 9),
        page=False,
        csv=False,
        json=False,
        has_own_units=True,
    ),
)

ALL_REDUCE_FIGURES: tuple[Figure[AllReducePoint], ...] = (
    Figure(
        key="time_s",
        heading="Time",
        format=TIMES,
        definition="Median over repeats of the slowest rank's time.",
        terminal=InTerminal("time", 9),
        page=False,
        csv=False,
        has_own_units=True,
    ),
    Figure(
        key="algbw_bytes_per_s",
        heading="algbw",
        format=RATES,
        definition="Algorithm bandwidth: size ÷ time.",
        terminal=InTerminal("algbw", 8),
        page=False,
        csv=False,
        has_own_units=True,
    ),
    Figure(
        key="busbw_bytes_per_s",
        heading="busbw",
        format=RATES,
        definition="Bus bandwidth: algbw × 2(n−1)/n on n ranks, the rate on every rank's link in each direction.",
        terminal=InTerminal("busbw", 10),
        page=False,
        csv=False,
        has_own_units=True,
    ),
    Figure(
        key="repeats",
        heading="Repeats",
        format=WHOLE,
        definition="All-reduces that were timed.",
        terminal=InTerminal("repeats", 1),
        page=False,
        csv=False,
    ),
)
