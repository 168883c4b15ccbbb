"""Channel between launcher processes: JSON messages and files, through torch's key-value store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.errors import LaunchError
from paceline.formatting import short_seconds
from paceline.launch.messages import MessageT, from_text, to_text
from paceline.records.atomic_file import atomic_file
from paceline.records.growing_file import full_disk_error

ResultT = TypeVar("ResultT")
POLL_S = 0.05
CHUNK_BYTES = 1 << 20
MAX_BYTES = 1 << 30
"""Limit on the files that one host sends after a job; no record is that large."""


class SentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a host sends."""

    path: str
    """Path relative to the root of the files."""
    chunks: int
    """Number of messages with its content."""
    bytes: int


class StoreChannel:
    """Messages by key, which all launcher processes can read and write. Waiting polls, so that Ctrl-C interrupts it."""

    def __init__(self, store: Store, endpoint: str) -> None:
        """`endpoint` names the store in errors, as ADDRESS:PORT."""
        self._store = PrefixStore("paceline-launch", store)
        self.endpoint = endpoint
        self.lost_hint = "see the output of the command on host 0"
        """Hint of the error that calls raise if host 0 is lost."""
        self._silent_s: float | None = None

    def give_up(self, silent_s: float) -> None:
        """Make every later call raise: the store has not answered for so long, and a call would block for minutes."""
        self._silent_s = silent_s

    def post(self, key: str, value: Any) -> None:
        """Write a message, as JSON."""
        self._set(key, to_text(value).encode())

    def has(self, key: str) -> bool:
        """Return whether a message was posted under a key."""
        return bool(self._call(lambda: self._store.check([key])))

    def read(self, key: str, kind: type[MessageT]) -> MessageT:
        """Return a message, which must have been posted; raise `LaunchError` if it does not have this type."""
        try:
            return from_text(self._get(key), kind)
        except ValueError as error:
            raise LaunchError(
                f"another host sent a message {key!r} that does not fit: {error}.",
                hint="install the same version of Paceline on all hosts",
            ) from None

    def add(self, key: str, amount: int) -> int:
        """Add to the counter of a key, which starts at 0; return the sum."""
        return int(self._call(lambda: self._store.add(key, amount)))

    def wait(self, key: str, within_s: float | None = None) -> bool:
        """Wait until a message is posted; return False if none was posted within the time limit."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while not self.has(key):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def send_files(self, key: str, root: Path) -> None:
        """Send all files below a folder, with paths relative to it."""
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        listing = []
        for number, path in enumerate(files):
            content = path.read_bytes()
            chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
            for part, chunk in enumerate(chunks):
                self._set(f"{key}-{number}-{part}", chunk)
            listing.append(SentFile(path=str(path.relative_to(root)), chunks=len(chunks), bytes=len(content)))
        self.post(key, listing)

    def receive_files(self, key: str, root: Path, within: Iterable[Path]) -> None:
        """Write the files that were sent below `root`; files that exist already are kept.

        Paths from another host are not trusted: raise `LaunchError` for a path outside of the folders `within`.
        """
        folders = [folder.resolve() for folder in within]
        for number, entry in enumerate(self._listing(key)):
            target = (root / entry.path).resolve()
            if not any(folder in target.parents for folder in folders):
                raise LaunchError(
                    f"another host sent a file for {target}, which is outside of the record's folders.",
                    hint="check that all hosts belong to this launch; otherwise report this as a bug",
                )
            chunks = [self._take(f"{key}-{number}-{part}") for part in range(entry.chunks)]
            if target.exists():
                continue
            with full_disk_error(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(target) as temporary:  # Ctrl-C leaves no partial file.
                    temporary.write_bytes(b"".join(chunks))

    def _listing(self, key: str) -> list[SentFile]:
        listing = self.read(key, list[SentFile])
        if sum(entry.bytes for entry in listing) > MAX_BYTES:
            raise LaunchError(
                f"another host tried to send more than {MAX_BYTES >> 30} GiB of records.",
                hint="train fewer steps, or write the record to a disk that all hosts share",
            )
        return listing

    def _take(self, key: str) -> bytes:
        content = self._get(key)
        with suppress(RuntimeError):  # Deleting only frees memory.
            self._store.delete_key(key)
        return content

    def _set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes:
        return self._call(lambda: self._store.get(key))

    def _call(self, operation: Callable[[], ResultT]) -> ResultT:
        if self._silent_s is not None:
            raise self._connection_lost(f"it has not answered for {short_seconds(self._silent_s)}")
        try:
            return operation()
        except RuntimeError as error:
            raise self._connection_lost(str(error).splitlines()[0]) from None

    def _connection_lost(self, found: str) -> LaunchError:
        return LaunchError(f"lost the connection to host 0 at {self.endpoint}: {found}", hint=self.lost_hint)
