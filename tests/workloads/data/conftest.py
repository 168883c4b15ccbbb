"""Fixtures for tests of data sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workloads.data.published import Server, SmallCifar


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch, server: Server) -> SmallCifar:
    """Return a small CIFAR-10 with its archive on the local server."""
    small = SmallCifar(monkeypatch, server.url("cifar-10-binary.tar.gz"))
    server.files["cifar-10-binary.tar.gz"] = small.archive
    return small


@pytest.fixture
def file_names() -> Callable[[Path], set[str]]:
    """Return the names of all files below a folder."""
    return lambda folder: {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
