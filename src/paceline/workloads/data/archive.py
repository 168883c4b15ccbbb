"""Extraction of named files from a tar archive, and of nothing else.

`extractall` writes to any path that the archive contains. Here the archive supplies only bytes: a member is extracted
if it is a regular file of exactly the requested name and at most the expected size, to the path that the caller gives.
It must also pass Python's data filter, which refuses paths that lead out of the folder, links and devices.
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
    """File to extract from an archive."""

    name: str
    """Exact name inside the archive."""
    target: Path
    """Path to write to."""
    md5: str
    """Published md5 of the content."""


def extract(archive: Path, members: Sequence[ArchiveMember], *, member_bytes: int) -> None:
    """Write each member, complete and with the right md5, to its target; raise if one is missing or too large."""
    wanted = {member.name: member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            while wanted and (entry := tar.next()) is not None:
                if entry.name not in wanted or not entry.isreg() or entry.size > member_bytes:
                    continue
                content = tar.extractfile(entry)
                assert content is not None, "a regular file has content"
                member = wanted.pop(entry.name)
                if hasattr(tarfile, "data_filter"):  # From Python 3.11.4 on.
                    tarfile.data_filter(entry, str(member.target.parent))
                write_checked(
                    member.target, _chunks(content), member.md5, hint=f"delete {archive} to download it again"
                )
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}.", hint=_HINT) from error
    if wanted:
        raise DataError(f"{archive} does not contain {', '.join(sorted(wanted))}.", hint=_HINT)


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK_BYTES):
        yield chunk
