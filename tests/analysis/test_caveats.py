"""What is said before a comparison is believed: replicas that drift, losses that are no numbers, another reference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from experiments_on_disk import falling, read_comparison, write_experiment
from paceline.analysis.caveats import caveats
from paceline.records.experiment import Candidate


def drifted(path: Path, place: int, apart: float | None) -> list[str]:
    """The warnings where the replicas of the candidate in a place differ after the second repeat."""
    for file in path.glob(f"repeat-2/{place}/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"weight_divergence": apart}))
    return [warning for warning in read_comparison(path).warnings if "weights differ" in warning]


@pytest.mark.parametrize(("apart", "share"), [(0.12, "12%"), (2e-6, "0.0002%"), (1.5, "150%")])
def test_replicas_that_drift_are_said(tmp_path: Path, apart: float, share: str) -> None:
    (said,) = drifted(write_experiment(tmp_path / "e"), 3, apart)
    assert said == (
        f"allreduce: the ranks' weights differ by {share} at the end of the run, "
        "though it promises the same gradient on all."
    )


@pytest.mark.parametrize("apart", [0.0, 1e-7, None])
def test_equal_replicas_are_not(tmp_path: Path, apart: float | None) -> None:
    assert drifted(write_experiment(tmp_path / "e"), 3, apart) == []


def test_what_promises_nothing_may_drift(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", [Candidate("local", "local", lossless=False), Candidate("ddp", "ddp")])
    assert drifted(path, 1, 0.5) == []
    assert drifted(write_experiment(tmp_path / "classic"), 2, 0.9) == [], "the bound exchanges nothing"


def test_losses_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        diverges = candidate.name == "allreduce" or (candidate.name == "ddp" and repeat == 1)
        return math.nan if diverges and step >= 5 else falling(candidate, repeat, step)

    said = [w for w in read_comparison(write_experiment(tmp_path / "e", losses=losses)).warnings if "number" in w]
    assert len(said) == 2
    assert "allreduce: the loss is not a number since step 5 in 2 of 2 repeats." in said[0]
    assert "ddp: the loss is not a number since step 5 in 1 of 2 repeats." in said[1]


def test_candidates_that_diverge_alike_share_a_sentence(tmp_path: Path) -> None:
    warnings = read_comparison(write_experiment(tmp_path / "e", losses=lambda *_: math.nan)).warnings
    assert [
        w for w in warnings if w.startswith("single, none, allreduce and ddp: the loss is not a number since step 0")
    ]


def test_a_comparison_as_it_should_be_has_no_caveats(tmp_path: Path) -> None:
    assert read_comparison(write_experiment(tmp_path / "e")).warnings == []


@pytest.mark.parametrize(
    ("untracked", "said"),
    [
        (
            {"groups": 1, "operations": 9},
            "allreduce made 1 process group of its own: what passes there is not in the time split. "
            "Groups of comm.subgroup(ranks) are seen.",
        ),
        (
            {"groups": 0, "operations": 40},
            "allreduce sent through groups that are not the run's, as torch's default one (40 operations): "
            "they are not in the time split. Send through comm.group.",
        ),
        ({"groups": 0, "operations": 0}, None),
        (None, None),
    ],
)
def test_what_passes_by_the_time_split_is_said_once(
    tmp_path: Path, untracked: dict[str, int] | None, said: str | None
) -> None:
    path = write_experiment(tmp_path / "e")
    for file in path.glob("repeat-*/3/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"untracked": untracked}))
    assert read_comparison(path).warnings == ([] if said is None else [said])


def test_ranks_that_differ_are_said_in_one_sentence(tmp_path: Path) -> None:
    record_set = read_comparison(write_experiment(tmp_path / "e")).record_set
    (said,) = caveats(record_set, {"ddp": 0.061, "allreduce": 0.114, "single": None})
    assert said.startswith("ddp and allreduce: time per iteration differs by 6 to 11% between ranks")
    (said,) = caveats(record_set, {"ddp": 0.061})
    assert said.startswith("ddp: time per iteration differs by 6% between ranks")
