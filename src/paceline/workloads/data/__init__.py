"""Data sets: their names, the download and check of their files, and loading them as tensors.

The package turns a name such as `cifar10` or `synthetic:size=500` into a pair of `images.ImageSet` (train, test).
`prepare` runs once, in the launcher, before any process group: it checks and downloads files, and does not import
torch. `load` runs on every rank and never downloads. It checks files too, since those of another host may differ; a
file that was checked before costs a look at its size and time. A new data set needs a file and a line in the registry.

    spec ──> prepare: checksums, download, archive ──> files ──> load: one file per data set ──> images.ImageSet.batch
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import platformdirs

from paceline.config import specs
from paceline.errors import unknown_name
from paceline.workloads.data.cifar10 import Cifar10
from paceline.workloads.data.digits import Digits
from paceline.workloads.data.svhn import Svhn
from paceline.workloads.data.synthetic import Synthetic

if TYPE_CHECKING:  # torch takes a second to import, and `prepare` does not need it
    from paceline.workloads.data.images import ImageSet

__all__ = ["REGISTRY", "DataSet", "check", "default_data_dir", "has_mirrors", "is_augmented", "load", "prepare"]


class DataSet(Protocol):
    """Data set with its options: a dataclass, which `specs.build` creates from the user's text."""

    augmented: ClassVar[bool]
    """Whether its training images are augmented."""
    mirrors: ClassVar[bool]
    """Whether the mirror image of an image has the same class."""

    def prepare(self, data_dir: Path, *, progress: bool) -> None:
        """Check the files in `data_dir` and download missing ones, without importing torch."""

    def load(self, data_dir: Path) -> tuple[ImageSet, ImageSet]:
        """Read train and test data from the files that `prepare` has checked."""
        ...


REGISTRY: dict[str, type[DataSet]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "svhn": Svhn,
    "synthetic": Synthetic,
}
"""Data sets by name; the first line of a docstring is the description for users."""


def check(spec: str) -> None:
    """Raise if the name or an option of a data set is unknown; files are not read."""
    _parse(spec)


def has_mirrors(spec: str) -> bool:
    """Whether a mirror image of `spec` has the class of the image."""
    return _parse(spec).mirrors


def is_augmented(spec: str) -> bool:
    """Whether the training images of `spec` are augmented."""
    return _parse(spec).augmented


def prepare(spec: str, *, data_dir: Path, progress: bool = True) -> None:
    """Check the files of `spec` in `data_dir` by their md5, and download missing ones."""
    _parse(spec).prepare(data_dir, progress=progress)


def load(spec: str, *, data_dir: Path) -> tuple[ImageSet, ImageSet]:
    """Return the train and test parts of `spec`; a file that is missing or not the published one is an error."""
    return _parse(spec).load(data_dir)


def data_dir(written: str) -> Path:
    """Return the folder that `--data-dir` names, or the default folder."""
    return Path(written).expanduser() if written else default_data_dir()


def default_data_dir() -> Path:
    """Return the user's cache folder: `~/.cache/paceline`, or a folder in `XDG_CACHE_HOME`."""
    return platformdirs.user_cache_path("paceline")


def _parse(text: str) -> DataSet:
    spec = specs.Spec.parse(text)
    if spec.name not in REGISTRY:
        raise unknown_name("data set", spec.name, REGISTRY)
    return specs.build(REGISTRY[spec.name], spec.options, spec.name)
