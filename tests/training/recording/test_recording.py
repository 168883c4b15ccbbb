"""Recording of runs: the summary that ranks add up while they train is that of the steps in the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist

from paceline.analysis.steps.timing import step_time, windows_of
from paceline.analysis.summary import summarise_rank
from paceline.comm import Comm, World, close_comm, open_comm
from paceline.config import RunConfig
from paceline.measure.steps import make_stopwatch
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.resources import read_resources
from paceline.training.recording import windows
from paceline.training.recording.recording import Recording
from paceline.training.run import run
from ranks import SIZE, Pool
from run_models import recorded_settings, topology

CPU = torch.device("cpu")


def train(_: Comm, settings: dict[str, Any], folder: str) -> None:
    """Run on the first two ranks, in windows of few steps; all ranks must help to open groups."""
    rank = dist.get_rank()
    if rank >= 2:
        open_comm(range(2), device=CPU, backend="gloo", timeout_s=30, stopwatch=make_stopwatch(CPU, events=True))
        return
    store = dist.HashStore()
    world = World(rank, 2, local_rank=rank, local_size=2, interface="lo", ranks_sharing_cores=1, store=store)
    config = RunConfig(**{"workload": "training.cases:tied", "batch": 8, "log_every": 2, "lr": 0.01} | settings)
    with patch.multiple(windows, WINDOW_S=0, LONG_WINDOW_S=0, MIN_STEPS=7):
        run(config, world, RunFolder(Path(folder)), threads=1)


def recorded(pool: Pool, folder: Path, **settings: Any) -> RunRecord:
    pool.run(train, SIZE, settings, str(RunFolder.create(folder).path))
    return read_run(folder)


def check_summary(record: RunRecord) -> None:
    """Compare the summary with the one that is computed for an interrupted run, from its steps."""
    assert record.summary is not None
    for rank, steps in record.steps.items():
        own = record.summary.ranks[rank]
        expected = msgspec.structs.asdict(summarise_rank(rank, steps, windows_of(record)))
        for name in expected.keys() - {"peak_bytes", "cpu_share", "resident_bytes", "split"}:  # Not from the steps.
            value = expected[name]
            close = value if value is None else pytest.approx(value, rel=1e-6)
            assert getattr(own, name) == close, (rank, name)
    spans = windows_of(record)
    assert record.summary.step_s == step_time(spans)
    assert record.summary.steps == sum(window.steps for window in spans)
    assert record.summary.train_s == pytest.approx(sum(window.wall_s for window in spans))


@pytest.mark.parametrize("steps", [1, 4, 23])
def test_the_summary_is_that_of_the_recorded_steps(pool: Pool, tmp_path: Path, steps: int) -> None:
    record = recorded(pool, tmp_path / "run", steps=steps, strategy="allreduce")
    assert [len(own) for own in record.steps.values()] == [steps] * 2
    check_summary(record)


def test_figures_of_a_strategy_are_recorded_as_they_are(pool: Pool, tmp_path: Path) -> None:
    summary = recorded(pool, tmp_path / "run", steps=2, strategy="training.cases:WithMetrics").summary
    assert summary is not None
    assert (summary.metrics, summary.staleness) == ({"ratio": 0.75, "staleness": 3.0}, None)


def test_profiled_steps_are_left_out_of_it(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=23, strategy="ddp", profile="9-11")
    assert any(window.profiled for window in windows_of(record))
    check_summary(record)


def test_ranks_that_do_not_step_together(pool: Pool, tmp_path: Path) -> None:
    record = recorded(pool, tmp_path / "run", steps=30, strategy="parameter_server:asynchronous=true", bn="local")
    check_summary(record)
    assert record.summary is not None
    assert sum(len(steps) for steps in record.steps.values()) == 2 * 30


def summarise_without_files(comm: Comm, folder: str) -> None:
    """Train where the files with steps and samples cannot be read."""
    with (
        patch("paceline.records.reader.read_text", side_effect=AssertionError("a file was read back")),
        patch("paceline.records.resources.read_text", side_effect=AssertionError("a file was read back")),
    ):
        train(comm, {"steps": 8, "strategy": "allreduce"}, folder)


def test_ranks_do_not_read_their_steps_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(summarise_without_files, SIZE, str(RunFolder.create(tmp_path / "run").path))
    record = read_run(tmp_path / "run")
    check_summary(record)
    assert record.summary is not None
    for rank in (0, 1):
        resident = read_resources(record.path / f"resources-{rank}.csv")["resident_bytes"]
        assert resident.min() <= record.summary.ranks[rank].resident_bytes <= resident.max()


def describe(_: Comm, folders: list[str]) -> None:
    """Describe a run on two hosts of one rank each, which write to the given folders."""
    stopwatch = make_stopwatch(CPU, events=False)
    comm = open_comm(range(2), device=CPU, backend="gloo", timeout_s=30, stopwatch=stopwatch)
    if comm is None:
        return
    with Recording(RunConfig(), comm, RunFolder(Path(folders[comm.rank])), first_on_host=True) as recording:
        recording.describe(recorded_settings(), topology(), command=f"as typed on host {comm.rank}")
    close_comm(comm)


@pytest.mark.parametrize("share_a_disk", [True, False])
def test_every_disk_gets_one_description(pool: Pool, tmp_path: Path, share_a_disk: bool) -> None:
    folders = [tmp_path / name for name in (("here", "here") if share_a_disk else ("here", "there"))]
    for folder in folders:
        RunFolder.create(folder)
    pool.run(describe, SIZE, [str(folder) for folder in folders])
    authors = [read_run(folder).provenance.command for folder in folders]
    assert authors == [f"as typed on host {rank}" for rank in ((0, 0) if share_a_disk else (0, 1))]
    assert [file.name for folder in folders for file in folder.glob("*.csv")] == [], "there were no steps"
