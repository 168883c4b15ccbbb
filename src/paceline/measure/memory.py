"""The most memory a run needed, apart from what earlier runs of the same process did."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What resets VmHWM to the present resident size (man 5 proc)."""


def reset_peak(device: torch.device) -> bool:
    """Forgets the peak so far; False where the system does not let us, and a peak would be of an earlier run."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if sys.platform != "linux":
        return False
    # glibc keeps what was freed; without giving it back, a run would be charged for what the one before it needed.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """The peak since `reset_peak`: what tensors took on a GPU, all resident memory of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None
