"""Tests of downloads from a local server: once, complete, or not at all."""

import contextlib
import fcntl
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.workloads import data
from paceline.workloads.data import cifar10, download, svhn
from paceline.workloads.data.download import Remote, StayEncrypted, fetch_once
from workloads.data.published import Server, SmallCifar, md5

PREPARE = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # It is ignored if the tests run in the background.
from pathlib import Path
from paceline.workloads import data
from paceline.workloads.data import cifar10, download
patch = json.loads(sys.argv[1])
cifar10.ARCHIVE = download.Remote(**patch["archive"])
cifar10.TRAIN_FILES, cifar10.TEST_FILES = patch["train"], patch["test"]
print("ready", flush=True)
sys.stdin.readline()
data.prepare("cifar10", data_dir=Path(sys.argv[2]), progress=False)
assert "torch" not in sys.modules
"""


def start_prepare(small: SmallCifar, data_dir: Path) -> subprocess.Popen[str]:
    """Return a process that prepares the small CIFAR-10 as soon as a line is written to it."""
    archive = {"url": small.remote.url, "md5": small.remote.md5}
    patch = json.dumps({"archive": archive, "train": cifar10.TRAIN_FILES, "test": cifar10.TEST_FILES})
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, patch, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def interrupt(process: subprocess.Popen[str], limit_s: float = 20) -> None:
    """Send SIGINT until the process ends, each second again, as a user does.

    Python ignores a `KeyboardInterrupt` that is raised in a callback of a weak reference, as its imports have.
    """
    deadline = time.monotonic() + limit_s
    while True:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, f"the process runs {limit_s:g} s after Ctrl-C"
        else:
            return


def test_three_processes_download_once_and_need_no_torch(
    tmp_path: Path, server: Server, small_cifar: SmallCifar
) -> None:
    processes = [start_prepare(small_cifar, tmp_path) for _ in range(3)]
    for process in processes:
        go(process)
    errors = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert server.requests == ["cifar-10-binary.tar.gz"]
    assert len(data.load("cifar10", data_dir=tmp_path)[0]) == 15


def test_ctrl_c_leaves_nothing_and_frees_the_lock(
    tmp_path: Path, server: Server, small_cifar: SmallCifar, file_names: Callable[[Path], set[str]]
) -> None:
    server.stop_after, server.stay_silent = len(small_cifar.archive) // 2, True
    process = start_prepare(small_cifar, tmp_path)
    go(process)
    assert server.stopped.wait(20)
    interrupt(process)
    assert process.returncode == -signal.SIGINT
    assert file_names(tmp_path) == {".lock"}

    server.stop_after = None
    data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert len(data.load("cifar10", data_dir=tmp_path)[0]) == 15


def test_a_connection_that_ends_early_leaves_nothing(
    tmp_path: Path, server: Server, small_cifar: SmallCifar, file_names: Callable[[Path], set[str]]
) -> None:
    size = len(small_cifar.archive)
    server.stop_after = 1000
    with pytest.raises(DataError, match=f"ended after 1,000 of {size:,} bytes"):
        data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert file_names(tmp_path) == {".lock"}


@pytest.mark.usefixtures("small_cifar")
def test_a_silent_server_is_given_up(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    server.stop_after, server.stay_silent = 1000, True
    with pytest.raises(DataError, match=r"the connection failed after .* bytes \(timed out\)"):
        data.prepare("cifar10", data_dir=tmp_path, progress=False)


def test_other_content_than_published_is_refused(
    tmp_path: Path, server: Server, small_cifar: SmallCifar, file_names: Callable[[Path], set[str]]
) -> None:
    server.files["cifar-10-binary.tar.gz"] = b"<html>moved</html>"
    with pytest.raises(DataError, match=f"md5 {md5(b'<html>moved</html>')}, not {small_cifar.remote.md5}") as caught:
        data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert small_cifar.remote.url in str(caught.value.hint)
    assert file_names(tmp_path) == {".lock"}


@pytest.mark.usefixtures("small_cifar")
def test_a_status_error_is_named(tmp_path: Path, server: Server) -> None:
    server.files.clear()
    with pytest.raises(DataError, match=r"answered with status 404 \(Not Found\)"):
        data.prepare("cifar10", data_dir=tmp_path, progress=False)


def test_offline_says_what_to_fetch_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as nobody_listens:
        url = nobody_listens.url("cifar-10-binary.tar.gz")
    small = SmallCifar(monkeypatch, url)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is not in .* Connection refused") as caught:
        data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert caught.value.hint == f"download {url} to {tmp_path}, or use data that needs no download: --data digits"

    small.write_files(tmp_path)
    data.prepare("cifar10", data_dir=tmp_path, progress=False)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only, for root too."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            (folder / "probe").touch()
        yield
    finally:
        os.seteuid(user)
        for path in folders:
            path.chmod(0o755)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """Return a folder that other users can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_read_only_folder_with_all_files_will_do(open_dir: Path, server: Server, small_cifar: SmallCifar) -> None:
    small_cifar.write_files(open_dir)
    with read_only(open_dir):
        data.prepare("cifar10", data_dir=open_dir, progress=False)
        train, _ = data.load("cifar10", data_dir=open_dir)
    assert len(train) == 15
    assert server.requests == []


