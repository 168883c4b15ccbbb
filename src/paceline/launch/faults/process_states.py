"""Report the states of this launcher's rank processes to the watchdog.

A process that is stopped, or whose native code keeps Python's lock, cannot do it itself.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import msgspec
import psutil

from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog.reporter import beat_period_s, connect
from paceline.launch.rendezvous import parse_master
from paceline.measure.process_use import main_thread_time, process_state
from paceline.signing import Signer


class ProcessState(msgspec.Struct, frozen=True, array_like=True):
    """State of a process."""

    letter: str
    """The kernel's letter, as in `ps`."""
    ran_s: float
    waited_s: float
    """Seconds that its main thread has run, and waited for a core."""


class StatesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a launcher on its processes."""

    number: int = 0
    states: dict[int, ProcessState] = {}


def states_key(group_rank: int) -> str:
    """Return the key of the states that a launcher reports."""
    return f"states-{group_rank}"


def reporting_states(
    endpoint: str, signer: Signer, group_rank: int, hang_timeout_s: float
) -> AbstractContextManager[None]:
    """Report the states of child processes for the duration of a `with` block, if there is a watchdog."""
    return _reporting(endpoint, signer, group_rank, beat_period_s(hang_timeout_s)) if hang_timeout_s else nullcontext()


@contextmanager
def _reporting(endpoint: str, signer: Signer, group_rank: int, period_s: float) -> Iterator[None]:
    done = threading.Event()

    def report() -> None:
        with suppress(RuntimeError):  # The store is gone, or cannot be reached: the ranks notice it, too.
            store = connect(*parse_master(endpoint), signer)
            for number in itertools.count(1):
                if done.wait(period_s):
                    return
                states = {
                    process.pid: ProcessState(process_state(process.pid), *main_thread_time(process.pid))
                    for process in psutil.Process().children()
                }
                store.set(states_key(group_rank), encode(number, states))  # Returns without an answer.

    threading.Thread(target=report, daemon=True, name="paceline-process-states").start()
    try:
        yield
    finally:
        done.set()


def encode(number: int, states: dict[int, ProcessState]) -> str:
    """Return a report as JSON."""
    return msgspec.json.encode(StatesReport(number=number, states=states)).decode()


def read_states(store: SignedStore, group_rank: int) -> StatesReport:
    """Return the last report of a launcher; an empty one if it sent no valid message."""
    content = store.find(states_key(group_rank))
    if content is None:
        return StatesReport()
    try:
        return msgspec.json.decode(content, type=StatesReport, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return StatesReport()
