"""File with the choices of `--precision auto`, so that all runs of a folder have the same, after a restart too."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import RecordError
from paceline.records.decoder import VersionedFile, exists, read_model
from paceline.records.precision import PrecisionChoice
from paceline.records.writer import write_json


class PrecisionFile(VersionedFile, frozen=True, kw_only=True):
    """Content of `precision.json`."""

    choices: dict[str, PrecisionChoice]
    """Choice by the settings that it depends on, as text."""


def read_choices(file: Path) -> dict[str, PrecisionChoice]:
    """Return the choices in a file; none if there is no such file, or if it is damaged."""
    try:
        return read_model(file, PrecisionFile, "precision").choices if exists(file) else {}
    except RecordError:  # They are made again.
        return {}


def add_choice(file: Path, key: str, choice: PrecisionChoice) -> None:
    """Add a choice to a file."""
    write_json(file, PrecisionFile(choices=read_choices(file) | {key: choice}))
