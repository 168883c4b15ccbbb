"""What is said at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.records import RunRecord
from paceline.report.tables import sentences


def said(*, topology: dict[str, Any] | None = None, **summary: Any) -> str:
    """The sentences about a run of two ranks."""
    ranks = [{"rank": rank, "step_s": 0.01, "diverged_step": None} for rank in (0, 1)]
    whole = {"ranks": ranks, "steps": 40, "train_s": 0.4, "samples_per_s": 6400.0} | summary
    record = RunRecord(
        Path("runs/x"), {"bn": "local"}, topology or {"exchanges": True}, {}, {}, [], whole, finished=True
    )
    return "\n".join(sentences(whole, record))


def test_the_plain_end() -> None:
    assert said() == "trained 40 steps in 400.00 ms, 6,400 samples/s\nrecord: runs/x"


def test_the_test_says_how_many_samples_it_counted() -> None:
    test = {"loss": 0.25, "accuracy": 0.5, "samples": 9999, "available": 10000}
    assert "test loss 0.2500, accuracy 50.0%: evaluated 9999/10000 unique samples" in said(test=test)
    assert "evaluated 9999 unique samples" in said(test=test | {"available": None, "accuracy": None})


def test_buffers() -> None:
    assert "BatchNorm" not in said(buffer_divergence=None)
    assert "BatchNorm buffers (--bn local): identical on all ranks" in said(buffer_divergence=0.0)
    assert "apart by 1.250% of their norm" in said(buffer_divergence=0.0125)


@pytest.mark.parametrize(
    ("slower", "exchanges", "flagged"), [(1.04, True, False), (1.06, True, True), (2, False, False)]
)
def test_ranks_of_a_synchronous_run_take_the_same_time(slower: float, exchanges: bool, flagged: bool) -> None:
    ranks = [{"rank": r, "step_s": 0.01 * factor, "diverged_step": None} for r, factor in ((0, 1), (1, slower))]
    assert ("differs by" in said(ranks=ranks, topology={"exchanges": exchanges})) == flagged


def test_divergence_is_said_with_its_first_step() -> None:
    ranks = [{"rank": r, "step_s": 0.01, "diverged_step": step} for r, step in ((0, None), (1, 17))]
    assert "the loss is not a number since step 17" in said(ranks=ranks)


def test_the_estimate() -> None:
    assert "10 epochs would take about 2.1 min" in said(estimate={"epochs": 10, "seconds": 126.0})
