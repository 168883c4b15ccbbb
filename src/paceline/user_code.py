"""Finds and imports the user's own modules, from the folder the user is in. Free of torch."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from paceline.errors import UsageError, WorkloadError


def check_module(name: str) -> None:
    """Refuses a module that is not there, without running it (but for the package it is in)."""
    if "/" in name or name.endswith(".py") or not name:
        raise UsageError(
            f"{name!r} is not the name of a module.", hint=f"write it as python imports it: {Path(name).stem}:NAME"
        )
    _look_here_first()
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: __main__ and its like.
        found = False
    except Exception as error:
        raise _failed(name, error) from None
    if not found:
        raise UsageError(f"there is no module {name!r} in {Path.cwd()}.", hint="run from the folder it is in")


def source_digest(name: str) -> str | None:
    """Tells two versions of a module's file apart; None where it has none."""
    _look_here_first()
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else file_digest(Path(found.origin))


def file_digest(path: Path) -> str | None:
    """Tells two versions of a file apart; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def import_module(name: str) -> ModuleType:
    """Imports a module; what goes wrong inside it is shown with the user's own traceback."""
    _look_here_first()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _failed(name, error) from None


def _look_here_first() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _failed(name: str, error: Exception) -> WorkloadError:
    found = f"importing {name!r} failed: {type(error).__name__}: {error}"
    return WorkloadError(found, detail=traceback.format_exc().rstrip())
