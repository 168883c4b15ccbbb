"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes, shared by all tests of the session."""
    processes = Pool()
    yield processes
    processes.close()
