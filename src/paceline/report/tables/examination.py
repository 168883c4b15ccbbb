"""Examination of the doctor as JSON data: everything that was measured, and the figures of its tables."""

from __future__ import annotations

from typing import Any

from paceline.records.examination import Examination
from paceline.report.figures.figure import json_values
from paceline.report.figures.link import ALL_REDUCE_FIGURES, LINK_FIGURES


def examination_json(examination: Examination) -> dict[str, Any]:
    """Return an examination as JSON data."""
    found, link = examination.to_dict(), examination.link
    if link is not None:
        for written, pair in zip(found["link"]["pairs"], link.pairs, strict=True):
            written |= json_values(LINK_FIGURES, pair)
        for all_reduce, measured in zip(found["link"]["all_reduces"], link.all_reduces, strict=True):
            for written, point in zip(all_reduce["points"], measured.points, strict=True):
                written |= json_values(ALL_REDUCE_FIGURES, point)
    return found
