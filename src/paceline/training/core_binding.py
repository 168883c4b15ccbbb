"""Binding of a rank's threads to cores that no other rank of its host uses (`--bind-to core`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.config.emulation import emulation_info
from paceline.errors import UsageError
from paceline.formatting import plural

TOPOLOGY = Path("/sys/devices/system/cpu")
TASKS = Path("/proc/self/task")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MASK_BYTES = 1024
"""Length of a mask of cores: Linux has at most 8,192."""
HINT = "leave out --bind-to"


def cores_of_rank(number: int, ranks: int, cores: Sequence[int]) -> frozenset[int]:
    """Return the cores of one of the ranks that share these cores: an equal part of neighbouring ones for each.

    Cores that are left over are used by no rank.
    """
    each = len(cores) // ranks
    if not each:
        raise UsageError(
            f"--bind-to core was given, but {ranks} ranks share {plural(len(cores), 'core')}.",
            hint=f"use fewer ranks, or {HINT}",
        )
    return frozenset(cores[number * each : (number + 1) * each])


def check_can_bind() -> None:
    """Raise where ranks cannot be bound to cores."""
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError("--bind-to core was given, but this system cannot bind processes to cores.", hint=HINT)
    if emulation_info(os.environ) is not None:
        raise UsageError("--bind-to core was given, but emulated hosts have no cores of their own.", hint=HINT)


def usable_cores_in_order() -> list[int]:
    """Return the cores that this process may use, neighbours next to each other.

    The hardware threads of one core follow each other, then come the other cores of its package. Linux often numbers
    the second threads of all cores after the first ones, so ranks with neighbouring numbers would share cores.
    """
    check_can_bind()
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place_of(core), core))


def shared_cores(is_busy: Sequence[bool], rank: int) -> tuple[int, int]:
    """Return this rank's number among the busy ranks that may use the same cores, and the number of these ranks.

    Called on all ranks. A launcher may have bound ranks before, each to cores of its own or several to one socket.
    """
    own = torch.frombuffer(bytearray(_machine_and_mask()), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in is_busy]
    dist.all_gather(gathered, own)
    alike = [other for other, found in enumerate(gathered) if is_busy[other] and torch.equal(found, own)]
    return sum(other < rank for other in alike), len(alike)


def _machine_and_mask() -> bytes:
    """Return bytes that are equal in processes that run on the same machine and may use the same cores."""
    boot = BOOT_ID.read_bytes().strip() if BOOT_ID.exists() else b""
    return boot[:64].ljust(64, b"\0") + mask_of(os.sched_getaffinity(0))


def mask_of(cores: Iterable[int]) -> bytes:
    """Return one bit per core."""
    return sum(1 << core for core in cores).to_bytes(MASK_BYTES, "little")


@contextmanager
def bound_to(cores: frozenset[int] | None) -> Iterator[None]:
    """Run all threads of this process on these cores inside the `with` block; None changes nothing.

    Threads that start meanwhile inherit the cores, and so do processes.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    by_thread = _cores_by_thread()
    try:
        _bind_threads({thread: set(cores) for thread in by_thread})
    except OSError as error:
        raise UsageError(f"--bind-to core was given, but ranks cannot be bound: {error}.", hint=HINT) from None
    try:
        yield
    finally:
        with suppress(OSError):  # The cores of the process may have been changed meanwhile, and an error counts more.
            _bind_threads({thread: by_thread.get(thread, before) for thread in _threads()})


def _cores_by_thread() -> dict[int, set[int]]:
    found = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # The thread has ended.
            found[thread] = os.sched_getaffinity(thread)
    return found


def _threads() -> list[int]:
    return [int(task.name) for task in TASKS.iterdir()]


def _bind_threads(cores_by_thread: Mapping[int, set[int]]) -> None:
    for thread, cores in cores_by_thread.items():
        with suppress(ProcessLookupError):  # The thread has ended.
            os.sched_setaffinity(thread, cores)


def _place_of(core: int) -> tuple[int, int]:
    """Return the package and the core of a hardware thread; zeros where the system does not say."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, 0
