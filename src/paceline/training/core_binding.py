"""Binding of a rank's threads to cores that no other rank of its host uses (`--bind-to core`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.config.emulation import emulation_info
from paceline.errors import UsageError
from paceline.formatting import plural

TOPOLOGY = Path("/sys/devices/system/cpu")
TASKS = Path("/proc/self/task")
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


@contextmanager
def bound_to(cores: frozenset[int] | None) -> Iterator[None]:
    """Run all threads of this process on these cores inside the `with` block; None changes nothing.

    Threads that start meanwhile inherit the cores, and so do processes.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    _bind_threads(cores)
    try:
        yield
    finally:
        _bind_threads(before)


def _bind_threads(cores: set[int] | frozenset[int]) -> None:
    for task in TASKS.iterdir():
        with suppress(ProcessLookupError):  # The thread has ended.
            os.sched_setaffinity(int(task.name), cores)


def _place_of(core: int) -> tuple[int, int]:
    """Return the package and the core of a hardware thread; zeros where the system does not say."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, 0
