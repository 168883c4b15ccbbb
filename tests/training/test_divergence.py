"""Runs whose loss or gradients are not finite on one rank, with real ranks: all stop, or skip the step, together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.analysis.divergence import MOST_SKIPPED, skipped_steps_of
from paceline.analysis.steps.timing import losses_of
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.summary import Divergence, Summary
from paceline.training.recording import windows
from paceline.training.run import run
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool
from registered import LOSSLESS, in_turn, with_options

pytestmark = pytest.mark.takes(20)

HERE = __name__
BATCH, BATCHES, BAD_STEP = 16, 9, 6
ALL = with_options(LOSSLESS, {"halving_doubling": "segment_kb=0.5", "bucketed": "bucket_mb=0.0001"})

_models: list[nn.Module] = []
"""Model of the last workload of this process."""


class Batches:
    """Global batches; of bad ones, the sample of rank 1 that comes last is infinite, or all samples are."""

    def __init__(self, batches: int, bad: tuple[int, ...] = (), *, left_out: tuple[int, ...] = ()) -> None:
        self._numbers = [number for number in range(batches) if number not in left_out]
        self._bad = bad

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in self._numbers:
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(BATCH, 6, generator=generator)
            y = x.argmax(1) % 3
            if number in self._bad:
                x[2 * BATCH // SIZE - 1] = torch.inf
            yield x, y


def workload(train: Any, **changes: Any) -> Workload:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
    _models[:] = [nn.Sequential(*layers)]
    return Workload(**{"model": _models[0], "train": train, "loss": F.cross_entropy} | changes)


def one_bad_batch() -> Workload:
    """Return batches of which one is infinite on rank 1 alone."""
    return workload(Batches(BATCHES, (BAD_STEP,)))


def bad_from_the_start() -> Workload:
    """Return batches of which the first is infinite on rank 1 alone."""
    return workload(Batches(BATCHES, (0,)))


def without_bad_batch() -> Workload:
    """Return the same batches without the infinite one."""
    return workload(Batches(BATCHES, left_out=(BAD_STEP,)))


def without_first_batch() -> Workload:
    """Return the same batches without the first."""
    return workload(Batches(BATCHES, left_out=(0,)))


def always_bad() -> Workload:
    """Return batches that are all infinite on rank 1 from the third on."""
    return workload(Batches(80, tuple(range(2, 80))))


def bad_sample() -> Workload:
    """Return a data set with one NaN, in one batch of each epoch."""
    x = torch.randn(5 * BATCH, 6, generator=torch.Generator().manual_seed(0))
    x[37] = torch.nan
    return workload((x, torch.zeros(5 * BATCH, dtype=torch.int64)))


def too_fast() -> Workload:
    """Return a model that diverges although its data is finite."""
    x = torch.randn(5 * BATCH, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 4)
    return workload((x, x), model=model, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e20))


@dataclass
class Trained:
    """Outcome of a run on one rank."""

    error: str
    exit_code: int
    state: dict[str, Tensor]
    """Weights and buffers at the end."""


def train(comm: Comm, settings: dict[str, Any], folder: str) -> Trained:
    """Train on all ranks of the pool."""
    world = World(
        comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
        store=dist.HashStore(),
    )  # fmt: skip
    usual = {"batch": BATCH, "lr": 0.1, "schedule": "constant", "events": False, "log_every": 2}
    config = RunConfig(**usual | settings)
    error = ""
    exit_code = 0
    with patch.multiple(windows, WINDOW_S=0, LONG_WINDOW_S=0, MIN_STEPS=7):
        try:
            run(config, world, RunFolder(Path(folder)), threads=1)
        except PacelineError as caught:
            error, exit_code = f"{type(caught).__name__}: {caught.message} hint: {caught.hint}", caught.exit_code
    return Trained(error, exit_code, {name: value.clone() for name, value in _models[0].state_dict().items()})


def trained(pool: Pool, folder: Path, name: str, **settings: Any) -> tuple[list[Trained], RunRecord]:
    out = RunFolder.create(folder).path
    found = pool.run(train, SIZE, {"workload": f"{HERE}:{name}"} | settings, str(out))
    return found, read_run(out)


def check_same(ones: Trained, others: Trained, *, exactly: bool) -> None:
    for name, value in ones.state.items():
        assert torch.isfinite(value).all(), name
        if exactly:
            assert torch.equal(value, others.state[name]), name
        else:
            torch.testing.assert_close(value, others.state[name], rtol=1e-5, atol=1e-7)


# Skipping.


@pytest.fixture(scope="module")
def without(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Summary]:
    """Return the outcome on rank 0, and the summary, of a run on the batches without the bad one."""
    folder = tmp_path_factory.mktemp("without") / "run"
    found, record = trained(pool, folder, "without_bad_batch", strategy="allreduce", bn="sync")
    assert found[0].error == ""
    assert record.summary is not None
    return found[0], record.summary


@pytest.mark.parametrize("strategy", in_turn(ALL, 1))
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(
    pool: Pool, tmp_path: Path, without: tuple[Trained, Summary], strategy: str
) -> None:
    expected, reference = without
    found, record = trained(pool, tmp_path / "run", "one_bad_batch", on_nan="skip", strategy=strategy, bn="sync")
    assert [one.error for one in found] == [""] * SIZE
    for one in found:
        check_same(one, found[0], exactly=True)
        check_same(one, expected, exactly=False)
    summary = record.summary
    assert summary is not None
    assert (summary.steps, summary.skipped_steps, summary.divergence) == (BATCHES, 1, None)
    assert skipped_steps_of(record) == {BAD_STEP}
    assert summary.average_loss == pytest.approx(reference.average_loss, rel=1e-5)
    assert [rank.diverged_step for rank in summary.ranks] == [None] * SIZE
    assert summary.replicas is not None
    assert summary.replicas.difference is None
    assert summary.weight_divergence == 0


@pytest.mark.parametrize("bn", ["broadcast", "local"])
@pytest.mark.parametrize(
    ("name", "without"), [("one_bad_batch", "without_bad_batch"), ("bad_from_the_start", "without_first_batch")]
)
def test_running_statistics_are_those_before_a_skipped_step(
    pool: Pool, tmp_path: Path, bn: str, name: str, without: str
) -> None:
    """Each rank has the statistics of a run without that step, also if the first step is the one."""
    found, _ = trained(pool, tmp_path / "skips", name, on_nan="skip", strategy="allreduce", bn=bn)
    expected, _ = trained(pool, tmp_path / "without", without, strategy="allreduce", bn=bn)
    for one, other in zip(found, expected, strict=True):
        check_same(one, other, exactly=True)


def test_without_bad_batches_skipping_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    found, record = trained(pool, tmp_path / "skips", "without_bad_batch", on_nan="skip", precision="fp64")
    expected, _ = trained(pool, tmp_path / "stops", "without_bad_batch", precision="fp64")
    check_same(found[0], expected[0], exactly=True)
    assert record.summary is not None
    assert record.summary.skipped_steps == 0


def test_a_loss_that_a_scaler_skips_is_no_divergence(pool: Pool, tmp_path: Path) -> None:
    """Under fp16 a step is skipped although `--on-nan` is stop."""
    found, record = trained(pool, tmp_path / "run", "one_bad_batch", strategy="ddp", precision="fp16")
    assert [one.error for one in found] == [""] * SIZE
    assert record.summary is not None
    assert BAD_STEP in skipped_steps_of(record)
    assert record.summary.divergence is None
    assert record.summary.average_loss is not None


@pytest.mark.parametrize("settings", [{"on_nan": "skip"}, {"precision": "fp16"}], ids=["skip", "fp16"])
def test_too_many_skipped_steps_in_a_row_stop_the_run(pool: Pool, tmp_path: Path, settings: dict[str, str]) -> None:
    found, record = trained(pool, tmp_path / "run", "always_bad", strategy="allreduce", **settings)
    assert {one.exit_code for one in found} == {11}
    first = 2 if settings.get("on_nan") else min(skipped_steps_of(record))
    assert found[0].error.startswith(
        f"DivergenceError: the run diverged at step {first} (seed 0): all of {MOST_SKIPPED} steps in a row from there "
        "on were skipped, as gradients were not finite. hint: check the data for NaN; use a lower --lr"
    )
    assert record.summary is not None
    assert record.summary.divergence is not None
    assert record.summary.divergence.skipped == MOST_SKIPPED
    assert MOST_SKIPPED <= record.summary.skipped_steps < 60


def test_a_sample_that_is_not_finite_is_skipped_in_each_epoch(pool: Pool, tmp_path: Path) -> None:
    found, record = trained(pool, tmp_path / "run", "bad_sample", strategy="ddp", on_nan="skip", epochs=3)
    assert [one.error for one in found] == [""] * SIZE
    assert record.summary is not None
    assert record.summary.skipped_steps == 3
    assert all(value.isfinite().all() for one in found for value in one.state.values())


# Stopping.


@pytest.mark.parametrize("strategy", ["ddp", "none", "priority", "parameter_server", "parameter_server:extra=true"])
def test_all_ranks_stop_after_the_window_of_a_loss_that_is_not_finite(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    found, record = trained(pool, tmp_path / "run", "one_bad_batch", strategy=strategy, seed=3)
    workers = [one for one in found if one.error]
    assert {one.exit_code for one in workers} == {11}
    assert len(workers) == record.topology.workers
    last = losses_of(record)[BAD_STEP - 1]
    assert {one.error for one in workers} == {
        f"DivergenceError: the run diverged at step {BAD_STEP} (seed 3): the loss is not finite; the last finite one "
        f"was {last:.4g}. hint: check the data for NaN; use a lower --lr, a longer --warmup-epochs or --clip-norm 1, "
        "or skip such steps with --on-nan skip"
    }
    assert not record.finished
    assert record.summary is not None
    assert record.summary.divergence == Divergence(step=BAD_STEP, loss=None, before=pytest.approx(last))
    assert record.summary.steps == len(losses_of(record)) == 8, "the window in which it diverged is the last"
    assert record.summary.average_loss is None
    assert record.summary.test is None


def test_asynchronous_ranks_stop_together(pool: Pool, tmp_path: Path) -> None:
    found, record = trained(
        pool,
        tmp_path / "run",
        "too_fast",
        lr=None,
        strategy="parameter_server:asynchronous=true",
        epochs=20,
        steps=None,
    )
    assert len({one.error for one in found}) == 1
    assert found[0].error.startswith("DivergenceError: the run diverged at step ")
    hint = found[0].error.partition(" hint: ")[2]
    assert hint == "use a lower learning rate in the workload's optimiser", "asynchronous servers neither clip nor skip"
    assert record.summary is not None
    assert record.summary.steps < 100
    assert json.loads((record.path / "summary.json").read_text())["divergence"]["loss"] is None
