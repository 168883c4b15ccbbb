"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from ranks import Pool

settings.register_profile("any machine", deadline=None)  # A busy machine is not a wrong answer.
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes, shared by all tests of the session."""
    processes = Pool()
    yield processes
    processes.close()
