"""Stand-in for the module pynvml: the functions that Paceline calls, with the names and units of nvidia-ml-py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.measure import gpu_readings

UUID = "5b1c9a52-0f3e-4d7a-9c31-0a1b2c3d4e5f"
OTHER_UUID = "11111111-2222-3333-4444-555555555555"
GPU = torch.device("cuda", 0)


class NVMLError(Exception):
    """Error with a code, as in nvidia-ml-py."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml(ModuleType):
    """Two GPUs of a host; the second is the one that torch calls `cuda:0`, as under CUDA_VISIBLE_DEVICES=1."""

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_UNKNOWN = 3, 6, 999
    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """Error code of each function that fails."""
        self.energy_mj, self.reasons = 1_000_000, 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise NVMLError(self.failing[name])

    def nvmlInit(self) -> None:
        self._call("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("nvmlDeviceGetHandleByUUID")
        if uuid not in (f"GPU-{UUID}", f"GPU-{OTHER_UUID}"):
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        self._call("nvmlDeviceGetHandleByPciBusId")
        if bus != "00000000:ab:00.0":
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return f"GPU-{UUID}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._call("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=93 if handle == f"GPU-{UUID}" else 0, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        del handle
        self._call("nvmlDeviceGetPowerUsage")
        return 412_345

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        del handle
        self._call("nvmlDeviceGetTotalEnergyConsumption")
        self.energy_mj += 1000
        return self.energy_mj

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        del handle
        self._call("nvmlDeviceGetClockInfo")
        assert kind == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        del handle
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons")
        return self.reasons


def install(monkeypatch: pytest.MonkeyPatch, uuid: str = UUID, *, module: FakeNvml | None = None) -> FakeNvml:
    """Make the module and the properties of a GPU available, as on a host that has one."""
    nvml = module or FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties if device == GPU else None)
    gpu_readings._nvml.cache_clear()
    return nvml
