"""Identifiers of the machine, clock, network and memory of a process; equal ones are shared. Imports no torch."""

from __future__ import annotations

import platform
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


def boot_id() -> str:
    """Return an identifier of this boot of this machine, the same in all its containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def clock_id() -> str:
    """Return an identifier of this process's clocks. Time namespaces shift the clocks that count from boot."""
    return f"{boot_id()} {_namespace('time')}"


def network_id() -> str:
    """Return an identifier of this process's network: the host's, or that of an emulated host."""
    return f"{boot_id()} {_namespace('net')}"


def memory_id() -> str:
    """Return an identifier that is equal for processes that may share memory: same network and same pid namespace."""
    return f"{network_id()} {_namespace('pid')}"


def _namespace(kind: str) -> str:
    try:
        return str((NAMESPACES / kind).readlink())
    except OSError:
        return ""
