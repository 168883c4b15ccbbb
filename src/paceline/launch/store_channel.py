"""How the processes that start ranks leave word for each other: JSON and files, by way of torch's store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.errors import LaunchError

POLL_S = 0.05
CHUNK_BYTES = 1 << 20
MOST_BYTES = 1 << 30
"""Of the files that one host sends after a job: more than any record has."""


class StoreChannel:
    """A board that all processes of a launch read and write. Whoever waits polls, so that an interrupt gets through."""

    def __init__(self, store: Store, where: str) -> None:
        """`where` is what the store is called in errors."""
        self._store = PrefixStore("paceline-fleet", store)
        self.where = where

    def post(self, key: str, value: Any) -> None:
        """Leaves word."""
        self._set(key, json.dumps(value).encode())

    def has(self, key: str) -> bool:
        """Whether somebody left word."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise self._lost(error) from None

    def read(self, key: str) -> Any:
        """What was left, which has to be there."""
        return json.loads(self._get(key))

    def count(self, key: str, by: int = 1) -> int:
        """How many have asked this, this time included."""
        try:
            return int(self._store.add(key, by))
        except RuntimeError as error:
            raise self._lost(error) from None

    def wait(self, key: str, within_s: float | None = None) -> bool:
        """Waits until somebody left word; False where nobody did in time."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while not self.has(key):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def send_files(self, key: str, root: Path) -> None:
        """Leaves all files below a folder."""
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        listing = []
        for number, path in enumerate(files):
            content = path.read_bytes()
            chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
            for part, chunk in enumerate(chunks):
                self._set(f"{key}-{number}-{part}", chunk)
            listing.append({"path": str(path.relative_to(root)), "chunks": len(chunks), "bytes": len(content)})
        self.post(key, listing)

    def receive_files(self, key: str, root: Path, within: Iterable[Path]) -> None:
        """Takes the files that were left, those that belong into the folders `within`, and none that is there already.

        What another host sends is not trusted to name places: whatever points elsewhere is refused.
        """
        folders = [folder.resolve() for folder in within]
        for number, entry in enumerate(self._listing(key)):
            target = (root / str(entry["path"])).resolve()
            if not any(folder in target.parents for folder in folders):
                raise LaunchError(f"a host sent a file for {target}, which is not in the record.")
            chunks = [self._take(f"{key}-{number}-{part}") for part in range(int(entry["chunks"]))]
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            temporary.write_bytes(b"".join(chunks))
            temporary.replace(target)  # There in full or not at all: Ctrl-C may come in between.

    def _listing(self, key: str) -> Iterator[dict[str, Any]]:
        listing = self.read(key)
        if sum(int(entry["bytes"]) for entry in listing) > MOST_BYTES:
            raise LaunchError(f"a host wants to send more than {MOST_BYTES >> 30} GiB of records.")
        yield from listing

    def _take(self, key: str) -> bytes:
        content = self._get(key)
        with suppress(RuntimeError):  # It only frees memory.
            self._store.delete_key(key)
        return content

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._lost(error) from None

    def _get(self, key: str) -> bytes:
        try:
            value: bytes = self._store.get(key)
        except RuntimeError as error:
            raise self._lost(error) from None
        return value

    def _lost(self, error: RuntimeError) -> LaunchError:
        found = str(error).splitlines()[0]
        return LaunchError(f"lost contact with the first host at {self.where}: {found}", hint="see what it printed")
