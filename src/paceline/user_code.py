"""Find and import the user's modules from the current folder; digests of sources. Free of torch."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from paceline.errors import UsageError, WorkloadError

_PYTHON = str(Path(os.__file__).parent)
_PACKAGE = str(Path(__file__).parent) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"


def is_of_torch(file: str) -> bool:
    """Return whether a source file belongs to torch."""
    return _TORCH in file


def is_of_library(file: str) -> bool:
    """Return whether a source file belongs to torch or to Python itself; all others are Paceline's or the user's."""
    return file.startswith("<") or is_of_torch(file) or (file.startswith(_PYTHON) and "site-packages" not in file)


def is_of_user(file: str) -> bool:
    """Return whether a source file is the user's, or of a package that the user's code calls."""
    return not (file.startswith(_PACKAGE) or is_of_library(file))


def check_module(name: str) -> None:
    """Raise `UsageError` if a module does not exist. Does not import the module, but imports its parent packages."""
    if "/" in name or name.endswith(".py") or not name:
        raise UsageError(
            f"{name!r} is not a module name.", hint=f"write it as in a Python import: {Path(name).stem}:NAME"
        )
    _add_cwd_to_sys_path()
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: modules without a spec, for example __main__.
        found = False
    except Exception as error:
        raise _import_error(name, error) from None
    if not found:
        raise UsageError(
            f"there is no module {name!r} in {Path.cwd()}.",
            hint="run the command in the folder that contains the module",
        )


def source_digest(name: str) -> str | None:
    """Return a digest of a module's source file; None if it has no file."""
    _add_cwd_to_sys_path()
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else file_digest(Path(found.origin))


def file_digest(path: Path) -> str | None:
    """Return a digest of a file's content; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


@functools.cache
def sources_digest() -> str:
    """Return a digest of Paceline's own sources, which may differ between checkouts of the same version."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def import_module(name: str) -> ModuleType:
    """Import a module; raise `WorkloadError` with the traceback of the user's code if that fails."""
    _add_cwd_to_sys_path()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_error(name, error) from None


def _add_cwd_to_sys_path() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _import_error(name: str, error: Exception) -> WorkloadError:
    found = f"importing {name!r} failed: {type(error).__name__}: {error}"
    return WorkloadError(found, detail=traceback.format_exc().rstrip())
