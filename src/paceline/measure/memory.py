"""Peak memory of a run, without the peaks of earlier runs in the same process."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Value that resets VmHWM to the current resident size (man 5 proc)."""


def reset_peak(device: torch.device) -> bool:
    """Reset the peak; return False if the system does not allow it, so that the peak may be an earlier run's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if sys.platform != "linux":
        return False
    # glibc keeps freed memory. Unless it is returned, the peak of a run would include memory of the run before.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak since `reset_peak`: memory of tensors on a GPU, resident memory of the process on a CPU.

    None if the system does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None
