"""`paceline doctor` from the command line: real ranks examine the machine of the tests."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import paceline
from paceline.analysis.findings import findings, problems
from paceline.measure.cores import threads_per_rank, usable_cores
from paceline.measure.host import boot_id
from paceline.records.examination import Examination, read_examination
from paceline.records.reader import read_run

pytestmark = pytest.mark.takes(20)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Examination, dict[str, Any], Path, str]:
    """Examination shared by the tests that only read it: the record, the JSON output, the folder, and stderr."""
    out = tmp_path_factory.mktemp("doctor") / "out"
    enough = usable_cores() >= 2
    arguments = ("doctor", "--ranks", "2", "--batch", "32", "--json", "--out", str(out))
    done = paceline(*arguments, expect=0 if enough else 9)
    return read_examination(out), json.loads(done.stdout), out, done.stderr


Examined = tuple[Examination, dict[str, Any], Path, str]


def test_the_printed_json_equals_the_record(examined: Examined) -> None:
    record, printed, out, _ = examined
    assert printed["examination"] == record.to_dict()
    assert printed["findings"] == [finding.to_dict() for finding in findings(record)]
    assert printed["problems"] == len(problems(findings(record)))
    assert printed["record"] == str(out / "doctor.json")


def test_progress_goes_to_stderr(examined: Examined) -> None:
    stages = [line.split()[0] for line in examined[3].splitlines()]
    assert stages == ["collecting", *["measuring"] * 3, "training", "measuring"]


def test_rank_info_describes_this_machine(examined: Examined) -> None:
    record = examined[0]
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert len(record.hosts) == 1
    for rank in record.ranks:
        assert rank.host_name == platform.node()
        assert rank.boot_id == boot_id()
        assert (rank.interface, rank.address, rank.bind_error) == ("lo", "127.0.0.1", None)
        assert rank.threads == threads_per_rank(2)
        assert rank.cpu_count == os.cpu_count()
        assert rank.cores == usable_cores()
        assert 0 <= rank.busy_cores <= rank.cpu_count
        assert rank.versions["torch"] == torch.__version__
        assert rank.versions["python"] == platform.python_version()
        assert rank.clock_offset_s == rank.clock_error_s == 0
        assert 1e8 < rank.resident_bytes < rank.memory_available_bytes
        assert rank.disk_free_bytes > 0
        assert rank.folder == str(examined[2])


def test_the_link_is_measured(examined: Examined) -> None:
    link = examined[0].link
    assert link is not None
    (pair,) = link.pairs
    assert pair.within_host
    assert 1e-6 < pair.alpha_s < 0.05
    assert 2e7 < pair.bytes_per_s < 5e10
    (measured,) = link.all_reduces
    assert measured.points[0].bytes == 1024
    assert len(measured.points) >= 6
    assert 2e7 < measured.best.busbw_bytes_per_s < 5e10
    assert examined[0].contention is not None


def test_the_needs_of_the_workload_are_measured_by_training_it(examined: Examined) -> None:
    record = examined[0]
    needs = record.workload
    assert needs is not None
    assert (needs.name, needs.strategy, needs.batch, needs.workers) == ("cnn on digits", "ddp", 32, 2)
    run = read_run(examined[2] / "workload")
    assert run.summary is not None
    assert needs.peak_bytes == [rank.peak_bytes for rank in run.summary.ranks]
    assert all(peak > rank.resident_bytes for peak, rank in zip(needs.peak_bytes, record.ranks, strict=True) if peak)
    assert needs.gradient_bytes == 4 * needs.parameters
    assert 0 < needs.step_s < 10
    assert needs.steps == len(run.steps[0])


def test_measuring_takes_seconds(examined: Examined) -> None:
    assert examined[0].measured_s < 60


def test_a_record_is_not_overwritten(examined: Examined) -> None:
    done = paceline("doctor", "--ranks", "2", "--out", str(examined[2]), expect=8)
    assert "already contains a record" in done.stderr


def test_the_cost_of_measuring_is_measured(examined: Examined) -> None:
    cost, needs = examined[0].measuring_cost, examined[0].workload
    assert cost is not None
    assert needs is not None
    assert (cost.workload, cost.strategy) == (needs.name, needs.strategy)
    assert cost.low <= cost.share <= cost.high
    assert cost.low < 0.3
    assert cost.high > -0.2


def test_a_workload_that_fails_is_reported_as_a_problem(tmp_path: Path) -> None:
    arguments = ("doctor", "user_workloads:unused", "--ranks", "1", "--threads", "1", "--batch", "8")
    done = paceline(*arguments, "--out", str(tmp_path / "out"), expect=9)
    assert "Training the workload failed" in done.stdout
    assert "fix: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    record = read_examination(tmp_path / "out")
    assert record.failure is not None
    assert "got no gradient" in record.failure
    assert record.link is None
    assert record.workload is None


def test_usage_errors_are_found_before_any_rank_starts(tmp_path: Path) -> None:
    done = paceline("doctor", "cmn", "--out", str(tmp_path / "out"), expect=2)
    assert "did you mean 'cnn'?" in done.stderr
    assert not (tmp_path / "out").exists()
