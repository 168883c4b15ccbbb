"""Build dataclasses from decoded JSON; an error names the value that does not fit."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class DecodeError(Exception):
    """A value has the wrong type. The message names the value's path and the expected type."""


def build(kind: type[T], value: Any, place: str = "it") -> T:
    """Build a dataclass, and the dataclasses nested in it, from a mapping of its fields.

    Fields with a default may be missing. Raises `DecodeError` for missing, unknown or wrongly typed fields.
    """
    if not isinstance(value, dict):
        raise DecodeError(f"{place} is not a JSON object")
    fields = {field.name: _has_default(field) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    missing = sorted(name for name, has_default in fields.items() if name not in value and not has_default)
    unknown = sorted(value.keys() - fields.keys())
    if missing or unknown:
        raise DecodeError(
            f"{place} has no {missing[0]}" if missing else f"{place} has {unknown[0]!r}, which is unknown"
        )
    hints = typing.get_type_hints(kind)
    return kind(**{name: _fit(hints[name], value[name], f"{place}.{name}") for name in fields if name in value})


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _fit(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [member for member in arguments if member is not type(None)]
        return None if value is None else _fit(inner, value, place)
    if origin is Literal:
        return _checked(value in arguments, value, place, " or ".join(map(repr, arguments)))
    if origin is list:
        _checked(isinstance(value, list), value, place, "a list")
        return [_fit(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        _checked(isinstance(value, dict), value, place, "a JSON object")
        return {key: _fit(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type[Any], kind), value, place)
    if kind is Any:
        return value
    return _plain(kind, value, place)


def _plain(kind: type, value: Any, place: str) -> Any:
    if kind is float:
        _checked(isinstance(value, int | float) and not isinstance(value, bool), value, place, "a number")
        return float(value)
    descriptions = {int: "a whole number", str: "text", bool: "true or false"}
    return _checked(type(value) is kind, value, place, descriptions[kind])


def _checked(is_valid: bool, value: Any, place: str, expected: str) -> Any:
    if not is_valid:
        raise DecodeError(f"{place} is {value!r}, not {expected}")
    return value
