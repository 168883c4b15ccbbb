"""Provenance of a result, stored with every record: machine, versions, commit, command, time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

from msgspec import Struct

from paceline.records.value_types import Count, PositiveCount
from paceline.user_code import sources_digest


class Provenance(Struct, frozen=True, kw_only=True):
    """Origin of a result: what a reader needs to trust or reproduce it."""

    time: str
    """Local time with its offset from UTC, as in `2026-01-02T03:04:05+0000`."""
    command: str
    """Command that the user typed."""
    host: str | None
    system: str
    """Operating system, its release, and the machine's architecture."""
    cpu: str | None
    """Model of the processor."""
    cpu_count: PositiveCount | None
    memory_bytes: Count | None
    python: str
    versions: dict[str, str | None]
    """Version by package; None if the package is not installed."""
    commit: str | None
    """Git commit of the working directory; None outside of a repository."""
    sources: str | None = None
    """Digest of Paceline's own sources; None in records of earlier versions."""


def command_line() -> str:
    """Return the command line of this process."""
    return shlex.join(["paceline" if Path(sys.argv[0]).stem == "__main__" else Path(sys.argv[0]).name, *sys.argv[1:]])


def with_out(command: str, folder: Path) -> str:
    """Return a command line with `--out` set to a folder, before the arguments of a script."""
    words = shlex.split(command)
    end = words.index("--") if "--" in words else len(words)
    options = words[:end]
    while "--out" in options:
        at = options.index("--out")
        del options[at : at + 2]
    options = [word for word in options if not word.startswith("--out=")]
    return shlex.join([*options, "--out", str(folder), *words[end:]])


def provenance(command: str | None = None) -> Provenance:
    """Return the provenance of a result measured now; `command` is the command that the user typed."""
    return Provenance(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        command=command or command_line(),
        host=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cpu_count=os.cpu_count(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
        versions={name: version_of(name) for name in ("paceline", "torch", "numpy")},
        commit=_commit(),
        sources=sources_digest(),
    )


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed (for example, only on `PYTHONPATH`)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _commit() -> str | None:
    """Return the git commit of the working directory, with a `-dirty` suffix if there are uncommitted changes."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
