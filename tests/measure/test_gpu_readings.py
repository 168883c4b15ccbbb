"""Readings of a GPU by NVML: which GPU, which units, and what happens without it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fake_nvml
from fake_nvml import GPU, FakeNvml
from paceline.analysis.resources import usage_between
from paceline.measure import gpu_readings
from paceline.measure.gpu_readings import NO_READINGS, GpuReadings, gpu_identity, gpu_probe, why_no_readings
from paceline.measure.resources import ProcessProbe, ResourceSampler
from paceline.records import RunFolder
from paceline.records.resources import read_resources
from paceline.records.writer import ResourceWriter


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    gpu_readings._nvml.cache_clear()
    yield
    gpu_readings._nvml.cache_clear()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return fake_nvml.install(monkeypatch)


@pytest.mark.usefixtures("nvml")
def test_the_gpu_that_torch_uses_is_read_in_base_units() -> None:
    probe = gpu_probe(GPU)
    assert probe is not None
    assert probe.read() == GpuReadings(
        busy=0.93, power_w=412.345, energy_j=1001.0, clock_mhz=1980, limited_by_power=0, limited_by_heat=0
    )
    assert gpu_identity(GPU) == fake_nvml.UUID
    assert why_no_readings(GPU) is None


def test_a_gpu_without_a_known_uuid_is_found_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, uuid="another form")
    probe = gpu_probe(GPU)
    assert probe is not None
    assert probe.read().busy == 0.93


@pytest.mark.parametrize(
    ("reasons", "power", "heat"),
    [(0x1, 0, 0), (0x4, 1, 0), (0x8 | 0x40, 0, 1), (0x80 | 0x20, 1, 1), (0x2 | 0x10 | 0x100, 0, 0)],
)
def test_reasons_for_a_lower_clock(nvml: FakeNvml, reasons: int, power: int, heat: int) -> None:
    nvml.reasons = reasons
    probe = gpu_probe(GPU)
    assert probe is not None
    assert (probe.read().limited_by_power, probe.read().limited_by_heat) == (power, heat)


def test_what_a_gpu_does_not_report_is_left_out_and_not_asked_again(nvml: FakeNvml) -> None:
    nvml.failing = {
        "nvmlDeviceGetTotalEnergyConsumption": nvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetPowerUsage": nvml.NVML_ERROR_UNKNOWN,
    }
    probe = gpu_probe(GPU)
    assert probe is not None
    first, second = probe.read(), probe.read()
    assert first == second
    assert (first.energy_j, first.power_w, first.busy) == (None, None, 0.93)
    assert nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 1
    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 2  # It may succeed later.


def test_without_the_package_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_probe(GPU) is None
    assert why_no_readings(GPU) == "the package nvidia-ml-py is not installed"
    assert why_no_readings(torch.device("cpu")) is None


def test_without_a_driver_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeNvml()
    module.failing = {"nvmlInit": 9}
    fake_nvml.install(monkeypatch, module=module)
    assert gpu_probe(GPU) is None
    assert why_no_readings(GPU) == "NVML does not start: error 9"


def test_an_unknown_gpu_is_not_read(nvml: FakeNvml) -> None:
    nvml.failing = {"nvmlDeviceGetHandleByUUID": 6, "nvmlDeviceGetHandleByPciBusId": 6}
    assert gpu_probe(GPU) is None
    assert why_no_readings(GPU) == "NVML does not know the GPU"


def test_samples_of_a_rank_have_the_readings(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
    nvml.reasons = 0x4
    started_s = time.perf_counter()
    writer = ResourceWriter(RunFolder(tmp_path), 0)
    probe = ProcessProbe(GPU, with_host=False)
    sampler = ResourceSampler(probe, writer, lambda: time.perf_counter() - started_s)
    sampler.start()
    time.sleep(0.05)
    sampler.close()
    samples = read_resources(tmp_path / "resources-0.csv")
    assert samples["gpu_busy"].tolist() == [0.93] * len(samples)
    assert samples["gpu_energy_j"].tolist() == [1001.0 + index for index in range(len(samples))]
    used = usage_between(0, samples, samples["time_s"][0], samples["time_s"][-1])
    assert used.gpu_busy == pytest.approx(0.93)
    assert used.gpu_power_w == pytest.approx((len(samples) - 1) / (samples["time_s"][-1] - samples["time_s"][0]))
    assert (used.gpu_limited_by_power, used.gpu_limited_by_heat, used.gpu_clock_mhz) == (1.0, 0.0, 1980.0)


def test_a_cpu_has_no_readings() -> None:
    row = ProcessProbe(torch.device("cpu"), with_host=False).read(1.0, 0.0)
    assert row[-len(NO_READINGS) :] == NO_READINGS


@pytest.mark.gpu
def test_a_real_gpu_reports_what_nvml_knows() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    probe = gpu_probe(device)
    assert probe is not None, why_no_readings(device)
    before = probe.read()
    product = torch.ones(8192, 8192, device=device)
    end_s = time.monotonic() + 2.0
    while time.monotonic() < end_s:
        product = (product @ product).clamp(max=1.0)
        torch.cuda.synchronize()
    after = probe.read()
    assert after.busy is not None
    assert after.busy > 0.5
    assert before.energy_j is not None
    assert after.energy_j is not None
    assert 50 < after.energy_j - before.energy_j < 5000
