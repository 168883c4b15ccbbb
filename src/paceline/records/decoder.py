"""The decoder of records: JSON becomes a typed model, or an error that names the place of what does not fit.

Records may come from an untrusted source. NaN, infinite numbers, deep nesting and lone surrogates are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.errors import RecordError
from paceline.formatting import short
from paceline.records.schema import SCHEMA_VERSION

ModelT = TypeVar("ModelT")


class ModelError(ValueError):
    """Valid JSON does not fit its model. The message names the place."""


class VersionedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that carries the schema version of its record."""

    schema: int = SCHEMA_VERSION


class _SchemaOnly(msgspec.Struct):
    schema: Any = None


def read_model(file: Path, kind: type[ModelT], name: str) -> ModelT:
    """Read a JSON file; `name` is the name of its content in errors, as in `summary.ranks[0]`."""
    content = read_bytes(file)
    if issubclass(kind, VersionedFile):
        _check_schema(_decoded(content, _SchemaOnly, file, name).schema, file)
    return _decoded(content, kind, file, name)


def _decoded(content: bytes, kind: type[ModelT], file: Path, name: str) -> ModelT:
    try:
        return decode(content, kind, name)
    except ModelError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    except ValueError as error:
        raise RecordError(f"{file} cannot be read: {error}.") from None


def decode(content: bytes, kind: type[ModelT], name: str) -> ModelT:
    """Decode JSON. Raise `ModelError` if it does not fit the model, another `ValueError` if it is not valid JSON."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ModelError(describe(str(error), name)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(str(error)) from None
    except msgspec.DecodeError as error:
        text = str(error).replace("Input data was truncated", "it is not valid JSON: it is cut short")
        raise ValueError(text.replace("JSON is malformed", "it is not valid JSON")) from None


def convert(value: Any, kind: type[ModelT], name: str, file: Path) -> ModelT:
    """Check a decoded value against a type; raise `RecordError` if it does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RecordError(f"{file} is damaged: {describe(str(error), name)}.") from None


def read_bytes(file: Path) -> bytes:
    """Return the content of a file; raise `RecordError` if that fails.

    A pipe or a device of that name is refused, since reading it might never end.
    """
    try:
        if not file.is_file() and not file.is_dir() and file.exists():
            raise RecordError(f"{file} cannot be read: it is not a regular file.")
        return file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from None


def exists(file: Path) -> bool:
    """Return whether a record has a file; raise `RecordError` if that cannot be found out.

    A folder or a broken link in its place counts as the file: reading it is then an error that names it.
    """
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the name contains a null byte.
        return False
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from None
    return True


def _check_schema(schema: Any, file: Path) -> None:
    if schema != SCHEMA_VERSION:
        raise RecordError(
            f"{file} has record schema {schema!r}; this version of Paceline reads only schema {SCHEMA_VERSION}.",
            hint="repeat the run with this version, or read the record with the version that wrote it",
        )


_WITH_PLACE = re.compile(r"(?P<text>.*) - at `\$(?P<place>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>.*)`, got `(?P<found>.*)`")
_OUT_OF_BOUNDS = re.compile(r"Expected `(?P<expected>\w+)` (?P<sign>[<>]=?) (?P<bound>\S+)")
_WRONG_LENGTH = re.compile(r"Expected `array` of length (?P<sign>[<>]=)? ?(?P<length>\d+)")
_UNKNOWN_CHOICE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a JSON object",
    "null": "null",
}
_SIGNS = {">=": ", {} or more", "<=": ", {} or less", ">": " above {}", "<": " below {}"}


def describe(message: str, name: str) -> str:
    """Return a message of msgspec as a plain clause: the place, what is there, what was expected."""
    with_place = _WITH_PLACE.fullmatch(message)
    text, place = (with_place["text"], name + with_place["place"]) if with_place else (message, name)
    if match := _MISSING.fullmatch(text):
        return f"{place} has no {match['field']}"
    if match := _WRONG_TYPE.fullmatch(text):
        return f"{place} is {_type_words(match['found'])}, not {_type_words(match['expected'])}"
    if match := _OUT_OF_BOUNDS.fullmatch(text):
        bound = _SIGNS[match["sign"]].format(short(float(match["bound"])))
        return f"{place} is not {_type_words(match['expected'])}{bound}"
    if match := _WRONG_LENGTH.fullmatch(text):
        length = {">=": "{} or more", "<=": "{} or less", None: "{}"}[match["sign"]].format(match["length"])
        return f"{place} is a list of a wrong length: it needs {length}"
    if match := _UNKNOWN_CHOICE.fullmatch(text):
        return f"{place} is {match['value']}, which is unknown"
    if text == "Number out of range":
        return f"{place} is too large"
    return f"{place} does not fit: {text[:1].lower()}{text[1:]}"


def _type_words(names: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in names.split(" | "))
