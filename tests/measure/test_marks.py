"""Events other than steps: spans, points in time, and long garbage collections."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.measure.marks import Marks
from paceline.records import RunFolder
from paceline.records.resources import read_marks
from paceline.records.schema import MarkRow
from paceline.records.writer import MarkWriter


class Ticking:
    """A clock that advances by one at every reading."""

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self.step_s = 1.0

    def __call__(self) -> float:
        return next(self._ticks) * self.step_s


@pytest.fixture
def clock() -> Iterator[Ticking]:
    """Return a clock that only the test reads; automatic collections, which would advance it, are disabled."""
    gc.collect()
    gc.disable()
    yield Ticking()
    gc.enable()


def marks_in(folder: Path) -> list[MarkRow]:
    return read_marks(folder / "marks-0.csv")


def test_spans_and_points_in_time(tmp_path: Path, clock: Ticking) -> None:
    marks = Marks(MarkWriter(RunFolder(tmp_path), 0), clock)
    with marks.span("evaluation"):
        pass
    with pytest.raises(KeyError), marks.span("checkpoint", "at step 7,\nby rank 0"):
        raise KeyError
    marks.add_now("epoch", "4")
    assert marks_in(tmp_path) == []
    marks.flush()
    assert marks_in(tmp_path) == [
        MarkRow("evaluation", 0, 1, ""),
        MarkRow("checkpoint", 2, 3, "at step 7 by rank 0"),
        MarkRow("epoch", 4, 4, "4"),
    ]
    marks.close()


def test_full_collections_and_long_ones_are_marked(tmp_path: Path, clock: Ticking) -> None:
    marks = Marks(MarkWriter(RunFolder(tmp_path), 0), clock)
    gc.collect(0)
    clock.step_s = 0.0005
    gc.collect(0)
    gc.collect(2)
    marks.close()
    gc.collect(2)
    assert [mark.detail for mark in marks_in(tmp_path)] == ["generation 0", "generation 2"]
    assert all(mark.kind == "gc" and mark.end_s > mark.start_s for mark in marks_in(tmp_path))


def test_a_truncated_row_is_ignored(tmp_path: Path, clock: Ticking) -> None:
    marks = Marks(MarkWriter(RunFolder(tmp_path), 0), clock)
    marks.add("epoch", 1, 1, "0")
    marks.close()
    file = tmp_path / "marks-0.csv"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert marks_in(tmp_path) == []
