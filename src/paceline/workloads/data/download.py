"""Downloads published files, once per machine however many processes ask, and leaves nothing half-written.

One process holds the lock of the data folder while it downloads; the others wait, then find the files. Whoever has all
the files, on a read-only disk or offline, takes no lock and opens no connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.errors import DataError
from paceline.workloads.data.checksums import is_intact, write_checked

LOCK_NAME = ".lock"
TIMEOUT_S = 30.0
"""How long the server may be silent."""

_CHUNK_BYTES = 1 << 18

Missing = TypeVar("Missing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A file that somebody published."""

    url: str
    """Where it is."""
    md5: str
    """What it must have, as published."""

    @property
    def name(self) -> str:
        """What the file is called, there and here."""
        return self.url.rpartition("/")[2]


def fetch_missing(
    missing: Callable[[], Sequence[Missing]],
    fetch: Callable[[Sequence[Missing]], None],
    data_dir: Path,
    *,
    progress: bool,
) -> None:
    """Calls `fetch` with what `missing` lists, if anything, in one process at a time."""
    if not missing():
        return
    try:
        with _exclusive(data_dir, announce=progress):
            if still_missing := missing():  # another process may have fetched it all while this one waited
                fetch(still_missing)
    except OSError as error:
        raise DataError(
            f"data are missing and {error.filename or data_dir} cannot be written: {error.strerror}.",
            hint="choose a data folder that you can write to, or go on without a download: --data digits",
        ) from error


def fetch_once(remote: Remote, path: Path, *, progress: bool) -> bool:
    """Makes sure that `path` is the file published as `remote`; returns whether it had to be downloaded."""
    if is_intact(path, remote.md5):
        return False
    with contextlib.closing(_stream(remote, path.parent, progress=progress)) as chunks:
        write_checked(path, chunks, remote.md5, hint=f"what {remote.url} sent was damaged or replaced; try again later")
    return True


def missing_hint(remote: Remote, folder: Path) -> str:
    """What to do about a file that is not there."""
    return f"fetch {remote.url} and put it into {folder}, or go on without a download: --data digits"


@contextlib.contextmanager
def _exclusive(data_dir: Path, *, announce: bool) -> Iterator[None]:
    """Holds the lock of `data_dir`; the kernel releases it when the process ends, however it ends."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / LOCK_NAME).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if announce:
                print(f"waiting for another process that prepares {data_dir}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stream(remote: Remote, folder: Path, *, progress: bool) -> Generator[bytes]:
    """Yields the bytes of `remote` as they arrive, and raises a DataError for whatever goes wrong on the way."""

    def failed(why: object) -> DataError:
        return DataError(
            f"{remote.name} is not in {folder} and could not be downloaded: {why}.", hint=missing_hint(remote, folder)
        )

    received = 0
    try:
        with urllib.request.urlopen(remote.url, timeout=TIMEOUT_S) as response:
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
        raise failed(f"the connection broke after {received:,} bytes ({error})") from error
    if total and received != total:
        raise failed(f"the connection ended after {received:,} of {total:,} bytes")


@contextlib.contextmanager
def _bar(name: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr and yields what moves it."""
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
