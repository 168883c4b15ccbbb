"""Parse `name:key=value,key=value`, the notation of a strategy or a data set with options."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.config.setting import union_members
from paceline.errors import UsageError, unknown_name, wrong_choice

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class Spec:
    """A name and its options as text, not yet converted."""

    name: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse `ddp`, `ddp:bucket_mb=1`, or user code as `module:Class` or `module:Class:key=value`."""
        name, *rest = text.strip().split(":")
        if rest and "=" not in rest[0]:
            name = f"{name}:{rest.pop(0)}"
        if not name or name.endswith(":") or len(rest) > 1:
            raise UsageError(
                f"{text!r} is not a name with options.", hint="write it as name or name:key=value,key=value"
            )
        options: dict[str, str] = {}
        for item in rest[0].split(",") if rest else []:
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"the option {item!r} in {text!r} has no value.", hint="write it as key=value")
            options[key.strip()] = value.strip()
        return cls(name, options)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}:{','.join(f'{key}={value}' for key, value in self.options.items())}"


def split_list(text: str) -> list[str]:
    """Split `a,b:x=1,y=2,c` into specs: a comma before `key=` separates options, any other separates specs."""
    items: list[str] = []
    for part in text.split(","):
        inside_options = items and ":" in items[-1] and "=" in part and ":" not in part.split("=")[0]
        if inside_options:
            items[-1] += f",{part}"
        elif part.strip():
            items.append(part.strip())
    return items


def build(options_type: type[OptionsT], values: dict[str, str], owner: str) -> OptionsT:
    """Build the options dataclass from text; raise for an unknown option or a value of the wrong type."""
    fields = {field.name: field for field in dataclasses.fields(options_type)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(options_type)
    converted: dict[str, object] = {}
    for key, text in values.items():
        if key not in fields:
            if not fields:
                raise UsageError(f"{owner} takes no options, but {key}={text} was given.")
            raise unknown_name(f"{owner} option", key, fields)
        converted[key] = convert(hints[key], text, f"{owner}:{key}")
    return options_type(**converted)


def check_positive(owner: str, options: object, *names: str) -> None:
    """Raise for options that are not positive numbers."""
    for name in names:
        if not getattr(options, name) > 0:
            raise UsageError(f"{owner}:{name} is {getattr(options, name)}.", hint="it must be more than 0")


_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


def convert(kind: Any, text: str, where: str) -> object:
    """Convert text to `bool`, `int`, `float`, `str`, `tuple[int, ...]` (written 3x32x32) or an optional of these."""
    members = union_members(kind)
    (kind,) = [member for member in members if member is not type(None)]
    if text.lower() == "none" and type(None) in members and "none" not in typing.get_args(kind):
        return None
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise wrong_choice(where, text, choices)
        return text
    try:
        if kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if kind == tuple[int, ...]:
            return tuple(int(part) for part in text.split("x"))
        if kind in (int, float, str):
            return kind(text)
    except ValueError:
        expected = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "numbers as 3x32x32")
        raise UsageError(f"{where}={text!r} is not valid.", hint=f"it takes {expected}") from None
    raise TypeError(f"{where} has the type {kind}, which cannot be written on a command line")
