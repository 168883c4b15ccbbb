"""Channel between launcher processes: signed JSON messages and files, through torch's key-value store.

Anyone who reaches the store can read, overwrite and delete what is in it. A message whose signature does not fit counts
as missing, and is reported once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.comm.stores.signed import read_now
from paceline.errors import LaunchError
from paceline.formatting import short_seconds
from paceline.launch.channel.messages import MessageT, from_text, to_text
from paceline.launch.launcher_process import Notify
from paceline.records.atomic_file import atomic_file
from paceline.records.growing_file import full_disk_error
from paceline.signing import Signer

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

    def __init__(self, store: Store, endpoint: str, signer: Signer, notify: Notify) -> None:
        """`endpoint` names the store in errors, as ADDRESS:PORT; `notify` reports messages that are ignored."""
        self._store = PrefixStore("paceline-launch", store)
        self.endpoint = endpoint
        self.signer = signer
        """Signs all messages: with the token during the handshake, then with the key of the launch."""
        self.ignored: set[str] = set()
        """Keys under which a message with a wrong signature was found."""
        self.lost_hint = "see the output of the command on host 0"
        """Hint of the error that calls raise if host 0 is lost."""
        self._silent_s: float | None = None
        self._notify = notify
        self._kept: dict[str, Any] = {}
        """Messages that are posted again if another program overwrites or deletes them."""

    def give_up(self, silent_s: float) -> None:
        """Make every later call raise: the store has not answered for so long, and a call would block for minutes."""
        self._silent_s = silent_s

    def post(self, key: str, value: Any, signer: Signer | None = None) -> None:
        """Write a message, as JSON; sign it with `signer` in place of the channel's."""
        self._set(key, to_text(value).encode(), signer or self.signer)

    def keep(self, key: str, value: Any) -> None:
        """Write a message that others wait for, and let `restore` write it again if it is overwritten."""
        self._kept[key] = value
        self.post(key, value)

    def restore(self) -> None:
        """Write messages again that another program has overwritten or deleted; called repeatedly."""
        for key, value in list(self._kept.items()):
            if not self.has(key):
                self.post(key, value)

    def release(self) -> None:
        """Stop keeping messages: nobody waits for them any more."""
        self._kept.clear()

    def has(self, key: str) -> bool:
        """Return whether a message was posted under a key."""
        return self._find(key, self.signer) is not None

    def find(self, key: str, kind: type[MessageT], signer: Signer | None = None) -> MessageT | None:
        """Return a message; None if none was posted. Raise `LaunchError` if it does not have this type."""
        content = self._find(key, signer or self.signer)
        if content is None:
            return None
        try:
            return from_text(content, kind)
        except (ValueError, RecursionError) as error:
            raise LaunchError(
                f"another host sent a message {key!r} that does not fit: {error}.",
                hint="install the same version of Paceline on all hosts",
            ) from None

    def read(self, key: str, kind: type[MessageT]) -> MessageT:
        """Return a message, which must have been posted; raise `LaunchError` if it does not have this type."""
        message = self.find(key, kind)
        if message is None:
            raise self._overwritten(key)
        return message

    def withdraw(self, key: str) -> None:
        """Delete a message."""
        self._call(lambda: self._store.delete_key(key))

    def wait(self, key: str, kind: type[MessageT], within_s: float) -> MessageT | None:
        """Wait until a message is posted; return it, or None if none was posted within the time limit."""
        deadline = time.monotonic() + within_s
        while (message := self.find(key, kind)) is None and time.monotonic() < deadline:
            self.restore()
            time.sleep(POLL_S)
        return message

    def send_files(self, key: str, root: Path) -> None:
        """Send all files below a folder, with paths relative to it."""
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        listing = []
        for number, path in enumerate(files):
            content = path.read_bytes()
            chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
            for part, chunk in enumerate(chunks):
                self._set(f"{key}-{number}-{part}", chunk, self.signer)
            listing.append(SentFile(path=str(path.relative_to(root)), chunks=len(chunks), bytes=len(content)))
        self.post(key, listing)

    def receive_files(self, key: str, root: Path, within: Iterable[Path]) -> None:
        """Write the files that were sent below `root`; files that exist already are kept.

        Paths from another host are not trusted: raise `LaunchError` for a path outside of the folders `within`.
        """
        folders = [folder.resolve() for folder in within]
        for number, entry in enumerate(self._listing(key)):
            try:
                self._receive_file(f"{key}-{number}", entry, root, folders)
            except (OSError, ValueError) as error:  # ValueError: a path with a null byte, or not UTF-8.
                raise LaunchError(
                    f"another host sent a file {entry.path!r}, which cannot be written: {error}.",
                    hint="check that you may write to the record's folder, and that all hosts belong to this launch",
                ) from None

    def _receive_file(self, key: str, entry: SentFile, root: Path, folders: list[Path]) -> None:
        target = (root / entry.path).resolve()
        if not any(folder in target.parents for folder in folders):
            raise LaunchError(
                f"another host sent a file for {target}, which is outside of the record's folders.",
                hint="check that all hosts belong to this launch; otherwise report this as a bug",
            )
        content = b"".join(self._take(f"{key}-{part}") for part in range(entry.chunks))
        if target.exists():
            return
        with full_disk_error(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as temporary:  # Ctrl-C leaves no partial file.
                temporary.write_bytes(content)

    def _listing(self, key: str) -> list[SentFile]:
        listing = self.read(key, list[SentFile])
        if any(entry.bytes < 0 or entry.chunks != math.ceil(entry.bytes / CHUNK_BYTES) for entry in listing):
            raise LaunchError(
                f"another host sent a list of files {key!r} with impossible sizes.",
                hint="check that all hosts belong to this launch; otherwise report this as a bug",
            )
        if sum(entry.bytes for entry in listing) > MAX_BYTES:
            raise LaunchError(
                f"another host tried to send more than {MAX_BYTES >> 30} GiB of records.",
                hint="train fewer steps, or write the record to a disk that all hosts share",
            )
        return listing

    def _take(self, key: str) -> bytes:
        content = self._find(key, self.signer)
        if content is None:
            raise self._overwritten(key)
        with suppress(RuntimeError):  # Deleting only frees memory.
            self._store.delete_key(key)
        return content

    def _set(self, key: str, content: bytes, signer: Signer) -> None:
        self._call(lambda: self._store.set(key, signer.sign(key, content)))  # type: ignore[arg-type]

    def _find(self, key: str, signer: Signer) -> bytes | None:
        message = self._call(lambda: read_now(self._store, key))
        if message is None:
            return None
        content = signer.verify(key, message)
        if content is None and key not in self.ignored:
            self.ignored.add(key)
            self._notify(
                f"warning: ignored a message {key!r} at {self.endpoint}, which is not signed with the token of this "
                "launch: another program writes to this port, or hosts have different tokens"
            )
        return content

    def _call(self, operation: Callable[[], ResultT]) -> ResultT:
        if self._silent_s is not None:
            raise self._connection_lost(f"it has not answered for {short_seconds(self._silent_s)}")
        try:
            return operation()
        except RuntimeError as error:
            raise self._connection_lost(str(error).splitlines()[0]) from None

    def _connection_lost(self, found: str) -> LaunchError:
        return LaunchError(f"lost the connection to host 0 at {self.endpoint}: {found}", hint=self.lost_hint)

    def _overwritten(self, key: str) -> LaunchError:
        return LaunchError(
            f"the message {key!r} at {self.endpoint} was deleted or overwritten by another program.",
            hint="keep other programs away from this port; docs/security.md says how",
        )
