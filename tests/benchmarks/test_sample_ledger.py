"""Tests of benchmarks/sample_ledger.py: it accepts what a restarted run trains, and finds lost and repeated samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import FOLDER
from paceline.workloads.sampler import Sampler

sys.path.insert(0, str(FOLDER))
try:
    from sample_ledger import Positions, check_every_sample_once, check_redone, read_ledger
finally:
    sys.path.remove(str(FOLDER))

SAMPLER = Sampler(60, 6, seed=0)
STEPS = 25  # Two and a half epochs.


@pytest.fixture
def positions() -> Positions:
    return Positions(SAMPLER, STEPS)


def write(folder: Path, began: int, steps: range, shares: list[slice], change: dict[int, str] | None = None) -> None:
    """Write what the ranks of one attempt trained: a share of the batch of every step each."""
    batches = [batch.tolist() for epoch in range(3) for batch in SAMPLER.batches(epoch)]
    for rank, share in enumerate(shares):
        lines = [" ".join(map(str, batches[step][share])) for step in steps]
        for step, text in (change or {}).items():
            lines[step - steps.start] = text
        content = "".join(f"{line}\n" for line in ["0 1", *lines])  # The check of the model comes first.
        (folder / f"rank-{rank}-1-{began + rank}.txt").write_text(content + "5 7")  # The last line is cut off.


THREE, TWO = [slice(0, 2), slice(2, 4), slice(4, 6)], [slice(0, 3), slice(3, 6)]


def test_a_restart_on_fewer_ranks(tmp_path: Path, positions: Positions) -> None:
    write(tmp_path, 10, range(0, 14), THREE)
    write(tmp_path, 20, range(8, STEPS), TWO)
    trained = read_ledger(tmp_path, positions)
    assert [min(one.samples) for one in trained] == [0, 0, 0, 8, 8]
    check_every_sample_once(trained, positions, STEPS)
    assert check_redone(trained, [(8, 6)]) == 6
    assert check_redone(trained, [(8, 4)]) == 6, "two steps had begun, and rank 0 had not counted them"
    with pytest.raises(AssertionError, match=r"steps \[13\] were trained again, which no restart announced"):
        check_redone(trained, [(8, 3)])


def test_a_step_that_a_rank_did_not_train(tmp_path: Path, positions: Positions) -> None:
    write(tmp_path, 10, range(0, STEPS), THREE)
    (tmp_path / "rank-1-1-11.txt").unlink()
    with pytest.raises(AssertionError, match="step 0 lacks 2 samples"):
        check_every_sample_once(read_ledger(tmp_path, positions), positions, STEPS)


def test_a_step_that_was_left_out_on_resuming(tmp_path: Path, positions: Positions) -> None:
    write(tmp_path, 10, range(0, 10), THREE)
    write(tmp_path, 20, range(11, STEPS), TWO)
    with pytest.raises(AssertionError, match="step 10 lacks 6 samples"):
        check_every_sample_once(read_ledger(tmp_path, positions), positions, STEPS)


def test_samples_that_two_ranks_trained(tmp_path: Path, positions: Positions) -> None:
    write(tmp_path, 10, range(0, STEPS), [slice(0, 4), slice(3, 6)])
    with pytest.raises(AssertionError, match="step 0 has 1 samples twice"):
        check_every_sample_once(read_ledger(tmp_path, positions), positions, STEPS)


def test_samples_of_another_batch(tmp_path: Path, positions: Positions) -> None:
    other = SAMPLER.order(0)[[0, 30]].tolist()
    write(tmp_path, 10, range(0, 5), THREE, change={3: " ".join(map(str, other))})
    with pytest.raises(AssertionError, match="did not train consecutive batches"):
        read_ledger(tmp_path, positions)
