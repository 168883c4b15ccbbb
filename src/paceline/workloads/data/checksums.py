"""Files with a published md5: checked before use, and written completely or not at all.

A check of CIFAR-10 takes 0.27 s, so its result is stored in `.verified.json` beside the files, with each file's size
and modification time. A changed file is checked again. An md5 detects truncated and mixed-up files; against tampering
it is only as good as the publisher's checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import DataError

CACHE_NAME = ".verified.json"


def is_intact(path: Path, md5: str) -> bool:
    """Return whether the file exists; raise if it differs from the published one."""
    try:
        stamp = _stamp(path, md5)  # Before reading, so that a file that changes meanwhile is checked again.
        if _read_cache(path.parent).get(path.name) == stamp:
            return True
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    if found != md5:
        raise wrong_checksum(path, expected=md5, found=found, hint="delete it to download it again")
    _add_to_cache(path, stamp)
    return True


def check_intact(path: Path, md5: str, *, missing_hint: str) -> None:
    """Raise unless the file exists and is the published one.

    A rank calls this before it reads a file: the launcher may have checked one on another host.
    """
    if not is_intact(path, md5):
        raise DataError(f"{path} is missing.", hint=missing_hint)


def write_checked(path: Path, chunks: Iterable[bytes], md5: str, *, hint: str) -> None:
    """Write `chunks` beside `path` and rename the file if its md5 is right; otherwise delete it and raise.

    The caller holds the lock of the data folder. So the name of the unfinished file can always be the same, and a file
    that a killed process has left is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with unfinished.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != md5:
            raise wrong_checksum(path, expected=md5, found=digest.hexdigest(), hint=hint)
        unfinished.replace(path)
    except BaseException:  # Includes Ctrl-C.
        unfinished.unlink(missing_ok=True)
        raise
    _add_to_cache(path, _stamp(path, md5))


def wrong_checksum(path: Path, *, expected: str, found: str, hint: str) -> DataError:
    """Return the error for a file that differs from the published one."""
    return DataError(f"{path} has the md5 {found}, not {expected} as published.", hint=hint)


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(f"{path} cannot be read: {error.strerror}.", hint="make sure that it is a file that you may read")


def _stamp(path: Path, md5: str) -> dict[str, object]:
    """Return the size, modification time and md5 under which a check is stored."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "md5": md5}


def _read_cache(folder: Path) -> dict[str, object]:
    """Return the stored checks by file name; empty if there are none."""
    try:
        cache = json.loads((folder / CACHE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return cache if isinstance(cache, dict) else {}


def _add_to_cache(path: Path, stamp: dict[str, object]) -> None:
    """Store the check of one file; if the folder is read-only, the file is checked again next time."""
    cache = _read_cache(path.parent) | {path.name: stamp}
    with contextlib.suppress(OSError):
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=CACHE_NAME)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(cache, file, indent=1)
            Path(unfinished).replace(path.parent / CACHE_NAME)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
