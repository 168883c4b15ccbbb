"""Resource use of ranks and hosts, from samples with known results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.analysis.resources import cpu_shares, host_usage, rank_usage, usage
from paceline.records import RunDescription, RunFolder, RunRecord, StepRow, StepWriter, read_run
from paceline.records.schema import MarkRow, ResourceRow
from paceline.records.writer import MarkWriter, ResourceWriter
from run_models import PROVENANCE, recorded_settings, topology


def row(time_s: float, cpu_s: float, resident: int, **values: Any) -> ResourceRow:
    return ResourceRow(time_s, cpu_s, resident, 5, time_s / 1000, None, None, None, None, None)._replace(**values)


def write_run(
    path: Path, samples: Sequence[Sequence[ResourceRow]], marks: Sequence[MarkRow] = (), **changes: Any
) -> RunRecord:
    """Write a run whose ranks trained from second 1 to second 5."""
    folder = RunFolder.create(path)
    own = topology(max(1, len(samples)), **changes)
    folder.write_run(RunDescription(config=recorded_settings(), topology=own, provenance=PROVENANCE))
    for rank, rows in enumerate(samples):
        for writer, content in (
            (StepWriter(folder, rank), [StepRow(0, 0, 1, 1, 0, 1, 1, 0, 0, 0), StepRow(1, 0, 1, 3, 1, 1, 0, 0, 0, 0)]),
            (ResourceWriter(folder, rank), rows),
            (MarkWriter(folder, rank), marks),
        ):
            writer.write(content)
            writer.close()
    return read_run(path)


SAMPLES = [row(0, 10, 1), row(2, 10, 300), row(4, 13, 500), row(4.5, 13, 400), row(6, 16, 900)]
"""Idle until second 2, then 1.5 cores for 2 s, idle for 0.5 s, and 2 cores for 1.5 s."""


def test_only_the_time_of_training_counts(tmp_path: Path) -> None:
    marks = [
        MarkRow("gc", 0.2, 0.4, "generation 2"),
        MarkRow("gc", 2, 2.25, "generation 2"),
        MarkRow("gc", 4, 4.5, "generation 0"),
        MarkRow("evaluation", 3, 4, ""),
    ]
    (found,) = usage(write_run(tmp_path, [SAMPLES], marks, ranks_per_host=1))
    assert found.cpu_share == pytest.approx((14 - 10) / 4), "from second 1 to 5"
    assert found.resident_bytes == 400
    assert found.device_bytes is None
    assert (found.collections, found.collection_s) == (2, 0.75)
    assert found.sampler_share == pytest.approx(0.001)


def test_captures_of_graphs_are_not_training(tmp_path: Path) -> None:
    marks = [
        MarkRow("graphs", 2, 4, ""),
        MarkRow("gc", 3, 3.5, "generation 2"),
        MarkRow("gc", 4, 4.5, "generation 0"),
        MarkRow("graphs", 5.5, 6, ""),
    ]
    busy = [sample._replace(host_busy=share) for sample, share in zip(SAMPLES, (0, 0.5, 1, 0.25, 0.25), strict=True)]
    run = write_run(tmp_path, [busy], marks, ranks_per_host=1)
    (found,), (host,) = usage(run), host_usage(run)
    assert found.cpu_share == pytest.approx((1 * 0 + 0.5 * 0 + 0.5 * 2) / 2), "seconds 1 to 2 and 4 to 5"
    assert found.resident_bytes == 400
    assert (found.collections, found.collection_s) == (1, 0.5)
    assert host.busy == pytest.approx((1 * 0.5 + 1 * 0.25) / 2)


def test_a_run_shorter_than_the_sampling_period_uses_the_sample_nearest_to_its_end(tmp_path: Path) -> None:
    (found,) = usage(write_run(tmp_path, [[row(0, 1, 100), row(5.5, 2, 200)]]))
    assert found.resident_bytes == 200
    assert found.cpu_share == pytest.approx(1 / 5.5)


def test_memory_of_a_gpu(tmp_path: Path) -> None:
    samples = [
        row(t, t, 1, device_bytes=own, device_used_bytes=all_) for t, own, all_ in ((1, 5, 9), (3, 7, 40), (5, 6, 8))
    ]
    (found,) = usage(write_run(tmp_path, [samples]))
    assert (found.device_bytes, found.device_used_bytes) == (6, 40)


def test_hosts_sum_over_their_ranks(tmp_path: Path) -> None:
    first = [
        row(0, 0, 100, host_used_bytes=5, host_available_bytes=95),
        row(2, 2, 100, host_busy=0.9, host_used_bytes=7, host_available_bytes=93),
        row(5, 5, 100, host_busy=0.4, host_used_bytes=6, host_available_bytes=94),
        row(6, 5, 100, host_busy=0.0, host_used_bytes=99, host_available_bytes=1),
    ]
    run = write_run(tmp_path, [first, SAMPLES, first, SAMPLES], ranks_per_host=2)
    assert [rank.host for rank in usage(run)] == [0, 0, 1, 1]
    hosts = host_usage(run)
    assert [host.ranks for host in hosts] == [[0, 1], [2, 3]]
    for host in hosts:
        assert host.cpu_share == pytest.approx(2)
        assert host.resident_bytes == 500
        assert host.busy == pytest.approx((1 * 0.9 + 3 * 0.4) / 4)
        assert (host.used_bytes, host.available_bytes) == (7, 93)


def test_a_record_without_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    assert usage(run) == []
    assert host_usage(run) == []


def test_a_rank_that_was_killed_immediately(tmp_path: Path) -> None:
    (found,) = usage(write_run(tmp_path, [[]]))
    assert (found.cpu_share, found.resident_bytes) == (None, None)


def test_without_steps_all_samples_count(tmp_path: Path) -> None:
    run = write_run(tmp_path, [SAMPLES])
    assert rank_usage(0, run.resources[0], None).cpu_share == pytest.approx(1)


def test_the_curve_of_cpu_shares(tmp_path: Path) -> None:
    samples = [*SAMPLES, row(6.01, 17, 900)]
    times, shares = cpu_shares(write_run(tmp_path, [samples]).resources[0])
    np.testing.assert_allclose(times, [2, 4, 4.5, 6])
    np.testing.assert_allclose(shares, [0, 1.5, 0, 2])
