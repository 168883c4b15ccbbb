"""Samples of a process and its host, and the cost of sampling."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch

from paceline.analysis.resources import rank_usage
from paceline.measure import resources
from paceline.measure.resources import PERIOD_S, HostProbe, ProcessProbe, ResourceSampler, next_wait_s
from paceline.measure.run_monitor import RunMonitor
from paceline.records import RunFolder
from paceline.records.resources import Resources, read_marks, read_resources
from paceline.records.writer import ResourceWriter
from tries import eventually

CPU = torch.device("cpu")
PROMISED_SHARE = 0.005
"""Share of a core."""
WORKED_S, SLEPT_S = 1.0, 0.8


def work(cpu_s: float) -> None:
    """Compute for the given CPU time, whatever the wall time on a busy machine."""
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        sum(range(500))


class Watched(NamedTuple):
    """Samples of this process, and its CPU time as the kernel gives it: other threads of the tests use some, too."""

    samples: Resources
    worked_s: float
    slept_s: float


def watch(folder: RunFolder) -> Watched:
    """Watch a process that computes, then allocates 64 MB and sleeps, at the rate of a real run."""
    started_s = time.perf_counter()
    monitor = RunMonitor(folder, 3, lambda: time.perf_counter() - started_s, CPU, first_on_host=True)
    began_s = time.process_time()
    work(WORKED_S)
    monitor.sampler.sample()
    allocated = np.ones(64_000_000, np.uint8)
    monitor.sampler.sample()
    asleep_s = time.process_time()
    time.sleep(SLEPT_S)
    monitor.close()
    ended_s = time.process_time()
    assert allocated[-1] == 1
    return Watched(read_resources(folder.path / "resources-3.csv"), asleep_s - began_s, ended_s - asleep_s)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Watch a process once, for several tests."""
    return watch(RunFolder(tmp_path_factory.mktemp("run")))


@pytest.fixture
def watched(observed: Watched) -> Resources:
    """Return the samples alone."""
    return observed.samples


def test_cpu_time_separates_work_from_sleep(observed: Watched) -> None:
    times, cpu_s = observed.samples["time_s"], observed.samples["cpu_s"]
    assert (np.diff(times) >= 0).all()
    asleep_s = times[-1] - SLEPT_S
    worked_s, slept_s = np.interp([asleep_s, times[-1]], times, cpu_s) - [cpu_s[0], np.interp(asleep_s, times, cpu_s)]
    assert WORKED_S <= worked_s < observed.worked_s + 0.2
    assert slept_s < observed.slept_s + 0.15


def test_allocated_memory_is_sampled(watched: Resources) -> None:
    resident = watched["resident_bytes"]
    assert 50e6 < resident[-1] - resident[0] < 90e6
    assert resident[-1] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert watched["threads"][1:-1].min() >= 2  # The sampler's own thread runs between the first and the last sample.


def test_the_host_is_sampled_too(watched: Resources) -> None:
    busy = watched["host_busy"][np.isfinite(watched["host_busy"])]
    assert len(busy)
    assert ((busy >= 0) & (busy <= 1)).all()
    assert (watched["host_available_bytes"] < psutil.virtual_memory().total).all()
    assert np.isnan(watched["device_bytes"]).all()


@pytest.mark.timing
def test_sampling_costs_less_than_promised(tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        folder = tmp_path / str(attempt)
        folder.mkdir()
        usage = rank_usage(3, watch(RunFolder(folder)).samples, None)
        assert usage.sampler_share is not None
        assert 0 < usage.sampler_share < PROMISED_SHARE

    eventually(check)


def test_expensive_samples_are_taken_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that computes for 3 ms, called every 10 ms, would use 30% of a core."""
    monkeypatch.setattr(resources, "PERIOD_S", 0.01)

    class Expensive(ProcessProbe):
        def read(self, time_s: float, sampler_cpu_s: float) -> resources.ResourceRow:
            end_s = time.thread_time() + 0.003
            while time.thread_time() < end_s:
                pass
            return super().read(time_s, sampler_cpu_s)

    sampler = ResourceSampler(
        Expensive(CPU, with_host=False), ResourceWriter(RunFolder(tmp_path), 0), time.perf_counter
    )
    sampler.start()
    time.sleep(2)
    samples = read_resources(tmp_path / "resources-0.csv")
    sampler.close()
    assert 2 <= len(samples) <= 5
    assert sampler.cost_s >= 0.003 * len(samples)


@pytest.mark.parametrize("with_host", [False, True])
def test_samples_in_memory_are_those_on_disk(tmp_path: Path, with_host: bool) -> None:
    writer = ResourceWriter(RunFolder(tmp_path), 0)
    sampler = ResourceSampler(ProcessProbe(CPU, with_host=with_host), writer, time.perf_counter)
    sampler.start()
    sampler.sample()
    sampler.close()
    on_disk, in_memory = read_resources(tmp_path / "resources-0.csv"), sampler.samples()
    assert len(on_disk) == 3
    for name, values in on_disk.columns.items():
        np.testing.assert_allclose(in_memory[name], values, atol=1e-4, err_msg=name)


def test_the_period() -> None:
    assert next_wait_s(10, 0.001) == PERIOD_S
    assert next_wait_s(10, 0.2) == pytest.approx(40)
    assert next_wait_s(86_400, 1) == pytest.approx(43.2)


def test_the_share_of_busy_time_and_none_if_no_time_has_passed() -> None:
    probe = HostProbe()
    probe._cpu_times = lambda: (probe._last[0] + 3, probe._last[1] + 4)  # type: ignore[method-assign]
    assert probe.read().busy == pytest.approx(0.25)
    probe._cpu_times = lambda: probe._last  # type: ignore[method-assign]
    assert probe.read().busy is None


def test_only_the_cores_of_this_process_count() -> None:
    probe = HostProbe()
    probe._own_cores = {0}
    _, one_s = probe._cpu_times()
    probe._own_cores = None
    _, all_s = probe._cpu_times()
    cores = psutil.cpu_count() or 1
    assert one_s == pytest.approx(all_s / cores, rel=0.05)


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    before, callbacks = threading.active_count(), len(gc.callbacks)
    monitor = RunMonitor(RunFolder(tmp_path), 0, time.perf_counter, CPU, first_on_host=False)
    monitor.close()
    assert threading.active_count() == before
    assert len(gc.callbacks) == callbacks
    assert len(read_resources(tmp_path / "resources-0.csv")) == 2
    # Python may have collected garbage meanwhile.
    assert [mark for mark in read_marks(tmp_path / "marks-0.csv") if mark.kind != "gc"] == []


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    probe = ProcessProbe(device, with_host=False)
    before = probe.read(0.0, 0.0)
    allocated = torch.zeros(50_000_000, dtype=torch.uint8, device=device)
    after = probe.read(1.0, 0.0)
    assert before.device_bytes is not None
    assert after.device_bytes is not None
    assert after.device_bytes - before.device_bytes == pytest.approx(allocated.numel(), rel=0.05)
    assert after.device_used_bytes is not None
    assert after.device_used_bytes >= after.device_bytes
