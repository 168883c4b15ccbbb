"""The data sets: what they are called, how their files get here, and how they become tensors.

Owns everything between a name such as `cifar10` or `synthetic:size=500` and a pair of `images.ImageSet` (train, test).
`prepare` runs once, in the launcher, before any process group: it checks and downloads, and imports no torch. `load`
runs in every rank: it never downloads and checks sizes alone. Adding a data set touches its file and one registry line.

    spec ──> prepare: checked, download, archive ──> files ──> load: one file per data set ──> images.ImageSet.batch
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.config import specs
from paceline.errors import unknown_name
from paceline.workloads.data.cifar10 import Cifar10
from paceline.workloads.data.digits import Digits
from paceline.workloads.data.svhn import Svhn
from paceline.workloads.data.synthetic import Synthetic

if TYPE_CHECKING:  # torch takes a second to import, and `prepare` does not need it
    from paceline.workloads.data.images import ImageSet

__all__ = ["REGISTRY", "DataSet", "check", "default_data_dir", "load", "prepare"]


class DataSet(Protocol):
    """A data set with its options: a dataclass, so that `specs.build` makes it from the user's words."""

    def prepare(self, data_dir: Path, *, progress: bool) -> None:
        """Makes sure that the files are in `data_dir` and intact; downloads what is missing. Imports no torch."""

    def load(self, data_dir: Path) -> tuple[ImageSet, ImageSet]:
        """Reads train and test from the files that `prepare` left in `data_dir`."""
        ...


REGISTRY: dict[str, type[DataSet]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "svhn": Svhn,
    "synthetic": Synthetic,
}
"""Every data set by the name a user writes; the first line of its docstring describes it."""


def check(spec: str, *, svhn_extra: bool = False) -> None:
    """Refuses a name or an option that no data set has; files are not looked at."""
    _parse(spec, svhn_extra)


def prepare(spec: str, *, data_dir: Path, svhn_extra: bool = False, progress: bool = True) -> None:
    """Makes sure that the files of `spec` are in `data_dir` and intact (md5); downloads what is missing."""
    _parse(spec, svhn_extra).prepare(data_dir, progress=progress)


def load(spec: str, *, data_dir: Path, svhn_extra: bool = False) -> tuple[ImageSet, ImageSet]:
    """Reads the train and test parts of `spec`; `prepare` has run before, so this only looks at sizes."""
    return _parse(spec, svhn_extra).load(data_dir)


def data_dir(written: str) -> Path:
    """The folder that `--data-dir` names, or the default one."""
    return Path(written).expanduser() if written else default_data_dir()


def default_data_dir() -> Path:
    """The user's cache folder, as the XDG base directory specification places it (it ignores relative paths)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "paceline"


def _parse(text: str, svhn_extra: bool) -> DataSet:
    spec = specs.Spec.parse(text)
    if spec.name not in REGISTRY:
        raise unknown_name("data set", spec.name, REGISTRY)
    options = spec.options | ({"extra": "true"} if svhn_extra else {})
    return specs.build(REGISTRY[spec.name], options, spec.name)
