"""Score of a race, computed by hand."""

from __future__ import annotations

import pytest

from paceline.analysis.race.scores import score


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([5.0], 5.0),
        ([4.0, 6.0], 5.0),
        ([9.0, 1.0, 4.0], 4.0),
        ([1.0, 2.0, 4.0, 6.0, 100.0], 4.0),
        ([None, 1.0, 4.0, 6.0], 5.0),  # The miss is the slowest, 1.0 the fastest.
        ([None, 1.0, 4.0], 4.0),
        ([None, 1.0], None),
        ([None], None),
        ([None, None, 1.0, 2.0, 3.0], None),
        ([], None),
    ],
)
def test_the_fastest_and_the_slowest_are_left_out(times: list[float | None], expected: float | None) -> None:
    assert score(times) == expected
