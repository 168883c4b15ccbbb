"""Fields of config dataclasses: their docstrings, and reading them from TOML."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.config.setting import metadata_of, union_members
from paceline.errors import UsageError, unknown_name

ConfigT = TypeVar("ConfigT")


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, read from the source: Python does not keep them."""
    inherited = {name: doc for base in owner.__bases__ if is_dataclass(base) for name, doc in field_docs(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return inherited | field_docs_of_source(definition)


def own_fields_first(kind: type) -> list[Field[Any]]:
    """Return the fields of a config class, those that it inherits last."""
    return sorted(fields(kind), key=lambda one: one.name not in inspect.get_annotations(kind))


def field_docs_of_source(definition: ast.ClassDef) -> dict[str, str]:
    """Return the docstrings of fields of a parsed class, so that no module needs to be imported."""
    docs: dict[str, str] = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[statement.target.id] = inspect.cleandoc(after.value.value)
    return docs


def owners(*kinds: type) -> dict[str, type]:
    """Map each field name to the first config class that has it."""
    found: dict[str, type] = {}
    for kind in kinds:
        for own in fields(kind):
            found.setdefault(own.name, kind)
    return found


def read_toml(
    path: Path, *kinds: type, without: frozenset[str] = frozenset(), option: str = "--config"
) -> dict[str, Any]:
    """Read the settings of a TOML file as a flat dict; raise for keys that are no fields of `kinds`.

    `option` is the option that named the file.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Some editors write a byte order mark.
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.", hint=f"{option} takes a TOML file") from None
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise UsageError(f"{path} is not UTF-8 text: {found}.", hint="save the file as UTF-8") from None
    except ValueError as error:  # Of tomllib, or for a number with thousands of digits.
        raise UsageError(
            f"{path} is not valid TOML: {error}.", hint="write a setting per line, as key = value"
        ) from None
    except RecursionError:
        raise UsageError(f"{path} is not valid TOML: it is nested too deeply.") from None
    known = {name: kind for name, kind in owners(*kinds).items() if name not in without}
    settings: dict[str, Any] = {}
    for written, value in values.items():
        key = written.replace("-", "_")
        if key not in known:
            raise unknown_name(f"setting (in {path})", written, known)
        settings[key] = _setting(known[key], key, value, path)
    return settings


def _setting(kind: type, key: str, value: Any, path: Path) -> Any:
    """Convert a value from a TOML file to the type of its field."""
    expected = typing.get_type_hints(kind)[key]
    takes_numbers = metadata_of(kind)[key].numbers
    if takes_numbers:
        numbers = value if isinstance(value, list) else [value]
        if all(type(number) is int for number in numbers):
            return ",".join(map(str, numbers))
    if not _fits(value, expected):
        more = ", a whole number or a list of them" if takes_numbers else ""
        raise UsageError(f"{key} in {path} is {value!r}.", hint=f"it takes {_format_type(expected)}{more}")
    return value


TEXTS = tuple[str, ...]
"""Type of a setting that may be given several times."""


def _members(kind: Any) -> list[Any]:
    return [str if typing.get_origin(member) is Literal else member for member in union_members(kind)]


def _fits(value: object, kind: Any) -> bool:
    members = _members(kind)
    if kind == TEXTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool):
        return bool in members
    return isinstance(value, tuple(members)) or (isinstance(value, int) and float in members)


def _format_type(kind: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", TEXTS: "a list of texts"}
    return " or ".join(words[member] for member in _members(kind) if member in words)


def from_mapping(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build one config from a mapping, ignoring keys of other configs and values that are None (not given)."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in values.items() if name in names and value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
