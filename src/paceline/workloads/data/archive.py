"""Takes named files out of a tar archive, and nothing else.

`extractall` writes wherever the archive says. Here the archive only supplies bytes: a member counts if it is a regular
file with exactly the name that was asked for and no larger than it can be, and it goes where the caller says.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import DataError
from paceline.workloads.data.checksums import write_checked

_CHUNK_BYTES = 1 << 20
_HINT = "delete it to download it again"


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file wanted from an archive."""

    name: str
    """Its name inside the archive, exactly."""
    target: Path
    """Where it goes."""
    md5: str
    """Of its content, as published."""


def extract(archive: Path, members: Sequence[ArchiveMember], *, member_bytes: int) -> None:
    """Writes each of `members` to its target, whole and with the right md5, or raises; none exceeds `member_bytes`."""
    wanted = {member.name: member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            while wanted and (entry := tar.next()) is not None:
                if entry.name not in wanted or not entry.isreg() or entry.size > member_bytes:
                    continue
                content = tar.extractfile(entry)
                assert content is not None, "a regular file has content"
                member = wanted.pop(entry.name)
                write_checked(
                    member.target, _chunks(content), member.md5, hint=f"delete {archive} to download it again"
                )
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}.", hint=_HINT) from error
    if wanted:
        raise DataError(f"{archive} does not hold {', '.join(sorted(wanted))}.", hint=_HINT)


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK_BYTES):
        yield chunk
