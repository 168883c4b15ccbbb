"""Which machine, clock, network and memory a process lives on: ranks tell by it whether they share them. No torch."""

from __future__ import annotations

import platform
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


def boot_id() -> str:
    """Names one boot of one machine; processes in two containers on it have the same."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def clock_id() -> str:
    """Processes with the same one read the same clocks; a time namespace shifts those that count from the boot."""
    return f"{boot_id()} {_namespace('time')}"


def network_id() -> str:
    """Processes with the same one reach each other without leaving the host; an emulated host has its own."""
    return f"{boot_id()} {_namespace('net')}"


def memory_id() -> str:
    """Processes with the same one may share memory: they see each other's numbers, and no network lies between them."""
    return f"{network_id()} {_namespace('pid')}"


def _namespace(kind: str) -> str:
    try:
        return str((NAMESPACES / kind).readlink())
    except OSError:
        return ""
