"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Read when numpy and torch are imported, here and in all processes that the tests start. Tests run several at a time,
# with more threads than cores. Threads that wait for work would use a third of the CPU time of a command.
os.environ |= {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
# torch looks up the name of every client that connects to its store. A lookup without an answer takes 5 s by default.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

from ranks import Pool

settings.register_profile("any machine", deadline=None)  # A busy machine must not fail a test.
settings.load_profile("any machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # In the background of a script; commands would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, so that two workers finish at about the same time."""

    def seconds(item: pytest.Item) -> float:
        marker = item.get_closest_marker("takes")
        return float(marker.args[0]) if marker else 0.0

    items.sort(key=seconds, reverse=True)
    gc.freeze()  # Collections skip the imported modules and the tests.


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes, shared by all tests of the session."""
    processes = Pool()
    yield processes
    processes.close()
