"""Timelines survive a round trip to disk; a truncated row is ignored; damage raises an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import RecordError
from paceline.records.timeline import (
    FORMAT,
    HEADER,
    MAGIC,
    NO_PEER,
    NOT_MEASURED,
    ROW,
    Purpose,
    RecordedSteps,
    RowKind,
    TimelineWriter,
    read_timeline,
    sampled_steps,
    timeline_file,
)

ROWS: list[tuple[Any, ...]] = [
    (0, RowKind.STEP, Purpose.NOTHING, NO_PEER, 0, 1.5, 4.0, NOT_MEASURED, NOT_MEASURED),
    (0, RowKind.DATA, Purpose.NOTHING, NO_PEER, 0, 1.5, 1.75, NOT_MEASURED, 0.25),
    (0, RowKind.RECV, Purpose.BUFFERS, 3, 2**40, 1.25, 3.0, 2.5, NOT_MEASURED),
    (2**32 - 1, RowKind.BARRIER, Purpose.WEIGHTS, NO_PEER, 0, 5.0, 5.0, NOT_MEASURED, NOT_MEASURED),
]


def write(folder: Path, *batches: list[tuple[Any, ...]], rank: int = 0) -> Path:
    writer = TimelineWriter(folder, rank)
    for rows in batches:
        writer.write(rows)
    writer.close()
    return folder / timeline_file(rank)


def same(found: Any, expected: list[tuple[Any, ...]]) -> bool:
    """Return whether rows are bitwise equal; unlike ==, NaN equals NaN."""
    return found.tobytes() == np.array(expected, dtype=ROW).tobytes()


def test_rows_are_read_in_order_of_their_start(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path, ROWS[:2], [], ROWS[2:]))
    assert same(found.rows, [ROWS[2], ROWS[0], ROWS[1], ROWS[3]])
    assert len(found) == 4


def test_a_row_takes_a_few_dozen_bytes(tmp_path: Path) -> None:
    assert write(tmp_path, ROWS).stat().st_size == len(HEADER) + len(ROWS) * 48


def test_selections(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path, ROWS))
    assert same(found.steps, [ROWS[0]])
    assert same(found.operations, [ROWS[2], ROWS[3]])
    assert same(found.of(RowKind.DATA, RowKind.BARRIER), [ROWS[1], ROWS[3]])
    assert [kind.is_operation for kind in (RowKind.STEP, RowKind.OPTIMISER, RowKind.ALL_REDUCE, RowKind.BARRIER)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_timeline_without_rows(tmp_path: Path) -> None:
    assert len(read_timeline(write(tmp_path))) == 0


@pytest.mark.parametrize("cut", [1, 20, 47])
def test_a_truncated_last_row_is_ignored(tmp_path: Path, cut: int) -> None:
    file = write(tmp_path, ROWS)
    file.write_bytes(file.read_bytes()[:-cut])
    assert len(read_timeline(file)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "not a timeline"),
        (lambda content: content[: len(MAGIC) - 1], "not a timeline"),
        (lambda content: b"PK" + content, "not a timeline"),
        (lambda content: content[: len(MAGIC)], "another timeline format"),
        (lambda content: MAGIC + bytes([FORMAT + 1]) + content[len(HEADER) :], "another timeline format"),
        (lambda content: HEADER + b"\0" + content[len(HEADER) :], "an unknown kind"),
        (lambda content: content + bytes(ROW.itemsize), "an unknown kind, or does not end"),
    ],
)
def test_damage_is_an_error(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    file = write(tmp_path, ROWS)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(RecordError, match=message):
        read_timeline(file)


@pytest.mark.parametrize(
    ("field", "value"), [("kind", 9), ("purpose", 200), ("start_s", math.nan), ("end_s", math.inf), ("end_s", 1.0)]
)
def test_an_impossible_row_is_an_error(tmp_path: Path, field: str, value: float) -> None:
    rows = np.array(ROWS, dtype=ROW)
    rows[field][1] = value
    file = tmp_path / timeline_file(0)
    file.write_bytes(HEADER + rows.tobytes())
    with pytest.raises(RecordError, match="damaged"):
        read_timeline(file)


def test_clock_drift_is_corrected(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path, ROWS))
    slower = found.without_drift(0.5)
    assert list(slower.rows["start_s"]) == [0.625, 0.75, 0.75, 2.5]
    assert slower.rows["wait_start_s"][0] == 1.25
    assert math.isnan(slower.rows["wait_start_s"][1])
    assert list(slower.rows["bytes"]) == list(found.rows["bytes"])
    assert found.without_drift(0.0) is found


def test_share_of_steps_that_are_recorded() -> None:
    recorded = RecordedSteps()
    assert all(step in recorded for step in range(1000))
    for decade, share in ((1_000, 10), (10_000, 100), (100_000, 1000)):
        kept = [step for step in range(decade, 10 * decade) if step in recorded]
        assert len(kept) == 9 * decade // share
        assert kept[:100] == list(range(decade, decade + 100)), "consecutive, so that whole periods are recorded"
        for period in (2, 3, 4, 7, 10):
            phases = {step % period for step in kept}
            assert phases == set(range(period))


@pytest.mark.parametrize(("period", "block"), [(1, 10), (3, 12), (8, 16), (20, 20), (25, 25)])
def test_sampled_steps_are_a_tenth_in_whole_periods(period: int, block: int) -> None:
    recorded = sampled_steps(period)
    assert recorded.cycle == 10 * block
    assert [step for step in range(10 * block) if step in recorded] == list(range(2 * block))
    blocks = [start for start in range(10 * block, 10_000 - block, block) if start in recorded]
    assert blocks == list(range(10 * block, 10_000 - block, 10 * block)), "one block in ten"
    for start in blocks:
        assert all(step in recorded for step in range(start, start + block))
    far = [step for step in range(100_000, 300_000) if step in recorded]
    assert len(far) == pytest.approx(200, abs=2 * block), "a thousandth, to keep files small"
