"""Fixtures for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from ranks import Pool

settings.register_profile("any machine", deadline=None)  # A busy machine is not a wrong answer.
settings.load_profile("any machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As in the background of a script. Commands would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes, shared by all tests of the session."""
    processes = Pool()
    yield processes
    processes.close()
