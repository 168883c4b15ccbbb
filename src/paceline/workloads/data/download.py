"""Download of published files: once per machine, whatever the number of processes, and never half a file.

One process holds the lock of the data folder while it downloads; the others wait, then find the files. If all files
exist, a process takes no lock and opens no connection, so a read-only disk and an offline machine work too.
"""

from __future__ import annotations

import contextlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from filelock import FileLock, Timeout

from paceline.errors import DataError
from paceline.formatting import whole
from paceline.workloads.data.checksums import is_intact, write_checked

LOCK_NAME = ".lock"
TIMEOUT_S = 30.0
"""Longest time without data from the server."""

_CHUNK_BYTES = 1 << 18

Missing = TypeVar("Missing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """Published file."""

    url: str
    """Address to download it from."""
    md5: str
    """Published md5 of the file."""

    @property
    def name(self) -> str:
        """Name of the file, on the server and in the data folder."""
        return self.url.rpartition("/")[2]


class StayEncrypted(urllib.request.HTTPRedirectHandler):
    """Follows redirections, but not from https to an address that is not encrypted."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise urllib.error.URLError(f"{req.full_url} redirects to {newurl}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(StayEncrypted)


def fetch_missing(
    missing: Callable[[], Sequence[Missing]],
    fetch: Callable[[Sequence[Missing]], None],
    data_dir: Path,
    *,
    progress: bool,
) -> None:
    """Call `fetch` with the items that `missing` returns, if any, in one process at a time."""
    if not missing():
        return
    try:
        with _exclusive(data_dir, announce=progress):
            if still_missing := missing():  # Another process may have fetched them while this one waited.
                fetch(still_missing)
    except OSError as error:
        raise DataError(
            f"files of the data set are missing and {error.filename or data_dir} cannot be written: {error.strerror}.",
            hint="choose a writable folder with --data-dir, or use data that needs no download: --data digits",
        ) from error


def fetch_once(remote: Remote, path: Path, *, progress: bool) -> bool:
    """Make sure that `path` is the file published as `remote`; return whether it was downloaded."""
    if is_intact(path, remote.md5):
        return False
    with contextlib.closing(_stream(remote, path.parent, progress=progress)) as chunks:
        hint = f"{remote.url} sent a damaged or different file: try again later"
        write_checked(path, chunks, remote.md5, hint=hint)
    return True


def missing_hint(remote: Remote, folder: Path) -> str:
    """Return the hint for a missing file."""
    return f"download {remote.url} to {folder}, or use data that needs no download: --data digits"


@contextlib.contextmanager
def _exclusive(data_dir: Path, *, announce: bool) -> Iterator[None]:
    """Hold the lock of `data_dir`; the kernel releases it when the process ends, even if it is killed."""
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(data_dir / LOCK_NAME)
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        if announce:
            print(f"waiting for another process that downloads to {data_dir}", file=sys.stderr)
        held = lock.acquire()
    with held:
        yield


def _stream(remote: Remote, folder: Path, *, progress: bool) -> Generator[bytes]:
    """Yield the bytes of `remote` as they arrive; raise `DataError` on any failure."""

    def failed(why: object) -> DataError:
        return DataError(
            f"{remote.name} is not in {folder} and could not be downloaded: {why}.", hint=missing_hint(remote, folder)
        )

    received = 0
    try:
        with _OPENER.open(remote.url, timeout=TIMEOUT_S) as response:
            total = response.length or 0
            with _bar(remote.name, total, shown=progress) as advance:
                while chunk := response.read(_CHUNK_BYTES):
                    received += len(chunk)
                    advance(len(chunk))
                    yield chunk
    except urllib.error.HTTPError as error:
        error.close()
        raise failed(f"{remote.url} answered with status {error.code} ({error.reason})") from error
    except urllib.error.URLError as error:
        raise failed(error.reason) from error
    except (OSError, http.client.HTTPException) as error:
        raise failed(f"the connection failed after {whole(received)} bytes ({error})") from error
    if total and received != total:
        raise failed(f"the connection ended after {whole(received)} of {whole(total)} bytes")


@contextlib.contextmanager
def _bar(name: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr and yield the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(name, total=total or None)
        yield lambda count: bar.advance(task, count)
