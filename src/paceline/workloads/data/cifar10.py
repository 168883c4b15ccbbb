"""`cifar10`: CIFAR-10 in its binary version, which needs no pickle (Krizhevsky, 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.formatting import whole
from paceline.workloads.data.archive import ArchiveMember, extract
from paceline.workloads.data.checksums import check_intact, is_intact, unreadable
from paceline.workloads.data.download import Remote, fetch_missing, fetch_once, missing_hint

if TYPE_CHECKING:
    from paceline.workloads.data.images import ImageSet

ARCHIVE = Remote(url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530")
FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
}
TEST_FILES = {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"}
"""Published md5 of each file."""

_ROW_BYTES = 1 + 3 * 32 * 32
_FILE_BYTES = 10_000 * _ROW_BYTES
_AGAIN = "delete it to download it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cifar10:
    """CIFAR-10: photos in ten classes, 3x32x32; 50,000 for training (cropped, flipped), 10,000 for testing."""

    augmented: ClassVar[bool] = True
    mirrors: ClassVar[bool] = True

    def prepare(self, data_dir: Path, *, progress: bool) -> None:
        """Check the six files; extract missing ones from the archive, which is downloaded if necessary."""

        def missing() -> list[ArchiveMember]:
            files = TRAIN_FILES | TEST_FILES
            members = [ArchiveMember(f"{FOLDER}/{name}", data_dir / FOLDER / name, md5) for name, md5 in files.items()]
            return [member for member in members if not is_intact(member.target, member.md5)]

        def fetch(members: Sequence[ArchiveMember]) -> None:
            archive = data_dir / ARCHIVE.name
            downloaded = fetch_once(ARCHIVE, archive, progress=progress)
            extract(archive, members, member_bytes=_FILE_BYTES)
            if downloaded:  # An archive that the user provided is kept.
                archive.unlink()

        fetch_missing(missing, fetch, data_dir, progress=progress)

    def load(self, data_dir: Path) -> tuple[ImageSet, ImageSet]:
        """Read the six files."""
        return _read(data_dir, TRAIN_FILES), _read(data_dir, TEST_FILES)


def _read(data_dir: Path, names: dict[str, str]) -> ImageSet:
    import torch

    from paceline.workloads.data.images import ImageSet

    for name, md5 in names.items():
        check_intact(data_dir / FOLDER / name, md5, missing_hint=missing_hint(ARCHIVE, data_dir))
    files = [data_dir / FOLDER / name for name in names]
    images = torch.empty((sum(file.stat().st_size for file in files) // _ROW_BYTES, 3, 32, 32), dtype=torch.uint8)
    labels = torch.empty(len(images), dtype=torch.int64)
    first = 0
    for rows in map(torch.from_numpy, map(read_rows, files)):  # One after the other, in the same memory.
        last = first + len(rows)
        images[first:last] = rows[:, 1:].view(-1, 3, 32, 32)
        labels[first:last] = rows[:, 0]
        first = last
    return ImageSet(
        name="cifar10",
        images=images,
        labels=labels,
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        crop_padding=4,
        flip=True,
    )


def read_rows(path: Path) -> npt.NDArray[np.uint8]:
    """Return the rows of a file, each one label and the bytes of an image; raise if it has other content."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise unreadable(path, error) from None
    if not len(content) or len(content) % _ROW_BYTES:
        raise DataError(
            f"{path} has {whole(len(content))} bytes, which is not a multiple of {whole(_ROW_BYTES)} (one image).",
            hint=_AGAIN,
        )
    rows = content.reshape(-1, _ROW_BYTES)
    wrong = np.flatnonzero(rows[:, 0] > 9)
    if len(wrong):
        raise DataError(f"image {wrong[0]} of {path} has the label {rows[wrong[0], 0]}, not 0 to 9.", hint=_AGAIN)
    return rows
