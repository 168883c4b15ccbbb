"""Time split of a candidate over its repeats: shares lie between 0 and 1 and add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.analysis.steps.candidate_split import CandidateSplit
from paceline.analysis.steps.split import PARTS


def split_over(path: Path, *exposed: float, **written: Any) -> CandidateSplit:
    """Return the split of ddp, given its exposed share in each repeat."""
    write_experiment(path / "e", CLASSIC[3:], repeats=len(exposed), events=True, **written)
    for repeat, share in enumerate(exposed):
        file = path / "e" / f"repeat-{repeat + 1}" / "1" / "summary.json"
        summary = json.loads(file.read_text())
        parts = {"compute_s": 1 - share, "overlapped_s": 0.0, "exposed_s": share, "other_s": 0.0, "data_s": 0.0}
        for rank in summary["ranks"]:
            rank["split"] = parts | {"step_s": 1.0, "descheduled_s": 0.0}
        file.write_text(json.dumps(summary))
    split = read_comparison(path / "e").row("ddp").split
    assert split is not None
    return split


def test_intervals_of_shares_end_at_0_and_1(tmp_path: Path) -> None:
    found = split_over(tmp_path, 0.01, 0.3, 0.1)
    assert found.exposed.low == 0, "Student's interval would begin far below"
    assert found.compute.high == 1
    assert found.overlap is not None
    assert (found.overlap.value, found.overlap.low) == (0, 0)


def test_shares_are_means_that_add_up_and_lie_in_their_intervals(tmp_path: Path) -> None:
    found = split_over(tmp_path, 0.1, 0.1, 0.7)
    assert found.exposed.value == pytest.approx(0.3) == found.mean.share("exposed")
    assert sum(getattr(found, part).value for part in PARTS) == pytest.approx(1)
    assert all(not getattr(found, part).spans(-0.01) and found.exposed.spans(0.3) for part in PARTS)


def test_one_rank_has_no_communication(tmp_path: Path) -> None:
    found = split_over(tmp_path, 0.2, 0.2, ranks=1)
    assert found.overlap is None
    assert found.exposed.value == 0
    assert found.other.value == pytest.approx(0.2), "its operations count as other work"


def test_ranks_are_weighted_by_their_steps(tmp_path: Path) -> None:
    """Asynchronous ranks: 25 steps of 1 s and 5 steps of 10 s after the warm-up take 2.5 s on average."""
    write_experiment(tmp_path / "e", CLASSIC[3:], repeats=1, steps=30)
    run = tmp_path / "e" / "repeat-1" / "1"
    rows = (run / "rank-1.csv").read_text().splitlines(keepends=True)
    (run / "rank-1.csv").write_text("".join(rows[:11]))
    summary = json.loads((run / "summary.json").read_text())
    for rank, step_s, exposed_s in zip(summary["ranks"], (1.0, 10.0), (0.1, 9.0), strict=True):
        parts = {"compute_s": step_s - exposed_s, "overlapped_s": 0.0, "exposed_s": exposed_s, "other_s": 0.0}
        rank["split"] = parts | {"step_s": step_s, "data_s": 0.0, "descheduled_s": 0.0}
    (run / "summary.json").write_text(json.dumps(summary))
    found = read_comparison(tmp_path / "e").row("ddp").split
    assert found is not None
    assert found.mean.step_s == pytest.approx(2.5)
    assert found.exposed.value == pytest.approx((25 * 0.1 + 5 * 9) / (25 + 5 * 10))
    assert [split.step_s for split in found.ranks.values()] == [1.0, 10.0]
