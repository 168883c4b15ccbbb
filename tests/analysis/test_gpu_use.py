"""Use, power and energy of a run's GPUs, and warnings on limited clocks."""

from __future__ import annotations

from pathlib import Path

import pytest

import run_models
from experiments_on_disk import read_comparison, write_experiment
from paceline.analysis.gpu_use import gpu_busy, gpu_j_per_sample, gpu_power_w
from paceline.records import RunFolder, Summary
from paceline.records.schema import ResourceRow
from paceline.records.writer import ResourceWriter


def summary(*gpus: tuple[str | None, float | None, float | None]) -> Summary:
    ranks = [
        run_models.rank_summary(rank, gpu=gpu, gpu_busy=busy, gpu_power_w=power)
        for rank, (gpu, busy, power) in enumerate(gpus)
    ]
    return run_models.summary(samples_per_s=1000.0, ranks=ranks)


def test_every_gpu_counts_once() -> None:
    shared = summary(("a", 0.8, 400.0), ("a", 0.8, 402.0), ("b", 0.6, 300.0))
    assert gpu_busy(shared) == pytest.approx(0.7)
    assert gpu_power_w(shared) == 700.0
    assert gpu_j_per_sample(shared) == 0.7


def test_ranks_without_a_known_gpu_count_each() -> None:
    assert gpu_power_w(summary((None, 0.5, 100.0), (None, 0.5, 100.0))) == 200.0


def test_a_gpu_without_readings_leaves_the_sum_unknown() -> None:
    partly = summary(("a", 0.8, 400.0), ("b", None, None))
    assert (gpu_busy(partly), gpu_power_w(partly), gpu_j_per_sample(partly)) == (None, None, None)


def warnings(path: Path, **sampled: float) -> list[str]:
    experiment = write_experiment(path / "e", repeats=1, ranks=2)
    for run in sorted((experiment / "repeat-1").iterdir()):
        writer = ResourceWriter(RunFolder(run), 0)
        base = ResourceRow(0, 0, 100, 4, 0, 5, 6, None, None, None, gpu_clock_mhz=1410)._replace(**sampled)
        writer.write([base._replace(time_s=time_s) for time_s in (0.0, 0.05, 0.1)])
        writer.close()
    return read_comparison(experiment).warnings


def test_clocks_that_power_or_heat_lowers_are_reported(tmp_path: Path) -> None:
    (power,) = [text for text in warnings(tmp_path, gpu_limited_by_power=1, gpu_limited_by_heat=0) if "clock" in text]
    assert "the power limit lowered the clock of a GPU in up to 100% of the samples, to 1,410 MHz." in power
    assert "nvidia-smi" in power


def test_clocks_that_are_not_limited_are_not_reported(tmp_path: Path) -> None:
    assert not [text for text in warnings(tmp_path, gpu_limited_by_power=0, gpu_limited_by_heat=0) if "clock" in text]
