"""Utilisation, power, energy and clock of a rank's GPU, as NVIDIA's management library (NVML) reports them.

The package nvidia-ml-py is optional (`pip install 'paceline[gpu]'`). Without it, without a driver or for a value that a
GPU does not report, readings are None. All readings are of the whole GPU, whatever processes use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from paceline.records.schema import SAMPLE_DECIMALS

MODULE = "pynvml"
PACKAGE = "nvidia-ml-py"
LIMITED_BY_POWER = 0x4 | 0x80
"""Bits of NVML's reasons for a lower clock: the software's power cap, and the hardware's power brake."""
LIMITED_BY_HEAT = 0x20 | 0x40
"""Bits of the software's and the hardware's thermal slow-down. Bit 0x8 means any of the hardware's."""


class GpuReadings(NamedTuple):
    """Readings of a GPU at one time. A value is None if it is not reported."""

    busy: float | None
    """Share of the time in which a kernel ran, over the last sample period of the driver: 1/6 s to 1 s."""
    power_w: float | None
    energy_j: float | None
    """Energy since the driver was loaded."""
    clock_mhz: int | None
    """Clock of the multiprocessors."""
    limited_by_power: int | None
    """1 if the clock is lower than it could be because of the power limit, else 0."""
    limited_by_heat: int | None


NO_READINGS = GpuReadings(None, None, None, None, None, None)


class GpuProbe:
    """Reader of one GPU. Values that it does not report are not asked for again."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._unsupported: set[str] = set()

    def read(self) -> GpuReadings:
        """Return the readings of now."""
        nvml = self._nvml
        use = self._ask("nvmlDeviceGetUtilizationRates")
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        clock_mhz = self._ask("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1))
        # The name until driver 535, which all versions of the package still have.
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return GpuReadings(
            busy=None if use is None else use.gpu / 100,
            power_w=None if power_mw is None else power_mw / 1000,
            energy_j=None if energy_mj is None else round(energy_mj / 1000, SAMPLE_DECIMALS),
            clock_mhz=clock_mhz,
            limited_by_power=None if reasons is None else int(reasons & LIMITED_BY_POWER != 0),
            limited_by_heat=None if reasons is None else int(reasons & LIMITED_BY_HEAT != 0),
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML on the GPU; None if it fails, and without a call if it is not supported."""
        ask: Callable[..., Any] | None = getattr(self._nvml, function, None)
        if ask is None or function in self._unsupported:
            return None
        try:
            return ask(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                self._unsupported.add(function)
            return None


def gpu_probe(device: torch.device) -> GpuProbe | None:
    """Return a reader of a torch device; None if it is no GPU, or NVML does not report it."""
    found = find_gpu(device) if device.type == "cuda" else None
    return found if isinstance(found, GpuProbe) else None


def why_no_readings(device: torch.device) -> str | None:
    """Return the reason why a GPU's readings are missing, as a clause; None if they are there, or it is no GPU."""
    found = find_gpu(device) if device.type == "cuda" else None
    return found if isinstance(found, str) else None


def find_gpu(device: torch.device) -> GpuProbe | str:
    """Return a reader of a GPU, or the reason why there is none."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return nvml
    # NVML counts all GPUs of the host, whatever CUDA_VISIBLE_DEVICES says, so a GPU is found by its identity.
    properties = torch.cuda.get_device_properties(device)
    for find in (_handle_by_uuid, _handle_by_bus):
        try:
            handle = find(nvml, properties)
        except nvml.NVMLError:
            continue
        if handle is not None:
            return GpuProbe(nvml, handle)
    return "NVML does not know the GPU"


def gpu_identity(device: torch.device) -> str | None:
    """Return the UUID of a GPU, which ranks that share it have in common; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _handle_by_uuid(nvml: Any, properties: Any) -> Any:
    uuid = str(getattr(properties, "uuid", ""))
    if not uuid:
        return None
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _handle_by_bus(nvml: Any, properties: Any) -> Any:
    """Return the handle by the place on the PCI bus, for a slice of a GPU (MIG) whose UUID has another prefix."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, slot = numbers
    return nvml.nvmlDeviceGetHandleByPciBusId(f"{domain:08x}:{bus:02x}:{slot:02x}.0")


@cache
def _nvml() -> Any:
    """Return the initialised library, which stays so until the process ends; or the reason why there is none."""
    try:
        nvml = importlib.import_module(MODULE)
    except ImportError:
        return f"the package {PACKAGE} is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"NVML does not start: {error}"
    return nvml