@pytest.mark.usefixtures("small_cifar")
def test_a_read_only_folder_without_files_is_named(open_dir: Path, server: Server) -> None:
    with (
        read_only(open_dir),
        pytest.raises(DataError, match=f"files of the data set are missing and {open_dir}.* cannot be written"),
    ):
        data.prepare("cifar10", data_dir=open_dir, progress=False)
    assert server.requests == []


def test_no_lock_is_taken_when_all_files_are_there(tmp_path: Path, small_cifar: SmallCifar) -> None:
    small_cifar.write_files(tmp_path)
    with (tmp_path / download.LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data.prepare("cifar10", data_dir=tmp_path, progress=False)


def test_a_process_that_waits_for_the_lock_says_so(
    tmp_path: Path, server: Server, small_cifar: SmallCifar, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with ThreadPoolExecutor(1) as pool, (tmp_path / download.LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepared = pool.submit(data.prepare, "cifar10", data_dir=tmp_path, progress=True)
        while not shown.getvalue().endswith("\n") and not prepared.done():
            time.sleep(0.01)
        assert shown.getvalue() == f"waiting for another process that downloads to {tmp_path}\n"
        assert not prepared.done()
        assert server.requests == []
        small_cifar.write_files(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_UN)
        prepared.result(timeout=30)
    assert server.requests == [], "the other process has downloaded the files meanwhile"


def test_progress_goes_to_stderr(tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.files["file.bin"] = b"content"
    remote = Remote(url=server.url("file.bin"), md5=md5(b"content"))
    assert fetch_once(remote, tmp_path / "shown" / "file.bin", progress=True)
    shown = capfd.readouterr()
    assert (shown.out, "file.bin" in shown.err) == ("", True)
    assert fetch_once(remote, tmp_path / "hidden" / "file.bin", progress=False)
    assert capfd.readouterr() == ("", "")
    assert not fetch_once(remote, tmp_path / "hidden" / "file.bin", progress=False)
    assert len(server.requests) == 2


def test_a_leftover_of_a_killed_process_does_no_harm(tmp_path: Path, server: Server) -> None:
    server.files["file.bin"] = b"content"
    (tmp_path / "file.bin.part").write_bytes(b"much longer than the content")
    fetch_once(Remote(url=server.url("file.bin"), md5=md5(b"content")), tmp_path / "file.bin", progress=False)
    assert (tmp_path / "file.bin").read_bytes() == b"content"
    assert not (tmp_path / "file.bin.part").exists()


@pytest.mark.parametrize("remote", [cifar10.ARCHIVE, svhn.TRAIN, svhn.TEST, svhn.EXTRA], ids=lambda remote: remote.name)
def test_published_files_are_fetched_encrypted_and_have_a_checksum(remote: Remote) -> None:
    assert remote.url.startswith("https://")
    assert len(bytes.fromhex(remote.md5)) == 16


@pytest.mark.parametrize("target", ["http://a.org/b", "file:///etc/passwd", "ftp://a.org/b"])
def test_a_redirection_to_an_address_that_is_not_encrypted_is_refused(target: str) -> None:
    request = urllib.request.Request("https://a.org/file.bin")
    with pytest.raises(urllib.error.URLError, match="which is not encrypted"):
        StayEncrypted().redirect_request(request, io.BytesIO(), 302, "Found", http.client.HTTPMessage(), target)
    followed = StayEncrypted().redirect_request(
        request, io.BytesIO(), 302, "Found", http.client.HTTPMessage(), "https://b.org/file.bin"
    )
    assert followed is not None
    assert followed.full_url == "https://b.org/file.bin"
