"""`digits`: 1,797 handwritten digits that are part of the package, so that a first run needs no download."""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from paceline.errors import DataError
from paceline.workloads.data.upscale import upscale

if TYPE_CHECKING:
    from paceline.workloads.data.images import ImageSet

FILE = Path(__file__).with_name("digits.bin.xz")
"""Rows of one label byte and 64 pixel bytes (0..16); digits.txt has source, licence and attribution."""
SHA256 = "d8121ca7764eccfaef1df6bc4589c6527c58fcbab0cb1b079e79f97f8cb8219a"
"""Checksum of the decompressed rows: the compressed bytes depend on the version of xz."""

_SIDE, _GREY_LEVELS = 8, 16
_TEST_EVERY = 5
MEAN, STD = 0.3052, 0.3241
"""Mean and deviation of the training pixels after up-scaling; the three channels are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """Handwritten digits, 8x8 scaled up to 3x32x32: 1,437 for training, every fifth one (360) for testing."""

    augmented: ClassVar[bool] = False
    mirrors: ClassVar[bool] = False

    def prepare(self, data_dir: Path, *, progress: bool) -> None:
        """Do nothing: the file is part of the package."""

    def load(self, data_dir: Path) -> tuple[ImageSet, ImageSet]:
        """Read the file of the package."""
        import torch

        from paceline.workloads.data.images import ImageSet

        del data_dir  # The file is in the package.
        rows = np.frombuffer(_read(), dtype=np.uint8).reshape(-1, 1 + _SIDE * _SIDE)
        grids = rows[:, 1:].reshape(-1, 1, _SIDE, _SIDE).astype(np.float32)
        grey = (upscale(grids, 32, 32) * (255 / _GREY_LEVELS)).round().astype(np.uint8)
        images = torch.from_numpy(grey).expand(-1, 3, -1, -1)
        labels = torch.from_numpy(rows[:, 0].astype(np.int64))
        is_test = torch.arange(len(labels)) % _TEST_EVERY == 0

        def part(chosen: torch.Tensor) -> ImageSet:
            return ImageSet(
                name="digits",
                images=images[chosen],
                labels=labels[chosen],
                classes=10,
                mean=(MEAN,) * 3,
                std=(STD,) * 3,
            )

        return part(~is_test), part(is_test)


def _read() -> bytes:
    try:
        rows = lzma.decompress(FILE.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{FILE} cannot be read: {error}.", hint="install paceline again") from error
    found = hashlib.sha256(rows).hexdigest()
    if found != SHA256:
        raise DataError(f"{FILE} has the sha256 {found}, not {SHA256}.", hint="install paceline again")
    return rows
