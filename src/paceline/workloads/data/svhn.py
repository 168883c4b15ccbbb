"""`svhn`: Street View House Numbers, cropped digits (Netzer et al., 2011)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from paceline.workloads.data.checksums import check_intact, is_intact
from paceline.workloads.data.download import Remote, fetch_missing, fetch_once, missing_hint

if TYPE_CHECKING:
    from paceline.workloads.data.images import ImageSet

FOLDER = "svhn"
TRAIN = Remote(url="https://ufldl.stanford.edu/housenumbers/train_32x32.mat", md5="e26dedcc434d2e4c54c9b2d4a06d8373")
TEST = Remote(url="https://ufldl.stanford.edu/housenumbers/test_32x32.mat", md5="eb5a983be6a315427106f1b164d9cef3")
EXTRA = Remote(url="https://ufldl.stanford.edu/housenumbers/extra_32x32.mat", md5="a93ce644f1a588dc4d68dda5feec44a7")


@dataclass(frozen=True, kw_only=True, slots=True)
class Svhn:
    """Street View House Numbers, 3x32x32: 73,257 for training (cropped), 26,032 for testing."""

    augmented: ClassVar[bool] = True
    mirrors: ClassVar[bool] = False

    extra: bool = False
    """Train also on the 531,131 easier samples, which follow the others."""

    def prepare(self, data_dir: Path, *, progress: bool) -> None:
        """Check the files and download missing ones."""
        folder = data_dir / FOLDER

        def missing() -> list[Remote]:
            return [remote for remote in (*self._train, TEST) if not is_intact(folder / remote.name, remote.md5)]

        def fetch(remotes: Sequence[Remote]) -> None:
            for remote in remotes:
                fetch_once(remote, folder / remote.name, progress=progress)

        fetch_missing(missing, fetch, data_dir, progress=progress)

    def load(self, data_dir: Path) -> tuple[ImageSet, ImageSet]:
        """Read the two or three files."""
        return _read(data_dir / FOLDER, self._train), _read(data_dir / FOLDER, (TEST,))

    @property
    def _train(self) -> tuple[Remote, ...]:
        return (TRAIN, EXTRA) if self.extra else (TRAIN,)


def _read(folder: Path, remotes: tuple[Remote, ...]) -> ImageSet:
    import torch

    from paceline.workloads.data.images import ImageSet

    parts = [read_mat(folder / remote.name, remote) for remote in remotes]
    images = torch.empty((sum(len(labels) for _, labels in parts), 3, 32, 32), dtype=torch.uint8)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    first = 0
    for pixels, _ in parts:
        images[first : first + len(pixels)] = torch.from_numpy(pixels)
        first += len(pixels)
    return ImageSet(
        name="svhn",
        images=images,
        labels=labels,
        classes=10,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        crop_padding=4,
    )


def read_mat(path: Path, remote: Remote) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return pixels [N, 3, 32, 32], a view, and labels [N].

    Only the published file is read: scipy's reader crashes on some damaged files, and trusts the sizes in them.
    """
    check_intact(path, remote.md5, missing_hint=missing_hint(remote, path.parent))
    from scipy.io import loadmat

    content: dict[str, Any] = loadmat(path, variable_names=["X", "y"])
    pixels, labels = content["X"], content["y"].reshape(-1)
    return pixels.transpose(3, 2, 0, 1), labels.astype(np.int64) % 10  # The digit 0 has the label 10.
