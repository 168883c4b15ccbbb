"""Local web server, and small files in the published formats."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from paceline.workloads.data import cifar10
from paceline.workloads.data.download import Remote

ROW_BYTES = 3073


class Server(ThreadingHTTPServer):
    """Server of the contents of `files`; counts requests, and can close or stall a transfer half-way."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.stop_after: int | None = None
        self.stay_silent = False
        self.stopped = threading.Event()
        self.released = threading.Event()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path[1:]
        self.server.requests.append(name)
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.stop_after])
        self.wfile.flush()
        if self.server.stop_after is not None:
            self.server.stopped.set()
            if self.server.stay_silent:
                self.server.released.wait(30)

    def log_message(self, *args: object) -> None:
        pass


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def cifar_rows(count: int, seed: int) -> bytes:
    rows = np.random.default_rng(seed).integers(256, size=(count, ROW_BYTES), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


def tar_gz(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class SmallCifar:
    """CIFAR-10 with a few rows per file; the md5s in `cifar10` are patched to match."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        self.train = {f"data_batch_{i}.bin": cifar_rows(i, seed=i) for i in range(1, 6)}
        self.test = {"test_batch.bin": cifar_rows(4, seed=0)}
        self.files = self.train | self.test
        self.archive = tar_gz({f"{cifar10.FOLDER}/{name}": content for name, content in self.files.items()})
        self.remote = Remote(url=url, md5=md5(self.archive))
        monkeypatch.setattr(cifar10, "ARCHIVE", self.remote)
        monkeypatch.setattr(cifar10, "TRAIN_FILES", {name: md5(content) for name, content in self.train.items()})
        monkeypatch.setattr(cifar10, "TEST_FILES", {name: md5(content) for name, content in self.test.items()})

    def write_files(self, data_dir: Path) -> Path:
        folder = data_dir / cifar10.FOLDER
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder
