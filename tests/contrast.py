"""Contrast of colours, for tests of the page."""

from __future__ import annotations

from paceline.report.plots.palette import luminance


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours as WCAG 2 defines it, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
