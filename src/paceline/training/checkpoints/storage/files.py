"""Files of a checkpoint: written so that they are on the disk before they are relied on, and read with their checksum.

safetensors notices a truncated file but not a flipped bit, so every file has a checksum (XXH3-64). `checkpoint.json`
contains those of the others, and one over itself.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.records.checkpoint import (
    CHECKPOINT_FILE,
    FORMAT_VERSION,
    TENSOR_FILES,
    CheckpointContent,
    CheckpointFile,
    CheckpointIndex,
    StoredFile,
)
from paceline.records.decoder import decode

CHUNK_BYTES = 1 << 20
IndexT = TypeVar("IndexT", bound=CheckpointIndex)


class DamagedError(Exception):
    """A checkpoint that cannot be used. The message is a clause: "model.safetensors is missing"."""


class OtherFormatError(DamagedError):
    """A checkpoint of another version of the format."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write tensors as they are on disk (`tensors.on_disk`); return when the disk has them. Raise OSError."""
    file.touch(exist_ok=False)
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file(dict(tensors), file)
    except SafetensorError as error:
        raise _os_error(error) from None
    file.chmod(mode)  # safetensors makes files that only their owner can read.
    with file.open("rb") as content:
        os.fsync(content.fileno())
        return _stored(content)


def write_content(file: Path, content: CheckpointContent) -> None:
    """Write `checkpoint.json` with its checksum; return when the disk has it. Raise OSError."""
    encoded = msgspec.json.encode(content)
    whole = CheckpointFile(
        format=FORMAT_VERSION, checksum=xxhash.xxh3_64_hexdigest(encoded), checkpoint=msgspec.Raw(encoded)
    )
    with file.open("xb") as stream:
        stream.write(msgspec.json.encode(whole) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names in a folder. Raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some file systems keep names without being asked.
            raise
    finally:
        os.close(descriptor)


def read_content(folder: Path, kind: type[IndexT]) -> IndexT:
    """Read `checkpoint.json`, or a part of it; raise DamagedError."""
    with _opened(folder / CHECKPOINT_FILE) as stream:
        content = stream.read()
    if not content:
        raise DamagedError(f"{CHECKPOINT_FILE} is empty")
    try:
        whole = decode(content, CheckpointFile, "checkpoint.json")
        if whole.format != FORMAT_VERSION:
            raise OtherFormatError(
                f"it has format {whole.format}, and this version of Paceline reads format {FORMAT_VERSION}"
            )
        raw = bytes(whole.checkpoint)
        if xxhash.xxh3_64_hexdigest(raw) != whole.checksum:
            raise DamagedError(f"the checksum of {CHECKPOINT_FILE} differs")
        return decode(raw, kind, "checkpoint")
    except ValueError as error:
        raise DamagedError(f"{CHECKPOINT_FILE} is damaged: {error}") from None


def check_sizes(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Raise DamagedError if a file of tensors is missing or has another size; reads no content."""
    for name, stored in files.items():
        with _opened(_tensor_file(folder, name)) as stream:
            _check_size(stream, name, stored)


def read_tensors(folder: Path, files: Mapping[str, StoredFile]) -> dict[str, dict[str, Tensor]]:
    """Read the files of tensors into memory of their own, by name of the file; raise DamagedError."""
    found = {}
    for name, stored in files.items():
        file = _tensor_file(folder, name)
        with _opened(file) as stream:
            _check_size(stream, name, stored)
            if _stored(stream) != stored:
                raise DamagedError(f"the checksum of {name} differs")
        try:
            found[name] = load_file(file, backend="pread")  # The default would map the file, which may be removed.
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedError(f"{name} cannot be read: {' '.join(str(error).split())}") from None
    return found


def _tensor_file(folder: Path, name: str) -> Path:
    if name not in TENSOR_FILES:  # Also keeps a name from leaving the folder.
        raise DamagedError(f"it lists {name!r}, which is not a file of a checkpoint")
    return folder / name


def _check_size(stream: BinaryIO, name: str, stored: StoredFile) -> None:
    size = os.fstat(stream.fileno()).st_size
    if size != stored.bytes:
        raise DamagedError(f"{name} has {size} bytes instead of {stored.bytes}")


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file; raise DamagedError for anything else, and for an error while it is read."""
    try:
        kind = file.lstat().st_mode
        if not stat.S_ISREG(kind):
            raise DamagedError(f"{file.name} is {_kind_name(kind)}, not a file")
        with file.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise DamagedError(f"{file.name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{file.name} cannot be read: {error.strerror}") from None


def _kind_name(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a symbolic link" if stat.S_ISLNK(mode) else "a special file"


def _stored(stream: BinaryIO) -> StoredFile:
    """Return size and checksum of a file's content, read in chunks: hashing holds the GIL."""
    digest, size = xxhash.xxh3_64(), 0
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return StoredFile(size, digest.hexdigest())


def _os_error(error: SafetensorError) -> OSError:
    """Return the error of the system that safetensors passes on as text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error))


def describe_os_error(error: OSError) -> str:
    """Return the reason of an error of the system, as in "No space left on device"."""
    if isinstance(error, FileExistsError):  # Of `mkdir`, which accepts a folder that exists.
        return f"{error.filename} is not a folder"
    return error.strerror or str(error)


def hint_for(error: OSError) -> str:
    """Return the action that makes writing possible again."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk, or choose another folder"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f), or choose another folder"
    return "make the folder writable, or choose another one"
